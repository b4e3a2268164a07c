"""`replica_exact` on TensorFlow: the steps that stand in for those of Keras under a strategy."""

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdpkit import scaling
from kdpkit._internal import checks, held_variables, processes, versions
from kdpkit.training import _callbacks
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
    _xla,
)
from kdpkit.training.tensorflow._step import ReplicaStep, running

_STRATEGIES = (
    tf.distribute.OneDeviceStrategy,
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
)
_KINDS = ("train", "test", "predict")


def attach(
    model: keras.Model, *, batch_norm: str, divided: Sequence[Any], undivided: Sequence[Any]
) -> None:
    """Make a model exact under the strategy that it was built in; without one, leave it."""
    strategy = _strategy_of(model)
    steps = getattr(model._maybe_symbolic_build, "__self__", None)
    if isinstance(steps, _ExactSteps):
        steps.batch_norm = batch_norm
        steps.declare(divided, undivided)
    elif strategy is not None:
        _reject_own_loops(model)
        _keras_internals.prefer_one_device_sums(strategy)
        if strategy.num_replicas_in_sync > 1:
            _layer_state.reject_states_of_examples(model)
        steps = _ExactSteps(model, strategy, batch_norm=batch_norm)
        steps.declare(divided, undivided)
        steps.attach()


@contextlib.contextmanager
def _rejecting_numpy_draws(step: ReplicaStep) -> Iterator[None]:
    """Raise for what NumPy draws while a step is traced: one number for all steps of a trace.

    How often a step is traced depends on the shapes of batches, and on the number of replicas.
    """
    before: Any = np.random.get_state()  # what users call
    yield
    after: Any = np.random.get_state()
    is_traced = step.replicas > 1 and not tf.executing_eagerly()
    if is_traced and (before[2] != after[2] or any(before[1] != after[1])):
        checks.fail(
            "The step draws from `numpy.random` while it is traced: what it drew then is the same "
            "in all steps that follow.",
            drawn="numpy.random",
            remedy="Draw with `keras.random` and a `keras.random.SeedGenerator`.",
        )


def _strategy_of(model: keras.Model) -> Any:
    """Return the strategy that the model and its variables live in; None for one device."""
    strategy = model._distribute_strategy
    if strategy is None and tf.distribute.has_strategy():
        _checks.reject_scope("model", tf.distribute.get_strategy())
    if strategy is None:
        return None
    if not isinstance(strategy, _STRATEGIES):
        checks.fail(
            "Keras cannot `fit` under this strategy; use MirroredStrategy or "
            "MultiWorkerMirroredStrategy, or `kdpkit.training.TrainingLoop`.",
            strategy=type(strategy).__name__,
        )
    _checks.require_scope("model", model.variables, strategy)
    return strategy


def _reject_own_loops(model: keras.Model) -> None:
    """Reject a model that compiles its steps itself: its replicas would run something else."""
    for kind in _KINDS:
        name = f"make_{kind}_function"
        if getattr(type(model), name) is not getattr(keras.Model, name):
            checks.fail(
                "The model compiles its steps itself, so they cannot be run on replicas.",
                method=f"{type(model).__name__}.{name}",
                remedy=f"Override `{kind}_step`, which is given a batch, in its place.",
            )


class _ExactSteps:
    """The methods that stand in for a model's own, set on the instance alone."""

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        *,
        batch_norm: str,
    ) -> None:
        self.model = model
        self.strategy = strategy
        self.batch_norm = batch_norm
        self.is_own: dict[str, bool] = {}  # whether some code of a kind of steps is the user's
        self.is_own_step: dict[str, bool] = {}
        self.steps_of_model: dict[str, Callable] = {}
        self.steps_in_place: dict[str, Callable] = {}

    def declare(self, divided: Sequence[Any], undivided: Sequence[Any]) -> None:
        """Take what the user says of layers."""
        self.is_declared = bool(divided or undivided)
        self.division = _global_batch.Division(divided, undivided)

    def attach(self) -> None:
        """Put the methods in place, and forget functions compiled from the model's own."""
        model = self.model
        for kind in _KINDS:
            self.take_step(kind)
            setattr(model, f"make_{kind}_function", _of_kind(self.make_function, kind))
            setattr(model, f"{kind}_function", None)
        model._maybe_symbolic_build = self.build
        for name in ("fit", "evaluate", "predict"):
            setattr(model, name, _exact(getattr(model, name), self.strategy))

    def take_step(self, kind: str) -> None:
        """Stand in for the model's step of a kind, which the user may have set since."""
        name = f"{kind}_step"
        step = getattr(self.model, name)
        if step is not self.steps_in_place.get(kind):
            self.is_own_step[kind] = getattr(step, "__func__", None) is not getattr(
                keras.Model, name
            )
            self.steps_of_model[kind] = _keras_internals.inlined(step)
            self.steps_in_place[kind] = _of_kind(self.run_step, kind)
            setattr(self.model, name, self.steps_in_place[kind])

    def build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Build model, metrics and optimizer from the dataset's specification, before training.

        Keras averages a first batch over the replicas for this: impossible if its shards differ in
        size or are no floats (keras-team/keras#19246), and lost if a generator gave it (#20394).
        """
        model = self.model
        several = self.strategy.num_replicas_in_sync > 1
        if several and model.jit_compile:
            is_global = self.batch_norm == _batch_norm.GLOBAL
            layers = _batch_norm.batch_norm_layers(model)
            _xla.compile_call(model, [of for of in layers if is_global or of.synchronized])
        self.attach_optimizers()
        is_fit = iterator is not None
        spec = iterator._distributed_dataset.element_spec if is_fit else _spec_of(data_batch)
        data_batch = _placeholders.placeholders(spec)
        with self.strategy.scope():
            _keras_internals.move_global_seeds(self.strategy)
            self.move_loss_tracker()
            self.build_variables(data_batch)
        if _distribution.spans_processes(self.strategy):  # else each would count its own examples
            for metric in _whose_code.parts_of_metrics(model):
                _checks.require_scope(f"metric `{metric.name}`", metric.variables, self.strategy)
        for metric in model.metrics:
            _metric_patches.attach_to_metric(metric, is_global=True)
        if several:
            versions.reject_sums_over_examples(model)

    def attach_optimizers(self) -> None:
        """Have the model's optimizers work on the gradients of the global batch."""
        for optimizer in _optimizer_patches.optimizers_of(self.model):
            _optimizer_patches.attach_to_optimizer(optimizer, self.strategy)

    def move_loss_tracker(self) -> None:
        """Have the loss counted in the scope, outside of which `compile` may have been called."""
        tracker = self.model._loss_tracker
        if tracker is not None and not _checks.is_in_scope(tracker.variables, self.strategy):
            # As in `compile`, it must not become one of the model's own metrics.
            object.__setattr__(self.model, "_loss_tracker", keras.metrics.Mean(name="loss"))

    def build_variables(self, data_batch: Any) -> None:
        """Build model, metrics and optimizer; a step of one's own may take its data otherwise."""
        model = self.model
        if type(model).call is keras.Model.call:  # only `train_step` uses its parts
            return
        if self.is_own_step["train"] and any(held_variables.variables_in_attributes(model)):
            return  # its optimizer may be built with these
        try:
            if any(map(_placeholders.is_ragged, keras.tree.flatten(data_batch))):
                data = keras.utils.unpack_x_y_sample_weight(data_batch)
                _placeholders.build_for_ragged(model, *data)
            model._symbolic_build(data_batch=data_batch)
        except (ValueError, TypeError, RuntimeError, IndexError, AttributeError) as error:
            if self.is_own_step["train"]:  # which takes its data otherwise, and builds them
                return
            if "Dimensions must be equal" in str(error):
                parts = [part for part in keras.tree.flatten(data_batch) if part is not None]
                checks.fail(
                    "The model takes batches of one size, and each replica gets a part of a batch.",
                    error=checks.first_line(error),
                    batch=[tuple(part.shape) for part in parts],
                    remedy="Let it take any number of examples, and keep no state for each.",
                )
            raise

    def look_at(self, kind: str) -> None:
        """Look whose code a kind of steps is, and attach to what it uses."""
        model = self.model
        self.take_step(kind)
        several = self.strategy.num_replicas_in_sync > 1
        self.is_own[kind] = several and (
            self.is_declared
            or self.is_own_step[kind]
            or not _whose_code.is_all_of_libraries(model, kind)
        )
        self.division.forget()
        with self.strategy.scope():
            self.move_loss_tracker()
        self.attach_optimizers()

    def make_function(self, kind: str, force: bool = False) -> None:  # Keras'
        """Compile a step as Keras does, and split batches that would reach every replica."""
        model, name = self.model, f"{kind}_function"
        if getattr(model, name) is not None and not force:
            return
        self.look_at(kind)
        if kind == "train" and self.batch_norm == _batch_norm.REPLICA:
            _batch_norm.warn_of_local_statistics(model, self.strategy.num_replicas_in_sync)
        compiled = self.compiled_step(kind)

        def compile_again() -> None:
            nonlocal compiled
            compiled = self.compiled_step(kind)
            setattr(model, name, function)

        def function(batches: Any) -> Any:
            if model.run_eagerly:  # each step is what the parts are then: callbacks may change them
                self.look_at(kind)
            if not isinstance(batches, tf.data.Iterator | tf.distribute.DistributedIterator):
                batches = [_split(batch, self.strategy) for batch in batches]  # `train_on_batch`'s
            in_loop, keys = model.steps_per_execution > 1, _keras_internals.constant_collective_keys
            if not in_loop and not model.run_eagerly:
                batches = _keras_internals.taken_before_tracing(batches)
            explaining = _checks.explaining_other_lengths()
            with explaining, keys() if in_loop else contextlib.nullcontext():
                if model.run_eagerly:
                    logs = compiled(batches)
                else:
                    logs = self.division.traced(kind, lambda: compiled(batches), compile_again)
            _distribution.reject_differences()
            return logs

        setattr(model, name, function)

    def compiled_step(self, kind: str) -> Callable:
        """Compile a step as Keras does, but not by XLA as one: keras-team/keras#19005."""
        model = self.model
        is_one = self.strategy.num_replicas_in_sync == 1
        with _keras_internals.replaced(model, "_jit_compile", is_one and model.jit_compile):
            getattr(type(model), f"make_{kind}_function")(model, force=True)
        compiled: Callable = getattr(model, f"{kind}_function")
        return compiled

    def run_step(self, kind: str, data: Any) -> Any:
        """Run a replica's step: what Keras calls for the model's own."""
        _layer_state.keep_apart(self.model, is_own=self.is_own[kind])
        step = ReplicaStep(data, batch_norm=self.batch_norm)
        # Under XLA by position on one replica too: it draws other numbers for other shapes.
        step.is_part |= bool(self.model.jit_compile)
        if self.is_own[kind]:
            step = _global_batch.step_on_global_batch(step, self.division, kind)
        elif step.replicas > 1:
            step.data = _checks.of_one_length(step.sizes, step.data)
        with _patches.installed(), running(step), _rejecting_numpy_draws(step):
            given = self.steps_of_model[kind](step.data)
            if kind == "predict":
                return _global_batch.own_part(step, given)
            if kind == "train" and step.replicas > 1:
                _layer_state.average(step)
            return step.global_values(given)


def _of_kind(method: Callable, kind: str) -> Callable:
    """Return a method for one kind of steps: no `partial`, whose code would be nobody's."""
    return lambda *args, **kwargs: method(kind, *args, **kwargs)


def _exact(method: Callable, strategy: tf.distribute.Strategy) -> Callable:
    """Have Keras spread datasets as `_distribution` does: it asks the strategy, which asks there.

    They are checked: single examples are a bare `IndexError` in `tf.distribute`, others no end. Of
    several processes the first one alone writes and reports.
    """
    several = _distribution.spans_processes(strategy)
    distribute = functools.partial(_distribution.distribute, strategy)
    distributing = functools.partial(
        _keras_internals.replaced, strategy, "experimental_distribute_dataset", distribute
    )

    number_of_steps = "steps_per_epoch" if method.__name__ == "fit" else "steps"

    @functools.wraps(method)
    def exact(*args: Any, **settings: Any) -> Any:
        settings = _callbacks.settings_of_this_process(settings) if several else settings
        try:
            given = inspect.signature(method).bind(*args, **settings).arguments
        except TypeError:  # as the method will say
            given = {}
        held_out, steps = given.get("validation_data"), given.get("validation_steps")
        _checks.check_dataset("validation_data", held_out, validation_steps=steps)
        steps = given.get(number_of_steps)
        _checks.check_dataset("x", given.get("x"), **{number_of_steps: steps})
        explained = processes.explain_lost_process() if several else contextlib.nullcontext()
        with explained, distributing(), _patches.installed():
            return method(*args, **settings)

    return exact


def _spec_of(batch: Any) -> Any:
    """Return what specifies a batch of arrays and tensors."""

    def spec(leaf: Any) -> Any:
        if leaf is None:
            return None
        if tf.is_tensor(leaf):
            return tf.type_spec_from_value(leaf)
        array = np.asarray(leaf)
        return tf.TensorSpec(array.shape, tf.string if array.dtype.kind in "OSU" else array.dtype)

    return tf.nest.map_structure(spec, batch)


def _split(batch: Any, strategy: tf.distribute.Strategy) -> Any:
    """Split a batch that would reach every replica; those of a dataset are split already."""
    leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
    if isinstance(leaves[0], tf.distribute.DistributedValues):
        return batch
    if not all(leaf.shape if tf.is_tensor(leaf) else np.ndim(leaf) for leaf in leaves):
        checks.fail("A batch must consist of arrays with examples; make them with `np.array`.")
    replicas = strategy.num_replicas_in_sync
    if replicas == 1:
        return batch

    def split(leaf: Any) -> Any:
        if leaf is None:
            return None
        # A copy of an array: TensorFlow takes it as it is, perhaps, and would write into it.
        whole = leaf if tf.is_tensor(leaf) else np.array(leaf)
        sizes = scaling.split_batch(whole.shape[0], replicas)
        pairs = zip(sizes, itertools.accumulate(sizes), strict=True)
        shards = [_distribution.sliced(whole, stop - size, stop) for size, stop in pairs]
        if isinstance(whole, np.ndarray):
            shards = [tf.convert_to_tensor(shard) for shard in shards]
        return strategy.experimental_distribute_values_from_function(
            lambda context: shards[
                _distribution.shard_of(strategy, context.replica_id_in_sync_group)
            ]
        )

    return tf.nest.map_structure(split, batch)
