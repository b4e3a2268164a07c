"""Targets of commands: a script that trains, or a dataset in a module."""

import contextlib
import importlib
import importlib.util
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from kdpkit import errors
from kdpkit._internal import atomic_files, checks
from kdpkit.diagnostics import _text
from kdpkit.diagnostics._script import AtFit, Check, Reached, Training, as_program


def checked(target: str, arguments: Sequence[str], check: Check) -> Any:
    """Check the training of a target, of a script at its first `fit`, and train nothing.

    What the target prints goes to stderr.

    Args:
        target: `train.py`; or `package.module:name` or `file.py:name` of a dataset, or of a
            function without arguments that returns a dataset or (dataset, model).
        arguments: Of the script.
        check: Called with the training, while the script is at its `fit`.

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
        return check(Training(*given) if has_model(given) else Training(given))


def has_model(given: Any) -> bool:
    """Return whether it is (dataset, model)."""
    return isinstance(given, tuple) and len(given) == 2 and hasattr(given[1], "fit")


def _at_fit_of(script: str, arguments: Sequence[str], check: Check) -> Any:
    path = atomic_files.readable_here(script)
    at_fit = AtFit(check)
    end = "ended without a `fit` of a Keras model or a `TrainingLoop`"
    try:
        with as_program(str(path), arguments, path.resolve().parent), at_fit.replaced():
            runpy.run_path(str(path), run_name="__main__")
    except Reached:
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
    with as_program(module, (), directory):
        yield _value(target, module, name, makes)


def _value(target: str, module: str, name: str, makes: Callable[[Any], bool]) -> Any:
    """Return a value of a module, or what the function of that name returns."""
    at_fit = AtFit(lambda training: training)
    value: Any = None
    try:
        with at_fit.replaced():
            value = getattr(_imported(module), name, None)
            value = value() if makes(value) else value
    except errors.InputError:
        raise
    except (Reached, SystemExit, Exception) as error:  # a module and a function may raise anything
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
