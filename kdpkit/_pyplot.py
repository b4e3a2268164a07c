"""matplotlib, where it is installed, and pictures in files, in object storage too."""

import contextlib
import os
from pathlib import PurePath
from typing import Any

from kdpkit import _checks, _files, _storage


def pyplot_for(path: str | os.PathLike[str] | None) -> Any:
    """Give matplotlib's pyplot for a picture in the file `path`, or in a notebook if it is None."""
    if path is not None:
        _refuse_no_file(path)
    pyplot = _pyplot()
    if path is not None:
        _refuse_kind(path)
    return pyplot


def _pyplot() -> Any:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise _checks.PackageInputError(
            "Plots need matplotlib: pip install matplotlib, or kdpkit[recipes]."
        ) from error
    return pyplot


def saved(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write a figure to a file, and close it."""
    is_remote = _storage.is_remote(path)
    try:
        with _files.replacing(path) if is_remote else contextlib.nullcontext(path) as file:
            figure.savefig(file)
    except _checks.InputError:
        raise
    except OSError as error:
        said = error.strerror or error
        raise _checks.FileInputError(f"The picture cannot be written ({said}): {path}.") from error
    finally:
        _pyplot().close(figure)


def _refuse_no_file(path: str | os.PathLike[str]) -> None:
    place = _storage.path(path)
    if isinstance(place, _storage.RemotePath):
        return
    if not os.fspath(path) or place.is_dir():
        _checks.refuse(
            "A picture needs the name of a file.", path=os.fspath(path), remedy="Try 'rate.png'."
        )
    if not place.parent.is_dir():
        _checks.refuse_file("The picture's directory does not exist", path)


def _refuse_kind(path: str | os.PathLike[str]) -> None:
    """Refuse a suffix that matplotlib cannot write; without one it would add its own."""
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if PurePath(path).suffix.lstrip(".").lower() not in kinds:
        _checks.refuse_file(
            "The picture's suffix must be that of a kind that can be written",
            path,
            remedy=f"There are {', '.join(f'.{kind}' for kind in sorted(kinds))}.",
        )
