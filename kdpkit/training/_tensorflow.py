"""The steps of `TrainingLoop` on TensorFlow, for one device and every synchronous strategy.

A training step is cut in two. In the replicas: forward and backward pass, of a loss whose parts
add up to the global batch's. Outside them: one sum of the gradients, and the optimizer once, which
so clips, accumulates, averages and checks the whole gradient.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend import compute_output_spec, set_keras_mask

from kdpkit import _checks
from kdpkit.training import _batch_norm, _keras_internals
from kdpkit.training._feed import Feed
from kdpkit.training._gradients import (
    Sums,
    combined,
    forward,
    forward_and_backward,
    over_micro_batches,
)
from kdpkit.training._losses import sum_over_replicas
from kdpkit.training._step import ReplicaStep


class TensorFlowSteps:
    """Runs the steps of a loop under its strategy.

    Args:
        loop: The `TrainingLoop`.
        strategy: A strategy, or None for the model's.
        jit: Whether XLA compiles the replicas' forward and backward passes; None asks the model.
    """

    def __init__(self, loop: Any, strategy: Any, jit: bool | None) -> None:
        self.loop = loop
        self.model = loop.model
        self.strategy = _strategy_of(self.model, strategy)
        self._jit = jit
        _keras_internals.install()
        if isinstance(self.strategy, tf.distribute.MirroredStrategy):
            _keras_internals.prefer_one_device_sums(self.strategy)
        with self.scope():
            self._means = {"": keras.metrics.Mean("loss")}
        self._batch_norms: list[Any] = []
        self._is_built = self._warned = False
        self._train = self._repeated(self._train_step)
        self._test = self._repeated(self._test_step)
        self._predict = tf.function(self._predict_batch, autograph=False, reduce_retracing=True)

    @property
    def jit(self) -> bool:
        """Whether XLA compiles the replicas' part of a training step."""
        return bool(self.model.jit_compile if self._jit is None else self._jit)

    def scope(self) -> Any:
        """Enter the strategy's scope."""
        return self.strategy.scope()

    def open(self, dataset: Any, name: str, **steps: int | None) -> Feed:
        """Check a dataset, spread its batches over the replicas, and count them."""
        ((argument, wanted),) = steps.items()
        if wanted is not None:
            wanted = _checks.integer(argument, wanted)
        if not isinstance(dataset, tf.data.Dataset | tf.distribute.DistributedDataset):
            _checks.refuse(
                f"`{name}` must be a `tf.data.Dataset` of batches.",
                **{name: type(dataset).__name__},
                remedy="`tf.data.Dataset.from_tensor_slices((x, y)).batch(size)` makes one.",
            )
        _check_batched(name, dataset.element_spec)
        size = int(dataset.cardinality()) if isinstance(dataset, tf.data.Dataset) else None
        if size == tf.data.INFINITE_CARDINALITY and wanted is None:
            _checks.refuse(f"`{name}` repeats for ever: say with `{argument}` how much to take.")
        known = size if size is not None and size >= 0 else None
        batches = dataset
        if isinstance(dataset, tf.data.Dataset):
            batches = self.strategy.experimental_distribute_dataset(dataset)
        return Feed(name, batches, steps=wanted or known, goes_on=wanted is not None)

    def build(self, feed: Feed, *, training: bool) -> None:
        """Make all variables now, in the scope: a compiled loop can make none."""
        with self.scope():
            if not self._is_built:
                self._build_model_and_metrics(feed.batches.element_spec)
            if training:
                _build_optimizer(self.model, self.strategy)
        self._is_built = True

    def _build_model_and_metrics(self, spec: Any) -> None:
        outputs: list[str] = []

        def trace(batch: Any) -> Any:
            x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
            losses, predictions = self.loop.per_example_loss(x, y, training=False)
            terms = self.loop.loss.terms(losses, predictions, weight)
            outputs.extend(term.name for term in terms)
            self.model.compute_metrics(x, y, predictions, weight)
            return predictions

        compute_output_spec(trace, tf.nest.map_structure(_symbolic, spec))
        self._means |= {name: keras.metrics.Mean(f"{name}_loss") for name in outputs if name}
        self._batch_norms = _batch_norm.batch_norm_layers(self.model)
        self._check_synchronized()

    def _check_synchronized(self) -> None:
        for layer in self._batch_norms:
            if not layer.synchronized:
                continue
            if self.strategy.num_replicas_in_sync > 1 and (self.jit or self.loop.accumulation > 1):
                _checks.refuse(
                    "A synchronized BatchNormalization cannot meet the other replicas inside XLA "
                    "or inside the loop over micro-batches.",
                    layer=layer.name,
                    jit=self.jit,
                    accumulation=self.loop.accumulation,
                    remedy="Use `jit=False, accumulation=1`, or leave it unsynchronized.",
                )
            _batch_norm.attach_to_synchronized(layer)

    def reset_metrics(self) -> None:
        """Begin an epoch or an evaluation."""
        self.model.reset_metrics()
        for mean in self._means.values():
            mean.reset_state()

    def train(self, iterator: Any, steps: int) -> tuple[int, dict[str, Any]]:
        """Run up to so many training steps; give how many there were, and loss and metrics."""
        if not self._warned:
            self._warned = True
            _batch_norm.warn_of_local_statistics(
                self._batch_norms, self.strategy.num_replicas_in_sync
            )
        return self._run(self._train, iterator, steps)

    def test(self, iterator: Any, steps: int) -> tuple[int, dict[str, Any]]:
        """Run up to so many evaluation steps; give how many there were, and loss and metrics."""
        return self._run(self._test, iterator, steps)

    def predict(self, iterator: Any, steps: int) -> tuple[int, list[Any]]:
        """Predict up to so many batches; give how many there were, and their predictions."""
        outputs: list[Any] = []
        with contextlib.suppress(StopIteration, tf.errors.OutOfRangeError):
            while len(outputs) < steps:
                outputs.append(keras.tree.map_structure(np.asarray, self._predict(next(iterator))))
        return len(outputs), outputs

    def finish_training(self) -> None:
        """Give the model the averages of its weights, if the optimizer keeps such."""
        with self.scope():
            self.model.optimizer.finalize_variable_values(self.model.trainable_variables)

    def _run(self, function: Any, iterator: Any, steps: int) -> tuple[int, dict[str, Any]]:
        with _keras_internals.constant_collective_keys():
            done, logs = function(iterator, tf.constant(steps))
        return int(done), logs

    def _repeated(self, step: Callable[[Any], None]) -> Callable[[Any, Any], Any]:
        """Make a function of an iterator and a number of steps, compiled into one loop."""

        def run(iterator: Any, steps: Any) -> Any:
            def go_on(done: Any, batch: Any) -> Any:
                return (done < steps) & batch.has_value()

            def body(done: Any, batch: Any) -> Any:
                step(batch.get_value())
                # The batch after the last is not taken: it is the next call's.
                following = tf.cond(done + 1 < steps, iterator.get_next_as_optional, lambda: batch)
                return done + 1, following

            with self.scope():
                first = iterator.get_next_as_optional()
                done, _ = tf.while_loop(go_on, body, (tf.constant(0), first))
                means = {mean.name: mean.result() for mean in self._means.values()}
                return done, self.model.get_metrics_result() | means

        return tf.function(run, autograph=False, reduce_retracing=True)

    def _train_step(self, batch: Any) -> None:
        gradients = self.strategy.run(self._train_replica, args=(batch,))
        variables = self.model.trainable_variables
        sums = self.strategy.extended.batch_reduce_to(
            tf.distribute.ReduceOp.SUM,
            [(gradient, variables[index].value) for index, gradient in gradients.items()],
        )
        of_variable = dict(zip(gradients, sums, strict=True))
        optimizer = self.model.optimizer
        # Of the class: `replica_exact` sets an `apply` on the instance, for use in replicas.
        type(optimizer).apply(
            optimizer, [of_variable.get(index) for index in range(len(variables))], variables
        )

    def _test_step(self, batch: Any) -> None:
        self.strategy.run(self._test_replica, args=(batch,))

    def _predict_batch(self, batch: Any) -> Any:
        def predict(batch: Any) -> Any:
            x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
            return self.model(x, training=False)

        outputs = self.strategy.run(predict, args=(batch,))
        return keras.tree.map_structure(self._joined, outputs)

    def _joined(self, output: Any) -> Any:
        return tf.concat(self.strategy.experimental_local_results(output), axis=0)

    def _train_replica(self, batch: Any) -> dict[int, Any]:
        """Give this replica's part of the gradients, by the variable's index."""
        step = ReplicaStep(batch)
        differentiate = functools.partial(forward_and_backward, self.loop, step)
        if self.jit:
            differentiate = tf.function(differentiate, jit_compile=True, autograph=False)

        def compute(piece: Any) -> Sums:
            sums, predictions, masks = differentiate(piece)
            keras.tree.map_structure(set_keras_mask, predictions, masks)
            self._update_metrics(piece, predictions)
            return sums

        pieces = self.loop.accumulation
        sums = over_micro_batches(compute, batch, rows=step.rows, pieces=pieces)
        divided = self._update_losses(step, sums)
        _batch_norm.average_local_statistics(step, self._batch_norms)
        gradients = combined(sums.gradients, [1.0, *divided])
        return {index: step.if_rows(gradient) for index, gradient in gradients.items()}

    def _test_replica(self, batch: Any) -> None:
        step = ReplicaStep(batch)
        sums, predictions = forward(self.loop, step, batch, training=False)
        self._update_metrics(batch, predictions)
        self._update_losses(step, sums)

    def _update_metrics(self, batch: Any, predictions: Any) -> None:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        self.model.compute_metrics(x, y, predictions, sample_weight)

    def _update_losses(self, step: ReplicaStep, sums: Sums) -> list[Any]:
        """Log the losses; give the factors that put the real divisors in place of the plain."""
        factors = {
            name: tf.math.reciprocal_no_nan(sum_over_replicas(real))
            for name, real in sums.real.items()
        }
        total = sums.additional
        for name, loss in sums.losses.items():
            loss *= factors.get(name, 1.0)
            total += self.loop.loss.weight(name) * loss
            if name:
                self._means[name].update_state(*_as_mean(step, loss))
        self._means[""].update_state(*_as_mean(step, total))
        return [*factors.values()]


def _as_mean(step: ReplicaStep, part: Any) -> tuple[Any, Any]:
    """Give value and weight for a `Mean`, so that it weighs the sum of the parts by all rows."""
    rows, all_rows = (tf.cast(count, part.dtype) for count in (step.rows, step.all_rows))
    return tf.math.divide_no_nan(part * all_rows, rows), rows


def _strategy_of(model: Any, strategy: Any) -> Any:
    """Give the strategy that a model lives in, which must be the one asked for."""
    of_model = model.distribute_strategy
    if strategy is None:
        strategy = of_model
    if not isinstance(strategy, tf.distribute.Strategy):
        _checks.refuse(
            "`strategy` must be a `tf.distribute` strategy, or None for the model's.",
            strategy=strategy,
        )
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        _checks.refuse(
            "Parameter servers train asynchronously, which no device alone would.",
            strategy=type(strategy).__name__,
            remedy="Use a mirrored or a multi-worker strategy.",
        )
    _check_in_scope("model", model.variables, strategy)
    if not model.variables and strategy is not of_model:
        _refuse_place("model", type(model).__name__, strategy)
    return strategy


def _check_in_scope(owner: str, variables: Any, strategy: Any) -> None:
    """Refuse variables of another strategy's scope, or of none."""
    for variable in variables:
        if not strategy.extended.variable_created_in_scope(variable.value):
            _refuse_place(owner, variable.path, strategy)


def _refuse_place(owner: str, built: str, strategy: Any) -> NoReturn:
    _checks.refuse(
        f"The {owner} was not built in the scope of the strategy that is to train it.",
        built=built,
        strategy=type(strategy).__name__,
        remedy="Build it inside `with strategy.scope():`, of this very strategy.",
    )


def _build_optimizer(model: Any, strategy: Any) -> None:
    """Build the optimizer for use outside the replicas, where the gradients are whole."""
    optimizer = model.optimizer
    for part in (optimizer, getattr(optimizer, "inner_optimizer", optimizer)):
        part._distribution_strategy = strategy  # Keras': where it was made, maybe out of the scope
        scales = isinstance(part, keras.optimizers.LossScaleOptimizer)
        if scales and tf.distribute.in_cross_replica_context():
            part._tf_apply = part._common_apply  # Keras': refuses to be outside the replicas
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    _check_in_scope("optimizer", optimizer.variables, strategy)


def _check_batched(name: str, spec: Any) -> None:
    """Refuse what is surely no batch: scalars, or parts of different known lengths."""
    shapes = [
        _of_replica(part).shape
        for part in tf.nest.flatten(spec)
        if hasattr(_of_replica(part), "shape")
    ]
    lengths = {None if shape.rank is None else shape[0] for shape in shapes if shape.rank != 0} - {
        None
    }
    if any(shape.rank == 0 for shape in shapes) or len(lengths) > 1:
        _checks.refuse(
            f"`{name}` is not batched: its elements are single examples.",
            elements=spec,
            remedy="Add `.batch(global_batch_size)`.",
        )


def _of_replica(spec: Any) -> Any:
    """Give the specification of one replica's part of a dataset's element."""
    return getattr(spec, "_value_specs", (spec,))[0]


def _symbolic(spec: Any) -> Any:
    """Give Keras' placeholder for one replica's part of a dataset's element."""
    spec = _of_replica(spec)
    if not hasattr(spec, "shape") or isinstance(spec, tf.OptionalSpec):
        return None
    return keras.KerasTensor(
        spec.shape,
        spec.dtype.name,
        sparse=isinstance(spec, tf.SparseTensorSpec),
        ragged=isinstance(spec, tf.RaggedTensorSpec),
    )
