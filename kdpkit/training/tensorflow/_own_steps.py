"""`replica_exact` on TensorFlow for functions: steps of a loop of one's own."""

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kdpkit._internal import checks, processes
from kdpkit.training.tensorflow import _checks, _global_batches, _keras_internals, _patches
from kdpkit.training.tensorflow._step import Mesh, current_mesh
from kdpkit.training.tensorflow._tracing import run_once
from kdpkit.training.tensorflow.partition import _traced_step

_TENSORS = (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)
_DIVIDED = (
    tf.distribute.DistributedValues,
    tf.distribute.DistributedIterator,
    tf.distribute.DistributedDataset,
)


def exact_step(function: Callable, *, strategy: tf.distribute.Strategy | None) -> Callable:
    """Return a function that does with the replicas of a strategy what it does on one device."""
    function = _keras_internals.as_tf_function(function)
    if strategy is _keras_internals.DEFAULT_STRATEGY:  # of one device
        strategy = None
    return _OwnStep(function, strategy)


class _OwnStep:
    """A user's function, compiled when it is called first."""

    def __init__(self, function: Any, strategy: tf.distribute.Strategy | None) -> None:
        python = function.python_function
        functools.update_wrapper(self, python, updated=())
        self.name = getattr(python, "__qualname__", repr(python))
        self.function, self.strategy = function, strategy or _strategy_in_scope()
        self.inner, self.jit = _keras_internals.inlined(function), bool(function._jit_compile)
        self.compiled: Any = None
        self.others: set[tuple[int, int]] = set()
        self.methods = weakref.WeakKeyDictionary[Any, _OwnStep]()

    def __get__(self, instance: Any, owner: Any = None) -> "_OwnStep":
        """Return a method, of which each instance has its own, as of a `tf.function`."""
        if instance is None:
            return self
        if instance not in self.methods:
            function = self.function.__get__(instance, owner)
            self.methods[instance] = _OwnStep(function, self.strategy)
        return self.methods[instance]

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if current_mesh() is not None or _patches.is_finding(self.strategy):
            return self.inner(*args, **kwargs)  # as a part of another step
        if tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context():
            checks.fail(
                "An exact step takes the global batch, and runs once for all replicas.",
                step=self.name,
                remedy="Call it without `strategy.run`.",
            )
        _reject_divided((args, kwargs))
        # In another graph each trace has a function of its own, which may make variables.
        if self.compiled is None or not tf.executing_eagerly():
            self.compile(self.strategy or _strategy_in_scope())
        try:
            return self.run(args, kwargs)
        except _patches.StrategyFound as found:
            if tf.config.functions_run_eagerly():  # It has begun, and must not begin again.
                _checks.reject_scope("step", found.strategy, step=self.name)
            self.compile(found.strategy)
        return self.run(args, kwargs)

    def run(self, args: Any, kwargs: Any) -> Any:
        # A tape outside differentiates the compiled function, and finds one device's weights alone.
        if self.num_replicas > 1 and _keras_internals.is_recording():
            checks.fail(
                "A tape around an exact step has not the gradients of all devices.",
                step=self.name,
                remedy="Take the gradients inside of the step, or decorate what has the tape.",
            )
        with (
            self.strategy.scope() if self.strategy else contextlib.nullcontext(),
            _global_batches.explaining_differences(),
            processes.explain_lost_process(),
        ):
            return self.compiled(*args, **kwargs)

    @property
    def num_replicas(self) -> int:
        return self.strategy.num_replicas_in_sync if self.strategy else 1

    def compile(self, strategy: tf.distribute.Strategy | None) -> None:
        """Prepare what `tf.function` compiles: the function, once for all replicas."""
        self.strategy = strategy
        if strategy is None:
            body = _patches.finding_strategies(self.inner, self.name)
        else:
            _checks.require_supported(strategy)
            mesh = Mesh(strategy)

            @functools.wraps(self.inner)
            def body(*args: Any, **kwargs: Any) -> Any:
                leaves = _compared(mesh, (args, kwargs))
                positions = self.examples_of(leaves)

                def function(batch: Any) -> Any:
                    for i, tensor in zip(positions, batch, strict=True):
                        leaves[i] = tensor
                    inner_args, inner_kwargs = tf.nest.pack_sequence_as((args, kwargs), leaves)
                    return self.inner(*inner_args, **inner_kwargs)

                return run_once(mesh, function, [leaves[i] for i in positions], jit=self.jit)

        self.compiled = _keras_internals.recompiled(
            self.function, body, self.jit and strategy is None
        )

    def examples_of(self, leaves: list[Any]) -> list[int]:
        """Return which arguments are the batch: tensors, but those known to have other lengths.

        `tf.function` knows all lengths when it traces first, and only then.
        """
        positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, _TENSORS)]
        length = _traced_step.length_of([leaves[i] for i in positions])
        if length is not None:
            self.others |= {
                (len(leaves), i)
                for i in positions
                if isinstance(leaves[i], tf.Tensor) and leaves[i].shape[:1] != [length]
            }
        return [i for i in positions if (len(leaves), i) not in self.others]


def _strategy_in_scope() -> tf.distribute.Strategy | None:
    return tf.distribute.get_strategy() if tf.distribute.has_strategy() else None


def _reject_divided(arguments: Any) -> None:
    for leaf in tf.nest.flatten(arguments):
        if isinstance(leaf, _DIVIDED) and not isinstance(leaf, tf.Variable):
            checks.fail(
                "An exact step takes the global batch, and this one is divided.",
                received=type(leaf).__name__,
                remedy="Leave out `experimental_distribute_dataset`, or what else divides it.",
            )


def _compared(mesh: Mesh, arguments: Any) -> list[Any]:
    """Return the leaves of arguments, of which all processes have the same tensors."""
    leaves = tf.nest.flatten(arguments)
    if mesh.num_processes == 1:
        return leaves
    for leaf in leaves:
        if isinstance(leaf, tf.data.Dataset | tf.data.Iterator):
            checks.fail(
                "All processes compare the batches that an exact step gets.",
                received=type(leaf).__name__,
                remedy="Pass it the batches, and not what they are read from.",
            )
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, _TENSORS)]
    batch = [leaves[i] for i in positions]
    if batch:
        batch = _global_batches.checked_batch(mesh, _global_batches.fingerprinted(batch))
    for i, tensor in zip(positions, batch, strict=True):
        leaves[i] = tensor
    return leaves
