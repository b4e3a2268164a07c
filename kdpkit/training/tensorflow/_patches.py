"""What is replaced in Keras and TensorFlow while a model trains on replicas, in one table.

Each wrapper calls what it wraps, unless its thread runs a step of an exact model: `_TABLE` says
what it does otherwise there, and why. `installed` replaces all of it, and puts it back. A Keras or
TensorFlow that lacks any of it is an error.
"""

import contextlib
import functools
import inspect
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import random as keras_random
from keras.src.losses import loss as keras_loss
from tensorflow.python.data.ops import multi_device_iterator_ops
from tensorflow.python.data.ops.iterator_ops import OwnedIterator
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.distribute.values import (
    DistributedVariable,
    MirroredVariable,
    SyncOnReadVariable,
)
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function
from tensorflow.python.framework import random_seed
from tensorflow.python.ops import (
    gen_data_flow_ops,
    gen_logging_ops,
    gen_lookup_ops,
    gen_script_ops,
)
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from kdpkit._internal import checks
from kdpkit._internal.datasets import untuned
from kdpkit.training.tensorflow import (
    _batch_norm,
    _distribution,
    _global_batch,
    _keras_internals,
    _layer_state,
    _metric_patches,
    _no_examples,
    _optimizer_patches,
    _random,
)
from kdpkit.training.tensorflow._step import current_step
from kdpkit.training.tensorflow._whose_code import is_loss_of_a_library


class Patch(NamedTuple):
    """What is replaced while a model trains on replicas.

    Args:
        owner: A class or a module.
        name: What it is called there.
        wrapper: Is called with what was there, and with the arguments.
    """

    owner: Any
    name: str
    wrapper: Callable


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
    if step is None or step.own is not None or reduction in (None, "none"):
        return original(values, sample_weight, mask, reduction, dtype)
    values = keras.ops.convert_to_tensor(values, dtype=dtype)
    if values.shape.rank == 0 and step.replicas > 1:
        checks.fail(
            "A loss gives one number for all examples, and is computed from a replica's alone.",
            replicas=step.replicas,
            remedy="Compile the model with a function of your own that calls the loss: with `fit` "
            "it gets the examples of all replicas.",
        )
    weighted = original(values, sample_weight, mask, "none", dtype)  # weights may have more axes
    total = keras.ops.sum(weighted)
    size = tf.cast(tf.size(weighted), total.dtype)
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


def _call_loss(
    original: Callable, loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None
) -> Any:
    """Compute a library's loss, in a step on the global batch, on the parts that replicas have."""
    step = current_step()
    if step is None or step.own is None or not is_loss_of_a_library(loss):
        return original(loss, y_true, y_pred, sample_weight)
    if any(getattr(one.shape, "rank", 0) == 1 for one in tf.nest.flatten(y_pred)):
        return original(loss, y_true, y_pred, sample_weight)  # a mean over its only axis
    compute = functools.partial(original, loss)
    return _global_batch.loss_of_parts(step, compute, y_true, y_pred, sample_weight)


def _gradient(
    original: Callable, tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any
) -> Any:
    """Give a step on the global batch the gradients of that."""
    given = original(tape, target, sources, *args, **kwargs)
    step = current_step()
    if step is None or step.own is None:
        return given
    of, gradients = tf.nest.flatten(sources), tf.nest.flatten(given)
    gradients = _global_batch.gradients_of_variables(step, of, gradients)
    return tf.nest.pack_sequence_as(given, gradients)


def _jacobian(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Compute a jacobian, in a loop or forward, where no layer can be divided."""
    step = current_step()
    if step is not None:
        step.reject_divided()
    return original(*args, **kwargs)


def _apply_gradients(
    original: Callable, optimizer: Any, grads: Any, trainable_variables: Any = None
) -> Any:
    """Have an optimizer that is no attribute of the model work on the global batch's gradients."""
    step = current_step()
    is_of_patch = tf.distribute.in_cross_replica_context() or (step and not step.is_here())
    if step is None or (is_of_patch and "apply" in vars(optimizer)):
        return original(optimizer, grads, trainable_variables)
    patch = _optimizer_patches.attach_to_optimizer(optimizer, step.strategy)
    return patch.reduced(original, grads, trainable_variables)


def _rejected(owners: dict[Any, tuple[str, ...]], sentence: str, remedy: str) -> Iterator[Patch]:
    """Raise in steps on the global batch, which would do something once for each replica."""

    def rejecting(original: Callable, *args: Any, **kwargs: Any) -> Any:
        step = current_step()
        if step is not None and step.own is not None:
            checks.fail(f"{sentence}, on each replica.", replicas=step.replicas, remedy=remedy)
        return original(*args, **kwargs)

    return (Patch(owner, name, rejecting) for owner, names in owners.items() for name in names)


def _print(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Print once what all replicas would."""
    step = current_step()
    if step is None or step.own is None or _global_batch.is_first():
        return original(*args, **kwargs)
    return tf.no_op()


def _calls_python(original: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """Call Python once, on the first replica, and give all of them what it returns."""
    step = current_step()
    if step is None or step.own is None or _distribution.spans_processes(step.strategy):
        return original(*args, **kwargs)
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    inputs = [tf.convert_to_tensor(of) for of in given.pop("input")]
    compute = functools.partial(original, **given)
    return _global_batch.computed_once(step, compute, inputs, given["Tout"])


def _reduces(original: Callable, context: Any, *args: Any, **kwargs: Any) -> Any:
    """Have what replicas add up, all of which have all of it, be what one device has."""
    step = current_step()
    if step is None or not (step.own or step.is_divided):
        return original(context, *args, **kwargs)
    given = inspect.signature(original).bind(context, *args, **kwargs).arguments
    return given["value"]


def _assigns(original: Callable, variable: Any, *args: Any, **kwargs: Any) -> Any:
    """Note what layers assign; reject what is assigned once for each replica, or added up."""
    step = current_step()
    if step is None or tf.distribute.in_cross_replica_context():
        return original(variable, *args, **kwargs)
    if step.own is None:
        if isinstance(variable, DistributedVariable):
            _layer_state.note(step, variable)
        return original(variable, *args, **kwargs)
    of_replicas = _of_replicas(variable)
    if of_replicas is None:
        checks.fail(
            "The step assigns a variable that was made outside the strategy's scope, on each "
            "replica.",
            variable=variable.name,
            remedy="Make it inside `with strategy.scope():`, as the model.",
        )
    if "kdpkit_is_counted" in vars(of_replicas):
        if of_replicas is variable and not _global_batch.is_first():  # all have what is meant
            given = inspect.signature(original).bind(variable, *args, **kwargs)
            _, name, *_ = given.arguments
            given.arguments[name] = tf.zeros_like(given.arguments[name])
            return original(*given.args, **given.kwargs)
    elif of_replicas.aggregation == tf.VariableAggregation.SUM:
        if not isinstance(of_replicas, SyncOnReadVariable):
            checks.fail(
                "The step assigns a variable that adds up what the replicas assign, and each of "
                "them has the value for the global batch.",
                variable=variable.name,
                remedy="Make it without `aggregation`, or with `aggregation='mean'`.",
            )
        _metric_patches.read_the_first(of_replicas)
    return original(variable, *args, **kwargs)


def _of_replicas(variable: Any) -> Any:
    """Return the variable that all replicas have; None if this one is not a copy of any."""
    if isinstance(variable, DistributedVariable):
        return variable
    return getattr(variable.handle, "_distributed_container", lambda: None)()


def _reads(original: Callable, variable: Any, *args: Any, **kwargs: Any) -> Any:
    """Give a step on the global batch what a metric has counted on all replicas."""
    step = current_step()
    is_sum = "kdpkit_is_counted" in vars(variable)
    if step is None or step.own is None or not is_sum or tf.distribute.in_cross_replica_context():
        return original(variable, *args, **kwargs)
    return step.merge(lambda _: variable.read_value())


def _seeds(original: Callable, op_seed: Any) -> Any:
    """Have operations of TensorFlow that draw draw the same on all replicas."""
    step = current_step()
    if _optimizer_patches.is_updating() and distribute_lib.get_update_replica_id() is not None:
        checks.fail(
            "The optimizer draws random numbers of TensorFlow's own for each replica's copy of a "
            "variable, which would differ.",
            seed=op_seed,
            remedy="Draw in `apply`, once for all copies: `super().apply([g + noise(g) for g in "
            "grads], trainable_variables)`.",
        )
    if step is None or step.replicas == 1 or op_seed is not None:
        return original(op_seed)
    if (
        not step.is_here()
        or original(op_seed)[0] is not None
        or _distribution.spans_processes(step.strategy)
    ):
        checks.fail(
            "The step draws random numbers of TensorFlow's own, which are numbered by the "
            "operations of a graph, and several replicas have more of these than one device.",
            seed=op_seed,
            remedy="Draw with `keras.random`, or pass a `seed` to the operation.",
        )
    return random.getrandbits(31), random.getrandbits(31)  # the same on all replicas


def _inlined(original: Callable, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Have a `tf.function` compute in the graph of the step that calls it.

    In a graph of its own replicas cannot meet, and it keeps tensors of the step that it was first
    called in, which other steps do not have.
    """
    if function._jit_compile or current_step() is None:
        return original(function, *args, **kwargs)
    return _keras_internals.inlined(function)(*args, **kwargs)


def _num_replicas(original: Callable, strategy: Any) -> Any:
    """Return one for the code of a step.

    What divides by it there, in a user's step, in Keras' losses and regularizers and in
    `tf.nn.compute_average_loss`, expects that what the replicas have is added up as it is. In an
    exact step it is added up by shares, and one device divides by one.
    """
    return original(strategy) if current_step() is None else 1


def _device_dataset(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Leave tf.data's tuning out of the buffers, of fixed size, that feed replicas on CPUs.

    It runs there whatever the dataset's options say, and epochs end seconds late for it. On a GPU
    options cannot be attached: TensorFlow has no such operation there.
    """
    buffered = original(*args, **kwargs)
    return untuned(buffered) if "CPU" in buffered._variant_tensor.device else buffered


# Added, where TensorFlow has none, and for good: `int(optimizer.iterations)` in a callback or after
# training, as on one device.
for _name, _number in (("__float__", float), ("__int__", int)):
    if not hasattr(DistributedVariable, _name):
        setattr(DistributedVariable, _name, lambda of, number=_number: number(of.read_value()))


_DRAWING = (
    *("uniform", "uniform_full_int", "normal", "truncated_normal", "binomial"),
    *("make_seeds", "split", "skip", "reset"),
)
_SCATTERING = ("add", "sub", "update", "max", "min", "mul", "div")
_ASSIGNING = {
    MirroredVariable: [],
    SyncOnReadVariable: [],
    ResourceVariable: [
        *(f"scatter_{name}" for name in _SCATTERING),
        *(f"scatter_nd_{name}" for name in ("add", "sub", "update")),
        "_strided_slice_assign",
    ],
}

# Upstream: docs/upstream/, and keras-team/keras#19005, #20582, #20585. Checked with Keras 3.15 and
# TensorFlow 2.21.
_TABLE = (
    # Losses by the global batch's divisor: keras_divides_losses_by_replica.md
    Patch(keras_loss, "reduce_weighted_values", _reduce_loss),
    Patch(keras_loss.Loss, "__call__", _call_loss),
    Patch(distribute_lib.StrategyBase, "num_replicas_in_sync", _num_replicas),
    # Random numbers by the examples' positions: keras_draws_the_same_on_replicas.md
    *(Patch(keras_random, name, wrapper) for name, wrapper in _random.wrappers().items()),
    *(Patch(of, "call", _random.drop) for of in (keras.layers.Dropout, keras.layers.AlphaDropout)),
    Patch(random_seed, "get_seed", _seeds),
    # Steps on the global batch, and what they do once for all replicas.
    Patch(keras.layers.Layer, "__call__", _global_batch.call_divided),
    Patch(tf.GradientTape, "gradient", _gradient),
    Patch(tf.GradientTape, "jacobian", _jacobian),
    Patch(tf.GradientTape, "batch_jacobian", _jacobian),
    Patch(tf.autodiff.ForwardAccumulator, "__enter__", _jacobian),
    *_rejected(
        {tf: ("gradients",), tf.compat.v1: ("gradients",)},
        "`tf.gradients` walks a graph that has this replica's part of layers alone",
        "Use `tf.GradientTape`.",
    ),
    *_rejected(
        {OwnedIterator: ("__next__", "get_next")},
        "The step takes batches from an iterator of its own",
        "Give `fit` both: `tf.data.Dataset.zip((batches, others))`.",
    ),
    *_rejected(
        {tf.random.Generator: _DRAWING},
        "The step draws from a `tf.random.Generator`, whose state moves on",
        "Draw with `keras.random` and a `keras.random.SeedGenerator`.",
    ),
    *_rejected(
        {gen_data_flow_ops: ("queue_enqueue_v2", "queue_dequeue_v2", "queue_dequeue_many_v2")},
        "The step uses a queue",
        "Put what it holds into the dataset, or into a variable.",
    ),
    *_rejected(
        {gen_lookup_ops: ("lookup_table_insert_v2",)},
        "The step inserts into a lookup table",
        "Keep the numbers in a variable: `self.add_weight(..., trainable=False)`.",
    ),
    Patch(gen_logging_ops, "print_v2", _print),
    *(Patch(gen_script_ops, name, _calls_python) for name in ("py_func", "eager_py_func")),
    *(Patch(SyncOnReadVariable, name, _reads) for name in ("value", "_get")),
    *(
        Patch(owner, name, _assigns)
        for owner in _ASSIGNING
        for name in ("assign", "assign_add", "assign_sub", *_ASSIGNING[owner])
    ),
    *(Patch(tf.distribute.ReplicaContext, name, _reduces) for name in ("all_reduce", "all_gather")),
    Patch(Function, "__call__", _inlined),
    # Statistics of the global batch, and optimizers that get its gradients once.
    Patch(keras.layers.BatchNormalization, "_moments", _batch_norm.moments),
    Patch(keras.optimizers.Optimizer, "apply", _apply_gradients),
    Patch(keras.optimizers.LossScaleOptimizer, "apply", _apply_gradients),
    # On replicas without examples: onednn_without_examples.md, tensorflow/tensorflow#60935
    *(
        Patch(owner, name, functools.partial(_no_examples.guarded, *which))
        for owner, functions in _no_examples.FUNCTIONS.items()
        for name, which in functions.items()
    ),
    # Around the steps.
    Patch(multi_device_iterator_ops, "_create_device_dataset", _device_dataset),
)
_replaced = contextlib.ExitStack()
_users: list[object] = []  # that are inside of `installed`: the threads of replicas take turns


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Replace what is in the table, until the last one that asked for it has left.

    Raises:
        ValueError: This Keras or TensorFlow does not have what is replaced.
    """
    user = object()
    _users.append(user)
    try:
        if len(_users) == 1:
            _replace()
        yield
    finally:
        _users.remove(user)
        if not _users:
            _replaced.close()


def _replace() -> None:
    for owner, name, wrapper in _TABLE:
        original = inspect.getattr_static(owner, name, None)
        function = original.fget if isinstance(original, property) else original
        wrapped: Any = _wrap(function, wrapper)
        wrapped = property(wrapped) if function is not original else wrapped
        _replaced.enter_context(_keras_internals.replaced(owner, name, wrapped))


def _wrap(original: Any, wrapper: Callable) -> Callable:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    return functools.wraps(original)(wrapped)
