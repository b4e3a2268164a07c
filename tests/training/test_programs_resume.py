"""Public programs that are stopped inside an epoch end as those that nothing stopped."""

import random

import keras
import numpy as np
import pytest

from kdpkit.callbacks import Resume
from tests.training.programs import outcomes
from tests.training.test_programs import HERE

STEPS = 3  # of an epoch, of which each program has two
ON_JAX = keras.backend.backend() == "jax"
SLOW = (  # each stands for a kind of its own; the others are for `--exhaustive`
    "train_step with its own loss and trackers",
    "mixup in the data",
    "adversaries",
    "metric learning from anchors and positives",
    "variables of TensorFlow",
    "ragged tokens that the model pads",
)
SLOW_ON_JAX = ("distillation by compute_loss",)
# Keras takes a first batch, for which `shuffle` draws an order that tracked data do not count.
SHUFFLED = ("mixup in the data", "CutMix in the data")


def cases():
    slow = [pytest.mark.slow, pytest.mark.jax] if ON_JAX else [pytest.mark.slow]
    for program in HERE:
        is_slow = program.name in (SLOW_ON_JAX if ON_JAX else SLOW)
        yield pytest.param(
            program, id=program.name, marks=slow if is_slow else [pytest.mark.exhaustive]
        )


class StopsBefore(keras.callbacks.Callback):
    """Asks for a stop before a step, counted over all epochs."""

    def __init__(self, step, resume):
        super().__init__()
        self.step = step
        self.resume = resume

    def on_train_batch_begin(self, batch, logs=None):  # noqa: ARG002  # as Keras calls it
        if self.step == 0:
            self.resume.request_stop()
        self.step -= 1


def resumed(program, replicas, directory):
    """Train until a drawn step inside an epoch, and go on in a new program."""
    step = random.Random(program.name).choice([1, 2, STEPS + 1, STEPS + 2])
    resume = Resume(directory)
    with pytest.raises(SystemExit):
        outcomes.trained(program, replicas, resume=resume, callbacks=[StopsBefore(step, resume)])
    assert not max(directory.glob("*.npz")).stem.endswith("-000000000"), "it ended with an epoch"
    return outcomes.trained(program, replicas, resume=Resume(directory))


def difference(found, expected, before):
    """Return the largest difference of any weight, over the largest change of any weight."""
    if len(before) < len(expected):  # its first batch built it
        before = [0.0] * len(expected)
    change = max(np.abs(a - b).max(initial=0) for a, b in zip(expected, before, strict=True))
    return max(np.abs(a - b).max(initial=0) for a, b in zip(found, expected, strict=True)) / change


@pytest.mark.parametrize("replicas", [None, pytest.param(2, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("program", [*cases()])
def test_a_program_that_was_stopped_ends_as_one_that_was_not(tmp_path, program, replicas):
    as_tracked = Resume(tmp_path / "complete") if program.name in SHUFFLED else None
    before, expected, logs = outcomes.trained(program, replicas, resume=as_tracked)
    _, found, logs_of_resumed = resumed(program, replicas, tmp_path / "stopped")
    assert difference(found, expected, before) <= 1e-5
    assert logs_of_resumed.keys() == logs.keys()
    for name, values in logs.items():
        np.testing.assert_allclose(logs_of_resumed[name], values, rtol=1e-5, atol=1e-6)


def test_the_programs_named_here_exist():
    names = {program.name for program in HERE}
    assert {*SLOW_ON_JAX} <= names
    assert ON_JAX or {*SLOW, *SHUFFLED} <= names
