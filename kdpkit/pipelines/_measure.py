"""How fast a `tf.data` pipeline is, and which of its stages takes the time."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from kdpkit import _checks
from kdpkit._tuning import untuned
from kdpkit.pipelines import _structure
from kdpkit.pipelines._counting import require_dataset
from kdpkit.pipelines._structure import Stage

_JOINS = frozenset({"batch", "padded_batch", "ragged_batch", "train_pipeline"})
_CUTS = _JOINS | {"rebatch", "group_by_window"}
_OPENS = frozenset({"flat_map", "interleave", "unbatch", "window"})
# Where the number of elements changes in a way that is not known.
_BEGINS = _OPENS | {"group_by_window", "rebatch"}
_CLOCK_SECONDS = 0.2
_TRIES = 3
_WARM_UP = 2  # elements, after which every function of a pipeline has run
_NAME_WIDTH = 34


@dataclasses.dataclass(frozen=True)
class StageCost:
    """What one stage adds to the time that an example takes.

    Attributes:
        stage: The stage as it was written, such as `"map(decode)"` or `"batch(32)"`.
        microseconds_per_example: What it adds in the first epoch, at least 0, for one who waits for
            the examples. Work that a stage does in parallel to other work, or ahead of time, costs
            what of it remains. None if it was not measured.
        later_microseconds_per_example: The same in later epochs, which read what a cache has
            stored. None if it was not measured, as when a cache was not filled in time.
    """

    stage: str
    microseconds_per_example: float | None
    later_microseconds_per_example: float | None


@dataclasses.dataclass(frozen=True)
class PipelineReport:
    """What `measure` found. Printed, it is a table.

    Attributes:
        examples_per_second: Rows of batches per second, after the first batch. Caches that were
            filled while stages were measured are read here, as in later epochs.
        batches_per_second: Elements of the dataset per second, after the first.
        first_batch_seconds: From the beginning of an iteration to its first element, the filling of
            shuffle buffers included.
        batches: Elements on which this was measured.
        examples: Rows in them.
        stages: The cost of each stage, the source first.
    """

    examples_per_second: float
    batches_per_second: float
    first_batch_seconds: float
    batches: int
    examples: int
    stages: tuple[StageCost, ...]

    @property
    def slowest(self) -> str | None:
        """The stage that adds most to an example's time; None if none was measured."""
        measured = [one for one in self.stages if one.microseconds_per_example is not None]
        if not measured:
            return None
        return max(measured, key=lambda one: one.microseconds_per_example or 0.0).stage

    def to_dict(self) -> dict[str, Any]:
        """Give the report as plain values, for JSON."""
        return {**dataclasses.asdict(self), "slowest": self.slowest}

    def __str__(self) -> str:
        """Say it in lines of at most 80 columns."""
        head = (
            f"{self.examples_per_second:,.0f} examples/s, {self.batches_per_second:,.1f} batches/s "
            f"(measured on {self.batches:,}); the first after {self.first_batch_seconds:.2f} s"
        )
        columns = f"{'stage':{_NAME_WIDTH}} {'us/example':>12} {'share':>6} {'later epochs':>13}"
        rows = [self._row(cost) for cost in self.stages]
        return "\n".join([head, "", columns, *rows])

    def _row(self, cost: StageCost) -> str:
        total = sum(one.microseconds_per_example or 0.0 for one in self.stages)
        spent, later = cost.microseconds_per_example, cost.later_microseconds_per_example
        name = (
            cost.stage if len(cost.stage) <= _NAME_WIDTH else f"{cost.stage[: _NAME_WIDTH - 3]}..."
        )
        share = f"{spent / total:.0%}" if spent is not None and total else "-"
        columns = [f"{name:{_NAME_WIDTH}}", f"{_figure(spent):>12}", f"{share:>6}"]
        columns.append(f"{_figure(later):>13}")
        return " ".join([*columns, "slowest"] if cost.stage == self.slowest else columns)


def _figure(microseconds: float | None) -> str:
    return "-" if microseconds is None else f"{microseconds:,.1f}"


def measure(dataset: tf.data.Dataset, *, seconds: float = 5.0) -> PipelineReport:
    """Iterate a pipeline without training, and tell its speed and what each stage costs.

    The pipeline is run as it is, and so is what it gives up to each of its stages. A stage's cost
    is the time that an example takes longer with it than without it, for one who waits for it:
    work in parallel, or ahead of time, costs what of it remains to be waited for. Datasets that
    come together (`zip`, `choose_from_datasets`), files that are opened (`interleave`, `flat_map`)
    and all before them are one stage; so are shuffling, batching and augmentation inside of a
    `train_pipeline`. Where examples are left out, by `filter` say, the stage is charged with the
    reading of those too.

    Options stay as they are, but for tf.data's tuning, which is off while single stages are
    measured: dropping such an iterator can stand still for up to a minute. So a serial map that the
    tuning would make parallel is timed as it is written. The epoch of a `train_pipeline` does not
    move; `shuffle` draws the orders of some epochs, and caches are filled as training would fill
    them.

    Args:
        dataset: What `fit` is to be given, before it is distributed.
        seconds: How long to measure, all in all, and longer where three elements of each stage take
            longer. What must be done before a first element (filling a shuffle's buffer) comes on
            top: stages behind such a buffer are left out if it takes longer than their part of the
            time.

    Returns:
        The report: `examples_per_second`, `batches_per_second`, `first_batch_seconds`, `stages`,
        `slowest`, `to_dict()`; printed, a table.

    Raises:
        ValueError: It is no `tf.data.Dataset`, or gives nothing; `seconds` is not positive.

    >>> report = measure(tf.data.Dataset.range(1000).batch(10).prefetch(2), seconds=0.5)
    >>> [cost.stage for cost in report.stages]
    ['range', 'batch(10)', 'prefetch(2)']
    >>> report.examples_per_second > report.batches_per_second > 0
    True
    """
    require_dataset("dataset", dataset)
    seconds = _checks.number("seconds", seconds, above=0)
    end = _structure.end_of(dataset)
    with undisturbed(dataset):
        size = _rows_in_element(dataset, end)
        costs = _costs(end, size, seconds / 2)
        return _whole(dataset, seconds / 2, is_batched=_gives_batches(end), stages=tuple(costs))


@contextlib.contextmanager
def undisturbed(dataset: tf.data.Dataset) -> Iterator[None]:
    """Leave the epoch of every `train_pipeline` within a dataset where it is."""
    with contextlib.ExitStack() as counters:
        for stage in _train_pipelines(_structure.end_of(dataset)):
            counters.enter_context(stage.made_by.movable.counter.undisturbed())
        yield


def _train_pipelines(end: Stage) -> Iterator[Stage]:
    return (stage for stage, _ in _structure.paths(end) if stage.kind == "train_pipeline")


def _gives_batches(end: Stage) -> bool:
    """Tell whether elements have rows, as far as the stages say."""
    for stage in reversed(_structure.line(end)):
        if stage.kind in _CUTS:
            return True
        if stage.kind in _OPENS:
            return False
        if len(stage.inputs) > 1:
            return any(map(_gives_batches, stage.inputs))
    return False


def _rows(element: Any) -> int:
    shape = tf.nest.flatten(element)[0].shape
    return int(shape[0] or 0) if len(shape) else 1  # a batch that was made one number


def _whole(
    dataset: tf.data.Dataset, seconds: float, *, is_batched: bool, stages: tuple[StageCost, ...]
) -> PipelineReport:
    """Iterate the dataset as `fit` does, for a time."""
    began = time.perf_counter()
    rows: list[int] = []
    first = ended = began
    for element in dataset:
        rows.append(_rows(element) if is_batched else 1)
        ended = time.perf_counter()
        first = first if len(rows) > 1 else ended
        if ended - first > seconds:
            break
    if not rows:
        _checks.refuse("`dataset` gives nothing to measure.", dataset=dataset.element_spec)
    counted = rows[1:] or rows  # where there is only one, with the time that it took
    elapsed = ended - first if len(rows) > 1 else first - began
    return PipelineReport(
        sum(counted) / elapsed,
        len(counted) / elapsed,
        first_batch_seconds=first - began,
        batches=len(rows),
        examples=sum(rows),
        stages=stages,
    )


@dataclasses.dataclass(frozen=True)
class _Run:
    """How long a dataset took for its elements.

    Attributes:
        seconds: For each element, the first two left out if there are more.
        is_whole: Whether it came to the dataset's end.
    """

    seconds: float
    is_whole: bool


def _costs(end: Stage, size: float, seconds: float) -> list[StageCost]:
    """Measure what each stage adds, from the source on."""
    measured = _measured_stages(end, size)
    share = seconds / (len(measured) + 1)
    clock = _fastest(tf.data.Dataset.from_tensors(0).repeat(), min(share, _CLOCK_SECONDS))
    costs: list[StageCost] = []
    before = 0.0  # seconds for an example, as the next stage sees it
    reads_cache = not any(stage.kind == "cache" for stage, _ in measured)
    for stage, per_example in measured:
        if _fills_too_long(stage, before, share):
            break
        fills = _run(stage.dataset, share) if stage.kind == "cache" else None
        seconds_each = fills.seconds if fills else _fastest(stage.dataset, share)
        spent = max(0.0, seconds_each - clock) * per_example
        added = 1e6 * max(0.0, spent - before)
        cost = StageCost(stage.label, added, added if reads_cache else None)
        if fills and fills.is_whole:
            reads_cache = True
            spent = max(0.0, _fastest(stage.dataset, share) - clock) * per_example
            costs = [dataclasses.replace(one, later_microseconds_per_example=0.0) for one in costs]
            cost = dataclasses.replace(cost, later_microseconds_per_example=1e6 * spent)
        before = spent
        costs.append(cost)
    return [*costs, *(StageCost(stage.label, None, None) for stage, _ in measured[len(costs) :])]


def _measured_stages(end: Stage, size: float) -> list[tuple[Stage, float]]:
    """Give the stages whose elements can be counted, and how many make one example at the end."""
    stages: list[tuple[Stage, float]] = []
    per_example = 1 / size
    for stage in reversed(_structure.line(end)):
        stages.append((stage, per_example))
        joined = _joined(stage)
        if stage.kind in _BEGINS or joined is None:
            break
        per_example *= joined
    return stages[::-1]


def _joined(stage: Stage) -> int | None:
    """Count the elements of its input that a stage makes one of; None if that is unknown."""
    if stage.kind == "train_pipeline":
        return int(stage.made_by.movable.global_batch_size)
    return stage.setting("batch_size") if stage.kind in _JOINS else 1


def _rows_in_element(dataset: tf.data.Dataset, end: Stage) -> float:
    """Count the rows of a full batch, 1 where there are no batches."""
    if not _gives_batches(end):
        return 1.0
    cuts = [stage for stage in _structure.line(end) if stage.kind in _CUTS]
    if cuts and cuts[-1].kind in _JOINS and (known := _joined(cuts[-1])) is not None:
        return float(known)
    return float(max([1, *(_rows(element) for element in dataset.take(1))]))


def _fills_too_long(stage: Stage, seconds_per_element: float, share: float) -> bool:
    """Tell whether a shuffle's buffer takes longer to fill than a stage is measured."""
    if stage.kind != "shuffle":
        return False
    buffer, available = stage.setting("buffer_size") or 0, stage.inputs[0].cardinality
    filled = min(buffer, available) if available is not None and available >= 0 else buffer
    return filled * seconds_per_element > share


def _fastest(dataset: tf.data.Dataset, seconds: float) -> float:
    """Give the seconds for an element in the fastest of a few runs: others were disturbed."""
    until = time.perf_counter() + seconds
    fastest = _run(dataset, seconds / _TRIES).seconds
    for _ in range(_TRIES - 1):
        if time.perf_counter() < until:
            fastest = min(fastest, _run(dataset, seconds / _TRIES).seconds)
    return fastest


def _run(dataset: tf.data.Dataset, seconds: float) -> _Run:
    """Take elements inside of TensorFlow, where Python adds nothing to their time."""
    started = tf.timestamp()
    nothing = (tf.constant(0, tf.int64), started)  # elements before, and when the clock started

    def count(state: Any, *_: Any) -> Any:
        number, clock = state
        now = tf.timestamp()
        clock = tf.where(number < _WARM_UP, now, clock)
        return (number + 1, clock), (number + 1, clock, now)

    def is_in_time(number: Any, clock: Any, now: Any) -> Any:
        return (number <= _WARM_UP + 1) | (now - clock < seconds)

    until = dataset.scan(nothing, count).take_while(is_in_time)
    number, clock, last = untuned(until).reduce((*nothing, started), lambda _, new: new)
    ended = tf.timestamp()
    counted = int(number) - _WARM_UP
    if counted < 1:
        return _Run(float(ended - started) / max(1, int(number)), is_whole=True)
    return _Run(float(last - clock) / counted, is_whole=bool(ended - clock < seconds))
