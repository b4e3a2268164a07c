"""Where examples come from: text lines, TFRecord files, many files at once."""

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
import tensorflow as tf

from kdpkit import _checks, _storage

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_GZIP_MAGIC = b"\x1f\x8b"
_BLOCK = 1 << 20
_SHARD = re.compile(r"(?P<beginning>.*)-\d{5}-of-(?P<count>\d{5})(\.\w+)?", re.DOTALL)
_FRAME = 16  # bytes around each TFRecord: its length, and two checksums


def text_lines(paths: Paths, *, compression: str | None = None) -> tf.data.Dataset:
    r"""Read text files line by line, in the order given.

    Every file is read through once beforehand, because TensorFlow ends a truncated GZIP file
    without a word and finds bytes that are not UTF-8 in the middle of training, if at all.

    Args:
        paths: A path or several, of this machine or of any file system that TensorFlow knows, as
            `gs://bucket/text.txt`.
        compression: `"GZIP"`, or None, which looks at the first bytes of each file.

    Returns:
        A dataset of string scalars, without the line ends.

    Raises:
        ValueError: A file is missing, empty, unreadable, truncated or not UTF-8; the sentence
            names it, and the line where it broke off.

    >>> import tempfile, pathlib
    >>> file = pathlib.Path(tempfile.mkdtemp(), "text.txt")
    >>> _ = file.write_text("one line\nanother\n")
    >>> [line.numpy() for line in text_lines(file)]
    [b'one line', b'another']
    """
    _checks.one_of("compression", compression, (None, "GZIP"))
    files = [_readable(path) for path in _listed(paths)]
    compressions = [compression or _compression_of(file) for file in files]
    for file, kind in zip(files, compressions, strict=True):
        _check_text(file, kind)
    if len(set(compressions)) == 1:
        return tf.data.TextLineDataset(files, compression_type=compressions[0])
    datasets = [
        tf.data.TextLineDataset(file, compression_type=kind)
        for file, kind in zip(files, compressions, strict=True)
    ]
    return tf.data.Dataset.from_tensor_slices(datasets).flat_map(lambda lines: lines)


def tfrecords(
    pattern: Paths,
    parse: Callable[[Any], Any] | None = None,
    *,
    compression: str | None = None,
    files_at_once: int = 16,
    validate: bool = False,
) -> tf.data.Dataset:
    """Read TFRecord files, several at once, and parse their records in parallel.

    The order of the examples is the same on every run. Where reading is what training waits for,
    leave `parse` out and parse whole batches, behind the shuffle: a `train_pipeline` does so in
    `augment=lambda records, _: parse(records)`.

    Args:
        pattern: A glob such as `"data/train-*.tfrecord"`, or paths, also as `gs://bucket/...`.
        parse: Makes an example from a record, a string scalar; see `example_parser`. None gives
            the records as they are.
        compression: `"GZIP"`, `"ZLIB"`, or None, which recognises GZIP by the first bytes.
        files_at_once: Files to read from in parallel.
        validate: Read every file through first (near 1 GB/s) and refuse damaged ones by name.
            Without it TensorFlow's `DataLossError` comes in the middle of training, and names
            neither file nor record; `validate_tfrecords` then does.

    Raises:
        ValueError: The pattern matches no file, or those of two writings with other numbers of
            shards, or a file is missing, empty or unreadable.
    """
    _checks.one_of("compression", compression, (None, "GZIP", "ZLIB"))
    files = _matching(pattern)
    kinds = {compression or _compression_of(file) for file in files}
    if len(kinds) > 1:
        _checks.refuse("Compressed and plain TFRecord files cannot be mixed.", pattern=pattern)
    kind = kinds.pop()
    if validate:
        validate_tfrecords(files, compression=kind)

    def reader(file: Any) -> tf.data.Dataset:
        return tf.data.TFRecordDataset(file, compression_type=kind)

    records = interleave_files(files, reader, files_at_once=files_at_once)
    if parse is None:
        return records
    return records.map(parse, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def interleave_files(
    pattern: Paths, reader: Callable[[Any], tf.data.Dataset], *, files_at_once: int = 16
) -> tf.data.Dataset:
    """Read several files at once and take an example from each in turn.

    Args:
        pattern: A glob, whose files come in sorted order, or paths in yours, also as
            `gs://bucket/...`.
        reader: Makes a dataset from a path, a string scalar.
        files_at_once: Files to read from in parallel.

    Raises:
        ValueError: The pattern matches no file, or those of two writings with other numbers of
            shards, or a file is missing, empty or unreadable.
    """
    files = _matching(pattern)
    return tf.data.Dataset.from_tensor_slices(files).interleave(
        reader,
        cycle_length=min(_checks.integer("files_at_once", files_at_once), len(files)),
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=True,
    )


def write_tfrecords(
    examples: Iterable[Mapping[str, Any]],
    path: str | os.PathLike[str],
    *,
    shards: int = 1,
    compression: str | None = "GZIP",
) -> list[str]:
    """Write examples to TFRecord files, dealt out in turn, that appear when all are whole.

    Args:
        examples: Mappings from feature name to an array or scalar of integers, floats, bytes or
            text. uint8 arrays are stored as bytes, one per element.
        path: The files' common beginning: `"data/train"` gives
            `data/train-00000-of-00002.tfrecord` and its sibling; so does `"gs://bucket/train"`.
        shards: Number of files. Reading wants several, each of 100 MB or so.
        compression: `"GZIP"` or None.

    Returns:
        The files' paths.

    Raises:
        ValueError: There are no examples, fewer than `shards`, or a feature has no TFRecord form;
            or the files cannot be written there.

    >>> import tempfile
    >>> directory = tempfile.mkdtemp()
    >>> examples = [{"x": np.array([1.5]), "y": label} for label in range(3)]
    >>> files = write_tfrecords(examples, f"{directory}/toy")
    >>> parse = example_parser({"x": tf.TensorSpec([1]), "y": tf.TensorSpec([], "int32")})
    >>> [int(example["y"]) for example in tfrecords(files, parse)]
    [0, 1, 2]
    """
    shards = _checks.integer("shards", shards)
    _checks.one_of("compression", compression, (None, "GZIP"))
    beginning = _storage.require_tensorflow(path)
    names = [f"{beginning}-{shard:05}-of-{shards:05}.tfrecord" for shard in range(shards)]
    unfinished = [f"{name}.unfinished" for name in names]
    with _naming_what_fails(names[0]):
        tf.io.gfile.makedirs(os.fspath(_storage.path(names[0]).parent))
    try:
        _write_in_turn(examples, unfinished, compression or "")
        with _naming_what_fails(names[0]):
            for file, name in zip(unfinished, names, strict=True):
                tf.io.gfile.rename(file, name, overwrite=True)
    finally:
        for file in unfinished:
            _storage.path(file).unlink(missing_ok=True)
    return names


def example_parser(features: Mapping[str, tf.TensorSpec]) -> Callable[[Any], dict[str, Any]]:
    """Give the `parse` function for records that `write_tfrecords` wrote.

    Args:
        features: The shape and dtype of each feature; shapes must be static.

    Returns:
        A function from a record, a string scalar, to a dictionary of tensors of those shapes and
        dtypes; from a batch of records, in a vector, to tensors with the batch's size in front.
        The latter makes one call for all of them.
    """
    stored = {name: _stored_feature(name, spec) for name, spec in features.items()}

    def parse(record: Any) -> dict[str, Any]:
        values = tf.io.parse_example(record, stored)
        return {name: _decoded(values[name], spec) for name, spec in features.items()}

    return parse


def validate_tfrecords(paths: Paths, *, compression: str | None = None) -> int:
    """Read TFRecord files through, checksums included, and give the number of records.

    Raises:
        ValueError: A file is damaged; the sentence names it and the record, counted from 0.
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
        raise _checks.FileInputError(
            f"Record {count} (counted from 0) of the TFRecord file {file} is damaged ({reason}). "
            "Write or copy the file again, or leave it out."
        ) from error
    # TensorFlow takes a file that is cut off between two records, or in a header, for whole.
    if compression == "GZIP":
        collections.deque(_blocks(file, compression), maxlen=0)
    elif not compression and size != tf.io.gfile.stat(file).length:
        _checks.refuse_file(
            f"The TFRecord file breaks off after record {count - 1} (counted from 0)",
            file,
            remedy="Write or copy it again.",
        )
    return count


def _write_in_turn(examples: Iterable[Mapping[str, Any]], files: list[str], kind: str) -> None:
    with _naming_what_fails(files[0]):
        writers = [tf.io.TFRecordWriter(file, options=kind) for file in files]
    count = 0
    try:
        for record in map(_serialized, examples):
            with _naming_what_fails(files[0]):
                writers[count % len(writers)].write(record)
            count += 1
    finally:
        with _naming_what_fails(files[0]):
            for writer in writers:
                writer.close()
    if count < len(files):
        _checks.refuse(
            "There are too few examples for the files asked for.",
            examples=count,
            shards=len(files),
        )


@contextlib.contextmanager
def _naming_what_fails(file: str) -> Iterator[None]:
    """Say in one sentence why a file cannot be written, on this machine or elsewhere."""
    try:
        with _storage.reporting(file):
            yield
    except tf.errors.OpError as error:
        reason = error.message.rpartition("; ")[2]
        raise _checks.FileInputError(
            f"The TFRecord file cannot be written ({reason}): {file}. Give a path in a directory "
            "with room, and with the right to write there."
        ) from error


def _serialized(example: Mapping[str, Any]) -> bytes:
    feature = {name: _feature(name, value) for name, value in example.items()}
    return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()


def _feature(name: str, value: Any) -> tf.train.Feature:
    if isinstance(value, str):
        value = value.encode()
    if isinstance(value, bytes):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        _checks.refuse(
            f"Feature `{name}` cannot be stored in a TFRecord file.",
            dtype=str(array.dtype),
            remedy="Use integers, floats, bytes or text.",
        )
    if array.dtype == np.uint8:
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[array.tobytes()]))
    if array.dtype.kind == "f":
        return tf.train.Feature(float_list=tf.train.FloatList(value=array.ravel()))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=array.ravel().astype(int)))


def _stored_feature(name: str, spec: tf.TensorSpec) -> tf.io.FixedLenFeature:
    if not spec.shape.is_fully_defined():
        _checks.refuse(f"Feature `{name}` needs a static shape.", shape=spec.shape)
    if spec.dtype == tf.string and spec.shape.rank:
        _checks.refuse(
            f"Feature `{name}` is one text or bytes, as `write_tfrecords` stores it.",
            shape=spec.shape,
            remedy="Use `tf.TensorSpec([], tf.string)`, and several features for several texts.",
        )
    if spec.dtype in (tf.uint8, tf.string):
        return tf.io.FixedLenFeature([], tf.string)
    return tf.io.FixedLenFeature(spec.shape, tf.float32 if spec.dtype.is_floating else tf.int64)


def _decoded(value: Any, spec: tf.TensorSpec) -> Any:
    if spec.dtype == tf.uint8:
        batch = value.shape if value.shape.is_fully_defined() else tf.shape(value)
        whole = tf.reshape(tf.io.decode_raw(value, tf.uint8), tf.concat([batch, spec.shape], 0))
        return tf.ensure_shape(whole, value.shape.concatenate(spec.shape))
    return value if spec.dtype == tf.string else tf.cast(value, spec.dtype)


def _listed(paths: Paths) -> list[str]:
    several = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if not several:
        _checks.refuse("`paths` names no file.", paths=paths)
    return [_storage.require_tensorflow(path) for path in several]


def _matching(pattern: Paths) -> list[str]:
    """List the files that globs match, sorted within each glob, all of them readable."""
    files: list[str] = []
    for part in _listed(pattern):
        with _storage.reporting(part):
            found = sorted(tf.io.gfile.glob(part))
        if not found:
            _checks.refuse_file("No file matches", part, remedy="Check the path or the pattern.")
        _refuse_two_writings(part, found)
        files += [_readable(file) for file in found]
    return files


def _refuse_two_writings(pattern: str, files: list[str]) -> None:
    """Refuse a glob that takes `train-...-of-00002` and what is left of `train-...-of-00004`."""
    shards: dict[str, set[str]] = {}
    for file in files:
        if found := _SHARD.fullmatch(file):
            shards.setdefault(found["beginning"], set()).add(found["count"])
    for beginning, counts in shards.items():
        if len(counts) > 1:
            _checks.refuse_file(
                f"Files of several writings match, with the same examples perhaps: {beginning} has "
                f"been cut into {' and into '.join(str(int(n)) for n in sorted(counts))} files",
                pattern,
                remedy="Delete those of the older one, or give a pattern that ends in their count.",
            )


def _readable(file: str) -> str:
    """Accept a file that exists, may be read and is not empty, on any file system of gfile."""
    if tf.io.gfile.isdir(file):
        _checks.refuse_file("A file is needed here, this is a directory", file)
    try:
        first = _head(file, 1)
    except tf.errors.NotFoundError:
        _checks.refuse_file("There is no such file", file, remedy="Check the path.")
    except tf.errors.OpError as error:
        _checks.refuse_file(f"The file cannot be read ({error.message})", file)
    if not first:
        _checks.refuse_file("The file is empty", file)
    return file


def _compression_of(file: str) -> str:
    return "GZIP" if _head(file, 2) == _GZIP_MAGIC else ""


def _head(file: str, size: int) -> bytes:
    with tf.io.gfile.GFile(file, "rb") as stream:
        return stream.read(size)


def _check_text(file: str, compression: str) -> None:
    """Read the file through and refuse it where it is damaged or is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    lines = 0
    try:
        for block in _blocks(file, compression):
            decoder.decode(block)
            lines += block.count(b"\n")
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        line = lines + error.object[: error.start].count(b"\n") + 1
        _checks.refuse_file(
            f"The file is not UTF-8 text (byte 0x{error.object[error.start]:02x} in line {line})",
            file,
            remedy="Convert it, for example with `iconv -t UTF-8`.",
        )


def _blocks(file: str, compression: str) -> Iterator[bytes]:
    """Give the content in blocks; refuse a GZIP file that is damaged or lacks its end."""
    with tf.io.gfile.GFile(file, "rb") as raw:
        stream = gzip.GzipFile(fileobj=raw) if compression else raw
        try:
            while block := stream.read(_BLOCK):
                yield block
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            _checks.refuse_file(
                f"The GZIP file is damaged or breaks off ({error})",
                file,
                remedy="Copy or download it again.",
            )
