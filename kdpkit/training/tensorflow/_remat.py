"""Rematerialisation on TensorFlow: a block's gradient computes the block once more.

Not `tf.recompute_grad`, whose gradients of a table that examples look up are dense: Keras'
optimizers treat sparse ones in their own way.
"""

from typing import Any

import tensorflow as tf

from kdpkit.training._remat import BlockCall, BlockScope, Result
from kdpkit.training.tensorflow import _keras_internals
from kdpkit.training.tensorflow._step import Step, current_part, current_step, running
from kdpkit.training.tensorflow._tensor_parts import known_parts


def checkpointed(call: BlockCall) -> Result:
    """Compute a block, and have its gradient compute it again from its inputs."""
    step, part, layers = current_step(), current_part(), _keras_internals.call_of_layers()
    scope = BlockScope()
    result = call(call.tensors, scope)
    trained = [variable for variable, _ in scope.read if variable.trainable]
    values = {id(variable): value for variable, value in scope.read}
    floating = [tensor for tensor in call.tensors if tensor.dtype.is_floating]
    weights = [values[id(variable)] for variable in trained]
    inputs = [*floating, *weights]

    def gradient(*given: tf.Tensor | tf.IndexedSlices) -> list[Any]:
        upstream = [*map(tf.convert_to_tensor, given)]
        device = tf.device(part.device if part else None)
        with device, tf.GradientTape(watch_accessed_variables=False) as tape:
            again = [*_after(step, upstream[0], floating), *map(tf.identity, weights)]
            tape.watch(again)
            new = iter(again)
            tensors = [next(new) if x.dtype.is_floating else tf.identity(x) for x in call.tensors]
            others = [pair for pair in scope.read if not pair[0].trainable]
            state = [*others, *zip(trained, new, strict=True)]
            with running(step, part), layers():
                recomputed = _differentiable(call(tensors, BlockScope(state)))
        return list(tape.gradient(recomputed, again, output_gradients=upstream))

    differentiable = _differentiable(result)
    has_logits = any(_keras_internals.get_logits(x) is not None for x in result.outputs)
    if not differentiable or not inputs or has_logits:  # which a loss uses in place of the outputs
        return result
    attached = iter(_keras_internals.with_gradient(differentiable, inputs, gradient))
    return result._replace(
        outputs=[next(attached) if x.dtype.is_floating else x for x in result.outputs],
        losses=[*attached],
    )


def _differentiable(result: Result) -> list[tf.Tensor]:
    return [*(x for x in result.outputs if x.dtype.is_floating), *result.losses]


def _after(step: Step | None, upstream: Any, tensors: list[Any]) -> list[Any]:
    """Return tensors as they are, which depend on a gradient that comes from behind the block.

    Else TensorFlow and XLA would find that what follows from them was computed before, and keep it.
    A difference of a number to itself is not known to be zero: it may be NaN.
    """
    parts = step and known_parts(step, upstream)
    first = tf.reduce_max(tf.reshape(parts.tensors[0] if parts else upstream, [-1])[:1])
    zero = tf.where(tf.math.is_nan(first), first, tf.zeros_like(first))
    return [tensor + tf.cast(zero, tensor.dtype) for tensor in tensors]
