"""Running a script up to its first `fit`, and checking there what it would train on what.

The script runs in this process, as its user runs it. Keras is loaded by the script, after it chose
its backend; so `fit` is replaced at that moment, and put back when the script has ended. The check
is made inside of that `fit`: files are still open there, and modules are still found.
"""

import contextlib
import importlib.abc
import importlib.util
import inspect
import math
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from kdpkit import _checks, _files


@dataclass(frozen=True)
class Training:
    """What a script asked `fit` for; where that is not known, `epochs` is None."""

    dataset: Any
    model: Any = None
    callbacks: Any = ()
    validation_data: Any = None
    batch_size: int | None = None
    validation_batch_size: int | None = None
    epochs: int | None = None
    steps_per_epoch: int | None = None


Check = Callable[[Training], Any]


class Reached(BaseException):
    """Ends the script; no `except Exception` of its own is to catch that."""


def run_to_fit(script: str, arguments: Sequence[str], check: Check) -> Any:
    """Run a script up to its first `fit` or `TrainingLoop.fit`, and check there; train nothing.

    What it prints goes to stderr.

    Returns:
        What the check returns.

    Raises:
        ValueError: There is no such file, the script raises or ends before, or the check raises.
    """
    path = _files.readable_here(script)
    at_fit = AtFit(check)
    try:
        with as_program(str(path), arguments, path.resolve().parent), at_fit.replaced():
            runpy.run_path(str(path), run_name="__main__")
    except (Reached, SystemExit, Exception) as error:  # a script may raise anything
        if not at_fit.outcome.done():
            _refuse_end(script, error)
    if not at_fit.outcome.done():
        _refuse(f"`{script}` ended without a `fit` of a Keras model or a `TrainingLoop`.")
    return at_fit.outcome.result()


def _refuse_end(script: str, error: BaseException) -> None:
    if not isinstance(error, SystemExit):
        raise _checks.InputError(f"`{script}` failed before its `fit`: {said(error)}") from error
    if error.code:
        _refuse(f"`{script}` ended before its `fit`: {said(error)}.")


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
def as_program(name: str, arguments: Sequence[str], directory: Path) -> Iterator[None]:
    """Give a program its arguments, and the modules of its directory; stdout is stderr."""
    before = sys.argv, sys.path[:]
    sys.argv = [name, *arguments]
    sys.path.insert(0, str(directory))
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.argv, sys.path[:] = before


class AtFit:
    """A check in the place of `fit`, which is made once and then ends the program.

    Attributes:
        outcome: What the check returned or raised; done when a `fit` was reached. It is held here,
            as a program may catch what ends it, or raise something else on its way out.
    """

    def __init__(self, check: Check) -> None:
        self.outcome: Future[Any] = Future()
        self._check = check
        self._is_checking = False

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        """Replace both `fit`, from the moment that their modules are loaded."""
        with contextlib.ExitStack() as undo:
            actions: dict[str, Callable[[ModuleType], None]] = {
                "keras": lambda keras: self._replace(undo, keras.Model, _of_keras),
                "kdpkit.training._loop": lambda loop: self._replace(
                    undo, loop.TrainingLoop, _of_loop
                ),
            }
            for name in [*actions]:
                if name in sys.modules:
                    actions.pop(name)(sys.modules[name])
            finder = _WhenLoaded(actions)
            sys.meta_path.insert(0, finder)
            undo.callback(sys.meta_path.remove, finder)
            yield

    def _replace(
        self, undo: contextlib.ExitStack, owner: Any, read: Callable[..., Training]
    ) -> None:
        original = owner.fit
        signature = inspect.signature(original)

        def fit(*args: Any, **settings: Any) -> Any:
            if self._is_checking:  # which builds models with it
                return original(*args, **settings)
            call = signature.bind(*args, **settings)
            call.apply_defaults()
            if not self.outcome.done():
                self._run_check(lambda: read(*args[:1], call.arguments))
            raise Reached

        own = vars(owner).get("fit")
        owner.fit = fit
        undo.callback(setattr, owner, "fit", own) if own else undo.callback(delattr, owner, "fit")

    def _run_check(self, training: Callable[[], Training]) -> None:
        self._is_checking = True
        try:
            self.outcome.set_result(self._check(training()))
        except Exception as error:  # raised again where the outcome is asked for
            self.outcome.set_exception(error)
        finally:
            self._is_checking = False


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


def _of_keras(model: Any, given: dict[str, Any]) -> Training:
    from kdpkit.batches import rows_of  # these load Keras, as the script has
    from kdpkit.diagnostics import _batch

    data = given["x"], given["y"], given["sample_weight"]
    held_out, batch_size = given["validation_data"], given["batch_size"]
    if _batch.are_arrays(data):
        if given["validation_split"] and held_out is None:
            data, held_out = _batch.split(data, given["validation_split"])
        if batch_size is None and given["steps_per_epoch"]:
            batch_size = math.ceil(rows_of(data) / given["steps_per_epoch"])  # as Keras does
    return Training(
        dataset=data[0] if data[1] is None and data[2] is None else data,
        model=model,
        callbacks=() if given["callbacks"] is None else given["callbacks"],
        validation_data=held_out,
        batch_size=batch_size,
        validation_batch_size=given["validation_batch_size"],
        epochs=_epochs(given),
        steps_per_epoch=given["steps_per_epoch"],
    )


def _of_loop(loop: Any, given: dict[str, Any]) -> Training:
    return Training(
        dataset=given["train"],
        model=loop,
        callbacks=given["callbacks"],
        validation_data=given["validation"],
        epochs=_epochs(given),
        steps_per_epoch=given["steps_per_epoch"],
    )


def _epochs(given: dict[str, Any]) -> int:
    """Count the epochs that are to be trained, at least one."""
    begin, end = (
        _checks.integer(name, given[name], minimum=0) for name in ("initial_epoch", "epochs")
    )
    return max(end - begin, 1)
