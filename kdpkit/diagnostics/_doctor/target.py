"""Targets of commands: a script that trains, or a dataset in a module; and what is known of it.

A script runs in this process, as its user runs it, up to its first `fit`. Keras is loaded by the
script, after it chose its backend; so `fit` is replaced at that moment, and restored when the
script has ended. The check is made inside of that `fit`, where files are still open and modules are
still found.
"""

import contextlib
import importlib
import importlib.abc
import importlib.util
import inspect
import math
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from kdpkit import errors
from kdpkit._internal import atomic_files, checks
from kdpkit.diagnostics import _text


@dataclass(frozen=True)
class Program:
    """What is known of a program that trains: above all the arguments of its `fit`.

    Attributes:
        replicas: Cores of the TPU that it is checked for.
        workers: Processes that divide the data between them.
        epochs: None where it is not known.
    """

    dataset: Any
    model: Any = None
    callbacks: Any = ()
    validation_data: Any = None
    batch_size: int | None = None
    validation_batch_size: int | None = None
    epochs: int | None = None
    steps_per_epoch: int | None = None
    replicas: int = 8
    workers: int = 1


Check = Callable[[Program], Any]


def checked(target: str, arguments: Sequence[str], check: Check) -> Any:
    """Check the training of a target, of a script at its first `fit`, and train nothing.

    What the target prints goes to stderr.

    Args:
        target: `train.py`; or `package.module:name` or `file.py:name` of a dataset, or of a
            function without arguments that returns a dataset or (dataset, model).
        arguments: Of the script.
        check: Called with the program, while the script is at its `fit`.

    Returns:
        What the check returns.

    Raises:
        ValueError: There is no such target, it raises or trains nothing, or the check raises.
    """
    if ":" not in target:
        if not target.endswith(".py"):
            checks.fail(
                "The target must be a Python script, or `module:name` of a dataset.",
                target=target,
                remedy="Write `kdpkit doctor --tpu train.py`.",
            )
        return _at_fit_of(target, arguments, check)
    if arguments:
        checks.fail(
            "Arguments after `--` are those of a script.", target=target, arguments=arguments
        )
    with named(target, makes=_is_function) as given:
        has_model = isinstance(given, tuple) and len(given) == 2 and hasattr(given[1], "fit")
        return check(Program(*given) if has_model else Program(given))


def _at_fit_of(script: str, arguments: Sequence[str], check: Check) -> Any:
    path = atomic_files.readable_here(script)
    at_fit = _AtFit(check)
    end = "ended without a `fit` of a Keras model or a `TrainingLoop`"
    try:
        with _as_program(str(path), arguments, path.resolve().parent), at_fit.replaced():
            runpy.run_path(str(path), run_name="__main__")
    except _Reached:
        pass
    except SystemExit as error:
        if error.code:
            end = f"ended before its `fit`: {_text.reason_of(error)}"
    except Exception as error:  # a script may raise anything
        if not at_fit.outcome.done():
            raise errors.InputError(
                f"`{script}` failed before its `fit`: {_text.reason_of(error)}"
            ) from error
    if not at_fit.outcome.done():
        checks.fail(
            f"`{script}` {end}.",
            remedy="Its own flags come after `--`; for a loop of your own name a dataset or a "
            "function that returns (dataset, model): `kdpkit doctor --tpu train.py:make`.",
        )
    return at_fit.outcome.result()


@contextlib.contextmanager
def named(target: str, *, makes: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield what `module:name` or `file.py:name` names; its modules are found in the block.

    Args:
        target: With a colon in it.
        makes: Whether the named value is a function to call.

    Raises:
        ValueError: There is no such target, or it raises.
    """
    module, _, name = target.rpartition(":")
    is_file = module.endswith(".py")
    directory = atomic_files.readable_here(module).resolve().parent if is_file else Path.cwd()
    with _as_program(module, (), directory):
        yield _value(target, module, name, makes)


def _value(target: str, module: str, name: str, makes: Callable[[Any], bool]) -> Any:
    """Return a value of a module, or what the function of that name returns."""
    at_fit = _AtFit(lambda program: program)
    value: Any = None
    try:
        with at_fit.replaced():
            value = getattr(_imported(module), name, None)
            value = value() if makes(value) else value
    except errors.InputError:
        raise
    except (_Reached, SystemExit, Exception) as error:  # a module and a function may raise anything
        if not at_fit.outcome.done():
            raise errors.InputError(f"`{target}` fails: {_text.reason_of(error)}") from error
    if at_fit.outcome.done():
        checks.fail(
            f"`{module}` calls `fit` before it defines `{name}`; nothing was trained.",
            target=target,
            remedy="Put the `fit` under `if __name__ == '__main__':`, or check the program: "
            f"`kdpkit doctor --tpu {module}`.",
        )
    if value is None:
        checks.fail(f"`{module}` has no `{name}`, or it is None.", target=target)
    return value


def _imported(name: str) -> ModuleType:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    path = Path(name)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, "every `.py` file has a loader"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _is_function(value: Any) -> bool:
    return callable(value) and not hasattr(value, "element_spec") and not hasattr(value, "fit")


# A script's first `fit`.


class _Reached(BaseException):
    """Ends the script; no `except Exception` of its own may catch it."""


@contextlib.contextmanager
def _as_program(name: str, arguments: Sequence[str], directory: Path) -> Iterator[None]:
    """Set `sys.argv` and `sys.path` as for a program; its stdout is stderr."""
    before = sys.argv, sys.path[:]
    sys.argv = [name, *arguments]
    sys.path.insert(0, str(directory))
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.argv, sys.path[:] = before


class _AtFit:
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
        self, undo: contextlib.ExitStack, owner: Any, read: Callable[..., Program]
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
            raise _Reached

        own = vars(owner).get("fit")
        owner.fit = fit
        undo.callback(setattr, owner, "fit", own) if own else undo.callback(delattr, owner, "fit")

    def _run_check(self, program: Callable[[], Program]) -> None:
        self._is_checking = True
        try:
            self.outcome.set_result(self._check(program()))
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


def _of_keras(model: Any, given: dict[str, Any]) -> Program:
    from kdpkit.batches import num_examples  # these load Keras, as the script has
    from kdpkit.diagnostics._doctor import batches

    data = given["x"], given["y"], given["sample_weight"]
    held_out, batch_size = given["validation_data"], given["batch_size"]
    if batches.are_arrays(data):
        if given["validation_split"] and held_out is None:
            data, held_out = batches.split(data, given["validation_split"])
        if batch_size is None and given["steps_per_epoch"]:
            batch_size = math.ceil(num_examples(data) / given["steps_per_epoch"])  # as Keras does
    names = ("validation_batch_size", "steps_per_epoch")
    return Program(
        data[0] if data[1] is None and data[2] is None else data,
        model,
        callbacks=() if given["callbacks"] is None else given["callbacks"],
        validation_data=held_out,
        batch_size=batch_size,
        epochs=_epochs(given),
        **{name: given[name] for name in names},
    )


def _of_loop(loop: Any, given: dict[str, Any]) -> Program:
    held_out, steps = given["validation"], given["steps_per_epoch"]
    return Program(
        given["train"],
        loop,
        given["callbacks"],
        validation_data=held_out,
        epochs=_epochs(given),
        steps_per_epoch=steps,
    )


def _epochs(given: dict[str, Any]) -> int:
    """Return the number of epochs to train, at least one."""
    begin, end = (
        checks.integer(name, given[name], minimum=0) for name in ("initial_epoch", "epochs")
    )
    return max(end - begin, 1)
