"""What `experiment.set_precision` chooses, and what it leaves alone."""

import keras
import pytest

from kdpkit import experiment
from kdpkit.experiment._precision import fastest


@pytest.fixture(autouse=True)
def policy():
    """Leave Keras' policy as it was."""
    yield
    keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize(
    ("accelerators", "choice"),
    [
        ([], ("float32", "")),
        ([("GPU:0", (6, 1))], ("float32", "GPU:0")),
        ([("GPU:0", (7, 5))], ("mixed_float16", "GPU:0")),
        ([("GPU:0", (8, 0)), ("GPU:1", (9, 0))], ("mixed_bfloat16", "GPU:0")),
        ([("GPU:0", (8, 0)), ("GPU:1", (7, 0))], ("mixed_float16", "GPU:1")),
        ([("ROCM:0", (0, 0))], ("float32", "ROCM:0")),
        ([("TPU:0", None), ("TPU:1", None)], ("mixed_bfloat16", "TPU:0")),
    ],
)
def test_the_weakest_device_decides(accelerators, choice):
    assert fastest(accelerators) == choice


def test_without_accelerators_nothing_changes_and_nothing_is_printed(capsys):
    assert experiment.set_precision() == "float32"
    assert keras.config.dtype_policy().name == "float32"
    assert capsys.readouterr().out == ""


def test_a_policy_that_is_set_stays_unless_another_is_asked_for():
    keras.config.set_dtype_policy("mixed_bfloat16")
    assert experiment.set_precision("auto") == "mixed_bfloat16"
    assert keras.layers.Dense(1).compute_dtype == "bfloat16"
    assert experiment.set_precision("float32") == "float32"
    assert keras.layers.Dense(1).compute_dtype == "float32"


def test_an_unknown_precision_raises():
    with pytest.raises(ValueError, match="`precision` must be one of .*'half'"):
        experiment.set_precision("half")
