"""`check_parity`: whether R replicas train what stock Keras trains on one device."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdpkit import strategies
from kdpkit._internal import checks, optimizers
from kdpkit._internal.datasets import untuned, with_private_batches

_TOLERANCE = 1e-5  # relative to the largest change of any weight: the rounding of float32
_COMPARED_BATCHES = 4
_ROUNDING_FACTOR = 4.0  # Up to so many times what rounding changes on one device is rounding.
_FLOAT32_EPSILON = 2.0**-23
_TINY = 1e-30
_LARGEST_ROUNDING = 0.05  # of the largest gradient: a model that varies more proves nothing
_RECORDER = "kdpkit_gradients"


@dataclasses.dataclass(frozen=True)
class ParityReport:
    """What `check_parity` found; `str(report)` is the same in sentences.

    Attributes:
        replicas: How many replicas were compared with one device.
        equal: Whether weights and logs are equal, except for rounding.
        weights: The largest difference of any weight, relative to the largest change of any weight.
        logs: The largest relative difference of loss and metrics, by name.
        batch: The first batch after which they differ, counted from 0; None if they are equal.
        variable: The path of the variable that differs most after this batch: by its gradient, or
            by its value if all gradients are equal.
        gradients: As `weights`, for gradients; None if only the optimizer differs.
        factor: If the gradient of the replicas is a multiple of one device's, the factor.
        error: What training on replicas raised, although training on one device did not.
    """

    replicas: int
    equal: bool
    weights: float
    logs: dict[str, float]
    batch: int | None = None
    variable: str = ""
    gradients: float | None = None
    factor: float | None = None
    error: Exception | None = None

    def __str__(self) -> str:
        who, off = f"{self.replicas} replicas", f"weights off by {self.weights:.0e} of their change"
        if self.error is not None:
            return f"{who} cannot train this: {checks.reason_of(self.error)}."
        if self.equal:
            why = ", no more than by rounding" if self.weights > _TOLERANCE else ""
            return f"{who} train what one device trains: {off}{why}."
        if self.batch is None:
            logs = ", ".join(f"{name} off by {value:.0e}" for name, value in self.logs.items())
            return f"{who} train what one device trains, but log {logs}, {off}."
        where = f"after batch {self.batch} `{self.variable}` differs most"
        cause = "the optimizer"
        if self.gradients is not None:
            cause = f"gradients by {self.gradients:.0e} of the largest"
        times = "" if self.factor is None else f", the step is {self.factor:.4g} times one device's"
        return f"{who} do not train what one device trains: {where}, by {cause}, {off}{times}."


def check_parity(build: Callable[[], keras.Model], data: Any, *, replicas: int) -> ParityReport:
    """Train a few steps on one device and on several, and report whether the results are equal.

    Both trainings start from the same weights, because the random seed is set to 0 before each
    `build()`, and see the same batches. Weights are equal if they differ by at most `1e-5` of the
    largest change. If they differ more, the report says after which batch, in which variable, and
    whether gradients or the optimizer are the cause. Differences that rounding makes on one device
    as well do not count. TensorFloat-32 is off meanwhile.

    Args:
        build: Returns a new, compiled model. It is called inside the scope of a strategy of
            `replicas` devices, and for one device without a strategy, where
            `kdpkit.training.replica_exact` changes nothing.
        data: A `tf.data.Dataset` of batches, of which the first four are used, or one batch as a
            tuple `(x, y)` or `(x, y, sample_weight)` of arrays.
        replicas: The number of devices, at least 2 (see `kdpkit.strategies.split_device`).

    Raises:
        ValueError: There is nothing to compare: no batches, or `build` returns no new, compiled
            model with the same weights each time, or one that learns nothing, or NaN. What `build`
            and `fit` raise on one device is raised as it is.

    >>> from kdpkit import testing
    >>> def build():
    ...     model = testing.tiny_classifier()
    ...     model.compile("sgd", "mse")
    ...     return model
    >>> check_parity(build, (np.ones((8, 4)), np.ones((8, 3))), replicas=2).equal
    True
    """
    checks.backend("`check_parity`", "tensorflow")
    replicas = checks.integer("replicas", replicas, minimum=2)
    if isinstance(build, keras.Model) or not callable(build):
        checks.fail("`build` must be a function that returns a new model.", build=build)
    dataset, one_device = _dataset(data), tf.distribute.get_strategy()
    strategy = strategies.select_strategy("mirrored", devices=replicas)
    strategies._is_one_used.set()  # One device is what it compares with.
    example = keras.utils.unpack_x_y_sample_weight(next(iter(dataset)))[0]

    def train(strategy: tf.distribute.Strategy, *changes: Callable[[keras.Model], None]) -> _Run:
        run, is_tf32 = _Run(), tf.config.experimental.tensor_float_32_execution_enabled()
        tf.config.experimental.enable_tensor_float_32_execution(False)  # It has errors of 5e-4.
        try:
            with strategy.scope():
                keras.utils.set_random_seed(0)
                model = build()
                if not isinstance(model, keras.Model) or not model.compiled:
                    checks.fail("`build` must return a compiled Keras model.", build=model)
                if not model.built and type(model).call is not keras.Model.call:
                    model(example)
                for change in changes:
                    change(model)
            model.fit(dataset, callbacks=[run], shuffle=False, verbose=0)
        finally:
            tf.config.experimental.enable_tensor_float_32_execution(is_tf32)
        return run

    one = train(one_device)
    try:
        many = train(strategy)
    except Exception as error:  # The report has it: the same program trained on one device.
        return ParityReport(replicas, equal=False, weights=np.nan, logs={}, error=error)
    _check_runs(one, many)
    weights, logs = one.differences(many), one.log_differences(many)
    largest, _ = max(weights)
    if largest <= _TOLERANCE and max(logs.values()) <= 10 * _TOLERANCE:
        return ParityReport(replicas, equal=True, weights=largest, logs=logs)
    # Gradients come first: where they differ, the weights differ too.
    with_gradients = train(one_device, _record_gradients), train(strategy, _record_gradients)
    comparisons: Any = (with_gradients, _LARGEST_ROUNDING, _record_gradients), ((one, many), np.inf)
    for (run, other), limit, *changes in comparisons:
        nudged = train(one_device, _nudge, *changes)
        rounding = max(run.rounding(), _ROUNDING_FACTOR * max(run.differences(nudged))[0])
        for batch, (difference, path) in enumerate(run.differences(other)):
            if not difference <= min(rounding, limit):
                gradients = (difference, run.factor(other, batch)) if changes else ()
                off, _ = weights[batch]
                return ParityReport(replicas, False, off, logs, batch, path, *gradients)
    noise = one.log_differences(nudged)
    limits = {name: max(10 * _TOLERANCE, _ROUNDING_FACTOR * noise[name]) for name in logs}
    equal = all(logs[name] <= limits[name] for name in logs)
    return ParityReport(replicas, equal, largest, logs)


def _dataset(data: Any) -> tf.data.Dataset:
    """Return the batches that are compared, the same in each iteration."""
    if isinstance(data, tuple) and 1 <= len(data) <= 3 and data[0] is not None:
        data = tf.data.Dataset.from_tensors(data[:-1] if data[-1] is None else data)
    if not isinstance(data, tf.data.Dataset):
        checks.fail("`data` must be a tf.data.Dataset, or arrays `(x, y)`.", data=type(data))
    dataset = data.take(_COMPARED_BATCHES).cache()
    tensors = [tensor for batch in dataset for tensor in tf.nest.flatten(batch)]
    if not tensors or not all(
        isinstance(x, tf.Tensor) and x.shape.rank and len(x) for x in tensors
    ):
        checks.fail(
            "`data` must hold batches of dense tensors, with examples.", data=data.element_spec
        )
    # Keras' own `fit` would write into the batches, and wait for tf.data's tuning at its end.
    return untuned(with_private_batches(dataset))


class _Run(keras.callbacks.Callback):
    """Records the change of all variables after each batch, or of trained ones the gradients.

    A state is one vector: first all trained weights, then the other weights.
    """

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002  # Keras' signature
        self.start = self._state()
        self.changes: list[np.ndarray] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002  # Keras'
        self.changes.append(self._state() - self.start)

    def _state(self) -> np.ndarray:
        trained, others = self.model.trainable_weights, self.model.non_trainable_weights
        self.variables = [*trained, *others]
        self.num_trained = sum(np.prod(v.shape, dtype=int) for v in trained)
        attributes = vars(self.model).values()
        recorders = [value for value in attributes if getattr(value, "name", 0) == _RECORDER]
        recorded = [recorder._momentums for recorder in recorders] or [trained]
        values = [sum(v.numpy() for v in each) for each in zip(*recorded, strict=True)]
        return np.hstack([np.zeros(0), *map(np.ravel, [*values, *(v.numpy() for v in others)])])

    def _trained(self, state: np.ndarray) -> np.ndarray:
        return state[: self.num_trained]

    def differences(self, other: "_Run") -> list[tuple[float, str]]:
        """Return for each batch the largest relative difference, and the path of its variable."""
        differences, ends = [], np.cumsum([np.prod(v.shape, dtype=int) for v in self.variables])
        for change, other_change in zip(self.changes, other.changes, strict=True):
            # Weights without gradients may have a large value that changes little: they are allowed
            # the rounding of their value.
            others = change[self.num_trained :]
            value = _largest(self.start[self.num_trained :] + others)
            scale = np.full(
                change.size, max(_largest(others), 4 * _FLOAT32_EPSILON / _TOLERANCE * value)
            )
            scale[: self.num_trained] = _largest(self._trained(change))
            relative = np.abs(other_change - change) / np.maximum(scale, _TINY)
            variable = self.variables[np.searchsorted(ends, np.argmax(relative), "right")]
            differences.append((float(np.max(relative)), variable.path))
        return differences

    def rounding(self) -> float:
        """Return the rounding of a step, which is missing in a run that begins with other weights.

        Adding the same step to slightly different weights rounds in nearly the same way.
        """
        value = max(_largest(self._trained(self.start + change)) for change in self.changes)
        sizes = [_largest(self._trained(change)) for change in self.changes]
        size = min(filter(None, sizes), default=1.0)  # The first rate of a warmup is zero.
        return max(_TOLERANCE, _ROUNDING_FACTOR * _FLOAT32_EPSILON * value / size)

    def log_differences(self, other: "_Run") -> dict[str, float]:
        """Return the largest relative difference of each log; NaN in both is no difference."""
        differences = {}
        for name, values in self.model.history.history.items():
            values, others = np.nan_to_num([values, other.model.history.history[name]], nan=1e30)
            differences[name] = _largest(others - values) / max(_largest(values), _TINY)
        return differences

    def factor(self, other: "_Run", batch: int) -> float | None:
        """Return the factor between the gradients, if the other's are a multiple of this run's."""
        one, many = (run._trained(run.changes[batch]) for run in (self, other))
        factor = float(many @ one / (one @ one)) if one.any() else np.nan
        return factor if np.allclose(many, factor * one, 0, 1e-3 * _largest(many)) else None


def _largest(values: np.ndarray) -> float:
    return float(np.max(np.abs(values), initial=0.0))


def _check_runs(one: _Run, many: _Run) -> None:
    if not np.isfinite(one.changes).all():
        checks.fail("The weights are NaN or infinite on one device already.")
    if not np.array_equal(one.start, many.start):
        checks.fail(
            "Two models that `build` returned start from different weights: they must not share "
            "layers, and must draw from a fixed seed."
        )
    if not any(one._trained(change).any() for change in one.changes):
        checks.fail(
            "No weight changed on one device: check what is frozen, and the first learning rates.",
            trained_weights=int(one.num_trained),
        )


def _nudge(model: keras.Model) -> None:
    """Change every weight by about the rounding error of the type that the model computes in."""
    unit, random = _rounding_unit(model), np.random.default_rng(0)
    for weight in model.trainable_weights:
        value = np.asarray(weight.numpy())
        size = unit * (_largest(value) or 1.0)
        weight.assign((value + size * random.standard_normal(value.shape)).astype(value.dtype))


def _rounding_unit(model: keras.Model) -> float:
    """Return the unit in the last place, at 1, of the coarsest type that a model computes in."""
    layers = [part for part in model._flatten_layers() if isinstance(part, keras.layers.Layer)]
    units = {tf.bfloat16: 2.0**-7, tf.float16: 2.0**-10, tf.float64: 2.0**-52}
    return max(units.get(tf.as_dtype(layer.compute_dtype), 2.0**-23) for layer in layers)


def _record_gradients(model: keras.Model) -> None:
    """Replace the optimizers by one that trains nothing, and has the gradients as its momentum."""
    for name, value in [*vars(model).items()]:
        if isinstance(value, keras.optimizers.Optimizer):
            optimizer = optimizers.wrapped(value)
            clipping = ("clipnorm", "global_clipnorm", "clipvalue")
            settings = {setting: getattr(optimizer, setting) for setting in clipping}
            recorder = keras.optimizers.Adam(0.0, beta_1=0.0, name=_RECORDER, **settings)
            recorder.build(model.trainable_weights)
            setattr(model, name, recorder)
