"""How AutoGraph treats our own functions, and those of users.

AutoGraph rewrites the source of traced functions to support `if` and `for` over tensors. That takes
longer than the tracing, and skips functions called from inner ones.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

F = TypeVar("F", bound=Callable[..., Any])


def as_written(function: F) -> F:
    """Trace one of our functions, and everything it calls, without AutoGraph."""
    return tf.autograph.experimental.do_not_convert(function)


def rewritten(function: F) -> F:
    """Trace a user's function with AutoGraph wherever it is called, as in `Dataset.map`."""
    return rewriting()(function)


def rewriting() -> Callable[[F], F]:
    """Return what `rewritten` does where this is called, for functions that are met later."""
    autograph = tf.__internal__.autograph
    return functools.partial(autograph.tf_convert, ctx=autograph.control_status_ctx())
