"""Sources of examples: TFRecord files, and files of any kind that are read in parallel."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from kdpkit._internal import checks, storage

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_GZIP_MAGIC = b"\x1f\x8b"


def tfrecords(
    pattern: Paths, parse: Callable[[tf.Tensor], Any] | None = None, *, files_at_once: int = 16
) -> tf.data.Dataset:
    """Read several TFRecord files in parallel, and parse their records in parallel.

    The files may be GZIP-compressed. The order of the examples is the same in every run. If reading
    limits training, leave out `parse` and parse batches after the shuffle:
    `train_pipeline(augment=lambda records, _: parse(records))`.

    Args:
        pattern: A glob such as `"data/train-*.tfrecord"`, or paths; `gs://bucket/...` works too.
        parse: Returns an example for a record, a string scalar; see `example_parser`. None returns
            the records unparsed.
        files_at_once: Number of files to read in parallel.

    Raises:
        ValueError: As `interleave_files`. A damaged record raises TensorFlow's `DataLossError` when
            it is read. A file that a copy left incomplete may read as a shorter one, which
            `tf.data.experimental.assert_cardinality` notices.
    """
    files = _matching(pattern)
    kinds = ["GZIP" if _begins_as_gzip(file) else "" for file in files]
    records = tf.data.Dataset.from_tensor_slices((files, kinds)).interleave(
        tf.data.TFRecordDataset, **_in_parallel(files, files_at_once)
    )
    if parse is None:
        return records
    return records.map(parse, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def interleave_files(
    pattern: Paths, reader: Callable[[tf.Tensor], tf.data.Dataset], *, files_at_once: int = 16
) -> tf.data.Dataset:
    r"""Read several files in parallel, taking an example from each, round-robin.

    Args:
        pattern: A glob, whose files are sorted, or paths in the order given; `gs://bucket/...`
            works too.
        reader: Returns a dataset for a path, a string scalar; for text, `tf.data.TextLineDataset`.
        files_at_once: Number of files to read in parallel.

    Raises:
        ValueError: The pattern matches no file, or there is no file at a path.

    >>> import tempfile, pathlib
    >>> directory = pathlib.Path(tempfile.mkdtemp())
    >>> for name in ("a", "b"):
    ...     _ = (directory / name).write_text(f"first of {name}\nsecond of {name}\n")
    >>> lines = interleave_files(f"{directory}/*", tf.data.TextLineDataset)
    >>> [line.numpy().decode() for line in lines]
    ['first of a', 'first of b', 'second of a', 'second of b']
    """
    files = _matching(pattern)
    names = tf.data.Dataset.from_tensor_slices(files)
    return names.interleave(reader, **_in_parallel(files, files_at_once))


def _in_parallel(files: list[str], files_at_once: int) -> dict[str, Any]:
    return {
        "cycle_length": min(checks.integer("files_at_once", files_at_once), len(files)),
        "num_parallel_calls": tf.data.AUTOTUNE,
        "deterministic": True,
    }


def write_tfrecords(
    examples: Iterable[Mapping[str, npt.ArrayLike]],
    path: str | os.PathLike[str],
    *,
    shards: int = 1,
    compression: str | None = "GZIP",
) -> list[str]:
    """Write examples round-robin to TFRecord files, which appear once all are complete.

    Args:
        examples: Mappings from feature name to an array or scalar of integers, floats, bytes or
            text. uint8 arrays are stored as bytes, one per element.
        path: Common prefix of the files: `"data/train"` gives `data/train-00000-of-00002.tfrecord`
            and so on. It may be in object storage (`"gs://bucket/train"`).
        shards: Number of files. Several files of about 100 MB each read fastest. Those of an
            earlier run with other `shards` stay, and a glob matches them too.
        compression: `"GZIP"` or None.

    Returns:
        The paths of the files.

    Raises:
        ValueError: There are fewer examples than `shards`, or a feature cannot be stored.

    >>> import tempfile
    >>> directory = tempfile.mkdtemp()
    >>> examples = [{"x": np.array([1.5]), "y": label} for label in range(3)]
    >>> files = write_tfrecords(examples, f"{directory}/toy")
    >>> parse = example_parser({"x": tf.TensorSpec([1]), "y": tf.TensorSpec([], "int32")})
    >>> [int(example["y"]) for example in tfrecords(files, parse)]
    [0, 1, 2]
    """
    shards = checks.integer("shards", shards)
    checks.one_of("compression", compression, (None, "GZIP"))
    beginning = storage.require_tensorflow(path)
    names = [f"{beginning}-{shard:05}-of-{shards:05}.tfrecord" for shard in range(shards)]
    unfinished = [f"{name}.unfinished" for name in names]
    tf.io.gfile.makedirs(os.fspath(storage.path(names[0]).parent))
    try:
        _write_alternating(examples, unfinished, compression or "")
        for file, name in zip(unfinished, names, strict=True):
            tf.io.gfile.rename(file, name, overwrite=True)
    finally:
        for file in unfinished:
            storage.path(file).unlink(missing_ok=True)
    return names


def example_parser(
    features: Mapping[str, tf.TensorSpec],
) -> Callable[[tf.Tensor], dict[str, tf.Tensor]]:
    """Return the `parse` function for records that `write_tfrecords` wrote.

    Args:
        features: The shape and dtype of each feature; shapes must be static.

    Returns:
        A function from a record, a string scalar, to a dictionary of tensors of those shapes and
        dtypes; or, in one call, from a vector of records to batches of these.
    """
    stored = {name: _stored_feature(name, spec) for name, spec in features.items()}

    def parse(record: tf.Tensor) -> dict[str, tf.Tensor]:
        values = tf.io.parse_example(record, stored)
        return {name: _decoded(values[name], spec) for name, spec in features.items()}

    return parse


def _write_alternating(
    examples: Iterable[Mapping[str, npt.ArrayLike]], files: list[str], kind: str
) -> None:
    writers = [tf.io.TFRecordWriter(file, options=kind) for file in files]
    count = 0
    try:
        for record in map(_serialized, examples):
            writers[count % len(writers)].write(record)
            count += 1
    finally:
        for writer in writers:
            writer.close()
    if count < len(files):
        checks.fail(
            "There are too few examples for that many files.",
            examples=count,
            shards=len(files),
        )


def _serialized(example: Mapping[str, npt.ArrayLike]) -> bytes:
    feature = {name: _feature(name, value) for name, value in example.items()}
    return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()


def _feature(name: str, value: npt.ArrayLike) -> tf.train.Feature:
    value = value.encode() if isinstance(value, str) else value
    array = np.asarray(value)
    if isinstance(value, bytes) or array.dtype == np.uint8:
        content = value if isinstance(value, bytes) else array.tobytes()
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[content]))
    if array.dtype.kind not in "biuf":
        checks.fail(
            f"Feature `{name}` cannot be stored in a TFRecord file.",
            dtype=str(array.dtype),
            remedy="Use integers, floats, bytes or text.",
        )
    if array.dtype.kind == "f":
        return tf.train.Feature(float_list=tf.train.FloatList(value=array.ravel()))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=array.ravel().astype(int)))


def _stored_feature(name: str, spec: tf.TensorSpec) -> tf.io.FixedLenFeature:
    if not spec.shape.is_fully_defined():
        checks.fail(f"Feature `{name}` needs a static shape.", shape=spec.shape)
    if spec.dtype == tf.string and spec.shape.rank:
        checks.fail(
            f"Feature `{name}` is one text or bytes, as `write_tfrecords` stores it.",
            shape=spec.shape,
            remedy="Use `tf.TensorSpec([], tf.string)`, and several features for several texts.",
        )
    if spec.dtype in (tf.uint8, tf.string):
        return tf.io.FixedLenFeature([], tf.string)
    return tf.io.FixedLenFeature(spec.shape, tf.float32 if spec.dtype.is_floating else tf.int64)


def _decoded(value: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
    if spec.dtype == tf.uint8:
        batch = value.shape if value.shape.is_fully_defined() else tf.shape(value)
        decoded = tf.reshape(tf.io.decode_raw(value, tf.uint8), tf.concat([batch, spec.shape], 0))
        return tf.ensure_shape(decoded, value.shape.concatenate(spec.shape))
    return value if spec.dtype == tf.string else tf.cast(value, spec.dtype)


def _matching(pattern: Paths) -> list[str]:
    """Return the files that globs match, sorted within each glob."""
    several = [pattern] if isinstance(pattern, (str, os.PathLike)) else list(pattern)
    if not several:
        checks.fail("`pattern` names no file.", pattern=pattern)
    files: list[str] = []
    for part in map(storage.require_tensorflow, several):
        with storage.reporting(part):
            found = sorted(tf.io.gfile.glob(part))
        if not found:
            checks.fail_for_file("No file matches", part, remedy="Check the path or the pattern.")
        files += found
    return files


def _begins_as_gzip(file: str) -> bool:
    with tf.io.gfile.GFile(file, "rb") as stream:
        return stream.read(2) == _GZIP_MAGIC
