"""Memory that a step needs beside weights and optimizer: the vocabulary in chunks, or whole.

It is what XLA sets aside for the compiled step of `TrainingLoop` on JAX.
"""

import os
import pathlib
import subprocess
import sys

import keras

from kdpkit.training import TrainingLoop
from tests.benchmarks import workload
from tests.benchmarks.paired import compared


def rows(args):
    """Compile each way in a process of its own."""
    chunks, whole = (measured(args, way) for way in ("chunks", "whole"))
    return [
        compared(
            "BERT, memory of a step on JAX, vocabulary in chunks against all logits",
            "MiB",
            [chunks],
            [whole],
            goal=("<=", 0.6),
        )
    ]


def measured(args, way):
    """Run this file and read its answer."""
    given = [str(part or "") for part in (args.text, args.vocabulary)]
    command = [sys.executable, "-m", "tests.benchmarks.memory", way, *given]
    environment = {**os.environ, "KERAS_BACKEND": "jax"}
    return float(subprocess.check_output(command, text=True, env=environment).split()[-1])


def main(way, *paths):
    """Print the mebibytes of a step's temporary arrays."""
    import jax

    class Args:
        text, vocabulary = (pathlib.Path(path) if path else None for path in paths)

    data = workload.packed(Args, workload.rows(Args), steps=1)
    loop = workload.loop_of(Args) if way == "chunks" else loop_over_all_logits()
    steps = loop._steps
    feed = steps.open(data, "train", steps=None)
    steps.build(feed, training=True)
    batch = next(data.as_numpy_iterator())
    step = jax.jit(steps._train_step, donate_argnums=0)
    analysis = step.lower(steps._variables.read(), batch).compile().memory_analysis()
    sys.stdout.write(f"{analysis.temp_size_in_bytes / 2**20:.1f}\n")


def loop_over_all_logits():
    """Train with the loss and the metric of the published recipe."""
    return TrainingLoop(
        workload.masked_lm(workload.PIECES),
        optimizer=keras.optimizers.AdamW(workload.RATE),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
