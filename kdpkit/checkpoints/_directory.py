"""A directory of training states, which one run uses at a time."""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import re
import warnings
import zipfile
from collections.abc import Mapping
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np

from kdpkit import errors
from kdpkit._internal import checks, processes, storage

_FORMAT = 2  # of a state's file and of what `Resume` notes in it: one more with each change
_NAME = re.compile(r"state-([0-9]{6,18})-([0-9]{9,18})\.npz")
_locks: dict[str, int] = {}  # the file descriptors of this process's locks
# Its thread is no daemon, so a program that ends waits until a state is written.
_writer = futures.ThreadPoolExecutor(1, "kdpkit-checkpoints")


@dataclasses.dataclass(frozen=True, order=True)
class Position:
    """A point between two steps of training; a later one is greater.

    The end of an epoch is step 0 of the next one, once its validation is over.

    Args:
        epoch: The epoch to continue in, from 0.
        step: Batches of that epoch that have been trained on.

    >>> Position(0, 9) < Position(1, 0)
    True
    >>> str(Position(0, 9)), str(Position(1, 0))
    ('step 9 of epoch 1', 'the end of epoch 1')
    """

    epoch: int
    step: int

    def __str__(self) -> str:
        """Return the last step before it, with epochs counted from 1 as Keras prints them."""
        if self.step:
            return f"step {self.step} of epoch {self.epoch + 1}"
        return f"the end of epoch {self.epoch}" if self.epoch else "the beginning"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingState:
    """Everything needed to continue training.

    Args:
        position: Where to continue.
        arrays: Values by name.
        notes: Other values that JSON can represent.
    """

    position: Position
    arrays: Mapping[str, np.ndarray]
    notes: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class CheckpointDirectory:
    """Keeps the newest states of a run in a directory.

    A state is written to a temporary file (for object storage in `TMPDIR`), and appears under its
    name once it is complete. A state that is damaged later is skipped with a warning. One process
    writes; any number may read.

    Args:
        directory: Created when the first state is saved. It may be in object storage, such as
            `gs://bucket/run`.
        keep: Number of states to keep.

    Attributes:
        newest: Position of the newest state that was read or written, None before.
        is_failing: Whether the last state could not be written.

    Raises:
        ValueError: The directory is a file, or not a path.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     checkpoints = CheckpointDirectory(directory, keep=2)
    ...     for step in range(3):
    ...         weight = np.full(2, step)
    ...         state = TrainingState(position=Position(0, step), arrays={"weight": weight})
    ...         path = checkpoints.save(state)
    ...     print(len(checkpoints.paths()), checkpoints.latest().arrays["weight"])
    2 [2 2]
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 3) -> None:
        if not isinstance(directory, str | os.PathLike) or not os.fspath(directory):
            checks.fail("`directory` must be the path of a directory.", directory=directory)
        self.directory = storage.path(directory)
        self.keep = checks.integer("keep", keep)
        self._lock = self.directory / ".lock"
        self._written: futures.Future[None] | None = None
        self.newest: Position | None = None
        self.is_failing = False
        if self.directory.exists() and not self.directory.is_dir():
            checks.fail_for_file("A directory is needed, and this is a file", self.directory)

    def paths(self) -> list[storage.AnyPath]:
        """Return the files of the states, newest first."""
        paths = {_position(path): path for path in self.directory.glob("state-*.npz")}
        return [paths[position] for position in sorted(filter(None, paths), reverse=True)]

    def save(self, state: TrainingState) -> storage.AnyPath:
        """Write a state; remove all but the last `keep`, and those of later positions.

        A run continues from an earlier position than others only if these are damaged.

        Raises:
            OSError: It cannot be written; earlier states are kept.
        """
        position = dataclasses.asdict(state.position)
        path = self.directory / "state-{epoch:06}-{step:09}.npz".format(**position)
        arrays = {name: np.asarray(value) for name, value in state.arrays.items()}
        with storage.replacing(path) as temporary:
            _write(temporary, {**position, "notes": state.notes}, arrays)
        paths = self.paths()
        newest = paths.index(path)
        temporary_files = self.directory.glob(".state-*.npz")  # of processes that were killed
        for old in [*paths[:newest], *paths[newest + self.keep :], *temporary_files]:
            old.unlink(missing_ok=True)
        self.newest = state.position
        return path

    def save_in_background(self, state: TrainingState) -> None:
        """Write a state in a thread, after the one before; report the first of several failures."""
        self.wait()
        self._written = _writer.submit(self._try_to_save, state)

    def wait(self) -> None:
        """Wait until the states of `save_in_background` are on disk."""
        written, self._written = self._written, None
        (written or _writer.submit(lambda: None)).result()

    def _try_to_save(self, state: TrainingState) -> None:
        try:
            self.save(state)
            self.is_failing = False
        except OSError as error:
            if not self.is_failing:
                newest = f"the last complete state there is of {self.newest}"
                processes.report(
                    f"The training state of {state.position} could not be saved in "
                    f"{self.directory} ({error.strerror or error}); training continues, and "
                    f"{newest if self.newest else 'there is no complete state yet'}."
                )
            self.is_failing = True

    def latest(self) -> TrainingState | None:
        """Read the newest undamaged state, after waiting for this process's; None if there is none.

        Raises:
            ValueError: All states are damaged, or one has the format of another version of kdpkit.
        """
        self.wait()
        paths = self.paths()
        for path in paths:
            try:
                state = _read(path)
                self.newest = state.position
                return state
            except errors.InputError:
                raise
            except Exception as error:  # damaged bytes raise many kinds
                warnings.warn(
                    f"The training state {path} is damaged or cannot be read ({error}), and "
                    "skipped.",
                    stacklevel=2,
                )
        if paths:
            checks.fail(
                "Every training state in the directory is damaged or cannot be read.",
                directory=str(self.directory),
                damaged=len(paths),
                remedy="Move them away to start again.",
            )
        return None

    def acquire(self) -> None:
        """Make the directory, and lock it for this process until `release`, or until it ends.

        Without locks, as in object storage, every process gets it. A network file system may free
        the lock of a lost machine a minute or two later.

        Raises:
            ValueError: Another process has it, or it cannot be used.
        """
        try:
            if isinstance(self.directory, storage.RemotePath):
                storage.make_writable(self.directory)
                return
            self.directory.mkdir(parents=True, exist_ok=True)
            is_locked = _lock(os.path.realpath(self._lock))
        except errors.InputError:
            raise
        except OSError as error:
            checks.fail_for_file(f"The directory cannot be used ({error.strerror})", self.directory)
        if not is_locked:
            checks.fail(
                "Another run is using this directory.",
                directory=str(self.directory),
                lock=str(self._lock),
                remedy="End it first, or use another directory. If its machine is lost, remove the "
                "lock.",
            )

    def release(self) -> None:
        """Let other processes acquire the directory."""
        if (file := _locks.pop(os.path.realpath(self._lock), None)) is not None:
            os.close(file)


def _lock(name: str) -> bool:
    """Lock a file unless another process has locked it; return whether this process has."""
    if name in _locks:
        return True
    file = os.open(name, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    # Closing the file anywhere in this process would free the lock, so it is opened once.
    _locks[name] = file
    return True


def _position(path: storage.AnyPath) -> Position | None:
    """Return the position in a state's name; None for another file."""
    match = _NAME.fullmatch(path.name)
    return Position(*map(int, match.groups())) if match else None


def _write(path: Path, header: Mapping[str, object], arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays of any numeric type, those of `ml_dtypes` (bfloat16) included, and a header.

    Returns when the file is on the disk.
    """
    dtypes = {name: array.dtype.name for name, array in arrays.items()}
    header = {**header, "format": _FORMAT, "dtypes": dtypes}
    text = np.array(json.dumps(header))
    # `np.savez` does the same, but in NumPy 2.0 leaves the archive open on a full disk.
    with path.open("wb") as file:
        with zipfile.ZipFile(file, "w") as archive:
            for name, array in {"header": text, **arrays}.items():
                is_native = array.dtype.kind != "V"  # other types are written as integers
                bits = array if is_native else array.view(f"u{array.itemsize}")
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, bits, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())


def _read(path: storage.AnyPath) -> TrainingState:
    with contextlib.ExitStack() as stack:
        local = stack.enter_context(storage.fetched(path))
        if not local.is_file():  # reading a pipe would wait for a writer
            raise OSError("it is not a file")
        raw = stack.enter_context(local.open("rb"))  # `np.load` leaves a damaged file open
        # Checksums come first, because NumPy trusts the size in a damaged array's header.
        if damaged := zipfile.ZipFile(raw).testzip():
            raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")
        raw.seek(0)
        file = stack.enter_context(np.load(raw, allow_pickle=False))
        header, arrays = json.loads(str(file["header"])), {}
        if (version := header.get("format", 1)) != _FORMAT:
            checks.fail(
                f"This version of kdpkit reads training states of format {_FORMAT} only.",
                state=str(path),
                format=version,
                remedy="Continue with the version that wrote it, or use another directory.",
            )
        for name, dtype in header["dtypes"].items():
            bits = file[name]
            is_native = bits.dtype.name == dtype
            arrays[name] = bits if is_native else bits.view(dtype).reshape(bits.shape)
    position = Position(header["epoch"], header["step"])
    if position != _position(path):
        raise ValueError(f"its name and its content differ in the position ({position})")
    return TrainingState(position=position, arrays=arrays, notes=header["notes"])
