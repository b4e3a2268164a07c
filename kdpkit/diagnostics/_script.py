"""Running a script up to its first `fit`, to see what it would train on what.

The script runs in this process, as its user runs it. Keras is loaded by the script, after it chose
its backend; so `fit` is replaced at that moment, and put back when the script has reached it.
"""

import contextlib
import importlib.abc
import importlib.util
import inspect
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from kdpkit import _checks, _files


@dataclass(frozen=True)
class Training:
    """What a script asked `fit` for: the arguments of `check_tpu`."""

    dataset: Any
    model: Any = None
    callbacks: Any = ()
    validation_data: Any = None
    batch_size: int | None = None


class _Reached(BaseException):
    """Ends the script; no `except Exception` of its own is to catch that."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self.training = training


def run_to_fit(script: str, arguments: Sequence[str]) -> Training:
    """Run a script up to its first `fit` or `TrainingLoop.fit`; nothing is trained.

    What it prints goes to stderr.

    Raises:
        ValueError: There is no such file, the script raises or ends before.
    """
    path = _files.readable_here(script)
    try:
        with _as_program(path, arguments), _fit_replaced():
            runpy.run_path(str(path), run_name="__main__")
    except _Reached as reached:
        return reached.training
    except SystemExit as end:
        if end.code:
            _refuse(f"`{script}` ended before its `fit`: {said(end)}.")
    except Exception as error:  # a script may raise anything
        raise _checks.InputError(f"`{script}` failed before its `fit`: {said(error)}") from error
    return _refuse(f"`{script}` ended without a `fit` of a Keras model or a `TrainingLoop`.")


def said(error: BaseException) -> str:
    """Give an error in one line: its type, and the first line of what it says."""
    first, *_ = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first}"


def _refuse(problem: str) -> NoReturn:
    _checks.refuse(
        problem,
        remedy="Its own flags come after `--`; for a loop of your own name a dataset or a function "
        "that gives (dataset, model): `kdpkit doctor --tpu train.py:make`.",
    )


@contextlib.contextmanager
def _as_program(path: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Give the script its arguments, and the modules beside it."""
    before = sys.argv, sys.path[:]
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.argv, sys.path[:] = before


@contextlib.contextmanager
def _fit_replaced() -> Iterator[None]:
    """Let both `fit` stop the script, from the moment that their modules are loaded."""
    with contextlib.ExitStack() as undo:
        actions: dict[str, Callable[[ModuleType], None]] = {
            "keras": lambda keras: _replace(undo, keras.Model, _of_keras),
            "kdpkit.training._loop": lambda loop: _replace(undo, loop.TrainingLoop, _of_loop),
        }
        for name in [*actions]:
            if name in sys.modules:
                actions.pop(name)(sys.modules[name])
        finder = _WhenLoaded(actions)
        sys.meta_path.insert(0, finder)
        undo.callback(sys.meta_path.remove, finder)
        yield


class _WhenLoaded(importlib.abc.MetaPathFinder):
    """Calls functions of modules as soon as these are loaded; all else is found as ever."""

    def __init__(self, actions: dict[str, Callable[[ModuleType], None]]) -> None:
        self._actions = actions

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Let the other finders look, and the loader that they give call the function too."""
        del path, target
        action = self._actions.pop(name, None)
        spec = importlib.util.find_spec(name) if action else None
        if action is None or spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_act(module: ModuleType) -> None:
            load(module)
            action(module)

        spec.loader.exec_module = load_and_act  # type: ignore[method-assign]
        return spec


def _replace(undo: contextlib.ExitStack, owner: Any, read: Callable[..., Training]) -> None:
    """Replace `owner.fit` by what reads its arguments and stops."""
    signature = inspect.signature(owner.fit)

    def fit(*args: Any, **settings: Any) -> Any:
        call = signature.bind(*args, **settings)
        call.apply_defaults()
        raise _Reached(read(*args[:1], call.arguments))

    own = vars(owner).get("fit")
    owner.fit = fit
    undo.callback(setattr, owner, "fit", own) if own else undo.callback(delattr, owner, "fit")


def _of_keras(model: Any, given: dict[str, Any]) -> Training:
    x, y, sample_weight = (given[name] for name in ("x", "y", "sample_weight"))
    return Training(
        dataset=x if y is None and sample_weight is None else (x, y, sample_weight),
        model=model,
        callbacks=given["callbacks"] or (),
        validation_data=given["validation_data"],
        batch_size=given["batch_size"],
    )


def _of_loop(loop: Any, given: dict[str, Any]) -> Training:
    return Training(
        dataset=given["train"],
        model=loop,
        callbacks=given["callbacks"],
        validation_data=given["validation"],
    )
