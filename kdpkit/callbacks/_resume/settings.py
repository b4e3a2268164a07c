"""The settings that a program gives its optimizers, without what training changes in them."""

import re
import weakref
from typing import Any

from keras.optimizers import Optimizer

from kdpkit._internal import optimizers

# An optimizer's settings as its program made it, and when they were last read.
_seen: Any = weakref.WeakKeyDictionary()


def of_program(optimizer: Optimizer, *, begins: bool = False) -> dict[str, Any]:
    """Return an optimizer's settings as its program made it.

    What has changed since the last call was changed by the program if training `begins`, and
    otherwise by training, as by a callback that reduces the rate.
    """
    now = _settings(optimizer)
    program, last = _seen.get(optimizer, (now, now))
    program = now if begins and now != last else program
    _seen[optimizer] = program, now
    return program


def numbered(name: str, index: int) -> str:
    """Return the name of a setting, with the number of any optimizer but the first."""
    return f"{name} of optimizer {index + 1}" if index else name


def _settings(optimizer: Optimizer) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for part in (optimizer, optimizers.wrapped(optimizer)):
        try:
            config |= part.get_config()
        except NotImplementedError:  # The user's schedule has no `get_config`.
            rate, values = vars(part)["_learning_rate"], vars(part).items()
            config |= {x: value for x, value in values if x[0] != "_" and _is_plain(value)}
            config["learning_rate"] = {"class_name": type(rate).__name__, "config": vars(rate)}
    # A `MultiOptimizer` has no rate of its own.
    config["learning_rate"] = config.pop("optimizer_map", config["learning_rate"])
    hidden = ("built", "inner_optimizer", "name")
    return {name: _shown(value) for name, value in config.items() if name not in hidden}


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | None)


def _shown(value: Any) -> Any:
    """Return what JSON can hold: numbers to the precision of float32, and objects as text."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict) and "config" in value:
        value = f"{value['class_name']}({value['config']})"
    return value if _is_plain(value) else re.sub(r" at 0x\w+", "", str(value))
