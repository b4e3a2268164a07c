"""matplotlib, where it is installed, and figures in files, in object storage too."""

import os
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from kdpkit import errors
from kdpkit._internal import atomic_files, checks, storage

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def pyplot_for(path: str | os.PathLike[str] | None) -> ModuleType:
    """Import pyplot, for a figure in the file `path` or, if that is None, in a notebook."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise errors.PackageInputError(
            "Plots need matplotlib: pip install matplotlib, or kdpkit[recipes]."
        ) from error
    if path is not None:
        _require_file_name(path)
    return pyplot


def saved(figure: "Figure", path: str | os.PathLike[str]) -> None:
    """Write a figure to a file, and close it."""
    from matplotlib import pyplot

    try:
        with atomic_files.replacing(path) as file:
            figure.savefig(file)
    except errors.InputError:
        raise
    except OSError as error:
        reason = error.strerror or error
        raise errors.FileInputError(f"The figure cannot be written ({reason}): {path}.") from error
    finally:
        pyplot.close(figure)


def _require_file_name(path: str | os.PathLike[str]) -> None:
    """Raise, before anything is drawn, for what could not be written."""
    from matplotlib.backend_bases import FigureCanvasBase

    file = storage.path(path)
    if isinstance(file, Path):
        if not os.fspath(path) or file.is_dir():
            checks.fail(
                "A figure needs the name of a file.", path=os.fspath(path), remedy="Try 'rate.png'."
            )
        if not file.parent.is_dir():
            checks.fail_for_file("The figure's directory does not exist", path)
    kinds = FigureCanvasBase.get_supported_filetypes()
    if file.suffix.lstrip(".").lower() not in kinds:  # without one matplotlib would add its own
        checks.fail_for_file(
            "The figure's suffix must be one that matplotlib can write",
            path,
            remedy=f"There are {', '.join(f'.{kind}' for kind in sorted(kinds))}.",
        )
