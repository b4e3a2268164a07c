"""What several processes on JAX must agree on before they train, and where they must differ.

JAX compares nothing: with another number of batches, or other shapes, it hangs, and the same
examples in two processes are trained on twice.
"""

import functools
import zlib
from typing import Any

import jax
import keras
import numpy as np

from kdpkit._internal import processes


def check_batches(name: str, length: int | None, first: Any) -> None:
    """Compare what this process trains on with the others; every process must call it.

    It raises in all of them if lengths or shapes differ, or two have the same examples.
    """
    shapes = zlib.crc32(repr(shapes_of(first)).encode())
    processes.require_equal(
        f"The number of batches of `{name}`, and their shapes,",
        (-1 if length is None else length, np.shape(jax.tree.leaves(first)[0])[0], shapes),
        remedy="Give every process equally many batches of equally many examples, as "
        "`kdpkit.batches.ArrayBatches` does.",
    )
    content = functools.reduce(
        lambda sum_, leaf: zlib.crc32(np.ascontiguousarray(leaf).tobytes(), sum_),
        jax.tree.leaves(first),
        0,
    )
    processes.require_different(
        f"The first batch of `{name}`",
        content,
        remedy="Give every process examples of its own, as `kdpkit.batches.ArrayBatches` does with "
        "`process_count` and `process_index`; else each example is trained on more than once.",
    )


def check_data(name: str, data: Any) -> None:
    """Compare the data of `fit`, `evaluate` or `predict`, if reading one consumes nothing."""
    if isinstance(data, keras.utils.PyDataset):
        check_batches(name, data.num_batches, data[0])
    elif isinstance(data, np.ndarray | jax.Array):
        check_batches(name, len(data), data[:8])


def shapes_of(batch: Any) -> list[tuple[int, ...]]:
    return [np.shape(leaf) for leaf in jax.tree.leaves(batch)]
