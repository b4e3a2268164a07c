"""The settings that a program gives its optimizers, without what training changes in them."""

import numbers
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
from keras.optimizers import Optimizer
from keras.optimizers.schedules import LearningRateSchedule

from kdpkit._internal import optimizers

# An optimizer's settings as its program made it, and when they were last read.
_seen: Any = weakref.WeakKeyDictionary()


def of_program(found: Iterable[Optimizer], *, begins: bool = False) -> dict[str, Any]:
    """Return the settings of optimizers as their program made them, and their classes.

    What has changed since the last call was changed by the program if training `begins`, and
    otherwise by training, as by a callback that reduces the rate.
    """
    settings: dict[str, Any] = {"optimizers": []}
    for index, optimizer in enumerate(found):
        parts = dict.fromkeys([optimizer, optimizers.wrapped(optimizer)])
        settings["optimizers"].append([type(part).__name__ for part in parts])
        now = {name: value for part in parts for name, value in _arguments(part).items()}
        program, last = _seen.get(optimizer, (now, now))
        program = now if begins and now != last else program
        _seen[optimizer] = program, now
        settings |= {numbered(name, index): value for name, value in program.items()}
    return settings


def numbered(name: str, index: int) -> str:
    """Return the name of a setting, with the number of any optimizer but the first."""
    return f"{name} of optimizer {index + 1}" if index else name


def rates(found: Iterable[Optimizer]) -> list[list[Any]]:
    """Return of each optimizer the rate that its program set, and the one that was reached."""
    return [[values["learning_rate"] for values in _seen[optimizer]] for optimizer in found]


def restore_rates(found: Iterable[Optimizer], saved: Iterable[Sequence[Any]]) -> None:
    """Set the rates that training reached, except where the program now begins with others."""
    for optimizer, (began, reached) in zip(found, saved, strict=False):
        if isinstance(reached, float) and began == _seen[optimizer][0]["learning_rate"]:
            optimizers.wrapped(optimizer).learning_rate = reached


def plain(value: Any) -> Any:
    """Return what JSON can hold, the same whenever the program is started again."""
    if isinstance(value, numbers.Real):  # The shortest text of a float32 has all of its bits.
        number = np.asarray(value).item()
        return float(str(np.float32(number))) if isinstance(number, float) else number
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, LearningRateSchedule | Optimizer):
        arguments = (f"{name}={argument}" for name, argument in _arguments(value).items())
        return f"{type(value).__name__}({', '.join(arguments)})"
    return value if isinstance(value, str | None) else getattr(value, "__name__", str(type(value)))


def _arguments(owner: Any) -> dict[str, Any]:
    """Return the arguments that are attributes: many users' `get_config` is missing or fails."""
    found, is_optimizer = {}, isinstance(owner, Optimizer)
    kinds = str | numbers.Real | LearningRateSchedule | None
    for name, value in vars(owner).items():
        is_hidden = name in ("built", "name") or (is_optimizer and name.startswith("_"))
        parts = value if isinstance(value, list | tuple) else [value]
        # An empty list is for variables that are added later.
        if parts and not is_hidden and all(isinstance(part, kinds) for part in parts):
            found[name] = plain(value)
    if is_optimizer:
        # A `MultiOptimizer` has no rate of its own.
        rate = getattr(owner, "optimizers", owner._learning_rate)
        is_number = isinstance(rate, keras.Variable)
        found["learning_rate"] = plain(
            float(keras.ops.convert_to_numpy(rate)) if is_number else rate
        )
    return found
