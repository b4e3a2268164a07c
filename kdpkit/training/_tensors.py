"""The type of the backend's tensors, for annotations alone: it loads no framework."""

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import jax
    import tensorflow as tf

    Tensor: TypeAlias = tf.Tensor | jax.Array
else:
    Tensor = Any
