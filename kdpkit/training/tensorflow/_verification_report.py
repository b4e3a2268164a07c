"""What verification says of a step that depends on how its batch is cut: which part, and why."""

import dataclasses
import enum
from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np

from kdpkit import errors
from kdpkit._internal import checks

_ALIKE = 1e-3  # of the largest entry, for a factor or an explanation to hold
_SHOWN = 4


class Kind(enum.Enum):
    """What a noted value is; the values up to `LOG` are compared, the others explain."""

    LOSS = "loss"
    GRADIENT = "gradient"
    VARIABLE = "variable"
    LOG = "log"
    SUMMED_LOSS = "loss without shares"
    SUMMED_GRADIENT = "gradient without shares"
    OF_TAPE = "gradient of the tape"


@dataclasses.dataclass(frozen=True)
class Item:
    """A value that a step gave.

    Args:
        label: The same in both cuts.
        kind: What it is.
        name: Whose it is.
        value: The value in float64.
    """

    label: str
    kind: Kind
    name: str
    value: Any

    @property
    def size(self) -> float:
        """The largest finite entry."""
        return float(np.max(np.abs(_finite(self.value)), initial=0.0))

    def difference(self, other: "Item") -> float:
        """Return the largest difference of any entry; infinite if others are not finite."""
        if self.value.shape != other.value.shape:
            return np.inf
        one, two = _limited(self.value, other.value), _limited(other.value, self.value)
        if not np.array_equal(np.isfinite(one), np.isfinite(two)):
            return np.inf
        return float(np.max(np.abs(_finite(one) - _finite(two)), initial=0.0))

    def factor_of(self, other: "Item") -> float | None:
        """Return what this is times another; None if it is no multiple."""
        mine, its = (np.ravel(_finite(item.value)) for item in (self, other))
        if mine.shape != its.shape or not np.any(its):
            return None
        factor = float(mine @ its / (its @ its))
        rest = np.max(np.abs(mine - factor * its), initial=0.0)
        return factor if rest <= _ALIKE * np.max(np.abs(mine), initial=0.0) else None


def _limited(value: Any, other: Any) -> Any:
    """Take an entry that overflowed for the largest of float16, where the other almost did.

    Replicas add up what they have in float32, where a little more than that is finite.
    """
    largest = float(np.finfo(np.float16).max)
    is_close = np.isinf(value) & np.isclose(np.abs(other), largest, rtol=0.1)
    return np.where(is_close, np.sign(value) * largest, value)


def _finite(value: Any) -> Any:
    return np.nan_to_num(value, nan=0.0, posinf=0.0, neginf=0.0)


def reject_random(operations: list[str]) -> NoReturn:
    """Raise an error that says that a step gives something else every time.

    Args:
        operations: What draws random numbers in it, as far as its graph shows.
    """
    if not operations:
        checks.fail(
            f"{_START} It gives something else every time that it runs on the same examples: it "
            "draws random numbers in Python or NumPy, reads an iterator, or keeps a state that is "
            "no variable.",
            operations=operations,
            remedy="Draw with `keras.random` and a `keras.random.SeedGenerator` in an attribute, "
            "keep states in variables that are attributes of the model, and give `fit` all data: "
            "`tf.data.Dataset.zip` joins datasets.",
        )
    checks.fail(
        f"{_START} It gives something else every time that it runs on the same examples, and draws "
        "random numbers that replicas cannot share.",
        operations=sorted(operations),
        remedy="Draw them with `keras.random`, such as `keras.random.normal(ops.shape(x), "
        "seed=keras.random.SeedGenerator(1))` with the generator in an attribute.",
    )


def fail_by_differences(
    split: dict[str, Item], alone: dict[str, Item], names: Iterable[str]
) -> NoReturn:
    """Raise an error that names what differs between the cuts.

    Args:
        split: What the step gives, detailed, with the examples split over the replicas.
        alone: The same with all of them on the first replica.
        names: What differs in the step as it trains.
    """
    differing = [
        (split[label], alone[label])
        for label in split.keys() & alone.keys()
        if split[label].kind in _PROBLEMS
        and not split[label].difference(alone[label]) <= 5e-6 * alone[label].size
    ]
    received: dict[str, Any]
    kinds = [kind for kind in _PROBLEMS if any(one.kind is kind for one, _ in differing)]
    if not kinds:  # only in the step without details
        received = {"differing": sorted(names)[:_SHOWN]}
        fail("What it gives depends on how a batch is cut.", received, _REMEDIES["meet"])
    kind = kinds[0]
    pairs = [(one, other) for one, other in differing if one.kind is kind]
    reason = _reason(kind, pairs, split, alone)
    owners = [*dict.fromkeys(one.name for one, _ in pairs)]
    received = {kind.value: owners[:_SHOWN]}
    if len(owners) > _SHOWN:
        received["and"] = f"{len(owners) - _SHOWN} more"
    if (factor := _common_factor(pairs)) is not None:
        received["factor"] = round(factor, 4)
    fail(_PROBLEMS[kind], received, _REMEDIES[reason])


def fail(problem: str, received: dict[str, Any], remedy: str) -> NoReturn:
    """Raise the error of a step that would train something else."""
    message = checks.sentence(f"{_START} {problem}", received, remedy)
    raise errors.VerificationError(message, problem=problem)


_START = "On replicas this step would train something else than on one device."
_PROBLEMS = {
    Kind.LOSS: "A loss depends on how a batch is cut.",
    Kind.VARIABLE: "What the step assigns to a variable depends on how a batch is cut.",
    Kind.GRADIENT: "The gradients that the optimizer gets depend on how a batch is cut.",
    Kind.LOG: "What is logged depends on how a batch is cut.",
}
_REMEDIES = {
    "sum": "It is a sum over each replica's examples: make it a mean over them, or take the sum "
    "over all of them, `ops.sum(kdpkit.training.gather_examples(values))`.",
    "changed": "Each replica changes its own gradients between `tape.gradient` and "
    "`optimizer.apply`: do it in the optimizer's `apply`, which gets the gradients of the global "
    "batch, or for clipping set `clipnorm`, `global_clipnorm` or `clipvalue`.",
    "meet": "Where the examples of a batch are compared or normalized with each other, do it on "
    "`kdpkit.training.gather_examples(x)`, the examples of all replicas; what is added up over "
    "examples must be a mean over them. A tensor kept in an object that is no layer may be another "
    "replica's by the time that it is read: keep it in an attribute of a layer, or return it.",
    "assigned": "Train variables with an optimizer that the model holds in an attribute "
    "(`self.optimizer.apply`), and assign means over the examples, or what "
    "`kdpkit.training.gather_examples(x)` gives.",
    "logged": "Log means over the examples, and let the state of a metric be a sum over them.",
}


def _reason(
    kind: Kind, pairs: list[tuple[Item, Item]], split: dict[str, Item], alone: dict[str, Item]
) -> str:
    if kind is Kind.VARIABLE:
        return "assigned"
    if kind is Kind.LOG:
        return "logged"
    without_shares = {
        Kind.LOSS: Kind.SUMMED_LOSS,
        Kind.GRADIENT: Kind.SUMMED_GRADIENT,
    }[kind]
    if _explains(without_shares, pairs, split):
        return "sum"
    of_tape = [label for label in split if split[label].kind is Kind.OF_TAPE]
    if (
        kind is Kind.GRADIENT
        and of_tape
        and all(
            split[label].difference(alone[label]) <= _ALIKE * alone[label].size for label in of_tape
        )
    ):
        return "changed"
    return "meet"


def _explains(kind: Kind, pairs: list[tuple[Item, Item]], split: dict[str, Item]) -> bool:
    """Return whether the values without shares are what one device gives."""
    of_kind = [item for item in split.values() if item.kind is kind]
    by_name: dict[str, list[Item]] = {}
    for item in of_kind:
        by_name.setdefault(item.name, []).append(item)
    return bool(pairs) and all(
        any(item.difference(other) <= _ALIKE * other.size for item in by_name.get(other.name, []))
        for _, other in pairs
    )


def _common_factor(pairs: list[tuple[Item, Item]]) -> float | None:
    factors = [one.factor_of(other) for one, other in pairs]
    first = factors[0]
    alike = first is not None and all(
        factor is not None and abs(factor - first) <= _ALIKE * abs(first) for factor in factors
    )
    return first if alike else None
