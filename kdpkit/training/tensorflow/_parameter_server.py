"""The steps of `TrainingLoop` under parameter servers: asynchronous, and counted exactly.

The chief sends batches to whichever worker is free. A worker reads the weights from the parameter
servers, computes, and updates them there, without waiting for the others. Loss and metrics are sums
over examples, which a worker returns: the chief adds up the results of finished steps, once each,
also where a worker was lost and another repeated its step.
"""

import atexit
import collections
import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdpkit import errors
from kdpkit._internal import checks, processes
from kdpkit.strategies import _parameter_servers
from kdpkit.training.tensorflow import _keras_internals, _patches
from kdpkit.training.tensorflow._keras_internals import replaced
from kdpkit.training.tensorflow._loop import TensorFlowSteps
from kdpkit.training.tensorflow._step import Step, running

_STEPS_OF_A_WORKER = 16  # between two times at which all are waited for, unless the user sets it
_BATCHES_AHEAD = 4  # that the chief sends to each worker; more would fill its memory


class ParameterServerSteps(TensorFlowSteps):
    """Runs the steps of a loop on workers; 1 of its `steps_per_loop` becomes 16 for each."""

    def __init__(self, loop: Any, strategy: tf.distribute.Strategy | None, jit: Any) -> None:
        super().__init__(loop, strategy, jit)
        if jit is True:
            checks.fail(
                "XLA compiles no step whose variables are in other processes.", jit_compile=jit
            )
        self._jit = False  # also where `compile` would choose XLA
        self.mesh.num_parts, self._is_one_device = 1, True
        self._num_workers = len(_parameter_servers.addresses(self.strategy, "worker"))
        if loop.steps_per_loop == 1:
            loop.steps_per_loop = _STEPS_OF_A_WORKER * self._num_workers
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(self.strategy)
        _stop_without_waiting(self._coordinator)
        self._insist = functools.partial(_parameter_servers.insist, self.strategy)
        _keras_internals.repeat_calls_on_servers(self._insist)

    def _repeated(self, step: Callable[[Any], Any]) -> Callable[..., Any]:
        return tf.function(step, autograph=False, reduce_retracing=True)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Raise a `ProcessLostError` where a parameter server is gone."""
        tf.get_logger().addFilter(_shorten)
        try:
            with _patches.installed():
                yield
        except tf.errors.OpError as error:
            lost = _parameter_servers.lost_servers(self.strategy)
            is_unavailable = isinstance(error, tf.errors.UnavailableError | tf.errors.AbortedError)
            is_of_server = is_unavailable and "/job:ps" in str(error)
            if not (lost or is_of_server or _parameter_servers.is_server_replaced(error)):
                raise
            processes.leave_without_waiting(errors.LEFT_ALONE)
            atexit.register(processes.leave)  # Otherwise TensorFlow waits for the lost server.
            raise errors.ProcessLostError(
                f"A parameter server is gone ({', '.join(lost) or 'another came'}), and with it a "
                f"part of the model. {processes.GO_ON}"
            ) from error
        finally:
            tf.get_logger().removeFilter(_shorten)

    def _build_optimizer(self) -> None:
        _reject_waiting_for_others(self.model.optimizer)
        super()._build_optimizer()

    def train(self, iterator: Any, steps: int) -> tuple[int, dict[str, Any]]:
        iterations = self.model.optimizer.iterations
        before = int(iterations.value)
        done, logs = super().train(iterator, steps)
        # A worker that was lost within an update may have taken a number and not applied it.
        if int(iterations.value) != before + done:
            iterations.assign(before + done)
        return done, logs

    def predict(self, iterator: Any, steps: int) -> tuple[int, list[Any]]:
        outputs = [*self._results(self._predict, iterator, steps)]
        return len(outputs), outputs

    def _run(self, function: Any, iterator: Any, steps: int) -> tuple[int, dict[str, Any]]:
        """Run steps, and add what they counted to loss and metrics."""
        counts = [*self._results(function, iterator, steps)]
        for variable, *of_steps in zip(self._counters, *counts, strict=True):
            variable.assign(functools.reduce(np.add, of_steps, variable.numpy()))
        logs = keras.tree.map_structure(tf.convert_to_tensor, self._logs())  # some are variables
        return len(counts), logs

    def _results(self, function: Any, batches: Iterable[Any], steps: int) -> Iterator[Any]:
        """Send up to so many batches to the workers, and return the results in their order."""
        waiting: collections.deque[_ScheduledStep] = collections.deque()
        for batch in itertools.islice(batches, steps):
            if len(waiting) == _BATCHES_AHEAD * self._num_workers:
                yield self._insist(waiting.popleft().result)
            waiting.append(_ScheduledStep(self._coordinator, function, batch))
            self._insist(waiting[-1].schedule)
        for step in waiting:
            yield self._insist(step.result)

    @property
    def _counters(self) -> list[Any]:
        """The variables of loss and metrics, whose values are sums over examples."""
        return [*self.model.metrics_variables, *(v for mean in self.means for v in mean.variables)]

    @contextlib.contextmanager
    def _traced(self, batch: Any, *, jit: bool = False) -> Iterator[Any]:
        """Trace a worker's step: that of one device, which is not known."""
        step = Step(self.mesh, self._policy, batch_norm=self.loop.batch_norm, jit=jit)
        # Optimizers ask for this before they update variables outside of replicas.
        outside = replaced(self.strategy.extended, "_use_merge_call", lambda: False)
        with self.scope(), outside, running(step):
            yield batch

    def _update(self, gradients: Any, factors: Any) -> None:
        """Apply an update under its own number: `n` updates have 0 to `n - 1`.

        Keras reads `iterations` several times, and increments it in two operations at the end,
        while other workers do so too. Here one operation reads and increments it.
        """
        # docs/upstream/keras_counts_updates_in_two_operations.md
        iterations = self.model.optimizer.iterations
        variable = iterations.value
        with tf.control_dependencies(tf.nest.flatten(gradients, expand_composites=True)):
            number = tf.raw_ops.ResourceCountUpTo(
                resource=variable.handle, limit=variable.dtype.max, T=variable.dtype
            )
        keeps_number = replaced(iterations, "assign_add", lambda _: None)
        with replaced(iterations, "_value", number), keeps_number:
            super()._update(gradients, factors)

    def _count(self, update: Callable[[], Any]) -> list[Any]:
        """Return what an update adds to the counters, which no worker assigns itself."""
        zeros = [(v, tf.zeros(v.shape, v.dtype)) for v in self._counters]
        with keras.StatelessScope(state_mapping=zeros) as scope:
            update()
        return [tf.convert_to_tensor(scope.get_current_value(v)) for v, _ in zeros]


class _ScheduledStep:
    """A step that the coordinator may have to repeat; its result counts once."""

    def __init__(self, coordinator: Any, function: Any, batch: Any) -> None:
        self._coordinator, self._call = coordinator, (function, (batch,))
        self._future: Any = None

    def schedule(self) -> None:
        """Send the step to a worker; this raises the error of an earlier step, if one failed."""
        self._future = self._coordinator.schedule(*self._call)

    def result(self) -> Any:
        """Wait for the result; if this raises, the next call schedules the step again.

        `fetch` fails where a worker is lost after the step. Then the coordinator repeats the step,
        or drops all steps, if one of them failed for another reason.
        """
        if self._future is None:
            self.schedule()
        with contextlib.suppress(tf.errors.OpError):
            return self._future.fetch()
        self._coordinator.join()  # raises the first error, and forgets it
        try:
            return self._future.fetch()
        except tf.errors.OpError:
            self._future = None
            raise


def _stop_without_waiting(coordinator: Any) -> None:
    """Let the program end while a worker is lost.

    A coordinator ends when it gets a lock, which one of its threads, a daemon, holds while it waits
    for the worker's return.
    """
    handler = coordinator._cluster.failure_handler

    def stop() -> None:
        handler._should_preemption_thread_run = False
        handler._cluster_due_for_update_or_finish.set()

    handler.stop = stop


def _shorten(record: logging.LogRecord) -> bool:
    """Shorten what TensorFlow logs of a lost worker to a line, and drop what is raised anyway."""
    if record.module == "cluster_coordinator":
        record.msg, record.args = record.getMessage().strip().partition("\n")[0], ()
    raised = ("processing closure", "cancelling closures", "CancelledError")
    return not any(words in record.msg for words in raised)


def _reject_waiting_for_others(optimizer: keras.optimizers.Optimizer) -> None:
    """Reject an optimizer that decides from several updates, which come in no order here."""
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if scales or optimizer.gradient_accumulation_steps:
        checks.fail(
            "An optimizer can neither scale the loss nor collect the gradients of workers that "
            "update at any time.",
            optimizer=type(optimizer).__name__,
            remedy="Train in bfloat16 or float32, and use `TrainingLoop(accumulation=...)`.",
        )
