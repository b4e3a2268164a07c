"""States of training on disk: whole or not there, numbered by their place in the run.

`kdpkit.callbacks.Resume` saves and restores them. A state is one `.npz` file of arrays, all
variables that training changes among them, with its epoch, its step and notes as JSON.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np

from kdpkit import _checks, _files, _storage

_FORMAT = 1  # of the file; a later one that reads this adds to it
_NAME = re.compile(r"state-(\d+)-(\d+)\.npz")
_DAMAGED = (
    *(ValueError, KeyError, TypeError, EOFError),
    *(IsADirectoryError, zipfile.BadZipFile, zlib.error),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingState:
    """All that training goes on from.

    Args:
        epoch: The epoch to go on in, from 0.
        step: Batches of that epoch that were trained on.
        arrays: Values by name.
        notes: Whatever else there is, as plain values that JSON has.
    """

    epoch: int
    step: int
    arrays: Mapping[str, np.ndarray]
    notes: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class CheckpointDirectory:
    """Keeps the newest states of a run in a directory.

    A state is written beside its place and moved there when it is whole and on the disk. One that
    was damaged later is passed over, with a warning. One process writes; any number may read.

    In object storage a state is made on this machine's disk (`TMPDIR`) and then put there, as one
    object that appears when it is whole.

    Args:
        directory: It is made when the first state is saved. It may be in object storage, as
            `gs://bucket/run`.
        keep: States to keep: those that were written last.

    Raises:
        ValueError: The directory is a file, or no path.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     checkpoints = CheckpointDirectory(directory, keep=2)
    ...     for step in range(3):
    ...         state = TrainingState(epoch=0, step=step, arrays={"weight": np.full(2, step)})
    ...         path = checkpoints.save(state)
    ...     print(len(checkpoints.paths()), checkpoints.latest().arrays["weight"])
    2 [2 2]
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 3) -> None:
        if not isinstance(directory, str | os.PathLike) or not os.fspath(directory):
            _checks.refuse("`directory` must be the path of a directory.", directory=directory)
        self.directory = _storage.path(directory)
        self.keep = _checks.integer("keep", keep)
        if self.directory.exists() and not self.directory.is_dir():
            _checks.refuse_file("A directory is needed here, this is a file", self.directory)

    def paths(self) -> list[_storage.AnyPath]:
        """Give the files of the states, the newest first."""
        found = {
            tuple(map(int, match.groups())): path
            for path in self.directory.glob("state-*.npz")
            if (match := _NAME.fullmatch(path.name))
        }
        return [found[place] for place in sorted(found, reverse=True)]

    def save(self, state: TrainingState) -> _storage.AnyPath:
        """Write a state, and remove those that were written before the last `keep`.

        Raises:
            OSError: It cannot be written; the states that were there are still there.
        """
        path = self.directory / f"state-{state.epoch:06}-{state.step:09}.npz"
        with _files.replacing(path) as temporary:
            _write(temporary, state)
        written = sorted(self.paths(), key=lambda state: state.stat().st_mtime_ns, reverse=True)
        others = [other for other in written if other != path and other.is_file()]
        for old in [*others[self.keep - 1 :], *self._left_behind()]:
            old.unlink(missing_ok=True)
        return path

    def latest(self) -> TrainingState | None:
        """Read the newest whole state; None if there is no state.

        Raises:
            ValueError: All states are damaged, or one is of another format.
        """
        paths = self.paths()
        for path in paths:
            try:
                return _read(path)
            except _checks.InputError:
                raise
            except _DAMAGED as error:
                warnings.warn(
                    f"The training state {path} is damaged ({error}) and passed over.",
                    stacklevel=2,
                )
        if paths:
            _checks.refuse(
                "No training state in the directory is whole.",
                directory=str(self.directory),
                damaged=len(paths),
                remedy="Move them away to begin anew.",
            )
        return None

    def _left_behind(self) -> Iterator[_storage.AnyPath]:
        """Give the files of processes that were killed while writing."""
        return self.directory.glob(".state-*.npz")


def _write(path: pathlib.Path, state: TrainingState) -> None:
    arrays = {name: np.asarray(value) for name, value in state.arrays.items()}
    header = {
        "format": _FORMAT,
        "epoch": state.epoch,
        "step": state.step,
        "notes": state.notes,
        "dtypes": {name: array.dtype.name for name, array in arrays.items()},
    }
    plain = {name: _plain(array) for name, array in arrays.items()}
    with path.open("wb") as file:
        # What `np.savez` does; that of NumPy 2.0 leaves the archive open on a full disk.
        with zipfile.ZipFile(file, "w") as archive:
            for name, array in {"header": np.array(json.dumps(header)), **plain}.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())


def _read(path: _storage.AnyPath) -> TrainingState:
    # Opened here, as `np.load` leaves a damaged file open.
    with (
        _files.fetched(path) as local,
        local.open("rb") as raw,
        np.load(raw, allow_pickle=False) as file,
    ):
        header = json.loads(str(file["header"]))
        if header["format"] != _FORMAT:
            _checks.refuse(
                "A training state was written by another version of kdpkit. Go on with that one.",
                path=str(path),
                format=header["format"],
            )
        dtypes = header["dtypes"]
        arrays = {name: file[name].view(np.dtype(dtype)) for name, dtype in dtypes.items()}
    return TrainingState(
        epoch=header["epoch"], step=header["step"], arrays=arrays, notes=header["notes"]
    )


def _plain(array: np.ndarray) -> np.ndarray:
    """Give the bits of a type that NumPy does not know, such as bfloat16, as integers."""
    return array if array.dtype.isbuiltin == 1 else array.view(f"u{array.itemsize}")


def values_of(variables: Mapping[str, Iterable[Any]]) -> dict[str, np.ndarray]:
    """Read Keras variables, by group.

    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> sorted(values_of({"model": model.variables}))
    ['model.0', 'model.1']
    """
    return {
        f"{group}.{index}": _read_variable(variable)
        for group, of_group in variables.items()
        for index, variable in enumerate(of_group)
    }


def _read_variable(variable: Any) -> np.ndarray:
    value = variable.value
    with _scope_of(value):
        if hasattr(value, "read_value"):  # the sum, where TensorFlow's replicas hold parts
            value = value.read_value()
        return np.asarray(keras.ops.convert_to_numpy(value))


def _scope_of(value: Any) -> Any:
    """Enter the scope of TensorFlow's strategy that holds a value on its replicas, if one does."""
    strategy = getattr(value, "distribute_strategy", None)
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def assign(variables: Mapping[str, Iterable[Any]], arrays: Mapping[str, np.ndarray]) -> None:
    """Give Keras variables the values that `values_of` read, all of a group or none at all.

    Raises:
        ValueError: A group has other variables than were saved, in number or in shape.
    """
    wanted = {
        f"{group}.{index}": variable
        for group, of_group in variables.items()
        for index, variable in enumerate(of_group)
    }
    for group in variables:
        _check_group(group, wanted, arrays)
    for name, variable in wanted.items():
        with _scope_of(variable.value):
            variable.assign(arrays[name])


def _check_group(group: str, wanted: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    of_group = {name: v for name, v in wanted.items() if name.startswith(f"{group}.")}
    saved = sum(name.startswith(f"{group}.") for name in arrays)
    if saved != len(of_group):
        _checks.refuse(
            f"The saved state has {saved} variables of the {group}, and the one that is to go on "
            f"has {len(of_group)}.",
            remedy="Build and compile it as when it was saved, or choose another directory.",
        )
    for name, variable in of_group.items():
        if tuple(variable.shape) != arrays[name].shape:
            _checks.refuse(
                f"The saved state does not fit the {group}.",
                variable=variable.path,
                shape=tuple(variable.shape),
                saved_shape=arrays[name].shape,
                remedy="Build it as when it was saved, or choose another directory.",
            )
