"""What Keras and TensorFlow do otherwise inside the steps of an exact model, in one file.

Keras reduces a loss by one replica's divisor, divides by the number of replicas where it should
count examples, and gives every replica the same random numbers. What is wrapped for this once in
the process is in `install`: losses, random functions and the number of replicas. These wrappers
call what they wrapped, unless their thread runs a step of an exact model. The names and arguments
are checked first: a Keras or TensorFlow that differs is an error. What is replaced only while a
step is tried is a context manager.
"""

import contextlib
import functools
import inspect
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend import get_keras_mask, set_keras_mask
from keras.src.losses import loss as keras_loss
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.distribute.values import DistributedVariable
from tensorflow.python.framework import random_seed
from tensorflow.python.ops import gen_logging_ops

from kdpkit._internal import checks, versions
from kdpkit.training.tensorflow import (
    _batch_norm,
    _global_batch,
    _keras_internals,
    _optimizer_patches,
    _random,
    _workers,
)
from kdpkit.training.tensorflow._collectives import gathered
from kdpkit.training.tensorflow._keras_internals import replaced
from kdpkit.training.tensorflow._step import ReplicaStep, current_step
from kdpkit.training.tensorflow._whose_code import is_loss_of_a_library


def install() -> None:
    """Wrap the functions that are not wrapped yet.

    Raises:
        ValueError: This Keras or TensorFlow does not have them as Keras 3.10 to 3.15 have.
    """
    for owner, name, arguments, wrapper in _WRAPPERS:
        original = getattr(owner, name, None)
        if getattr(original, "kdpkit_wrapper", None) is wrapper:
            continue
        if original is None or [*inspect.signature(original).parameters] != arguments:
            versions.reject_unknown(name, tensorflow=tf.__version__)
        setattr(owner, name, _wrap(original, wrapper))
    for number in (float, int):  # of a variable in callbacks, as on one device
        setattr(DistributedVariable, f"__{number.__name__}__", _as_number(number))
    _install_one_device_in_steps()


def _as_number(number: type) -> Callable:
    return lambda variable: number(variable.read_value())


def _wrap(original: Callable, wrapper: Callable) -> Callable:
    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    wrapped.kdpkit_wrapper = wrapper  # type: ignore[attr-defined]  # marks what is wrapped already
    return wrapped


def _reduce_loss(
    original: Callable,
    values: Any,
    sample_weight: Any = None,
    mask: Any = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: str | None = None,
) -> Any:
    """Reduce losses by the divisor of the global batch, where Keras takes one replica's over R."""
    # docs/upstream/keras_divides_losses_by_replica.md
    step = current_step()
    if step is None or reduction in (None, "none"):
        return original(values, sample_weight, mask, reduction, dtype)
    values = keras.ops.convert_to_tensor(values, dtype=dtype)
    if step.gathered:
        return original(values, sample_weight, mask, reduction, dtype)
    if values.shape.rank == 0 and step.replicas > 1:
        raise _OneNumberError
    total = keras.ops.sum(original(values, sample_weight, mask, "sum", dtype))
    size = tf.cast(tf.size(values), total.dtype)
    if reduction == "sum":
        return step.quotient(total, 1)
    if reduction == "mean_with_sample_weight" and not (sample_weight is None and mask is None):
        weights = keras_loss.apply_mask(
            None if sample_weight is None else tf.cast(sample_weight, total.dtype),
            mask,
            total.dtype,
            reduction,
        )
        return step.quotient(total, step.total(tf.reduce_sum(weights)))
    if mask is not None:  # the mean is over the unmasked entries
        of_each = tf.math.divide_no_nan(size, tf.cast(tf.size(mask), size.dtype))
        unmasked = tf.reduce_sum(tf.cast(mask, size.dtype)) * of_each
        return step.quotient(total, step.total(unmasked))
    return tf.math.divide_no_nan(total, size)


class _OneNumberError(Exception):
    """A loss gave one number for all examples of a replica."""


def _call_loss(
    original: Callable, loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None
) -> Any:
    """Compute a loss that gives one number for a batch on the examples of all replicas."""
    step = current_step()
    if step is not None and step.own is not None and is_loss_of_a_library(loss):
        compute = functools.partial(original, loss)
        return _global_batch.loss_of_parts(step, compute, y_true, y_pred, sample_weight)
    if step is None or step.replicas == 1 or step.gathered:
        return original(loss, y_true, y_pred, sample_weight)
    return _loss_of_replicas(step, original, loss, y_true, y_pred, sample_weight)


def _loss_of_replicas(
    step: ReplicaStep, original: Callable, loss: Any, y_true: Any, y_pred: Any, sample_weight: Any
) -> Any:
    if not isinstance(loss, keras.losses.Circle):  # which compares the examples, and gives several
        with contextlib.suppress(_OneNumberError):
            return original(loss, y_true, y_pred, sample_weight)
    _tell_of_gathering(loss.name)
    masks = keras.tree.map_structure(get_keras_mask, y_pred)
    y_true, y_pred, sample_weight, masks = tf.nest.map_structure(
        lambda part: None if part is None else gathered(part),
        (y_true, y_pred, sample_weight, masks),
    )
    keras.tree.map_structure(set_keras_mask, y_pred, masks)
    with step.on_all_examples():
        return original(loss, y_true, y_pred, sample_weight)


_told: set[str] = set()


def _tell_of_gathering(name: str) -> None:
    if name not in _told:
        _told.add(name)
        sys.stderr.write(
            f"kdpkit: the loss `{name}` compares the examples of a batch, so every replica "
            "computes it on the examples of all replicas.\n"
        )


class _OneDeviceInSteps:
    """`Strategy.num_replicas_in_sync`, which is one for the code of a step.

    What divides by it there, in a user's step, in Keras' losses and regularizers and in
    `tf.nn.compute_average_loss`, expects that what the replicas have is added up as it is. In an
    exact step it is added up by shares, and one device divides by one.
    """

    def __init__(self, original: property) -> None:
        self.original = original

    def __get__(self, strategy: tf.distribute.Strategy | None, owner: Any = None) -> Any:
        if strategy is None:
            return self
        reader = sys._getframe(1).f_globals.get("__name__", "")
        if current_step() is None or reader.startswith(_KNOWING_REPLICAS):
            return self.original.__get__(strategy)
        return 1


_KNOWING_REPLICAS = ("tensorflow.python.distribute", "tensorflow.python.tpu", "kdpkit.")


def _install_one_device_in_steps() -> None:
    original = vars(distribute_lib.StrategyBase)["num_replicas_in_sync"]
    if isinstance(original, property):
        distribute_lib.StrategyBase.num_replicas_in_sync = _OneDeviceInSteps(original)
    elif not isinstance(original, _OneDeviceInSteps):
        versions.reject_unknown("num_replicas_in_sync", tensorflow=tf.__version__)


_WRAPPERS: tuple[tuple[Any, str, list[str], Callable], ...] = (
    (
        keras_loss,
        "reduce_weighted_values",
        ["values", "sample_weight", "mask", "reduction", "dtype"],
        _reduce_loss,
    ),
    (keras_loss.Loss, "__call__", ["self", "y_true", "y_pred", "sample_weight"], _call_loss),
    *_random.wrappers(),
)


@contextlib.contextmanager
def during_steps() -> Iterator[None]:
    """Replace what is replaced only while steps run."""
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(_keras_internals.inlined_functions(lambda: current_step() is not None))
        for owner, name, wrapper in _DURING_STEPS:
            original = getattr(owner, name)
            if getattr(original, "kdpkit_wrapper", None) is not wrapper:  # in an evaluation
                enter(replaced(owner, name, _wrap(original, wrapper)))
        yield


def _gradient(
    original: Callable, tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any
) -> Any:
    """Give a step on the global batch the gradients of that."""
    given = original(tape, target, sources, *args, **kwargs)
    step = current_step()
    if step is None or step.own is None:
        return given
    of, gradients = tf.nest.flatten(sources), tf.nest.flatten(given)
    gradients = [
        _global_batch.gradient_of_variable(step, source, gradient)
        for source, gradient in zip(of, gradients, strict=True)
    ]
    return tf.nest.pack_sequence_as(given, gradients)


def _apply_gradients(
    original: Callable, optimizer: Any, grads: Any, trainable_variables: Any = None
) -> Any:
    """Have an optimizer that is no attribute of the model work on the global batch's gradients."""
    step = current_step()
    if step is None or "apply" in vars(optimizer):
        return original(optimizer, grads, trainable_variables)
    patch = _optimizer_patches.attach_to_optimizer(optimizer, step.strategy)
    return patch.reduced(original, grads, trainable_variables)


def _print(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Print once what all replicas would."""
    step = current_step()
    if step is None or step.own is None or _global_batch.is_first():
        return original(*args, **kwargs)
    return tf.no_op()


def _seeds(original: Callable, op_seed: Any) -> Any:
    """Have operations of TensorFlow that draw draw the same on all replicas."""
    step = current_step()
    if step is None or step.replicas == 1 or op_seed is not None:
        return original(op_seed)
    if (
        not step.is_here()
        or original(op_seed)[0] is not None
        or _workers.spans_processes(step.strategy)
    ):
        checks.fail(
            "The step draws random numbers of TensorFlow's own, which are numbered by the "
            "operations of a graph, and several replicas have more of these than one device.",
            seed=op_seed,
            remedy="Draw with `keras.random`, or pass a `seed` to the operation.",
        )
    return step.merge(lambda _: (random.getrandbits(31), random.getrandbits(31)))


_DURING_STEPS: tuple[tuple[Any, str, Callable], ...] = (
    (keras.layers.Layer, "__call__", _global_batch.call_divided),
    (keras.layers.BatchNormalization, "_moments", _batch_norm.moments),
    (tf.GradientTape, "gradient", _gradient),
    (keras.optimizers.Optimizer, "apply", _apply_gradients),
    (keras.optimizers.LossScaleOptimizer, "apply", _apply_gradients),
    (gen_logging_ops, "print_v2", _print),
    (random_seed, "get_seed", _seeds),
)
