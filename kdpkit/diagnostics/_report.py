"""The common part of the reports of `check_input` and `check_tpu`."""

import dataclasses
from typing import Any, ClassVar

from kdpkit._internal import check_results


@dataclasses.dataclass(frozen=True)
class Report:
    """What a check found.

    Attributes:
        findings: See `Finding`: rule, level, where, problem, remedy; the worst first.
        checked: What was checked.
    """

    findings: tuple[check_results.Finding, ...]
    checked: tuple[str, ...]

    _reservation: ClassVar[str] = ""  # of a report that found nothing

    @property
    def clean(self) -> bool:
        """Whether there are notes at most."""
        return check_results.are_notes(self.findings)

    def __str__(self) -> str:
        """Return lines of at most 80 columns."""
        count = sum(finding.level != "note" for finding in self.findings)
        result = f"{count} finding{'s' * (count > 1)}" if count else "Nothing found"
        reservation = "" if count else self._reservation
        head = f"{result} (looked at: {', '.join(self.checked)}){reservation}."
        return "\n\n".join([head, *map(str, self.findings)])

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        return {
            "clean": self.clean,
            "checked": list(self.checked),
            "findings": check_results.as_dicts(self.findings),
        }
