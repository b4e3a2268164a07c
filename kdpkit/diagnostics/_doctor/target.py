"""The training of a target: of a script at its first `fit`, or of what a function returns."""

import contextlib
import functools
import importlib
import inspect
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdpkit import errors
from kdpkit._internal import checks

# The line with which a file chooses its backend, before it imports Keras.
_BACKEND = re.compile(
    r"^os\.environ(?:\[|\.setdefault\()[\"']KERAS_BACKEND[\"'](?:\] =|,) *[\"'](\w+)", re.MULTILINE
)


@dataclass(frozen=True)
class Program:
    """What is known of a program that trains: the arguments of its `fit`, None where not known."""

    dataset: Any
    model: Any = None
    validation_data: Any = None
    validation_split: float = 0.0
    batch_size: int | None = None
    epochs: int | None = None
    steps_per_epoch: int | None = None
    shuffle: bool = True


@contextlib.contextmanager
def program_of(target: str, arguments: Sequence[str]) -> Iterator[Program]:
    """Yield what a target trains; its modules can be imported in the block.

    Nothing is trained, and what the target prints goes to stderr. Keras is loaded before the
    target, for the backend that a file sets in a line of its own, or for that of the environment.

    A target is `train.py`, with its arguments, which runs up to its first `fit`; or
    `package.module:name` or `file.py:name` of a function that returns a dataset or (dataset,
    model). What gets nowhere raises one sentence.
    """
    if ":" not in target:
        path = _file(target)
        with _as_program(target, arguments, path):
            programs, end = _run(target, lambda: runpy.run_path(str(path), run_name="__main__"))
            if not programs:
                checks.fail(
                    end or f"`{target}` ended without a `fit` of a Keras model.",
                    remedy="Its own flags come after `--`; for a loop of your own name a function "
                    "that returns (dataset, model): `kdpkit doctor train.py:make`.",
                )
            yield programs[0]
        return
    if arguments:
        checks.fail(
            "Arguments after `--` are those of a script.", target=target, arguments=arguments
        )
    with named(target) as make:
        returned = _untrained(target, make)
        is_pair = isinstance(returned, tuple) and len(returned) == 2
        if is_pair and hasattr(returned[0], "fit"):
            checks.fail(
                "A function has to return a dataset or (dataset, model), in this order.",
                target=target,
                returned=tuple(type(part).__name__ for part in returned),
            )
        yield Program(*returned) if is_pair and hasattr(returned[1], "fit") else Program(returned)


@contextlib.contextmanager
def named(target: str) -> Iterator[Callable[[], Any]]:
    """Yield the function of `module:name` or `file.py:name`, whose modules the block can import."""
    module, _, name = target.rpartition(":")
    path = _file(module) if module.endswith(".py") else None
    missing = f"`{module}` has no function `{name}`."

    def names() -> dict[str, Any]:
        if path is None:
            return vars(importlib.import_module(module))
        code = compile(path.read_bytes(), str(path), "exec")
        if name not in code.co_names and ("*",) not in code.co_consts:
            checks.fail(missing)  # before the file runs, which may fail or train
        return runpy.run_path(str(path), run_name=path.stem)  # whatever the file is called

    with _as_program(module, (), path):
        function = _untrained(target, names).get(name)
        if not callable(function):
            checks.fail(missing)
        yield function


def _file(name: str) -> Path:
    path = Path(name).resolve()
    if not path.is_file():
        checks.fail_for_file("There is no such file", name)
    return path


def _untrained(target: str, work: Callable[[], Any]) -> Any:
    """Return what a target's code returns, which must not train."""
    returned: list[Any] = []
    programs, end = _run(target, lambda: returned.append(work()))
    if programs:
        checks.fail(
            "It calls `fit` before it has returned; nothing was trained.",
            target=target,
            remedy="Put the `fit` under `if __name__ == '__main__':`, or name the script itself.",
        )
    if not returned:
        raise errors.InputError(end or f"`{target}` exits before it has returned.")
    return returned[0]


class _Reached(BaseException):
    """Ends the program at its first `fit`; no `except Exception` of its own may catch it."""


def _run(target: str, work: Callable[[], Any]) -> tuple[list[Program], str]:
    """Run a target's code up to its first `fit`; return what that is called with, or how it ended.

    The code may catch what ends it, so the first call counts.
    """
    import keras

    programs: list[Program] = []
    end = ""
    with contextlib.ExitStack() as undo:
        owner: Any = next(each for each in keras.Model.__mro__ if "fit" in vars(each))
        undo.callback(setattr, owner, "fit", owner.fit)
        owner.fit = _ending(owner, programs)
        try:
            work()
        except _Reached:
            pass
        except errors.InputError as error:
            end = str(error)
        except (SystemExit, Exception) as error:  # the code may raise anything
            code = error.code if isinstance(error, SystemExit) else 1
            if code == 130:  # a recipe after Ctrl-C, which it has reported
                raise
            end = f"`{target}` fails: {checks.reason_of(error)}." if code else ""
    backend = keras.backend.backend()
    if (chosen := os.environ.get("KERAS_BACKEND") or backend) != backend:
        checks.fail(
            f"`{target}` sets KERAS_BACKEND={chosen}, and Keras was loaded for {backend} before.",
            remedy=f"Write `KERAS_BACKEND={chosen} kdpkit doctor ...`.",
        )
    return programs, end


def _ending(owner: Any, programs: list[Program]) -> Callable[..., Any]:
    """Return a `fit` that notes its arguments, and ends; it trains once `owner` has its own again.

    `replica_exact` keeps the `fit` that the model has, and calls it later.
    """
    fit = owner.fit
    signature = inspect.signature(fit)

    @functools.wraps(fit)
    def ending(model: Any, *args: Any, **settings: Any) -> Any:
        if owner.fit is not ending:
            return fit(model, *args, **settings)
        call = signature.bind(model, *args, **settings)
        call.apply_defaults()
        arguments = call.arguments
        x, y, sample_weight = (arguments.get(name) for name in ("x", "y", "sample_weight"))
        arrays = x if y is None and sample_weight is None else (x, y, sample_weight)
        program = Program(
            arrays,
            model,
            validation_data=arguments["validation_data"],
            validation_split=arguments["validation_split"] or 0.0,
            batch_size=arguments["batch_size"],
            epochs=max(arguments["epochs"] - arguments["initial_epoch"], 1),
            steps_per_epoch=arguments["steps_per_epoch"],
            shuffle=bool(arguments["shuffle"]),
        )
        programs.append(program)
        raise _Reached

    return ending


@contextlib.contextmanager
def _as_program(name: str, arguments: Sequence[str], path: Path | None) -> Iterator[None]:
    """Set the arguments, path and backend of a program; what it prints goes to stderr."""
    argv, directories, backend = sys.argv, sys.path[:], os.environ.get("KERAS_BACKEND")
    sys.argv = [name, *arguments]
    sys.path.insert(0, str(path.parent if path else Path.cwd()))
    choice = _BACKEND.search(path.read_text(errors="replace")) if path else None
    if choice and not (backend and "setdefault" in choice[0]):
        os.environ["KERAS_BACKEND"] = choice[1]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.argv, sys.path[:] = argv, directories
        os.environ.pop("KERAS_BACKEND", None)
        if backend is not None:
            os.environ["KERAS_BACKEND"] = backend
