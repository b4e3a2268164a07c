"""The recipe for a causal language model, small, on both backends."""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import pytest

from recipes import lm

ROOT = Path(lm.__file__).parents[1]
WORDS = ["replicas", "train", "exactly", "what", "one", "device", "would", "train", "on", "it"]

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="starts both backends itself"
)


def run(directory, backend, replicas, *flags, steps=8):
    """Train a few steps in a program of its own; return the loss of each, and what it printed."""
    text = directory / "corpus.txt"
    lines = (" ".join(WORDS[i % 10 :] + WORDS * 3) for i in range(400))
    text.write_text("\n".join(lines) + "\n", encoding="utf-8")
    results = directory / f"{backend}-{replicas}.json"
    settings = {
        "--replicas": replicas,
        "--per-replica-batch-size": 4 // replicas,
        "--base-learning-rate": 1e-3,
        "--rule": "none",
        "--data": text,
        "--vocabulary-size": 60,
        "--layers": 1,
        "--width": 64,
        "--sequence-length": 16,
        "--epochs": steps,  # of one step each, so that the history holds every loss
        "--steps-per-epoch": 1,
        "--jit": "off",
        "--cache-dir": directory / "cache",
        "--results": results,
    }
    parts = [str(part) for setting in settings.items() for part in setting]
    done = subprocess.run(
        [sys.executable, "recipes/lm.py", *parts, *flags],
        cwd=ROOT,
        env={**os.environ, "KERAS_BACKEND": backend},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(results.read_text())["history"]["loss"], done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("backend", "flags"),
    [
        ("jax", ["--remat", "--shard", "weights"]),
        pytest.param(
            "tensorflow", ["--remat", "--accumulation", "2"], marks=pytest.mark.exhaustive
        ),
    ],
)
def test_two_replicas_have_the_losses_of_one_device_which_keeps_all(backend, flags, tmp_path):
    one, _ = run(tmp_path, backend, 1)
    two, printed = run(tmp_path, backend, 2, *flags)
    assert len(one) == 8
    assert two == pytest.approx(one, rel=1e-5)
    assert one[-1] < one[0]
    assert "Held-out text, and what the model makes of it (a new line is /):\n  " in printed
    assert "Perplexity after each epoch: " in printed


def test_variables_that_are_to_be_cut_on_tensorflow_get_one_sentence():
    with pytest.raises(ValueError, match="on JAX alone.*shard='weights'.*KERAS_BACKEND=jax"):
        lm.main(["--shard", "weights"])


def test_a_width_that_the_heads_do_not_divide_gets_one_sentence():
    with pytest.raises(ValueError, match="4 attention heads.*--width 130. Pass a multiple of 4"):
        lm.build_model(lm.parse(["--width", "130"]), None)


@pytest.mark.slow
def test_lora_trains_its_matrices_and_the_biases_next_to_them():
    args = lm.parse(["--lora", "2", "--layers", "1", "--sequence-length", "16"])
    model = lm.build_model(args, type("Words", (), {"vocabulary_size": lambda: 60}))
    names = {variable.name.partition("_")[0] for variable in model.trainable_variables}
    assert names == {"lora", "bias"}  # KerasHub leaves the biases of the same layers
