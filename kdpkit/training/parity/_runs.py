"""What two trainings are compared by: their states after each batch, and their logs."""

from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kdpkit._internal import checks
from kdpkit.training._rounding import FLOAT32_EPSILON
from kdpkit.training.parity._report import TOLERANCE

COMPARED = 4  # batches, the first ones
AMPLIFIED = 4.0  # times what rounding changes on one device is still called rounding


class State(NamedTuple):
    """Numbers of a model: trained weights, or their gradients; and other weights."""

    trained: np.ndarray
    other: np.ndarray

    def change_since(self, start: "State") -> "State":
        """Subtract the start. Gradients have none: their optimizer may be built by its step."""
        pairs = zip(self, start, strict=True)
        return State(*(now - old if now.shape == old.shape else now for now, old in pairs))


class Run(NamedTuple):
    """One training: the state before it and after each batch, and the logs."""

    start: State
    after: list[State]
    history: dict[str, list[float]]


class Recorder(keras.callbacks.Callback):
    """Weights, or recorded gradients, at the start of training and after each batch."""

    start: State

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002  # Keras' signature
        self.start = _state(self.model)
        self.after: list[State] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002  # Keras'
        self.after.append(_state(self.model))


def _state(model: keras.Model) -> State:
    recorders = [value for value in vars(model).values() if isinstance(value, GradientRecorder)]
    gradients = [gradient for recorder in recorders for gradient in recorder.gradients]
    trained = gradients if recorders else model.trainable_weights
    return State(_flat(trained), _flat(model.non_trainable_weights))


def _flat(variables: list[keras.Variable]) -> np.ndarray:
    arrays = [np.ravel(variable.numpy()).astype("float64") for variable in variables]
    return np.concatenate(arrays) if arrays else np.zeros(0)


class GradientRecorder(keras.optimizers.Optimizer):
    """Keeps the complete gradients, clipped, and trains nothing.

    So the gradients of every batch are those at the starting weights: no step is lost in the
    rounding of a weight, and none enlarges the rounding of another.
    """

    def __init__(self, **settings: float | None) -> None:
        super().__init__(learning_rate=0.0, name="gradients", **settings)
        self.gradients: list[keras.Variable] = []

    def build(self, variables: list[keras.Variable]) -> None:
        if not self.built:
            super().build(variables)
            self.gradients = self.add_optimizer_variables(variables, "gradient")

    def update_step(
        self,
        gradient: tf.Tensor | tf.IndexedSlices,
        variable: keras.Variable,
        learning_rate: tf.Tensor,  # noqa: ARG002  # Keras' signature
    ) -> None:
        kept = self.gradients[self._get_variable_index(variable)]
        self.assign(kept, tf.convert_to_tensor(gradient))  # of slices: their sum


class Comparison:
    """One run beside another: by how much they differ after each batch, and in their logs."""

    def __init__(self, one: Run, other: Run) -> None:
        self._states = [*zip(one.after, other.after, strict=True)]
        self.batches = [
            _difference(mine.change_since(one.start), its.change_since(other.start), mine)
            for mine, its in self._states
        ]
        # A nudged run does not show this: it adds the same steps to weights on the same grid.
        self.rounding = FLOAT32_EPSILON * max(
            _ratio(state.trained, state.change_since(one.start).trained) for state in one.after
        )
        self.logs = {
            name: _ratio(_without_shared_nan(values, other.history[name]), np.nan_to_num(values))
            for name, values in one.history.items()
        }

    def first_beyond(self, tolerance: float) -> int | None:
        """Return the first batch after which the runs differ by more."""
        return next((i for i, by in enumerate(self.batches) if not by <= tolerance), None)

    def logs_agree(self, noise: "Comparison | None" = None) -> bool:
        """Return whether the logs differ by no more than rounding, or what it does to them."""
        allowed = noise.logs if noise else {}
        return all(
            by <= max(10 * TOLERANCE, AMPLIFIED * allowed.get(name, 0.0))
            for name, by in self.logs.items()
        )

    @property
    def has_gradients(self) -> bool:
        """Whether the last gradients are not zero: a hidden optimizer records none."""
        return bool(np.any(self._states[-1][0].trained))

    def factor(self, batch: int) -> float | None:
        """Return what the other's gradient is one's times, if it is a multiple."""
        one, other = (state.trained for state in self._states[batch])
        if not one.any():
            return None
        factor = float(other @ one / (one @ one))
        is_multiple = np.isfinite(factor) and _ratio(other - factor * one, other) < 1e-3
        return factor if is_multiple else None


def with_start(one: Run, many: Run) -> Run:
    """Return a model that its first batch built on one device the start that it had on replicas."""
    was_built = one.start.trained.shape == one.after[0].trained.shape
    return one if was_built else one._replace(start=many.start)


def _difference(one: State, other: State, state: State) -> float:
    """Return the largest difference over the largest change, of weights trained and of others."""
    # What is not trained (moving statistics) has no gradient to judge it by: its own rounding,
    # of some 4 epsilons, is allowed for.
    floor = 4 * FLOAT32_EPSILON / TOLERANCE * np.max(np.abs(state.other), initial=0.0)
    return max(
        _ratio(other.trained - one.trained, one.trained),
        _ratio(other.other - one.other, np.append(one.other, floor)),
    )


def _ratio(difference: np.ndarray, scale: np.ndarray) -> float:
    """Return the largest difference over the largest magnitude of what it is measured by."""
    largest, by = (float(np.max(np.abs(array), initial=0.0)) for array in (difference, scale))
    if largest == 0.0:
        return 0.0
    return largest / by if by else np.inf


def _without_shared_nan(one: list[float], other: list[float]) -> np.ndarray:
    """Subtract logs; a metric that is NaN in both runs is the same."""
    both = np.isnan(one) & np.isnan(other)
    return np.where(both, 0.0, np.subtract(other, one))


def reject_what_is_not_finite(one: Run) -> None:
    for batch, state in enumerate(one.after):
        if not all(np.isfinite(part).all() for part in state):
            checks.fail(
                "The model has NaN or infinite weights on one device already, so there is "
                "nothing to compare.",
                batch=batch,
                loss=one.history.get("loss"),
                remedy="Check the data for NaN, and the learning rate.",
            )


def reject_other_starts(one: Run, many: Run) -> None:
    starts = zip(one.start, many.start, strict=True)
    if not all(np.array_equal(mine, its, equal_nan=True) for mine, its in starts):
        checks.fail(
            "Two models that `build` returned start from different weights, so their training "
            "cannot be compared: either they share layers, which the first one trained, or their "
            "weights are drawn again by something else than Keras' initializers.",
            weights=(one.start.trained.size, many.start.trained.size),
            remedy="Make every layer inside of `build`, and draw weights from a fixed seed.",
        )


def reject_nothing_trained(one: Run) -> None:
    if all(np.array_equal(state.trained, one.start.trained) for state in one.after):
        checks.fail(
            "No weight changed on one device, so there is nothing to compare.",
            batches=len(one.after),
            trainable_weights=one.start.trained.size,
            remedy="Check the learning rate of the first steps, which layers are frozen, and "
            f"`gradient_accumulation_steps`: the first {COMPARED} batches are compared.",
        )
