"""What `check_parity` found, as data and in sentences."""

import dataclasses

from kdpkit._internal import error_text

TOLERANCE = 1e-5  # of the largest change of any weight: float32 rounds about here


@dataclasses.dataclass(frozen=True)
class ParityReport:
    """What `check_parity` found; `str(report)` is the same in sentences.

    Attributes:
        replicas: How many replicas were compared with one device.
        equal: Whether weights and logs agree to rounding.
        weights: The largest difference of any weight, over the largest change of any weight; NaN
            if the replicas could not train.
        logs: The largest relative difference of loss and metrics, by name.
        batch: The first batch on which they differ, counted from 0; None if they agree.
        factor: What the gradient of the replicas is one device's times, both without clipping;
            None if it is no multiple.
        cause: The likely cause, several with "; " between them, or "" where none of those known
            explains the difference.
        gradients: The largest difference of any gradient of that batch, over the largest gradient;
            None where weights and logs are enough.
        error: What training on replicas raised, where training on one device did not.
    """

    replicas: int
    equal: bool
    weights: float
    logs: dict[str, float]
    batch: int | None = None
    factor: float | None = None
    cause: str = ""
    gradients: float | None = None
    error: Exception | None = None

    @property
    def factor_name(self) -> str:
        """The factor in terms of the replicas R: "1/R", "R", "3/R"; "" where it is none of them."""
        if self.factor is None:
            return ""
        of_replicas = self.factor * self.replicas
        count = round(of_replicas)
        if count < 1 or abs(of_replicas - count) > 1e-3 * count:
            return ""
        return {self.replicas: "1", self.replicas**2: "R"}.get(count, f"{count}/R")

    def __str__(self) -> str:
        """Report what was found, and what to do about it."""
        if self.error is not None:
            return self._failure()
        if self.equal:
            rounding = self.weights > TOLERANCE
            return (
                f"{self.replicas} replicas train what one device trains: weights differ by "
                f"{self.weights:.0e} of their change"
                f"{', no more than rounding does on one device' if rounding else ''}."
            )
        if self.batch is None:
            off = ", ".join(f"{name} by {by:.0e}" for name, by in self.logs.items())
            return f"{self.replicas} replicas train what one device trains, but log it off: {off}."
        return self._difference()

    def _failure(self) -> str:
        error = ": ".join(
            dict.fromkeys([type(self.error).__name__, error_text.first_line(self.error)])
        )
        problem = f"{self.replicas} replicas cannot train what one device trains: {error}."
        return f"{problem} Likely cause: {self.cause}." if self.cause else problem

    def _difference(self) -> str:
        sizes = f"weights differ by {self.weights:.0e} of their change"
        if self.gradients is not None:
            sizes += f", gradients by {self.gradients:.0e} of the largest"
        parts = [
            f"{self.replicas} replicas do not train what one device trains: after batch "
            f"{self.batch} {sizes}."
        ]
        if self.factor is not None and self.factor_name != "1":
            name = f" ({self.factor_name})" if self.factor_name else ""
            parts.append(f"The step is {self.factor:.4g}{name} times one device's.")
        parts.append(f"Likely cause: {self.cause or 'unknown'}.")
        return " ".join(parts)
