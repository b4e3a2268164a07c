"""`check_parity`: whether R replicas train what one device trains, and if not, why."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kdpkit import _checks, strategies

_TOLERANCE = 1e-5  # of the largest change of any weight: float32 rounds about here
_AMPLIFIED = 4.0  # times what rounding changes on one device is still called rounding
_LOOSEST = 0.05  # of the largest gradient: a model that is random in itself proves nothing
_EPSILONS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
_FLOAT32_EPSILON = 2.0**-23
_COMPARED = 4  # batches
_SPEC_OF_NONE = type(tf.type_spec_from_value(None))  # TensorFlow 2.19 has no name for it


@dataclasses.dataclass(frozen=True)
class ParityReport:
    """What `check_parity` found; `str(report)` says it in sentences.

    Attributes:
        replicas: How many replicas were compared with one device.
        equal: Whether weights and logs agree to rounding.
        weights: The largest difference of any weight, over the largest change of any weight; NaN
            if the replicas could not train.
        logs: The largest relative difference of loss and metrics, by name.
        batch: The first batch on which they differ, counted from 0; None if they agree.
        factor: What the gradient of the replicas is one device's times, both without clipping;
            None if it is no multiple.
        cause: The likely cause, or "" where none of those known explains the difference.
        gradients: The largest difference of any gradient of that batch, over the largest gradient;
            None where weights and logs told enough.
        error: What training on replicas raised, where training on one device did not.
    """

    replicas: int
    equal: bool
    weights: float
    logs: dict[str, float]
    batch: int | None = None
    factor: float | None = None
    cause: str = ""
    gradients: float | None = None
    error: Exception | None = None

    @property
    def factor_name(self) -> str:
        """The factor in terms of the replicas R: "1/R", "R", "3/R"; "" where it is none of them."""
        if self.factor is None:
            return ""
        of_replicas = self.factor * self.replicas
        count = round(of_replicas)
        if count < 1 or abs(of_replicas - count) > 1e-3 * count:
            return ""
        return {self.replicas: "1", self.replicas**2: "R"}.get(count, f"{count}/R")

    def __str__(self) -> str:
        """Say what was found, and what to do about it."""
        if self.error is not None:
            return self._failure()
        if self.equal:
            rounding = self.weights > _TOLERANCE
            return (
                f"{self.replicas} replicas train what one device trains: weights differ by "
                f"{self.weights:.0e} of their change"
                f"{', no more than rounding does on one device' if rounding else ''}."
            )
        if self.batch is None:
            off = ", ".join(f"{name} by {by:.0e}" for name, by in self.logs.items())
            return f"{self.replicas} replicas train what one device trains, but log it off: {off}."
        return self._difference()

    def _failure(self) -> str:
        said = ": ".join(filter(None, [type(self.error).__name__, _first_line(self.error)]))
        problem = f"{self.replicas} replicas cannot train what one device trains: {said}."
        return f"{problem} Likely cause: {self.cause}." if self.cause else problem

    def _difference(self) -> str:
        sizes = f"weights differ by {self.weights:.0e} of their change"
        if self.gradients is not None:
            sizes += f", gradients by {self.gradients:.0e} of the largest"
        parts = [
            f"{self.replicas} replicas do not train what one device trains: after batch "
            f"{self.batch} {sizes}."
        ]
        if self.factor is not None and self.factor_name != "1":
            name = f" ({self.factor_name})" if self.factor_name else ""
            parts.append(f"The step is {self.factor:.4g}{name} times one device's.")
        parts.append(f"Likely cause: {self.cause or 'unknown'}.")
        return " ".join(parts)


def check_parity(build: Callable[[], Any], data: Any, *, replicas: int) -> ParityReport:
    """Train a few steps on one device and on replicas, and say whether they agree.

    Both start from the same weights (the random seed is set to 0 before each `build()`) and see the
    same batches, the replicas as `fit` distributes them. Weights that agree to `1e-5` of their
    change are equal. Where they differ more, rounding is told from a true difference: the gradients
    of every batch are compared, and one device is run a second time with weights changed by as much
    as rounding does. So small learning rates, and optimizers such as Adam that enlarge the rounding
    of gradients near zero, raise no false alarm. Where the replicas do differ, one thing at a time
    is taken away until they agree, which names the cause; that trains some more models.

    Args:
        build: Gives a new, compiled model; it is called in the strategy's scope. Call
            `kdpkit.training.replica_exact` in it to check the exact training, leave it out to
            check Keras' own.
        data: A `tf.data.Dataset` of global batches, of which the first four are taken, or one
            batch as a tuple `(x, y)` or `(x, y, sample_weight)` of arrays.
        replicas: Number of replicas, on as many devices (`kdpkit.strategies.select_strategy`).

    Returns:
        A `ParityReport`: print it, or test `report.equal`. What training on replicas raises, where
        training on one device does not, is reported as `report.error`.

    Raises:
        ValueError: Fewer than two replicas, or more than there are devices; data without batches
            or of another kind; a `build` that gives no new, compiled model with the same weights
            each time; a model that learns nothing from the data, or NaN. What `build` and `fit`
            raise on one device passes through.

    >>> import keras
    >>> from kdpkit import testing
    >>> def build():
    ...     model = testing.tiny_classifier()
    ...     loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    ...     model.compile(keras.optimizers.SGD(0.1, clipnorm=0.01), loss)
    ...     return model
    >>> report = check_parity(build, testing.toy_classification(8), replicas=2)
    >>> report.equal, report.cause
    (False, 'clipping before the reduction: each replica clips its own gradient')
    """
    if keras.backend.backend() != "tensorflow":
        _checks.refuse(
            "`check_parity` compares replicas of TensorFlow.", backend=keras.backend.backend()
        )
    replicas = _checks.integer("replicas", replicas, minimum=2)
    if isinstance(build, keras.Model) or not callable(build):
        _checks.refuse(
            "`build` must be a function that gives a new model.",
            build=build,
            remedy="Put what makes and compiles the model into a function, and pass that.",
        )
    dataset = _checked_dataset(data)
    strategy = strategies.select_strategy("mirrored", devices=replicas)
    return _Trial(build, dataset, strategy).report()


class _State(NamedTuple):
    """What is compared: weights that are trained, or their gradients; and other weights."""

    trained: Any
    other: Any

    def change_since(self, start: "_State") -> "_State":
        """Subtract the start. Gradients have none: their optimizer may be built by its step."""
        return _State(
            *(
                now - before if now.shape == before.shape else now
                for now, before in zip(self, start, strict=True)
            )
        )


class _Run(NamedTuple):
    """What one training gave: state before it and after each batch, and the logs."""

    start: _State
    after: list[_State]
    history: Any


class _Recorder(keras.callbacks.Callback):
    """Weights, or recorded gradients, at the start of training and after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.start: Any = None
        self.after: list[_State] = []

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002  # Keras' signature
        self.start = _state(self.model)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002  # Keras'
        self.after.append(_state(self.model))


def _state(model: Any) -> _State:
    recording = [value for value in vars(model).values() if isinstance(value, _GradientRecorder)]
    trained = model.trainable_weights
    if recording:
        trained = [gradient for optimizer in recording for gradient in optimizer.gradients]
    return _State(_flat(trained), _flat(model.non_trainable_weights))


def _flat(variables: list[Any]) -> Any:
    arrays = [np.ravel(variable.numpy()).astype("float64") for variable in variables]
    return np.concatenate(arrays) if arrays else np.zeros(0)


class _GradientRecorder(keras.optimizers.Optimizer):
    """Keeps the gradients, whole and clipped, and trains nothing.

    So the gradients of every batch are those at the starting weights: no step is lost in the
    rounding of a weight, and none enlarges the rounding of another.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(learning_rate=0.0, name="gradients", **settings)
        self.gradients: list[Any] = []

    def build(self, variables: Any) -> None:
        if not self.built:
            super().build(variables)
            self.gradients = self.add_optimizer_variables(variables, "gradient")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:  # noqa: ARG002
        kept = self.gradients[self._get_variable_index(variable)]
        self.assign(kept, tf.convert_to_tensor(gradient))  # of slices: their sum


class _Comparison:
    """One run beside another: by how much they differ after each batch, and in their logs."""

    def __init__(self, one: _Run, other: _Run) -> None:
        self._last = one.after[-1].trained, other.after[-1].trained
        self.batches = [
            _difference(mine.change_since(one.start), its.change_since(other.start), mine)
            for mine, its in zip(one.after, other.after, strict=True)
        ]
        # A nudged run does not show this: it adds the same steps to weights on the same grid.
        self.rounding = _FLOAT32_EPSILON * max(
            _ratio(state.trained, state.change_since(one.start).trained) for state in one.after
        )
        self.logs = {
            name: _ratio(_without_shared_nan(values, other.history[name]), np.nan_to_num(values))
            for name, values in one.history.items()
        }

    def first_beyond(self, tolerance: float) -> int | None:
        """Give the first batch after which the runs differ by more."""
        return next((i for i, by in enumerate(self.batches) if not by <= tolerance), None)

    def logs_agree(self, noise: "_Comparison | None" = None) -> bool:
        """Tell whether the logs differ by no more than rounding, or what it does to them."""
        allowed = noise.logs if noise else {}
        return all(
            by <= max(10 * _TOLERANCE, _AMPLIFIED * allowed.get(name, 0.0))
            for name, by in self.logs.items()
        )

    @property
    def found_gradients(self) -> bool:
        """Whether the last state is no zero: an optimizer out of sight records no gradient."""
        return bool(np.any(self._last[0]))

    @property
    def factor(self) -> float | None:
        """What the other's last gradient is one's times, if it is a multiple."""
        one, other = self._last
        if not self.found_gradients:
            return None
        factor = float(other @ one / (one @ one))
        is_multiple = np.isfinite(factor) and _ratio(other - factor * one, other) < 1e-3
        return factor if is_multiple else None


def _with_start(one: _Run, many: _Run) -> _Run:
    """Give a model that its first batch built on one device the start that it had on replicas."""
    was_built = one.start.trained.shape == one.after[0].trained.shape
    return one if was_built else one._replace(start=many.start)


def _difference(one: _State, other: _State, state: _State) -> float:
    """Give the largest difference over the largest change, of weights trained and of others."""
    # What is not trained (moving statistics) has no gradient to judge it by: its own rounding,
    # of some 4 epsilons, is allowed for.
    floor = 4 * _FLOAT32_EPSILON / _TOLERANCE * np.max(np.abs(state.other), initial=0.0)
    return max(
        _ratio(other.trained - one.trained, one.trained),
        _ratio(other.other - one.other, np.append(one.other, floor)),
    )


def _ratio(difference: Any, scale: Any) -> float:
    """Give the largest difference over the largest magnitude of what it is measured by."""
    largest, by = (float(np.max(np.abs(array), initial=0.0)) for array in (difference, scale))
    if largest == 0.0:
        return 0.0
    return largest / by if by else np.inf


def _without_shared_nan(one: Any, other: Any) -> Any:
    """Subtract logs; a metric that is NaN in both runs is the same."""
    both = np.isnan(one) & np.isnan(other)
    return np.where(both, 0.0, np.subtract(other, one))


class _Trial:
    """Trains the models of one `build`, on one device and on replicas, and compares them."""

    def __init__(self, build: Callable[[], Any], dataset: Any, strategy: Any) -> None:
        self._build_one = build
        self._batches = [*dataset.take(_COMPARED)]
        self._strategy = strategy
        self._replicas = strategy.num_replicas_in_sync
        self._previous: Any = None
        _check_batches(self._batches, dataset.element_spec)
        self._spec = tf.nest.map_structure(_with_any_batch, dataset.element_spec)
        self._build()  # so that the next call shows whether every model is a new one

    def report(self) -> ParityReport:
        one = self._on_one_device(self._batches)
        _refuse_what_is_not_finite(one)
        try:
            many = self._on_replicas(self._batches)
        except Exception as error:  # of any kind: one device trained, so it is what we look for
            return self._report_failure(error)
        one = _with_start(one, many)
        _refuse_other_starts(one, many)
        _refuse_nothing_trained(one)
        found = _Comparison(one, many)
        if found.first_beyond(_TOLERANCE) is None:
            equal = found.logs_agree() or found.logs_agree(self._noise(one))
            return ParityReport(self._replicas, equal, max(found.batches), found.logs)
        return self._judge(found, one)

    def _judge(self, found: _Comparison, one: _Run) -> ParityReport:
        """Tell what optimizers make of rounding from what the replicas do differently."""
        runs = self._on_both(self._batches, _record_gradients)
        gradients = _Comparison(*runs)
        noise = self._noise(runs[0], _record_gradients)
        tolerance = min(max(_TOLERANCE, _AMPLIFIED * max(noise.batches)), _LOOSEST)
        guilty = gradients.first_beyond(tolerance)
        if guilty is None:
            return self._judge_by_noise(found, one, gradients.found_gradients)
        factor, cause = self._explain(guilty, tolerance)
        return ParityReport(
            self._replicas,
            equal=False,
            weights=found.batches[guilty],
            logs=found.logs,
            batch=guilty,
            factor=factor,
            cause=cause,
            gradients=gradients.batches[guilty],
        )

    def _judge_by_noise(self, found: _Comparison, one: _Run, gradients_agree: bool) -> ParityReport:
        noise = self._noise(one)
        rounding = max(*noise.batches, found.rounding)
        batch = found.first_beyond(max(_TOLERANCE, _AMPLIFIED * rounding))
        if batch is None:
            equal = found.logs_agree(noise)
            return ParityReport(self._replicas, equal, max(found.batches), found.logs)
        return ParityReport(
            self._replicas,
            equal=False,
            weights=found.batches[batch],
            logs=found.logs,
            batch=batch,
            cause="the optimizer: it is given the same gradients" if gradients_agree else "",
        )

    def _explain(self, guilty: int, tolerance: float) -> tuple[float | None, str]:
        """Give the factor of the gradients of a batch, and the cause of their difference."""
        *before, batch = self._batches[: guilty + 1]  # Keras cannot begin with an uneven one

        def compare(batch: Any, change: Callable[[Any], Any]) -> _Comparison:
            return _Comparison(*self._on_both([*before, batch], _record_unclipped, change))

        whole = compare(batch, _nothing)
        if whole.first_beyond(tolerance) is None:
            return whole.factor, _CLIPPING
        for cause, change_batch, change_model in _SUSPECTS:
            changed = change_batch(batch, self._replicas)
            if changed is batch and not change_model(self._build()):
                continue  # there is no such thing to take away
            if compare(changed, change_model).first_beyond(tolerance) is None:
                return whole.factor, cause
        return whole.factor, ""

    def _report_failure(self, error: Exception) -> ParityReport:
        first, *rest = self._batches
        even = _even(first, self._replicas)
        cause = _UNEVEN_START if even is not first and self._trains([even, *rest]) else ""
        return ParityReport(
            self._replicas, equal=False, weights=np.nan, logs={}, cause=cause, error=error
        )

    def _trains(self, batches: list[Any]) -> bool:
        try:
            self._on_replicas(batches)
        except Exception:  # the first one is in the report
            return False
        return True

    def _noise(self, one: _Run, *changes: Callable[[Any], Any]) -> _Comparison:
        """Compare a run on one device with another from weights that rounding has changed."""
        nudge = functools.partial(_nudge_weights, batch=self._batches[0])
        return _Comparison(one, self._on_one_device(self._batches, *changes, nudge))

    def _on_both(self, batches: list[Any], *changes: Callable[[Any], Any]) -> tuple[_Run, _Run]:
        one = self._on_one_device(batches, *changes)
        many = self._on_replicas(batches, *changes)
        return _with_start(one, many), many

    def _on_one_device(self, batches: list[Any], *changes: Callable[[Any], Any]) -> _Run:
        return self._train(tf.distribute.get_strategy(), batches, changes)

    def _on_replicas(self, batches: list[Any], *changes: Callable[[Any], Any]) -> _Run:
        return self._train(self._strategy, batches, changes)

    def _train(self, strategy: Any, batches: list[Any], changes: Any) -> _Run:
        with strategy.scope():
            model = self._build()
            for change in changes:
                change(model)
        dataset = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=self._spec)
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(len(batches)))
        recorder = _Recorder()
        history = model.fit(dataset, callbacks=[recorder], shuffle=False, verbose=0).history
        return _Run(recorder.start, recorder.after, history)

    def _build(self) -> Any:
        keras.utils.set_random_seed(0)
        model = self._build_one()
        if not isinstance(model, keras.Model) or not model.compiled:
            _checks.refuse("`build` must return a compiled Keras model.", build=model)
        if model is self._previous:
            _checks.refuse(
                "`build` must give a new model each time, and gave the same one twice.",
                build=self._build_one,
                remedy="Make the model inside of it.",
            )
        self._previous = model
        return model


def _first_line(error: Any) -> str:
    """Give the first line that says something, without the names of TensorFlow's nodes."""
    text = re.sub(r"\{\{.*?\}\}\s*|\s*\[Op:.*|\x1b\[\d+m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith("Exception encountered when calling"):  # by Keras
        lines = lines[1:]
    return lines[0].rstrip(".") if lines else ""


# Refusals: the data, and models that leave nothing to compare.


def _checked_dataset(data: Any) -> Any:
    if isinstance(data, tuple) and 1 <= len(data) <= 3 and data[0] is not None:
        data = _dataset_of(data)
    if not isinstance(data, tf.data.Dataset):
        _checks.refuse(
            "`data` must be a tf.data.Dataset of batches, or one batch as a tuple (x, y) or "
            "(x, y, sample_weight) of arrays.",
            types=_types(data),
            remedy="`tf.data.Dataset.from_generator` makes a dataset of a generator.",
        )
    parts = data.element_spec
    if isinstance(parts, tuple) and isinstance(parts[-1], _SPEC_OF_NONE):
        kept = len(parts) - 1
        return _checked_dataset(data.map(lambda *parts: parts[:kept]))
    return data


def _dataset_of(batch: tuple[Any, ...]) -> Any:
    try:
        return tf.data.Dataset.from_tensors(batch)
    except (TypeError, ValueError) as error:
        raise _checks.InputError(
            f"`data` must hold arrays that TensorFlow can take ({_first_line(error)}). Received: "
            f"types={_types(batch)!r}."
        ) from error


def _types(data: Any) -> Any:
    if isinstance(data, tuple):
        return tuple(_types(part) for part in data)
    return type(data).__name__


def _check_spec(spec: Any) -> None:
    if not isinstance(spec, tf.TensorSpec):
        _checks.refuse(
            "`data` must hold dense tensors alone.",
            spec=spec,
            remedy="Pad ragged ones and make sparse ones dense (`.to_tensor()`, "
            "`tf.sparse.to_dense`), or leave a None out.",
        )
    if spec.shape.rank == 0:
        _refuse_unbatched([tuple(spec.shape)])


def _check_batches(batches: list[Any], specs: Any) -> None:
    if not batches:
        _checks.refuse("`data` holds no batch.", batches=0)
    for spec in tf.nest.flatten(specs):
        _check_spec(spec)
    for number, batch in enumerate(batches):
        shapes = [tuple(leaf.shape) for leaf in tf.nest.flatten(batch)]
        if len({shape[:1] for shape in shapes}) > 1:
            _refuse_unbatched(shapes)
        if shapes[0][0] == 0:
            _checks.refuse("`data` holds a batch without rows.", batch=number, shapes=shapes)


def _refuse_unbatched(shapes: Any) -> None:
    _checks.refuse(
        "`data` must hold batches, whose parts all have the batch's rows as first dimension.",
        shapes=shapes,
        remedy="Batch a dataset of single examples with `.batch(...)` first.",
    )


def _with_any_batch(spec: Any) -> Any:
    if spec.shape.rank is None:
        return spec
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)


def _refuse_what_is_not_finite(one: _Run) -> None:
    for batch, state in enumerate(one.after):
        if not all(np.isfinite(part).all() for part in state):
            _checks.refuse(
                "The model gives NaN or infinite weights on one device already, so there is "
                "nothing to compare.",
                batch=batch,
                loss=one.history.get("loss"),
                remedy="Check the data for NaN, and the learning rate.",
            )


def _refuse_other_starts(one: _Run, many: _Run) -> None:
    starts = zip(one.start, many.start, strict=True)
    if not all(np.array_equal(mine, its, equal_nan=True) for mine, its in starts):
        _checks.refuse(
            "Two models that `build` gave start from different weights, so their training cannot "
            "be compared: either they share layers, which the first one trained, or their weights "
            "are drawn anew by something else than Keras' initializers.",
            weights=(one.start.trained.size, many.start.trained.size),
            remedy="Make every layer inside of `build`, and draw weights from a fixed seed.",
        )


def _refuse_nothing_trained(one: _Run) -> None:
    if all(np.array_equal(state.trained, one.start.trained) for state in one.after):
        _checks.refuse(
            "No weight changed on one device, so there is nothing to compare.",
            batches=len(one.after),
            trainable_weights=one.start.trained.size,
            remedy="Check the learning rate of the first steps, which layers are frozen, and "
            f"`gradient_accumulation_steps`: the first {_COMPARED} batches are compared.",
        )


# The suspects: a cause, and what to take away of the batch and of the model to be rid of it. What
# changes a model tells whether there was something to change.

_CLIPPING = "clipping before the reduction: each replica clips its own gradient"
_UNEVEN_START = (
    "uneven batch: Keras cannot build a model on replicas from a first batch that they do not "
    "divide; use `replica_exact`, or batches that the replicas divide"
)


def _nothing(model: Any) -> bool:  # noqa: ARG001  # as its like
    return False


def _same_batch(batch: Any, replicas: int) -> Any:  # noqa: ARG001  # as its like
    return batch


def _even(batch: Any, replicas: int) -> Any:
    rows = int(tf.shape(tf.nest.flatten(batch)[0])[0])
    if rows % replicas == 0:
        return batch
    kept = max(rows // replicas, 1) * replicas
    return tf.nest.map_structure(lambda leaf: tf.gather(leaf, tf.range(kept) % rows), batch)


def _record_gradients(model: Any) -> None:
    _replace_optimizers(model, ("clipnorm", "global_clipnorm", "clipvalue"))


def _record_unclipped(model: Any) -> None:
    _replace_optimizers(model, ())


def _replace_optimizers(model: Any, kept: tuple[str, ...]) -> None:
    for name, value in [*vars(model).items()]:
        if isinstance(value, keras.optimizers.Optimizer):
            inner = getattr(value, "inner_optimizer", value)
            settings = {setting: getattr(inner, setting) for setting in kept}
            setattr(model, name, _GradientRecorder(**settings))


def _nudge_weights(model: Any, batch: Any) -> None:
    """Change every weight by about the rounding of the type that the model computes in."""
    if not model.built and type(model).call is not keras.Model.call:
        model(keras.utils.unpack_x_y_sample_weight(batch)[0])
    epsilon = max(
        _EPSILONS.get(layer.compute_dtype, _FLOAT32_EPSILON) for layer in model._flatten_layers()
    )
    random = np.random.default_rng(0)
    for weight in model.trainable_weights:
        value = np.asarray(weight.numpy())
        size = np.max(np.abs(value), initial=0.0) or 1.0
        nudge = epsilon * float(size) * random.standard_normal(value.shape)
        weight.assign((value + nudge).astype(value.dtype))


def _synchronize_statistics(model: Any) -> bool:
    layers = [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized
    ]
    for layer in layers:
        layer.synchronized = True
    return bool(layers)


def _stop_dropping(model: Any) -> bool:
    layers = [
        layer
        for layer in model._flatten_layers()
        if hasattr(layer, "seed_generator") and hasattr(layer, "rate")
    ]
    for layer in layers:
        layer.rate = 0.0
    return bool(layers)


def _sum_losses(model: Any) -> bool:
    losses = [loss for loss in keras.tree.flatten(model.loss) if isinstance(loss, keras.Loss)]
    for loss in losses:
        loss.reduction = "sum"
    return bool(losses)


_SUSPECTS: tuple[tuple[str, Callable[[Any, int], Any], Callable[[Any], bool]], ...] = (
    ("uneven batch: a replica with fewer rows counts as much as the others", _even, _nothing),
    (
        "batch statistics: BatchNormalization normalizes by each replica's own rows",
        _same_batch,
        _synchronize_statistics,
    ),
    ("random layers: replicas draw other numbers than one device", _same_batch, _stop_dropping),
    (
        "the loss divides by each replica's own weights or unmasked entries",
        _same_batch,
        _sum_losses,
    ),
)
