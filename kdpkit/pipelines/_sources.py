"""Sources of examples: TFRecord files, and files of any kind that are read in parallel."""

import os
from collections.abc import Callable, Sequence
from typing import Any

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
        parse: Returns an example for a record, a string scalar; with `tf.io.parse_single_example`,
            for example. None returns the records unparsed.
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


def _matching(pattern: Paths) -> list[str]:
    """Return the files that globs match, sorted within each glob."""
    several = [pattern] if isinstance(pattern, (str, os.PathLike)) else list(pattern)
    if not several:
        checks.fail("`pattern` names no file.", pattern=pattern)
    files: list[str] = []
    for part in map(os.fspath, map(storage.path, several)):
        with storage.reporting(part):
            found = sorted(tf.io.gfile.glob(part))
        if not found:
            checks.fail_for_file("No file matches", part, remedy="Check the path or the pattern.")
        files += found
    return files


def _begins_as_gzip(file: str) -> bool:
    with tf.io.gfile.GFile(file, "rb") as stream:
        return stream.read(2) == _GZIP_MAGIC
