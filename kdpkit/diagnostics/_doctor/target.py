"""The training of a target: of a script at its first `fit`, or of what a function returns."""

import contextlib
import importlib
import importlib.util
import inspect
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from kdpkit import errors
from kdpkit._internal import checks

# The line with which a script chooses its backend, before it imports Keras.
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

    Args:
        target: `train.py`, which runs up to its first `fit`; or `package.module:name` or
            `file.py:name` of a function without arguments that returns a dataset or (dataset,
            model).
        arguments: Of the script.

    Raises:
        ValueError: There is no such target, or it raises, trains nothing, returns something else or
            chooses another backend.
    """
    if ":" not in target:
        path = _script(target)
        with _as_program(target, arguments, path):
            yield _at_fit_of(target, path)
        return
    if arguments:
        checks.fail(
            "Arguments after `--` are those of a script.", target=target, arguments=arguments
        )
    with named(target) as make:
        returned = _untrained(target, make)
        if isinstance(returned, tuple) and returned and hasattr(returned[0], "fit"):
            checks.fail(
                "A function has to return a dataset or (dataset, model), in this order.",
                target=target,
                returned=tuple(type(part).__name__ for part in returned),
            )
        is_pair = isinstance(returned, tuple) and len(returned) == 2
        has_model = is_pair and hasattr(returned[1], "fit")
        yield Program(*returned) if has_model else Program(returned)


def _script(name: str) -> Path:
    path = Path(name).resolve()
    if not path.is_file():
        checks.fail_for_file("There is no such file", name)
    return path


def _at_fit_of(script: str, path: Path) -> Program:
    end = "ended without a `fit` of a Keras model or a `TrainingLoop`"
    with _stopped_at_fit() as programs:
        try:
            runpy.run_path(str(path), run_name="__main__")
        except _Reached:
            pass
        except SystemExit as error:
            if error.code == 130:  # a recipe after Ctrl-C, which it has reported
                raise
            end = f"ended before its `fit`: {checks.reason_of(error)}" if error.code else end
        except Exception as error:  # a script may raise anything
            end = f"failed before its `fit`: {checks.reason_of(error)}"
    _check_backend(script)
    if not programs:
        checks.fail(
            f"`{script}` {end}.",
            remedy="Its own flags come after `--`; for a loop of your own name a function that "
            "returns (dataset, model): `kdpkit doctor train.py:make`.",
        )
    return programs[0]


@contextlib.contextmanager
def named(target: str) -> Iterator[Callable[[], Any]]:
    """Yield the function of `module:name` or `file.py:name`, whose modules the block can import.

    Raises:
        ValueError: There is no such function, or its module raises or trains.
    """
    module, _, name = target.rpartition(":")
    path = _script(module) if module.endswith(".py") else None

    def names() -> dict[str, Any]:
        if path is None:
            return vars(importlib.import_module(module))
        return runpy.run_path(str(path), run_name=path.stem)  # whatever the file is called

    with _as_program(module, (), path):
        _check_name(module, name, path)
        function = _untrained(target, names).get(name)
        if not callable(function):
            _fail_for_name(module, name)
        yield function


def _check_name(module: str, name: str, path: Path | None) -> None:
    """Raise where a module never sets a name, before it runs, which may fail or train."""
    try:
        if path is not None:
            code = compile(path.read_bytes(), str(path), "exec")
        else:
            spec = importlib.util.find_spec(module)
            if spec is None:
                raise ModuleNotFoundError(f"No module named '{module}'")
            code = spec.loader.get_code(module) if hasattr(spec.loader, "get_code") else None
    except Exception as error:  # of the syntax, or of a package that the module is in
        raise errors.InputError(f"`{module}` fails: {checks.reason_of(error)}") from error
    if code is not None and name not in code.co_names and ("*",) not in code.co_consts:
        _fail_for_name(module, name)


def _fail_for_name(module: str, name: str) -> NoReturn:
    checks.fail(f"`{module}` has no function `{name}`.")


def _untrained(target: str, work: Callable[[], Any]) -> Any:
    """Return what a target's code returns, which must not train."""
    try:
        with _stopped_at_fit():
            returned = work()
    except errors.InputError:
        raise
    except _Reached:
        checks.fail(
            "It calls `fit` before it has returned; nothing was trained.",
            target=target,
            remedy="Put the `fit` under `if __name__ == '__main__':`, or name the script itself.",
        )
    except (SystemExit, Exception) as error:  # a module and a function may raise anything
        _check_backend(target)
        raise errors.InputError(f"`{target}` fails: {checks.reason_of(error)}") from error
    _check_backend(target)
    return returned


def _check_backend(target: str) -> None:
    """Raise where a program chose another backend than the one that Keras has."""
    import keras

    loaded = keras.backend.backend()
    chosen = os.environ.get("KERAS_BACKEND") or loaded
    if chosen != loaded:
        checks.fail(
            f"`{target}` sets KERAS_BACKEND={chosen}, and Keras was loaded for {loaded} before.",
            remedy=f"Write `KERAS_BACKEND={chosen} kdpkit doctor ...`.",
        )


class _Reached(BaseException):
    """Ends the program at its first `fit`; no `except Exception` of its own may catch it."""


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


@contextlib.contextmanager
def _stopped_at_fit() -> Iterator[list[Program]]:
    """Have `fit` of Keras' models and of `TrainingLoop` end the program.

    What they were called with is in the list that this yields: a program may catch what ends it, or
    raise something else at its end.
    """
    import keras

    from kdpkit.training import TrainingLoop

    programs: list[Program] = []
    with contextlib.ExitStack() as undo:
        for kind in (keras.Model, TrainingLoop):
            owner: Any = next(each for each in kind.__mro__ if "fit" in vars(each))
            undo.callback(setattr, owner, "fit", owner.fit)
            owner.fit = _ending(owner.fit, programs)
        yield programs


def _ending(fit: Callable[..., Any], programs: list[Program]) -> Callable[..., Any]:
    """Return a `fit` that notes what it is called with, and ends the program."""
    signature = inspect.signature(fit)

    def ending(model: Any, *args: Any, **settings: Any) -> Any:
        call = signature.bind(model, *args, **settings)
        call.apply_defaults()
        programs.append(_program(model, call.arguments))
        raise _Reached

    return ending


def _program(model: Any, arguments: dict[str, Any]) -> Program:
    """Return what `fit` of a Keras model or a `TrainingLoop` was called with."""
    x, y, sample_weight = (arguments.get(name) for name in ("x", "y", "sample_weight"))
    arrays = x if y is None and sample_weight is None else (x, y, sample_weight)
    return Program(
        arguments.get("train", arrays),
        model,
        validation_data=arguments.get("validation", arguments.get("validation_data")),
        validation_split=arguments.get("validation_split") or 0.0,
        batch_size=arguments.get("batch_size"),
        epochs=max(arguments["epochs"] - arguments["initial_epoch"], 1),
        steps_per_epoch=arguments["steps_per_epoch"],
        shuffle=bool(arguments.get("shuffle", True)),
    )
