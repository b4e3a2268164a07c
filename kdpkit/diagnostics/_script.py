"""Running a script up to its first `fit`, and checking there what it would train.

The script runs in this process, as its user runs it. Keras is loaded by the script, after it chose
its backend; so `fit` is replaced at that moment, and restored when the script has ended. The check
is made inside of that `fit`, where files are still open and modules are still found.
"""

import contextlib
import importlib.abc
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from kdpkit._internal import checks


@dataclass(frozen=True)
class Training:
    """The arguments of a script's `fit`; `epochs` is None where it is not known."""

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
    """Ends the script; no `except Exception` of its own may catch it."""


@contextlib.contextmanager
def as_program(name: str, arguments: Sequence[str], directory: Path) -> Iterator[None]:
    """Set `sys.argv` and `sys.path` as for a program; its stdout is stderr."""
    before = sys.argv, sys.path[:]
    sys.argv = [name, *arguments]
    sys.path.insert(0, str(directory))
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.argv, sys.path[:] = before


class AtFit:
    """A check instead of `fit`, which is made once and then ends the program.

    Attributes:
        outcome: What the check returned or raised; done when a `fit` was reached. It is kept here,
            as a program may catch what ends it, or raise something else at its end.
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
            for name in actions.keys() & sys.modules.keys():
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
                self._run_check(lambda: read(args[0], call.arguments))
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
    """Calls functions of modules as soon as these are loaded."""

    def __init__(self, actions: dict[str, Callable[[ModuleType], None]]) -> None:
        self._actions = actions

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find a module with the other finders, and make its loader call the function too."""
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
    """Return the number of epochs to train, at least one."""
    begin, end = (
        checks.integer(name, given[name], minimum=0) for name in ("initial_epoch", "epochs")
    )
    return max(end - begin, 1)
