"""What a target names: a script that trains, or a dataset or a schedule in a module."""

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from kdpkit import _checks, _files
from kdpkit.diagnostics import _script
from kdpkit.diagnostics._script import AtFit, Check, Reached, Training


def checked(target: str, arguments: Sequence[str], check: Check) -> Any:
    """Check what a target trains on what.

    Args:
        target: `train.py`; or `package.module:name` or `file.py:name` of a dataset, or of a
            function without arguments that gives a dataset or (dataset, model).
        arguments: Of the script.
        check: Called with what the target trains, while the script is at its `fit`.

    Returns:
        What the check returns.

    Raises:
        ValueError: There is no such thing, or it fails, or the check raises.
    """
    if ":" not in target:
        if not target.endswith(".py"):
            _checks.refuse(
                "The target must be a Python script, or `module:name` of a dataset.",
                target=target,
                remedy="Write `kdpkit doctor --tpu train.py`.",
            )
        return _script.run_to_fit(target, arguments, check)
    if arguments:
        _checks.refuse(
            "Arguments after `--` are those of a script.", target=target, arguments=arguments
        )
    with named(target, makes=_is_function) as given:
        if isinstance(given, tuple) and len(given) == 2 and hasattr(given[1], "fit"):
            return check(Training(*given))
        return check(Training(given))


@contextlib.contextmanager
def named(target: str, *, makes: Callable[[Any], bool]) -> Iterator[Any]:
    """Give what `module:name` or `file.py:name` names, within which its modules are found.

    Args:
        target: With a colon in it.
        makes: Whether what has that name is a function that gives what is meant.

    Raises:
        ValueError: There is no such thing, or it fails.
    """
    place, _, name = target.rpartition(":")
    is_file = place.endswith(".py")
    directory = _files.readable_here(place).resolve().parent if is_file else Path.cwd()
    with _script.as_program(place, (), directory):
        yield _given(target, place, name, makes)


def _given(target: str, place: str, name: str, makes: Callable[[Any], bool]) -> Any:
    """Give what a module has under a name, or what the function of that name gives."""
    at_fit = AtFit(lambda training: training)
    try:
        with at_fit.replaced():
            module = _from_file(place) if place.endswith(".py") else importlib.import_module(place)
            given: Any = getattr(module, name, None)
            given = given() if makes(given) else given
    except _checks.InputError:
        raise
    except (Reached, SystemExit, Exception) as error:  # a module and a function may raise anything
        if not at_fit.outcome.done():
            raise _checks.InputError(f"`{target}` fails: {_script.said(error)}") from error
    if at_fit.outcome.done():
        _checks.refuse(
            f"`{place}` comes to a `fit` before it gives `{name}`; nothing was trained.",
            target=target,
            remedy="Put the `fit` under `if __name__ == '__main__':`, or check the program: "
            f"`kdpkit doctor --tpu {place}`.",
        )
    if given is None:
        _checks.refuse(f"`{place}` has no `{name}`, or it is None.", target=target)
    return given


def _from_file(place: str) -> ModuleType:
    path = Path(place)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, "every `.py` file has a loader"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _is_function(value: Any) -> bool:
    return callable(value) and not hasattr(value, "element_spec") and not hasattr(value, "fit")
