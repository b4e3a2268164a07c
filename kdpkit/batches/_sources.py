"""Sources of examples that are not in memory: `datasets`, Parquet, images and Grain."""

import dataclasses
import importlib
import itertools
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, TypeAlias

import keras
import numpy as np

from kdpkit import errors
from kdpkit._internal import checks

Batch: TypeAlias = Any  # a nest `x`, `(x, y)` or `(x, y, sample_weight)`

_IMAGES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".webp")


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
    transform of its own.

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
        checks.fail("`dataset` must be a `datasets.Dataset`.", dataset=type(dataset).__name__)
    columns = keras.tree.flatten((x, y or (), sample_weight or ()))
    for column in columns:
        if column not in dataset.column_names:
            checks.fail("There is no such column.", column=column, columns=dataset.column_names)
        if missing := dataset.data.column(column).null_count:
            checks.fail("A column has missing values.", column=column, missing=missing)
    dataset = dataset.select_columns([*dict.fromkeys(columns)])
    if dataset.format["type"] is None:
        dataset = dataset.with_format("numpy")

    def read(indices: np.ndarray) -> Batch:
        values = dataset[indices.tolist()]
        parts = [
            part
            and (values[part] if isinstance(part, str) else {name: values[name] for name in part})
            for part in (x, y, sample_weight)
        ]
        return tuple(parts) if sample_weight else keras.utils.pack_x_y_sample_weight(*parts)

    return Source(len(dataset), read)


def from_parquet(path: str | os.PathLike[str], **columns: Any) -> Source:
    """Return the examples of a Parquet file, for `ArrayBatches`.

    `datasets` copies it into its cache, from which the examples of each batch are read.

    Args:
        path: The file.
        **columns: `x`, `y` and `sample_weight`, as in `from_datasets`.

    Raises:
        ValueError: The file is missing, cut off or damaged, or as in `from_datasets`.
        ImportError: The package `datasets` is not installed.

    >>> import datasets, tempfile
    >>> from kdpkit import batches
    >>> path = tempfile.mkdtemp() + "/train.parquet"
    >>> _ = datasets.Dataset.from_dict({"tokens": [[7, 8], [5, 6]]}).to_parquet(path)
    >>> source = batches.from_parquet(path, x="tokens")
    >>> batches.ArrayBatches(source, global_batch_size=1)[1].tolist()
    [[5, 6]]
    """
    datasets = _imported("datasets")
    try:
        dataset = datasets.Dataset.from_parquet(os.fspath(path))
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        _fail_for_file("Parquet file", path, error.__cause__ or error)
    return from_datasets(dataset, **columns)


def from_images(
    directory: str | os.PathLike[str], *, size: tuple[int, int], color_mode: str = "rgb"
) -> Source:
    """Return the images of a directory and their labels, for `ArrayBatches`.

    Images are decoded when their batch is read, to float32 from 0 to 255, of shape `(height, width,
    channels)`. A label is the index of the subdirectory in the order of the names.

    Args:
        directory: A directory with a subdirectory for each class.
        size: Height and width, to which images are resized.
        color_mode: `"rgb"`, `"rgba"` or `"grayscale"`.

    Raises:
        ValueError: There are no images; or, when its batch is read, one is damaged.
        ImportError: Pillow is not installed.

    >>> import pathlib, tempfile
    >>> from kdpkit import batches
    >>> directory = pathlib.Path(tempfile.mkdtemp())
    >>> for name in ("cat", "dog"):
    ...     (directory / name).mkdir()
    ...     keras.utils.save_img(directory / name / "1.png", np.ones((6, 6, 3)))
    >>> source = batches.from_images(directory, size=(4, 4))
    >>> x, y = batches.ArrayBatches(source, global_batch_size=2)[0]
    >>> x.shape, y.tolist()
    ((2, 4, 4, 3), [0, 1])
    """
    _imported("PIL")
    classes = sorted(path for path in pathlib.Path(directory).glob("*") if path.is_dir())
    files = [
        (path, label)
        for label, of_class in enumerate(classes)
        for path in sorted(of_class.rglob("*"))
        if path.suffix.lower() in _IMAGES
    ]
    if not files:
        checks.fail_for_file(
            "There are no images in subdirectories of this directory",
            directory,
            remedy=f"Each class has a subdirectory; names end in {', '.join(_IMAGES)}.",
        )

    def decoded(path: pathlib.Path) -> np.ndarray:
        try:
            image = keras.utils.load_img(path, color_mode, size, interpolation="bilinear")
        except (OSError, SyntaxError) as error:  # the latter for a PNG
            _fail_for_file("image", path, error)
        return keras.utils.img_to_array(image, dtype="float32")

    def read(indices: np.ndarray) -> Batch:
        paths, labels = zip(*(files[index] for index in indices), strict=True)
        return np.stack([*map(decoded, paths)]), np.array(labels)

    return Source(len(files), read)


def from_grain(dataset: Any, *, examples: int | None = None) -> Source:
    """Return the examples of a Grain dataset, for `ArrayBatches`.

    Grain shuffles: epochs follow each other as with its `repeat`, and each has an order of its own.

    Args:
        dataset: A `MapDataset`, an `IterDataset` or a `DataLoader` of single examples. A resumed
            run reads the latter two from their beginning up to where it continues.
        examples: Number of examples in an epoch, which only a `MapDataset` knows. The next epoch
            continues after them; where the data end, they are iterated again.

    Raises:
        ValueError: `examples` is missing; or, when a batch is read, a `MapDataset` is filtered.

    >>> import grain
    >>> from kdpkit import batches
    >>> data = grain.MapDataset.range(5).seed(1).shuffle()
    >>> train = batches.ArrayBatches(batches.from_grain(data), global_batch_size=5)
    >>> sorted(train[0].tolist())
    [0, 1, 2, 3, 4]
    """
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
        lambda indices: _stacked([read(int(index)) for index in indices]),
        has_order=True,
    )


class _Stream:
    """Reads an iterable by index, forwards; what ends is iterated again."""

    def __init__(self, dataset: Iterable[Any]) -> None:
        self._dataset = dataset
        self._iterator: Iterator[Any] = iter(())
        self._read, self._last = 0, None  # of this iterator
        self._end: int | None = None  # where one ends, once that is known

    def __call__(self, index: int) -> Any:
        index = index % self._end if self._end else index
        if index < self._read - 1 or not self._read:
            self._iterator, self._read = iter(self._dataset), 0
        for example in itertools.islice(self._iterator, index + 1 - self._read):
            self._last = example
            self._read += 1
        if self._read == index + 1:
            return self._last
        if not self._read:
            checks.fail("The dataset has no example.", dataset=type(self._dataset).__name__)
        self._end = self._read
        return self(index)


def _stacked(examples: Sequence[Any]) -> Batch:
    if any(example is None for example in examples):
        checks.fail(
            "A Grain `MapDataset` that is filtered has no examples at known indices.",
            remedy="Filter the source before `grain.MapDataset.source`, or pass "
            "`.to_iter_dataset()` and the `examples` that are left.",
        )
    try:
        return keras.tree.map_structure(
            lambda *parts: None if parts[0] is None else np.stack(parts), *examples
        )
    except ValueError as error:
        checks.fail(
            "Every example must have the same parts, of the same shape.",
            error=checks.first_line(error),
            remedy="Pad or cut them in Grain, and leave `.batch()` to `ArrayBatches`.",
        )


def _fail_for_file(kind: str, path: str | os.PathLike[str], error: BaseException) -> NoReturn:
    raise errors.FileInputError(
        f"This {kind} is missing, cut off or damaged: {os.fspath(path)}. Received: "
        f"{checks.first_line(error)}. Copy it again, or remove it."
    ) from error


def _imported(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise errors.PackageInputError(
            f"`{package}` is not installed. Run `{checks.install_command('data')}`."
        ) from error
