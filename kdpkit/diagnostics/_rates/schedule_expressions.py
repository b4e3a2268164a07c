"""Schedules written as calls, as `NoamDecay(512, 4000)`: read, and never run as code."""

import ast
import difflib
import inspect
from collections.abc import Callable
from typing import Any

from keras.optimizers import schedules as keras_schedules
from keras.optimizers.schedules import LearningRateSchedule

from kdpkit import errors, schedules
from kdpkit._internal import checks, error_text

_FUNCTIONS = ("warmup_cosine", "warmup_polynomial")
_PREFIXES = ("", "schedules", "kdpkit.schedules", "keras.optimizers.schedules")


def read_schedule(text: str) -> LearningRateSchedule | float:
    """Return the schedule of an expression, or the number of a constant rate.

    The expression is a call of a name of `kdpkit.schedules` or `keras.optimizers.schedules`, with
    numbers, strings, lists and further such calls as arguments. It is parsed; nothing else in it
    is run.

    >>> read_schedule("LinearWarmup(CosineDecay(1e-3, 900), 100)").warmup_steps
    100

    Args:
        text: The expression.

    Raises:
        ValueError: It is no such expression, or the schedule raises for its arguments.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise errors.InputError(_not_a_schedule(text)) from error
    made = _value(tree, text)
    if isinstance(made, LearningRateSchedule):
        return made
    if isinstance(made, bool) or not isinstance(made, (int, float)):
        raise errors.InputError(_not_a_schedule(text))
    return checks.number("schedule", made, minimum=0)


def _known() -> dict[str, Callable[..., Any]]:
    """Return what may be called, under its name; where both have one, that of kdpkit."""
    classes = {
        name: value
        for module in (keras_schedules, schedules)
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, LearningRateSchedule)
        and value is not LearningRateSchedule
        and not name.startswith("_")
    }
    return classes | {name: getattr(schedules, name) for name in _FUNCTIONS}


def _not_a_schedule(text: str) -> str:
    return (
        f"`{text}` is not a schedule. Write a call such as `warmup_cosine(1e-3, total_steps=1000)` "
        "in quotes, a rate, or `file.py:name` of a schedule."
    )


def _value(node: ast.expr, text: str) -> Any:
    """Return the value of a part of an expression."""
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(item, text) for item in node.elts]
    if not isinstance(node, ast.Call):
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError) as error:
            raise errors.InputError(
                f"`{ast.unparse(node)}` in `{text}` is not a number, string, list or call of a "
                "schedule."
            ) from error
    make = _function(node.func)
    arguments = [_value(argument, text) for argument in node.args]
    settings = {str(each.arg): _value(each.value, text) for each in node.keywords}
    try:
        return make(*arguments, **settings)
    except Exception as error:  # Keras' schedules raise what Python does with wrong types
        reason = error_text.first_line(error)
        raise errors.InputError(f"`{ast.unparse(node)}` fails: {reason}") from error


def _function(node: ast.expr) -> Callable[..., Any]:
    written, known = ast.unparse(node), _known()
    prefix, _, name = written.rpartition(".")
    if prefix not in _PREFIXES or name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        checks.fail(
            f"There is no schedule `{written}`.",
            remedy=f"Do you mean `{near[0]}`?"
            if near
            else f"There are {', '.join(sorted(known))}.",
        )
    return known[name]
