"""What `check_speed` found, and how it prints."""

import dataclasses
from typing import TYPE_CHECKING, Any

from kdpkit._internal.check_results import wrapped

if TYPE_CHECKING:
    from kdpkit.pipelines._measure import PipelineReport

_NAMES = {
    "waiting": "waiting for input",
    "computing": "computing",
    "host": "host (callbacks, calls)",
}


@dataclasses.dataclass(frozen=True)
class SpeedEdit:
    """An edit that makes training faster, as it was tried.

    Attributes:
        part: What it shortens: `"waiting"`, `"computing"` or `"host"`.
        text: What to do.
        step_seconds: What a step takes with it.
        speedup: The step time before over that.
        needs_memory: Whether it keeps the data in memory.
    """

    part: str
    text: str
    step_seconds: float
    speedup: float
    needs_memory: bool = False

    def __str__(self) -> str:
        """Return two sentences."""
        step = milliseconds(self.step_seconds)
        return f"{self.text} Measured: {step} a step, {self.speedup:.1f} times as fast."


@dataclasses.dataclass(frozen=True)
class SpeedReport:
    """What `check_speed` found.

    Attributes:
        verdict: `"input-bound"`, `"compute-bound"` or `"host-bound"`.
        step_seconds: What a step of the real training takes: the sum of the next three.
        waiting_seconds: Of it, waiting for input.
        computing_seconds: Of it, computing.
        host_seconds: Of it, callbacks and the calls of compiled functions.
        evidence: What was measured, in sentences.
        edits: What to change, first what makes a step shortest.
        notes: What could not be measured or gains nothing, and why.
        pipeline: What `kdpkit.pipelines.measure` reports on the dataset; None if it is no
            `tf.data.Dataset`.
    """

    verdict: str
    step_seconds: float
    waiting_seconds: float
    computing_seconds: float
    host_seconds: float
    evidence: tuple[str, ...]
    edits: tuple[SpeedEdit, ...]
    notes: tuple[str, ...] = ()
    pipeline: "PipelineReport | None" = None

    @property
    def clean(self) -> bool:
        """Whether the time is spent on computing, and no edit saves much of it."""
        return self.verdict == "compute-bound" and not self.edits

    @property
    def shares(self) -> dict[str, float]:
        """The parts of a step, each from 0 to 1."""
        return {name: getattr(self, f"{name}_seconds") / self.step_seconds for name in _NAMES}

    def __str__(self) -> str:
        """Return lines of at most 80 columns."""
        head = f"{self.verdict.capitalize()}: a step takes {milliseconds(self.step_seconds)}."
        parts = [head, self._parts(), *map(wrapped, self.evidence)]
        if self.edits:
            numbered = (
                wrapped(str(edit), first=f"{number}. ", indent=3)
                for number, edit in enumerate(self.edits, 1)
            )
            parts.append("\n".join(["What to change, in this order:", *numbered]))
        return "\n\n".join([*parts, *(wrapped(f"Note: {note}") for note in self.notes)])

    def _parts(self) -> str:
        return "\n".join(
            f"{_NAMES[name]:{max(map(len, _NAMES.values()))}} "
            f"{milliseconds(share * self.step_seconds):>10} {share:>5.0%}"
            for name, share in self.shares.items()
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        return vars(self) | {
            "clean": self.clean,
            "shares": self.shares,
            "edits": [dataclasses.asdict(edit) for edit in self.edits],
            "pipeline": self.pipeline and self.pipeline.to_dict(),
        }


def milliseconds(seconds: float) -> str:
    """Return three digits of a time, in milliseconds.

    >>> milliseconds(0.0123456), milliseconds(1.23456), milliseconds(0.0000123), milliseconds(0)
    ('12.3 ms', '1,235 ms', '0.0123 ms', '0 ms')
    """
    number = 1000 * seconds
    digits = next((d for d, least in enumerate((100, 10, 1, 0.1)) if number >= least), 4)
    digits = digits if number else 0
    return f"{number:,.{digits}f} ms"
