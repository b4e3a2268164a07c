"""Arrays and a header in one `.npz` file, which is read as it was written or not at all."""

import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


class DamagedError(Exception):
    """The file is not, or no longer, what `write` wrote."""


def write(path: Path, header: Mapping[str, object], arrays: Mapping[str, np.ndarray]) -> None:
    """Write a file, and return when it is on the disk.

    Args:
        path: The file.
        header: Plain values that JSON has; the name `dtypes` is taken.
        arrays: By name, of any numeric type, those of `ml_dtypes` (bfloat16) included.
    """
    dtypes = {name: array.dtype.name for name, array in arrays.items()}
    text = np.array(json.dumps({**header, "dtypes": dtypes}))
    # What `np.savez` does; that of NumPy 2.0 leaves the archive open on a full disk.
    with path.open("wb") as file:
        with zipfile.ZipFile(file, "w") as archive:
            for name, array in {"header": text, **arrays}.items():
                is_numpys = array.dtype.kind != "V"  # else the file has its bits, as integers
                bits = array if is_numpys else array.view(f"u{array.itemsize}")
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, bits, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read a file's header and its arrays; the archive's checksums find any damage.

    Raises:
        DamagedError: It is damaged, or another kind of file.
        OSError: It cannot be opened.
    """
    arrays = {}
    with path.open("rb") as raw:  # opened here, as `np.load` leaves a damaged file open
        try:
            with np.load(raw, allow_pickle=False) as file:
                header = json.loads(str(file["header"]))
                for name, dtype in header.pop("dtypes", {}).items():
                    bits = file[name]
                    arrays[name] = bits if bits.dtype.name == dtype else bits.view(dtype)
        except MemoryError:
            raise
        except Exception as error:  # damaged bytes raise many kinds
            raise DamagedError(str(error)) from error
    return header, arrays
