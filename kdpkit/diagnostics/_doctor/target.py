"""The training of a target: of a script at its first `fit`, or of what a function returns.

A script runs in this process, as its user runs it, up to its first `fit`, which ends it. Keras is
loaded by the script, after it chose its backend; so `fit` is replaced at that moment, and restored
when the script has ended.
"""

import builtins
import contextlib
import importlib
import inspect
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdpkit import errors
from kdpkit._internal import checks


@dataclass(frozen=True)
class Program:
    """What is known of a program that trains: the arguments of its `fit`, None where not known."""

    dataset: Any
    model: Any = None
    validation_data: Any = None
    batch_size: int | None = None
    epochs: int | None = None
    steps_per_epoch: int | None = None


@contextlib.contextmanager
def program_of(target: str, arguments: Sequence[str]) -> Iterator[Program]:
    """Yield what a target trains; its modules are found in the block.

    Nothing is trained, and what the target prints goes to stderr.

    Args:
        target: `train.py`; or `package.module:name` or `file.py:name` of a function without
            arguments that returns a dataset or (dataset, model).
        arguments: Of the script.

    Raises:
        ValueError: There is no such target, or it raises, trains nothing or returns something else.
    """
    if ":" not in target:
        path = _script(target)
        with _as_program(target, arguments, path.parent):
            yield _at_fit_of(target, path)
        return
    if arguments:
        checks.fail(
            "Arguments after `--` are those of a script.", target=target, arguments=arguments
        )
    with named(target) as make:
        given = _untrained(target, make)
        if isinstance(given, tuple) and given and hasattr(given[0], "fit"):
            checks.fail(
                "A function has to return a dataset or (dataset, model), in this order.",
                target=target,
                returned=tuple(type(part).__name__ for part in given),
            )
        has_model = isinstance(given, tuple) and len(given) == 2 and hasattr(given[1], "fit")
        yield Program(*given) if has_model else Program(given)


def _script(name: str) -> Path:
    path = Path(name).resolve()
    if not path.is_file():
        checks.fail_for_file("There is no such file", name)
    return path


def _at_fit_of(script: str, path: Path) -> Program:
    end = "ended without a `fit` of a Keras model or a `TrainingLoop`"
    with _stopped_at_fit() as found:
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
    if not found:
        checks.fail(
            f"`{script}` {end}.",
            remedy="Its own flags come after `--`; for a loop of your own name a function that "
            "returns (dataset, model): `kdpkit doctor train.py:make`.",
        )
    return found[0]


@contextlib.contextmanager
def named(target: str) -> Iterator[Callable[[], Any]]:
    """Yield the function of `module:name` or `file.py:name`; its modules are found in the block.

    Raises:
        ValueError: There is no such function, or its module raises or trains.
    """
    module, _, name = target.rpartition(":")
    path = _script(module) if module.endswith(".py") else None

    def names() -> dict[str, Any]:
        if path is None:
            return vars(importlib.import_module(module))
        return runpy.run_path(str(path), run_name=path.stem)  # whatever the file is called

    with _as_program(module, (), path.parent if path else Path.cwd()):
        function = _untrained(target, names).get(name)
        if not callable(function):
            checks.fail(f"`{module}` has no function `{name}`.", target=target)
        yield function


def _untrained(target: str, work: Callable[[], Any]) -> Any:
    """Return what a target's code returns, which must not train."""
    try:
        with _stopped_at_fit():
            return work()
    except errors.InputError:
        raise
    except _Reached:
        checks.fail(
            "It calls `fit` before it has returned; nothing was trained.",
            target=target,
            remedy="Put the `fit` under `if __name__ == '__main__':`, or name the script itself.",
        )
    except (SystemExit, Exception) as error:  # a module and a function may raise anything
        raise errors.InputError(f"`{target}` fails: {checks.reason_of(error)}") from error


# A script's first `fit`.


class _Reached(BaseException):
    """Ends the script; no `except Exception` of its own may catch it."""


@contextlib.contextmanager
def _as_program(name: str, arguments: Sequence[str], directory: Path) -> Iterator[None]:
    """Set `sys.argv` and `sys.path` as for a program; what it prints goes to stderr."""
    before = sys.argv, sys.path[:]
    sys.argv = [name, *arguments]
    sys.path.insert(0, str(directory))
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.argv, sys.path[:] = before


@contextlib.contextmanager
def _stopped_at_fit() -> Iterator[list[Program]]:
    """Replace both `fit`, once their modules are loaded, by one that ends the program.

    What they were called with is in the list that this yields: a program may catch what ends it, or
    raise something else at its end.
    """
    found: list[Program] = []
    with contextlib.ExitStack() as undo:

        def replace(owner: Any) -> None:
            owner = next(each for each in owner.__mro__ if "fit" in vars(each))
            signature = inspect.signature(owner.fit)

            def fit(*args: Any, **settings: Any) -> Any:
                call = signature.bind(*args, **settings)
                call.apply_defaults()
                found.append(_asked(args[0], call.arguments))
                raise _Reached

            undo.callback(setattr, owner, "fit", owner.fit)
            owner.fit = fit

        waiting = {"keras": "Model", "kdpkit.training._loop": "TrainingLoop"}

        def replace_in_what_is_loaded() -> None:
            for module, name in [*waiting.items()]:
                owner = getattr(sys.modules.get(module), name, None)
                if owner is not None:
                    del waiting[module]
                    replace(owner)

        def importing(*args: Any, **settings: Any) -> Any:
            module = load(*args, **settings)
            replace_in_what_is_loaded()
            return module

        load = builtins.__import__
        undo.callback(setattr, builtins, "__import__", load)
        builtins.__import__ = importing
        replace_in_what_is_loaded()
        yield found


def _asked(model: Any, given: dict[str, Any]) -> Program:
    """Return what `fit` of a Keras model or a `TrainingLoop` is asked for."""
    x, y, sample_weight = (given.get(name) for name in ("x", "y", "sample_weight"))
    arrays = x if y is None and sample_weight is None else (x, y, sample_weight)
    return Program(
        given.get("train", arrays),
        model,
        validation_data=given.get("validation", given.get("validation_data")),
        batch_size=given.get("batch_size"),
        epochs=max(given["epochs"] - given["initial_epoch"], 1),
        steps_per_epoch=given["steps_per_epoch"],
    )
