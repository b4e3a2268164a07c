"""`replica_exact` on TensorFlow: the steps that stand in for those of Keras under a strategy."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdpkit import errors, scaling
from kdpkit._internal import checks, error_text, held_variables, processes, versions
from kdpkit.training import _callbacks
from kdpkit.training.tensorflow import (
    _batch_norm,
    _global_batch,
    _keras_internals,
    _layer_state,
    _metric_patches,
    _no_examples,
    _optimizer_patches,
    _placeholders,
    _shards,
    _step_patches,
    _workers,
    _xla_call,
)
from kdpkit.training.tensorflow._step import ReplicaStep, current_step, running
from kdpkit.training.tensorflow._verification import Verification

_STRATEGIES = (
    tf.distribute.OneDeviceStrategy,
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
)


def attach(model: keras.Model, *, verify: bool, batch_norm: str) -> None:
    """Make a model exact under the strategy that it was built in; without one, leave it."""
    strategy = _strategy_of(model)
    steps = _owner(model.train_step)
    if isinstance(steps, _ExactSteps):
        steps.verify, steps.batch_norm = verify, batch_norm
    elif strategy is not None:
        _reject_own_loops(model)
        _step_patches.install()
        _keras_internals.prefer_one_device_sums(strategy)
        if strategy.num_replicas_in_sync > 1:
            _layer_state.reject_states_of_examples(model)
        _ExactSteps(model, strategy, verify=verify, batch_norm=batch_norm).attach()


def _strategy_of(model: keras.Model) -> Any:
    """Return the strategy that the model and its variables live in; None for one device."""
    strategy = model._distribute_strategy
    if strategy is None and tf.distribute.has_strategy():
        checks.fail(
            "The model was built outside the strategy's scope, so it has one device only. Build "
            "it inside `with strategy.scope():`.",
            strategy=type(tf.distribute.get_strategy()).__name__,
        )
    if strategy is None:
        return None
    if not isinstance(strategy, _STRATEGIES):
        checks.fail(
            "Keras cannot `fit` under this strategy; use MirroredStrategy or "
            "MultiWorkerMirroredStrategy, or `kdpkit.training.TrainingLoop`.",
            strategy=type(strategy).__name__,
        )
    for variable in model.variables:
        if not strategy.extended.variable_created_in_scope(variable.value):
            checks.fail(
                "A variable of the model was created outside the strategy's scope. Build all "
                "layers inside `with strategy.scope():`.",
                variable=variable.path,
                strategy=type(strategy).__name__,
            )
    return strategy


def _reject_own_loops(model: keras.Model) -> None:
    """Reject a model that compiles its steps itself: its replicas would run something else."""
    for kind in ("train", "test", "predict"):
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
        self, model: keras.Model, strategy: tf.distribute.Strategy, *, verify: bool, batch_norm: str
    ) -> None:
        self.model = model
        self.strategy = strategy
        self.verify = verify
        self.batch_norm = batch_norm
        self.verified: set[tuple[str, str]] = set()  # kinds of steps, of batches of a structure
        self.seen: dict[str, Any] = {}  # the specification of what each kind had last
        self.divides: dict[str, Callable] = {}  # layers, in steps that run on the global batch
        stock = keras.Model.train_step
        self.own_train_step = getattr(model.train_step, "__func__", None) is not stock
        self.train_step_of_model = _keras_internals.inlined(model.train_step)
        self.test_step_of_model = _keras_internals.inlined(model.test_step)
        self.predict_step_of_model = _keras_internals.inlined(model.predict_step)
        self.warned = False

    def attach(self) -> None:
        """Put the methods in place, and forget functions compiled from the model's own."""
        model = self.model
        model.train_step = self.train_step
        model.test_step = self.test_step
        model.predict_step = self.predict_step
        model._maybe_symbolic_build = self.build
        for name in ("fit", "evaluate", "predict"):
            method = _distributing_examples(self.strategy)(_checking_data(getattr(model, name)))
            if _workers.spans_processes(self.strategy):
                method = _with_other_processes(method)
            setattr(model, name, method)
        model.make_train_function = lambda force=False: self.make_function("train", force)
        model.make_test_function = lambda force=False: self.make_function("test", force)
        model.make_predict_function = lambda force=False: self.make_function("predict", force)
        model.train_function = model.test_function = model.predict_function = None

    def build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Build model, metrics and optimizer from the dataset's specification, before training.

        Keras averages a first batch over the replicas for this: impossible if its shards differ in
        size or are no floats (keras-team/keras#19246), and lost if a generator gave it (#20394).
        """
        model = self.model
        several = self.strategy.num_replicas_in_sync > 1
        if several and model.jit_compile:
            _xla_call.compile_call(model, self.global_batch_norms())
        for optimizer in _optimizer_patches.optimizers_of(model):
            _optimizer_patches.attach_to_optimizer(optimizer, self.strategy)
        if iterator is not None:
            specs = iterator._distributed_dataset.element_spec
            data_batch = _placeholders.placeholders(_workers.specs_of(specs))
        with self.strategy.scope():
            _keras_internals.move_global_seeds(self.strategy)
            self.move_loss_tracker()
            self.build_variables(data_batch)
        if _workers.spans_processes(self.strategy):
            self.check_metrics()
        for metric in model.metrics:
            _metric_patches.attach_to_metric(metric)
        if several:
            versions.reject_sums_over_examples(model)
            model._aggregate_additional_loss = self.additional_loss
            _layer_state.attach(model, without=self.global_batch_norms())
            for layer in _batch_norm.batch_norm_layers(model):
                _batch_norm.attach(layer, self.batch_norm)

    def move_loss_tracker(self) -> None:
        """Have the loss counted in the scope, outside of which `compile` may have been called."""
        tracker = self.model._loss_tracker
        if tracker is not None and not self.is_in_scope(tracker):
            # As in `compile`, it must not become one of the model's own metrics.
            object.__setattr__(self.model, "_loss_tracker", keras.metrics.Mean(name="loss"))

    def check_metrics(self) -> None:
        """Raise an error if a metric would count the examples of each process by itself."""
        for metric in self.model.metrics:
            for part in getattr(metric, "metrics", [metric]):
                if not self.is_in_scope(part):
                    checks.fail(
                        "A metric was created outside the strategy's scope, so each process would "
                        "count its own examples. Create it inside `with strategy.scope():`, or "
                        "pass its name to `compile`.",
                        metric=part.name,
                    )

    def is_in_scope(self, metric: keras.metrics.Metric) -> bool:
        """Return whether a metric's variables are the strategy's."""
        is_of_strategy = self.strategy.extended.variable_created_in_scope
        return all(is_of_strategy(variable.value) for variable in metric.variables)

    def build_variables(self, data_batch: Any) -> None:
        """Build model, metrics and optimizer; a step of one's own may take its data otherwise."""
        model = self.model
        if type(model).call is keras.Model.call:  # only `train_step` uses its parts
            return
        if self.own_train_step and any(held_variables.variables_in_attributes(model)):
            return  # its optimizer may be built with these
        try:
            if any(map(_placeholders.is_ragged, keras.tree.flatten(data_batch))):
                data = keras.utils.unpack_x_y_sample_weight(data_batch)
                _placeholders.build_for_ragged(model, *data)
            model._symbolic_build(data_batch=data_batch)
        except (ValueError, TypeError, RuntimeError, IndexError, AttributeError) as error:
            if not self.own_train_step:  # else it takes its data otherwise, and builds them
                _explain_fixed_size(error, data_batch)
                raise

    def global_batch_norms(self) -> list[Any]:
        """List the BatchNormalization layers whose statistics are those of the global batch."""
        layers = _batch_norm.batch_norm_layers(self.model)
        return [
            layer for layer in layers if self.batch_norm == _batch_norm.GLOBAL or layer.synchronized
        ]

    def additional_loss(self, loss: Any) -> Any:
        """Aggregate what `add_loss` was given, as Keras does: vectors are summed."""
        step = current_step()
        total = type(self.model)._aggregate_additional_loss(self.model, loss)
        if step is None or step.replicas == 1 or step.own is not None:
            return total
        if loss.shape.rank and step.counts_examples(loss):
            total = step.quotient(total, 1)
        step.note_loss(_layer_state.name_of_loss(self.model, loss), total)
        return total

    def make_function(self, kind: str, force: bool) -> None:
        """Compile a step as Keras does, and cut batches that would reach every replica uncut."""
        model, name = self.model, f"{kind}_function"
        if getattr(model, name) is not None and not force:
            return
        # It may be compiled with another loss.
        self.verified = {verified for verified in self.verified if verified[0] != kind}
        self.divides.pop(kind, None)
        self.seen.pop(kind, None)
        with self.without_xla():
            getattr(type(model), f"make_{name}")(model, force=force)
        compiled = getattr(model, name)

        def function(batches: Any) -> Any:
            with _no_examples.guarded_operations(), _step_patches.inlined_functions():
                batches = _split_global_batches(batches, self.strategy)
                batches = self.verified_batches(kind, batches)
                with self.keys_for_loops(), self.gradients_of(kind):
                    logs = compiled(batches)
            _workers.reject_differences()
            return logs

        setattr(model, name, function)

    @contextlib.contextmanager
    def without_xla(self) -> Iterator[None]:
        """Have Keras not compile the step of all replicas as one: keras-team/keras#19005."""
        model = self.model
        asked = model.jit_compile
        if self.strategy.num_replicas_in_sync > 1:
            model._jit_compile = False
        try:
            yield
        finally:
            model._jit_compile = asked

    def verified_batches(self, kind: str, batches: Any) -> Any:
        """Verify a step before its first use; return batches that begin as those passed."""
        if not self.verify or self.strategy.num_replicas_in_sync == 1:
            return batches
        is_iterator = isinstance(batches, tf.distribute.DistributedIterator)
        if is_iterator and batches.element_spec is self.seen.get(kind):
            return batches
        if is_iterator and not self.needs_verification(kind, batches.element_spec):
            self.seen[kind] = batches.element_spec
            return batches
        at_once = self.model.steps_per_execution
        taken = batches if kind == "predict" else [*itertools.islice(batches, at_once)]
        if not taken:
            checks.fail("The dataset gives no batch, so there is nothing to compute.")
        spec = batches.element_spec if is_iterator else taken[0]
        if self.needs_verification(kind, spec):
            self.verify_step(kind, taken[0])
            self.verified.add((kind, _structure_of(spec)))
        return _shards.iterator_of(self.strategy, taken, spec) if is_iterator else taken

    def verify_step(self, kind: str, batch: Any) -> None:
        """Verify a step; have it run on the global batch if that makes it exact."""
        run, eager = self.trials[kind], self.model.run_eagerly
        verification = Verification(self.strategy, run, self.model, eager=eager)
        try:
            _optimizer_patches.finding_optimizers(self.strategy, lambda: verification.check(batch))
        except errors.VerificationError as error:
            if not self.is_exact_on_global_batch(kind, verification, batch):
                raise
            _global_batch.report(error.problem)
            return
        finally:
            if verification.calls_python or (eager and not self.is_stock(kind)):
                _global_batch.report_python()
        if eager and not self.is_stock(kind):
            verification.problem = "The step runs eagerly, where no graph shows what it may do"
        # Of the step on its own examples; running it on the global batch may find others.
        hidden, problem = verification.hidden, verification.problem
        needs_examples = verification.needs_examples
        if hidden is None:
            return
        if self.is_exact_on_global_batch(kind, verification, batch):
            _global_batch.report(hidden)
            return
        if needs_examples:
            _shards.check_every_replica_has_examples(self.strategy, batch)
        if problem is not None:
            _global_batch.report_doubt(problem)

    def is_exact_on_global_batch(self, kind: str, verification: Verification, batch: Any) -> bool:
        """Have a step run on the global batch, and return whether it is exact then."""
        _global_batch.attach(self.model)
        # A user's layer may do what the examples do not show, too.
        first = int(bool(verification.hidden))
        if not verification.on_one:  # nothing to compare with: the whole step in every replica
            first = -1
        for divides in _global_batch.DIVISIONS[first:]:
            self.divides[kind] = divides
            # Whatever goes wrong there, the caller reports what made it try.
            with contextlib.suppress(Exception), self.gradients_of(kind):
                if not verification.differences(batch):
                    return True
        self.divides.pop(kind, None)
        return False

    def gradients_of(self, kind: str) -> contextlib.AbstractContextManager[None]:
        """Have tapes give a step on the global batch the gradients of that."""
        if kind in self.divides:
            return _step_patches.gradients_of_steps()
        return contextlib.nullcontext()

    def needs_verification(self, kind: str, batch: Any) -> bool:
        """Return whether a step is to be verified now, for batches of a structure.

        What `fit` verified of Keras' own steps, layers and metrics holds for `evaluate` and
        `predict` too, if it needed no global batch.
        """
        structure = _structure_of(batch)
        if (kind, structure) in self.verified:
            return False
        is_own = not self.is_stock(kind)
        is_trained = any(of == "train" for of, _ in self.verified)
        is_seen = is_trained and "train" not in self.divides
        return (
            kind == "train"
            or is_own
            or not is_seen
            or not _global_batch.is_all_of_libraries(self.model)
        )

    def is_stock(self, kind: str) -> bool:
        """Return whether a step is Keras' own."""
        function = getattr(getattr(self, f"{kind}_step_of_model"), "__func__", None)
        return function is getattr(keras.Model, f"{kind}_step")

    @property
    def trials(self) -> dict[str, Any]:
        """What tries each kind of step, for verification."""
        return {
            "train": self.trial_of("train", self.run_train_step),
            "test": self.trial_of("test", self.run_test_step),
            "predict": self.trial_of("predict", self.run_predict_step, join=True),
        }

    def trial_of(
        self, kind: str, run: Callable[[ReplicaStep], Any], *, join: bool = False
    ) -> Callable:
        """Return what tries a step on shards of some examples."""

        def try_step(shard: Callable[[], Any], trial: Any) -> Any:
            outputs = self.strategy.run(lambda: run(self.step_of(shard(), kind, trial=trial)))
            if not join:
                return outputs
            return keras.tree.map_structure(
                lambda output: tf.concat(self.strategy.experimental_local_results(output), 0),
                outputs,
            )

        return try_step

    def keys_for_loops(self) -> contextlib.AbstractContextManager[None]:
        """Let collectives run inside the loop that `steps_per_execution` compiles."""
        if self.model.steps_per_execution > 1:
            return _keras_internals.constant_collective_keys()
        return contextlib.nullcontext()

    def step_of(self, data: Any, kind: str, *, trial: Any = None) -> ReplicaStep:
        """Return the step of a replica that has these examples."""
        share_in_loss = not self.own_train_step or _optimizer_patches.scales_loss(
            self.model.optimizer
        )
        _layer_state.keep_tensors_apart(self.model)
        step = ReplicaStep(data, share_in_loss=share_in_loss, trial=trial)
        # Under XLA by position on one replica too: it draws other numbers for other shapes.
        step.is_part |= bool(self.model.jit_compile)
        if kind in self.divides:
            return _global_batch.step_on_global_batch(step, self.divides[kind])
        return step

    def train_step(self, data: Any) -> Any:
        return self.run_train_step(self.step_of(data, "train"))

    def test_step(self, data: Any) -> Any:
        return self.run_test_step(self.step_of(data, "test"))

    def predict_step(self, data: Any) -> Any:
        return self.run_predict_step(self.step_of(data, "predict"))

    def run_train_step(self, step: ReplicaStep) -> Any:
        with running(step):
            logs = self.train_step_of_model(step.data)
            if step.replicas > 1:
                self.warn_once(step.replicas)
                _layer_state.average(step)
            return step.global_values(logs)

    def run_test_step(self, step: ReplicaStep) -> Any:
        with running(step):
            return step.global_values(self.test_step_of_model(step.data))

    def run_predict_step(self, step: ReplicaStep) -> Any:
        with running(step):
            outputs = self.predict_step_of_model(step.data)
            step.note_roots(outputs)
            return _global_batch.own_part(step, outputs)

    def warn_once(self, replicas: int) -> None:
        if not self.warned:
            self.warned = True
            if self.batch_norm == _batch_norm.REPLICA:
                layers = _batch_norm.batch_norm_layers(self.model)
                _batch_norm.warn_of_local_statistics(layers, replicas)


def _owner(method: Any) -> Any:
    return getattr(method, "__self__", None)


def _checking_data(method: Callable) -> Callable:
    """Check datasets: single examples are a bare `IndexError` in `tf.distribute`, others no end."""

    @functools.wraps(method)
    def checked(x: Any = None, *args: Any, **settings: Any) -> Any:
        steps = settings.get("steps_per_epoch", settings.get("steps"))
        _check_dataset("steps_per_epoch", x, steps)
        held_out, held_out_steps = (settings.get(f"validation_{of}") for of in ("data", "steps"))
        _check_dataset("validation_steps", held_out, held_out_steps)
        return method(x, *args, **settings)

    return checked


def _check_dataset(name: str, dataset: Any, steps: Any) -> None:
    if not isinstance(dataset, tf.data.Dataset):
        return
    unknown = tf.TensorShape(None)
    shapes = [getattr(spec, "shape", unknown) for spec in tf.nest.flatten(dataset.element_spec)]
    ranks = [shape.rank for shape in shapes]
    if 0 in ranks and any(shape.rank and shape[0] is None for shape in shapes):
        checks.fail(
            "The dataset gives single numbers beside batches, and replicas get parts of batches.",
            element_spec=dataset.element_spec,
            remedy="Repeat what is one number for a batch for each of its examples.",
        )
    if 0 in ranks:
        checks.fail(
            "The dataset gives single examples; batch it with `.batch(...)` first.",
            element_spec=dataset.element_spec,
        )
    if steps is None and int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
        checks.fail(
            "The dataset is endless.",
            **{name: steps},
            remedy=f"Say with `{name}` how much to take.",
        )


def _with_other_processes(method: Callable) -> Callable:
    """Let every process take its examples of the data, and the first one alone write and report."""

    @functools.wraps(method)
    def shared(*args: Any, **settings: Any) -> Any:
        settings = _callbacks.settings_of_this_process(settings)
        with processes.naming_losses():
            return method(*args, **settings)

    return shared


@contextlib.contextmanager
def _distributing_examples(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Have Keras spread datasets as `_workers` does: it asks the strategy, which asks there."""
    name = "experimental_distribute_dataset"
    if name in vars(strategy):  # validation, inside `fit`
        yield
        return
    setattr(strategy, name, lambda dataset: _workers.distribute(strategy, dataset))
    try:
        with _keras_internals.untuned_buffers():
            yield
    finally:
        delattr(strategy, name)


def _structure_of(batch: Any) -> str:
    """Describe the parts of a batch, or of what specifies it: others are another step's."""

    def describe(leaf: Any) -> str:
        part = getattr(leaf, "_value_specs", getattr(leaf, "values", (leaf,)))
        part = part[0] if isinstance(part, tuple) else leaf
        return f"{type(part).__name__} {getattr(part, 'dtype', None)} {len(part.shape or ())}"

    return str(tf.nest.map_structure(lambda leaf: None if leaf is None else describe(leaf), batch))


def _split_global_batches(batches: Any, strategy: tf.distribute.Strategy) -> Any:
    """Cut the batches of `train_on_batch` and its like; those of a dataset are cut already."""
    if isinstance(batches, tf.data.Iterator | tf.distribute.DistributedIterator):
        return batches
    shards: Iterator[Any] = (_split(batch, strategy) for batch in batches)
    return [*shards] if isinstance(batches, list) else shards


def _explain_fixed_size(error: Exception, data_batch: Any) -> None:
    """Raise a sentence where a model does not take the examples of a replica."""
    specs = [part for part in keras.tree.flatten(data_batch) if part is not None]
    if "Dimensions must be equal" in str(error):
        checks.fail(
            "The model takes batches of one size, and each replica gets a part of a batch.",
            error=error_text.first_line(error),
            batch=[tuple(part.shape) for part in specs],
            remedy="Let it take any number of examples, and keep no state for each of them.",
        )


def _is_spread(leaf: Any) -> bool:
    return isinstance(leaf, tf.distribute.DistributedValues)


def _split(batch: Any, strategy: tf.distribute.Strategy) -> Any:
    leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
    if not all(np.ndim(leaf) for leaf in leaves if not _is_spread(leaf)):
        checks.fail("A batch must consist of arrays with examples; make them with `np.array`.")
    replicas = strategy.num_replicas_in_sync
    if replicas == 1 or _is_spread(leaves[0]):
        return batch
    sizes = scaling.split_batch(len(leaves[0]), replicas)
    starts = [sum(sizes[:replica]) for replica in range(replicas)]

    def split(leaf: Any) -> Any:
        if leaf is None:
            return None
        # What is no `ndarray` TensorFlow takes without a copy, and would then write into.
        tensor = leaf if tf.is_tensor(leaf) else tf.convert_to_tensor(np.asarray(leaf))
        shards = [tensor[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        return strategy.experimental_distribute_values_from_function(
            lambda context: shards[_workers.shard_of(strategy, context.replica_id_in_sync_group)]
        )

    return keras.tree.map_structure(split, batch)
