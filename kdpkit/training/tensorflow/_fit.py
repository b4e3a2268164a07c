"""`replica_exact` on TensorFlow: the steps that replace those of Keras under a strategy."""

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdpkit._internal import checks, held_variables, optimizers, processes
from kdpkit.training import _callbacks
from kdpkit.training.tensorflow import (
    _checks,
    _global_batches,
    _keras_internals,
    _metrics,
    _optimizers,
    _patches,
    _placeholders,
    _servers,
    _tpu_steps,
)
from kdpkit.training.tensorflow._step import Mesh
from kdpkit.training.tensorflow._tracing import in_place_of_replicas, run_once
from kdpkit.training.tensorflow.partition._dividing import sentence_of_whole

_KINDS = ("train", "test", "predict")


def attach(model: keras.Model) -> None:
    """Make a model exact under the strategy that it was built in; without one, leave it."""
    strategy = _strategy_of(model)
    if isinstance(getattr(model._maybe_symbolic_build, "__self__", None), _ExactSteps):
        return
    if strategy is not None:
        for kind in _KINDS:
            name = f"make_{kind}_function"
            if getattr(type(model), name) is not getattr(keras.Model, name):
                checks.fail(
                    "The model compiles its steps itself, so they cannot be run on replicas.",
                    method=f"{type(model).__name__}.{name}",
                    remedy=f"Override `{kind}_step`, which is given a batch, in its place.",
                )
        if _is_asynchronous(strategy) or isinstance(strategy, _tpu_steps.STRATEGIES):
            _checks.reject_states_of_examples(model)
        _ExactSteps(model, strategy).attach()
    else:
        for name in (f"make_{kind}_function" for kind in _KINDS):
            setattr(model, name, functools.partial(_on_one_device, model, getattr(model, name)))


def whole_of(model: keras.Model, batch: Any) -> str:
    """Return in a sentence what one device computes for all in the training of an exact model."""
    steps = model._maybe_symbolic_build.__self__
    if steps.workers or steps.is_on_tpu or steps.mesh.num_parts == 1:
        return ""
    batch = tf.nest.map_structure(tf.convert_to_tensor, batch)
    with in_place_of_replicas(steps.mesh):
        return sentence_of_whole(steps.steps_of_model["train"], batch, steps.mesh.replicated)


def _on_one_device(model: keras.Model, make_function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Make a function of Keras', unless the model was meant for a strategy, which was forgotten."""
    _checks.require_no_strategy("model", model.name)
    return make_function(*args, **kwargs)


def _strategy_of(model: keras.Model) -> Any:
    """Return the strategy that the model and its variables live in; None for one device."""
    strategy = model._distribute_strategy
    if strategy is None and tf.distribute.has_strategy():
        _checks.reject_scope("model", tf.distribute.get_strategy())
    if strategy is None:
        return None
    if not _is_asynchronous(strategy) and not isinstance(strategy, _tpu_steps.STRATEGIES):
        _checks.require_supported(strategy)
    _checks.require_scope("model", model.variables, strategy)
    return strategy


def _runs_eagerly(model: keras.Model) -> bool:
    return model.run_eagerly or tf.config.functions_run_eagerly()


def _is_asynchronous(strategy: tf.distribute.Strategy) -> bool:
    return isinstance(strategy, tf.distribute.ParameterServerStrategy)


class _ExactSteps:
    """The methods that replace a model's, set on the instance only."""

    def __init__(self, model: keras.Model, strategy: tf.distribute.Strategy) -> None:
        self.model, self.strategy, self.mesh = model, strategy, Mesh(strategy)
        self.workers = _servers.Workers(model, strategy) if _is_asynchronous(strategy) else None
        self.is_on_tpu = isinstance(strategy, _tpu_steps.STRATEGIES)
        self.is_users_step: dict[str, bool] = {}
        self.steps_of_model: dict[str, Callable] = {}
        self.replacements: dict[str, Callable] = {}

    def attach(self) -> None:
        """Replace the methods, and forget functions that were compiled from the model's."""
        model = self.model
        for kind in _KINDS:
            self.replace_step(kind)
            setattr(model, f"make_{kind}_function", _of_kind(self.make_function, kind))
            setattr(model, f"{kind}_function", None)
        model._maybe_symbolic_build = self.build
        for name in ("fit", "evaluate", "predict"):
            setattr(model, name, self.exact(getattr(model, name)))

    def replace_step(self, kind: str) -> None:
        """Replace the model's step of a kind, which the user may have set since."""
        name = f"{kind}_step"
        step = getattr(self.model, name)
        if step is not self.replacements.get(kind):
            of_keras = getattr(keras.Model, name)
            self.is_users_step[kind] = getattr(step, "__func__", None) is not of_keras
            self.steps_of_model[kind] = _keras_internals.inlined(step)
            self.replacements[kind] = _of_kind(self.run_step, kind)
            setattr(self.model, name, self.replacements[kind])

    def build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Build model, metrics and optimizer from the dataset's specification, before training.

        Keras averages a first batch over the replicas for this, which is impossible if its parts
        differ in size or are no floats (keras-team/keras#19246), and loses a generator's batch
        (#20394).
        """
        if iterator is not None:  # of `fit`
            spec = iterator._distributed_dataset.element_spec
        else:
            spec = _spec_of(data_batch)
        self.adopt()
        with self.strategy.scope():
            _keras_internals.move_global_seeds(self.strategy)
            if not _runs_eagerly(self.model):  # Its code may need numbers, as on one device.
                self.build_variables(_placeholders.placeholders(spec))
        self.adopt()

    def adopt(self) -> None:
        """Copy what `compile` or callbacks made outside the scope to all devices.

        These are the state of optimizers and Keras' mean of the losses. Metrics count once for all
        devices.
        """
        model = self.model
        for optimizer in optimizers.all_of(model):
            _optimizers.move_into_scope(optimizer, self.strategy)
        tracker = model._loss_tracker
        if tracker is not None and not _checks.is_in_scope(tracker.variables, self.strategy):
            with self.strategy.scope():  # As in `compile` it is none of the model's metrics.
                object.__setattr__(model, "_loss_tracker", keras.metrics.Mean(name="loss"))
        for metric in () if self.is_on_tpu else _metrics.metrics_of(model):
            for variable in metric.variables:
                _metrics.count_once(variable)

    def build_variables(self, data_batch: Any) -> None:
        """Build model, metrics and optimizer; a user's step may use its data differently."""
        model, optimizer = self.model, self.model.optimizer
        if type(model).call is keras.Model.call:  # Only `train_step` uses its layers.
            return
        is_users = self.is_users_step["train"]
        held = held_variables.parts_of_attributes(model._flatten_layers())
        if is_users and any(isinstance(part, tf.Variable) for _, part in held):
            return  # The step may build its optimizer with these variables.
        try:
            if any(map(_placeholders.is_ragged, keras.tree.flatten(data_batch))):
                data = keras.utils.unpack_x_y_sample_weight(data_batch)
                _placeholders.build_for_ragged(model, *data)
            # A user's step builds the optimizer for the variables that it trains.
            is_built_later = is_users and optimizer and not optimizer.built
            with (
                _keras_internals.replaced(optimizer, "built", True)
                if is_built_later
                else contextlib.nullcontext()
            ):
                model._symbolic_build(data_batch=data_batch)
        except (ValueError, TypeError, RuntimeError, IndexError, AttributeError):
            if not is_users:
                raise

    def make_function(self, kind: str, force: bool = False) -> None:
        """Compile a step as Keras does, but so that it runs once for all replicas."""
        model, name = self.model, f"{kind}_function"
        if getattr(model, name) is not None and not force:
            return
        self.update(kind)
        if self.workers:
            step, is_users = self.steps_of_model[kind], self.is_users_step[kind]
            setattr(model, name, self.workers.function(kind, step, is_users=is_users))
            return
        if kind == "train" and self.is_on_tpu:
            _tpu_steps.warn_of_local_statistics(model, self.strategy.num_replicas_in_sync)
        with _keras_internals.replaced(model, "_jit_compile", False):
            getattr(type(model), f"make_{kind}_function")(model, force=True)
        compiled = getattr(model, name)

        def function(batches: Any) -> Any:
            if model.run_eagerly:  # Callbacks may change the model before each step.
                self.update(kind)
            with (
                _tpu_steps.added_up(model, is_users=self.is_users_step[kind])
                if self.is_on_tpu
                else _keras_internals.once_for_all_replicas(self.strategy),
                _global_batches.explaining_differences(),
            ):
                return compiled(batches)

        setattr(model, name, function)

    def update(self, kind: str) -> None:
        """Use what the model has now: callbacks may compile it, and set other parts."""
        self.replace_step(kind)
        self.adopt()

    def run_step(self, kind: str, data: Any) -> Any:
        """Run a step once, on the global batch: what Keras calls for the model's own.

        On a TPU Keras calls it in each replica.
        """
        step = self.steps_of_model[kind]
        if self.is_on_tpu:
            return _tpu_steps.run_step(step, data)
        data = _global_batches.checked_batch(self.mesh, data)
        function = step
        if kind == "train" and not self.is_users_step[kind]:  # Keras' step updates once.
            optimizer = self.model.optimizer
            function = _keras_internals.with_one_learning_rate(optimizer, function)
        return run_once(self.mesh, function, data, jit=bool(self.model.jit_compile))

    def exact(self, method: Callable) -> Callable:
        """Return `fit`, `evaluate` or `predict` on the global batches of a checked dataset.

        Keras asks the strategy to distribute a dataset, and the strategy asks `_global_batches`,
        except on a TPU. Of several processes only the first writes and reports.
        """
        strategy = self.strategy
        spans_processes = _global_batches.spans_processes(strategy)
        distribute: Any = functools.partial(_global_batches.global_batches, strategy)
        if self.is_on_tpu:
            distribute = strategy.experimental_distribute_dataset
        number_of_steps = "steps_per_epoch" if method.__name__ == "fit" else "steps"

        @functools.wraps(method)
        def exact(*args: Any, **settings: Any) -> Any:
            if spans_processes:
                settings = _callbacks.settings_of_this_process(settings)
            try:
                arguments = inspect.signature(method).bind(*args, **settings).arguments | settings
            except TypeError:  # which the method raises below
                arguments = {}
            for name, steps in (("x", number_of_steps), ("validation_data", "validation_steps")):
                _checks.check_dataset(name, arguments.get(name), **{steps: arguments.get(steps)})
            with (
                processes.explain_lost_process() if spans_processes else contextlib.nullcontext(),
                self.workers.running() if self.workers else contextlib.nullcontext(),
                _keras_internals.replaced(strategy, "experimental_distribute_dataset", distribute),
                _patches.installed(),
            ):
                try:
                    return method(*args, **settings)
                finally:
                    _optimizers.copy_state(optimizers.all_of(self.model))

        return exact


def _of_kind(method: Callable, kind: str) -> Callable:
    """Return a method for one kind of step, as a function: a `partial` has no code of its own."""
    return lambda *args, **kwargs: method(kind, *args, **kwargs)


def _spec_of(batch: Any) -> Any:
    def spec(leaf: Any) -> Any:
        if leaf is None:
            return None
        if tf.is_tensor(leaf):
            return tf.type_spec_from_value(leaf)
        array = np.asarray(leaf)
        return tf.TensorSpec(array.shape, tf.string if array.dtype.kind in "OSU" else array.dtype)

    return tf.nest.map_structure(spec, batch)
