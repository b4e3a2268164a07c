"""Rematerialisation on TensorFlow: a block's gradient computes the block once more.

It is not `tf.recompute_grad`, whose gradients of a table that examples look up are dense, whereas
Keras' optimizers treat sparse ones differently.
"""

from typing import Any

import tensorflow as tf

from kdpkit.training._remat import BlockCall, BlockScope, Result
from kdpkit.training.tensorflow import _keras_internals


def checkpointed(call: BlockCall) -> Result:
    """Compute a block, and let its gradient compute it again from its inputs."""
    layer_calls = _keras_internals.current_layer_calls()
    scope = BlockScope()
    result = call(call.tensors, scope)
    values = {id(variable): value for variable, value in scope.read}
    trainable = [variable for variable, _ in scope.read if variable.trainable]
    weights = [values[id(variable)] for variable in trainable]
    features = [tensor for tensor in call.tensors if tensor.dtype.is_floating]

    def gradient(*output_gradients: tf.Tensor | tf.IndexedSlices) -> list[Any]:
        upstream = [*map(tf.convert_to_tensor, output_gradients)]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            inputs = [*_after(upstream[0], features), *map(tf.identity, weights)]
            tape.watch(inputs)
            copies = iter(inputs)
            tensors = [
                next(copies) if x.dtype.is_floating else tf.identity(x) for x in call.tensors
            ]
            others = [pair for pair in scope.read if not pair[0].trainable]
            state = [*others, *zip(trainable, copies, strict=True)]
            with layer_calls():
                recomputed = _differentiable(call(tensors, BlockScope(state)))
        return list(tape.gradient(recomputed, inputs, output_gradients=upstream))

    differentiable = _differentiable(result)
    # A loss uses logits in place of the outputs.
    has_logits = any(_keras_internals.get_logits(x) is not None for x in result.outputs)
    if not differentiable or not (features or weights) or has_logits:
        return result
    outputs = iter(_keras_internals.with_gradient(differentiable, [*features, *weights], gradient))
    return result._replace(
        outputs=[next(outputs) if x.dtype.is_floating else x for x in result.outputs],
        losses=[*outputs],
    )


def _differentiable(result: Result) -> list[tf.Tensor]:
    return [*(x for x in result.outputs if x.dtype.is_floating), *result.losses]


def _after(upstream: Any, tensors: list[Any]) -> list[Any]:
    """Return the tensors, made dependent on the gradient that arrives at the block.

    Otherwise TensorFlow and XLA would notice that the block was computed before, and keep its
    results. They do not know that a number minus itself is zero, because it may be NaN.
    """
    first = tf.reduce_max(tf.reshape(upstream, [-1])[:1])
    zero = tf.where(tf.math.is_nan(first), first, tf.zeros_like(first))
    return [tensor + tf.cast(zero, tensor.dtype) for tensor in tensors]
