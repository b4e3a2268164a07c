"""What is private in Keras and TensorFlow and used here, in one file.

Others import from here what is written `x as x`.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state as global_state
from keras.src.backend.tensorflow import random as keras_random
from keras.src.backend.tensorflow.trainer import reduce_per_replica
from keras.src.layers.layer import CallSpec
from keras.src.layers.preprocessing.image_preprocessing.base_image_preprocessing_layer import (
    BaseImagePreprocessingLayer as BaseImagePreprocessingLayer,
)
from keras.src.models.functional import Functional as Functional
from keras.src.random import seed_generator as seed_generator
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR as GLOBAL_SEED_GENERATOR
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter as PyDatasetAdapter
from tensorflow.core.protobuf import config_pb2 as config_pb2
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.distribute.cross_device_utils import CollectiveReplicaLauncher
from tensorflow.python.distribute.values import MirroredVariable as MirroredVariable
from tensorflow.python.eager import cancellation as cancellation
from tensorflow.python.eager import context as context
from tensorflow.python.eager import record
from tensorflow.python.eager.polymorphic_function import autograph_util
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function
from tensorflow.python.framework import op_def_registry as op_def_registry
from tensorflow.python.ops import control_flow_util as control_flow_util
from tensorflow.python.ops import gen_nn_ops as gen_nn_ops
from tensorflow.python.ops import gen_resource_variable_ops

from kdpkit._internal import optimizers, versions

try:
    from keras.src.backend.tensorflow.ops import nn
except ImportError:  # before Keras 3.16
    from keras.src.backend.tensorflow import nn

KERAS_RANDOM: Any = keras_random
# Of these `_patches` replaces parts.
KERAS_NN: Any = nn
KERAS_RNN: Any = importlib.import_module("keras.src.backend.tensorflow.rnn")  # a function, too

# What a thread's global state has of the calls around: the types that the layers there cast to, and
# other values than variables have.
AROUND_CALLS = ("autocast_scope", "stateless_scope")


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute for a while; an inherited one is hidden meanwhile.

    Raises:
        ValueError: There is none, in this Keras or TensorFlow.
    """
    if not hasattr(owner, name):
        versions.reject_unknown(name, tensorflow=tf.__version__)
    is_inherited, original = name not in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


def taken_before_tracing(batches: Any) -> Any:
    """Take the batch of a step where Keras, since 3.16, takes it before it traces the step.

    A step that is traced again would be given the next one.
    """
    is_iterator = isinstance(batches, tf.data.Iterator | tf.distribute.DistributedIterator)
    if versions.KERAS < (3, 16) or not is_iterator:
        return batches
    batch = batches.get_next_as_optional()
    if not batch.has_value():
        raise StopIteration
    return [batch.get_value()]


def inlined(function: Any) -> Any:
    """Return what computes, in the graph of its caller, what a `tf.function` does in its own."""
    if not isinstance(function, Function):
        return function
    python = function.python_function
    if not function._autograph:
        return python
    options = function._experimental_autograph_options
    converted = autograph_util.py_func_from_autograph(python, options)

    def call(*args: Any, **kwargs: Any) -> Any:
        # Keras has AutoGraph leave steps as they are; a `tf.function` has it convert what it calls.
        with ag_ctx.ControlStatusCtx(status=ag_ctx.Status.ENABLED, options=options):
            return converted(*args, **kwargs)

    return call


def with_gradient(outputs: Any, inputs: Any, gradient: Callable) -> Any:
    """Return outputs whose gradients, for tapes, flow to the inputs by a function of their own.

    `tf.custom_gradient` would compute the inputs wherever the outputs are needed, follow the graph
    back in search of variables, and keep all of it for as long as the process lives
    (docs/upstream/tensorflow_custom_gradient_keeps_graphs.md).

    Args:
        outputs: A tensor or a list of them.
        inputs: A tensor or a list of them.
        gradient: Computes the gradients of the inputs from those of the outputs.
    """
    with record.stop_recording():
        copies = tf.nest.map_structure(tf.identity, outputs)

    def backward(*upstream: Any) -> list[Any]:
        return tf.nest.flatten(gradient(*upstream), expand_composites=False)

    record.record_operation(
        "ReplicaGradient", tf.nest.flatten(copies), tf.nest.flatten(inputs), backward
    )
    return copies


def get_logits(tensor: tf.Tensor) -> tf.Tensor | None:
    """Return what a softmax or sigmoid computed a tensor from, with which Keras' losses compute."""
    return getattr(tensor, "_keras_logits", None)


def set_logits(tensor: tf.Tensor, logits: tf.Tensor) -> None:
    tensor._keras_logits = logits


def is_recorded() -> bool:
    """Return whether a tape may record what is computed now."""
    return bool(record.could_possibly_record())


def build_layer(layer: keras.layers.Layer, args: Any, kwargs: Any) -> None:
    """Build a layer for what it is called on, as its call does."""

    def placeholder(leaf: Any) -> Any:
        is_tensor = isinstance(leaf, tf.Tensor)
        return keras.KerasTensor(leaf.shape, leaf.dtype.name) if is_tensor else leaf

    args, kwargs = tf.nest.map_structure(placeholder, (args, kwargs))
    layer._maybe_build(CallSpec(layer._call_signature, layer._call_context_args, args, kwargs))


def joined_over_processes(output: Any, strategy: tf.distribute.Strategy) -> Any:
    """Put the examples of all replicas in all processes together, in every process, as `predict`.

    Of small numbers processes can send each other few types only.
    """
    dtype = strategy.experimental_local_results(output)[0].dtype
    sent = tf.float32 if dtype == tf.bfloat16 else dtype
    if not (dtype.is_floating or dtype.is_complex):
        sent = tf.int64 if dtype.size >= 4 else tf.int32
    cast = tf.nest.map_structure(lambda of: tf.cast(of, sent), output, expand_composites=True)
    return tf.cast(reduce_per_replica(cast, strategy, reduction="concat"), dtype)


def prefer_one_device_sums(strategy: tf.distribute.Strategy) -> None:
    """Sum on one device where the replicas share the CPU, unless the user chose otherwise.

    The default there is a collective over threads: slower, broken inside `steps_per_execution`,
    and aborted by a second strategy of another size (docs/upstream/tensorflow_two_strategies.md).
    """
    extended = strategy.extended
    on_cpu = any("CPU" in device.upper() for device in extended.worker_devices)
    is_mirrored = isinstance(strategy, tf.distribute.MirroredStrategy)
    if is_mirrored and on_cpu and extended._cross_device_ops is extended._collective_ops:
        extended._cross_device_ops = tf.distribute.ReductionToOneDevice()


def constant_collective_keys() -> contextlib.AbstractContextManager[None]:
    """Trace collectives whose keys are constants, so that a compiled loop can contain them.

    TensorFlow feeds a fresh key to every call of a `tf.function` instead, which it cannot do for
    functions nested in control flow: "must feed a value for placeholder tensor"
    (keras-team/keras#19246). Keys need to be fresh only where processes may trace at other times.
    """
    return replaced(CollectiveReplicaLauncher, "_prefer_unique_instance_key", False)


def move_into_scope(variable: Any) -> None:
    """Make a Keras variable again in the current strategy's scope, with the value that it has.

    An optimizer makes two variables before it is built, outside the scope where its user made it
    there: on the chief alone, where parameter servers need them.
    """
    value = variable.value
    variable._value = tf.Variable(value, dtype=value.dtype, trainable=False, name=variable.name)


def updates_without_merging(
    strategy: tf.distribute.Strategy,
) -> contextlib.AbstractContextManager[None]:
    """Let an optimizer update variables where its gradients are summed, outside the replicas.

    Its methods ask for that from within a replica (`maybe_merge_call`), and an exact step has
    them there already. The strategy is asked whether it needs that, and says no meanwhile.
    """
    return replaced(strategy.extended, "_use_merge_call", lambda: False)


@contextlib.contextmanager
def assigned_in_replicas(variables: list[Any]) -> Iterator[None]:
    """Let every replica assign its copy of variables, which would else agree on what to assign."""
    with contextlib.ExitStack() as stack:
        for variable in variables:
            none = tf.VariableAggregation.NONE
            stack.enter_context(replaced(variable.value, "_aggregation", none))
        yield


def call_of_layers() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a context manager that goes back into the layers' calls that this is called in.

    These know whether they train, and which type their variables are cast to.
    """
    inside = _layers_being_called()
    if inside["current_call_ctx"] is None:  # but a layer is being called
        versions.reject_unknown("current_call_ctx")

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        former = _layers_being_called()
        vars(global_state.GLOBAL_STATE_TRACKER).update(inside)
        try:
            yield
        finally:
            vars(global_state.GLOBAL_STATE_TRACKER).update(former)

    return entered


def _layers_being_called() -> dict[str, Any]:
    names = ("current_call_ctx", "autocast_scope")
    return {name: global_state.get_global_attribute(name) for name in names}


def move_global_seeds(strategy: tf.distribute.Strategy) -> None:
    """Copy to all replicas Keras' global seeds, where these were made outside the current scope."""
    seeds = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    if seeds and not strategy.extended.variable_created_in_scope(seeds.state.value):
        move_into_scope(seeds.state)


@contextlib.contextmanager
def one_learning_rate(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Have a schedule compute the rate of an update once, while it is traced.

    Keras asks it for every variable, and with weight decay once more: of BERT's step those are
    an eighth of all operations, which every start of a training traces, optimizes and compiles. A
    user's own optimizer may mean another rate each time it asks, and is left alone.
    """
    # docs/upstream/keras_asks_the_schedule_for_every_variable.md
    inner = optimizers.unscaled(optimizer)
    is_of_keras = type(inner).__module__.partition(".")[0] == "keras"
    has_schedule = isinstance(inner._learning_rate, keras.optimizers.schedules.LearningRateSchedule)
    if not is_of_keras or not has_schedule or "_get_current_learning_rate" in vars(inner):
        yield
        return
    rate = inner._get_current_learning_rate()
    with replaced(inner, "_get_current_learning_rate", lambda: rate):
        yield


@contextlib.contextmanager
def numbered_update(optimizer: keras.optimizers.Optimizer, after: Any) -> Iterator[None]:
    """Apply an optimizer's update under a number of its own, where several workers apply theirs.

    Keras reads `iterations` several times in an update, and increments it at the end in two
    operations, a read and an assignment: of 400 updates that two workers made 331 were counted, and
    schedules lag behind. Here the count is read and incremented in one operation, once the tensors
    in `after` are there, and the update sees the number that was read. So `n` updates have the
    numbers 0 to `n - 1`, each once, and so have their rates.

    There is no public operation for it: `Variable.assign_add` reads the variable once more, after
    others may have incremented it too.
    """
    # docs/upstream/keras_counts_updates_in_two_operations.md
    iterations = optimizer.iterations
    variable = iterations.value
    with tf.control_dependencies(after):
        number = tf.raw_ops.ResourceCountUpTo(
            resource=variable.handle, limit=variable.dtype.max, T=variable.dtype
        )
    with replaced(iterations, "_value", number), replaced(iterations, "assign_add", lambda _: None):
        yield


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
    that the program hangs wherever Python happens to collect it. The lock keeps that
    thread from forgetting the order to end; it is a daemon, and may.
    """
    handler = coordinator._cluster.failure_handler

    def stop() -> None:
        handler._should_preemption_thread_run = False
        handler._cluster_due_for_update_or_finish.set()

    handler.stop = stop
