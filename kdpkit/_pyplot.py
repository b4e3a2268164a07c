"""matplotlib, where it is installed and its picture can be written."""

import os
from pathlib import Path
from typing import Any

from kdpkit import _checks


def pyplot_for(path: str | os.PathLike[str] | None) -> Any:
    """Give matplotlib's pyplot for a picture in the file `path`, or in a notebook if it is None."""
    if path is not None and not Path(path).absolute().parent.is_dir():
        _checks.refuse_file("The picture's directory does not exist", path)
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(
            "Plots need matplotlib: pip install matplotlib, or kdpkit[recipes]."
        ) from error
    return pyplot
