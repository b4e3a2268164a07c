"""The numbers of a run on several replicas, worked out before it starts."""

import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kdpkit import errors, scaling
from kdpkit._internal import check_results, checks
from kdpkit.diagnostics._plan import milestones as rates
from kdpkit.diagnostics._plan import plan_text, rules

if TYPE_CHECKING:
    from keras.optimizers.schedules import LearningRateSchedule
    from matplotlib.axes import Axes

SHAPES = ("constant", "cosine", "linear", "polynomial", "stable-decay")
OPTIMIZERS = ("sgd", "adam")
REMAINDERS = ("drop", "pad", "keep")  # those of `pipelines.PipelineConfig`

_OF_SCALE = ("global_batch_size", "effective_batch_size", "factor", "learning_rate")
_MOST_POINTS = 2000  # of a line in the figure
_MOST_REPLICAS = 1_000_000
_MOST_RATE = (2 - 2**-23) * 2.0**127  # of float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """What `plan` returns: the settings of a run, see there, and the numbers that follow.

    Attributes:
        scale: Batch sizes and the scaled rate, see `kdpkit.scaling.ScalePlan`.
        base_adam: Adam's settings for one replica.
        warmup_steps: Also where they were set in epochs.
        decay_steps: Steps of the decay of any shape; 0 without one.
        steps_per_epoch: Global batches in one epoch; 0 where there are too few examples for one.
        total_steps: Global batches of the run, which is what a schedule counts.
        updates: Updates of the weights in the run; 0 where it ends before the first.
        left_out: Examples of each epoch that are in no batch.
        padded: Empty examples of each epoch that fill the last batch.
        last_batch: Examples that each replica gets of an epoch's last batch, padding included.
        buffered_examples: Examples that the shuffle buffer holds: never more than there are.
        shuffle_buffer_bytes: Memory of the full buffer, in each process that has one.
        adam: Adam's settings for the batch of an update; None under another rule or optimizer, or
            where the rule has none for the factor.
        adam_problem: Why it has none; empty if it has.
    """

    scale: scaling.ScalePlan
    examples: int
    epochs: int
    optimizer: str | None
    base_adam: scaling.AdamScaling
    shape: str
    warmup_steps: int
    decay_steps: int
    end_learning_rate: float
    power: float
    remainder: str
    shuffle_buffer: int
    bytes_per_example: int | None
    steps_per_epoch: int
    total_steps: int
    updates: int
    left_out: int
    padded: int
    last_batch: tuple[int, ...]
    buffered_examples: int
    shuffle_buffer_bytes: int | None
    adam: scaling.AdamScaling | None
    adam_problem: str

    @property
    def has_schedule(self) -> bool:
        """Whether there are enough steps for the warmup and the decay."""
        if self.shape == "constant":
            return self.total_steps > 0
        return self.decay_steps > 0 and self.warmup_steps + self.decay_steps <= self.total_steps

    def schedule(self) -> "LearningRateSchedule | float":
        """Return the learning rate of the run, for an optimizer: a Keras schedule, or a number.

        Raises:
            ValueError: The run has too few steps for it.
        """
        if not self.has_schedule:
            checks.fail(
                "The run has too few steps for its schedule.",
                total_steps=self.total_steps,
                warmup_steps=self.warmup_steps,
                decay_steps=self.decay_steps,
            )
        peak, warmup = self.scale.learning_rate, self.warmup_steps
        if self.shape == "constant" and not warmup:
            return peak
        from kdpkit import schedules  # loads Keras

        settings: dict[str, Any] = {
            "total_steps": self.total_steps,
            "warmup_steps": warmup,
            "end_learning_rate": self.end_learning_rate,
        }
        match self.shape:
            case "constant":
                return schedules.LinearWarmup(peak, warmup)
            case "cosine":
                return schedules.warmup_cosine(peak, **settings)
            case "stable-decay":
                decay = self.decay_steps
                return schedules.WarmupStableDecay(peak, **settings, decay_steps=decay)
        return schedules.warmup_polynomial(peak, **settings, power=self.power)

    @property
    def milestones(self) -> tuple[rates.Milestone, ...]:
        """Rates at the first step, the middle and the last, and where warmup or peak end.

        Empty where the run has too few steps.
        """
        if not self.has_schedule:
            return ()
        total = self.total_steps
        events = [(0, "first")]
        if self.warmup_steps:
            events.append((self.warmup_steps, "end of warmup"))
        if self.shape == "stable-decay":
            events.append((total - self.decay_steps, "decay begins"))
        events += [(total // 2, "middle"), (total - 1, "last")]
        in_order = sorted((e for e in events if e[0] < total), key=lambda event: event[0])
        return rates.milestones_at(self.schedule(), in_order)

    @property
    def findings(self) -> tuple[check_results.Finding, ...]:
        """Where a rule leaves its range, or the run wastes data; the worst first."""
        return rules.findings_on(self)

    @property
    def clean(self) -> bool:
        """Whether there are only notes."""
        return check_results.are_notes(self.findings)

    def __str__(self) -> str:
        """Return lines of at most 80 columns."""
        return str(plan_text.Plans([self]))

    def plot(self, path: str | os.PathLike[str] | None = None) -> "Axes":
        """Draw the learning rate over the steps of the run, and return the axes.

        Args:
            path: Image file to write, as for `kdpkit.schedules.plot`, which has the errors too.
        """
        return plot([self], path)

    def to_dict(self) -> dict[str, Any]:
        """Return settings and numbers as plain values, for JSON."""
        numbers = dataclasses.asdict(self)
        scale = numbers.pop("scale") | {name: getattr(self.scale, name) for name in _OF_SCALE}
        return {
            "clean": self.clean,
            **scale,
            **numbers,
            "milestones": [*map(dataclasses.asdict, self.milestones)],
            "findings": check_results.as_dicts(self.findings),
        }


def plan(
    *,
    examples: int,
    per_replica_batch_size: int,
    base_learning_rate: float,
    epochs: int = 1,
    replicas: int = 1,
    rule: str = "linear",
    accumulation: int = 1,
    optimizer: str | None = None,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-7,
    shape: str = "constant",
    warmup_steps: int | None = None,
    warmup_epochs: float | None = None,
    decay_steps: int | None = None,
    end_learning_rate: float = 0.0,
    power: float = 1.0,
    remainder: str = "drop",
    shuffle_buffer: int = 10_000,
    bytes_per_example: int | None = None,
) -> TrainingPlan:
    """Work out the numbers of a run on several replicas, and what is wrong with them.

    Nothing is trained and no device is looked for. Batch sizes and rates are those of
    `kdpkit.scaling.ScalePlan`, the last batch is cut as by `kdpkit.scaling.split_batch`, and the
    schedule is one of `kdpkit.schedules`.

    >>> small = plan(
    ...     examples=60_000, per_replica_batch_size=32, base_learning_rate=0.1, replicas=8, epochs=5
    ... )
    >>> small.scale.global_batch_size, small.steps_per_epoch, small.left_out, small.updates
    (256, 234, 96, 1170)
    >>> small.milestones[-1]
    Milestone(step=1169, event='last', learning_rate=0.8)

    Args:
        examples: Number of training examples, all replicas together.
        per_replica_batch_size: Examples that one replica takes from each batch.
        base_learning_rate: Rate for `per_replica_batch_size` examples per update.
        epochs: Passes over the examples.
        replicas: Number of replicas that train in step.
        rule: How the rate grows with the batch: `"linear"`, `"sqrt"` or `"none"`.
        accumulation: Batches whose gradients make one update.
        optimizer: `"sgd"`, or `"adam"` for Adam and its variants. None leaves it open.
        beta_1: Adam's at the batch of one replica.
        beta_2: Adam's at the batch of one replica.
        epsilon: Adam's at the batch of one replica.
        shape: `"constant"`, `"cosine"`, `"linear"`, `"polynomial"` or `"stable-decay"`: the rate
            after the warmup. The last one is `kdpkit.schedules.WarmupStableDecay`.
        warmup_steps: Steps (global batches) of linear warmup from 0.
        warmup_epochs: The same in epochs, also parts of one; instead of `warmup_steps`.
        decay_steps: Steps of the decay of `"stable-decay"`; None is a fifth of the run, in the
            range that Hägele et al. 2024 (arXiv:2405.18392) recommend.
        end_learning_rate: Rate that a decay reaches.
        power: Exponent of `"polynomial"`.
        remainder: `"drop"`, `"pad"` or `"keep"`, as in `kdpkit.pipelines.PipelineConfig`.
        shuffle_buffer: Examples to draw from when shuffling; 0 keeps the order.
        bytes_per_example: Memory of one example when it is shuffled, for that of the buffer.

    Raises:
        ValueError: A number out of its range, or settings that exclude each other. What a longer
            run, or fewer replicas, would fix is a finding.
    """
    scale = scaling.ScalePlan(
        replicas=replicas,
        per_replica_batch_size=per_replica_batch_size,
        base_learning_rate=base_learning_rate,
        rule=rule,
        accumulation=accumulation,
    )
    checks.number("replicas", replicas, maximum=_MOST_REPLICAS)  # each gets its last batch listed
    checks.number("learning_rate", scale.learning_rate, maximum=_MOST_RATE)
    examples = checks.integer("examples", examples)
    epochs = checks.integer("epochs", epochs)
    buffer = checks.integer("shuffle_buffer", shuffle_buffer, minimum=0)
    if bytes_per_example is not None:
        bytes_per_example = checks.integer("bytes_per_example", bytes_per_example)
    checks.one_of("remainder", remainder, REMAINDERS)
    checks.one_of("optimizer", optimizer, (None, *OPTIMIZERS))
    checks.one_of("shape", shape, SHAPES)
    batches = _batches(scale, examples, epochs, remainder)
    total = batches["total_steps"]
    warmup = _warmup(warmup_steps, warmup_epochs, batches["steps_per_epoch"])
    if shape != "constant" or warmup:
        rates.countable("warmup_steps", warmup)
        rates.countable("total_steps", total)
    base_adam = scaling.scale_adam(
        scale.base_learning_rate, factor=1, beta_1=beta_1, beta_2=beta_2, epsilon=epsilon
    )
    is_asked_for = scale.rule == "sqrt" and optimizer != "sgd"
    adam, adam_problem = _scaled(base_adam, scale.factor) if is_asked_for else (None, "")
    buffered = min(buffer, examples)
    return TrainingPlan(
        scale=scale,
        examples=examples,
        epochs=epochs,
        optimizer=optimizer,
        base_adam=base_adam,
        shape=shape,
        warmup_steps=warmup,
        decay_steps=_decay(shape, decay_steps, total, warmup),
        end_learning_rate=_end_rate(shape, end_learning_rate, scale.learning_rate),
        power=_power(shape, power),
        remainder=remainder,
        shuffle_buffer=buffer,
        bytes_per_example=bytes_per_example,
        buffered_examples=buffered,
        shuffle_buffer_bytes=bytes_per_example and buffered * bytes_per_example,
        adam=adam,
        adam_problem=adam_problem,
        **batches,
    )


def _batches(
    scale: scaling.ScalePlan, examples: int, epochs: int, remainder: str
) -> dict[str, Any]:
    size, drops = scale.global_batch_size, remainder == "drop"
    steps, rest = examples // size, examples % size
    steps += bool(rest and not drops)
    last = rest if remainder == "keep" and rest else size
    return {
        "steps_per_epoch": steps,
        "total_steps": epochs * steps,
        "updates": epochs * steps // scale.accumulation,
        "left_out": rest if drops else 0,
        "padded": -examples % size if remainder == "pad" else 0,
        "last_batch": scaling.split_batch(last if steps else 0, scale.replicas),
    }


def plot(plans: Sequence[TrainingPlan], path: str | os.PathLike[str] | None = None) -> "Axes":
    """Draw the rates of plans that differ in their replicas, of all with enough steps for one."""
    drawn = [each for each in plans if each.has_schedule]
    if not drawn:
        plans[0].schedule()  # which raises the reason
    import numpy as np

    from kdpkit import schedules  # loads Keras
    from kdpkit._internal.pyplot import pyplot_for, saved

    _, axes = pyplot_for(path).subplots(figsize=(8.0, 4.5), layout="constrained")
    for each in drawn:
        total, marked = each.total_steps, [milestone.step for milestone in each.milestones]
        spread = np.linspace(0, total - 1, min(total, _MOST_POINTS)).round().astype(int)
        steps = sorted({*spread.tolist(), *marked})
        schedules.plot(each.schedule(), steps, axes=axes)
        line = axes.lines[-1]
        dots = np.searchsorted(steps, marked).tolist()
        line.set(label=f"R = {each.scale.replicas}", marker="o", markersize=4, markevery=dots)
        if len(drawn) > 1:  # over epochs, of which all have as many
            line.set_xdata(line.get_xdata() * each.epochs / total)
    axes.relim()
    axes.autoscale()
    axes.set(
        ylim=(min(0.0, axes.get_ylim()[0]), None), xlabel="epoch" if len(drawn) > 1 else "step"
    )
    axes.legend() if len(drawn) > 1 else axes.set_title(axes.lines[0].get_label())
    if path is not None:
        saved(axes.figure, path)
    return axes


def _warmup(steps: int | None, epochs: float | None, steps_per_epoch: int) -> int:
    if steps is not None and epochs is not None:
        checks.fail(
            "Set the warmup in steps or in epochs.", warmup_steps=steps, warmup_epochs=epochs
        )
    if epochs is not None:
        most = float(rates.MOST_STEPS)
        epochs = checks.number("warmup_epochs", epochs, minimum=0, maximum=most)
        return round(epochs * steps_per_epoch)
    return checks.integer("warmup_steps", steps or 0, minimum=0)


def _decay(shape: str, steps: int | None, total_steps: int, warmup: int) -> int:
    left = max(total_steps - warmup, 0)
    if shape == "stable-decay":
        fifth = min(max(total_steps // 5, 1), left)
        return fifth if steps is None else checks.integer("decay_steps", steps)
    if steps is not None:
        checks.fail(
            "`decay_steps` is for the shape 'stable-decay'; the others decay from the warmup to "
            "the end of the run.",
            shape=shape,
            decay_steps=steps,
        )
    return 0 if shape == "constant" else left


def _end_rate(shape: str, rate: float, peak: float) -> float:
    rate = checks.number("end_learning_rate", rate, minimum=0, maximum=peak)
    if rate and shape == "constant":
        checks.fail("A constant rate ends where it began.", shape=shape, end_learning_rate=rate)
    return rate


def _power(shape: str, power: float) -> float:
    power = checks.number("power", power, above=0)
    if power != 1 and shape != "polynomial":
        checks.fail("`power` is for the shape 'polynomial'.", shape=shape, power=power)
    return power


def _scaled(base: scaling.AdamScaling, factor: int) -> tuple[scaling.AdamScaling | None, str]:
    """Return Adam's settings by the square-root rule, or why it has none for the factor."""
    try:
        return scaling.scale_adam(**dataclasses.asdict(base), factor=factor), ""
    except errors.InputError as error:
        return None, str(error)
