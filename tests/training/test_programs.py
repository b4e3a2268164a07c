"""Public programs, unmodified, train on replicas what they train on one device."""

import importlib
import pkgutil

import keras
import pytest

from tests.training import programs
from tests.training.programs import outcomes

for _module in pkgutil.iter_modules(programs.__path__):
    importlib.import_module(f"{programs.__name__}.{_module.name}")
ALL = programs.PROGRAMS
MARKS = {"quick": [], "slow": [pytest.mark.slow], "exhaustive": [pytest.mark.exhaustive]}
PARAMETERS = [
    pytest.param(program, id=program.name, marks=MARKS[program.run])
    for program in ALL
    if keras.backend.backend() in program.backends
]
REPLICAS = [2, *(pytest.param(replicas, marks=pytest.mark.exhaustive) for replicas in (3, 8))]


@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("program", PARAMETERS)
def test_a_program_trains_as_on_one_device(program, replicas):
    outcome = outcomes.outcome(program, replicas)
    assert outcome.verdict == "equal", outcome


def test_every_program_has_a_name_of_its_own():
    assert len({program.name for program in ALL}) == len(ALL) >= 120
