"""What is private in Keras and TensorFlow and used here, in one file.

Others import from here what is written `x as x`.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state as global_state
from keras.src.backend.tensorflow import random as keras_random
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.layers.layer import CallSpec
from keras.src.layers.preprocessing.image_preprocessing.base_image_preprocessing_layer import (
    BaseImagePreprocessingLayer as BaseImagePreprocessingLayer,
)
from keras.src.models.functional import Functional as Functional
from keras.src.random import seed_generator as seed_generator
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR as GLOBAL_SEED_GENERATOR
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter as PyDatasetAdapter
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.distribute import distribute_lib, distribute_utils
from tensorflow.python.distribute.cross_device_utils import CollectiveReplicaLauncher
from tensorflow.python.distribute.values import SyncOnReadVariable as SyncOnReadVariable
from tensorflow.python.eager import cancellation as cancellation
from tensorflow.python.eager import context, execute, record
from tensorflow.python.eager.polymorphic_function import autograph_util
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function
from tensorflow.python.framework import op_def_registry as op_def_registry
from tensorflow.python.ops import control_flow_util, gen_resource_variable_ops
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from kdpkit._internal import optimizers, versions

KERAS_RANDOM: Any = keras_random

# What Keras knows in a thread about the layers that are being called: whether they train, the type
# that their variables are cast to, and the values that these have meanwhile.
OF_CALLS_AROUND = ("current_call_ctx", "autocast_scope", "stateless_scope")


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


def repeat_operation(operation: Any, inputs: list[Any], device: str) -> Any:
    """Compute an operation of a graph once more, on other inputs."""
    graph = tf.compat.v1.get_default_graph()
    with tf.device(device):
        repeated = graph._create_op_internal(
            operation.type,
            inputs,
            dtypes=[output.dtype for output in operation.outputs],
            attrs=dict(operation.node_def.attr),
        )
    attributes = [(name, operation.get_attr(name)) for name in operation.node_def.attr]
    execute.record_gradient(
        operation.type, repeated.inputs, tuple(itertools.chain(*attributes)), repeated.outputs
    )
    return repeated.outputs[0]


def in_xla_context(graph: Any) -> bool:
    """Return whether XLA compiles the operations of a graph, in which no device can be chosen."""
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def get_logits(tensor: tf.Tensor) -> tf.Tensor | None:
    """Return what a softmax or sigmoid computed a tensor from, with which Keras' losses compute."""
    return getattr(tensor, "_keras_logits", None)


def set_logits(tensor: tf.Tensor, logits: tf.Tensor) -> None:
    tensor._keras_logits = logits


@contextlib.contextmanager
def outside_of_scopes() -> Iterator[None]:
    """Leave the stateless scopes of Keras, in which no variable can be made."""
    inside = global_state.get_global_attribute("stateless_scope")
    global_state.set_global_attribute("stateless_scope", None)
    try:
        yield
    finally:
        global_state.set_global_attribute("stateless_scope", inside)


def is_differentiable(tensor: Any) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def unrecorded() -> contextlib.AbstractContextManager[None]:
    """Let no tape record what is computed."""
    return record.stop_recording()


def build_layer(layer: keras.layers.Layer, args: Any, kwargs: Any) -> None:
    """Build a layer for what it is called on, as its call does."""

    def placeholder(leaf: Any) -> Any:
        is_tensor = isinstance(leaf, tf.Tensor)
        return keras.KerasTensor(leaf.shape, leaf.dtype.name) if is_tensor else leaf

    args, kwargs = tf.nest.map_structure(placeholder, (args, kwargs))
    layer._maybe_build(CallSpec(layer._call_signature, layer._call_context_args, args, kwargs))


def read_unwatched(variable: Any) -> Any:
    """Read a variable, and let no tape know that it was used."""
    return gen_resource_variable_ops.read_variable_op(variable.handle, variable.dtype)


# Whether Keras divides an activity regularizer by the examples: keras-team/keras#22018
MEAN_OF_REGULARIZERS = versions.KERAS >= (3, 14)


_FIRST_KEY = 2048
_SENT = (tf.float32, tf.float64, tf.int32, tf.int64, tf.complex64, tf.complex128)


def exchanged(mesh: Any, values: Any, kind: str, number: int) -> Any:
    """Exchange a vector, of one length in all processes: their "sum", or their "gather".

    As an operation without effects, which TensorFlow leaves out where nobody uses what it gives.
    TensorFlow remembers for a key how long a vector was; so it is padded to one of few lengths, and
    each has a key of its own.

    Args:
        mesh: The devices.
        values: The vector.
        kind: "sum" or "gather"; this gives an axis of the processes more.
        number: The same in all processes for what belongs together.
    """
    extended = mesh.strategy.extended
    keys, options = extended._collective_keys, extended._communication_options
    group = keys.get_group_key([mesh.home])
    with tf.device("CPU:0"):
        length = tf.size(values)
        bits = tf.reduce_sum(tf.cast(length >= [1 << bit for bit in range(31)], tf.int32))
        exponent = tf.maximum(bits - 4, 0)
        unit = tf.bitwise.left_shift(1, exponent)
        padded = -(-length // unit)
        what = (number * 2 + (kind == "sum")) * len(_SENT) + _SENT.index(values.dtype)
        # `padded` is at most 16 and `exponent` at most 27. TensorFlow counts its own keys from 0.
        key = (_FIRST_KEY + what) * 512 + exponent * 17 + padded
    with replaced(CollectiveReplicaLauncher, "_prefer_ordering_token", False):
        launcher = CollectiveReplicaLauncher(group, mesh.num_processes, keys, mesh.home, options)

        turns = vars(extended).setdefault("_kdpkit_turns", {})  # of all functions and models
        if what not in turns:
            with tf.init_scope(), tf.device("CPU:0"):
                turns[what] = ResourceVariable(0)
        turn = turns[what]  # a process may be here again before another has left

        def exchange(values: Any, key: Any) -> Any:
            own_key = 2 * key + turn.assign_add(1) % 2
            launcher._next_instance_key = lambda: own_key
            if kind == "sum":
                return launcher.all_reduce(values)
            return launcher._all_gather(values, None)

        function = tf.function(exchange, autograph=False).get_concrete_function(
            tf.TensorSpec([None], values.dtype), tf.TensorSpec([], tf.int32)
        )
    function.add_to_graph(tf.compat.v1.get_default_graph())
    with record.stop_recording(), tf.device(mesh.home):
        sent = tf.pad(values, [[0, padded * unit - length]])
        (result,) = tf.raw_ops.PartitionedCall(
            args=[sent, key, *function.captured_inputs], Tout=[values.dtype], f=function
        )
        if kind == "sum":
            return result[:length]
        return tf.reshape(result, [mesh.num_processes, -1])[:, :length]


def move_into_scope(variable: Any) -> None:
    """Make a Keras variable again in the current strategy's scope, with the value that it has.

    An optimizer makes two variables before it is built, outside the scope where its user made it
    there: on the chief alone, where parameter servers need them.
    """
    value = variable.value
    variable._value = tf.Variable(value, dtype=value.dtype, trainable=False, name=variable.name)


@contextlib.contextmanager
def once_for_all_replicas(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Let Keras call a step once, where it would call it in each replica of a strategy."""

    def run(function: Callable, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        del options
        return function(*args, **(kwargs or {}))

    def values_of_step(values: Any, *_: Any, **__: Any) -> Any:
        return values

    with (
        replaced(strategy, "run", run),
        replaced(keras_trainer, "reduce_per_replica", values_of_step),
    ):
        yield


@contextlib.contextmanager
def default_replica_context() -> Iterator[None]:
    """Enter the context in which code on one device is, without any strategy."""
    distribute_lib._push_per_thread_mode(distribute_lib._get_default_replica_mode())
    try:
        yield
    finally:
        distribute_lib._pop_per_thread_mode()


@contextlib.contextmanager
def updated_once(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Let variables be updated in the cross-replica context: the first copy, and then the others.

    TensorFlow would compute the update for each copy, and what it draws or counts with it. Keras'
    optimizers ask whether they are within a replica (`maybe_merge_call`), and a step is not.
    """

    def update(
        variable: Any, fn: Callable, args: Any = (), kwargs: Any = None, group: bool = True
    ) -> Any:
        del group
        first, *others = getattr(variable, "values", (variable,))
        args, kwargs = distribute_utils.select_replica(0, (args, kwargs or {}))
        with tf.device(first.device), distribute_lib.UpdateContext(0):
            updated = fn(first, *args, **kwargs)
            value = read_unwatched(first) if others else None
        for copy in others:
            with tf.device(copy.device), distribute_lib.UpdateContext(0):
                copy.assign(value)
        return updated

    extended = strategy.extended
    with replaced(extended, "_use_merge_call", lambda: False), replaced(extended, "update", update):
        yield


def updated_outside_of_replicas(
    strategy: tf.distribute.Strategy,
) -> contextlib.AbstractContextManager[None]:
    """Let optimizers update variables of which there is one copy in the cross-replica context."""
    return replaced(strategy.extended, "_use_merge_call", lambda: False)


def copy_to_all(variable: Any) -> None:
    """Give all copies of a variable the value of the first one."""
    first, *others = getattr(variable, "values", (variable,))
    for copy in others:
        copy.assign(first.read_value())


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
    names = OF_CALLS_AROUND[:2]
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
