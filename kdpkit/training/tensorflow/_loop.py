"""The steps of `TrainingLoop` on TensorFlow: one device, and every synchronous strategy.

A training step is split in two. In the replicas: forward and backward pass, of a loss whose parts
add up to that of the global batch. Outside them: one sum of the gradients, and the optimizer once,
which then clips, accumulates, averages and checks the global gradient.
"""

import contextlib
import functools
import gc
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from kdpkit import errors
from kdpkit._internal import checks, processes, versions
from kdpkit._internal.datasets import untuned
from kdpkit.training._feed import Feed
from kdpkit.training._keras_internals import set_keras_mask
from kdpkit.training._objective import PLACEHOLDER_EXAMPLES, Sums, trace_metrics
from kdpkit.training._remat import rematerialised
from kdpkit.training._steps import Steps
from kdpkit.training.tensorflow import (
    _batch_norm,
    _checks,
    _distribution,
    _global_batch,
    _keras_internals,
    _layer_state,
    _metric_patches,
    _optimizer_patches,
    _patches,
    _placeholders,
    _whose_code,
)
from kdpkit.training.tensorflow._batch_norm import GLOBAL, REPLICA
from kdpkit.training.tensorflow._collectives import concatenated
from kdpkit.training.tensorflow._keras_internals import PyDatasetAdapter
from kdpkit.training.tensorflow._loop_gradients import (
    combined,
    forward,
    forward_and_backward,
    over_micro_batches,
)
from kdpkit.training.tensorflow._remat import checkpointed
from kdpkit.training.tensorflow._step import ReplicaStep, running
from kdpkit.training.tensorflow._xla import XlaTrial

T = TypeVar("T")
# Strategies whose replicas can put their examples together.
_GATHERING = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)


class TensorFlowSteps(Steps):
    """Runs the steps of a loop under its strategy, as `Steps` asks.

    Args:
        loop: The `TrainingLoop`.
        strategy: A strategy, or None for the one that the model was built in.
        jit: Whether XLA compiles forward and backward pass; None asks the model, and "measure"
            takes what is faster.
    """

    def __init__(self, loop: Any, strategy: tf.distribute.Strategy | None, jit: Any) -> None:
        self.loop = loop
        self.model = loop.model
        self.strategy = _strategy_of(self.model, strategy)
        self._jit = jit
        if self.strategy.num_replicas_in_sync > 1:
            _layer_state.reject_states_of_examples(self.model)
        if isinstance(self.strategy, tf.distribute.MirroredStrategy):
            _keras_internals.prefer_one_device_sums(self.strategy)
        with self.scope():
            self._means = {"": keras.metrics.Mean("loss")}  # and of the outputs, if several
        self._is_built = self._is_optimizer_built = False
        self._division = _global_batch.Division()
        self._trial = XlaTrial() if jit == "measure" else None
        self._train_with = {
            jit: self._repeated(functools.partial(self._train_step, jit=jit))
            for jit in (False, True)
        }
        self._test = self._repeated(self._test_step)
        self._predict = tf.function(self._predict_step, autograph=False, reduce_retracing=True)

    @property
    def jit(self) -> bool:
        return self._trial.jit if self._trial else super().jit

    @property
    def is_jit_chosen(self) -> bool:
        return self._trial is None or bool(self._trial.verdict)

    @property
    def _may_jit(self) -> bool:
        return self._trial is not None or self.jit

    def scope(self) -> Any:
        return self.strategy.scope()

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        with processes.explain_lost_process(), _patches.installed():
            yield

    # Before the first step: the data, and all variables.

    def open(self, dataset: Any, name: str, **steps: int | None) -> Feed:
        ((argument, wanted),) = steps.items()
        if isinstance(dataset, keras.utils.PyDataset):
            epochs = _PyEpochs(dataset)
            feed = self.open(epochs.given, name, **steps)
            epochs.batches = feed.batches
            return Feed(
                name, epochs, wanted=wanted, length=lambda: dataset.num_batches, end=epochs.end
            )
        if not isinstance(dataset, tf.data.Dataset | tf.distribute.DistributedDataset):
            checks.fail(
                f"`{name}` must be a `tf.data.Dataset` or a `keras.utils.PyDataset` of batches, "
                f"and is a {type(dataset).__name__}.",
                remedy="`tf.data.Dataset.from_tensor_slices((x, y)).batch(size)` makes one.",
            )
        _checks.check_batched(name, dataset.element_spec, is_one_length=True)
        _checks.check_dataset(name, dataset, **{argument: wanted})
        batches = dataset
        if isinstance(dataset, tf.data.Dataset):
            is_silent = dataset.options().autotune.enabled is None  # it is tuned if it asks for it
            batches = self._distributed(untuned(dataset) if is_silent else dataset, f"`{name}`")
        if not self.model.built and type(self.model).call is not keras.Model.call:
            batch = _placeholders.placeholders(batches.element_spec, PLACEHOLDER_EXAMPLES)
            x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
            with self.scope():
                _placeholders.trace(functools.partial(self.model, training=False), x)
        return Feed(name, batches, wanted=wanted, length=functools.partial(_length_of, dataset))

    def _distributed(self, dataset: Any, name: str) -> Any:
        return _distribution.distribute(self.strategy, dataset, name)

    def build(self, feed: Feed, *, training: bool) -> None:
        with self.scope():  # in which a compiled loop can make no variables
            _keras_internals.move_global_seeds(self.strategy)
            if not self._is_built:
                if self.strategy.num_replicas_in_sync > 1 or self.loop.accumulation > 1:
                    versions.reject_sums_over_examples(self.model)
                spec = feed.batches.element_spec
                placeholders = _placeholders.placeholders(spec, PLACEHOLDER_EXAMPLES)
                names = trace_metrics(self.loop, placeholders, _placeholders.trace)
                for metric in self.model.metrics:
                    _metric_patches.attach_to_metric(metric, is_global=False)
                self._means |= {name: keras.metrics.Mean(f"{name}_loss") for name in names}
                self._is_built = True
            if training and not self._is_optimizer_built:
                self._build_optimizer()
                self._prepare_layers()
                self._is_optimizer_built = True

    def _build_optimizer(self) -> None:
        optimizer = self.model.optimizer
        if tf.distribute.in_cross_replica_context():
            _optimizer_patches.attach_to_optimizer(optimizer, self.strategy)
        if not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        # The two that an optimizer makes before it is built need no copies on the replicas.
        copied = [v for v in optimizer.variables if v.name not in ("iteration", "learning_rate")]
        _checks.require_scope("optimizer", copied, self.strategy)

    def _prepare_layers(self) -> None:
        replicas = self.strategy.num_replicas_in_sync
        if replicas == 1:
            return
        may_meet = not self._may_jit and self.loop.accumulation == 1
        asked = self.loop.batch_norm
        for layer in _batch_norm.batch_norm_layers(self.model):
            if not may_meet and (layer.synchronized or (asked == GLOBAL and self._may_jit)):
                checks.fail(
                    "Under XLA, and between micro-batches, a BatchNormalization cannot meet the "
                    "other replicas.",
                    layer=layer.name,
                    jit=self._jit if self._trial else self.jit,
                    accumulation=self.loop.accumulation,
                    remedy='Use `jit=False` and `accumulation=1`, or `batch_norm="replica"`, which '
                    "normalizes by each replica's own examples, and do not synchronize the layer.",
                )
        if asked == REPLICA or not may_meet:
            _batch_norm.warn_of_local_statistics(self.model, replicas)

    # Many steps in a call.

    def train(self, iterator: Any, steps: int) -> tuple[int, dict[str, Any]]:
        if self._trial and self._trial.is_new:
            self._say("XLA: the first steps run with and without it, to find out which is faster.")
        start = time.perf_counter()
        with _explaining_xla() if self.jit else contextlib.nullcontext():
            done, logs = self._run("train", self._train_with[self.jit], iterator, steps)
        if self._trial and not self._trial.verdict:
            self._trial.record(steps=done, seconds=time.perf_counter() - start)
            self._say(self._trial.verdict)
        return done, logs

    def _say(self, verdict: str) -> None:
        if verdict and processes.index() == 0:
            print(f"\n{verdict}", flush=True)  # noqa: T201 a choice that is made for somebody is said

    def test(self, iterator: Any, steps: int) -> tuple[int, dict[str, Any]]:
        return self._run("test", self._test, iterator, steps)

    def predict(self, iterator: Any, steps: int) -> tuple[int, list[Any]]:
        outputs: list[Any] = []
        with contextlib.suppress(StopIteration, tf.errors.OutOfRangeError):
            while len(outputs) < steps:
                batch = next(iterator)
                predictions = self._traced("predict", functools.partial(self._predict, batch))
                outputs.append(keras.tree.map_structure(np.asarray, predictions))
        return len(outputs), outputs

    def _traced(self, kind: str, call: Callable[[], T]) -> T:
        is_eager = tf.config.functions_run_eagerly()
        result = call() if is_eager else self._division.traced(kind, call, again=lambda: None)
        _distribution.reject_differences()
        return result

    def _run(
        self, kind: str, function: Any, iterator: Any, steps: int
    ) -> tuple[int, dict[str, Any]]:
        fresh_keys = _distribution.spans_processes(self.strategy)
        keys = _keras_internals.constant_collective_keys
        with contextlib.nullcontext() if fresh_keys else keys():
            is_traced = function.experimental_get_tracing_count() > 0
            if not is_traced and not tf.config.functions_run_eagerly():
                trace = functools.partial(
                    function.get_concrete_function, iterator, tf.constant(steps)
                )
                with _uncollected():
                    self._traced(kind, trace)
            done, logs = self._traced(kind, lambda: function(iterator, tf.constant(steps)))
        return int(done), logs

    def _repeated(self, step: Callable[[Any], None]) -> Callable[[Any, Any], Any]:
        """Compile a loop of up to so many steps, or to the end of the data."""

        def run(iterator: Any, steps: Any) -> Any:
            def goes_on(done: Any, batch: Any) -> Any:
                return (done < steps) & batch.has_value()

            def body(done: Any, batch: Any) -> Any:
                step(batch.get_value())
                done += 1
                # The batch after the last one belongs to the next call.
                return done, tf.cond(done < steps, iterator.get_next_as_optional, lambda: batch)

            with self.scope():
                first = iterator.get_next_as_optional()
                done, _ = tf.while_loop(goes_on, body, (tf.constant(0), first))
                return done, self._logs()

        return tf.function(run, autograph=False, reduce_retracing=True)

    # One step, outside the replicas.

    def _train_step(self, batch: Any, *, jit: bool) -> None:
        with rematerialised(self.loop, checkpointed):
            parts = self.strategy.run(self._train_replica, args=(batch, jit))
        variables = self.model.trainable_variables
        gradients = [parts.get(index) for index in range(len(variables))]
        summed = _optimizer_patches.sum_gradients(self.strategy, gradients, variables)

        def update(gradients: Any) -> None:
            with _keras_internals.one_learning_rate(self.model.optimizer):
                self.model.optimizer.apply(gradients, variables)

        replicas = self.strategy.num_replicas_in_sync
        if jit and replicas == 1 and variables:
            (own,) = self.strategy.experimental_local_results(variables[0].value)
            with tf.device(own.device):  # which may be another than the first
                _compiled(update, jit=True)(summed)
        elif jit and self._may_compile_updates:
            with _optimizer_patches.compiled_updates(self.model.optimizer):
                update(summed)
        else:
            update(summed)

    @property
    def _may_compile_updates(self) -> bool:
        """Whether every replica has a copy of all that updates read, where XLA looks for it.

        Of an optimizer that was made outside of the scope, the first alone has the count of steps.
        """
        kept = [v for v in self.model.optimizer.variables if v.name != "learning_rate"]
        several = _distribution.spans_processes(self.strategy)
        return not several and _checks.is_in_scope(kept, self.strategy)

    def _test_step(self, batch: Any) -> None:
        self.strategy.run(self._test_replica, args=(batch,))

    def _predict_step(self, batch: Any) -> Any:
        outputs = self.strategy.run(self._predict_replica, args=(batch,))
        return keras.tree.map_structure(functools.partial(concatenated, self.strategy), outputs)

    # One replica's part of a step.

    def _step_of(self, batch: Any, kind: str) -> ReplicaStep:
        """Return the step of a replica: on the global batch where any of its code is the user's.

        Micro-batches, and what XLA compiles, cannot meet other replicas: there a loss for each
        example, as `per_example_loss` has to give it, is computed from the replica's own examples.
        """
        _layer_state.keep_apart(self.model, is_own=True)
        may_meet = kind != "train" or (self.loop.accumulation == 1 and not self._may_jit)
        step = ReplicaStep(batch, batch_norm=self.loop.batch_norm if may_meet else REPLICA)
        may_meet &= isinstance(self.strategy, _GATHERING)
        is_own = not self._is_of_libraries(kind)
        if is_own and not may_meet and (step.replicas > 1 or self.loop.accumulation > 1):
            step.rejects = self._division.reject
        if step.replicas == 1 or not may_meet or not is_own:
            return step
        return _global_batch.step_on_global_batch(step, self._division, kind)

    def _is_of_libraries(self, kind: str) -> bool:
        is_own_loss = not _whose_code.is_library(type(self.loop).per_example_loss.__module__)
        needs_all = is_own_loss or self.loop.loss.compares_examples
        return _whose_code.is_all_of_libraries(self.model, kind) and (
            kind == "predict" or not needs_all
        )

    def _train_replica(self, batch: Any, jit: bool) -> dict[int, Any]:
        """Return this replica's part of the gradients, by the variable's index."""
        step = self._step_of(batch, "train")
        # Under XLA by position on one replica too: it draws all of them otherwise.
        step.is_part |= jit
        batch = step.data
        micro_batches = self.loop.accumulation
        layers = self.model._flatten_layers() if micro_batches > 1 else ()
        seeds = {id(seed): seed.state for layer in layers for seed in layer._seed_generators}
        # All micro-batches draw from these, each at the positions of its examples in the batch.
        before = [(state, tf.identity(state.value)) for state in seeds.values()]

        def forward_and_backward_of(micro_batch: Any, start: tf.Tensor) -> Any:
            if micro_batches == 1:
                return forward_and_backward(self.loop, step, micro_batch)
            part = step.of_examples(_distribution.examples_in_batch(micro_batch), offset=start)
            return forward_and_backward(self.loop, part, micro_batch)

        differentiate = _compiled(forward_and_backward_of, jit=jit)

        def compute(micro_batch: Any, start: tf.Tensor) -> Sums:
            for state, value in before:
                state.assign(value)
            sums, predictions, masks = differentiate(micro_batch, start)
            keras.tree.map_structure(set_keras_mask, predictions, masks)
            self._update_metrics(step, micro_batch, predictions)
            return sums

        sums = over_micro_batches(
            compute, batch, num_examples=step.num_examples, micro_batches=micro_batches
        )
        factors = self._update_losses(step, sums)
        _layer_state.average(step)

        def complete(gradients: Any, factors: Any) -> dict[int, Any]:
            total = combined(gradients, [1.0, *factors])
            variables = self.model.trainable_variables
            return {
                index: _global_batch.addend_of_gradient(step, variables[index], gradient)
                for index, gradient in total.items()
            }

        return _compiled(complete, jit=jit)(sums.gradients, factors)

    def _predict_replica(self, batch: Any) -> Any:
        step = self._step_of(batch, "predict")
        x, _, _ = keras.utils.unpack_x_y_sample_weight(step.data)
        with running(step):
            return _global_batch.own_part(step, self.model(x, training=False))

    def _test_replica(self, batch: Any) -> None:
        step = self._step_of(batch, "test")
        sums, predictions = forward(self.loop, step, step.data, training=False)
        self._update_metrics(step, step.data, predictions)
        self._update_losses(step, sums)

    def _update_metrics(self, step: ReplicaStep, batch: Any, predictions: Any) -> None:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        if step.own is None:
            step = step.of_examples(tf.shape(keras.tree.flatten(predictions)[0])[0])
        with running(step):
            self.model.compute_metrics(x, y, predictions, sample_weight)

    def _update_losses(self, step: ReplicaStep, sums: Sums) -> list[Any]:
        real = {name: step.total(of) for name, of in sums.real.items()}
        return self._log_losses(sums._replace(real=real), functools.partial(_as_mean, step))


@contextlib.contextmanager
def _explaining_xla() -> Iterator[None]:
    """Report in one sentence that XLA has no such operation."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        if found := re.search(r"\((No registered '\w+' OpKernel for XLA\w*)", error.message):
            raise errors.InputError(
                f"XLA cannot compile the training step of this model: {found[1]}. "
                "Use `jit=False`, or move the operation into the input pipeline."
            ) from error
        raise


def _compiled(function: Callable[..., T], *, jit: bool) -> Callable[..., T]:
    """Have XLA compile a part of a step, or leave it as it is."""
    return tf.function(function, jit_compile=True, autograph=False) if jit else function


def _as_mean(step: ReplicaStep, part: Any) -> tuple[Any, Any]:
    """Return value and weight for a `Mean`, which then counts the sum of all parts."""
    return step.quotient(part, 1), tf.cast(step.num_examples, part.dtype)


def _strategy_of(model: keras.Model, strategy: tf.distribute.Strategy) -> Any:
    """Return the strategy that a model lives in, which must be the one asked for."""
    if strategy is None:
        strategy = model.distribute_strategy
    if not isinstance(strategy, tf.distribute.Strategy):
        checks.fail(
            "`strategy` must be a `tf.distribute` strategy, or None for the model's.",
            strategy=strategy,
        )
    _checks.require_scope("model", model.variables, strategy)
    if not model.variables and model.distribute_strategy is not strategy:
        _checks.reject_scope("model", strategy)
    return strategy


class _PyEpochs:
    """The epochs of a `PyDataset`, which is told where they begin and end."""

    def __init__(self, dataset: keras.utils.PyDataset) -> None:
        self._adapter = PyDatasetAdapter(dataset)
        self.given = self._adapter.get_tf_dataset()
        self.batches: Any = self.given  # or those, spread over the replicas
        self._has_begun = False

    @property
    def element_spec(self) -> Any:
        return self.batches.element_spec

    def __iter__(self) -> Any:
        self.end()
        self._has_begun = True
        self._adapter.on_epoch_begin()
        return iter(self.batches)

    def end(self) -> None:
        if self._has_begun:
            self._adapter.on_epoch_end()
        self._has_begun = False


def _length_of(dataset: Any) -> int | None:
    """Return the batches of a dataset's next iterator, which may differ from epoch to epoch."""
    if not isinstance(dataset, tf.data.Dataset):
        return None
    length = int(dataset.cardinality())
    return length if length >= 0 else None


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Have Python collect no garbage while a step is traced, which makes many objects that stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
