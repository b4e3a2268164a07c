"""The numbers of a run on several replicas, worked out before it starts."""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from kdpkit import errors, scaling
from kdpkit._internal import check_results, checks
from kdpkit.diagnostics._plan import plan_text, rules

if TYPE_CHECKING:
    from keras.optimizers.schedules import LearningRateSchedule

SHAPES = ("constant", "cosine", "linear", "stable-decay")
OPTIMIZERS = ("sgd", "adam")
REMAINDERS = ("drop", "pad", "keep")  # those of `pipelines.PipelineConfig`

_OF_SCALE = ("global_batch_size", "effective_batch_size", "factor", "learning_rate")
_NUMBERS = (
    *("steps_per_epoch", "total_steps", "updates", "left_out", "padded", "last_batch"),
    *("decay_steps", "buffered_examples", "adam_problem"),
)
_COUNTS = ("examples", "per_replica_batch_size", "epochs", "replicas", "accumulation")
_MOST_STEPS = 2**31 - 1  # JAX counts an optimizer's steps in int32
_MOST_REPLICAS = 1_000_000
_MOST_RATE = (2 - 2**-23) * 2.0**127  # of float32


@dataclasses.dataclass(frozen=True)
class Milestone:
    """A step of a run at which the learning rate changes its course, and the rate there.

    Attributes:
        step: As the optimizer counts them, from 0.
        event: Such as `"first"` or `"end of warmup"`.
        learning_rate: The float32 rate, in the fewest digits that identify it.
    """

    step: int
    event: str
    learning_rate: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Work out the numbers of a run on several replicas, and what is wrong with them.

    `plan` is another name of this class. Nothing is trained and no device is looked for. Batch
    sizes and rates are those of `kdpkit.scaling.ScalePlan`, the last batch is split as by
    `kdpkit.scaling.split_batch`, and the schedule is one of `kdpkit.schedules`.

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
        shape: `"constant"`, `"cosine"`, `"linear"` or `"stable-decay"`: the rate after the warmup.
            The last one is `kdpkit.schedules.WarmupStableDecay`, whose decay takes a fifth of the
            run, in the range that Hägele et al. 2024 (arXiv:2405.18392) recommend.
        warmup_steps: Steps (global batches) of linear warmup from 0.
        warmup_epochs: The same in epochs, also parts of one; instead of `warmup_steps`.
        end_learning_rate: Rate that a decay reaches.
        remainder: `"drop"`, `"pad"` or `"keep"`, as in `kdpkit.pipelines.PipelineConfig`.
        shuffle_buffer: Examples to draw from when shuffling; 0 keeps the order.

    Raises:
        ValueError: A number out of its range, or settings that exclude each other. What a longer
            run, or fewer replicas, would fix is a finding.
    """

    examples: int
    per_replica_batch_size: int
    base_learning_rate: float
    epochs: int = 1
    replicas: int = 1
    rule: str = "linear"
    accumulation: int = 1
    optimizer: str | None = None
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7
    shape: str = "constant"
    warmup_steps: int | None = None
    warmup_epochs: float | None = None
    end_learning_rate: float = 0.0
    remainder: str = "drop"
    shuffle_buffer: int = 10_000

    def __post_init__(self) -> None:
        for name in _COUNTS:
            self._keep(name, checks.integer(name, getattr(self, name)))
        self._keep(
            "shuffle_buffer", checks.integer("shuffle_buffer", self.shuffle_buffer, minimum=0)
        )
        checks.number("replicas", self.replicas, maximum=_MOST_REPLICAS)  # each has a last batch
        checks.number("learning_rate", self.scale.learning_rate, maximum=_MOST_RATE)
        checks.one_of("remainder", self.remainder, REMAINDERS)
        checks.one_of("optimizer", self.optimizer, (None, *OPTIMIZERS))
        checks.one_of("shape", self.shape, SHAPES)
        self._keep("warmup_steps", self._warmup())
        if self.shape != "constant" or self.warmup_steps:
            for name in ("warmup_steps", "total_steps"):  # rates of later ones would be wrong
                checks.number(name, getattr(self, name), maximum=_MOST_STEPS)
        self._adam(1)
        end, shape = self.end_learning_rate, self.shape
        checks.number("end_learning_rate", end, minimum=0, maximum=self.scale.learning_rate)
        if end and shape == "constant":
            checks.fail("A constant rate ends where it began.", shape=shape, end_learning_rate=end)

    def _keep(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _warmup(self) -> int:
        steps, epochs = self.warmup_steps, self.warmup_epochs
        if steps is not None and epochs is not None:
            checks.fail(
                "Set the warmup in steps or in epochs.", warmup_steps=steps, warmup_epochs=epochs
            )
        if epochs is None:
            return checks.integer("warmup_steps", steps or 0, minimum=0)
        epochs = checks.number("warmup_epochs", epochs, minimum=0, maximum=_MOST_STEPS)
        return round(epochs * self.steps_per_epoch)

    @functools.cached_property
    def scale(self) -> scaling.ScalePlan:
        """Batch sizes and the scaled rate."""
        return scaling.ScalePlan(
            replicas=self.replicas,
            per_replica_batch_size=self.per_replica_batch_size,
            base_learning_rate=self.base_learning_rate,
            rule=self.rule,
            accumulation=self.accumulation,
        )

    @property
    def steps_per_epoch(self) -> int:
        """Global batches in one epoch; 0 where there are too few examples for one."""
        return (self.examples - self.left_out + self.padded + self._size - 1) // self._size

    @property
    def total_steps(self) -> int:
        """Global batches of the run, which is what a schedule counts."""
        return self.epochs * self.steps_per_epoch

    @property
    def updates(self) -> int:
        """Updates of the weights in the run; 0 where it ends before the first."""
        return self.total_steps // self.accumulation

    @property
    def left_out(self) -> int:
        """Examples of each epoch that are in no batch."""
        return self.examples % self._size if self.remainder == "drop" else 0

    @property
    def padded(self) -> int:
        """Empty examples of each epoch that fill the last batch."""
        return -self.examples % self._size if self.remainder == "pad" else 0

    @property
    def last_batch(self) -> tuple[int, ...]:
        """Examples that each replica gets of an epoch's last batch, padding included."""
        rest = self.examples % self._size if self.remainder == "keep" else 0
        return scaling.split_batch((rest or self._size) * bool(self.steps_per_epoch), self.replicas)

    @property
    def _size(self) -> int:
        return self.scale.global_batch_size

    @property
    def buffered_examples(self) -> int:
        """Examples that the shuffle buffer holds: never more than there are."""
        return min(self.shuffle_buffer, self.examples)

    @property
    def decay_steps(self) -> int:
        """Steps of the decay; 0 without one."""
        left = max(self.total_steps - (self.warmup_steps or 0), 0)
        fifth = min(max(self.total_steps // 5, 1), left)
        return {"constant": 0, "stable-decay": fifth}.get(self.shape, left)

    @property
    def adam(self) -> scaling.AdamScaling | None:
        """Adam's settings for the batch of an update under the rule `"sqrt"`, where it has any."""
        is_asked_for = self.rule == "sqrt" and self.optimizer != "sgd" and not self.adam_problem
        return self._adam(self.scale.factor) if is_asked_for else None

    @property
    def adam_problem(self) -> str:
        """Why the rule `"sqrt"` has no settings for Adam; else empty."""
        if self.rule == "sqrt" and self.optimizer != "sgd":
            try:
                self._adam(self.scale.factor)
            except errors.InputError as error:
                return str(error)
        return ""

    def _adam(self, factor: int) -> scaling.AdamScaling:
        betas = {"beta_1": self.beta_1, "beta_2": self.beta_2, "epsilon": self.epsilon}
        return scaling.scale_adam(self.base_learning_rate, factor=factor, **betas)

    @property
    def has_schedule(self) -> bool:
        """Whether there are enough steps for the warmup and the decay."""
        return self.total_steps > 0 if self.shape == "constant" else self.decay_steps > 0

    def schedule(self) -> "LearningRateSchedule | float":
        """Return the learning rate of the run, for an optimizer: a Keras schedule, or a number.

        Raises:
            ValueError: The run has too few steps for it.
        """
        peak, warmup, total = self.scale.learning_rate, self.warmup_steps or 0, self.total_steps
        if not self.has_schedule:
            checks.fail(
                "The run has too few steps for its schedule.",
                total_steps=total,
                warmup_steps=warmup,
            )
        if self.shape == "constant" and not warmup:
            return peak
        from kdpkit import schedules  # loads Keras

        if self.shape == "constant":
            return schedules.LinearWarmup(peak, warmup)
        settings: dict[str, Any] = {"total_steps": total, "warmup_steps": warmup}
        settings["end_learning_rate"] = self.end_learning_rate
        if self.shape == "stable-decay":
            return schedules.WarmupStableDecay(peak, **settings, decay_steps=self.decay_steps)
        shapes = {"cosine": schedules.warmup_cosine, "linear": schedules.warmup_polynomial}
        return shapes[self.shape](peak, **settings)

    @functools.cached_property
    def milestones(self) -> tuple[Milestone, ...]:
        """Rates at the first step, the middle and the last, and where warmup or peak end.

        Empty where the run has too few steps. For a constant rate no framework is loaded.
        """
        if not self.has_schedule:
            return ()
        total, warmup = self.total_steps, self.warmup_steps
        events = {"first": 0, **({"end of warmup": warmup} if warmup else {})}
        if self.shape == "stable-decay":
            events["decay begins"] = total - self.decay_steps
        events |= {"middle": total // 2, "last": total - 1}
        events = {
            event: step for event, step in events.items() if step is not None and step < total
        }
        schedule = self.schedule()
        rates = [schedule] * len(events)
        if not isinstance(schedule, float):
            from kdpkit import schedules  # loads Keras

            found = schedules.preview(schedule, [*events.values()])
            rates = [float(str(rate)) for rate in found]  # 0.001, not 0.00100000004
        pairs = zip(events.items(), rates, strict=True)
        milestones = [Milestone(step, event, rate) for (event, step), rate in pairs]
        return tuple(sorted(milestones, key=lambda milestone: milestone.step))

    @property
    def findings(self) -> tuple[check_results.Finding, ...]:
        """Where a rule leaves its range, or the run wastes data; the worst first."""
        return check_results.found(rules.RULES, self)

    @property
    def clean(self) -> bool:
        """Whether there are only notes."""
        return check_results.are_notes(self.findings)

    def __str__(self) -> str:
        """Return lines of at most 80 columns."""
        return str(plan_text.Plans([self]))

    def to_dict(self) -> dict[str, Any]:
        """Return settings and numbers as plain values, for JSON."""
        return {
            "clean": self.clean,
            **dataclasses.asdict(self),
            **{name: getattr(self.scale, name) for name in _OF_SCALE},
            **{name: getattr(self, name) for name in _NUMBERS},
            "adam": self.adam and dataclasses.asdict(self.adam),
            "milestones": [*map(dataclasses.asdict, self.milestones)],
            "findings": check_results.as_dicts(self.findings),
        }


plan = TrainingPlan
