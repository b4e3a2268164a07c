"""What a target of `kdpkit doctor` names: a script, or a dataset in a module."""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from kdpkit import _checks, _files
from kdpkit.diagnostics import _script
from kdpkit.diagnostics._script import Training


def training_of(target: str, arguments: Sequence[str]) -> Training:
    """Give what a target trains on what.

    Args:
        target: `train.py`; or `package.module:name` or `file.py:name` of a dataset, or of a
            function without arguments that gives a dataset or (dataset, model).
        arguments: Of the script.

    Raises:
        ValueError: There is no such thing, or it fails.
    """
    place, colon, name = target.rpartition(":")
    if not colon:
        if not target.endswith(".py"):
            _checks.refuse(
                "The target must be a Python script, or `module:name` of a dataset.",
                target=target,
                remedy="Write `kdpkit doctor --tpu train.py`.",
            )
        return _script.run_to_fit(target, arguments)
    if arguments:
        _checks.refuse(
            "Arguments after `--` are those of a script.", target=target, arguments=arguments
        )
    try:
        module = _from_file(place) if place.endswith(".py") else _from_path(place)
        given = getattr(module, name, None)
        if given is None:
            _checks.refuse(f"`{place}` has no `{name}`.", target=target)
        given = given() if _is_function(given) else given
    except _checks.InputError:
        raise
    except Exception as error:  # a module and a function may raise anything
        raise _checks.InputError(f"`{target}` fails: {_script.said(error)}") from error
    if isinstance(given, tuple) and len(given) == 2 and hasattr(given[1], "fit"):
        return Training(given[0], given[1])
    return Training(given)


def _from_file(place: str) -> ModuleType:
    path = _files.readable_here(place)
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, "every `.py` file has a loader"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _from_path(place: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(place)


def _is_function(value: Any) -> bool:
    return callable(value) and not hasattr(value, "element_spec") and not hasattr(value, "fit")
