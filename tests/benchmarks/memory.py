"""Memory that a step needs beyond weights and optimizer: the vocabulary in chunks, or whole."""

import ctypes
import pathlib
import subprocess
import sys

import keras

from tests.benchmarks import workload
from tests.benchmarks.paired import compared

STEPS = 3


def rows(args):
    """Measure each way in a process of its own, in turns."""
    figures = {"chunks": [], "all": []}
    for _ in range(args.rounds or 3):
        for way, values in figures.items():
            values.append(measured(args, way))
    return [
        compared(
            "BERT, memory of a step, vocabulary in chunks against all logits",
            "MiB",
            figures["chunks"],
            figures["all"],
            goal=("<=", 0.6),
        )
    ]


def measured(args, way):
    """Run this file and read its answer."""
    given = [str(part or "") for part in (args.text, args.vocabulary)]
    command = [sys.executable, "-m", "tests.benchmarks.memory", way, *given]
    return float(subprocess.check_output(command, text=True).split()[-1])


def main(way, text, vocabulary):
    """Print the mebibytes by which the peak of a step is above what was there before it."""

    class Args:
        pass

    args = Args()
    args.text, args.vocabulary = (
        pathlib.Path(name) if name else None for name in (text, vocabulary)
    )
    data = workload.packed(args, workload.rows(args), steps=STEPS)
    if way == "chunks":
        loop = workload.loop_of(args, jit=True)
        train = lambda: loop.fit(data, epochs=1, verbose=0)  # noqa: E731 two ways, side by side
    else:
        size = workload.tokenizer(args.text, args.vocabulary).vocabulary_size()
        model = workload.compiled(workload.masked_lm(size), jit_compile=True)
        train = lambda: model.fit(data, verbose=0)  # noqa: E731
    train()  # compiles
    keras.utils.clear_session(free_memory=True)
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = status("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    train()
    sys.stdout.write(f"{(status('VmHWM') - before) / 1024:.1f}\n")


def status(name):
    """Give a line of /proc/self/status, in kibibytes."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name)))


if __name__ == "__main__":
    main(*sys.argv[1:])
