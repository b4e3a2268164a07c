"""The steps of `TrainingLoop` on TensorFlow: one device, and every synchronous strategy.

A step is traced once, on the global batch, in the cross-replica context: what the user computes is
computed as on one device, and calls of layers are divided (`_layer_calls`).
"""

import contextlib
import functools
import gc
import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdpkit import errors
from kdpkit._internal import checks, processes, versions
from kdpkit._internal.datasets import untuned
from kdpkit.training._feed import Feed
from kdpkit.training._keras_internals import get_keras_mask, set_keras_mask
from kdpkit.training._objective import PLACEHOLDER_EXAMPLES, Sums, trace_metrics
from kdpkit.training._remat import rematerialised
from kdpkit.training._steps import Steps
from kdpkit.training.tensorflow import (
    _batch_norm,
    _checks,
    _global_batches,
    _keras_internals,
    _library_layers,
    _losses_and_metrics,
    _micro_batches,
    _optimizers,
    _patches,
    _placeholders,
)
from kdpkit.training.tensorflow._gradients import dense_if_unique
from kdpkit.training.tensorflow._keras_internals import PyDatasetAdapter
from kdpkit.training.tensorflow._policy import Policy
from kdpkit.training.tensorflow._remat import checkpointed
from kdpkit.training.tensorflow._split import with_unknown_length
from kdpkit.training.tensorflow._step import Mesh, Step, current_step
from kdpkit.training.tensorflow._tracing import traced_once


class TensorFlowSteps(Steps):
    """Runs the steps of a `TrainingLoop` under a strategy, as `Steps` asks.

    Without a strategy it is the one that the model was built in. `jit` is as in the loop.
    """

    counts_once = True  # loss and metrics, for all devices

    def __init__(self, loop: Any, strategy: tf.distribute.Strategy | None, jit: Any) -> None:
        self.loop = loop
        self.model = loop.model
        self.strategy = _strategy_of(self.model, strategy)
        self._jit = jit
        self.mesh = Mesh(self.strategy)
        self._is_one_device = self.mesh.num_parts == 1
        if not self._is_one_device:
            _checks.reject_states_of_examples(self.model)
        with self.scope():
            self._means = {"": keras.metrics.Mean("loss")}  # and of the outputs, if several
        self._is_built = self._is_optimizer_built = False
        self._policy = Policy()
        self._train = self._repeated(lambda batch: self._train_step(batch, jit=self.jit))
        self._test = self._repeated(self._test_step)
        self._predict = tf.function(self._predict_step, autograph=False, reduce_retracing=True)

    def scope(self) -> Any:
        return self.strategy.scope()

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        with (
            processes.explain_lost_process(),
            _global_batches.explaining_differences(),
            _patches.installed(),
        ):
            yield

    # Before the first step: the data, and all variables.

    def open(self, dataset: Any, name: str, **steps: int | None) -> Feed:
        ((argument, steps_per_epoch),) = steps.items()
        if isinstance(dataset, keras.utils.PyDataset):
            epochs = _PyDatasetEpochs(dataset)
            epochs.batches = self.open(epochs.batches, name, **steps).batches
            return Feed(
                name,
                epochs,
                steps_per_epoch=steps_per_epoch,
                length=lambda: dataset.num_batches,
                end=epochs.end,
            )
        if not isinstance(dataset, tf.data.Dataset):
            checks.fail(
                f"`{name}` must be a `tf.data.Dataset` or a `keras.utils.PyDataset` of batches, "
                f"and is a {type(dataset).__name__}.",
                remedy="`tf.data.Dataset.from_tensor_slices((x, y)).batch(size)` makes one.",
            )
        _checks.check_batched(name, dataset.element_spec, is_one_length=True)
        _checks.check_dataset(name, dataset, **{argument: steps_per_epoch})
        is_silent = dataset.options().autotune.enabled is None  # about whether tf.data tunes it
        batches = self._distributed(untuned(dataset) if is_silent else dataset, f"`{name}`")
        if not self.model.built and type(self.model).call is not keras.Model.call:
            batch = _placeholders.placeholders(batches.element_spec, PLACEHOLDER_EXAMPLES)
            x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
            with self.scope():
                _placeholders.trace(functools.partial(self.model, training=False), x)

        def length() -> int | None:  # It may differ from epoch to epoch.
            cardinality = int(dataset.cardinality())
            return cardinality if cardinality >= 0 else None

        return Feed(name, batches, steps_per_epoch=steps_per_epoch, length=length)

    def _distributed(self, dataset: Any, name: str) -> Any:
        return _global_batches.global_batches(self.strategy, dataset, name)

    def build(self, feed: Feed, *, training: bool) -> None:
        with self.scope():  # A compiled loop can make no variables.
            _keras_internals.move_global_seeds(self.strategy)
            if not self._is_built:
                if self.loop.accumulation > 1:
                    versions.reject_sums_over_examples(self.model)
                spec = feed.batches.element_spec
                placeholders = _placeholders.placeholders(spec, PLACEHOLDER_EXAMPLES)
                names = trace_metrics(self.loop, placeholders, _placeholders.trace)
                self._means |= {name: keras.metrics.Mean(f"{name}_loss") for name in names}
                if self.counts_once:
                    for metric in [*_library_layers.metrics_of(self.model), *self.means]:
                        for variable in metric.variables:
                            _losses_and_metrics.count_once(variable)
                self._is_built = True
            if training and not self._is_optimizer_built:
                self._build_optimizer()
                if self.loop.batch_norm == _batch_norm.REPLICA:
                    _batch_norm.warn_of_local_statistics(self.model, self.mesh.num_parts)
                self._is_optimizer_built = True

    def _build_optimizer(self) -> None:
        optimizer = self.model.optimizer
        _optimizers.move_into_scope(optimizer, self.strategy)
        if not optimizer.built:
            optimizer.build(self.model.trainable_variables)

    # Many steps in a call.

    def train(self, iterator: Any, steps: int) -> tuple[int, dict[str, Any]]:
        with _explaining_xla() if self.jit else contextlib.nullcontext():
            return self._run(self._train, iterator, steps)

    def test(self, iterator: Any, steps: int) -> tuple[int, dict[str, Any]]:
        return self._run(self._test, iterator, steps)

    def predict(self, iterator: Any, steps: int) -> tuple[int, list[Any]]:
        outputs: list[Any] = []
        with contextlib.suppress(StopIteration, tf.errors.OutOfRangeError):
            while len(outputs) < steps:
                predictions = self._predict(next(iterator))
                outputs.append(keras.tree.map_structure(np.asarray, predictions))
        return len(outputs), outputs

    def _run(self, function: Any, iterator: Any, steps: int) -> tuple[int, dict[str, Any]]:
        num_steps = tf.constant(steps)
        is_traced = function.experimental_get_tracing_count() > 0
        if not is_traced and not tf.config.functions_run_eagerly():
            with _without_garbage_collection():
                function.get_concrete_function(iterator, num_steps)
        done, logs = function(iterator, num_steps)
        return int(done), logs

    def _repeated(self, step: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
        """Compile a loop of up to so many steps, or to the end of the data."""

        def run(iterator: Any, num_steps: Any) -> Any:
            def continues(done: Any, batch: Any) -> Any:
                return (done < num_steps) & batch.has_value()

            def body(done: Any, batch: Any) -> Any:
                step(batch.get_value())
                done += 1
                # The batch after the last one belongs to the next call.
                return done, tf.cond(done < num_steps, iterator.get_next_as_optional, lambda: batch)

            with self.scope():
                first = iterator.get_next_as_optional()
                done, _ = tf.while_loop(continues, body, (tf.constant(0), first))
                return done, self._logs()

        return tf.function(run, autograph=False, reduce_retracing=True)

    # One step.

    @contextlib.contextmanager
    def _traced(self, batch: Any, *, jit: bool = False) -> Iterator[Any]:
        """Trace a step on a batch in this, all of it on the device if there is only one."""
        is_one, batch = self._is_one_device, _global_batches.checked_batch(self.mesh, batch)
        settings = {"batch_norm": self.loop.batch_norm, "jit": jit and not is_one}
        step = Step(self.mesh, self._policy, **settings)
        if not is_one:
            batch = tf.nest.map_structure(with_unknown_length, batch)
        with tf.device(self.mesh.home if is_one else None), traced_once(step, batch):
            yield batch

    def _train_step(self, batch: Any, *, jit: bool = False) -> Any:
        """Train on a batch; return what is to be added to loss and metrics later, if anything."""
        jit_all, micro_batches = jit and self._is_one_device, self.loop.accumulation
        differentiate = _compiled(functools.partial(self._differentiate, jit_all), jit=jit_all)
        with rematerialised(self.loop, checkpointed), self._traced(batch, jit=jit) as batch:
            num_examples = _global_batches.examples_in_batch(batch)
            seeds = []
            if micro_batches > 1:
                # All of them draw from the same seeds, each at the positions of its examples.
                generators = _micro_batches.seed_generators_of(self.model)
                seeds = [(seed.state, tf.identity(seed.state.value)) for seed in generators]
                _micro_batches.reject_loss(self._policy, self.loop, batch)

            def compute(micro_batch: Any, start: Any) -> tuple[Sums, list[Any]]:
                for state, value in seeds:
                    state.assign(value)
                with self._traced(micro_batch, jit=jit) as micro_batch:
                    sums, predictions, masks = differentiate(micro_batch, start, num_examples)
                    keras.tree.map_structure(set_keras_mask, predictions, masks)
                    return sums, self._count(lambda: self._update_metrics(micro_batch, predictions))

            sums, metric_counts = _micro_batches.over_micro_batches(
                compute, batch, num_examples=num_examples, micro_batches=micro_batches
            )
            factors: list[Any] = []
            loss_counts = self._count(
                lambda: factors.extend(self._update_losses(num_examples, sums))
            )
            _compiled(self._update, jit=jit_all)(sums.gradients, factors)
            return [*map(tf.add, metric_counts, loss_counts)]

    def _differentiate(self, jit: bool, batch: Any, start: Any, num_global_examples: Any) -> Any:
        """Compute what a step, or XLA's part of it, computes from some examples of a batch."""
        num_examples = _global_batches.examples_in_batch(batch)
        if self.loop.accumulation == 1:
            num_global_examples = num_examples
            if not jit:
                return forward_and_backward(self.loop, batch, (num_examples, num_examples))
        step: Any = current_step()
        # By position under XLA too, which draws several axes in another order.
        with step.drawing_at(start, num_examples, num_global_examples):
            return forward_and_backward(self.loop, batch, (num_examples, num_global_examples))

    def _update(self, gradients: Any, factors: Any) -> None:
        total, variables = combined(gradients, factors), self.model.trainable_variables
        with _keras_internals.one_learning_rate(self.model.optimizer):
            self.model.optimizer.apply([total.get(i) for i in range(len(variables))], variables)

    def _test_step(self, batch: Any) -> Any:
        with self._traced(batch) as batch:
            num_examples = _global_batches.examples_in_batch(batch)
            counts = num_examples, num_examples
            sums, predictions = forward(self.loop, batch, counts, training=False)

            def update() -> None:
                self._update_metrics(batch, predictions)
                self._update_losses(num_examples, sums)

            return self._count(update)

    def _predict_step(self, batch: Any) -> Any:
        with self._traced(batch) as batch:
            x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
            return self.model(x, training=False)

    def _count(self, update: Callable[[], Any]) -> list[Any]:
        """Update loss and metrics; return what is to be added to them later, which is nothing."""
        update()
        return []

    def _update_metrics(self, batch: Any, predictions: Any) -> None:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        self.model.compute_metrics(x, y, predictions, sample_weight)

    def _update_losses(self, num_examples: Any, sums: Sums) -> list[Any]:
        return self._log_losses(sums, lambda loss: (loss, tf.cast(num_examples, loss.dtype)))


@contextlib.contextmanager
def _explaining_xla() -> Iterator[None]:
    """Report in one sentence that XLA has no such operation."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        if match := re.search(r"\((No registered '\w+' OpKernel for XLA\w*)", error.message):
            raise errors.InputError(
                f"XLA cannot compile the training step of this model: {match[1]}. "
                "Use `jit_compile=False`, or move the operation into the input pipeline."
            ) from error
        raise


def _compiled(function: Callable[..., Any], *, jit: bool) -> Callable[..., Any]:
    return tf.function(function, jit_compile=True, autograph=False) if jit else function


def _strategy_of(model: keras.Model, strategy: tf.distribute.Strategy) -> Any:
    """Return the strategy that a model lives in, which must be the given one."""
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


class _PyDatasetEpochs:
    """The epochs of a `PyDataset`, whose methods are called where they begin and end."""

    def __init__(self, dataset: keras.utils.PyDataset) -> None:
        self._adapter = PyDatasetAdapter(dataset)
        self.batches: Any = self._adapter.get_tf_dataset()  # later distributed
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


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Trace a step faster, which makes many objects that stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def forward(loop: Any, batch: Any, counts: tuple[Any, Any], *, training: bool) -> tuple[Sums, Any]:
    """Compute losses and predictions of so many examples, of so many in the global batch."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    loop.loss.in_parts = training and loop.accumulation > 1
    losses, predictions = loop.per_example_loss(x, y, training=training)
    terms = loop.loss.terms(losses, predictions, sample_weight)
    return loop.loss.sums(terms, loop.model.losses, counts), predictions


def forward_and_backward(loop: Any, batch: Any, counts: tuple[Any, Any]) -> tuple[Sums, Any, Any]:
    """Compute losses and gradients of some examples, the predictions, and their Keras masks."""
    # The tape is persistent for the losses whose divisors differ.
    with tf.GradientTape(persistent=True) as tape:
        sums, predictions = forward(loop, batch, counts, training=True)
        losses = [*map(loop.optimizer.scale_loss, loop.loss.parts(sums))]
    variables = loop.model.trainable_variables
    gradients = [
        {
            i: dense_if_unique(x)
            for i, x in enumerate(tape.gradient(loss, variables))
            if x is not None
        }
        for loss in losses
    ]
    # Masks are attributes of tensors, which do not cross the border of a `tf.function`.
    masks = keras.tree.map_structure(get_keras_mask, predictions)
    return sums._replace(gradients=gradients), predictions, masks


def combined(gradients: list[dict[int, Any]], factors: list[Any]) -> dict[int, Any]:
    """Add to the first gradients those of other losses, each times a factor; return the first."""
    total, *others = gradients
    for gradients_of_loss, factor in zip(others, factors, strict=True):
        for index, gradient in gradients_of_loss.items():
            scaled = tf.math.scalar_mul(tf.cast(factor, gradient.dtype), gradient)
            total[index] = _micro_batches.add(total[index], scaled) if index in total else scaled
    return total
