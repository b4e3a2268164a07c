"""Sources of examples that are not in memory: Hugging Face `datasets` and Grain."""

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np

from kdpkit._internal import checks

Batch: TypeAlias = Any  # a nest `x`, `(x, y)` or `(x, y, sample_weight)`


@dataclasses.dataclass(frozen=True)
class Source:
    """Examples that are not in memory, for `ArrayBatches`, which reads those of each batch.

    Args:
        examples: Number of examples in an epoch.
        read: Function of an array of indices that returns the examples there as a batch `x`,
            `(x, y)` or `(x, y, sample_weight)`: always the same examples, of one shape and type.
        has_order: Whether the source shuffles itself: the indices from `examples` on are those of
            the next epochs, and `ArrayBatches` takes no `seed`.

    >>> from kdpkit import batches
    >>> squares = batches.Source(examples=6, read=lambda indices: (indices, indices**2))
    >>> batches.ArrayBatches(squares, global_batch_size=3)[1]
    (array([3, 4, 5]), array([ 9, 16, 25]))
    """

    examples: int
    read: Callable[[np.ndarray], Any]
    has_order: bool = False


def from_datasets(
    dataset: Any,
    *,
    x: str | Sequence[str],
    y: str | Sequence[str] | None = None,
    sample_weight: str | None = None,
) -> Source:
    """Return the examples of a Hugging Face `datasets.Dataset`, for `ArrayBatches`.

    They become NumPy arrays as with `with_format("numpy")`, unless the dataset has a format or a
    transform of its own. Parquet files and images: docs/how_to/data_sources.md.

    Args:
        dataset: The dataset; of a `DatasetDict` a split, such as `data["train"]`.
        x: The column of the inputs, or several, which the model gets as a dictionary.
        y: That of the labels.
        sample_weight: That of the weights.

    Raises:
        ValueError: It is no `Dataset`, or a column does not exist or has missing values.

    >>> import datasets
    >>> from kdpkit import batches
    >>> data = datasets.Dataset.from_dict({"tokens": [[7, 8], [5, 6]], "label": [0, 1]})
    >>> source = batches.from_datasets(data, x="tokens", y="label")
    >>> [part.tolist() for part in batches.ArrayBatches(source, global_batch_size=2)[0]]
    [[[7, 8], [5, 6]], [0, 1]]
    """
    if not (hasattr(dataset, "features") and hasattr(dataset, "__len__")):
        checks.fail(
            "`dataset` must be a `datasets.Dataset`.",
            dataset=type(dataset).__name__,
            remedy='Of a `DatasetDict` pass a split, such as `data["train"]`; an `IterableDataset` '
            "cannot be read by index.",
        )
    columns = [*dict.fromkeys(keras.tree.flatten((x, y or (), sample_weight or ())))]
    is_transformed = dataset.format["type"] == "custom"  # which may make other columns
    available = [*dataset[:1]] if is_transformed else dataset.format["columns"]
    for column in columns or [x]:
        if column not in available:
            checks.fail("There is no such column.", column=column, columns=available)
        if not is_transformed and (missing := _count_missing(dataset, column)):
            checks.fail("A column has missing values.", column=column, missing=missing)
    if not is_transformed:
        dataset = dataset.select_columns(columns)
    if dataset.format["type"] is None:
        dataset = dataset.with_format("numpy")

    def read(indices: np.ndarray) -> Batch:
        values = dataset[indices.tolist()]
        arrays = {name: _as_array(values[name]) for name in columns}
        parts = [
            part
            and (arrays[part] if isinstance(part, str) else {name: arrays[name] for name in part})
            for part in (x, y, sample_weight)
        ]
        return tuple(parts) if sample_weight else keras.utils.pack_x_y_sample_weight(*parts)

    return Source(len(dataset), read)


def _count_missing(dataset: Any, column: str) -> int:
    """Count the missing values of a column, including those in its lists."""
    if not sum(map(_missing_in, dataset.data.column(column).chunks)):
        return 0
    # The table also has the examples that were filtered out; these batches do not.
    tables = dataset.select_columns([column]).with_format("arrow").iter(1000)
    return sum(_missing_in(chunk) for table in tables for chunk in table[column].chunks)


def _missing_in(array: Any) -> int:
    """Count the missing values of an Arrow array; one of fixed shape is stored as lists."""
    array = getattr(array, "storage", array)
    return array.null_count + (_missing_in(array.flatten()) if hasattr(array, "values") else 0)


def _as_array(values: Any) -> Any:
    """Stack the arrays of the list that a transform returns for a column."""
    has_arrays = isinstance(values, list) and any(hasattr(value, "shape") for value in values)
    return _stack(values) if has_arrays else values


def from_grain(dataset: Any, *, examples: int | None = None) -> Source:
    """Return the examples of a Grain dataset, for `ArrayBatches`.

    Grain shuffles: epochs follow each other as with its `repeat`, and each has an order of its own.

    Args:
        dataset: A `MapDataset`, an `IterDataset` or a `DataLoader` of single examples. A resumed
            run reads the latter two from their beginning up to where it continues.
        examples: Number of examples in an epoch, which only a `MapDataset` knows. The next epoch
            continues after them; where the data end, they are iterated again.

    Raises:
        ValueError: `examples` is missing, or the dataset has batches; or, when a batch is read, a
            `MapDataset` is filtered.

    >>> import grain
    >>> from kdpkit import batches
    >>> data = grain.MapDataset.range(5).seed(1).shuffle()
    >>> train = batches.ArrayBatches(batches.from_grain(data), global_batch_size=5)
    >>> sorted(train[0].tolist())
    [0, 1, 2, 3, 4]
    """
    if hasattr(dataset, "__next__") or type(dataset).__name__.startswith("Batch"):
        checks.fail(
            "`dataset` must have single examples, and begin again where it is iterated again.",
            dataset=type(dataset).__name__,
            remedy="Leave `.batch()` and `iter()` to `ArrayBatches`.",
        )
    is_indexed = hasattr(dataset, "__getitem__")
    if examples is None:
        examples = len(dataset) if is_indexed else sys.maxsize
        if examples == sys.maxsize:
            checks.fail(
                "This Grain dataset does not know how many examples an epoch has.",
                dataset=type(dataset).__name__,
                remedy="Pass `examples`; or leave `.repeat()` out, since epochs follow each other.",
            )
    read = dataset.__getitem__ if is_indexed else _Stream(dataset)
    return Source(
        checks.integer("examples", examples),
        lambda indices: _stack([read(int(index)) for index in indices]),
        has_order=True,
    )


class _Stream:
    """Reads an iterable by increasing index; after its end it is iterated again."""

    def __init__(self, dataset: Iterable[Any]) -> None:
        self._dataset = dataset
        self._iterator: Iterator[Any] = iter(())
        self._last: Any = None  # the example that was read most recently
        self._count = 0  # examples that this iterator has returned
        self._length: int | None = None  # of one iteration; None until one has ended

    def __call__(self, index: int) -> Any:
        index = index % self._length if self._length else index
        if index < self._count - 1 or not self._count:
            self._iterator, self._count = iter(self._dataset), 0
        for example in itertools.islice(self._iterator, index + 1 - self._count):
            self._last = example
            self._count += 1
        if self._count == index + 1:
            return self._last
        if not self._count:
            checks.fail("The dataset has no example.", dataset=type(self._dataset).__name__)
        self._length = self._count
        return self(index)


def _stack(examples: Sequence[Any]) -> Batch:
    if any(example is None for example in examples):
        checks.fail(
            "A Grain `MapDataset` that is filtered has no examples at known indices.",
            remedy="Filter the source before `grain.MapDataset.source`, or pass "
            "`.to_iter_dataset()` and the `examples` that are left.",
        )
    try:
        return keras.tree.map_structure(
            lambda *parts: None if all(part is None for part in parts) else np.stack(parts),
            *examples,
        )
    except ValueError as error:
        checks.fail(
            "Every example must have the same parts, of the same shape.",
            error=checks.first_line(error),
            remedy="Pad or cut them in Grain, and leave `.batch()` to `ArrayBatches`.",
        )
