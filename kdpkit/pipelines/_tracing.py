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


def rewriting() -> Callable[[F], F]:
    """Return what has users' functions traced with AutoGraph wherever they are called.

    It is AutoGraph as it is where this is called, as `Dataset.map` has it.
    """
    autograph = tf.__internal__.autograph
    return functools.partial(autograph.tf_convert, ctx=autograph.control_status_ctx())
