"""Keras' torch backend: what serves it, with torch itself, and one sentence for all else."""

import importlib.util
import json
import sys

import pytest

from tests.processes import ROOT, run

SERVED = {
    "replica_exact": ("tensorflow", "jax"),
    "linear_cross_entropy": ("tensorflow", "jax"),
    "check_parity": ("tensorflow",),
    "strategies": ("tensorflow",),
    "sharding": ("jax",),
    "plan_memory": ("jax",),
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return what the program prints, which trains in a process with that backend."""
    program = [sys.executable, "-m", "tests.torch_program", tmp_path_factory.mktemp("torch")]
    finished = run(*program, *SERVED, cwd=ROOT, KERAS_BACKEND="torch", CUDA_VISIBLE_DEVICES="")
    found = json.loads(finished.stdout.splitlines()[-1])
    assert found["backend"] == "torch"
    return found


def test_a_run_that_was_stopped_ends_with_the_weights_of_an_undisturbed_one(found):
    assert found["stopped"] == {"code": 42}
    resumed, undisturbed = found["resumed"], found["undisturbed"]
    assert resumed["weights"] == undisturbed["weights"]
    for name in ("loss", "accuracy", "learning_rate"):
        assert resumed["history"][name] == undisturbed["history"][name]
    assert "examples_per_second" in undisturbed["history"]


@pytest.mark.parametrize("part", SERVED)
def test_all_else_raises_one_sentence_that_names_the_backends(part, found):
    sentence = found["sentences"][part]
    for backend in SERVED[part]:
        assert f"KERAS_BACKEND={backend}" in sentence
    assert "'torch'" in sentence or "is not installed" in sentence
    assert "\n" not in sentence
