"""Public programs, unmodified, train on replicas what they train on one device."""

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
QUICK = (
    "train_step with its own loss and trackers",
    "a layer that computes loss and accuracy",
    "softmax called logits, and a metric of one's own",
    "a loss of Keras that is a function",
)
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
    "free bits of every unit",
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
    "layers that a step builds",
    "images cut and mixed in the model",
    "tensors that layers keep",
    "the gradient of each example is clipped",
    "a metric that counts calls",
    "weights assigned by hand",
    "pairs of the batch are ranked",
    "a variable that adds up the batch",
    "KerasHub's CLIP",
    "KerasHub's Mixtral",
    "softmax of large features, compiled by XLA",
    "a critic that is frozen in the step",
    "a metric that is reset, and one that is read",
    "numbers of metrics read and set by hand",
    "the perplexity of KerasHub",
    "attentions that share masked words",
    "a recurrent layer, compiled by XLA",
    "a cell with dropout, step by step",
    "labeled examples cut elsewhere",
    "eager, and other parts later",
    "compiled once more in a callback",
    "halves of a batch normalized apart",
    "a table looked up in a layer and outside",
)
MARKS = {name: [] for name in QUICK} | {name: [pytest.mark.slow] for name in SLOW}
REPLICAS = [2, *(pytest.param(replicas, marks=pytest.mark.exhaustive) for replicas in (3, 8))]


@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize(
    "program",
    [pytest.param(p, id=p.name, marks=MARKS.get(p.name, [pytest.mark.exhaustive])) for p in HERE],
)
def test_a_program_trains_as_on_one_device(program, replicas):
    found = outcomes.outcome(program, replicas)
    assert found.verdict == "equal", found


def test_the_programs_named_here_exist():
    assert {*MARKS} <= {program.name for program in ALL}
    assert len(ALL) >= 120
