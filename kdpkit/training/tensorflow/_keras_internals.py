"""What is private in Keras and TensorFlow and used here, in one file.

Others import from here what is written `x as x`.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state as global_state
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.losses import loss as keras_losses
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR as GLOBAL_SEED_GENERATOR
from tensorflow.core.framework import attr_value_pb2 as attr_value_pb2
from tensorflow.core.framework import graph_pb2 as graph_pb2
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.distribute import distribute_lib, distribute_utils
from tensorflow.python.distribute.values import SyncOnReadVariable as SyncOnReadVariable
from tensorflow.python.eager import context, record
from tensorflow.python.eager.lift_to_graph import UnliftableError as UnliftableError
from tensorflow.python.eager.lift_to_graph import lift_to_graph
from tensorflow.python.eager.polymorphic_function import autograph_util
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function
from tensorflow.python.eager.record import stop_recording as stop_recording
from tensorflow.python.framework import function_def_to_graph as function_def_to_graph
from tensorflow.python.framework import graph_to_function_def, importer, kernels
from tensorflow.python.framework import op_def_registry as op_def_registry
from tensorflow.python.framework import tensor_util as tensor_util
from tensorflow.python.framework.func_graph import FuncGraph as FuncGraph
from tensorflow.python.framework.ops import uid as uid
from tensorflow.python.ops import collective_ops, gen_resource_variable_ops
from tensorflow.python.ops import handle_data_util as handle_data_util
from tensorflow.python.ops.resource_variable_ops import ResourceVariable as ResourceVariable

from kdpkit._internal import optimizers, versions

KERAS_LOSSES: Any = keras_losses
DEFAULT_STRATEGY: Any = distribute_lib._get_default_strategy()

# What Keras stores for a thread about the layers that it is calling: the call's context (whether
# they train), and the type that variables are cast to.
_STATE_OF_LAYER_CALLS = ("current_call_ctx", "autocast_scope")


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute for a while, or raise where this Keras or TensorFlow has none."""
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


def import_graph_def(graph_def: Any, **settings: Any) -> Any:
    """Add nodes to the current graph, with the devices that they have, sooner than TensorFlow does.

    That works out each node's device again, and its control flow of version 1.
    """
    graph = tf.compat.v1.get_default_graph()

    def add_operations(compute_devices: bool) -> list[tf.Operation]:
        for operation in graph.new_operations():
            added = graph._create_op_from_tf_operation(operation, compute_device=compute_devices)
            if not added.device:
                graph._apply_device_functions(added)
        return []  # none whose device remains to be found

    graph._add_new_tf_operations = add_operations
    try:
        return importer.import_graph_def(graph_def, **settings)
    finally:
        del graph._add_new_tf_operations


def lifted(tensor: tf.Tensor) -> Any:
    """Return the value of a tensor of a trace that depends on none of the trace's inputs."""
    with tf.init_scope():
        return tf.function(
            lambda: lift_to_graph([tensor], tf.compat.v1.get_default_graph())[tensor]
        )()


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
        # Keras turns AutoGraph off for its steps; a `tf.function` converts what it calls.
        with ag_ctx.ControlStatusCtx(status=ag_ctx.Status.ENABLED, options=options):
            return converted(*args, **kwargs)

    functools.update_wrapper(call, python, updated=())  # its name is in TensorFlow's warnings
    del call.__wrapped__  # type: ignore[attr-defined]  # its signature stays that of any arguments
    return call


def as_tf_function(function: Callable) -> Function:
    return function if isinstance(function, Function) else tf.function(function)


def recompiled(function: Function, python: Callable, jit: bool) -> Function:
    """Return a `tf.function` with the same options, except XLA's, of another Python function."""
    python.__signature__ = inspect.signature(function.python_function)  # type: ignore[attr-defined]
    copy = function._clone(tf.autograph.experimental.do_not_convert(python))
    copy._jit_compile = jit
    return copy


def with_gradient(outputs: Any, inputs: Any, gradient: Callable) -> Any:
    """Return outputs whose gradients, for tapes, flow to the inputs by the given function.

    `tf.custom_gradient` would compute the inputs wherever the outputs are needed, search the graph
    for variables, and keep all of it for as long as the process lives
    (docs/upstream/tensorflow_custom_gradient_keeps_graphs.py). Outputs and inputs are tensors or
    lists of them; `gradient` gets the gradients of the outputs, and returns those of the inputs.
    """
    with stop_recording():
        copies = tf.nest.map_structure(tf.identity, outputs)

    def backward(*upstream: Any) -> list[Any]:
        return tf.nest.flatten(gradient(*upstream), expand_composites=False)

    record.record_operation(
        "ReplicaGradient", tf.nest.flatten(copies), tf.nest.flatten(inputs), backward
    )
    return copies


def add_function(definition: Any) -> None:
    """Let functions call one that was not traced."""
    context.context().add_function_def(definition)


def function_of_operations(
    graph: Any, operations: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]
) -> Any:
    """Return the definition of a function that computes some operations of a graph."""
    return graph_to_function_def.graph_to_function_def(graph, operations, inputs, outputs)


@functools.cache
def kernels_for_xla() -> frozenset[str]:
    """Return the kinds of operations that XLA compiles."""
    tf.function(tf.identity, jit_compile=True)(0.0)  # TensorFlow registers them when it needs them.
    known = {
        (kernel.op, kernel.device_type) for kernel in kernels.get_all_registered_kernels().kernel
    }
    both = ("XLA_CPU_JIT", "XLA_GPU_JIT")
    return frozenset(op for op, _ in known if all((op, device) in known for device in both))


def is_recording() -> bool:
    """Return whether a tape of this thread may record what is computed now."""
    return bool(record.could_possibly_record())


def get_logits(tensor: tf.Tensor) -> tf.Tensor | None:
    """Return what a softmax or sigmoid computed a tensor from, with which Keras' losses compute."""
    return getattr(tensor, "_keras_logits", None)


@contextlib.contextmanager
def _with_thread_state(**state: Any) -> Iterator[None]:
    """Replace some of what Keras stores for this thread for a while."""
    thread = vars(global_state.GLOBAL_STATE_TRACKER)
    former = {name: thread.get(name) for name in state}
    thread.update(state)
    try:
        yield
    finally:
        thread.update(former)


def read_unwatched(variable: Any) -> Any:
    """Read a variable without letting a tape know."""
    return gen_resource_variable_ops.read_variable_op(variable.handle, variable.dtype)


_FIRST_KEY = 2048  # TensorFlow counts its own keys from 0.
_SENT_TYPES = (tf.float32, tf.float64, tf.int32, tf.int64, tf.complex64, tf.complex128)


def exchanged(mesh: Any, vector: Any, kind: str, number: Any, turn: Any) -> Any:
    """Exchange a vector, which has the same length in all processes, under a number.

    Returns their "sum", or with the kind "gather" all of them along a new first axis. TensorFlow
    remembers for each key how long a vector was: vectors are padded to one of few lengths, and each
    length has a key of its own. The turn is 0 or 1, alternately: a process may start the next
    exchange of a number before another has left the last.
    """
    extended = mesh.strategy.extended
    options = extended._communication_options
    group = mesh.num_processes, extended._collective_keys.get_group_key([mesh.home])
    with tf.device("CPU:0"):
        length = tf.size(vector)
        bits = tf.reduce_sum(tf.cast(length >= [1 << bit for bit in range(31)], tf.int32))
        exponent = tf.maximum(bits - 4, 0)
        unit = tf.bitwise.left_shift(1, exponent)
        num_units = -(-length // unit)
        kind_number = (number * 2 + (kind == "sum")) * len(_SENT_TYPES)
        kind_number += _SENT_TYPES.index(vector.dtype)
        # There are at most 16 units, and the exponent is at most 27.
        key = 2 * ((_FIRST_KEY + kind_number) * 512 + exponent * 17 + num_units) + turn
    exchange = collective_ops.all_reduce_v2 if kind == "sum" else collective_ops.all_gather_v2
    with tf.device(mesh.home):
        padded = tf.pad(vector, [[0, num_units * unit - length]])
        result = exchange(
            padded,
            *group,
            key,
            communication_hint=options.implementation.value,
            timeout=options.timeout_seconds,
        )
        if kind == "sum":
            return result[:length]
        return tf.reshape(result, [mesh.num_processes, -1])[:, :length]


def next_turn(mesh: Any, purpose: str) -> Any:
    """Return 0 or 1, alternately in the runs of what processes do for a purpose."""
    # The variables are shared by all functions and models.
    turns = vars(mesh.strategy.extended).setdefault("_kdpkit_turns", {})
    if purpose not in turns:
        with tf.init_scope(), tf.device("CPU:0"):
            turns[purpose] = ResourceVariable(0)
    with tf.device("CPU:0"):
        return turns[purpose].assign_add(1) % 2


def move_into_scope(variable: Any) -> None:
    """Make a Keras variable again in the current strategy's scope, with the value that it has.

    An optimizer makes two variables in its constructor, which may be outside of the scope.
    """
    value = variable.value
    variable._value = tf.Variable(value, dtype=value.dtype, trainable=False, name=variable.name)


@contextlib.contextmanager
def once_for_all_replicas(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Let Keras call a step once, where it would call it in each replica of a strategy."""

    def run(function: Callable, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        del options
        return function(*args, **(kwargs or {}))

    unchanged = lambda values, *_, **__: values  # noqa: E731
    with replaced(strategy, "run", run), replaced(keras_trainer, "reduce_per_replica", unchanged):
        yield


@contextlib.contextmanager
def default_replica_context() -> Iterator[None]:
    """Enter the context of code on one device, without any strategy."""
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


def current_layer_calls() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a context manager that enters again the layers' calls that are running now.

    Code in it trains, or not, as these layers do, and casts variables to the same type.
    """
    state = {name: global_state.get_global_attribute(name) for name in _STATE_OF_LAYER_CALLS}
    if state["current_call_ctx"] is None:
        versions.reject_unknown("current_call_ctx")
    return functools.partial(_with_thread_state, **state)


def move_global_seeds(strategy: tf.distribute.Strategy) -> None:
    """Copy Keras' global seeds to all devices, if they were made outside the current scope."""
    seeds = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    if seeds and not strategy.extended.variable_created_in_scope(seeds.state.value):
        move_into_scope(seeds.state)


def with_one_learning_rate(
    optimizer: keras.optimizers.Optimizer, step: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    """Let a schedule compute the rate of a step's update once, while it is traced.

    Keras computes it for every variable, and with weight decay twice: an eighth of all operations
    of BERT's step. A user's own optimizer may mean another rate each time, and is not changed.
    """
    # docs/upstream/keras_asks_the_schedule_for_every_variable.py
    inner = optimizers.unscaled(optimizer)
    is_of_keras = type(inner).__module__.partition(".")[0] == "keras"
    schedule = getattr(inner, "_learning_rate", None)
    has_schedule = isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule)
    if not is_of_keras or not has_schedule or "_get_current_learning_rate" in vars(inner):
        return step

    def call(batch: Any) -> Any:
        rate = inner._get_current_learning_rate()
        with replaced(inner, "_get_current_learning_rate", lambda: rate):
            return step(batch)

    return call


def repeat_calls_on_servers(insist: Callable[[Callable[[], Any]], Any]) -> None:
    """Let `insist` repeat the chief's reads and assignments of variables on parameter servers.

    They are made wherever a variable is used: in callbacks, in saving, in the user's program.
    """
    for name in ("read_variable_op", "assign_variable_op", "var_is_initialized_op"):
        original = getattr(gen_resource_variable_ops, name)
        original = getattr(original, "kdpkit_original", original)

        @functools.wraps(original)
        def call(resource: Any, *args: Any, original: Any = original, **kwargs: Any) -> Any:
            if not tf.executing_eagerly() or "/job:ps" not in resource.device:
                return original(resource, *args, **kwargs)

            def attempt() -> Any:
                result = original(resource, *args, **kwargs)
                is_value = isinstance(result, tf.Tensor) and not context.context().device_name
                return tf.identity(result) if is_value else result  # copied to the chief

            return insist(attempt)

        call.kdpkit_original = original  # type: ignore[attr-defined]
        setattr(gen_resource_variable_ops, name, call)
