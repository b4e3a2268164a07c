"""Learning-rate schedules that wrap and join each other, on TensorFlow and JAX.

Each is a Keras `LearningRateSchedule`, for an optimizer's `learning_rate` and in saved models
(import this module before loading one). Steps are those that the optimizer counts, from 0, the same
on all replicas. With gradient accumulation Keras counts every batch, not every update, as
`kdpkit.scaling.ScalePlan.total_steps` does.
"""

import contextlib
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import keras
import numpy as np
from keras import ops
from keras.optimizers.schedules import CosineDecay, LearningRateSchedule, PolynomialDecay

from kdpkit import scaling
from kdpkit._internal import checks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "JoinedSchedule",
    "LinearWarmup",
    "ScaledSchedule",
    "plot",
    "preview",
    "warmup_cosine",
    "warmup_polynomial",
]

Rate: TypeAlias = LearningRateSchedule | float


class _Schedule(LearningRateSchedule):
    """A schedule whose config is its constructor's arguments, other schedules among them."""

    def __call__(self, step: Any) -> Any:
        """Return the rate at `step`, a scalar integer of any kind."""
        return self._rate_at(_count(step))

    def _rate_at(self, step: Any) -> Any:
        raise NotImplementedError

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments, schedules in serialised form."""
        names = inspect.signature(type(self)).parameters
        return {name: keras.saving.serialize_keras_object(getattr(self, name)) for name in names}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "_Schedule":
        """Make the schedule from what `get_config` returned."""
        return cls(**{k: keras.saving.deserialize_keras_object(v) for k, v in config.items()})


@keras.saving.register_keras_serializable(package="kdpkit")
class LinearWarmup(_Schedule):
    """Raises the rate along a line to the start of another schedule, then follows that schedule.

    At step `s < warmup_steps` the rate is
    `initial_learning_rate + (schedule(0) - initial_learning_rate) * s / warmup_steps`; from step
    `warmup_steps` on it is `schedule(s - warmup_steps)`, so the two meet at exactly `schedule(0)`.

    >>> warmup = LinearWarmup(keras.optimizers.schedules.PolynomialDecay(1.0, 4, 0.0), 2)
    >>> preview(warmup, 8).tolist()
    [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]

    For the gradual warmup of Goyal et al. 2017 (arXiv:1706.02677) start from the rate of one
    replica: `LinearWarmup(ScaledSchedule(decay, replicas), steps, initial_learning_rate=base)`.

    Args:
        schedule: The schedule that follows, or a number for a constant rate.
        warmup_steps: Length of the warmup in steps, at least one.
        initial_learning_rate: Rate at step 0. With the default the first step changes nothing.

    Raises:
        ValueError: No schedule, no warmup step, or a negative rate.
    """

    def __init__(
        self, schedule: Rate, warmup_steps: int, initial_learning_rate: float = 0.0
    ) -> None:
        super().__init__()
        self.schedule = _schedule("schedule", schedule)
        self.warmup_steps = _steps("warmup_steps", warmup_steps)
        self.initial_learning_rate = checks.number(
            "initial_learning_rate", initial_learning_rate, minimum=0
        )

    def _rate_at(self, step: Any) -> Any:
        # During the warmup this is the rate at step 0, since schedules take no negative step.
        rate = _rate(self.schedule, ops.maximum(step - self.warmup_steps, 0))
        done = ops.cast(step, keras.config.floatx()) / self.warmup_steps
        warming = self.initial_learning_rate + (rate - self.initial_learning_rate) * done
        return ops.where(step < self.warmup_steps, warming, rate)


@keras.saving.register_keras_serializable(package="kdpkit")
class ScaledSchedule(_Schedule):
    """Multiplies another schedule's rate as a `factor` times larger batch asks for.

    >>> decay = keras.optimizers.schedules.PolynomialDecay(1.0, 4, 0.0)
    >>> preview(ScaledSchedule(decay, 4, rule="sqrt"), 5).tolist()
    [2.0, 1.5, 1.0, 0.5, 0.0]

    Args:
        schedule: The schedule that suits the smaller batch, or a number for a constant rate.
        factor: Size of the new batch over the old one, usually `ScalePlan.factor`.
        rule: `"linear"`, `"sqrt"` or `"none"`; see `kdpkit.scaling.scale_learning_rate`.

    Raises:
        ValueError: No schedule, a factor that is not positive, or an unknown rule.
    """

    def __init__(self, schedule: Rate, factor: float, rule: str = "linear") -> None:
        super().__init__()
        self.schedule = _schedule("schedule", schedule)
        self.factor = checks.number("factor", factor, above=0)
        self.rule = checks.one_of("rule", rule, scaling.RULES)

    def _rate_at(self, step: Any) -> Any:
        scale = scaling.scale_learning_rate(1.0, factor=self.factor, rule=self.rule)
        return scale * _rate(self.schedule, step)


@keras.saving.register_keras_serializable(package="kdpkit")
class JoinedSchedule(_Schedule):
    """Follows several schedules one after the other, each from its own step 0.

    The first runs from step 0. Schedule `i` takes over at step `boundaries[i - 1]`, which is its
    step 0; that is, it sees `step - boundaries[i - 1]`.

    >>> decay = keras.optimizers.schedules.PolynomialDecay(1.0, 2, 0.0)
    >>> preview(JoinedSchedule([4.0, decay], [2]), 6).tolist()
    [4.0, 4.0, 1.0, 0.5, 0.0, 0.0]

    Warmup, a stable rate, and decay over the last steps (Hägele et al. 2024, arXiv:2405.18392):

    >>> preview(JoinedSchedule([LinearWarmup(1.0, 2), decay], [4]), 7).tolist()
    [0.0, 0.5, 1.0, 1.0, 1.0, 0.5, 0.0]

    Args:
        schedules: The schedules in order; a number stands for a constant rate.
        boundaries: The steps at which the second and later ones take over, increasing.

    Raises:
        ValueError: No schedule, not one boundary fewer than schedules, or boundaries that leave a
            schedule no step.
    """

    def __init__(self, schedules: Sequence[Rate], boundaries: Sequence[int]) -> None:
        super().__init__()
        self.schedules = [
            _schedule(f"schedules[{index}]", schedule) for index, schedule in enumerate(schedules)
        ]
        self.boundaries = [
            _steps(f"boundaries[{index}]", boundary) for index, boundary in enumerate(boundaries)
        ]
        if len(self.boundaries) != len(self.schedules) - 1:
            checks.fail(
                "Joined schedules need one boundary between each and the next.",
                schedules=len(self.schedules),
                boundaries=self.boundaries,
            )
        if self.boundaries != sorted(set(self.boundaries)):
            checks.fail(
                "`boundaries` must increase, or a schedule gets no step.",
                boundaries=self.boundaries,
            )

    def _rate_at(self, step: Any) -> Any:
        rate = _rate(self.schedules[0], step)
        for boundary, schedule in zip(self.boundaries, self.schedules[1:], strict=True):
            later = _rate(schedule, ops.maximum(step - boundary, 0))
            rate = ops.where(step < boundary, rate, later)
        return rate


def warmup_polynomial(
    peak: float,
    *,
    total_steps: int,
    warmup_steps: int = 0,
    end_learning_rate: float = 0.0,
    power: float = 1.0,
) -> LearningRateSchedule:
    """Make a polynomial decay after a linear warmup, the usual schedule for BERT.

    The rate rises from 0 to `peak` at step `warmup_steps`, falls as
    `(peak - end_learning_rate) * (1 - t)**power + end_learning_rate` and reaches
    `end_learning_rate` at step `total_steps`, one past the last of a run of that length.

    >>> preview(warmup_polynomial(1.0, total_steps=6, warmup_steps=2), 8).tolist()
    [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]

    Args:
        peak: The highest rate.
        total_steps: Length of the schedule in steps, warmup included.
        warmup_steps: Steps of linear warmup; 0 starts at the peak.
        end_learning_rate: Rate from step `total_steps` on, at most `peak`.
        power: Exponent of the decay; 1 is a line.

    Returns:
        Keras' `PolynomialDecay`, within a `LinearWarmup` where there is one.

    Raises:
        ValueError: A warmup that leaves the decay no step, or a rate or power out of range.
    """
    peak, end, decay_steps = _checked(peak, end_learning_rate, total_steps, warmup_steps)
    power = checks.number("power", power, above=0)
    decay = PolynomialDecay(peak, decay_steps, end, power=power)
    return LinearWarmup(decay, warmup_steps) if warmup_steps else decay


def warmup_cosine(
    peak: float, *, total_steps: int, warmup_steps: int = 0, end_learning_rate: float = 0.0
) -> LearningRateSchedule:
    """Make a cosine decay after a linear warmup.

    The rate rises from 0 to `peak` at step `warmup_steps`, falls along half a cosine and reaches
    `end_learning_rate` at step `total_steps`, one past the last of a run of that length
    (Loshchilov and Hutter 2017, arXiv:1608.03983, without restarts).

    >>> preview(warmup_cosine(1.0, total_steps=4, warmup_steps=2), 6).round(3).tolist()
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]

    Arguments and errors are those of `warmup_polynomial`.
    """
    peak, end, decay_steps = _checked(peak, end_learning_rate, total_steps, warmup_steps)
    decay = CosineDecay(peak, decay_steps, alpha=end / peak)
    return LinearWarmup(decay, warmup_steps) if warmup_steps else decay


def preview(schedule: Rate, steps: int | Sequence[int]) -> np.ndarray:
    """Compute the rates of a schedule, of many steps at once.

    >>> preview(keras.optimizers.schedules.PolynomialDecay(1.0, 4, 0.0), [0, 3, 9]).tolist()
    [1.0, 0.25, 0.0]

    Args:
        schedule: A schedule, or a number for a constant rate.
        steps: Number of steps, from step 0; or the steps themselves.

    Returns:
        The rates, one float32 for each step.

    Raises:
        ValueError: No schedule, or a step that is no integer of at least 0.
    """
    schedule, numbers = _schedule("schedule", schedule), ops.convert_to_tensor(_step_numbers(steps))
    # Nearly every schedule takes a vector as it takes a scalar. One with a condition in it, such as
    # `CosineDecay` with `warmup_target`, does not, and is mapped, which is slow.
    with contextlib.suppress(Exception):  # an error of the schedule itself is raised again below
        rates = _rate(schedule, numbers)
        if rates.shape == numbers.shape:
            return ops.convert_to_numpy(rates)
    return ops.convert_to_numpy(ops.vectorized_map(lambda step: _rate(schedule, step), numbers))


def plot(schedule: Rate, steps: int | Sequence[int], *, axes: "Axes | None" = None) -> "Axes":
    """Draw a schedule's rate over the steps, and return the matplotlib `Axes`.

    A notebook shows the figure; elsewhere save it: `plot(schedule, 1000).figure.savefig(path)`.

    Args:
        schedule: As for `preview`.
        steps: As for `preview`.
        axes: matplotlib `Axes` to draw into, to compare several schedules; None makes a figure.
    """
    rates = preview(schedule, steps)
    if axes is None:
        from matplotlib import pyplot  # an optional dependency, which nothing else here needs

        axes = pyplot.subplots(layout="constrained")[1]
    axes.plot(_step_numbers(steps), rates)
    axes.set(xlabel="step", ylabel="learning rate")
    return axes


def _schedule(name: str, value: Rate) -> Rate:
    if isinstance(value, LearningRateSchedule):
        return value
    if not isinstance(value, (int, float, np.number)):
        checks.fail(
            f"`{name}` must be a keras.optimizers.schedules.LearningRateSchedule, or a number for "
            "a constant rate.",
            **{name: value},
        )
    return checks.number(name, value, minimum=0)


def _checked(peak: Any, end: Any, total_steps: Any, warmup_steps: Any) -> tuple[float, float, int]:
    """Return the first rate of a decay after a warmup, its last rate and its steps."""
    peak = checks.number("peak", peak, above=0)
    end = checks.number("end_learning_rate", end, minimum=0, maximum=peak)
    total = _steps("total_steps", total_steps)
    warmup = _steps("warmup_steps", warmup_steps, minimum=0)
    if warmup >= total:
        checks.fail(
            "The warmup leaves no step for the decay.",
            total_steps=total,
            warmup_steps=warmup,
            remedy="`total_steps` includes the warmup; use a shorter warmup.",
        )
    return peak, end, total - warmup


def _steps(name: str, value: Any, *, minimum: int = 1) -> int:
    """Accept a step that the optimizer can count: in 32 bits on JAX, in 64 on TensorFlow."""
    most = np.iinfo(keras.backend.standardize_dtype("int")).max
    if (steps := checks.integer(name, value, minimum=minimum)) > most:
        checks.fail(
            f"Optimizers on the backend {keras.backend.backend()!r} count {most:,} steps at most.",
            **{name: value},
        )
    return steps


def _step_numbers(steps: int | Sequence[int]) -> np.ndarray:
    if isinstance(steps, Sequence | np.ndarray):
        return np.asarray([_steps("steps", step, minimum=0) for step in steps])
    return np.arange(checks.integer("steps", steps))


def _count(step: Any) -> Any:
    """Return a step as the backend's widest integer; a fractional step stays a float.

    Integers matter because float32 cannot represent every step beyond 2**24.
    """
    if isinstance(step, int | np.integer):
        _steps("step", max(step, 0), minimum=0)
    step = ops.convert_to_tensor(step)
    fractional = keras.backend.is_float_dtype(keras.backend.standardize_dtype(step.dtype))
    return step if fractional else ops.cast(step, "int")


def _rate(schedule: Rate, step: Any) -> Any:
    rate = schedule(step) if isinstance(schedule, LearningRateSchedule) else schedule
    return ops.convert_to_tensor(rate, dtype=keras.config.floatx())
