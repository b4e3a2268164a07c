"""What the machine itself can do: matrices, copies, and files read raw."""

import pathlib
import tempfile

import numpy as np
import tensorflow as tf

from tools.benchmarks.paired import Row, Spread, in_turns, seconds_of

SIZE, MEBIBYTES = 2048, 256


def rows(args):
    """Measure the limits that other figures may be held against."""
    one, other = (tf.random.stateless_normal([SIZE, SIZE], (0, seed)) for seed in (1, 2))
    here = np.zeros(MEBIBYTES << 20, "uint8")
    there = np.empty_like(here)
    with tempfile.TemporaryDirectory() as directory:
        file = pathlib.Path(directory) / "bytes"
        file.write_bytes(here.tobytes())

        def multiply(dtype):
            a, b = tf.cast(one, dtype), tf.cast(other, dtype)
            return lambda: 2e-9 * SIZE**3 / seconds_of(lambda: (a @ b).numpy())

        gib = MEBIBYTES / 1024
        figures = in_turns(
            {
                "matrix product, float32, GFLOP/s": multiply("float32"),
                "matrix product, bfloat16, GFLOP/s": multiply("bfloat16"),
                "memory copied, GiB/s": lambda: gib / seconds_of(lambda: np.copyto(there, here)),
                "file read raw, in the page cache, GiB/s": lambda: (
                    gib / seconds_of(lambda: file.read_bytes())
                ),
            },
            args.rounds or 9,
        )
    return [
        Row(f"limit: {what}", unit, Spread.of(values))
        for name, values in figures.items()
        for what, _, unit in [name.rpartition(", ")]
    ]
