"""Training states on disk: written atomically, numbered by epoch and step.

`kdpkit.callbacks.Resume` saves and restores them. A state is one `.npz` file with arrays, including
all variables that training changes, and its epoch, step and notes as JSON.
"""

import contextlib
import dataclasses
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np

from kdpkit._internal import array_files, atomic_files, background, checks, storage

_FORMAT = 1  # of the file; later formats that can read this one add to it
_NAME = re.compile(r"state-([0-9]{6,18})-([0-9]{9,18})\.npz")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingState:
    """Everything needed to continue training.

    Args:
        epoch: The epoch to continue in, from 0.
        step: Batches of that epoch that have been trained on.
        arrays: Values by name.
        notes: Other values that JSON can represent.
    """

    epoch: int
    step: int
    arrays: Mapping[str, np.ndarray]
    notes: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class CheckpointDirectory:
    """Keeps the newest states of a run in a directory.

    A state is written to a temporary file and renamed once it is complete on disk. A state that is
    damaged later is skipped with a warning. One process writes; any number may read.

    For object storage a state is written to this machine's disk (`TMPDIR`) and then uploaded as one
    object, which appears when it is complete.

    Args:
        directory: Created when the first state is saved. It may be in object storage, such as
            `gs://bucket/run`.
        keep: Number of states to keep, the most recently written ones.

    Raises:
        ValueError: The directory is a file, or not a path.

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
            checks.fail("`directory` must be the path of a directory.", directory=directory)
        self.directory = storage.path(directory)
        self.keep = checks.integer("keep", keep)
        if self.directory.exists() and not self.directory.is_dir():
            checks.fail_for_file("A directory is needed, and this is a file", self.directory)

    def paths(self) -> list[storage.AnyPath]:
        """Return the files of the states, newest first."""
        found = {
            position: path
            for path in self.directory.glob("state-*.npz")
            if (position := _position(path))
        }
        return [found[position] for position in sorted(found, reverse=True)]

    def save(self, state: TrainingState) -> storage.AnyPath:
        """Write a state, and remove all but the last `keep`.

        Raises:
            OSError: It cannot be written; earlier states are kept.
        """
        path = self.directory / f"state-{state.epoch:06}-{state.step:09}.npz"
        header = {"format": _FORMAT, "epoch": state.epoch, "step": state.step}
        arrays = {name: np.asarray(value) for name, value in state.arrays.items()}
        with atomic_files.replacing(path) as temporary:
            array_files.write(temporary, header | {"notes": state.notes}, arrays)
        others = [other for other in self.paths() if other != path and other.is_file()]
        others.sort(key=lambda state: state.stat().st_mtime_ns, reverse=True)
        of_killed_processes = self.directory.glob(".state-*.npz")
        for old in [*others[self.keep - 1 :], *of_killed_processes]:
            old.unlink(missing_ok=True)
        return path

    def latest(self) -> TrainingState | None:
        """Read the newest undamaged state; None if there is no state.

        A state that this process is still writing is waited for.

        Raises:
            ValueError: All states are damaged, or one has another format.
        """
        background.wait(self.directory)
        paths = self.paths()
        for path in paths:
            try:
                return _read(path)
            except (array_files.DamagedError, OSError) as error:
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


def _position(path: storage.AnyPath) -> tuple[int, ...]:
    """Return the epoch and the step in a state's name; nothing for another file."""
    match = _NAME.fullmatch(path.name)
    return tuple(map(int, match.groups())) if match else ()


def _read(path: storage.AnyPath) -> TrainingState:
    with atomic_files.fetched(path) as local:
        header, arrays = array_files.read(local)
    if not header.keys() >= {"format", "epoch", "step", "notes"}:
        raise array_files.DamagedError("it is another kind of file")
    numbers = header["format"], header["epoch"], header["step"]
    if {*map(type, numbers)} != {int} or not isinstance(header["notes"], dict):
        raise array_files.DamagedError("its header has values of other types")
    if header["format"] != _FORMAT:
        checks.fail(
            "A training state was written by another version of kdpkit. Resume it with that "
            "version.",
            path=str(path),
            format=header["format"],
        )
    if _position(path) != (header["epoch"], header["step"]):
        raise array_files.DamagedError("its name has another epoch or step")
    return TrainingState(
        epoch=header["epoch"], step=header["step"], arrays=arrays, notes=header["notes"]
    )


def values_of(variables: Mapping[str, Iterable[keras.Variable]]) -> dict[str, np.ndarray]:
    """Read Keras variables, by group.

    Later steps do not change these arrays, which may be read-only.

    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> sorted(values_of({"model": model.variables}))
    ['model.0', 'model.1']
    """
    return {name: _read_variable(variable) for name, variable in _by_name(variables).items()}


def _by_name(variables: Mapping[str, Iterable[keras.Variable]]) -> dict[str, keras.Variable]:
    return {
        f"{group}.{index}": variable
        for group, of_group in variables.items()
        for index, variable in enumerate(of_group)
    }


def _read_variable(variable: keras.Variable) -> np.ndarray:
    value = variable.value
    with _scope_of(variable):
        if hasattr(value, "read_value"):  # the sum, if TensorFlow's replicas hold parts
            value = value.read_value()
        # On a CPU this copies nothing: both backends copy memory that NumPy has before they write,
        # also in steps that may write into the buffers of their state.
        if keras.backend.backend() == "jax":
            from kdpkit._internal import shards

            return shards.whole_on_host(value)
        return np.asarray(value)


def _scope_of(variable: keras.Variable) -> contextlib.AbstractContextManager[object]:
    """Return the scope of the TensorFlow strategy that mirrors a variable, if any."""
    strategy = getattr(variable.value, "distribute_strategy", None)
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def assign(
    variables: Mapping[str, Iterable[keras.Variable]], arrays: Mapping[str, np.ndarray]
) -> None:
    """Assign values from `values_of` to Keras variables, all of a group or none.

    Raises:
        ValueError: The variables of a group differ from the saved ones in number or shape.
    """
    wanted = _by_name(variables)
    for group in variables:
        present, saved = (
            sum(n.startswith(f"{group}.") for n in names) for names in (wanted, arrays)
        )
        if saved != present:
            checks.fail(
                f"The saved state has {saved} variables of the {group}, and the current one has "
                f"{present}.",
                remedy="Build and compile it as when it was saved, or use another directory.",
            )
    for name, variable in wanted.items():
        if tuple(variable.shape) != arrays[name].shape:
            checks.fail(
                f"The saved state does not fit the {name.partition('.')[0]}.",
                variable=variable.path,
                shape=tuple(variable.shape),
                saved_shape=arrays[name].shape,
                remedy="Build it as when it was saved, or use another directory.",
            )
    for name, variable in wanted.items():
        with _scope_of(variable):
            variable.assign(arrays[name])
