"""The numbers of a run on several replicas, worked out before it starts."""

import dataclasses
import os
from typing import Any

from kdpkit import _checks, _findings, scaling
from kdpkit.diagnostics import _milestones, _plan_findings, _plan_text

SHAPES = ("constant", "cosine", "linear", "polynomial", "stable-decay")
OPTIMIZERS = ("sgd", "adam")
REMAINDERS = ("drop", "pad", "keep")  # those of `pipelines.PipelineConfig`

_MOST_REPLICAS = 1_000_000
_MOST_RATE = (2 - 2**-23) * 2.0**127  # of float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """What `plan` gives: the settings of a run, and as properties the numbers that follow.

    Attributes:
        scale: Batch sizes and the scaled rate, see `kdpkit.scaling.ScalePlan`.
        examples: In one epoch, all replicas together.
        epochs: Passes over the examples.
        optimizer: `"sgd"`, `"adam"`, or None where it was not said.
        base_adam: Adam's settings that suit one replica.
        shape: Of the learning rate.
        warmup_steps: Steps of linear warmup.
        decay_steps: Steps of the decay; 0 without one.
        end_learning_rate: Rate that the decay reaches.
        power: Exponent of a polynomial decay.
        remainder: What becomes of a smaller last batch.
        shuffle_buffer: Examples to draw from when shuffling, as asked for.
        bytes_per_example: Of one example in the shuffle buffer; None where it was not said.
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

    @property
    def steps_per_epoch(self) -> int:
        """Global batches in one epoch; 0 where there are too few examples for one."""
        return _steps_per_epoch(self.scale, self.examples, self.remainder)

    @property
    def total_steps(self) -> int:
        """Global batches of the whole run, which is what a schedule counts."""
        return self.epochs * self.steps_per_epoch

    @property
    def updates(self) -> int:
        """Updates of the weights in the whole run; 0 where it ends before the first."""
        if self.total_steps < self.scale.accumulation:
            return 0
        return self.scale.updates(self.examples, epochs=self.epochs, drop_remainder=self._drops)

    @property
    def left_out(self) -> int:
        """Examples of each epoch that are in no batch."""
        return self._rest if self._drops else 0

    @property
    def padded(self) -> int:
        """Rows of each epoch that fill the last batch up, and hold no example."""
        return -self.examples % self.scale.global_batch_size if self.remainder == "pad" else 0

    @property
    def last_batch(self) -> tuple[int, ...]:
        """Rows that each replica gets of an epoch's last batch, filling included."""
        is_smaller = self.remainder == "keep" and self._rest
        size = self._rest if is_smaller else self.scale.global_batch_size
        return scaling.split_batch(size if self.steps_per_epoch else 0, self.scale.replicas)

    @property
    def _drops(self) -> bool:
        return self.remainder == "drop"

    @property
    def _rest(self) -> int:
        return self.examples % self.scale.global_batch_size

    @property
    def buffered_examples(self) -> int:
        """Examples that the shuffle buffer holds: never more than there are."""
        return min(self.shuffle_buffer, self.examples)

    @property
    def shuffle_buffer_bytes(self) -> int | None:
        """Memory of the full shuffle buffer in bytes, in each process that has one."""
        if self.bytes_per_example is None:
            return None
        return self.buffered_examples * self.bytes_per_example

    @property
    def adam(self) -> scaling.AdamScaling | None:
        """Adam's settings for the batch of an update; None under another rule or optimizer.

        It is None too where the rule refuses the factor, which a finding says.
        """
        is_asked_for = self.scale.rule == "sqrt" and self.optimizer != "sgd"
        return None if not is_asked_for or self.adam_refusal else self._scaled_adam()

    @property
    def adam_refusal(self) -> str:
        """Why the square-root rule has no settings of Adam for the factor; empty if it has."""
        try:
            self._scaled_adam()
        except _checks.InputError as error:
            return str(error)
        return ""

    def _scaled_adam(self) -> scaling.AdamScaling:
        base = dataclasses.asdict(self.base_adam)
        return scaling.scale_adam(**base, factor=self.scale.factor)

    @property
    def has_schedule(self) -> bool:
        """Whether there are steps enough for the warmup and the decay."""
        if self.shape == "constant":
            return self.total_steps > 0
        return self.decay_steps > 0 and self.warmup_steps + self.decay_steps <= self.total_steps

    def schedule(self) -> Any:
        """Make the learning rate of the run, for an optimizer: a Keras schedule, or a number.

        Raises:
            ValueError: The run has too few steps for it.
        """
        if not self.has_schedule:
            _checks.refuse(
                "The run has too few steps for its schedule.",
                total_steps=self.total_steps,
                warmup_steps=self.warmup_steps,
                decay_steps=self.decay_steps,
            )
        peak, warmup = self.scale.learning_rate, self.warmup_steps
        if self.shape == "constant" and not warmup:
            return peak
        from kdpkit import schedules  # loads Keras

        if self.shape == "constant":
            return schedules.LinearWarmup(peak, warmup)
        settings: dict[str, Any] = {
            "total_steps": self.total_steps,
            "warmup_steps": warmup,
            "end_learning_rate": self.end_learning_rate,
        }
        if self.shape == "cosine":
            return schedules.warmup_cosine(peak, **settings)
        if self.shape == "stable-decay":
            return schedules.WarmupStableDecay(peak, **settings, decay_steps=self.decay_steps)
        return schedules.warmup_polynomial(peak, **settings, power=self.power)

    @property
    def milestones(self) -> tuple[_milestones.Milestone, ...]:
        """Rates at the first step, the end of the warmup, the middle and the last step.

        With `"stable-decay"` also where the decay begins. Empty where the run has too few steps.
        """
        if not self.has_schedule:
            return ()
        decay_begins = self.total_steps - self.decay_steps
        events = [
            (0, "first"),
            *([(self.warmup_steps, "end of warmup")] if self.warmup_steps else []),
            (self.total_steps // 2, "middle"),
            *([(decay_begins, "decay begins")] if self.shape == "stable-decay" else []),
            (self.total_steps - 1, "last"),
        ]
        reached = [event for event in events if event[0] < self.total_steps]
        return _milestones.at(self.schedule(), sorted(reached, key=lambda event: event[0]))

    @property
    def findings(self) -> tuple[_findings.Finding, ...]:
        """Where a rule leaves its range, or the run wastes data; the worst first."""
        return _plan_findings.of(self)

    @property
    def clean(self) -> bool:
        """Whether there is nothing to mend; notes are fine."""
        return _findings.are_notes(self.findings)

    def __str__(self) -> str:
        """Say it in lines of at most 80 columns."""
        return _plan_text.of([self])

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draw the learning rate over the steps of the run.

        Args:
            path: Picture file to write, as for `kdpkit.schedules.plot`.

        Returns:
            The matplotlib `Axes`.

        Raises:
            ValueError: The run has too few steps, or the picture cannot be written.
            ImportError: matplotlib is not installed.
        """
        return plot([self], path)

    def to_dict(self) -> dict[str, Any]:
        """Give settings and numbers as plain values, for JSON."""
        settings = dataclasses.asdict(self)
        scale, base_adam = settings.pop("scale"), settings.pop("base_adam")
        return {
            "clean": self.clean,
            **scale,
            **settings,
            "base_adam": base_adam,
            "global_batch_size": self.scale.global_batch_size,
            "effective_batch_size": self.scale.effective_batch_size,
            "factor": self.scale.factor,
            "learning_rate": self.scale.learning_rate,
            "steps_per_epoch": self.steps_per_epoch,
            "total_steps": self.total_steps,
            "updates": self.updates,
            "left_out": self.left_out,
            "padded": self.padded,
            "last_batch": list(self.last_batch),
            "buffered_examples": self.buffered_examples,
            "shuffle_buffer_bytes": self.shuffle_buffer_bytes,
            "adam": dataclasses.asdict(self.adam) if self.adam else None,
            "milestones": _milestones.as_dicts(self.milestones),
            "findings": _findings.as_dicts(self.findings),
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
    `kdpkit.scaling.ScalePlan`, the last batch is cut as `kdpkit.scaling.split_batch` says, and the
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
        base_learning_rate: Rate that suits `per_replica_batch_size` examples per update.
        epochs: Passes over the examples.
        replicas: Number of replicas that train in step.
        rule: How the rate grows with the batch: `"linear"`, `"sqrt"` or `"none"`.
        accumulation: Batches whose gradients make one update.
        optimizer: `"sgd"`, or `"adam"` for Adam and what is made after it. None leaves it open.
        beta_1: Adam's at the batch of one replica.
        beta_2: Adam's at the batch of one replica.
        epsilon: Adam's at the batch of one replica.
        shape: `"constant"`, `"cosine"`, `"linear"`, `"polynomial"` or `"stable-decay"`: the rate
            after the warmup. The last one is `kdpkit.schedules.WarmupStableDecay`.
        warmup_steps: Steps (global batches) of linear warmup from 0.
        warmup_epochs: The same in epochs, also parts of one; give one of the two.
        decay_steps: Steps of the decay of `"stable-decay"`; None is a fifth of the run, in the
            range that Hägele et al. 2024 (arXiv:2405.18392) recommend.
        end_learning_rate: Rate that a decay reaches.
        power: Exponent of `"polynomial"`.
        remainder: `"drop"`, `"pad"` or `"keep"`, as in `kdpkit.pipelines.PipelineConfig`.
        shuffle_buffer: Examples to draw from when shuffling; 0 keeps the order.
        bytes_per_example: Memory of one example when it is shuffled, for that of the buffer.

    Raises:
        ValueError: A number out of its range, or settings that exclude each other. What a longer
            run, or fewer replicas, would mend is a finding.
    """
    scale = scaling.ScalePlan(
        replicas=replicas,
        per_replica_batch_size=per_replica_batch_size,
        base_learning_rate=base_learning_rate,
        rule=rule,
        accumulation=accumulation,
    )
    if scale.replicas > _MOST_REPLICAS:
        _checks.refuse(
            f"A plan holds what each replica gets, for {_MOST_REPLICAS:,} of them at most.",
            replicas=scale.replicas,
        )
    if scale.learning_rate > _MOST_RATE:
        _checks.refuse(
            "The scaled rate is more than a float32 holds.",
            base_learning_rate=scale.base_learning_rate,
            factor=scale.factor,
        )
    examples = _checks.integer("examples", examples)
    epochs = _checks.integer("epochs", epochs)
    _checks.one_of("remainder", remainder, REMAINDERS)
    _checks.one_of("optimizer", optimizer, (None, *OPTIMIZERS))
    steps_per_epoch = _steps_per_epoch(scale, examples, remainder)
    warmup = _warmup(warmup_steps, warmup_epochs, steps_per_epoch)
    if shape != "constant" or warmup:
        _milestones.countable("warmup_steps", warmup)
        _milestones.countable("total_steps", epochs * steps_per_epoch)
    return TrainingPlan(
        scale=scale,
        examples=examples,
        epochs=epochs,
        optimizer=optimizer,
        base_adam=_base_adam(scale.base_learning_rate, beta_1, beta_2, epsilon),
        shape=_checks.one_of("shape", shape, SHAPES),
        warmup_steps=warmup,
        decay_steps=_decay(shape, decay_steps, epochs * steps_per_epoch, warmup),
        end_learning_rate=_end_rate(shape, end_learning_rate, scale.learning_rate),
        power=_power(shape, power),
        remainder=remainder,
        shuffle_buffer=_checks.integer("shuffle_buffer", shuffle_buffer, minimum=0),
        bytes_per_example=None
        if bytes_per_example is None
        else _checks.integer("bytes_per_example", bytes_per_example),
    )


def plot(plans: list[TrainingPlan], path: str | os.PathLike[str] | None = None) -> Any:
    """Draw the rates of plans that differ in their replicas, of all with steps enough for one."""
    drawn = [each for each in plans if each.has_schedule]
    if not drawn:
        plans[0].schedule()  # which says why there is none
    from kdpkit.diagnostics import _rate_picture  # loads Keras

    return _rate_picture.draw(
        {
            f"R = {each.scale.replicas}": (each.schedule(), each.total_steps, each.milestones)
            for each in drawn
        },
        path,
        epochs=drawn[0].epochs if len(drawn) > 1 else None,
    )


def _steps_per_epoch(scale: scaling.ScalePlan, examples: int, remainder: str) -> int:
    drops = remainder == "drop"
    if drops and examples < scale.global_batch_size:
        return 0
    return scale.steps_per_epoch(examples, drop_remainder=drops)


def _warmup(steps: int | None, epochs: float | None, steps_per_epoch: int) -> int:
    if steps is not None and epochs is not None:
        _checks.refuse(
            "Give the warmup in steps or in epochs.", warmup_steps=steps, warmup_epochs=epochs
        )
    if epochs is not None:
        most = float(_milestones.MOST_STEPS)
        epochs = _checks.number("warmup_epochs", epochs, minimum=0, maximum=most)
        return round(epochs * steps_per_epoch)
    return _checks.integer("warmup_steps", steps or 0, minimum=0)


def _decay(shape: str, steps: int | None, total_steps: int, warmup: int) -> int:
    left = max(total_steps - warmup, 0)
    if shape == "stable-decay":
        fifth = min(max(total_steps // 5, 1), left)
        return fifth if steps is None else _checks.integer("decay_steps", steps)
    if steps is not None:
        _checks.refuse(
            "`decay_steps` is for the shape 'stable-decay'; the others decay from the warmup to "
            "the end of the run.",
            shape=shape,
            decay_steps=steps,
        )
    return 0 if shape == "constant" else left


def _end_rate(shape: str, rate: float, peak: float) -> float:
    rate = _checks.number("end_learning_rate", rate, minimum=0, maximum=peak)
    if rate and shape == "constant":
        _checks.refuse("A constant rate ends where it began.", shape=shape, end_learning_rate=rate)
    return rate


def _power(shape: str, power: float) -> float:
    power = _checks.number("power", power, above=0)
    if power != 1 and shape != "polynomial":
        _checks.refuse("`power` is for the shape 'polynomial'.", shape=shape, power=power)
    return power


def _base_adam(rate: float, beta_1: float, beta_2: float, epsilon: float) -> scaling.AdamScaling:
    return scaling.scale_adam(rate, factor=1, beta_1=beta_1, beta_2=beta_2, epsilon=epsilon)
