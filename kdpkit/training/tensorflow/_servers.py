"""Steps of `fit` on the workers of parameter servers: asynchronous, and counted exactly.

The chief sends batches to whichever worker is free. A worker reads the weights from the parameter
servers, computes, and updates them there, without waiting for the others. Metrics are sums over
examples, which a worker returns: the chief adds up the results of finished steps, once each, also
where a worker was lost and another repeated its step.
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
from kdpkit._internal import checks, optimizers, processes
from kdpkit.strategies import _parameter_servers
from kdpkit.training.tensorflow import _keras_internals, _metrics, _patches
from kdpkit.training.tensorflow._keras_internals import replaced
from kdpkit.training.tensorflow._step import Mesh, running

_STEPS_OF_A_WORKER = 16  # between two times at which all are waited for, unless the user sets it
_BATCHES_AHEAD = 4  # that the chief sends to each worker; more would fill its memory


class Workers:
    """Makes what `fit`, `evaluate` and `predict` call for steps, and runs these on workers."""

    def __init__(self, model: keras.Model, strategy: tf.distribute.Strategy) -> None:
        self.model, self.strategy = model, strategy
        self._mesh = Mesh(strategy)
        self._mesh.num_parts = 1  # A worker's step is that of one device.
        self._num_workers = len(_parameter_servers.addresses(strategy, "worker"))
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        _stop_without_waiting(self._coordinator)
        tf.get_logger().addFilter(_shorten)
        self._insist = functools.partial(_parameter_servers.insist, strategy)
        _keras_internals.repeat_calls_on_servers(self._insist)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run a method of the model; raise a `ProcessLostError` where a server is gone.

        One step in an execution would make all workers wait for each other after each step.
        """
        steps = self.model.steps_per_execution
        steps = _STEPS_OF_A_WORKER * self._num_workers if steps == 1 else steps
        try:
            with replaced(self.model, "steps_per_execution", steps):
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

    def function(self, kind: str, step: Callable, *, is_users: bool) -> Callable[[Any], Any]:
        """Return what Keras calls with batches, for an execution of several steps."""
        model, of_metrics = self.model, dict[str, Callable]()
        updates_once = kind == "train" and not is_users and model.optimizer
        iterations = model.optimizer.iterations if updates_once else None
        for optimizer in _optimizers_of(model):
            reject_waiting_for_others(optimizer)
        if model.run_eagerly:
            checks.fail("Workers cannot run a step eagerly.", run_eagerly=True)
        call = functools.partial(self._counted, step, of_metrics)
        function = tf.function(call, autograph=False, reduce_retracing=True)

        def run(batches: Iterable[Any]) -> Any:
            before = 0 if iterations is None else iterations.numpy()
            results = [*self._results(function, batches)]
            if not results:
                raise StopIteration
            counts, outputs = zip(*results, strict=True)
            if kind == "predict":
                return keras.tree.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)
            for variable, *of_steps in zip(self._counters(), *counts, strict=True):
                variable.assign(functools.reduce(np.add, of_steps, variable.numpy()))
            # A worker that was lost within an update may have taken a number and not applied it.
            if iterations is not None and iterations.numpy() != before + len(results):
                iterations.assign(before + len(results))
            logs = {name: result() for name, result in of_metrics.items()} | outputs[-1]
            return keras.tree.map_structure(tf.convert_to_tensor, logs)  # some are variables

        return run

    def _results(self, function: Any, batches: Iterable[Any]) -> Iterator[Any]:
        """Send the batches of an execution to the workers, and return the results in order."""
        waiting: collections.deque[Callable] = collections.deque()
        for batch in itertools.islice(batches, self.model.steps_per_execution):
            if len(waiting) == _BATCHES_AHEAD * self._num_workers:
                yield self._insist(waiting.popleft())
            waiting.append(self._scheduled(function, batch))
        yield from map(self._insist, waiting)

    def _scheduled(self, function: Any, batch: Any) -> Callable[[], Any]:
        """Send a step to a worker; return what waits for its result, which counts once.

        `fetch` fails where a worker is lost after the step. Then the coordinator repeats the step,
        or drops all steps, if one of them failed for another reason.
        """
        schedule = functools.partial(self._coordinator.schedule, function, (batch,))
        futures = [self._insist(schedule)]

        def result() -> Any:
            with contextlib.suppress(tf.errors.OpError):
                return futures[-1].fetch()
            self._coordinator.join()  # raises the first error, and forgets it
            with contextlib.suppress(tf.errors.OpError):
                return futures[-1].fetch()
            futures.append(schedule())
            return futures[-1].fetch()

        return result

    def _counters(self) -> list[Any]:
        """Return the variables of metrics, whose values are sums over examples."""
        metrics = _metrics.metrics_of(self.model)
        return [*{id(v): v for metric in metrics for v in metric.variables}.values()]

    def _counted(self, step: Callable, of_metrics: dict[str, Callable], data: Any) -> Any:
        """Run a step; return what it adds to the metrics, and its logs or predictions.

        A log that is a metric's result is not returned: the chief computes it of all steps.
        """
        counters, noted = self._counters(), dict[int, tuple[Any, Callable]]()
        with contextlib.ExitStack() as stack:
            # Optimizers ask for `_use_merge_call` before they update variables outside of replicas.
            outside = replaced(self.strategy.extended, "_use_merge_call", lambda: False)
            patched, worker = _patches.installed(), running(self._mesh)
            for context in (self.strategy.scope(), outside, patched, worker):
                stack.enter_context(context)
            for optimizer in _optimizers_of(self.model):
                stack.enter_context(replaced(optimizer, "apply", _numbered(optimizer)))
            for metric in _metrics.metrics_of(self.model):
                stack.enter_context(replaced(metric, "result", _noting(metric, noted)))
            for variable in counters:
                zeros = tf.zeros(variable.shape, variable.dtype)
                stack.enter_context(replaced(variable, "_value", zeros))
                keep = functools.partial(setattr, variable, "_value")  # assigned nowhere else
                stack.enter_context(replaced(variable, "_direct_assign", keep))
            outputs = step(data)
            counts = [tf.convert_to_tensor(variable._value) for variable in counters]
        if isinstance(outputs, dict):
            found = {name: noted[id(x)][1] for name, x in outputs.items() if id(x) in noted}
            of_metrics.update(found)
            outputs = {name: x for name, x in outputs.items() if name not in found}
        return counts, outputs


def _optimizers_of(model: keras.Model) -> list[Any]:
    """Return all optimizers of a model, and those of a `MultiOptimizer`."""
    outer = optimizers.all_of(model)
    return [*outer, *(inner for one in outer for inner in getattr(one, "optimizers", ()))]


def _noting(metric: keras.Metric, noted: dict[int, tuple[Any, Callable]]) -> Callable[[], Any]:
    """Return a metric's `result` that notes which tensors it returns."""
    original = metric.result

    def result() -> Any:
        value = original()
        for index, leaf in enumerate(keras.tree.flatten(value)):
            noted[id(leaf)] = leaf, lambda i=index: keras.tree.flatten(original())[i]
        return value

    return result


def _numbered(optimizer: keras.optimizers.Optimizer) -> Callable[..., None]:
    """Return an `apply` under the update's own number: `n` updates have 0 to `n - 1`.

    Keras reads `iterations` several times, and increments it in two operations at the end, while
    other workers do so too. Here one operation reads and increments it.
    """
    # docs/upstream/keras_counts_updates_in_two_operations.py
    apply = optimizer.apply

    def numbered(grads: Any, trainable_variables: Any = None) -> None:
        iterations = optimizer.iterations
        variable = iterations.value
        known = [g for g in tf.nest.flatten(grads, expand_composites=True) if g is not None]
        with tf.control_dependencies(known):
            number = tf.raw_ops.ResourceCountUpTo(
                resource=variable.handle, limit=variable.dtype.max, T=variable.dtype
            )
        keeps_number = replaced(iterations, "assign_add", lambda _: None)
        with replaced(iterations, "_value", number), keeps_number:
            apply(grads, trainable_variables)

    return numbered


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


def reject_waiting_for_others(optimizer: keras.optimizers.Optimizer) -> None:
    """Reject an optimizer that decides from several updates, which come in no order here."""
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if scales or optimizer.gradient_accumulation_steps:
        checks.fail(
            "An optimizer can neither scale the loss nor collect the gradients of workers that "
            "update at any time.",
            optimizer=type(optimizer).__name__,
            remedy="Train in bfloat16 or float32, with batches of the size that fits a worker.",
        )
