"""`check_parity`: whether R replicas train what stock Keras trains on one device; if not, where."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdpkit import strategies
from kdpkit._internal import checks, optimizers
from kdpkit._internal.datasets import untuned, with_private_batches
from kdpkit.training.tensorflow._layer_trial import rounding_unit

_TOLERANCE = 1e-5  # of the largest change of any weight: float32 rounds about here
_COMPARED = 4  # batches, the first ones
_AMPLIFIED = 4.0  # times what rounding changes on one device is still called rounding
_FLOAT32_EPSILON = 2.0**-23
_TINY = 1e-30
_LOOSEST = 0.05  # of the largest gradient: a model that is random in itself proves nothing
_RECORDER = "kdpkit_gradients"


@dataclasses.dataclass(frozen=True)
class ParityReport:
    """What `check_parity` found; `str(report)` is the same in sentences.

    Attributes:
        replicas: How many replicas were compared with one device.
        equal: Whether weights and logs agree to rounding.
        weights: The largest difference of any weight over the largest change of any weight.
        logs: The largest relative difference of loss and metrics, by name.
        batch: The first batch on which they differ, counted from 0; None if they agree.
        variable: The path of the variable whose gradient, or else value, differs most on it.
        gradients: The same as `weights` for gradients; None if only the optimizer differs.
        factor: What the gradient of the replicas is one device's times; None if it is no multiple.
        error: What training on replicas raised, where training on one device did not.
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
            logs = ", ".join(f"{name} off by {by:.0e}" for name, by in self.logs.items())
            return f"{who} train what one device trains, but log {logs}, {off}."
        where = f"after batch {self.batch} `{self.variable}` differs most"
        by = "the optimizer"
        if self.gradients is not None:
            by = f"gradients by {self.gradients:.0e} of the largest"
        times = "" if self.factor is None else f", the step is {self.factor:.4g} times one device's"
        return f"{who} do not train what one device trains: {where}, by {by}, {off}{times}."


def check_parity(build: Callable[[], keras.Model], data: Any, *, replicas: int) -> ParityReport:
    """Train a few steps on one device and on replicas, and report whether they agree.

    Both start from the same weights (the random seed is set to 0 before each `build()`) and see the
    same batches. Weights that agree to `1e-5` of their change are equal. Otherwise the gradients of
    each batch at the first weights are compared, beside what rounding changes on one device.
    TensorFloat-32 is off meanwhile.

    Args:
        build: Returns a new, compiled model. It is called in the strategy's scope, and outside of
            any for one device, where `kdpkit.training.replica_exact` leaves stock Keras as it is.
        data: A `tf.data.Dataset` of global batches, of which the first four are taken, or one
            batch as a tuple `(x, y)` or `(x, y, sample_weight)` of arrays.
        replicas: Number of replicas, on as many devices (`kdpkit.strategies.select_strategy`).

    Raises:
        ValueError: The arguments leave nothing to compare: no batches, or a `build` that returns no
            new, compiled model with the same weights each time, or one that learns nothing, or NaN.
            What `build` and `fit` raise on one device passes through.

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
    example = keras.utils.unpack_x_y_sample_weight(next(iter(dataset)))[0]

    def train(strategy: tf.distribute.Strategy, *changes: Callable[[keras.Model], None]) -> _Run:
        run, is_tf32 = _Run(), tf.config.experimental.tensor_float_32_execution_enabled()
        tf.config.experimental.enable_tensor_float_32_execution(False)  # has errors of 5e-4
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
    except Exception as error:  # of any kind: one device trained, so it is what we look for
        return ParityReport(replicas, equal=False, weights=np.nan, logs={}, error=error)
    _check_runs(one, many)
    off, logs = one.differences(many), one.differences_of_logs(many)
    largest, _ = max(off)
    if largest <= _TOLERANCE and max(logs.values()) <= 10 * _TOLERANCE:
        return ParityReport(replicas, equal=True, weights=largest, logs=logs)
    recorded = train(one_device, _record_gradients), train(strategy, _record_gradients)
    runs = (recorded, _LOOSEST, _record_gradients), ((one, many), np.inf)
    for (mine, its), loosest, *changes in runs:
        nudged, found = train(one_device, _nudge, *changes), mine.differences(its)
        rounding = max(mine.rounding(), _AMPLIFIED * max(mine.differences(nudged))[0])
        for batch, (by, name) in enumerate(found):
            if not by <= min(rounding, loosest):
                of = (by, mine.factor(its, batch)) if changes else ()
                return ParityReport(replicas, False, off[batch][0], logs, batch, name, *of)
    noise = one.differences_of_logs(nudged)
    equal = all(logs[of] <= max(10 * _TOLERANCE, _AMPLIFIED * noise[of]) for of in logs)
    return ParityReport(replicas, equal, largest, logs)


def _dataset(data: Any) -> tf.data.Dataset:
    """Return the batches that are compared, the same each time."""
    if isinstance(data, tuple) and 1 <= len(data) <= 3 and data[0] is not None:
        data = tf.data.Dataset.from_tensors(data[:-1] if data[-1] is None else data)
    if not isinstance(data, tf.data.Dataset):
        checks.fail("`data` must be a tf.data.Dataset, or arrays `(x, y)`.", data=type(data))
    dataset = data.take(_COMPARED).cache()
    parts = [part for batch in dataset for part in tf.nest.flatten(batch)]
    if not parts or not all(isinstance(p, tf.Tensor) and p.shape.rank and len(p) for p in parts):
        checks.fail(
            "`data` must hold batches of dense tensors, with examples.", of=data.element_spec
        )
    # Keras' own `fit` would write into the batches, and wait for tuning at an end.
    return untuned(with_private_batches(dataset))


class _Run(keras.callbacks.Callback):
    """Weights before training and after each batch; of trained ones gradients, if recorded."""

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002  # Keras' signature
        self.start = self._state()
        self.changes: list[np.ndarray] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002  # Keras'
        self.changes.append(self._state() - self.start)

    def _state(self) -> np.ndarray:
        trained, others = self.model.trainable_weights, self.model.non_trainable_weights
        self.variables = [*trained, *others]
        self.trained = sum(np.prod(v.shape, dtype=int) for v in trained)
        recorders = [of for of in vars(self.model).values() if getattr(of, "name", 0) == _RECORDER]
        kept = [of._momentums for of in recorders] or [trained]
        values = [sum(v.numpy() for v in of) for of in zip(*kept, strict=True)]
        return np.hstack([np.zeros(0), *map(np.ravel, [*values, *(v.numpy() for v in others)])])

    def differences(self, other: "_Run") -> list[tuple[float, str]]:
        """Return, of each batch, the largest difference over the largest change, and its path."""
        found, ends = [], np.cumsum([np.prod(v.shape, dtype=int) for v in self.variables])
        for mine, its in zip(self.changes, other.changes, strict=True):
            # What is not trained has no gradient to judge it by: its own rounding is allowed for.
            size = _largest((self.start + mine)[self.trained :])
            allowed = 4 * _FLOAT32_EPSILON / _TOLERANCE * size
            scale = np.full(mine.size, max(_largest(mine[self.trained :]), allowed))
            scale[: self.trained] = _largest(mine[: self.trained])
            by = np.abs(its - mine) / np.maximum(scale, _TINY)
            variable = self.variables[np.searchsorted(ends, np.argmax(by), "right")]
            found.append((float(np.max(by)), variable.path))
        return found

    def rounding(self) -> float:
        """Return what a run from nudged weights does not show: it adds the same steps to them."""
        size = max(_largest((self.start + of)[: self.trained]) for of in self.changes)
        changes = [_largest(of[: self.trained]) for of in self.changes]
        change = min(filter(None, changes), default=1.0)  # the first rate of a warmup is zero
        return max(_TOLERANCE, _AMPLIFIED * _FLOAT32_EPSILON * size / change)

    def differences_of_logs(self, other: "_Run") -> dict[str, float]:
        """Return the largest relative differences of logs; what is NaN in both is the same."""
        one, many = (run.model.history.history for run in (self, other))
        both = ((np.nan_to_num([one[name], many[name]], nan=1e30), name) for name in one)
        return {n: _largest(its - mine) / max(_largest(mine), _TINY) for (mine, its), n in both}

    def factor(self, other: "_Run", batch: int) -> float | None:
        """Return what the other's gradient is this one's times, if it is a multiple."""
        mine, its = (run.changes[batch][: run.trained] for run in (self, other))
        factor = float(its @ mine / (mine @ mine)) if mine.any() else np.nan
        return factor if np.allclose(its, factor * mine, 0, 1e-3 * _largest(its)) else None


def _largest(values: np.ndarray) -> float:
    return float(np.max(np.abs(values), initial=0.0))


def _check_runs(one: _Run, many: _Run) -> None:
    problems = {
        "The weights are NaN or infinite on one device already.": np.isfinite(one.changes).all(),
        "Two models that `build` returned start from different weights: they must not share "
        "layers, and must draw from a fixed seed.": np.array_equal(one.start, many.start),
        "No weight changed on one device: check which are frozen, and the first learning rates."
        "": any(of[: one.trained].any() for of in one.changes),
    }
    for problem, is_right in problems.items():
        if not is_right:
            checks.fail(problem, trained_weights=int(one.trained))


def _nudge(model: keras.Model) -> None:
    """Change every weight by about the rounding of the type that the model computes in."""
    unit, random = rounding_unit(model), np.random.default_rng(0)
    for weight in model.trainable_weights:
        value = np.asarray(weight.numpy())
        size = unit * (_largest(value) or 1.0)
        weight.assign((value + size * random.standard_normal(value.shape)).astype(value.dtype))


def _record_gradients(model: keras.Model) -> None:
    """Have a batch's gradients, clipped, kept as the momentum of an Adam that trains nothing."""
    for name, value in [*vars(model).items()]:
        if isinstance(value, keras.optimizers.Optimizer):
            of = optimizers.wrapped(value)
            clipping = {n: getattr(of, n) for n in ("clipnorm", "global_clipnorm", "clipvalue")}
            recorder = keras.optimizers.Adam(0.0, beta_1=0.0, name=_RECORDER, **clipping)
            recorder.build(model.trainable_weights)
            setattr(model, name, recorder)
