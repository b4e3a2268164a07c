"""`compile(jit_compile=True)` with several replicas: XLA compiles each replica's pass of the model.

XLA cannot compile the step of all replicas as one (keras-team/keras#20763), since replicas meet in
it: in sums of gradients and metrics. What it compiles here is the model's `call`, and with it the
backward pass; losses, optimizer and metrics stay TensorFlow's.
"""

from typing import Any

import keras
import tensorflow as tf

from kdpkit._internal import checks
from kdpkit.training._keras_internals import get_keras_mask, set_keras_mask
from kdpkit.training.tensorflow._step import current_step


def compile_call(model: keras.Model, global_batch_norms: list[Any]) -> None:
    """Have XLA compile a model's `call` in the steps of replicas; set on the instance, once."""
    if global_batch_norms:
        checks.fail(
            "XLA compiles each replica's forward pass apart, where a BatchNormalization cannot "
            "meet the other replicas.",
            layer=global_batch_norms[0].name,
            jit_compile=model.jit_compile,
            remedy="Compile the model with `jit_compile=False`, or use `replica_exact(model, "
            'batch_norm="replica")`.',
        )
    if "call" in vars(model):
        return
    stock_call = model.call

    def call(*args: Any, **kwargs: Any) -> Any:
        if current_step() is None or not model.jit_compile:
            return stock_call(*args, **kwargs)
        return _compiled(model, stock_call, args, kwargs)

    model.call = call


def _compiled(model: keras.Model, call: Any, args: Any, kwargs: Any) -> Any:
    """Call what XLA compiles; masks, and what layers add to the loss, are no outputs by nature."""

    def run(*tensors: Any) -> Any:
        following = iter(tensors)
        given = [next(following) if tf.is_tensor(leaf) else leaf for leaf in leaves]
        inner_args, inner_kwargs = tf.nest.pack_sequence_as((args, kwargs), given)
        outputs = call(*inner_args, **inner_kwargs)
        losses = [[*layer._losses] for layer in layers]
        for layer in layers:
            layer._losses.clear()
        return outputs, keras.tree.map_structure(get_keras_mask, outputs), losses

    layers = list(model._flatten_layers())
    leaves = tf.nest.flatten((args, kwargs))
    compiled = tf.function(run, jit_compile=True, autograph=False)
    outputs, masks, losses = compiled(*(leaf for leaf in leaves if tf.is_tensor(leaf)))
    keras.tree.map_structure(
        lambda output, mask: mask is None or set_keras_mask(output, mask), outputs, masks
    )
    for layer, added in zip(layers, losses, strict=True):
        layer._losses.extend(added)
    return outputs
