"""Files that are whole or not there."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a path to write to, beside `path`, that takes its place when the block ends well.

    Readers and other writers of `path` see the old file or the new one, never a part. The
    temporary file keeps the suffix, and is gone if the block raises. Missing directories are made.
    """
    final = Path(path).resolve()  # a link stays, its target is replaced
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = final.with_name(f".{final.stem}-{uuid.uuid4().hex}{final.suffix}")
    try:
        yield temporary
        temporary.replace(final)
    finally:
        temporary.unlink(missing_ok=True)
