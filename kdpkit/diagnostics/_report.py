"""What the reports of `check_input` and `check_tpu` have in common."""

import dataclasses
from typing import Any, ClassVar

from kdpkit import _findings


@dataclasses.dataclass(frozen=True)
class Report:
    """What a check found.

    Attributes:
        findings: See `Finding`: rule, level, where, problem, remedy; the worst first.
        checked: What was looked at.
    """

    findings: tuple[_findings.Finding, ...]
    checked: tuple[str, ...]

    _reservation: ClassVar[str] = ""  # of a report that found nothing

    @property
    def clean(self) -> bool:
        """Whether there are notes at most."""
        return _findings.are_notes(self.findings)

    def __str__(self) -> str:
        """Say it in lines of at most 80 columns."""
        count = sum(finding.level != "note" for finding in self.findings)
        said = f"{count} finding{'s' * (count > 1)}" if count else "Nothing found"
        reservation = "" if count else self._reservation
        head = f"{said} (looked at: {', '.join(self.checked)}){reservation}."
        return "\n\n".join([head, *map(str, self.findings)])

    def to_dict(self) -> dict[str, Any]:
        """Give the report as plain values, for JSON."""
        return {
            "clean": self.clean,
            "checked": list(self.checked),
            "findings": _findings.as_dicts(self.findings),
        }
