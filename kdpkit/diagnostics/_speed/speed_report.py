"""What `check_speed` found, and how it is said."""

import dataclasses
import textwrap
from typing import Any

_WIDTH = 80
_NAMES = {
    "waiting": "waiting for input",
    "computing": "computing",
    "host": "host (Python, callbacks, calls)",
}


@dataclasses.dataclass(frozen=True)
class SpeedEdit:
    """An edit that makes training faster.

    Attributes:
        part: What it shortens: `"waiting"`, `"computing"` or `"host"`.
        text: What to do.
        step_seconds: What a step takes with it; None if that is not known.
        speedup: The step time before over that; None if it is not known.
        tried: Whether it was tried, so that these are measured; else they are an estimate.
        needs_memory: Whether it keeps the data in memory.
    """

    part: str
    text: str
    step_seconds: float | None = None
    speedup: float | None = None
    tried: bool = True
    needs_memory: bool = False

    def __str__(self) -> str:
        """Say it in one sentence or two."""
        if self.step_seconds is None or self.speedup is None:
            return f"{self.text} Not tried."
        how = "Measured" if self.tried else "Not tried; estimated"
        return (
            f"{self.text} {how}: {milliseconds(self.step_seconds)} a step, {self.speedup:.1f} "
            "times as fast."
        )


@dataclasses.dataclass(frozen=True)
class SpeedReport:
    """What `check_speed` found.

    Attributes:
        verdict: `"input-bound"`, `"compute-bound"` or `"host-bound"`.
        step_seconds: What a step of the real training takes: the sum of the next three.
        waiting_seconds: Of it, waiting for input.
        computing_seconds: Of it, computing.
        host_seconds: Of it, Python, callbacks, and the calls of compiled functions.
        evidence: What was measured, in sentences.
        edits: What to change, first what makes a step shortest; those that were not tried come
            last.
        notes: What could not be measured, and why.
        pipeline: What `kdpkit.pipelines.measure` says of the dataset; None if it is no
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
    pipeline: Any = None

    @property
    def clean(self) -> bool:
        """Whether the time is spent on computing, and no edit that was tried saves much of it."""
        return self.verdict == "compute-bound" and not any(edit.speedup for edit in self.edits)

    @property
    def shares(self) -> dict[str, float]:
        """The parts of a step, each from 0 to 1."""
        return {name: getattr(self, f"{name}_seconds") / self.step_seconds for name in _NAMES}

    def __str__(self) -> str:
        """Say it in lines of at most 80 columns."""
        parts = [self._head(), self._parts(), *map(_wrapped, self.evidence)]
        if self.edits:
            numbered = (_numbered(number, edit) for number, edit in enumerate(self.edits, 1))
            parts.append("\n".join(["What to change, the first one first:", *numbered]))
        return "\n\n".join([*parts, *(_wrapped(f"Note: {note}") for note in self.notes)])

    def _head(self) -> str:
        return f"{self.verdict.capitalize()}: a step takes {milliseconds(self.step_seconds)}."

    def _parts(self) -> str:
        return "\n".join(
            f"{_NAMES[name]:{max(map(len, _NAMES.values()))}} "
            f"{milliseconds(share * self.step_seconds):>10} {share:>5.0%}"
            for name, share in self.shares.items()
        )

    def to_dict(self) -> dict[str, Any]:
        """Give the report as plain values, for JSON."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return plain | {
            "clean": self.clean,
            "shares": self.shares,
            "evidence": [*self.evidence],
            "edits": [dataclasses.asdict(edit) for edit in self.edits],
            "notes": [*self.notes],
            "pipeline": self.pipeline and self.pipeline.to_dict(),
        }


def milliseconds(seconds: float) -> str:
    """Give three digits of a time, in milliseconds.

    >>> milliseconds(0.0123456), milliseconds(1.23456), milliseconds(0.0000123), milliseconds(0)
    ('12.3 ms', '1,235 ms', '0.0123 ms', '0 ms')
    """
    number = 1000 * seconds
    digits = next((d for d, least in enumerate((100, 10, 1, 0.1)) if number >= least), 4)
    digits = digits if number else 0
    return f"{number:,.{digits}f} ms"


def _numbered(number: int, edit: SpeedEdit) -> str:
    return textwrap.fill(
        f"{number}. {edit}", _WIDTH, subsequent_indent="   ", break_on_hyphens=False
    )


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _WIDTH, break_on_hyphens=False)
