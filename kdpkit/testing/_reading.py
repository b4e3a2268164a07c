"""The batches of a pipeline as plain values that can be compared and named."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from kdpkit._internal import checks

Example: TypeAlias = Any  # a number, a text, or a tuple of them: equal where examples are
Shard: TypeAlias = list[list[Example]]  # its batches

_MOST_BATCHES = 100_000
_MOST_SHOWN = 12  # batches of a shard, in a message
_LONGEST = 80  # characters of an example there


def read_shards(
    read: Any, *, key: Callable[[Any], Any] | None = None, like: Any = None, most: int = 0
) -> list[Shard]:
    """Read the batches of each shard: of a list or tuple each entry, else of the one there is.

    Args:
        read: A dataset, or another iterable of batches; or several.
        key: A function of a batch that returns what identifies its examples, such as their ids.
        like: A nest that examples are compared with, without a batch's sample weights perhaps.
        most: A shard that gives more examples than that is read no further; 0 reads all.
    """
    shards = read if isinstance(read, list | tuple) else [read]
    kinds = Mapping | tuple | str | bytes | int | float  # of batches, and so are arrays
    if shards is read and any(isinstance(x, kinds) or hasattr(x, "shape") for x in shards):
        checks.fail(
            "A list or a tuple has a dataset for each shard, and this one has batches.",
            read=read,
            remedy="Pass `iter(batches)` where they are the batches of one dataset.",
        )
    return [[*_batches(shard, key, like, most)] for shard in shards]


def _batches(
    shard: Any, key: Callable[[Any], Any] | None, like: Any, most: int
) -> Iterator[list[Example]]:
    count = 0
    for number, batch in enumerate(_iterated(shard)):
        if number == _MOST_BATCHES:
            raise AssertionError(f"A dataset does not end: it has more than {number} batches.")
        examples = examples_of(batch if key is None else key(batch), like)
        yield examples
        count += len(examples)
        if most and count > most:
            return


def _iterated(shard: Any) -> Iterator[Any]:
    if not hasattr(shard, "on_epoch_end"):
        try:
            batches = iter(shard)
        except TypeError:
            checks.fail("What is read must be a dataset or an iterable of batches.", read=shard)
        yield from batches
        return
    yield from (shard[index] for index in range(len(shard)))  # a keras.utils.PyDataset
    shard.on_epoch_end()


def examples_of(batch: Any, like: Any = None) -> list[Example]:
    """Return the examples of a batch; of one without axes, its only one.

    The third part of `(x, y, sample_weight)` is no part of an example if `like` has fewer parts:
    then examples of weight 0 are left out.
    """
    weights, axes = None, [getattr(leaf, "ndim", 1) for leaf in leaves(like)]
    if like is not None and _has_three_parts(batch) and not _has_three_parts(like):
        *batch, weights = batch
        batch = tuple(batch)
    arrays = leaves(batch)
    if axes and len(arrays) != len(axes):
        checks.fail(
            "A batch has other parts than `examples`, so its examples cannot be compared.",
            parts=len(arrays),
            parts_of_examples=len(axes),
            remedy="Pass `key`, a function of a batch that returns what names its examples.",
        )
    parts = [_values(array) for array in arrays]
    is_one = not all(isinstance(part, list) for part in parts) or any(
        getattr(array, "ndim", None) == count - 1
        for array, count in zip(arrays, axes, strict=False)
    )
    parts = [[part] for part in parts] if is_one else parts
    if len({len(part) for part in parts}) > 1:
        raise AssertionError(
            "The parts of a batch have different numbers of examples: "
            f"{', '.join(str(len(part)) for part in parts)}."
        )
    examples = [
        row[0] if len(row) == 1 else row for row in zip(*map(_hashable, parts), strict=True)
    ]
    if weights is None:
        return examples
    have_weight = [bool(np.any(weight)) for weight in np.asarray(weights)]
    return [*itertools.compress(examples, have_weight)]


def _has_three_parts(batch: Any) -> bool:
    return isinstance(batch, tuple) and len(batch) == 3


def leaves(nest: Any) -> list[Any]:
    """Return the arrays of a nest, those of a dictionary by their sorted names."""
    if nest is None:
        return []
    if isinstance(nest, Mapping):
        nest = tuple(nest[name] for name in sorted(nest))
    is_of_arrays = isinstance(nest, list) and any(hasattr(part, "shape") for part in nest)
    if not isinstance(nest, tuple) and not is_of_arrays:  # a list of numbers is a leaf
        return [nest]
    return [*itertools.chain.from_iterable(map(leaves, nest))]


def mapped(function: Callable[[Any], Any], nest: Any) -> Any:
    if isinstance(nest, Mapping):
        return {name: mapped(function, part) for name, part in nest.items()}
    if isinstance(nest, tuple):
        return tuple(mapped(function, part) for part in nest)
    return nest if nest is None else function(nest)


def taken(batch: Any, part: slice | list[int]) -> Any:
    return mapped(lambda array: array[part], batch)


def _values(leaf: Any) -> Any:
    """Return a tensor, an array, or what each replica has of one, as Python's lists and numbers."""
    of_replicas = getattr(leaf, "values", None)
    if isinstance(of_replicas, tuple):  # PerReplica of tf.distribute
        return [*itertools.chain.from_iterable(map(_values, of_replicas))]
    if hasattr(leaf, "to_list"):  # a ragged tensor
        return leaf.to_list()
    if hasattr(leaf, "dense_shape"):  # a sparse tensor
        import tensorflow as tf

        leaf = tf.sparse.to_dense(leaf)
    return np.asarray(leaf).tolist()


def _hashable(value: Any) -> Any:
    if isinstance(value, Mapping):  # an example in a list of them
        value = sorted(value.items())
    if isinstance(value, list | tuple | np.ndarray):
        return tuple(map(_hashable, value))
    if isinstance(value, float) and math.isnan(value):
        return math.nan  # the one that equals itself where it is a part of others
    return value.decode(errors="surrogateescape") if isinstance(value, bytes) else value


def listed(shards: Sequence[Shard], numbers: Mapping[Example, int] | None = None) -> str:
    """Return what each shard reads, a line for each; examples by their numbers where known."""
    numbers = numbers or {}
    return "".join(
        f"\n  {f'shard {index}: ' if len(shards) > 1 else ''}{_shown(shard, numbers)}"
        for index, shard in enumerate(shards)
    )


def _shown(shard: Shard, numbers: Mapping[Example, int]) -> str:
    batches = [
        f"[{', '.join(text(numbers.get(example, example)) for example in batch)}]"
        for batch in shard
    ]
    left = len(batches) - _MOST_SHOWN
    texts = batches[:_MOST_SHOWN] + ([f"and {left} batches more"] if left > 0 else [])
    return ", ".join(texts) or "nothing"


def text(example: Any) -> str:
    """Return an example for a message: of an image its first numbers and its last."""
    shown = repr(example)
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 20]} ... {shown[-10:]}"


def counted(count: int, noun: str) -> str:
    """Return a number of things in words.

    >>> counted(1, "shard"), counted(2, "batch")
    ('1 shard', '2 batches')
    """
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{count} {noun if count == 1 else plural}"
