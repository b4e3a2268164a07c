"""How long a checkpoint holds training up, and what a second process costs by step."""

import pathlib
import re
import subprocess
import sys
import tempfile
import time

import keras

from kdpkit import callbacks
from tools.benchmarks import workload
from tools.benchmarks.paired import Row, Spread

STEPS = 8
RECIPE = pathlib.Path(__file__).parents[2] / "recipes" / "multi_worker.py"


def rows(args):
    """Measure checkpoints of BERT, and on TensorFlow the CNN in one and in two processes."""
    if keras.backend.backend() == "jax":
        return [checkpoint(args)]
    return [checkpoint(args), workers(args)]


def checkpoint(args):
    """Save the complete state after every epoch, and time what training waits for."""
    epochs = (args.rounds or 5) + 1
    data = workload.packed(args, workload.rows(args), steps=STEPS)
    model = workload.exact(args, jit_compile=True)
    starts, ends = [], []
    before, after = (
        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda *_, times=times: times.append(time.perf_counter())
        )
        for times in (starts, ends)
    )
    with tempfile.TemporaryDirectory() as directory:
        saved = callbacks.Resume(directory)
        given = [before, saved, after]
        model.fit(saved.track(data), epochs=epochs, callbacks=given, verbose=0)
    pauses = [1e3 * (end - start) for start, end in zip(starts, ends, strict=True)]
    return Row("BERT, pause of a checkpoint", "ms", Spread.of(pauses[1:]), goal=("<=", 25.0))


def workers(args):
    """Train the CNN of the recipe in two processes and in one, at the same global batch."""
    launch = [sys.executable, "-m", "kdpkit", "launch", "--workers", "2", "--"]
    flags = ["--data", args.images, "--epochs", "3"]
    two, one = [], []
    for _ in range(args.rounds or 3):
        two.append(1e3 / speed([*launch, sys.executable, RECIPE, *flags]))
        one.append(1e3 / speed([sys.executable, RECIPE, *flags, "--strategy", "one"]))
    ratios = [a / b for a, b in zip(two, one, strict=True)]
    return Row(
        "CNN, two processes against one, by image",
        "ms",
        Spread.of(two),
        Spread.of(one),
        Spread.of(ratios),
    )


def speed(command):
    """Return the images a second of the last epoch that a recipe prints."""
    output = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True).stdout
    return float(re.findall(r"examples_per_second: ([\d.e+]+)", output)[-1])
