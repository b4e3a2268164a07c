"""`replica_exact` on TensorFlow for functions: steps of a loop of one's own."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from kdpkit._internal import checks, processes
from kdpkit.training.tensorflow import _checks, _global_batches, _keras_internals, _patches
from kdpkit.training.tensorflow._policy import Policy
from kdpkit.training.tensorflow._step import Mesh, current_step
from kdpkit.training.tensorflow._tracing import run_once

_TENSORS = (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)
_DATA = (tf.data.Dataset, tf.data.Iterator)
_DIVIDED = (
    tf.distribute.DistributedValues,
    tf.distribute.DistributedIterator,
    tf.distribute.DistributedDataset,
)


def exact_step(
    function: Callable,
    *,
    batch_norm: str,
    divided: Sequence[Any],
    undivided: Sequence[Any],
    strategy: tf.distribute.Strategy | None,
) -> Callable:
    """Return a function that does with the replicas of a strategy what it does on one device."""
    step = _OwnStep(function, strategy, batch_norm, lambda: Policy(divided, undivided))

    @functools.wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        return step(args, kwargs)

    return tf.autograph.experimental.do_not_convert(call)  # The step converts what is the user's.


class _OwnStep:
    """A user's function, compiled when it is called first; `make_policy` for each trace."""

    def __init__(
        self,
        function: Callable,
        strategy: tf.distribute.Strategy | None,
        batch_norm: str,
        make_policy: Callable[[], Policy],
    ) -> None:
        self.function = _keras_internals.as_tf_function(function)
        self.strategy = strategy or _strategy_in_scope()
        self.batch_norm, self.make_policy = batch_norm, make_policy
        self.name = getattr(self.function.python_function, "__qualname__", repr(function))
        self.compiled: Callable | None = None

    def __call__(self, args: Any, kwargs: Any) -> Any:
        if current_step() is not None:  # of another function, or of a model
            return _keras_internals.inlined(self.function)(*args, **kwargs)
        if tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context():
            checks.fail(
                "An exact step takes the global batch, and runs once for all replicas.",
                step=self.name,
                remedy="Call it without `strategy.run`.",
            )
        if self.compiled is None:
            self.strategy = self.strategy or _strategy_in_scope()
            self.compiled = self.compile()
        if self.strategy is None:
            _checks.require_no_strategy("step", self.name)
        with (
            self.strategy.scope() if self.strategy else contextlib.nullcontext(),
            _global_batches.explaining_differences(),
            processes.explain_lost_process(),
        ):
            return self.compiled(*args, **kwargs)

    def compile(self) -> Callable:
        """Return what `tf.function` compiles: the function, once for all replicas."""
        inner, jit = _keras_internals.inlined(self.function), bool(self.function._jit_compile)
        if self.strategy is None:
            body = _patches.rejecting_strategies(inner, self.name)
            return _keras_internals.recompiled(self.function, body, jit)
        _checks.require_supported(self.strategy)
        mesh = Mesh(self.strategy)

        @functools.wraps(inner)
        def run(*args: Any, **kwargs: Any) -> Any:
            (args, kwargs), batch = _compared(mesh, (args, kwargs))
            function = functools.partial(inner, *args, **kwargs)
            policy = self.make_policy()
            return run_once(mesh, policy, function, batch, batch_norm=self.batch_norm, jit=jit)

        return _keras_internals.recompiled(self.function, run, jit and mesh.num_parts == 1)


def _strategy_in_scope() -> tf.distribute.Strategy | None:
    return tf.distribute.get_strategy() if tf.distribute.has_strategy() else None


def _compared(mesh: Mesh, arguments: Any) -> tuple[Any, list[Any]]:
    """Return arguments, of which all processes have the same tensors, and these tensors."""
    leaves = tf.nest.flatten(arguments)
    for leaf in leaves:
        if isinstance(leaf, _DIVIDED) and not isinstance(leaf, tf.Variable):
            checks.fail(
                "An exact step takes the global batch, and this one is divided.",
                received=type(leaf).__name__,
                remedy="Leave out `experimental_distribute_dataset` and its like.",
            )
        if isinstance(leaf, _DATA) and mesh.num_processes > 1:
            checks.fail(
                "All processes compare the batches that an exact step gets.",
                received=type(leaf).__name__,
                remedy="Pass it the batches, and not what they are read from.",
            )
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, _TENSORS)]
    batch = [leaves[i] for i in positions]
    if mesh.num_processes > 1 and batch:
        batch = _global_batches.checked_batch(mesh, _global_batches.fingerprinted(batch))
        for i, tensor in zip(positions, batch, strict=True):
            leaves[i] = tensor
        arguments = tf.nest.pack_sequence_as(arguments, leaves)
    return arguments, batch
