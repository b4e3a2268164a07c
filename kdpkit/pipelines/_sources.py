"""Sources of examples: text lines, TFRecord files, several files in parallel."""

import codecs
import collections
import contextlib
import gzip
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from kdpkit import errors
from kdpkit._internal import checks, storage

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_GZIP_MAGIC = b"\x1f\x8b"
_BLOCK = 1 << 20
_SHARD = re.compile(r"(?P<beginning>.*)-\d{5}-of-(?P<count>\d{5})(\.\w+)?", re.DOTALL)
_FRAME = 16  # bytes around each TFRecord: its length, and two checksums


def text_lines(paths: Paths, *, compression: str | None = None) -> tf.data.Dataset:
    r"""Read text files line by line, in the order given.

    Every file is read once beforehand, because TensorFlow silently accepts truncated GZIP files,
    and detects invalid UTF-8 only during training, if at all.

    Args:
        paths: One or several paths, such as `gs://bucket/text.txt`.
        compression: `"GZIP"`, or None to detect it from the first bytes of each file.

    Returns:
        A dataset of string scalars, without the line ends.

    Raises:
        ValueError: A file is missing, empty, unreadable, truncated or not UTF-8.

    >>> import tempfile, pathlib
    >>> file = pathlib.Path(tempfile.mkdtemp(), "text.txt")
    >>> _ = file.write_text("one line\nanother\n")
    >>> [line.numpy() for line in text_lines(file)]
    [b'one line', b'another']
    """
    checks.one_of("compression", compression, (None, "GZIP"))
    files = [_readable(path) for path in _listed(paths)]
    kinds = [compression or _compression_of(file) for file in files]
    for file, kind in zip(files, kinds, strict=True):
        _check_text(file, kind)
    if len(set(kinds)) == 1:
        return tf.data.TextLineDataset(files, compression_type=kinds[0])
    datasets = [*map(tf.data.TextLineDataset, files, kinds)]
    return tf.data.Dataset.from_tensor_slices(datasets).flat_map(lambda lines: lines)


def tfrecords(
    pattern: Paths,
    parse: Callable[[tf.Tensor], Any] | None = None,
    *,
    compression: str | None = None,
    files_at_once: int = 16,
    validate: bool = False,
) -> tf.data.Dataset:
    """Read several TFRecord files in parallel, and parse their records in parallel.

    The order of the examples is the same in every run. If reading limits training, leave out
    `parse` and parse batches after the shuffle: `train_pipeline(augment=lambda records, _:
    parse(records))`.

    Args:
        pattern: A glob such as `"data/train-*.tfrecord"`, or paths; `gs://bucket/...` works too.
        parse: Returns an example for a record, a string scalar; see `example_parser`. None returns
            the records unparsed.
        compression: `"GZIP"`, `"ZLIB"`, or None to detect GZIP from the first bytes.
        files_at_once: Number of files to read in parallel.
        validate: Read every file first (at about 1 GB/s) and raise for damaged ones. Otherwise
            TensorFlow raises a `DataLossError` during training, which names neither file nor
            record.

    Raises:
        ValueError: As `interleave_files`.
    """
    checks.one_of("compression", compression, (None, "GZIP", "ZLIB"))
    files = _matching(pattern)
    kinds = {compression or _compression_of(file) for file in files}
    if len(kinds) > 1:
        checks.fail("Compressed and plain TFRecord files cannot be mixed.", pattern=pattern)
    kind = kinds.pop()
    for file in files if validate else ():
        _count_records(file, kind)

    def reader(file: tf.Tensor) -> tf.data.Dataset:
        return tf.data.TFRecordDataset(file, compression_type=kind)

    records = _interleaved(files, reader, files_at_once)
    if parse is None:
        return records
    return records.map(parse, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def interleave_files(
    pattern: Paths, reader: Callable[[tf.Tensor], tf.data.Dataset], *, files_at_once: int = 16
) -> tf.data.Dataset:
    """Read several files in parallel, taking an example from each, round-robin.

    Args:
        pattern: A glob, whose files are sorted, or paths in the order given; `gs://bucket/...`
            works too.
        reader: Returns a dataset for a path, a string scalar.
        files_at_once: Number of files to read in parallel.

    Raises:
        ValueError: The pattern matches no file, or matches shards of two different sets of files,
            or a file is missing, empty or unreadable.
    """
    return _interleaved(_matching(pattern), reader, files_at_once)


def _interleaved(
    files: list[str], reader: Callable[[tf.Tensor], tf.data.Dataset], files_at_once: int
) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(files).interleave(
        reader,
        cycle_length=min(checks.integer("files_at_once", files_at_once), len(files)),
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=True,
    )


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
        shards: Number of files. Several files of about 100 MB each read fastest.
        compression: `"GZIP"` or None.

    Returns:
        The paths of the files.

    Raises:
        ValueError: There are fewer examples than `shards`, a feature cannot be stored, or the files
            cannot be written.

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
    with _reporting(names[0]):
        tf.io.gfile.makedirs(os.fspath(storage.path(names[0]).parent))
    try:
        _write_alternating(examples, unfinished, compression or "")
        with _reporting(names[0]):
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


def validate_tfrecords(paths: Paths, *, compression: str | None = None) -> int:
    """Read TFRecord files completely, check their checksums, and return the number of records.

    Raises:
        ValueError: A file is damaged; the message names it and the record, counted from 0.
    """
    return sum(
        _count_records(file, compression or _compression_of(file)) for file in _matching(paths)
    )


def _count_records(file: str, compression: str) -> int:
    count = size = 0
    try:
        for record in tf.data.TFRecordDataset(file, compression_type=compression):
            count += 1
            size += len(record.numpy()) + _FRAME
    except tf.errors.DataLossError as error:
        reason = error.message.partition("}} ")[2].partition(" [Op:")[0] or error.message
        raise errors.FileInputError(
            f"Record {count} (counted from 0) of the TFRecord file {file} is damaged ({reason}). "
            "Write or copy the file again, or leave it out."
        ) from error
    # docs/upstream/tensorflow_takes_cut_tfrecords.md
    if compression == "GZIP":
        collections.deque(_blocks(file, compression), maxlen=0)
    elif not compression and size != tf.io.gfile.stat(file).length:
        checks.fail_for_file(
            f"The TFRecord file breaks off after record {count - 1} (counted from 0)",
            file,
            remedy="Write or copy it again.",
        )
    return count


def _write_alternating(
    examples: Iterable[Mapping[str, npt.ArrayLike]], files: list[str], kind: str
) -> None:
    with _reporting(files[0]):
        writers = [tf.io.TFRecordWriter(file, options=kind) for file in files]
    count = 0
    try:
        for record in map(_serialized, examples):
            with _reporting(files[0]):
                writers[count % len(writers)].write(record)
            count += 1
    finally:
        with _reporting(files[0]):
            for writer in writers:
                writer.close()
    if count < len(files):
        checks.fail(
            "There are too few examples for that many files.",
            examples=count,
            shards=len(files),
        )


@contextlib.contextmanager
def _reporting(file: str) -> Iterator[None]:
    """Raise an `InputError` with the reason why a file cannot be written."""
    try:
        with storage.reporting(file):
            yield
    except tf.errors.OpError as error:
        reason = error.message.rpartition("; ")[2]
        raise errors.FileInputError(
            f"The TFRecord file cannot be written ({reason}): {file}. Pass a path in a directory "
            "with room, and with the right to write there."
        ) from error


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


def _listed(paths: Paths) -> list[str]:
    several = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if not several:
        checks.fail("`paths` names no file.", paths=paths)
    return [storage.require_tensorflow(path) for path in several]


def _matching(pattern: Paths) -> list[str]:
    """Return the readable files that globs match, sorted within each glob."""
    files: list[str] = []
    for part in _listed(pattern):
        with storage.reporting(part):
            found = sorted(tf.io.gfile.glob(part))
        if not found:
            checks.fail_for_file("No file matches", part, remedy="Check the path or the pattern.")
        _check_one_writing(part, found)
        files += [_readable(file) for file in found]
    return files


def _check_one_writing(pattern: str, files: list[str]) -> None:
    """Raise for a glob that matches both `train-...-of-00002` and old `train-...-of-00004`."""
    counts: dict[str, set[int]] = {}
    for file in files:
        if found := _SHARD.fullmatch(file):
            counts.setdefault(found["beginning"], set()).add(int(found["count"]))
    for beginning, several in counts.items():
        if len(several) > 1:
            checks.fail_for_file(
                "Files of several runs of `write_tfrecords` match, perhaps with the same examples: "
                f"{beginning} has been split into {' and into '.join(map(str, sorted(several)))} "
                "files",
                pattern,
                remedy="Delete those of the older one, or pass a pattern that ends in their count.",
            )


def _readable(file: str) -> str:
    """Return a file if it exists, is readable and not empty, on any file system of gfile."""
    if tf.io.gfile.isdir(file):
        checks.fail_for_file("A file is needed, and this is a directory", file)
    try:
        first = _head(file, 1)
    except tf.errors.NotFoundError:
        checks.fail_for_file("There is no such file", file, remedy="Check the path.")
    except tf.errors.OpError as error:
        checks.fail_for_file(f"The file cannot be read ({error.message})", file)
    if not first:
        checks.fail_for_file("The file is empty", file)
    return file


def _compression_of(file: str) -> str:
    return "GZIP" if _head(file, 2) == _GZIP_MAGIC else ""


def _head(file: str, size: int) -> bytes:
    with tf.io.gfile.GFile(file, "rb") as stream:
        return stream.read(size)


def _check_text(file: str, compression: str) -> None:
    """Read the file completely and raise if it is damaged or not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    lines = 0
    try:
        for block in _blocks(file, compression):
            decoder.decode(block)
            lines += block.count(b"\n")
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        line = lines + error.object[: error.start].count(b"\n") + 1
        checks.fail_for_file(
            f"The file is not UTF-8 text (byte 0x{error.object[error.start]:02x} in line {line})",
            file,
            remedy="Convert it, for example with `iconv -t UTF-8`.",
        )


def _blocks(file: str, compression: str) -> Iterator[bytes]:
    """Yield the content in blocks; raise for a GZIP file that is damaged or lacks its end."""
    with tf.io.gfile.GFile(file, "rb") as raw:
        stream = gzip.GzipFile(fileobj=raw) if compression else raw
        try:
            while block := stream.read(_BLOCK):
                yield block
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            checks.fail_for_file(
                f"The GZIP file is damaged or incomplete ({error})",
                file,
                remedy="Copy or download it again.",
            )
