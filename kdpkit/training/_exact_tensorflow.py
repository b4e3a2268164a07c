"""`replica_exact` on TensorFlow: the steps that stand in for those of Keras under a strategy."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdpkit import _checks, _processes, _versions, scaling
from kdpkit.training import (
    _attachments,
    _batch_norm,
    _callbacks,
    _keras_internals,
    _layer_state,
    _workers,
)
from kdpkit.training._objective import refuse_pairwise
from kdpkit.training._step import ReplicaStep, running

_STRATEGIES = (
    tf.distribute.OneDeviceStrategy,
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
)
_INSTEAD = "write the step as `TrainingLoop.per_example_loss`"


def attach(model: Any) -> None:
    """Make a model exact under the strategy that it was built in; without one, leave it."""
    strategy = _strategy_of(model)
    if strategy is not None and not isinstance(_owner(model.train_step), _ExactSteps):
        _keras_internals.install()
        _keras_internals.prefer_one_device_sums(strategy)
        if strategy.num_replicas_in_sync > 1:
            _layer_state.refuse_states_of_rows(model)
        _ExactSteps(model, strategy).attach()


def _strategy_of(model: Any) -> Any:
    """Give the strategy that the model and its variables live in; None for one device."""
    strategy = model._distribute_strategy
    if strategy is None and tf.distribute.has_strategy():
        _checks.refuse(
            "The model was built outside the strategy's scope, so it has one device only. Build "
            "it inside `with strategy.scope():`.",
            strategy=type(tf.distribute.get_strategy()).__name__,
        )
    if strategy is None:
        return None
    if not isinstance(strategy, _STRATEGIES):
        _checks.refuse(
            "Keras cannot `fit` under this strategy; use MirroredStrategy or "
            "MultiWorkerMirroredStrategy, or `kdpkit.training.TrainingLoop`.",
            strategy=type(strategy).__name__,
        )
    for variable in model.variables:
        if not strategy.extended.variable_created_in_scope(variable.value):
            _checks.refuse(
                "A variable of the model was created outside the strategy's scope. Build all "
                "layers inside `with strategy.scope():`.",
                variable=variable.path,
                strategy=type(strategy).__name__,
            )
    return strategy


class _ExactSteps:
    """The methods that stand in for a model's own, set on the instance alone."""

    def __init__(self, model: Any, strategy: Any) -> None:
        self.model = model
        self.strategy = strategy
        stock = keras.Model.train_step
        self.own_train_step = getattr(model.train_step, "__func__", None) is not stock
        self.train_step_of_model = _without_function(model.train_step)
        self.test_step_of_model = _without_function(model.test_step)
        self.predict_step_of_model = _without_function(model.predict_step)
        self.batch_norms: list[Any] = []
        self.warned = False

    def attach(self) -> None:
        """Put the methods in place, and forget functions compiled from the model's own."""
        model = self.model
        model.train_step = self.train_step
        model.test_step = self.test_step
        model.predict_step = self.predict_step
        model._maybe_symbolic_build = self.build
        for name in ("fit", "evaluate", "predict"):
            method = _refusing_unbatched(getattr(model, name))
            if _workers.spans_processes(self.strategy):
                method = _with_other_processes(method, self.strategy)
            setattr(model, name, method)
        model.make_train_function = lambda force=False: self.make_function("train", force)
        model.make_test_function = lambda force=False: self.make_function("test", force)
        model.make_predict_function = lambda force=False: self.make_function("predict", force)
        model.train_function = model.test_function = model.predict_function = None

    def build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Build model, metrics and optimizer from the dataset's specification, before training.

        Keras averages a first batch over the replicas for this: impossible if its pieces differ in
        size or are no floats, and lost if a generator gave it.
        """
        model = self.model
        if model.jit_compile and self.strategy.num_replicas_in_sync > 1:
            _checks.refuse(
                "XLA cannot compile a step of several replicas as one; compile the model with "
                "`jit_compile=False`, or use `kdpkit.training.TrainingLoop(..., jit=True)`.",
                jit_compile=model.jit_compile,
            )
        for optimizer in _attachments.optimizers_of(model):
            _attachments.attach_to_optimizer(optimizer, self.strategy)
        if iterator is not None:
            specs = iterator._distributed_dataset.element_spec
            data_batch = tf.nest.map_structure(_symbolic, _workers.specs_of(specs))
        with self.strategy.scope():
            if type(model).call is not keras.Model.call:  # else only `train_step` uses its parts
                model._symbolic_build(data_batch=data_batch)
        for metric in model.metrics:
            _attachments.attach_to_metric(metric)
        if self.strategy.num_replicas_in_sync > 1:
            _versions.refuse_sums_over_rows(model)
            _layer_state.attach(model)
            for loss in keras.tree.flatten(model.loss):
                refuse_pairwise(loss)
        self.batch_norms = _batch_norm.batch_norm_layers(model)
        for layer in self.batch_norms:
            if layer.synchronized and "_moments" not in vars(layer):
                _batch_norm.attach_to_synchronized(layer)

    def make_function(self, kind: str, force: bool) -> None:
        """Compile a step as Keras does, and cut batches that would reach every replica whole."""
        model, name = self.model, f"{kind}_function"
        if getattr(model, name) is not None and not force:
            return
        getattr(type(model), f"make_{name}")(model, force=force)
        compiled = getattr(model, name)

        def function(batches: Any) -> Any:
            with self.keys_for_loops():
                logs = compiled(_split_whole_batches(batches, self.strategy))
            _workers.refuse_differences()
            return logs

        setattr(model, name, function)

    def keys_for_loops(self) -> contextlib.AbstractContextManager[None]:
        """Let collectives run inside the loop that `steps_per_execution` compiles."""
        if self.model.steps_per_execution > 1:
            return _keras_internals.constant_collective_keys()
        return contextlib.nullcontext()

    def train_step(self, data: Any) -> Any:
        share_in_loss = not self.own_train_step or _attachments.scales_loss(self.model.optimizer)
        with running(ReplicaStep(data, share_in_loss=share_in_loss)) as step:
            logs = self.train_step_of_model(step.data)
            self.check(step)
            if step.replicas > 1:
                self.warn_once(step.replicas)
                _layer_state.average(step)
            return step.whole(logs)

    def test_step(self, data: Any) -> Any:
        with running(ReplicaStep(data)) as step:
            return step.whole(self.test_step_of_model(step.data))

    def predict_step(self, data: Any) -> Any:
        with running(ReplicaStep(data)) as step:
            return self.predict_step_of_model(step.data)

    def check(self, step: ReplicaStep) -> None:
        """Refuse a step that trained around what makes it exact."""
        if step.replicas == 1 or not self.model.trainable_weights:
            return
        if not step.applied_gradients:
            _checks.refuse(
                "`train_step` applied no gradients with an optimizer that an attribute of the "
                f"model holds. Use `self.optimizer.apply`, or {_INSTEAD}.",
                model=type(self.model).__name__,
            )
        if not step.saw_a_loss:
            _checks.refuse(
                "The step computes its loss without `self.compute_loss` and without a loss of "
                "`keras.losses`, so nobody can tell whether it is a mean over rows or a sum. Use "
                f"one of these, or {_INSTEAD}.",
                model=type(self.model).__name__,
            )

    def warn_once(self, replicas: int) -> None:
        if not self.warned:
            self.warned = True
            _batch_norm.warn_of_local_statistics(self.batch_norms, replicas)


def _owner(method: Any) -> Any:
    return getattr(method, "__self__", None)


def _refusing_unbatched(method: Callable) -> Callable:
    """Refuse a dataset of single examples, which `tf.distribute` meets with a bare `IndexError`."""

    @functools.wraps(method)
    def checked(x: Any = None, *args: Any, **kwargs: Any) -> Any:
        for dataset in (x, kwargs.get("validation_data")):
            check(dataset)
        return method(x, *args, **kwargs)

    def check(x: Any) -> None:
        if isinstance(x, tf.data.Dataset):
            for spec in tf.nest.flatten(x.element_spec):
                if getattr(spec, "shape", tf.TensorShape(None)).rank == 0:
                    _checks.refuse(
                        "The dataset gives single examples; batch it with `.batch(...)` first.",
                        element_spec=x.element_spec,
                    )

    return checked


def _with_other_processes(method: Callable, strategy: Any) -> Callable:
    """Let every process take its rows of the data, and the first one alone write and report."""

    @functools.wraps(method)
    def shared(*args: Any, **settings: Any) -> Any:
        settings = _callbacks.settings_of_this_process(settings)
        with _processes.naming_losses(), _distributing_rows(strategy):
            return method(*args, **settings)

    return shared


@contextlib.contextmanager
def _distributing_rows(strategy: Any) -> Iterator[None]:
    """Have Keras spread datasets by their rows: it asks the strategy, in which we stand in."""
    name = "experimental_distribute_dataset"
    if name in vars(strategy):  # validation, inside `fit`
        yield
        return
    setattr(strategy, name, lambda dataset: _workers.distribute(strategy, dataset))
    try:
        yield
    finally:
        delattr(strategy, name)


def _without_function(step: Any) -> Callable:
    """Take `@tf.function` off a step: inside a function of its own no replicas can meet."""
    return getattr(step, "python_function", step)


def _symbolic(spec: Any) -> Any:
    """Give Keras' placeholder for one replica's part of a dataset's element."""
    spec = getattr(spec, "_value_specs", (spec,))[0]
    if not hasattr(spec, "shape") or isinstance(spec, tf.OptionalSpec):
        return None
    return keras.KerasTensor(
        spec.shape,
        spec.dtype.name,
        sparse=isinstance(spec, tf.SparseTensorSpec),
        ragged=isinstance(spec, tf.RaggedTensorSpec),
    )


def _split_whole_batches(batches: Any, strategy: Any) -> Any:
    """Cut the batches of `train_on_batch` and its like; those of a dataset are cut already."""
    if isinstance(batches, tf.data.Iterator | tf.distribute.DistributedIterator):
        return batches
    pieces: Iterator[Any] = (_split(batch, strategy) for batch in batches)
    return [*pieces] if isinstance(batches, list) else pieces


def _is_spread(leaf: Any) -> bool:
    return isinstance(leaf, tf.distribute.DistributedValues)


def _split(batch: Any, strategy: Any) -> Any:
    leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
    if not all(np.ndim(leaf) for leaf in leaves if not _is_spread(leaf)):
        _checks.refuse("A batch must consist of arrays with rows; make them with `np.array`.")
    replicas = strategy.num_replicas_in_sync
    if replicas == 1 or _is_spread(leaves[0]):
        return batch
    sizes = scaling.split_batch(len(leaves[0]), replicas)
    starts = [sum(sizes[:replica]) for replica in range(replicas)]

    def split(leaf: Any) -> Any:
        if leaf is None:
            return None
        tensor = tf.convert_to_tensor(leaf)
        pieces = [tensor[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        return strategy.experimental_distribute_values_from_function(
            lambda context: pieces[_workers.piece_of(strategy, context.replica_id_in_sync_group)]
        )

    return keras.tree.map_structure(split, batch)
