"""Sources of examples that are not in memory: `datasets`, Parquet, images and Grain."""

import dataclasses
import glob
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
_MODES = {"rgb": "RGB", "rgba": "RGBA", "grayscale": "L"}


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
        checks.fail(
            "`dataset` must be a `datasets.Dataset`.",
            dataset=type(dataset).__name__,
            remedy='Of a `DatasetDict` pass a split, such as `data["train"]`; an `IterableDataset` '
            "cannot be read by index.",
        )
    columns = [*dict.fromkeys(keras.tree.flatten((x, y or (), sample_weight or ())))]
    is_transformed = dataset.format["type"] == "custom"  # whose columns are others
    available = [*dataset[:1]] if is_transformed else dataset.format["columns"]
    for column in columns or [x]:
        if column not in available:
            checks.fail("There is no such column.", column=column, columns=available)
        if not is_transformed and (missing := _missing_in(dataset, column)):
            checks.fail("A column has missing values.", column=column, missing=missing)
    if not is_transformed:
        dataset = dataset.select_columns(columns)
    if dataset.format["type"] is None:
        dataset = dataset.with_format("numpy")

    def read(indices: np.ndarray) -> Batch:
        values = dataset[indices.tolist()]
        found = {name: _column(values[name]) for name in columns}
        parts = [
            part
            and (found[part] if isinstance(part, str) else {name: found[name] for name in part})
            for part in (x, y, sample_weight)
        ]
        return tuple(parts) if sample_weight else keras.utils.pack_x_y_sample_weight(*parts)

    return Source(len(dataset), read)


def _missing_in(dataset: Any, column: str) -> int:
    """Count the missing values of a column, those in its lists too."""
    if not sum(map(_missing, dataset.data.column(column).chunks)):
        return 0
    parts = dataset.select_columns([column]).with_format("arrow").iter(1000)  # without what is
    return sum(_missing(chunk) for part in parts for chunk in part[column].chunks)  # filtered out


def _missing(array: Any) -> int:
    """Count the missing values of an array of Arrow; one of fixed shape is a list with a name."""
    array = getattr(array, "storage", array)
    return array.null_count + (_missing(array.flatten()) if hasattr(array, "values") else 0)


def _column(values: Any) -> Any:
    """Return an array of what a transform gives as a list of arrays."""
    has_arrays = isinstance(values, list) and any(hasattr(value, "shape") for value in values)
    return _stacked(values) if has_arrays else values


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
    datasets, name = _imported("datasets"), os.fspath(path)
    name = name if "://" in name else glob.escape(name)  # or "a*b" is read with "a and b"
    try:
        dataset = datasets.Dataset.from_parquet(name, batch_size=1000)  # also of no row
    except Exception as error:  # damaged bytes, and what `datasets` has no type for
        _fail_for_file("Parquet file", path, error.__cause__ or error)
    return from_datasets(dataset, **columns)


def from_images(
    directory: str | os.PathLike[str], *, size: tuple[int, int], color_mode: str = "rgb"
) -> Source:
    """Return the images of a directory and their labels, for `ArrayBatches`.

    Images are decoded when their batch is read, to float32 from 0 to 255, of shape `(height, width,
    channels)`. A label is the index of the subdirectory in the order of the names. What has a name
    that begins with a dot is left out, as Keras does.

    Args:
        directory: A directory with a subdirectory for each class.
        size: Height and width, to which images are resized.
        color_mode: `"rgb"`, `"rgba"` or `"grayscale"`.

    Raises:
        ValueError: There are no images; or, when its batch is read, one is damaged, or has more
            than 8 bits a value.
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
    from PIL import Image

    mode = _MODES[checks.one_of("color_mode", color_mode, _MODES)]
    if np.shape(size) != (2,):
        checks.fail("`size` must be `(height, width)`.", size=size)
    height, width = (checks.integer("size", pixels) for pixels in size)
    classes = sorted(path for path in pathlib.Path(directory).glob("[!.]*") if path.is_dir())
    files = [
        (path, label)
        for label, of_class in enumerate(classes)
        for path in sorted(of_class.rglob("*"))
        if path.suffix.lower() in _IMAGES
        and not any(part.startswith(".") for part in path.relative_to(of_class).parts)
    ]
    if not files:
        checks.fail_for_file(
            "There are no images in subdirectories of this directory",
            directory,
            remedy=f"Each class has a subdirectory; names end in {', '.join(_IMAGES)}.",
        )

    def decoded(path: pathlib.Path) -> np.ndarray:
        try:
            with Image.open(path) as opened:
                depth = opened.mode[0]
                image = opened.convert(mode).resize((width, height), Image.Resampling.BILINEAR)
        except Exception as error:  # damaged bytes raise many kinds
            _fail_for_file("image", path, error)
        if depth in "IF":  # converting cuts values off at 255
            checks.fail_for_file("This image has more than 8 bits a value", path)
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
            lambda *parts: None if {*map(type, parts)} == {type(None)} else np.stack(parts),
            *examples,
        )
    except ValueError as error:
        checks.fail(
            "Every example must have the same parts, of the same shape.",
            error=checks.first_line(error),
            remedy="Pad or cut them in Grain, and leave `.batch()` to `ArrayBatches`.",
        )


def _fail_for_file(kind: str, path: str | os.PathLike[str], error: BaseException) -> NoReturn:
    raise errors.FileInputError(
        f"This {kind} cannot be read: {os.fspath(path)}. Received: {checks.first_line(error)}. If "
        "it is missing, cut off or damaged, copy it again or remove it."
    ) from error


def _imported(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise errors.PackageInputError(
            f"`{package}` is not installed. Run `{checks.install_command('data')}`."
        ) from error
