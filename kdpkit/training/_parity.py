"""`check_parity`: whether R replicas train what stock Keras trains on one device; if not, where."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdpkit import strategies
from kdpkit._internal import checks, optimizers
from kdpkit._internal.checks import first_line
from kdpkit._internal.datasets import untuned, with_private_batches

_TOLERANCE = 1e-5  # of the largest change of any weight: float32 rounds about here
_COMPARED = 4  # batches, the first ones
_AMPLIFIED = 4.0  # times what rounding changes on one device is still called rounding
_FLOAT32_EPSILON = 2.0**-23
_EPSILONS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
_TINY = 1e-30
_LOOSEST = 0.05  # of the largest gradient: a model that is random in itself proves nothing


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
        if self.error is not None:
            text = dict.fromkeys([type(self.error).__name__, first_line(self.error)])
            return f"{self.replicas} replicas cannot train this: {': '.join(text)}."
        off = ", ".join(f"{name} off by {by:.0e}" for name, by in self.logs.items())
        parts = {
            f"{self.replicas} replicas train what one device trains": self.batch is None,
            f"{self.replicas} replicas do not train what one device trains: after batch "
            f"{self.batch} `{self.variable}` differs most": self.batch is not None,
            "by the optimizer": self.batch is not None and self.gradients is None,
            f"but log {off}": self.batch is None and not self.equal,
            f"weights differ by {self.weights:.0e} of their change": True,
            "no more than by rounding": self.equal and self.weights > _TOLERANCE,
            f"gradients by {self.gradients or 0:.0e} of the largest": self.gradients is not None,
            f"the step is {self.factor or 0:.4g} times one device's": self.factor is not None,
        }
        return ", ".join(text for text, is_so in parts.items() if is_so) + "."


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

    def train(strategy: tf.distribute.Strategy, *changes: Callable[[keras.Model], None]) -> _Run:
        run, tensor_float = _Run(), tf.config.experimental
        with contextlib.ExitStack() as stack:  # GPUs compute with errors of 5e-4 by default
            was_on = tensor_float.tensor_float_32_execution_enabled()
            stack.callback(tensor_float.enable_tensor_float_32_execution, was_on)
            tensor_float.enable_tensor_float_32_execution(False)
            with strategy.scope():
                keras.utils.set_random_seed(0)
                model = build()
                if not isinstance(model, keras.Model) or not model.compiled:
                    checks.fail("`build` must return a compiled Keras model.", build=model)
                for change in changes:
                    change(model)
            run.logs = model.fit(dataset, callbacks=[run], shuffle=False, verbose=0).history
        return run

    one, nudge = train(one_device), functools.partial(_nudge, dataset)
    try:
        many = train(strategy)
    except Exception as error:  # of any kind: one device trained, so it is what we look for
        return ParityReport(replicas, equal=False, weights=np.nan, logs={}, error=error)
    _check_runs(one, many)
    found, logs = one.differences(many), one.differences_of_logs(many)
    largest, _ = max(found)
    if largest <= _TOLERANCE and max(logs.values()) <= 10 * _TOLERANCE:
        return ParityReport(replicas, equal=True, weights=largest, logs=logs)
    mine, its = train(one_device, _record_gradients), train(strategy, _record_gradients)
    noise, _ = max(mine.differences(train(one_device, nudge, _record_gradients)))
    gradients = mine.differences(its)
    batch = _first(gradients, min(max(_TOLERANCE, _AMPLIFIED * noise), _LOOSEST))
    if batch is not None:
        (weights, _), (by, name) = found[batch], gradients[batch]
        factor = mine.factor(its, batch)
        return ParityReport(replicas, False, weights, logs, batch, name, by, factor)
    nudged = train(one_device, nudge)
    noise, noise_of_logs = max(one.differences(nudged))[0], one.differences_of_logs(nudged)
    batch = _first(found, max(one.rounding(), _AMPLIFIED * noise))
    if batch is not None:
        return ParityReport(replicas, False, found[batch][0], logs, batch, found[batch][1])
    equal = all(logs[of] <= max(10 * _TOLERANCE, _AMPLIFIED * noise_of_logs[of]) for of in logs)
    return ParityReport(replicas, equal, largest, logs)


def _dataset(data: Any) -> tf.data.Dataset:
    """Return the batches that are compared, the same each time, in parts of any size."""
    if isinstance(data, tuple) and 1 <= len(data) <= 3 and data[0] is not None:
        data = tf.data.Dataset.from_tensors(data[:-1] if data[-1] is None else data)
    if not isinstance(data, tf.data.Dataset):
        checks.fail(
            "`data` must be a tf.data.Dataset, or a tuple (x, y) of arrays.", data=type(data)
        )
    batches = [*data.take(_COMPARED)]
    parts = [part for batch in batches for part in tf.nest.flatten(batch)]
    if not parts or not all(isinstance(p, tf.Tensor) and p.shape.rank and len(p) for p in parts):
        checks.fail(
            "`data` must hold batches of dense tensors, with examples.", of=data.element_spec
        )
    spec = tf.nest.map_structure(lambda p: tf.TensorSpec([None, *p.shape[1:]], p.dtype), batches[0])
    dataset = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(len(batches)))
    # Keras' own `fit` would write into the batches, and wait for tuning at an end.
    return untuned(with_private_batches(dataset))


class _Run(keras.callbacks.Callback):
    """Weights, or gradients instead of trained ones, before training and after each batch."""

    logs: dict[str, Any]

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002  # Keras' signature
        self.states = [self._state()]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002  # Keras'
        self.states.append(self._state())

    def _state(self) -> np.ndarray:
        recorders = [of for of in vars(self.model).values() if isinstance(of, _Gradients)]
        pairs = [pair for of in recorders for pair in of.kept]
        pairs = pairs if recorders else [(v, v) for v in self.model.trainable_weights]
        self.trained = sum(np.prod(v.shape, dtype=int) for v, _ in pairs)
        pairs += [(v, v) for v in self.model.non_trainable_weights]
        self.variables = [v for v, _ in pairs]
        return np.hstack([np.zeros(0), *(of.numpy().ravel() for _, of in pairs)])

    def changes(self) -> list[np.ndarray]:
        """Return how batches changed weights; gradients are there only after the first."""
        start, *after = self.states
        return [of - start if start.size == of.size else of for of in after]

    def differences(self, other: "_Run") -> list[tuple[float, str]]:
        """Return, of each batch, the largest difference over the largest change, and its path."""
        found, ends = [], np.cumsum([np.prod(v.shape, dtype=int) for v in self.variables])
        for mine, its, state in zip(self.changes(), other.changes(), self.states[1:], strict=True):
            # What is not trained has no gradient to judge it by: its own rounding is allowed for.
            allowed = 4 * _FLOAT32_EPSILON / _TOLERANCE * _largest(state[self.trained :])
            scale = np.full(mine.size, max(_largest(mine[self.trained :]), allowed))
            scale[: self.trained] = _largest(mine[: self.trained])
            by = np.abs(its - mine) / np.maximum(scale, _TINY)
            variable = self.variables[np.searchsorted(ends, np.argmax(by), "right")]
            found.append((float(np.max(by)), variable.path))
        return found

    def rounding(self) -> float:
        """Return what a run from nudged weights does not show: it adds the same steps to them."""
        size = max(_largest(of[: self.trained]) for of in self.states)
        changes = [_largest(of[: self.trained]) for of in self.changes()]
        change = min(filter(None, changes))  # the first rate of a warmup is zero
        return max(_TOLERANCE, _AMPLIFIED * _FLOAT32_EPSILON * size / change)

    def differences_of_logs(self, other: "_Run") -> dict[str, float]:
        """Return the largest relative differences of logs; what is NaN in both is the same."""
        both = ((np.nan_to_num([self.logs[n], other.logs[n]], nan=1e30), n) for n in self.logs)
        return {n: _largest(its - mine) / max(_largest(mine), _TINY) for (mine, its), n in both}

    def factor(self, other: "_Run", batch: int) -> float | None:
        """Return what the other's gradient is this one's times, if it is a multiple."""
        mine, its = (run.changes()[batch][: run.trained] for run in (self, other))
        factor = float(its @ mine / (mine @ mine)) if mine.any() else np.nan
        return factor if np.allclose(its, factor * mine, 0, 1e-3 * _largest(its)) else None


def _largest(values: np.ndarray) -> float:
    return float(np.max(np.abs(values), initial=0.0))


def _first(differences: list[tuple[float, str]], tolerance: float) -> int | None:
    return next((i for i, (by, _) in enumerate(differences) if not by <= tolerance), None)


def _check_runs(one: _Run, many: _Run) -> None:
    """Check that two trainings can be compared; a model may be built by its first batch."""
    if one.states[0].size != one.states[1].size:
        one.states[0] = many.states[0]
    problems = {
        "The weights are NaN or infinite on one device already.": not np.isfinite(one.states).all(),
        "Two models that `build` returned start from different weights: they must not share "
        "layers, and must draw from a fixed seed.": (one.states[0] != many.states[0]).any(),
        "No weight changed on one device: check which are frozen, and the first learning rates."
        "": not any(of[: one.trained].any() for of in one.changes()),
    }
    for problem in (problem for problem, is_so in problems.items() if is_so):
        checks.fail(problem, trained_weights=int(one.trained))


class _Gradients(keras.optimizers.Optimizer):
    """Keeps a batch's gradients at the first weights, clipped, and trains nothing."""

    kept: Any = ()  # pairs of variables and gradients

    def build(self, variables: list[keras.Variable]) -> None:
        super().build(variables)
        gradients = self.add_optimizer_variables(variables, "gradient")
        self.kept = (*zip(variables, gradients, strict=True),)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:  # noqa: ARG002
        _, kept = self.kept[self._get_variable_index(variable)]
        self.assign(kept, tf.convert_to_tensor(gradient))  # of slices: their sum


def _nudge(dataset: tf.data.Dataset, model: keras.Model) -> None:
    """Change every weight by about the rounding of the type that the model computes in."""
    if not model.built and type(model).call is not keras.Model.call:
        model(keras.utils.unpack_x_y_sample_weight(next(iter(dataset)))[0])
    types = {layer.compute_dtype for layer in model._flatten_layers()}
    epsilon = max(_EPSILONS.get(dtype, _FLOAT32_EPSILON) for dtype in types)
    random = np.random.default_rng(0)
    for weight in model.trainable_weights:
        value = np.asarray(weight.numpy())
        size = epsilon * (_largest(value) or 1.0)
        weight.assign((value + size * random.standard_normal(value.shape)).astype(value.dtype))


def _record_gradients(model: keras.Model) -> None:
    for name, value in [*vars(model).items()]:
        if isinstance(value, keras.optimizers.Optimizer):
            inner = optimizers.wrapped(value)
            settings = {
                of: getattr(inner, of) for of in ("clipnorm", "global_clipnorm", "clipvalue")
            }
            setattr(model, name, _Gradients(0.0, name="gradients", **settings))
