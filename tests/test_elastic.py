"""A run goes on with any other number of replicas and processes, to the same weights.

tests/test_environments.py runs this on JAX.
"""

import dataclasses

import pytest

from kdpkit.checkpoints import CheckpointDirectory, Position
from tests import elastic
from tests.elastic import ON_JAX, SIGKILL_ALL, Leg

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:Nothing is left to train"),
    pytest.mark.filterwarnings("ignore:A large variable stays complete"),
]
CUT = {"shard": "weights"} if ON_JAX else {}
SCHEDULES = {
    "plateau": [Leg(2, "SIGTERM", 4, **CUT), Leg(1, "error", 2, save_freq=1), Leg(3)],
    "schedule": [
        *(Leg(1, "request", 1, save_freq="epoch"), Leg(1, "SIGTERM", 3)),
        *(Leg(2, "error", 4, **CUT), Leg(2)),
    ],
    "own step": [Leg(2, "SIGTERM", 3, **CUT), Leg(3, "error", 4, save_freq=1), Leg(1)],
}


@pytest.fixture(autouse=True)
def _small_variables_are_cut(monkeypatch):
    if ON_JAX:
        monkeypatch.setattr("kdpkit.sharding._shards.SMALL", 1)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(name, marks=[] if ON_JAX and name == "plateau" else pytest.mark.slow)
        for name in SCHEDULES
    ],
)
def test_a_run_goes_on_with_other_replicas(program, tmp_path):
    elastic.assert_ends_as_undisturbed(program, SCHEDULES[program], tmp_path)


@pytest.mark.jax
@pytest.mark.parametrize("program", ["plateau", pytest.param("schedule", marks=pytest.mark.slow)])
def test_a_run_goes_on_where_other_devices_share_the_model(program, tmp_path):
    legs = [
        Leg(2, "SIGTERM", 3, model=2, save_freq=1),
        Leg(1, "error", 2, model=4, save_freq=1),
        Leg(3, "request", 2, **CUT),
        Leg(4, model=2, **CUT),
    ]
    elastic.assert_ends_as_undisturbed(program, legs, tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("mark")
def test_a_run_goes_on_in_one_or_two_processes_that_are_stopped_and_killed(tmp_path):
    legs = [
        Leg(1, "request", 2),
        Leg(4, "SIGTERM", 2, processes=2, **CUT),
        Leg(2, "SIGKILL", 0.3, processes=1, save_freq=1),
        *([Leg(2, "request", 1, processes=2, model=2)] if ON_JAX else []),
        Leg(1),
    ]
    elastic.assert_ends_as_undisturbed("plateau", legs, tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("mark")
def test_own_steps_of_two_processes_that_are_killed_are_resumed_bit_for_bit(tmp_path):
    together, ended = Leg(4, processes=2, save_freq=1, **CUT), Leg(4)
    legs, killed = [together, ended], dataclasses.replace(together, end=SIGKILL_ALL, at=7)
    found = elastic.assert_ends_as_undisturbed("own step", legs, tmp_path / "undisturbed")
    elastic.lived_all("own step", [killed], tmp_path / "killed")
    assert CheckpointDirectory(tmp_path / "killed").latest().position >= Position(1, 0)
    resumed = elastic.lived_all("own step", legs, tmp_path / "killed")
    assert resumed["weights"] == found["weights"]
