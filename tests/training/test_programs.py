"""Public programs, unmodified, train on replicas what they train on one device, or are stopped."""

import importlib
import pkgutil

import keras
import pytest

from tests.training import programs
from tests.training.programs import outcomes

MODULES = [
    importlib.import_module(f"{programs.__name__}.{module.name}")
    for module in pkgutil.iter_modules(programs.__path__)
]
ALL = [program for module in MODULES for program in getattr(module, "PROGRAMS", [])]
HERE = [program for program in ALL if keras.backend.backend() in program.backends]
STOPPED = [program for program in HERE if program.stopped is not None and not outcomes.ON_JAX]
QUICK = ("train_step with its own loss and trackers", "a layer that computes loss and accuracy")


def each(items):
    return [
        pytest.param(item, id=item.name, marks=[] if item.name in QUICK else pytest.mark.exhaustive)
        for item in items
    ]


REPLICAS = [2, *(pytest.param(replicas, marks=pytest.mark.exhaustive) for replicas in (3, 4, 8))]


@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("program", each(HERE))
def test_a_program_trains_as_on_one_device_or_is_stopped(program, replicas):
    found = outcomes.outcome(program, replicas)
    if program in STOPPED:
        assert found.verdict == "refused", found
        assert program.stopped in found.message
    else:
        assert found.verdict == "equal", found


@pytest.mark.parametrize("program", each([program for program in STOPPED if program.fixed]))
def test_a_stopped_program_with_the_fix_trains_as_on_one_device(program):
    found = outcomes.outcome(program.fixed, 2)
    assert found.verdict == "equal", found


def test_most_programs_train_unmodified():
    assert len([program for program in ALL if program.stopped is None]) >= 40
