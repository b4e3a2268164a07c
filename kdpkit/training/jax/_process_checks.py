"""What several processes compare before they train, since JAX hangs where they disagree."""

import functools
import itertools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import Mesh

from kdpkit._internal import processes

_EQUALLY_MANY = (
    "Give every process equally many batches of equally many examples, as "
    "`kdpkit.batches.ArrayBatches` does."
)


def require_same_mesh(mesh: Mesh) -> None:
    processes.require_equal(
        "The devices of the distribution",
        [zlib.crc32(repr((mesh.shape, mesh.devices)).encode())],
        remedy="Set the same in every process.",
    )


def check_batches(name: str, length: int | None, first: Any) -> None:
    """Compare the data of all processes, which must all call this.

    It raises in all of them if lengths or shapes differ, with which JAX would hang, or if two have
    the same examples, which would be trained on twice.
    """
    shapes = zlib.crc32(repr(shapes_of(first)).encode())
    processes.require_equal(
        f"The number of batches of {name}, and their shapes,",
        (-1 if length is None else length, np.shape(jax.tree.leaves(first)[0])[0], shapes),
        remedy=_EQUALLY_MANY,
    )
    checksum = functools.reduce(
        lambda checksum, leaf: zlib.crc32(np.ascontiguousarray(leaf).tobytes(), checksum),
        jax.tree.leaves(first),
        0,
    )
    processes.require_different(
        f"The first batch of {name}",
        checksum,
        remedy="Give every process examples of its own, as `kdpkit.batches.ArrayBatches` does with "
        "`process_count` and `process_index`; else each example is trained on more than once.",
    )


def check_across_processes(name: str, data: Any) -> None:
    """Compare the data of `fit`, `evaluate` or `predict`, if reading a batch consumes nothing."""
    if processes.count() == 1:
        return
    if isinstance(data, keras.utils.PyDataset):
        check_batches(f"`{name}`", data.num_batches, data[0])
    elif isinstance(data, np.ndarray | jax.Array):
        check_batches(f"`{name}`", len(data), data[:8])


def comparing_lengths(get_iterator: Callable, epoch: Any) -> Any:
    """Compare the lengths of the data, or each batch where a length is not known."""
    batches = get_iterator(epoch)
    if processes.count() == 1 or keras.distribution.distribution() is None:
        return batches
    length = epoch.data_adapter.num_batches
    processes.require_equal(
        "The number of batches", [-1 if length is None else length], remedy=_EQUALLY_MANY
    )
    return batches if length is not None else _compared(iter(batches))


def _compared(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield batches, and raise in all processes if they have ended in one of them only."""
    for number in itertools.count():
        batch = next(batches, None)
        shapes = zlib.crc32(repr(shapes_of(batch)).encode())
        processes.require_equal(
            "The number of batches, and their shapes,",
            [number + (batch is not None), shapes],
            remedy=_EQUALLY_MANY,
        )
        if batch is None:
            return
        yield batch


def shapes_of(batch: Any) -> list[tuple[int, ...]]:
    return [np.shape(leaf) for leaf in jax.tree.leaves(batch)]
