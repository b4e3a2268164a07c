"""Steps of `fit` under `TPUStrategy`: each replica runs Keras' own step on its examples.

XLA compiles a replica's step as one, so that no operation can be put on a device, as under other
strategies. A replica's losses are divided by what all examples add up to, its gradients are added
up before the optimizer clips and applies them, and TensorFlow adds up what metrics count.

Not supported, because a replica has only its own examples: a loss, metric or layer that compares
examples, batch statistics of all of them (there is a warning), random numbers as one device draws
them. No TPU was available: this is tested with CPUs in place of its cores.
"""

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from kdpkit._internal import checks
from kdpkit.training.tensorflow import _global_batches
from kdpkit.training.tensorflow._keras_internals import KERAS_LOSSES, replaced

STRATEGIES: tuple[type, ...] = (tf.distribute.TPUStrategy,)
_replica = threading.local()  # `counts`: the examples of this thread's replica, and of all


def warn_of_local_statistics(model: keras.Model, replicas: int) -> None:
    """Warn if the model has layers that normalize by a replica's own examples."""
    names = [
        layer.name
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization)
        and layer.trainable
        and not layer.synchronized
    ]
    if replicas > 1 and names:
        warnings.warn(
            f"BatchNormalization ({', '.join(names)}) normalizes by each replica's own examples, "
            f"so training on {replicas} replicas of a TPU differs from one device.",
            stacklevel=2,
        )


def run_step(step: Callable, data: Any) -> Any:
    """Run a step of Keras' on the examples of a replica, in its context."""
    num_examples = _global_batches.examples_in_batch(data)
    _replica.counts = num_examples, _sum(num_examples)
    return step(data)


@contextlib.contextmanager
def added_up(model: keras.Model, *, is_users: bool) -> Iterator[None]:
    """Let the losses and gradients that replicas compute add up to those of the global batch."""
    regularizes = any(layer.activity_regularizer for layer in model._flatten_layers())
    accumulates = getattr(model.optimizer, "gradient_accumulation_steps", None)
    is_own_loss = type(model).compute_loss is not keras.Model.compute_loss
    if is_users or is_own_loss or accumulates or regularizes:
        checks.fail(
            "On a TPU each core computes its own examples: `train_step` and `compute_loss` must be "
            "Keras' own, and neither gradients accumulated nor activities regularized.",
            model=type(model).__name__,
            remedy="Train on the TPU through JAX, with KERAS_BACKEND=jax.",
        )
    apply_mask = KERAS_LOSSES.apply_mask
    apply: Any = getattr(model.optimizer, "apply", None)

    def mask_weights(weight: Any, mask: Any, dtype: Any, reduction: Any) -> Any:
        weights = apply_mask(weight, mask, dtype=dtype, reduction=reduction)
        if mask is None or reduction not in ("mean", "sum_over_batch_size"):
            return weights
        valid, size = tf.reduce_sum(tf.cast(mask, dtype)), tf.cast(tf.size(mask), dtype)
        return _times(_times(weights, valid, size), _sum(size), _sum(valid))

    def apply_sums(grads: Any, *variables: Any) -> None:
        summed = iter(_sum([gradient for gradient in grads if gradient is not None]))
        apply([g if g is None else next(summed) for g in grads], *variables)

    with contextlib.ExitStack() as stack:
        for owner, name, function in (
            (KERAS_LOSSES, "reduce_values", _reduce),
            (KERAS_LOSSES, "apply_mask", mask_weights),
            (KERAS_LOSSES, "unscale_loss_for_distribution", _unscale),
            (model, "_aggregate_additional_loss", _additional),
            (keras.optimizers.Optimizer, "_all_reduce_sum_gradients", lambda _, pairs: pairs),
            *([(model.optimizer, "apply", apply_sums)] if apply else []),
        ):
            stack.enter_context(replaced(owner, name, function))
        yield


def _reduce(values: Any, weight: Any = None, reduction: str = "sum_over_batch_size") -> Any:
    if values.shape.rank == 0:
        checks.fail("A loss of one number compares examples, of which a core has only some.")
    if reduction in (None, "none", "sum"):
        return tf.reduce_sum(values) if reduction == "sum" else values
    is_weighted = reduction == "mean_with_sample_weight" and weight is not None
    divisor = tf.reduce_sum(weight) if is_weighted else tf.size(values)
    return _times(tf.reduce_sum(values), 1, _sum(tf.cast(divisor, values.dtype)))


def _unscale(loss: Any) -> Any:  # which its tracker weighs by the replica's examples
    return _times(loss, *_replica.counts[::-1])


def _additional(loss: Any) -> Any:
    """Weigh a scalar, which is a mean over a replica's examples, or of the weights."""
    loss = tf.cast(loss, loss.dtype if loss.dtype.is_floating else keras.config.floatx())
    return tf.reduce_sum(loss) if loss.shape.rank else _times(loss, *_replica.counts)


def _times(value: Any, count: Any, other: Any) -> Any:
    """Multiply by a fraction; the result of a replica without examples is 0, and never NaN."""
    factor = tf.math.divide_no_nan(tf.cast(count, value.dtype), tf.cast(other, value.dtype))
    return tf.math.multiply_no_nan(value, factor)


def _sum(values: Any) -> Any:
    context: Any = tf.distribute.get_replica_context()
    return context.all_reduce(tf.distribute.ReduceOp.SUM, values)
