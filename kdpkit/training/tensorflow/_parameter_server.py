"""The steps of `TrainingLoop` under parameter servers: asynchronous, and counted exactly.

The chief hands batches to whichever worker is free. A worker reads the weights from the parameter
servers, computes, and updates them there, without waiting for the others. All that is a count or a
sum (loss, metrics, examples) it gives back instead: the chief adds up what finished steps gave,
once each, also where a worker was lost and another did its step.
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
from kdpkit.training._keras_internals import set_keras_mask
from kdpkit.training._remat import rematerialised
from kdpkit.training.tensorflow import _checks, _keras_internals, _patches
from kdpkit.training.tensorflow._loop import TensorFlowSteps
from kdpkit.training.tensorflow._loop_gradients import (
    combined,
    forward,
    forward_and_backward,
    over_micro_batches,
)
from kdpkit.training.tensorflow._remat import checkpointed
from kdpkit.training.tensorflow._step import ReplicaStep

_STEPS_OF_A_WORKER = 16  # between two times that all are waited for, unless the user says it
_WAITING = 4  # batches for each worker that the chief hands out ahead


def steps_of(loop: Any, strategy: tf.distribute.Strategy | None, jit: Any) -> TensorFlowSteps:
    """Return what runs the steps of a loop: synchronously, or through parameter servers."""
    of_model = loop.model.distribute_strategy if strategy is None else strategy
    is_asynchronous = isinstance(of_model, tf.distribute.ParameterServerStrategy)
    return (ParameterServerSteps if is_asynchronous else TensorFlowSteps)(loop, strategy, jit)


class ParameterServerSteps(TensorFlowSteps):
    """Runs the steps of a loop on the workers of a `ParameterServerStrategy`.

    Args:
        loop: The `TrainingLoop`. Of its `steps_per_loop`, 1 becomes 16 for each worker.
        strategy: The strategy, or None for the one that the model was built in.
        jit: None or False.
    """

    def __init__(self, loop: Any, strategy: tf.distribute.Strategy | None, jit: Any) -> None:
        super().__init__(loop, strategy, jit)
        if jit:
            checks.fail(
                "XLA compiles no step whose variables are in other processes.",
                jit=jit,
                remedy="Leave `jit` out under parameter servers.",
            )
        self._workers = len(_parameter_servers.addresses(self.strategy, "worker"))
        if loop.steps_per_loop == 1:
            loop.steps_per_loop = _STEPS_OF_A_WORKER * self._workers
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(self.strategy)
        _keras_internals.stop_without_waiting(self._coordinator)
        self._insist = functools.partial(_parameter_servers.insist, self.strategy)
        _keras_internals.pass_calls_on_servers_through(self._insist)
        function = functools.partial(tf.function, autograph=False, reduce_retracing=True)
        self._train = function(self._train_on_worker)
        self._test = function(self._test_on_worker)
        self._predict = function(self._predict_on_worker)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Report in one sentence that a parameter server is gone.

        Raises:
            ProcessLostError: A parameter server is gone, and its part of the model with it.
        """
        tf.get_logger().addFilter(_shorten)
        try:
            with _patches.installed():
                yield
        except tf.errors.OpError as error:
            lost = _parameter_servers.lost_servers(self.strategy)
            unavailable = isinstance(error, tf.errors.UnavailableError | tf.errors.AbortedError)
            is_loss = lost or (unavailable and "/job:ps" in str(error))
            if not is_loss and not _parameter_servers.is_of_a_new_server(error):
                raise
            named = f" ({', '.join(lost)})" if lost else ""
            processes.leave_without_waiting(errors.LEFT_ALONE)
            atexit.register(processes.leave)  # else TensorFlow takes leave of a server that is gone
            raise errors.ProcessLostError(
                f"A parameter server is gone{named}, and with it a part of the model. "
                f"{processes.GO_ON}"
            ) from error
        finally:
            tf.get_logger().removeFilter(_shorten)

    # Before the first step.

    def _distributed(self, dataset: Any, name: str) -> Any:  # noqa: ARG002 a replica's own need none
        return dataset  # the chief reads it, and hands the batches out

    def _build_optimizer(self) -> None:
        optimizer = self.model.optimizer
        _reject_waiting_for_others(optimizer)
        for variable in (optimizer.iterations, optimizer._learning_rate):
            is_variable = isinstance(variable, keras.Variable)  # or a schedule
            if is_variable and not _checks.is_in_scope([variable], self.strategy):
                _keras_internals.move_into_scope(variable)
        super()._build_optimizer()

    # Many steps, on workers that are free.

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

    def _counted_steps(
        self, function: Any, iterator: Any, steps: int
    ) -> tuple[int, dict[str, Any]]:
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
        """Hand out up to so many batches, and give the results in their order, all in the end.

        Some batches wait for a worker; more would fill the chief's memory with the dataset.
        """
        waiting: collections.deque[Any] = collections.deque()
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

    # One step, on a worker.

    def _train_on_worker(self, batch: Any) -> Any:
        """Update the weights from a batch; give what it adds to loss and metrics."""
        # Outside the replica, where an optimizer may also overwrite weights by their averages.
        with self.scope(), rematerialised(self.loop, checkpointed):
            parts, counts = self.strategy.run(self._train_and_count, args=(batch,))
            variables = self.model.trainable_variables
            gradients = [parts.get(index) for index in range(len(variables))]
            present = tf.nest.flatten([*parts.values()], expand_composites=True)
            with _keras_internals.numbered_update(self.model.optimizer, after=present):
                self.model.optimizer.apply(gradients, variables)
        return counts

    def _test_on_worker(self, batch: Any) -> Any:
        return self.strategy.run(self._test_and_count, args=(batch,))

    def _predict_on_worker(self, batch: Any) -> Any:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        return self.strategy.run(functools.partial(self.model, training=False), args=(x,))

    def _train_and_count(self, batch: Any) -> Any:
        """Return the gradients, and what the batch adds to loss and metrics."""
        step = ReplicaStep(batch)

        def compute(micro_batch: Any, _: Any) -> Any:
            sums, predictions, masks = forward_and_backward(self.loop, step, micro_batch)
            keras.tree.map_structure(set_keras_mask, predictions, masks)
            return sums, self._count(lambda: self._update_metrics(step, micro_batch, predictions))

        sums, of_metrics = over_micro_batches(
            compute, batch, num_examples=step.num_examples, micro_batches=self.loop.accumulation
        )
        factors: list[Any] = []
        of_losses = self._count(lambda: factors.extend(self._update_losses(step, sums)))
        gradients = combined(sums.gradients, [1.0, *factors])
        return gradients, [*map(tf.add, of_metrics, of_losses)]

    def _test_and_count(self, batch: Any) -> Any:
        step = ReplicaStep(batch)
        sums, predictions = forward(self.loop, step, batch, training=False)

        def update() -> None:
            self._update_metrics(step, batch, predictions)
            self._update_losses(step, sums)

        return self._count(update)

    def _count(self, update: Callable[[], Any]) -> list[Any]:
        """Return what an update adds to loss and metrics, and leave them as they are.

        Keras adds to a metric's variable in two operations, a read and an assignment, between which
        another worker's may come.
        """
        counters = self._counters
        zeros = [(v, tf.zeros(v.shape, v.dtype)) for v in counters]
        with keras.StatelessScope(state_mapping=zeros) as scope:
            update()
        return [tf.convert_to_tensor(scope.get_current_value(v)) for v in counters]


class _ScheduledStep:
    """A step that the coordinator was given, and is given again if it drops it.

    Its result counts once, however often it was begun.
    """

    def __init__(self, coordinator: Any, function: Any, batch: Any) -> None:
        self._coordinator = coordinator
        self._function = function
        self._batch = batch
        self._given: Any = None

    def schedule(self) -> None:
        """Hand it out, which raises what went wrong with a step before."""
        self._given = self._coordinator.schedule(self._function, args=(self._batch,))

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
    if record.module != "cluster_coordinator":
        return True
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
            gradient_accumulation_steps=optimizer.gradient_accumulation_steps,
            remedy="Train in bfloat16 or float32, and use `TrainingLoop(accumulation=...)`, in "
            "which each worker collects its own.",
        )
