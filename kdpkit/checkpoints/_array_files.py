"""Arrays and a header in one `.npz` file."""

import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


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
    """Read a file's header and its arrays.

    Raises:
        Exception: It is damaged, or another kind of file.
    """
    if not path.is_file():  # reading a pipe waits for a writer
        raise OSError("it is not a file")
    with path.open("rb") as raw:  # opened here, as `np.load` leaves a damaged file open
        # First, because NumPy believes what a damaged array says of its size.
        if damaged := zipfile.ZipFile(raw).testzip():
            raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")
        raw.seek(0)
        with np.load(raw, allow_pickle=False) as file:
            header = json.loads(str(file["header"]))
            arrays = {}
            for name, dtype in header.pop("dtypes").items():
                bits = file[name]
                is_numpys = bits.dtype.name == dtype
                arrays[name] = bits if is_numpys else bits.view(dtype).reshape(bits.shape)
    return header, arrays
