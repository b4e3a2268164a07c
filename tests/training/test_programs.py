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
HERE = [program for program in ALL if keras.backend.backend() in program.backends]
QUICK = (
    "train_step with its own loss and trackers",
    "a layer that computes loss and accuracy",
    "softmax called logits, and a metric of one's own",
    "a loss of Keras that is a function",
    "a verdict of evaluate",
    "one layer in two modes",
    "an inner step",
    "a layer in a loop and in a condition",
    "some of the examples beside all of them",
    "a step that draws by TensorFlow and by NumPy",
)
SLOW_MODULES = ("reported", "steps")
SLOW = (  # each stands for a kind of its own; the others are for `--exhaustive`
    "train_step that clips by the global norm",
    "train_step that divides by the number of replicas",
    "mixup in the step",
    "denoising diffusion",
    "adversaries",
    "metric learning from anchors and positives",
    "gradients clipped by norms they reach later",
    "divergence that counts more by step",
    "a mean over the labeled",
    "a threshold of the step's own",
    "a loss in three of four steps",
    "a sum of what is negative, which nothing is at first",
    "the first three examples of a batch",
    "a step and a call of functions",
    "experts of a constant capacity",
    "a layer that is surprised, and one that does nothing",
    "a table of as many rows as a batch",
    "eager, and another loss later",
    "texts padded to the longest",
    "a mean over ragged tokens",
    "the same noise for all",
    "a gradient of its own",
    "images cut and mixed in the model",
    "without examples: compiled by XLA",
    "without examples: along three axes, transposed",
    "without examples: in groups, which XLA computes",
    "without examples: in steps that run eagerly",
    "handwriting with the CTC loss",
    "tensors that layers keep",
    "the gradient of each example is clipped",
    "a metric that counts calls",
    "weights assigned by hand",
    "pairs of the batch are ranked",
    "a variable that adds up the batch",
    "KerasHub's CLIP",
    "KerasHub's Mixtral",
    "the perplexity of KerasHub",
    "attentions that share masked words",
)
REPLICAS = [2, *(pytest.param(replicas, marks=pytest.mark.exhaustive) for replicas in (3, 8))]


def parameters():
    for program in HERE:
        is_slow = program.name in SLOW or program.module in SLOW_MODULES
        marks = [pytest.mark.slow if is_slow else pytest.mark.exhaustive]
        yield pytest.param(program, id=program.name, marks=() if program.name in QUICK else marks)


@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("program", parameters())
def test_a_program_trains_as_on_one_device(program, replicas):
    outcome = outcomes.outcome(program, replicas)
    assert outcome.verdict == "equal", outcome


def test_every_program_has_a_name_and_those_named_here_exist():
    names = {program.name for program in ALL}
    assert len(names) == len(ALL) >= 120
    assert {*QUICK, *SLOW} <= names
