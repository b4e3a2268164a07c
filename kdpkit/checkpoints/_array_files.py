"""Arrays and a header in one `.npz` file, which is read as it was written or not at all."""

import json
import os
import stat
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
    status = path.stat()
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):  # a pipe would hang
        raise DamagedError("it is no regular file")
    arrays = {}
    with path.open("rb") as raw:  # opened here, as `np.load` leaves a damaged file open
        try:
            # First, because NumPy believes what a damaged array says of its size.
            _check(zipfile.ZipFile(raw), status.st_size)
            raw.seek(0)
            with np.load(raw, allow_pickle=False) as file:
                header = json.loads(str(file["header"]))
                for name, dtype in header.pop("dtypes").items():
                    bits = file[name]
                    if bits.dtype.name != dtype:
                        bits = bits.view(dtype).reshape(bits.shape)  # raises for another width
                    arrays[name] = bits
                if {"header", *arrays} != {*file.files}:
                    raise DamagedError("its header has other arrays")
        except DamagedError:
            raise
        except MemoryError as error:
            np.empty(status.st_size, np.uint8)  # raises too if there is none for what it has
            raise DamagedError("it claims to have more than it is long") from error
        except Exception as error:  # damaged bytes raise many kinds
            raise DamagedError(str(error)) from error
    return header, arrays


def _check(archive: zipfile.ZipFile, size: int) -> None:
    """Raise if the parts of an archive are damaged, or unpack to more than the file has."""
    parts = archive.infolist()
    is_packed = any(part.compress_type != zipfile.ZIP_STORED for part in parts)
    if is_packed or sum(part.file_size for part in parts) > size:
        raise DamagedError("its parts are compressed, or longer than the file")
    if damaged := archive.testzip():
        raise DamagedError(f"the checksum of {damaged} is wrong")
