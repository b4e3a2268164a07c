"""The steps of `TrainingLoop` under parameter servers: asynchronous, and counted exactly.

The chief hands batches to whichever worker is free. A worker reads the weights from the parameter
servers, computes, and updates them there, without waiting for the others. All that is a count or a
sum (loss, metrics, examples) it returns instead: the chief adds up what finished steps returned,
once each, also where a worker was lost and another did its step.

Left out: several devices of a worker, whose step is that of one; XLA; optimizers that decide from
several updates; metrics whose variables are no sums over examples.
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
from kdpkit.training.tensorflow._loop import TensorFlowSteps
from kdpkit.training.tensorflow._step import Step, running
from kdpkit.training.tensorflow._tpu import TpuSteps

_STEPS_OF_A_WORKER = 16  # between two times that all are waited for, unless the user says it
_WAITING = 4  # batches for each worker that the chief hands out ahead


def steps_of(loop: Any, strategy: tf.distribute.Strategy | None, jit: Any) -> TensorFlowSteps:
    """Return what runs the steps of a loop under its strategy."""
    of_model = loop.model.distribute_strategy if strategy is None else strategy
    if isinstance(of_model, tf.distribute.ParameterServerStrategy):
        return ParameterServerSteps(loop, strategy, jit)
    is_tpu = isinstance(of_model, tf.distribute.TPUStrategy)
    return (TpuSteps if is_tpu else TensorFlowSteps)(loop, strategy, jit)


class ParameterServerSteps(TensorFlowSteps):
    """Runs the steps of a loop on workers; 1 of its `steps_per_loop` becomes 16 for each."""

    def __init__(self, loop: Any, strategy: tf.distribute.Strategy | None, jit: Any) -> None:
        super().__init__(loop, strategy, jit)
        if jit is True:
            checks.fail(
                "XLA compiles no step whose variables are in other processes.", jit_compile=jit
            )
        self.mesh.num_parts, self._is_one = 1, True
        self._workers = len(_parameter_servers.addresses(self.strategy, "worker"))
        if loop.steps_per_loop == 1:
            loop.steps_per_loop = _STEPS_OF_A_WORKER * self._workers
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(self.strategy)
        _keras_internals.stop_without_waiting(self._coordinator)
        self._insist = functools.partial(_parameter_servers.insist, self.strategy)
        _keras_internals.pass_calls_on_servers_through(self._insist)
        function = functools.partial(tf.function, autograph=False, reduce_retracing=True)
        self._train = function(lambda batch: self._train_step(batch))
        self._test = function(self._test_step)
        self._predict = function(self._predict_step)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Report in one sentence that a parameter server is gone: a `ProcessLostError`."""
        tf.get_logger().addFilter(_shorten)
        try:
            with _patches.installed():
                yield
        except tf.errors.OpError as error:
            lost = _parameter_servers.lost_servers(self.strategy)
            unavailable = isinstance(error, tf.errors.UnavailableError | tf.errors.AbortedError)
            is_of_server = unavailable and "/job:ps" in str(error)
            if not (lost or is_of_server or _parameter_servers.is_of_a_new_server(error)):
                raise
            processes.leave_without_waiting(errors.LEFT_ALONE)
            atexit.register(processes.leave)  # else TensorFlow takes leave of a server that is gone
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
        done, logs = self._counted_steps(self._train, iterator, steps)
        # A worker that was lost in an update may have taken a number without having been there.
        if int(iterations.value) != before + done:
            iterations.assign(before + done)
        return done, logs

    def test(self, iterator: Any, steps: int) -> tuple[int, dict[str, Any]]:
        return self._counted_steps(self._test, iterator, steps)

    def predict(self, iterator: Any, steps: int) -> tuple[int, list[Any]]:
        outputs = [*self._results(self._predict, iterator, steps)]
        return len(outputs), outputs

    def _counted_steps(self, function: Any, iterator: Any, steps: int) -> tuple[int, Any]:
        """Run steps, and add what they counted to loss and metrics."""
        done, sums = 0, None
        for counts in self._results(function, iterator, steps):
            done += 1
            sums = counts if sums is None else [*map(np.add, sums, counts)]
        for variable, count in zip(self._counters, sums or (), strict=bool(sums)):
            variable.assign(variable.numpy() + count)
        logs = keras.tree.map_structure(tf.convert_to_tensor, self._logs())  # some are variables
        return done, logs

    def _results(self, function: Any, batches: Iterable[Any], steps: int) -> Iterator[Any]:
        """Hand out up to so many batches, and return the results in their order."""
        waiting: collections.deque[Any] = collections.deque()  # or the chief would hold all data
        for batch in itertools.islice(batches, steps):
            if len(waiting) == _WAITING * self._workers:
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
    def _traced(self, batch: Any, *, jit: bool = False, policy: Any = None) -> Iterator[Any]:
        """Trace a worker's step in this: that of one device, which is not known."""
        step = Step(self.mesh, policy or self._policy, batch_norm=self.loop.batch_norm, jit=jit)
        outside = _keras_internals.updated_outside_of_replicas(self.strategy)
        with self.scope(), outside, running(step):
            yield batch

    def _update(self, gradients: Any, factors: Any) -> None:
        present = tf.nest.flatten(gradients, expand_composites=True)
        with _keras_internals.numbered_update(self.model.optimizer, after=present):
            super()._update(gradients, factors)

    def _count(self, update: Callable[[], Any]) -> list[Any]:
        """Return what an update adds: Keras reads, then assigns, and others may between."""
        zeros = [(v, tf.zeros(v.shape, v.dtype)) for v in self._counters]
        with keras.StatelessScope(state_mapping=zeros) as scope:
            update()
        return [tf.convert_to_tensor(scope.get_current_value(v)) for v, _ in zeros]


class _ScheduledStep:
    """A step that the coordinator is given, perhaps several times; its result counts once."""

    def __init__(self, coordinator: Any, function: Any, batch: Any) -> None:
        self._coordinator, self._call = coordinator, (function, (batch,))
        self._given: Any = None

    def schedule(self) -> None:
        """Hand it out, which raises what went wrong with a step before."""
        self._given = self._coordinator.schedule(*self._call)

    def result(self) -> Any:
        """Wait for what it gives; where that fails, the next call hands it out again.

        `fetch` fails where a worker is lost after the step: the coordinator has it made once more,
        or drops it, as all others where one fails in a way that it cannot explain.
        """
        if self._given is None:
            self.schedule()
        with contextlib.suppress(tf.errors.OpError):
            return self._given.fetch()
        self._coordinator.join()  # raises what went wrong first, and forgets it
        try:
            return self._given.fetch()
        except tf.errors.OpError:
            self._given = None
            raise


def _shorten(record: logging.LogRecord) -> bool:
    """Keep to a line what TensorFlow logs of a lost worker, and leave out what is raised anyway."""
    if record.module == "cluster_coordinator":
        record.msg, record.args = record.getMessage().strip().partition("\n")[0], ()
    raised = ("processing closure", "cancelling closures", "CancelledError")
    return not any(words in record.msg for words in raised)


def _reject_waiting_for_others(optimizer: keras.optimizers.Optimizer) -> None:
    """Reject what an optimizer decides from several updates, which here come in no order."""
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if scales or optimizer.gradient_accumulation_steps:
        checks.fail(
            "An optimizer can neither scale the loss nor collect the gradients of workers that "
            "update at any time.",
            optimizer=type(optimizer).__name__,
            remedy="Train in bfloat16 or float32, and use `TrainingLoop(accumulation=...)`.",
        )
