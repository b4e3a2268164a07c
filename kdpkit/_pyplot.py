"""matplotlib, where it is installed, and pictures in files, in object storage too."""

import contextlib
import os
from typing import Any

from kdpkit import _checks, _files, _storage


def pyplot_for(path: str | os.PathLike[str] | None) -> Any:
    """Give matplotlib's pyplot for a picture in the file `path`, or in a notebook if it is None."""
    if path is not None and not _has_directory(path):
        _checks.refuse_file("The picture's directory does not exist", path)
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(
            "Plots need matplotlib: pip install matplotlib, or kdpkit[recipes]."
        ) from error
    return pyplot


def saved(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write a figure to a file, and close it."""
    is_remote = _storage.is_remote(path)
    with _files.replacing(path) if is_remote else contextlib.nullcontext(path) as file:
        figure.savefig(file)
    pyplot_for(None).close(figure)


def _has_directory(path: str | os.PathLike[str]) -> bool:
    place = _storage.path(path)
    return isinstance(place, _storage.RemotePath) or place.absolute().parent.is_dir()
