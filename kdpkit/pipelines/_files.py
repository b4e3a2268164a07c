"""Examples of many files, in an order that depends only on the files' names."""

import concurrent.futures
import contextlib
import functools
import gzip
import os
import zlib
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from kdpkit._internal import checks
from kdpkit.pipelines._stages import Stage, paths, require_examples

Read: TypeAlias = Callable[[tf.Tensor], tf.data.Dataset]

_AT_A_TIME = 16  # Files. By default tf.data takes as many as there are cores: another order.
_IN_A_ROW = 16  # examples of a file
_READERS = ("TFRecordDataset", "TextLineDataset", "CsvDataset")


def interleaved(names: tf.data.Dataset, read: Read) -> tf.data.Dataset:
    """Read files in parallel, and take some examples of each in turn."""
    return names.interleave(
        read,
        cycle_length=_AT_A_TIME,
        block_length=_IN_A_ROW,
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=True,
    )


def file_names(source: Any, read: Read) -> tf.data.Dataset:
    """Return the sorted names of files; raise for those that are not there or not complete."""
    found = _found(source)
    names = sorted({*found})
    if len(names) != len(found) or not names:
        checks.fail(
            "With `read`, `source` must have names of files, each once, or be a pattern that "
            "matches some.",
            source=source,
            repeated=sorted({name for name in found if found.count(name) > 1})[:3],
        )
    dataset = read(tf.constant(names[0]))
    if not isinstance(dataset, tf.data.Dataset):
        checks.fail(
            "`read` must return a tf.data.Dataset of the examples of a file.",
            returned=type(dataset).__name__,
            remedy="Pass `tf.data.TFRecordDataset`, or a function of a file's name.",
        )
    require_examples(dataset, name="read", prepared=False)
    readers = paths(Stage(dataset))
    has_records = any(
        s.kind == "TFRecordDataset" or s.runs("TFRecordDataset.*") for s, _ in readers
    )
    problem_of = functools.partial(_problem, read=read, has_records=has_records)
    with concurrent.futures.ThreadPoolExecutor(_AT_A_TIME) as pool:
        for name, problem in zip(names, pool.map(problem_of, names), strict=True):
            if problem:
                checks.fail(f"A file of `source` {problem}.", file=name)
    return tf.data.Dataset.from_tensor_slices(names)


def _found(source: Any) -> list[str]:
    """Return the files that are listed, or that a pattern matches; none of what is no name."""
    with contextlib.suppress(TypeError):
        if isinstance(source, str | bytes | os.PathLike):
            name = os.fsdecode(source)  # which may have the brackets of a pattern
            return [name] if tf.io.gfile.exists(name) else tf.io.gfile.glob(name)
        if isinstance(source, tf.data.Dataset):
            source = source.as_numpy_iterator()
        return [*map(os.fsdecode, np.ravel(source) if tf.is_tensor(source) else source)]
    return []


def _compressions(read: Read, name: str) -> set[str]:
    """Return how the readers of a file expect it to be compressed, as far as is known."""
    readers = (
        stage for stage, _ in paths(Stage(read(tf.constant(name)))) if stage.kind in _READERS
    )
    return {stage.setting("compression_type") or "" for stage in readers}


def _problem(name: str, read: Read, *, has_records: bool) -> str:
    """Return what is wrong with a file, which TensorFlow may read as a shorter one."""
    try:
        size = tf.io.gfile.stat(name).length
        with (tf.io.gfile.GFile if "://" in name else open)(name, "rb") as file:
            if file.read(2) == b"\x1f\x8b":
                file.seek(0)
                with gzip.GzipFile(fileobj=file) as content:
                    while content.read(1 << 20):
                        pass
                is_expanded = "" not in _compressions(read, name)
                return "" if is_expanded else "is compressed; `read` has to expand it"
            at = 0 if has_records else size
            while at < size:  # A record's length has 8 bytes; 4 follow it, and 4 the record.
                file.seek(at)
                at += int.from_bytes(file.read(8), "little") + 16
    except (tf.errors.OpError, IsADirectoryError) as error:
        return f"cannot be read: {checks.first_line(error)}"
    except (EOFError, OSError, zlib.error) as error:
        return f"was cut, or is damaged: {checks.first_line(error)}"
    if at == size or any(_compressions(read, name)):
        return ""
    return "was cut, or is damaged: its last record is not complete"
