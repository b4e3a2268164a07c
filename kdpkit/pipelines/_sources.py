"""Files of any kind that are read in parallel."""

import os
from collections.abc import Callable, Sequence

import tensorflow as tf

from kdpkit._internal import checks, storage

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def interleave_files(
    pattern: Paths, reader: Callable[[tf.Tensor], tf.data.Dataset], *, files_at_once: int = 16
) -> tf.data.Dataset:
    r"""Read several files in parallel, taking an example from each, round-robin.

    The order of the examples is the same in every run.

    Args:
        pattern: A glob, whose files are sorted, or paths in the order given; `gs://bucket/...`
            works too.
        reader: Returns a dataset for a path, a string scalar; for text, `tf.data.TextLineDataset`;
            for records, `lambda file: tf.data.TFRecordDataset(file, "GZIP")`.
        files_at_once: Number of files to read in parallel.

    Raises:
        ValueError: The pattern matches no file, or there is no file at a path. A file that a copy
            left incomplete may read as a shorter one, which
            `tf.data.experimental.assert_cardinality` notices.

    >>> import tempfile, pathlib
    >>> directory = pathlib.Path(tempfile.mkdtemp())
    >>> for name in ("a", "b"):
    ...     _ = (directory / name).write_text(f"first of {name}\nsecond of {name}\n")
    >>> lines = interleave_files(f"{directory}/*", tf.data.TextLineDataset)
    >>> [line.numpy().decode() for line in lines]
    ['first of a', 'first of b', 'second of a', 'second of b']
    """
    files = _files_matching(pattern)
    return tf.data.Dataset.from_tensor_slices(files).interleave(
        reader,
        cycle_length=min(checks.integer("files_at_once", files_at_once), len(files)),
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=True,
    )


def _files_matching(pattern: Paths) -> list[str]:
    """Return the files that globs match, sorted within each glob."""
    patterns = [pattern] if isinstance(pattern, (str, os.PathLike)) else list(pattern)
    if not patterns:
        checks.fail("`pattern` names no file.", pattern=pattern)
    files: list[str] = []
    for glob in map(os.fspath, map(storage.path, patterns)):
        with storage.reporting(glob):
            matches = sorted(tf.io.gfile.glob(glob))
        if not matches:
            checks.fail_for_file("No file matches", glob, remedy="Check the path or the pattern.")
        files += matches
    return files
