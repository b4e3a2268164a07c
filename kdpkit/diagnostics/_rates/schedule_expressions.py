"""Schedules written as calls, as `NoamDecay(512, 4000)`: read, and never run as code."""

import ast
import difflib
import inspect
from collections.abc import Callable
from typing import Any

from keras.optimizers import schedules as keras_schedules
from keras.optimizers.schedules import LearningRateSchedule

from kdpkit import _checks, schedules

_FUNCTIONS = ("warmup_cosine", "warmup_polynomial")
_PREFIXES = ("", "schedules", "kdpkit.schedules", "keras.optimizers.schedules")


def read_schedule(text: str) -> LearningRateSchedule | float:
    """Make a schedule of an expression, or a number of a constant rate.

    The expression is a call of a name of `kdpkit.schedules` or `keras.optimizers.schedules`, with
    numbers, strings, lists and further such calls as arguments. It is parsed; nothing else in it
    is ever run.

    >>> read_schedule("LinearWarmup(CosineDecay(1e-3, 900), 100)").warmup_steps
    100

    Args:
        text: The expression.

    Returns:
        A Keras `LearningRateSchedule`, or a float.

    Raises:
        ValueError: It is no such expression, or the schedule refuses its arguments.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _checks.InputError(_not_a_schedule(text)) from error
    made = _Reader(text).value(tree)
    if isinstance(made, LearningRateSchedule):
        return made
    if isinstance(made, bool) or not isinstance(made, (int, float)):
        raise _checks.InputError(_not_a_schedule(text))
    return _checks.number("schedule", made, minimum=0)


def known() -> dict[str, Callable[..., Any]]:
    """Give what may be called, under its name; where both have one, that of kdpkit."""
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
        f"`{text}` is no schedule. Write a call such as `warmup_cosine(1e-3, total_steps=1000)` in "
        "quotes, a rate, or `file.py:name` of a schedule."
    )


class _Reader:
    """Makes values of the nodes of one expression."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._known = known()

    def value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Call):
            return self._called(node)
        if isinstance(node, (ast.List, ast.Tuple)):
            return [self.value(item) for item in node.elts]
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError) as error:
            raise _checks.InputError(
                f"`{ast.unparse(node)}` in `{self._text}` is no number, string, list or call of a "
                "schedule."
            ) from error

    def _called(self, node: ast.Call) -> Any:
        make = self._function(node.func)
        arguments = [self.value(argument) for argument in node.args]
        settings = {self._keyword(keyword): self.value(keyword.value) for keyword in node.keywords}
        try:
            return make(*arguments, **settings)
        except Exception as error:  # Keras' schedules raise what Python does with wrong types
            raise _checks.InputError(
                f"`{ast.unparse(node)}` fails: {_first_line(error)}"
            ) from error

    def _keyword(self, keyword: ast.keyword) -> str:
        if keyword.arg is None:
            _checks.refuse(f"`**` in `{self._text}` cannot be read; write the arguments out.")
        return keyword.arg

    def _function(self, node: ast.expr) -> Callable[..., Any]:
        written = ast.unparse(node)
        prefix, _, name = written.rpartition(".")
        if prefix not in _PREFIXES or name not in self._known:
            near = difflib.get_close_matches(name, self._known, n=1)
            all_names = ", ".join(sorted(self._known))
            _checks.refuse(
                f"There is no schedule `{written}`.",
                remedy=f"Do you mean `{near[0]}`?" if near else f"There are {all_names}.",
            )
        return self._known[name]


def _first_line(error: Exception) -> str:
    first, *_ = str(error).strip().splitlines() or [type(error).__name__]
    return first
