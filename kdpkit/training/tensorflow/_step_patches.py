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
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend import get_keras_mask, set_keras_mask
from keras.src.losses import loss as keras_loss
from tensorflow.python.distribute import distribute_lib

from kdpkit._internal import versions
from kdpkit.training.tensorflow import _global_batch, _keras_internals, _random
from kdpkit.training.tensorflow._collectives import gathered
from kdpkit.training.tensorflow._keras_internals import replaced
from kdpkit.training.tensorflow._step import ReplicaStep, current_step


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
    _install_one_device_in_steps()


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
    if step is None or step.replicas == 1 or step.gathered:
        return original(loss, y_true, y_pred, sample_weight)
    value = _loss_of_replicas(step, original, loss, y_true, y_pred, sample_weight)
    step.note_loss(loss.name, value)
    return value


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


def inlined_functions() -> contextlib.AbstractContextManager[None]:
    """Have steps compute what they call as a `tf.function` in their own graph."""
    return _keras_internals.inlined_functions(lambda: current_step() is not None)


@contextlib.contextmanager
def noting_layers() -> Iterator[None]:
    """Let steps note what layers of libraries are called on, and what they give."""
    original = keras.layers.Layer.__call__

    @functools.wraps(original)
    def call(layer: keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
        outputs = original(layer, *args, **kwargs)
        step = current_step()
        if step is not None and step.noting is not None and _global_batch.is_of_a_library(layer):
            step.note_layer((args, kwargs), outputs)
        return outputs

    with replaced(keras.layers.Layer, "__call__", call):
        yield


@contextlib.contextmanager
def gradients_of_steps() -> Iterator[None]:
    """Let steps note, and steps on the global batch add up, the gradients that tapes give them."""
    original = tf.GradientTape.gradient
    if original.__module__ == __name__:  # in a trial of a step on the global batch
        yield
        return

    def gradient(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        given = original(tape, target, sources, *args, **kwargs)
        step = current_step()
        if step is None or _jacobians.are_computed:
            return given
        step.note_roots(target)
        of, gradients = tf.nest.flatten(sources), tf.nest.flatten(given)
        if step.own is not None:
            gradients = [
                _global_batch.gradient_of_variable(step, gradient)
                if gradient is not None and isinstance(source, keras.Variable | tf.Variable)
                else gradient
                for source, gradient in zip(of, gradients, strict=True)
            ]
        elif all(isinstance(source, keras.Variable) for source in of):
            step.note_gradients_of_tape(of, gradients)
        return tf.nest.pack_sequence_as(given, gradients)

    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(tf.GradientTape, "gradient", gradient))
        for name in ("jacobian", "batch_jacobian"):
            method = _without_sums(getattr(tf.GradientTape, name))
            stack.enter_context(replaced(tf.GradientTape, name, method))
        yield


class _Jacobians(threading.local):
    are_computed = False  # in this thread, from the gradient of each row in a vectorized loop


_jacobians = _Jacobians()


def _without_sums(original: Callable) -> Callable:
    """Have a jacobian's own gradients be a replica's, which cannot meet others in its loop."""

    @functools.wraps(original)
    def jacobian(*args: Any, **kwargs: Any) -> Any:
        _jacobians.are_computed = True
        try:
            return original(*args, **kwargs)
        finally:
            _jacobians.are_computed = False

    return jacobian
