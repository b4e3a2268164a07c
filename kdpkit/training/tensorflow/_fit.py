"""`replica_exact` on TensorFlow: the steps that stand in for those of Keras under a strategy."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdpkit._internal import checks, held_variables, processes
from kdpkit.training import _callbacks
from kdpkit.training.tensorflow import (
    _batch_norm,
    _checks,
    _global_batches,
    _keras_internals,
    _layer_calls,
    _library_layers,
    _losses_and_metrics,
    _optimizers,
    _patches,
    _placeholders,
)
from kdpkit.training.tensorflow._policy import Policy
from kdpkit.training.tensorflow._step import Mesh, Step
from kdpkit.training.tensorflow._tracing import traced_once

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
        steps.policy = Policy(divided, undivided)
    elif strategy is not None:
        _reject_own_loops(model)
        if strategy.num_replicas_in_sync > 1:
            _checks.reject_states_of_examples(model)
        steps = _ExactSteps(model, strategy, Policy(divided, undivided), batch_norm=batch_norm)
        steps.attach()


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
        policy: Policy,
        *,
        batch_norm: str,
    ) -> None:
        self.model, self.strategy = model, strategy
        self.mesh = Mesh(strategy)
        self.batch_norm = batch_norm
        self.policy = policy
        self.is_own_step: dict[str, bool] = {}
        self.steps_of_model: dict[str, Callable] = {}
        self.steps_in_place: dict[str, Callable] = {}

    def attach(self) -> None:
        """Put the methods in place, and forget functions compiled from the model's own."""
        model = self.model
        for kind in _KINDS:
            self.take_step(kind)
            setattr(model, f"make_{kind}_function", _of_kind(self.make_function, kind))
            setattr(model, f"{kind}_function", None)
        model._maybe_symbolic_build = self.build
        for name in ("fit", "evaluate", "predict"):
            setattr(model, name, _exact(model, getattr(model, name), self.strategy))

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
        self.move_optimizers()
        is_fit = iterator is not None
        spec = iterator._distributed_dataset.element_spec if is_fit else _spec_of(data_batch)
        data_batch = _placeholders.placeholders(spec)
        with self.strategy.scope():
            _keras_internals.move_global_seeds(self.strategy)
            self.move_loss_tracker()
            self.build_variables(data_batch)
        self.count_once()

    def count_once(self) -> None:
        """Have the model's metrics count once, for all devices."""
        for metric in _library_layers.parts_of_metrics(self.model):
            for variable in metric.variables:
                _losses_and_metrics.count_once(variable)

    def move_optimizers(self) -> None:
        """Have the model's optimizers keep their state on all devices."""
        for optimizer in _optimizers.optimizers_of(self.model):
            _optimizers.move_into_scope(optimizer, self.strategy)

    def move_loss_tracker(self) -> None:
        """Have the loss counted in the scope, outside of which `compile` may have been called."""
        tracker = self.model._loss_tracker
        if tracker is not None and not _checks.is_in_scope(tracker.variables, self.strategy):
            # As in `compile`, it must not become one of the model's own metrics.
            object.__setattr__(self.model, "_loss_tracker", keras.metrics.Mean(name="loss"))

    def build_variables(self, data_batch: Any) -> None:
        """Build model, metrics and optimizer; a step of one's own may take its data otherwise."""
        model, optimizer = self.model, self.model.optimizer
        if type(model).call is keras.Model.call:  # only `train_step` uses its parts
            return
        if self.is_own_step["train"] and any(held_variables.variables_in_attributes(model)):
            return  # its optimizer may be built with these
        try:
            if any(map(_placeholders.is_ragged, keras.tree.flatten(data_batch))):
                data = keras.utils.unpack_x_y_sample_weight(data_batch)
                _placeholders.build_for_ragged(model, *data)
            # A step of one's own builds it for the variables that it trains.
            is_later = self.is_own_step["train"] and optimizer and not optimizer.built
            later = _keras_internals.replaced(optimizer, "built", True)
            with later if is_later else contextlib.nullcontext():
                model._symbolic_build(data_batch=data_batch)
        except (ValueError, TypeError, RuntimeError, IndexError, AttributeError):
            if not self.is_own_step["train"]:  # which takes its data otherwise, and builds them
                raise

    def make_function(self, kind: str, force: bool = False) -> None:  # Keras'
        """Compile a step as Keras does, but so that it runs once for all replicas."""
        model, name = self.model, f"{kind}_function"
        if getattr(model, name) is not None and not force:
            return
        self.look_at(kind)
        if kind == "train" and self.batch_norm == _batch_norm.REPLICA:
            _batch_norm.warn_of_local_statistics(model, self.strategy.num_replicas_in_sync)
        is_one = self.mesh.num_parts == 1
        with _keras_internals.replaced(model, "_jit_compile", is_one and model.jit_compile):
            getattr(type(model), f"make_{kind}_function")(model, force=True)
        compiled = getattr(model, name)

        def function(batches: Any) -> Any:
            if model.run_eagerly:  # each step is what the parts are then: callbacks may change them
                self.look_at(kind)
            once = _keras_internals.once_for_all_replicas(self.strategy)
            explained = _global_batches.explaining_differences()
            with once, explained, _layer_calls.explaining_other_lengths():
                return compiled(batches)

        setattr(model, name, function)

    def look_at(self, kind: str) -> None:
        """Take what the model has now: callbacks may compile it, and set other parts."""
        self.take_step(kind)
        self.policy.forget()
        with self.strategy.scope():
            self.move_loss_tracker()
        self.move_optimizers()
        self.count_once()

    def run_step(self, kind: str, data: Any) -> Any:
        """Run a step once, on the global batch: what Keras calls for the model's own."""
        jit, is_one = bool(self.model.jit_compile), self.mesh.num_parts == 1
        step = Step(self.mesh, self.policy, batch_norm=self.batch_norm, jit=jit and not is_one)
        data = _global_batches.opened(self.mesh, data)
        with traced_once(step, data), contextlib.ExitStack() as stack:
            if jit and is_one:  # XLA draws several axes in another order
                count = _global_batches.examples_in_batch(data)
                stack.enter_context(step.at(0, count, count))
            return self.steps_of_model[kind](data)


def _of_kind(method: Callable, kind: str) -> Callable:
    """Return a method for one kind of steps: no `partial`, whose code would be nobody's."""
    return lambda *args, **kwargs: method(kind, *args, **kwargs)


def _exact(model: keras.Model, method: Callable, strategy: tf.distribute.Strategy) -> Callable:
    """Have Keras spread datasets as `_global_batches` does: it asks the strategy, which asks there.

    They are checked: single examples are a bare `IndexError` in `tf.distribute`, others no end. Of
    several processes the first one alone writes and reports.
    """
    several = _global_batches.spans_processes(strategy)
    distribute = functools.partial(_global_batches.global_batches, strategy)
    distributing = functools.partial(
        _keras_internals.replaced, strategy, "experimental_distribute_dataset", distribute
    )

    number_of_steps = "steps_per_epoch" if method.__name__ == "fit" else "steps"

    @functools.wraps(method)
    def exact(*args: Any, **settings: Any) -> Any:
        settings = _callbacks.settings_of_this_process(settings) if several else settings
        try:
            given = inspect.signature(method).bind(*args, **settings).arguments | settings
        except TypeError:  # as the method will say
            given = {}
        held_out, steps = given.get("validation_data"), given.get("validation_steps")
        _checks.check_dataset("validation_data", held_out, validation_steps=steps)
        steps = given.get(number_of_steps)
        _checks.check_dataset("x", given.get("x"), **{number_of_steps: steps})
        explained = processes.explain_lost_process() if several else contextlib.nullcontext()
        with explained, distributing(), _patches.installed():
            try:
                return method(*args, **settings)
            finally:
                _optimizers.copy_state(model)

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
