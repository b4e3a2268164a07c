"""The places inside Keras and TensorFlow that no public override point reaches, in one file.

Keras reduces a loss by one replica's divisor, divides by the number of replicas where it should
count rows, and gives every replica the same random numbers. What is wrapped for this once in the
process stands in `install`: losses, random functions and the number of replicas. These wrappers
call what they wrapped, unless their thread runs a step of an exact model. The names and arguments
are checked first: a Keras or TensorFlow that differs is refused, not guessed at. What is replaced
for the time of a training alone is a context manager.
"""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend import get_keras_mask, set_keras_mask
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow.trainer import reduce_per_replica
from keras.src.losses import loss as keras_loss
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
from tensorflow.python.data.ops import multi_device_iterator_ops
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.distribute.cross_device_utils import CollectiveReplicaLauncher
from tensorflow.python.eager import context
from tensorflow.python.eager.lift_to_graph import UnliftableError as UnliftableError
from tensorflow.python.ops import gen_resource_variable_ops

from kdpkit import _optimizers, _versions
from kdpkit._tuning import untuned
from kdpkit.training.tensorflow import _random, _whole_batch
from kdpkit.training.tensorflow._collectives import gathered
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
            _versions.refuse_unknown(name, tensorflow=tf.__version__)
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
    dtype: Any = None,
) -> Any:
    """Reduce losses by the divisor of the whole batch, where Keras takes one replica's over R."""
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

    def __get__(self, strategy: Any, owner: Any = None) -> Any:
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
        _versions.refuse_unknown("num_replicas_in_sync", tensorflow=tf.__version__)


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
def untuned_buffers() -> Iterator[None]:
    """Leave tf.data's tuning out of the buffers, of fixed size, that feed replicas on CPUs.

    It runs there whatever the dataset's options say, and epochs end seconds late for it. On a GPU
    options cannot be attached: TensorFlow has no such operation there.
    """
    name = "_create_device_dataset"
    original = getattr(multi_device_iterator_ops, name, None)
    if original is None:
        _versions.refuse_unknown(name, tensorflow=tf.__version__)

    def create(*args: Any, **kwargs: Any) -> Any:
        buffered = original(*args, **kwargs)
        return untuned(buffered) if "CPU" in buffered._variant_tensor.device else buffered

    with replaced(multi_device_iterator_ops, name, create):
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, function: Callable) -> Iterator[None]:
    """Replace a function or a method for a while."""
    is_inherited = name not in vars(owner)
    original = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        if is_inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


@contextlib.contextmanager
def noting_layers() -> Iterator[None]:
    """Let steps note what layers of libraries are called on, and what they give."""
    original = keras.layers.Layer.__call__

    @functools.wraps(original)
    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = original(layer, *args, **kwargs)
        step = current_step()
        if step is not None and step.trial is not None and _whole_batch.is_of_a_library(layer):
            both = [tf.nest.flatten(of, expand_composites=True) for of in ((args, kwargs), outputs)]
            tensors = [[x for x in of if isinstance(x, tf.Tensor)] for of in both]
            step.trial.layers.append((tensors[0], tensors[1]))
        return outputs

    with replaced(keras.layers.Layer, "__call__", call):
        yield


@contextlib.contextmanager
def gradients_of_steps() -> Iterator[None]:
    """Let steps note, and steps on the whole batch add up, the gradients that tapes give them."""
    original = tf.GradientTape.gradient
    if original.__module__ == __name__:  # in a trial of a step on the whole batch
        yield
        return

    def gradient(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        given = original(tape, target, sources, *args, **kwargs)
        step = current_step()
        if step is None:
            return given
        step.note_roots(target)
        of, gradients = tf.nest.flatten(sources), tf.nest.flatten(given)
        if step.own is not None:
            gradients = [
                _whole_batch.gradient_of_variable(step, gradient)
                if gradient is not None and isinstance(source, keras.Variable | tf.Variable)
                else gradient
                for source, gradient in zip(of, gradients, strict=True)
            ]
        elif all(isinstance(source, keras.Variable) for source in of):
            step.note_gradients_of_tape(of, gradients)
        return tf.nest.pack_sequence_as(given, gradients)

    with replaced(tf.GradientTape, "gradient", gradient):
        yield


def joined_over_processes(output: Any, strategy: Any) -> Any:
    """Put the rows of all replicas in all processes together, in every process, as `predict`.

    Processes send each other no other types of numbers than these.
    """
    dtype = strategy.experimental_local_results(output)[0].dtype
    cast = tf.nest.map_structure(
        lambda part: tf.cast(part, _sent_as(dtype)), output, expand_composites=True
    )
    return tf.cast(reduce_per_replica(cast, strategy, reduction="concat"), dtype)


def _sent_as(dtype: tf.DType) -> tf.DType:
    """Give the type that processes can send each other, for one that they perhaps cannot."""
    if dtype.is_floating or dtype.is_complex:
        return tf.float32 if dtype == tf.bfloat16 else dtype
    return tf.int64 if dtype.size >= 4 else tf.int32


def prefer_one_device_sums(strategy: Any) -> None:
    """Sum on one device where the replicas share the CPU, unless the user chose otherwise.

    The default there is a collective over threads: slower, broken inside `steps_per_execution`,
    and aborted by a second strategy of another size in the same process.
    """
    extended = strategy.extended
    on_cpu = any("CPU" in device.upper() for device in extended.worker_devices)
    is_mirrored = isinstance(strategy, tf.distribute.MirroredStrategy)
    if is_mirrored and on_cpu and extended._cross_device_ops is extended._collective_ops:
        extended._cross_device_ops = tf.distribute.ReductionToOneDevice()


@contextlib.contextmanager
def constant_collective_keys() -> Iterator[None]:
    """Trace collectives whose keys are constants, so that a compiled loop can contain them.

    TensorFlow feeds a fresh key to every call of a `tf.function` instead, which it cannot do for
    functions nested in control flow: "must feed a value for placeholder tensor". Keys need to be
    fresh only where processes may trace at different times.
    """
    previous = CollectiveReplicaLauncher._prefer_unique_instance_key
    CollectiveReplicaLauncher._prefer_unique_instance_key = False
    try:
        yield
    finally:
        CollectiveReplicaLauncher._prefer_unique_instance_key = previous


def move_into_scope(variable: Any) -> None:
    """Make a Keras variable again in the strategy's scope at hand, with the value that it has.

    An optimizer makes two variables before it is built, outside the scope where its user made it
    there: on the chief alone, where parameter servers need them.
    """
    value = variable.value
    variable._value = tf.Variable(value, dtype=value.dtype, trainable=False, name=variable.name)


@contextlib.contextmanager
def updates_without_merging(strategy: Any) -> Iterator[None]:
    """Let an optimizer update variables where its gradients are whole, outside the replicas.

    Its methods ask for that place from within a replica (`maybe_merge_call`), and an exact step has
    them there already. The strategy is asked whether it needs that, and says no meanwhile.
    """
    extended = strategy.extended
    if not hasattr(extended, "_use_merge_call"):
        _versions.refuse_unknown("_use_merge_call", tensorflow=tf.__version__)
    if "_use_merge_call" in vars(extended):  # `apply_gradients` calls `apply`
        yield
        return
    extended._use_merge_call = lambda: False
    try:
        yield
    finally:
        del extended._use_merge_call


def move_global_seeds(strategy: Any) -> None:
    """Give all replicas Keras' global seeds, where these were made outside the scope at hand."""
    seeds = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    if seeds and not strategy.extended.variable_created_in_scope(seeds.state.value):
        move_into_scope(seeds.state)


@contextlib.contextmanager
def one_learning_rate(optimizer: Any) -> Iterator[None]:
    """Have a schedule compute the rate of an update once, while it is traced.

    Keras asks it anew for every variable, and with weight decay once more: of BERT's step those are
    an eighth of all operations, which every start of a training traces, optimizes and compiles. A
    user's own optimizer may mean another rate each time it asks, and is left alone.
    """
    inner = _optimizers.unscaled(optimizer)
    if not _asks_for_the_same_rate(inner):
        yield
        return
    rate = inner._get_current_learning_rate()
    inner._get_current_learning_rate = lambda: rate
    try:
        yield
    finally:
        del inner._get_current_learning_rate


def _asks_for_the_same_rate(optimizer: Any) -> bool:
    """Tell Keras' own optimizers with a schedule, as they were made."""
    name = "_get_current_learning_rate"
    return (
        type(optimizer).__module__.partition(".")[0] == "keras"
        and isinstance(optimizer._learning_rate, keras.optimizers.schedules.LearningRateSchedule)
        and hasattr(optimizer, name)
        and name not in vars(optimizer)
    )


@contextlib.contextmanager
def numbered_update(optimizer: Any, after: Any) -> Iterator[None]:
    """Apply an optimizer's update under a number of its own, where several workers apply theirs.

    Keras reads `iterations` in several places of an update, and increments it at the end in two
    operations, a read and an assignment: of 400 updates that two workers made 331 were counted, and
    schedules lag behind. Here the count is read and incremented in one operation, once the tensors
    in `after` are there, and the update sees the number that was read. So `n` updates have the
    numbers 0 to `n - 1`, each once, and so have their rates.

    There is no public operation for it: `Variable.assign_add` reads the variable once more, after
    others may have incremented it too.
    """
    iterations = optimizer.iterations
    variable = iterations.value
    with tf.control_dependencies(after):
        number = tf.raw_ops.ResourceCountUpTo(
            resource=variable.handle, limit=variable.dtype.max, T=variable.dtype
        )
    iterations._value, iterations.assign_add = number, lambda _: None
    try:
        yield
    finally:
        iterations._value = variable
        del iterations.assign_add


def pass_calls_on_servers_through(insist: Callable[[Callable[[], Any]], Any]) -> None:
    """Let every read and assignment of the chief, of variables on parameter servers, be repeated.

    They are made wherever anybody asks for a variable's value: in callbacks and metrics, in saving
    and in the user's program. What is read comes to the chief in the same attempt.

    Args:
        insist: Makes a call, and makes it again if need be.
    """
    for name in _CALLS_ON_VARIABLES:
        original = getattr(gen_resource_variable_ops, name)
        original = getattr(original, "kdpkit_original", original)
        call = _insisting(original, insist)
        call.kdpkit_original = original  # type: ignore[attr-defined]
        setattr(gen_resource_variable_ops, name, call)


def _insisting(original: Callable, insist: Callable[[Callable[[], Any]], Any]) -> Callable:
    @functools.wraps(original)
    def call(resource: Any, *args: Any, **kwargs: Any) -> Any:
        if not tf.executing_eagerly() or "/job:ps" not in resource.device:
            return original(resource, *args, **kwargs)

        def attempt() -> Any:
            result = original(resource, *args, **kwargs)
            is_value = isinstance(result, tf.Tensor) and not context.context().device_name
            return tf.identity(result) if is_value else result  # brings it here

        return insist(attempt)

    return call


# All may be made twice: an assignment sets a value, and none of them adds to one.
_CALLS_ON_VARIABLES = ("read_variable_op", "assign_variable_op", "var_is_initialized_op")


def stop_without_waiting(coordinator: Any) -> None:
    """Let a coordinator be collected, and the program end, while a worker is lost.

    Its end asks for a lock that one of its threads holds while it waits for the worker's return, so
    that the program would stand still wherever Python happens to collect it. The lock keeps that
    thread from forgetting the order to end; it is a daemon, and may.
    """
    handler = coordinator._cluster.failure_handler

    def stop() -> None:
        handler._should_preemption_thread_run = False
        handler._cluster_due_for_update_or_finish.set()

    handler.stop = stop
