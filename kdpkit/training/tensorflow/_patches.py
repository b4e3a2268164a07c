"""What is replaced in Keras and TensorFlow while a model trains on replicas, in one table.

A wrapper calls what it wraps, unless its thread traces a step of an exact model; `_TABLE` says what
it does otherwise there, and why. `installed` replaces all of it, and restores it afterwards.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.distribute.values import DistributedVariable, MirroredVariable
from tensorflow.python.framework import random_seed

from kdpkit._internal import checks
from kdpkit.training.tensorflow import (
    _checks,
    _keras_internals,
    _metrics,
    _optimizers,
)
from kdpkit.training.tensorflow._step import current_mesh


class Patch(NamedTuple):
    """An attribute of a class or module, and a function that gets the original and arguments."""

    owner: Any
    name: str
    wrapper: Callable


def _num_replicas(original: Callable, strategy: Any) -> Any:
    """Return one in a step, which runs once, on all examples.

    Code that divides by the number of replicas expects that their results are added up: a user's
    step, Keras' losses and regularizers, `tf.nn.compute_average_loss`.
    """
    return original(strategy) if current_mesh() is None else 1


class _OnlyReplica:
    """The context of a replica, of which a step has one."""

    num_replicas_in_sync = 1

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy

    @property
    def replica_id_in_sync_group(self) -> Any:
        return tf.constant(0)

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:  # noqa: ARG002
        return value

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:  # noqa: ARG002
        return value

    def merge_call(self, merge_fn: Callable, args: Any = (), kwargs: Any = None) -> Any:
        return merge_fn(self.strategy, *args, **(kwargs or {}))


def _replica_context(original: Callable) -> Any:
    mesh = current_mesh()
    return original() if mesh is None else _OnlyReplica(mesh.strategy)


def _handle(original: Callable, variable: Any) -> Any:
    """Return the first copy's handle, for which tapes record the gradient of a variable."""
    if not _in_step_outside_update(variable):
        return original(variable)
    return _first(variable).handle


def _first(variable: Any) -> Any:
    """Return the first copy of a variable, which a step uses."""
    first = variable.values[0]
    mesh = current_mesh()
    if mesh is not None:
        mesh.replicated[id(first.handle)] = variable
    return first


def _in_first_copy(
    name: str, original: Callable, variable: Any, /, *args: Any, **kwargs: Any
) -> Any:
    """Call a method of a variable that TensorFlow has for one device alone."""
    if not _in_step_outside_update(variable):
        return original(variable, *args, **kwargs)
    return getattr(_first(variable), name)(*args, **kwargs)


def _in_all_copies(
    name: str, original: Callable, variable: Any, /, *args: Any, **kwargs: Any
) -> Any:
    """Call such a method, which writes, of every copy."""
    result = _in_first_copy(name, original, variable, *args, **kwargs)
    for copy in variable.values[1:]:  # only of steps: the original has raised
        getattr(copy, name)(*args, **kwargs)
    return result


def _slice(original: Callable, variable: Any, entries: Any) -> Any:
    """Return entries of a variable, whose `assign` changes every copy."""
    if not _in_step_outside_update(variable):
        return original(variable, entries)
    found = _first(variable)[entries]
    assign_first = found.assign

    def assign(value: Any, name: str | None = None) -> Any:
        result = assign_first(value, name)
        for copy in variable.values[1:]:
            copy[entries].assign(value, name)
        return result

    found.assign = assign
    return found


def _gradients(original: Callable, ys: Any, xs: Any, *args: Any, **kwargs: Any) -> Any:
    """Let `tf.gradients` follow operations to a variable's first copy, which a step reads."""

    def source(x: Any) -> Any:
        x = x.value if isinstance(x, keras.Variable) else x
        return x.values[0] if isinstance(x, DistributedVariable) else x

    if current_mesh() is not None:
        xs = [source(x) for x in tf.nest.flatten(xs)]
    return original(ys, xs, *args, **kwargs)


def _read(original: Callable, variable: Any) -> Any:
    """Read the first copy of a variable, which tapes watch, wherever it is read."""
    if not _in_step_outside_update(variable):
        return original(variable)
    _metrics.count_once(variable)
    first = _first(variable)
    return tf.identity(first) if isinstance(variable, MirroredVariable) else first


def _aggregation(original: Callable, variable: Any) -> Any:
    """Let a step count once what TensorFlow adds up over the replicas."""
    if _in_step_outside_update(variable):
        _metrics.count_once(variable)
    return original(variable)


def _in_step_outside_update(variable: Any) -> bool:
    """Return whether this thread traces a step, and is not updating a variable."""
    is_finding(variable.distribute_strategy)
    mesh = current_mesh()
    if mesh is not None and mesh.strategy is not variable.distribute_strategy:
        _checks.reject_scope("variable", mesh.strategy, variable=variable.name)
    return (
        mesh is not None
        and tf.distribute.in_cross_replica_context()
        and distribute_lib.get_update_replica_id() is None
    )


_of_no_strategy = threading.local()


class StrategyFound(BaseException):
    """A function of no strategy uses the variable of one; no handler of errors catches it."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self.strategy = strategy


def is_finding(strategy: tf.distribute.Strategy | None) -> bool:
    """Return whether a function of no strategy runs in this thread; raise if it uses a strategy."""
    is_running = getattr(_of_no_strategy, "is_running", False)
    if is_running and strategy is not None:
        if _of_no_strategy.made_of_batch:
            checks.fail(
                "A step made a variable of its batch before it used one of its strategy.",
                remedy="Decorate it in the strategy's scope, or with "
                "`replica_exact(strategy=strategy)`.",
            )
        raise StrategyFound(strategy)
    return is_running


def finding_strategies(function: Callable, step: str) -> Callable:
    """Return a function of no strategy, which raises `StrategyFound` where it uses one."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with installed(), tf.variable_creator_scope(_created_at_once):
            _of_no_strategy.is_running, _of_no_strategy.made_of_batch = True, False
            try:
                outputs = function(*args, **kwargs)
            finally:
                _of_no_strategy.is_running = False
        _checks.require_no_strategy("step", step)
        return outputs

    return run


def _created_at_once(create: Callable, **settings: Any) -> Any:
    """Create a variable outside of a trace that may be given up, with what would initialize it."""
    value = settings["initial_value"]
    value = value() if callable(value) else value
    if isinstance(value, tf.Tensor) and not tf.executing_eagerly():
        try:
            value = _keras_internals.lifted(value)
        except _keras_internals.UnliftableError:  # It depends on the batch.
            _of_no_strategy.made_of_batch = True
            return create(**settings | {"initial_value": value})
    with tf.init_scope():
        return _keras_internals.ResourceVariable(**settings | {"initial_value": value})


def _update(original: Callable, variable: Any, *args: Any, **kwargs: Any) -> Any:
    is_finding(variable.distribute_strategy)
    return original(variable, *args, **kwargs)


def _run(original: Callable, *args: Any, **kwargs: Any) -> Any:
    if current_mesh() is not None or is_finding(None):
        checks.fail(
            "An exact step runs once for all replicas.",
            remedy="Call the function itself, without `strategy.run` and `strategy.reduce`.",
        )
    return original(*args, **kwargs)


def _on_one_device(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Compute what TensorFlow rejects in the cross-replica context."""
    if current_mesh() is None:
        return original(*args, **kwargs)
    with _keras_internals.default_replica_context():
        return original(*args, **kwargs)


def _seed(original: Callable, op_seed: Any) -> Any:
    """Reject random numbers of TensorFlow's that would differ between the processes of a step."""
    mesh, seeds = current_mesh(), original(op_seed)
    if mesh is not None and mesh.num_processes > 1 and seeds[0] is None:
        checks.fail(
            "The step draws random numbers of TensorFlow's own, and each process draws others.",
            seed=op_seed,
            remedy="Call `keras.utils.set_random_seed` first, or draw with `keras.random`.",
        )
    return seeds


# Added for good where TensorFlow has none: callbacks use `int(optimizer.iterations)`.
for _name, _number in (("__float__", float), ("__int__", int)):
    if not hasattr(DistributedVariable, _name):
        setattr(DistributedVariable, _name, lambda v, number=_number: number(v.read_value()))


_READING = ("gather_nd", "sparse_read")
_WRITING = ("batch_scatter_update", "scatter_nd_add", "scatter_nd_sub", "scatter_nd_update")
_AVERAGING = ("compute_average_loss", "scale_regularization_loss")

# Upstream: docs/upstream/, and keras-team/keras#19005, #20582, #20585.
_TABLE = (
    Patch(random_seed, "get_seed", _seed),
    # The cross-replica context is like the only replica that a step has on one device.
    Patch(distribute_lib.StrategyBase, "num_replicas_in_sync", _num_replicas),
    Patch(tf.distribute, "get_replica_context", _replica_context),
    *(Patch(tf.nn, name, _on_one_device) for name in _AVERAGING),
    Patch(distribute_lib.StrategyBase, "run", _run),
    Patch(DistributedVariable, "_update", _update),
    Patch(DistributedVariable, "handle", _handle),
    Patch(tf, "gradients", _gradients),
    Patch(DistributedVariable, "_get", _read),
    Patch(DistributedVariable, "aggregation", _aggregation),
    Patch(DistributedVariable, "__getitem__", _slice),
    *(Patch(DistributedVariable, name, partial(_in_first_copy, name)) for name in _READING),
    *(Patch(DistributedVariable, name, partial(_in_all_copies, name)) for name in _WRITING),
    Patch(keras.optimizers.Optimizer, "apply", _optimizers.apply),
    Patch(keras.optimizers.LossScaleOptimizer, "_tf_apply", _optimizers.apply_scaled),
)
_replaced = contextlib.ExitStack()
_lock = threading.RLock()
_users = 0


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Replace what is in the table, until the last user has left."""
    global _users
    with _lock:
        if _users == 0:
            with contextlib.ExitStack() as stack:
                for patch in _TABLE:
                    stack.enter_context(_applied(patch))
                _replaced.push(stack.pop_all())
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _replaced.close()


def _applied(patch: Patch) -> contextlib.AbstractContextManager[None]:
    original = inspect.getattr_static(patch.owner, patch.name, None)
    is_property = isinstance(original, property)
    function: Any = original.fget if isinstance(original, property) else original

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return patch.wrapper(function, *args, **kwargs)

    replacement = property(wrapped) if is_property else wrapped
    return _keras_internals.replaced(patch.owner, patch.name, replacement)
