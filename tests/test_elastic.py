"""A run goes on with any other number of replicas and processes, to the same weights.

Schedules are drawn from a seed, which the name of a test and the note of its failure have.
tests/test_environments.py runs this on JAX.
"""

import pytest

from tests import elastic

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:Nothing is left to train"),
    pytest.mark.filterwarnings("ignore:A large variable stays complete"),
]


@pytest.fixture(autouse=True)
def _small_variables_are_cut(monkeypatch):
    if elastic.ON_JAX:
        monkeypatch.setattr("kdpkit._internal.shards.SMALL", 1)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(0, marks=[] if elastic.ON_JAX else pytest.mark.slow),
        *(pytest.param(s, marks=pytest.mark.slow) for s in range(1, len(elastic.PROGRAMS))),
    ],
)
def test_a_run_goes_on_with_one_replica_more_or_less(seed, tmp_path):
    elastic.run(seed, tmp_path, most_legs=2, most_replicas=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(200))
def test_a_run_goes_on_with_any_replicas(seed, tmp_path):
    elastic.run(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("mark")
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(s, marks=pytest.mark.exhaustive) for s in range(1, 20))]
)
def test_a_run_goes_on_in_one_or_two_processes_that_are_stopped_and_killed(seed, tmp_path):
    ends = ("SIGTERM", "request", "SIGKILL")
    elastic.run(
        seed,
        tmp_path,
        live=elastic.lived_by_children,
        most_legs=4,
        most_replicas=4,
        processes=(1, 2),
        ends=ends,
    )
