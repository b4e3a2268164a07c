"""The steps of `TrainingLoop` on TensorFlow: one device, and every synchronous strategy.

A training step is cut in two. In the replicas: forward and backward pass, of a loss whose parts
add up to that of the global batch. Outside them: one sum of the gradients, and the optimizer once,
which then clips, accumulates, averages and checks the whole gradient.
"""

import contextlib
import functools
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend import compute_output_spec, set_keras_mask

from kdpkit import _checks, _garbage, _processes, _versions
from kdpkit._tuning import untuned
from kdpkit.training._feed import Feed
from kdpkit.training._losses import sum_over_replicas
from kdpkit.training._objective import PLACEHOLDER_ROWS, trace_metrics
from kdpkit.training._steps import Steps
from kdpkit.training.tensorflow import (
    _attachments,
    _batch_norm,
    _keras_internals,
    _layer_state,
    _no_examples,
    _shards,
    _workers,
)
from kdpkit.training.tensorflow._batch_norm import GLOBAL, REPLICA
from kdpkit.training.tensorflow._gradients import (
    Sums,
    combined,
    forward,
    forward_and_backward,
    inner_products,
    over_micro_batches,
    squared_norm,
)
from kdpkit.training.tensorflow._step import ReplicaStep, running
from kdpkit.training.tensorflow._verification import Verification
from kdpkit.training.tensorflow._xla_trial import XlaTrial

T = TypeVar("T")


def steps_of(loop: Any, strategy: Any, jit: Any) -> Steps:
    """Give what runs the steps of a loop under a strategy, in step or asynchronously."""
    of_model = loop.model.distribute_strategy if strategy is None else strategy
    if isinstance(of_model, tf.distribute.ParameterServerStrategy):
        from kdpkit.training.tensorflow._parameter_server import (
            ParameterServerSteps,  # which needs this file
        )

        return ParameterServerSteps(loop, strategy, jit)
    return TensorFlowSteps(loop, strategy, jit)


def _as_it_asks(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Have tf.data tune a dataset only if its options say so."""
    return untuned(dataset) if dataset.options().autotune.enabled is None else dataset


class TensorFlowSteps(Steps):
    """Runs the steps of a loop under its strategy.

    Args:
        loop: The `TrainingLoop`.
        strategy: A strategy, or None for the one that the model was built in.
        jit: Whether XLA compiles forward and backward pass; None asks the model, and "measure"
            takes what is faster.
    """

    def __init__(self, loop: Any, strategy: Any, jit: Any) -> None:
        self.loop = loop
        self.model = loop.model
        self.strategy = _strategy_of(self.model, strategy)
        self._jit = jit
        _keras_internals.install()
        if self.strategy.num_replicas_in_sync > 1:
            _layer_state.refuse_states_of_rows(self.model)
        if isinstance(self.strategy, tf.distribute.MirroredStrategy):
            _keras_internals.prefer_one_device_sums(self.strategy)
        with self.scope():
            self._means = {"": keras.metrics.Mean("loss")}  # and of the outputs, if several
        self._is_built = self._is_optimizer_built = self._is_verified = False
        self._trial = XlaTrial() if jit == "measure" else None
        self._train_with = {
            jit: self._repeated(functools.partial(self._train_step, jit=jit))
            for jit in (False, True)
        }
        self._test = self._repeated(self._test_step)
        self._predict = tf.function(self._predict_step, autograph=False, reduce_retracing=True)

    @property
    def jit(self) -> bool:
        """Whether XLA compiles the replicas' part of the next training step."""
        if self._trial:
            return self._trial.jit
        return bool(self.model.jit_compile if self._jit is None else self._jit)

    @property
    def is_jit_chosen(self) -> bool:
        """Whether that is settled: a trial may be under way."""
        return self._trial is None or bool(self._trial.verdict)

    @property
    def _may_jit(self) -> bool:
        return self._trial is not None or self.jit

    @property
    def _spans_processes(self) -> bool:
        return _workers.spans_processes(self.strategy)

    @property
    def means(self) -> list[Any]:
        """The metrics of the losses."""
        return [*self._means.values()]

    def scope(self) -> Any:
        """Enter the strategy's scope."""
        return self.strategy.scope()

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Enter what holds while the loop runs, and explains that another process is gone."""
        with (
            _processes.naming_losses(),
            _keras_internals.untuned_buffers(),
            _no_examples.guarded_operations(),
        ):
            yield

    def check_parts(self) -> None:
        """Refuse to compare the parts of a batch that is in one part.

        Raises:
            ValueError: There is one replica, and no accumulation.
        """
        if self.strategy.num_replicas_in_sync * self.loop.accumulation == 1:
            _checks.refuse(
                "The noise scale is estimated from how the gradients of replicas or micro-batches "
                "differ, and here a batch has one.",
                replicas=1,
                accumulation=1,
                remedy="Use `accumulation=2` or more, or several replicas.",
            )

    # Before the first step: the data, and all variables.

    def open(self, dataset: Any, name: str, **steps: int | None) -> Feed:
        """Check a dataset, spread its batches over the replicas, and build the model for them."""
        ((argument, wanted),) = steps.items()
        if wanted is not None:
            wanted = _checks.integer(argument, wanted)
        if not isinstance(dataset, tf.data.Dataset | tf.distribute.DistributedDataset):
            _checks.refuse(
                f"`{name}` must be a `tf.data.Dataset` of batches, and is a "
                f"{type(dataset).__name__}.",
                remedy="`tf.data.Dataset.from_tensor_slices((x, y)).batch(size)` makes one.",
            )
        check_batched(name, dataset.element_spec)
        batches = dataset
        if isinstance(dataset, tf.data.Dataset):
            batches = self._distributed(_as_it_asks(dataset), f"`{name}`")
            if int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY and wanted is None:
                _checks.refuse(
                    f"`{name}` never ends; say with `{argument}` how much of it to take."
                )
        self._build_model(batches.element_spec)
        return Feed(name, batches, wanted=wanted, length=functools.partial(_length_of, dataset))

    def _distributed(self, dataset: Any, name: str) -> Any:
        """Spread a dataset's batches over the replicas."""
        return _workers.distribute(self.strategy, dataset, name)

    def _build_model(self, spec: Any) -> None:
        if self.model.built or type(self.model).call is keras.Model.call:
            return
        x, _, _ = keras.utils.unpack_x_y_sample_weight(_placeholders(_workers.specs_of(spec)))
        with self.scope():
            compute_output_spec(functools.partial(self.model, training=False), x)

    def build(self, feed: Feed, *, training: bool) -> None:
        """Make all variables now, in the scope: a compiled loop can make none."""
        with self.scope():
            _keras_internals.move_global_seeds(self.strategy)
            if not self._is_built:
                if self.strategy.num_replicas_in_sync > 1 or self.loop.accumulation > 1:
                    _versions.refuse_sums_over_rows(self.model)
                self._build_metrics(feed.batches.element_spec)
                self._is_built = True
            if training and not self._is_optimizer_built:
                self._build_optimizer()
                self._prepare_layers()
                self._is_optimizer_built = True

    def _build_metrics(self, spec: Any) -> None:
        names = trace_metrics(self.loop, _placeholders(_workers.specs_of(spec)))
        for metric in self.model.metrics:
            _attachments.weigh_single_numbers(metric)
        self._means |= {name: keras.metrics.Mean(f"{name}_loss") for name in names}

    def _build_optimizer(self) -> None:
        optimizer = self.model.optimizer
        if tf.distribute.in_cross_replica_context():
            _attachments.attach_to_optimizer(optimizer, self.strategy)
        if not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        # The two that an optimizer makes before it is built need no copies on the replicas.
        copied = [v for v in optimizer.variables if v.name not in ("iteration", "learning_rate")]
        _check_place("optimizer", copied, self.strategy)

    def _prepare_layers(self) -> None:
        replicas = self.strategy.num_replicas_in_sync
        if replicas == 1:
            return
        _layer_state.keep_losses_apart(self.model)
        _layer_state.attach(self.model, without=[])
        may_meet = not self._may_jit and self.loop.accumulation == 1
        asked = self.loop.batch_norm
        for layer in _batch_norm.batch_norm_layers(self.model):
            if not may_meet and (layer.synchronized or (asked == GLOBAL and self._may_jit)):
                _checks.refuse(
                    "Under XLA, and between micro-batches, a BatchNormalization cannot meet the "
                    "other replicas.",
                    layer=layer.name,
                    jit=self._jit if self._trial else self.jit,
                    accumulation=self.loop.accumulation,
                    remedy='Use `jit=False` and `accumulation=1`, or `batch_norm="replica"`, which '
                    "normalizes by each replica's own rows, and do not synchronize the layer.",
                )
            _batch_norm.attach(layer, asked if may_meet else REPLICA)
        if asked == REPLICA or not may_meet:
            layers = _batch_norm.batch_norm_layers(self.model)
            _batch_norm.warn_of_local_statistics(layers, replicas)

    # Many steps in a call.

    def reset_metrics(self) -> None:
        """Begin an epoch or an evaluation."""
        self.model.reset_metrics()
        for mean in self._means.values():
            mean.reset_state()

    def train(self, iterator: Any, steps: int) -> tuple[int, dict[str, Any]]:
        """Run up to so many training steps; give how many there were, and loss and metrics."""
        if self._is_unverified:
            return self._train_verified(iterator, steps)
        start = time.perf_counter()
        with _explaining_xla() if self.jit else contextlib.nullcontext():
            done, logs = self._run(self._train_with[self.jit], iterator, steps)
        if self._trial and not self._trial.verdict:
            self._trial.record(steps=done, seconds=time.perf_counter() - start)
            self._say(self._trial.verdict)
        return done, logs

    @property
    def _is_unverified(self) -> bool:
        several = self.strategy.num_replicas_in_sync > 1
        return several and self.loop.verify and not self._is_verified

    def _train_verified(self, iterator: Any, steps: int) -> tuple[int, dict[str, Any]]:
        """Verify the step on the first examples, and train on them and what follows."""
        if (first := next(iterator, None)) is None:
            return 0, {}
        Verification(self.strategy, self._try_step, self.model).check(first)
        self._is_verified = True
        spec = getattr(iterator, "element_spec", None)
        done, logs = self.train(_shards.iterator_of(self.strategy, [first], spec), 1)
        if steps > 1:
            following, further = self.train(iterator, steps - 1)
            done, logs = done + following, further if following else logs
        return done, logs

    def _try_step(self, shard: Callable[[], Any], trial: Any) -> dict[str, Any]:
        """Make a training step, but for the update, of a shard for each replica."""
        parts, _ = self.strategy.run(lambda: self._train_replica(shard(), jit=False))
        variables = self.model.trainable_variables
        gradients = [parts.get(index) for index in range(len(variables))]
        whole = _attachments.sum_gradients(self.strategy, gradients, variables)
        trial.note_gradients(self.model.optimizer, variables, whole)
        losses = {mean.name: mean.result() for mean in self._means.values()}
        return self.model.get_metrics_result() | losses

    def _say(self, verdict: str) -> None:
        if verdict and _processes.index() == 0:
            print(f"\n{verdict}", flush=True)  # noqa: T201 a choice that is made for somebody is said

    def test(self, iterator: Any, steps: int) -> tuple[int, dict[str, Any]]:
        """Run up to so many evaluation steps; give how many there were, and loss and metrics."""
        return self._run(self._test, iterator, steps)

    def predict(self, iterator: Any, steps: int) -> tuple[int, list[Any]]:
        """Predict up to so many batches; give how many there were, and their predictions."""
        outputs: list[Any] = []
        with contextlib.suppress(StopIteration, tf.errors.OutOfRangeError):
            while len(outputs) < steps:
                predictions = self._predict(next(iterator))
                _workers.refuse_differences()
                outputs.append(keras.tree.map_structure(np.asarray, predictions))
        return len(outputs), outputs

    def finish_training(self) -> None:
        """Give the model the averages of its weights, if the optimizer keeps such."""
        with self.scope():
            self.model.optimizer.finalize_variable_values(self.model.trainable_variables)

    def _run(self, function: Any, iterator: Any, steps: int) -> tuple[int, dict[str, Any]]:
        fresh_keys = self._spans_processes
        keys = _keras_internals.constant_collective_keys
        with contextlib.nullcontext() if fresh_keys else keys():
            is_traced = function.experimental_get_tracing_count() > 0
            if not is_traced and not tf.config.functions_run_eagerly():
                with _garbage.uncollected():
                    function.get_concrete_function(iterator, tf.constant(steps))
            done, logs = function(iterator, tf.constant(steps))
        _workers.refuse_differences()
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
                losses = {mean.name: mean.result() for mean in self._means.values()}
                return done, self.model.get_metrics_result() | losses

        return tf.function(run, autograph=False, reduce_retracing=True)

    # One step, outside the replicas.

    def _train_step(self, batch: Any, *, jit: bool) -> None:
        parts, of_noise = self.strategy.run(self._train_replica, args=(batch, jit))
        variables = self.model.trainable_variables
        gradients = [parts.get(index) for index in range(len(variables))]
        whole = _attachments.sum_gradients(self.strategy, gradients, variables)
        if self.loop.noise_sums:
            self._note_noise(of_noise, whole)

        def update(gradients: Any) -> None:
            with _keras_internals.one_learning_rate(self.model.optimizer):
                self.model.optimizer.apply(gradients, variables)

        replicas = self.strategy.num_replicas_in_sync
        if jit and replicas == 1 and variables:
            (own,) = self.strategy.experimental_local_results(variables[0].value)
            with tf.device(own.device):  # which may be another than the first
                _compiled(update, jit=True)(whole)
        elif jit and self._may_compile_updates:
            with _attachments.compiled_updates(self.model.optimizer):
                update(whole)
        else:
            update(whole)

    @property
    def _may_compile_updates(self) -> bool:
        """Whether every replica has a copy of all that updates read, where XLA looks for it.

        Of an optimizer that was made outside of the scope, the first alone has the count of steps.
        """
        kept = (v.value for v in self.model.optimizer.variables if v.name != "learning_rate")
        return not self._spans_processes and all(
            map(self.strategy.extended.variable_created_in_scope, kept)
        )

    def _note_noise(self, of_noise: Any, whole: list[Any]) -> None:
        """Hold the squared norms of the parts of a batch against that of the whole."""
        sums = self.strategy.reduce(tf.distribute.ReduceOp.SUM, of_noise, axis=None)
        parts, rows, of_parts = tf.unstack(sums)
        local = [self.strategy.experimental_local_results(g)[0] for g in whole if g is not None]
        of_whole = squared_norm(dict(enumerate(local)))
        scale = self.model.optimizer.scale_loss(tf.constant(1.0)) ** 2
        self.loop.noise_sums.add(
            parts=parts, rows=rows, of_parts=of_parts / scale, of_whole=of_whole / scale
        )

    def _test_step(self, batch: Any) -> None:
        self.strategy.run(self._test_replica, args=(batch,))

    def _predict_step(self, batch: Any) -> Any:
        def predict(batch: Any) -> Any:
            x, _, _ = keras.utils.unpack_x_y_sample_weight(ReplicaStep(batch).data)
            return self.model(x, training=False)

        return keras.tree.map_structure(self._joined, self.strategy.run(predict, args=(batch,)))

    def _joined(self, output: Any) -> Any:
        if self._spans_processes:
            return _keras_internals.joined_over_processes(output, self.strategy)
        return tf.concat(self.strategy.experimental_local_results(output), axis=0)

    # One replica's part of a step.

    def _train_replica(self, batch: Any, jit: bool) -> tuple[dict[int, Any], Any]:
        """Give this replica's part of the gradients, by the variable's index, and its noise."""
        step = ReplicaStep(batch)
        step.is_part |= (
            jit  # under XLA by position on one replica too: it draws whole ones otherwise
        )
        batch = step.data
        seeds = _SeedStates(self.model) if self.loop.accumulation > 1 else None

        def forward_and_backward_of(piece: Any, start: Any) -> Any:
            if seeds is None:
                return forward_and_backward(self.loop, step, piece)
            part = step.of_rows(
                _workers.rows_of_batch(piece),
                offset=start,
                static_rows=_workers.static_rows_of_batch(piece),
            )
            return forward_and_backward(self.loop, part, piece)

        differentiate = _compiled(forward_and_backward_of, jit=jit)

        def compute(piece: Any, start: Any) -> tuple[Sums, Any]:
            if seeds is not None:
                seeds.restore()
            sums, predictions, masks = differentiate(piece, start)
            keras.tree.map_structure(set_keras_mask, predictions, masks)
            self._update_metrics(step, piece, predictions)
            return sums, self._products(step, piece, sums)

        pieces = self.loop.accumulation
        sums, products = over_micro_batches(compute, batch, rows=step.rows, pieces=pieces)
        factors = self._update_losses(step, sums)
        _layer_state.average(step)

        def whole(gradients: Any, factors: Any) -> dict[int, Any]:
            total = combined(gradients, [1.0, *factors])
            return {index: step.if_rows(gradient) for index, gradient in total.items()}

        own = _compiled(whole, jit=jit)(sums.gradients, factors)
        return own, self._noise(step, products, [1.0, *factors])

    def _products(self, step: ReplicaStep, piece: Any, sums: Sums) -> Any:
        """Give the inner products of a micro-batch's gradients, as the noise scale counts them."""
        if not self.loop.noise_sums:
            return ()
        rows = tf.cast(_workers.rows_of_batch(piece), tf.float32)
        share = tf.math.divide_no_nan(tf.cast(step.all_rows, tf.float32), rows)
        return share * inner_products(sums.gradients)

    def _noise(self, step: ReplicaStep, products: Any, factors: list[Any]) -> Any:
        """Give this replica's micro-batches, their rows, and the sum of their squared norms."""
        if not self.loop.noise_sums:
            return ()
        parts = tf.minimum(self.loop.accumulation, step.rows)
        factor = tf.stack([tf.cast(factor, tf.float32) for factor in factors])
        norm = step.if_rows(tf.reduce_sum(factor * factor[:, None] * products))
        return tf.stack([tf.cast(parts, tf.float32), tf.cast(step.rows, tf.float32), norm])

    def _test_replica(self, batch: Any) -> None:
        step = ReplicaStep(batch)
        sums, predictions = forward(self.loop, step, step.data, training=False)
        self._update_metrics(step, step.data, predictions)
        self._update_losses(step, sums)

    def _update_metrics(self, step: ReplicaStep, batch: Any, predictions: Any) -> None:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        rows = tf.shape(keras.tree.flatten(predictions)[0])[0]
        with running(step.of_rows(rows)):
            self.model.compute_metrics(x, y, predictions, sample_weight)

    def _update_losses(self, step: ReplicaStep, sums: Sums) -> list[Any]:
        """Log the losses; give the factors that put real divisors in the place of plain ones."""
        factors = {
            name: tf.math.reciprocal_no_nan(sum_over_replicas(real))
            for name, real in sums.real.items()
        }
        total = sums.additional
        for name, loss in sums.losses.items():
            divided = loss * factors.get(name, 1.0)
            total += self.loop.loss.weight(name) * divided
            if name:
                self._means[name].update_state(*_as_mean(step, divided))
        self._means[""].update_state(*_as_mean(step, total))
        return [*factors.values()]


@contextlib.contextmanager
def _explaining_xla() -> Iterator[None]:
    """Say in one sentence that XLA has no such operation."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        if found := re.search(r"\((No registered '\w+' OpKernel for XLA\w*)", error.message):
            raise _checks.InputError(
                f"XLA cannot compile the training step of this model: {found[1]}. "
                "Use `jit=False`, or move the operation into the input pipeline."
            ) from error
        raise


class _SeedStates:
    """The states of a model's random seeds before a step.

    All micro-batches of it draw from these, each at the places of its rows in the global batch, so
    that they draw what the batch draws in one.
    """

    def __init__(self, model: Any) -> None:
        layers = model._flatten_layers()
        seeds = {id(seed): seed for layer in layers for seed in layer._seed_generators}
        self._states = [(seed.state, tf.identity(seed.state.value)) for seed in seeds.values()]

    def restore(self) -> None:
        """Begin with them again."""
        for state, value in self._states:
            state.assign(value)


def _compiled(function: Callable[..., T], *, jit: bool) -> Callable[..., T]:
    """Have XLA compile a part of a step, or leave it as it is."""
    return tf.function(function, jit_compile=True, autograph=False) if jit else function


def _as_mean(step: ReplicaStep, part: Any) -> tuple[Any, Any]:
    """Give value and weight for a `Mean`, which then counts the sum of all parts with all rows."""
    rows, all_rows = (tf.cast(count, part.dtype) for count in (step.rows, step.all_rows))
    return tf.math.divide_no_nan(part * all_rows, rows), rows


def _strategy_of(model: Any, strategy: Any) -> Any:
    """Give the strategy that a model lives in, which must be the one asked for."""
    if strategy is None:
        strategy = model.distribute_strategy
    if not isinstance(strategy, tf.distribute.Strategy):
        _checks.refuse(
            "`strategy` must be a `tf.distribute` strategy, or None for the model's.",
            strategy=strategy,
        )
    _check_place("model", model.variables, strategy)
    if not model.variables and model.distribute_strategy is not strategy:
        _refuse_place("model", model.name, strategy)
    return strategy


def _check_place(owner: str, variables: list[Any], strategy: Any) -> None:
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


def _length_of(dataset: Any) -> int | None:
    """Give the batches of a dataset's next iterator, which may differ from epoch to epoch."""
    if not isinstance(dataset, tf.data.Dataset):
        return None
    length = int(dataset.cardinality())
    return length if length >= 0 else None


def check_batched(name: str, spec: Any) -> None:
    """Refuse what is surely no batch: scalars, or tensors of different lengths."""
    shapes = [shape for part in tf.nest.flatten(spec) if (shape := _shape(part)) is not None]
    lengths = {shape[0] for shape in shapes if shape} - {None}
    if () in shapes or len(lengths) > 1:
        _checks.refuse(
            f"`{name}` gives single examples, and must give batches.",
            element_spec=spec,
            remedy="Add `.batch(global_batch_size)`.",
        )


def _of_replica(spec: Any) -> Any:
    """Give the specification of one replica's part of a dataset's element."""
    return getattr(spec, "_value_specs", (spec,))[0]


def _shape(spec: Any) -> tuple[int | None, ...] | None:
    shape = getattr(_of_replica(spec), "shape", None)
    return None if shape is None or shape.rank is None else tuple(shape)


def _placeholders(spec: Any) -> Any:
    """Give Keras' placeholders for one replica's part of a dataset's element."""
    return tf.nest.map_structure(_placeholder, spec)


def _placeholder(spec: Any) -> Any:
    spec = _of_replica(spec)
    if not hasattr(spec, "shape") or isinstance(spec, tf.OptionalSpec):
        return None
    kinds = {
        "sparse": isinstance(spec, tf.SparseTensorSpec),
        "ragged": isinstance(spec, tf.RaggedTensorSpec),
    }
    shape = spec.shape
    if shape.rank and not any(kinds.values()):
        shape = [shape[0] or PLACEHOLDER_ROWS, *shape[1:]]
    return keras.KerasTensor(shape, spec.dtype.name, **kinds)
