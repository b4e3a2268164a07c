"""Batches of numpy arrays by the rules of `kdpkit.pipelines`, without TensorFlow.

`ArrayBatches` is a `keras.utils.PyDataset`, so `fit`, `evaluate` and `TrainingLoop` take it on
every backend. It splits arrays, or a `Source` of examples, such as `from_datasets`, `from_parquet`,
`from_images` and `from_grain` return. `pad_batch` pads a single batch.
"""

import dataclasses
import functools
import glob
import importlib
import itertools
import math
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, TypeAlias

import keras
import numpy as np

from kdpkit import errors, scaling
from kdpkit._internal import checks

Nest: TypeAlias = Any  # arrays in tuples, lists and dictionaries, as Keras takes them
Batch: TypeAlias = Any  # a nest `x`, `(x, y)` or `(x, y, sample_weight)`

_REMAINDERS = ("drop", "pad", "keep")
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

    >>> squares = Source(examples=6, read=lambda indices: (indices, indices**2))
    >>> ArrayBatches(squares, global_batch_size=3)[1]
    (array([3, 4, 5]), array([ 9, 16, 25]))
    """

    examples: int
    read: Callable[[np.ndarray], Any]
    has_order: bool = False


class ArrayBatches(keras.utils.PyDataset):
    """Splits arrays, or a `Source` of examples, into global batches, in a new order each epoch.

    A batch depends only on the seed, the epoch and its position in the epoch: it is the same on any
    number of devices and processes, and the same again when a run is resumed. An epoch is over once
    its last batch has been returned, since Keras also takes a first batch to build a model. Call
    `fit` with `shuffle=False`, or Keras shuffles the batches again.

    Each of several processes gets its examples of every global batch, in the order of the
    processes, so together they train what one process would; it reads no others.

    Args:
        data: Inputs `x`, `(x, y)` or `(x, y, sample_weight)`, each any nest of arrays with the same
            number of examples. Missing labels may be `None`. Or a `Source`.
        global_batch_size: Examples in a batch, over all devices and processes.
        seed: Fixes the order of every epoch; None keeps the order of the data.
        remainder: `"drop"`, `"pad"` or `"keep"` a smaller last batch. On JAX plain Keras raises if
            the devices do not divide a batch; `kdpkit.training` trains on it exactly.
        mode: How a padded batch is weighted. With `"train"` its loss is the mean over its real
            examples (see `kdpkit.scaling.padded_examples`). With `"eval"` all real examples have
            the same weight, and weights average 1 over an epoch, so the loss of `evaluate` is
            the mean over all real examples; use `weighted_metrics`.
        augment: A function of a batch and a `numpy.random.Generator`, a new one for every batch of
            every epoch. It gets the examples of this process.
        steps_per_epoch: Batches in an epoch; None takes all. If fewer, each epoch takes the first
            ones of its order.
        process_count: Number of processes that train together, such as `jax.process_count()`.
        process_index: Index of this process, such as `jax.process_index()`.

    Attributes:
        epoch: The current epoch, from 0; set it to start at another.

    Raises:
        ValueError: Arrays of different lengths or without examples, more than three parts, fewer
            examples than one batch with `"drop"`, too many steps, processes that do not divide
            the batch, no fixed shape or type, text on JAX, or a `Source` that reads other examples
            when it is asked again.

    >>> batches = ArrayBatches((np.arange(5), np.arange(5) % 2), global_batch_size=2)
    >>> len(batches), batches[1]
    (2, (array([2, 3]), array([0, 1])))
    >>> padded = ArrayBatches(np.arange(3), global_batch_size=2, remainder="pad", mode="eval")
    >>> padded[1]
    (array([2, 2]), None, array([1.3333334, 0.       ], dtype=float32))
    """

    def __init__(
        self,
        data: Batch | Source,
        *,
        global_batch_size: int,
        seed: int | None = None,
        remainder: str = "drop",
        mode: str = "train",
        augment: Callable[[Batch, np.random.Generator], Batch] | None = None,
        steps_per_epoch: int | None = None,
        process_count: int = 1,
        process_index: int = 0,
    ) -> None:
        super().__init__()
        self._source = data if isinstance(data, Source) else _in_memory(data)
        self.global_batch_size = checks.integer("global_batch_size", global_batch_size)
        self.seed = seed if seed is None else checks.integer("seed", seed, minimum=0)
        self.remainder = checks.one_of("remainder", remainder, _REMAINDERS)
        self.mode = checks.one_of("mode", mode, ("train", "eval"))
        self.augment = augment
        self.process_count = checks.integer("process_count", process_count)
        self.process_index = checks.integer("process_index", process_index, minimum=0)
        self.epoch = 0
        self._is_given = False  # including its last batch
        self._num_examples = checks.integer("examples", self._source.examples)
        if self._source.has_order and seed is not None:
            checks.fail(
                "These data have an order of their own.",
                seed=seed,
                remedy="Leave `seed` out, and shuffle where they are made, as `shuffle` of Grain.",
            )
        self._check_processes()
        self.steps_per_epoch = self._length(steps_per_epoch)
        self._kinds = _kinds_of(_first_example(self._source))

    @property
    def examples(self) -> int:
        """Examples in an epoch, over all processes, without padding."""
        return min(self._num_examples, self.steps_per_epoch * self.global_batch_size)

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return self.steps_per_epoch

    def __getitem__(self, index: int) -> Batch:
        """Return this process's examples of a batch of the current epoch."""
        if not 0 <= index < len(self):
            raise IndexError(f"There is no batch {index} in an epoch of {len(self)}.")
        self._is_given |= index == len(self) - 1
        first = index * self.global_batch_size
        taken = np.asarray(self._order()[first : first + self.global_batch_size])
        batch = self._padded(taken) if self.remainder == "pad" else self._read(taken)
        if self.augment is not None:
            position = (self.seed or 0, self.epoch, index, self.process_index)
            batch = self.augment(batch, np.random.default_rng(position))
        # Keras makes no `tf.TypeSpec` of a list, nor of an array of texts.
        return keras.tree.map_structure(_as_tensor_of_texts, keras.tree.lists_to_tuples(batch))

    def on_epoch_end(self) -> None:
        """Advance to the next epoch and its order, if this epoch was returned completely."""
        self.epoch += self._is_given
        self._is_given = False

    def _order(self) -> range | np.ndarray:
        """Return the examples' indices in the order of the current epoch."""
        count = self._num_examples
        first = self.epoch * count if self._source.has_order else 0
        if self.seed is None:
            return range(first, first + count)
        return _permutation(count, self.seed, self.epoch)

    def _read(self, taken: np.ndarray) -> Batch:
        """Read those of the examples that are this process's."""
        indices = self._of_process(taken)
        batch = _as_batch(self._source.read(indices))
        kinds = _kinds_of(batch)
        if kinds != self._kinds or num_examples(batch) != len(indices):
            checks.fail(
                "Every example must have the shape and the type of the first one.",
                first=self._kinds,
                later=kinds,
                remedy="Convert, pad or cut the examples before they are split into batches.",
            )
        return batch

    def _padded(self, taken: np.ndarray) -> Batch:
        size = self.global_batch_size
        source, weights = scaling.padded_examples(len(taken), size, mode=self.mode)
        factor = len(self) * size / self.examples if self.mode == "eval" else 1.0
        own_weights = self._of_process(factor * np.asarray(weights))
        return _weighted(self._read(taken[[*source]]), own_weights)

    def _of_process(self, part: np.ndarray) -> np.ndarray:
        count = len(part) // self.process_count
        return part[self.process_index * count :][:count]

    def _length(self, wanted: int | None) -> int:
        rounded = math.floor if self.remainder == "drop" else math.ceil
        available = rounded(self._num_examples / self.global_batch_size)
        if available == 0:
            checks.fail(
                "The data has fewer examples than a batch, so nothing is left when the "
                "remainder is dropped.",
                examples=self._num_examples,
                global_batch_size=self.global_batch_size,
                remedy='Use smaller batches, or `remainder="pad"`.',
            )
        steps = available if wanted is None else checks.integer("steps_per_epoch", wanted)
        if steps > available:
            checks.fail(
                f"An epoch cannot have more batches than the data, which has {available}.",
                steps_per_epoch=steps,
                remedy="Train for more epochs instead.",
            )
        return steps

    def _check_processes(self) -> None:
        count = self.process_count
        if self.process_index >= count:
            checks.fail(
                "`process_index` must be less than `process_count`; the first process is 0.",
                process_index=self.process_index,
                process_count=count,
            )
        uneven = self.global_batch_size % count or (
            self.remainder == "keep" and self._num_examples % self.global_batch_size % count
        )
        if uneven:
            checks.fail(
                "Every process must get the same number of examples of every batch.",
                examples=self._num_examples,
                global_batch_size=self.global_batch_size,
                process_count=count,
                remedy='Use a multiple of the processes, and `remainder="pad"` or `"drop"`.',
            )


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
    >>> data = datasets.Dataset.from_dict({"tokens": [[7, 8], [5, 6]], "label": [0, 1]})
    >>> train = ArrayBatches(from_datasets(data, x="tokens", y="label"), global_batch_size=2)
    >>> [part.tolist() for part in train[0]]
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
    >>> path = tempfile.mkdtemp() + "/train.parquet"
    >>> _ = datasets.Dataset.from_dict({"tokens": [[7, 8], [5, 6]]}).to_parquet(path)
    >>> ArrayBatches(from_parquet(path, x="tokens"), global_batch_size=1)[1].tolist()
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
    >>> directory = pathlib.Path(tempfile.mkdtemp())
    >>> for name in ("cat", "dog"):
    ...     (directory / name).mkdir()
    ...     keras.utils.save_img(directory / name / "1.png", np.ones((6, 6, 3)))
    >>> x, y = ArrayBatches(from_images(directory, size=(4, 4)), global_batch_size=2)[0]
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
    >>> data = grain.MapDataset.range(5).seed(1).shuffle()
    >>> train = ArrayBatches(from_grain(data), global_batch_size=5)
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


def pad_batch(batch: Batch, global_batch_size: int, *, mode: str = "train") -> Batch:
    """Pad a batch of numpy arrays to `global_batch_size`; `pad_to_global_batch` without tf.data.

    If the examples of a batch interact, as in training with BatchNormalization, padding is not
    exact.

    Args:
        batch: Inputs `x`, `(x, y)`, or `(x, y, sample_weight)`, each any nest of arrays.
        global_batch_size: Examples in the padded batch.
        mode: `"train"` or `"eval"`, as in `kdpkit.scaling.padded_examples`.

    Returns:
        `(x, y, sample_weight)`, with `y` None if there was none. Existing weights are multiplied.

    Raises:
        ValueError: There are more examples than that, or none at all.

    >>> x, _, weight = pad_batch(np.array([5.0, 6.0]), 4)
    >>> x.tolist(), weight.tolist()
    ([5.0, 6.0, 6.0, 6.0], [2.0, 2.0, 0.0, 0.0])
    """
    batch = _as_batch(batch)
    source, weights = scaling.padded_examples(num_examples(batch), global_batch_size, mode=mode)
    return _weighted(_taken(batch, [*source]), weights)


def num_examples(batch: Nest) -> int:
    """Return the number of examples in a batch, the same in all its arrays.

    Raises:
        ValueError: They differ, or there are none.

    >>> num_examples((np.zeros((3, 2)), {"label": np.zeros(3)}))
    3
    """
    leaves = (leaf for leaf in keras.tree.flatten(batch) if leaf is not None)
    shapes = [tuple(leaf.shape) if hasattr(leaf, "shape") else np.shape(leaf) for leaf in leaves]
    counts = {shape[0] if shape else 0 for shape in shapes}
    if len(counts) != 1 or 0 in counts:
        checks.fail(
            "All arrays of a batch must have the same number of examples, at least one.",
            shapes=shapes if len(shapes) < 9 else [*shapes[:8], "..."],
            remedy="The examples lie along the first axis; convert other values with `np.asarray`.",
        )
    return counts.pop()


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


def _in_memory(data: Batch) -> Source:
    data = _as_batch(data)
    return Source(num_examples(data), functools.partial(_taken, data))


def _first_example(source: Source) -> Batch:
    """Return an example, and check that it is the same when it is read again."""
    once, again = (_as_batch(source.read(np.array([0]))) for _ in range(2))
    _kinds_of(once)  # raises for what cannot be compared
    for one, other in zip(*map(keras.tree.flatten, (once, again)), strict=True):
        if not np.array_equal(one, other, equal_nan=one is not None and one.dtype.kind in "fc"):
            checks.fail(
                "An example is another one each time that it is read, so no order of the data is "
                "reproducible.",
                first=one,
                again=other,
                remedy="Draw random numbers in `augment`, or in Grain's `random_map(seed=...)`.",
            )
    return once


def _kinds_of(batch: Batch) -> dict[str, Any]:
    """Return the shape and type of an example by the name of each part; raise if it has none."""
    kinds = {}
    parts = zip(
        ("x", "y", "sample_weight"), keras.utils.unpack_x_y_sample_weight(batch), strict=True
    )
    for part, nest in parts:
        for path, leaf in keras.tree.flatten_with_path(nest):
            if leaf is None:
                continue
            name, kind = ".".join([part, *map(str, path)]), leaf.dtype.kind
            is_text = kind in "SU" or (
                kind == "O" and leaf.size and all(isinstance(of, str | bytes) for of in leaf.flat)
            )
            if not (kind in "biufcV" or (is_text and keras.backend.backend() == "tensorflow")):
                checks.fail(
                    "The data have a part that is no array of numbers of one shape.",
                    part=name,
                    example=np.ravel(leaf)[:1].tolist(),
                    remedy="Look text up as numbers (on TensorFlow layers take it as it is), pad, "
                    "cut or resize what differs in shape, and flatten what is nested.",
                )
            kinds[name] = leaf.shape[1:], kind
    return kinds


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


def _as_batch(data: Batch) -> Batch:
    """Convert the leaves to arrays, and check the number of parts."""
    keras.utils.unpack_x_y_sample_weight(data)
    return _as_arrays(data)


def _as_arrays(nest: Nest) -> Nest:
    """Convert the leaves to arrays; a list is a nest if it contains arrays, else an array."""
    if isinstance(nest, list) and not any(hasattr(part, "shape") for part in nest):
        return np.asarray(nest)
    if isinstance(nest, list | tuple):
        return type(nest)(map(_as_arrays, nest))
    if isinstance(nest, dict):
        return {name: _as_arrays(part) for name, part in nest.items()}
    if hasattr(nest, "__getitem__") and not (
        hasattr(nest, "__array__") or isinstance(nest, Sequence)
    ):
        checks.fail(
            "These are no arrays.",
            data=type(nest).__name__,
            remedy="Pass datasets as `from_datasets(...)` or `from_grain(...)`.",
        )
    return nest if nest is None else np.asarray(nest)


def _as_tensor_of_texts(part: Any) -> Any:
    is_of_texts = isinstance(part, np.ndarray) and part.dtype.kind in "OSU"
    return keras.ops.convert_to_tensor(part) if is_of_texts else part


def _taken(nest: Nest, indices: Sequence[int] | np.ndarray) -> Nest:
    return keras.tree.map_structure(lambda part: part if part is None else part[indices], nest)


def _weighted(batch: Batch, weights: Sequence[float] | np.ndarray) -> Batch:
    """Multiply the weight of each example, 1 where there is none, by `weights`."""
    x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
    factor = np.asarray(weights, "float32")
    if weight is None:
        return x, y, factor

    def times(part: np.ndarray) -> np.ndarray:
        kind = part.dtype if part.dtype.kind == "f" else factor.dtype
        return part.astype(kind) * factor.reshape(-1, *[1] * (part.ndim - 1)).astype(kind)

    return x, y, keras.tree.map_structure(times, weight)


@functools.lru_cache(maxsize=4)  # every batch of an epoch needs it
def _permutation(num_examples: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(num_examples)
