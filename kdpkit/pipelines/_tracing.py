"""How TensorFlow reads the functions of our stages, and those that users hand over.

For the sake of `if` and `for` over tensors it rewrites the source of what it traces (AutoGraph),
which takes longer than the tracing, and passes over functions that are called from inner ones.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

F = TypeVar("F", bound=Callable[..., Any])


def as_written(function: F) -> F:
    """Have one of our functions, and all that it calls, traced as it stands."""
    return tf.autograph.experimental.do_not_convert(function)


def rewritten(function: F) -> F:
    """Have a user's function rewritten wherever it is called, as `Dataset.map` would have it."""
    autograph = tf.__internal__.autograph
    return autograph.tf_convert(function, autograph.control_status_ctx())
