"""Measure the speed of a `tf.data` pipeline and the cost of its stages."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from kdpkit._internal import checks
from kdpkit._internal.dataset_tuning import untuned
from kdpkit.pipelines import _structure
from kdpkit.pipelines._counting import require_dataset
from kdpkit.pipelines._epochs import TrainDataset
from kdpkit.pipelines._structure import Stage

_JOINS = frozenset({"batch", "padded_batch", "ragged_batch", "train_pipeline"})
_CUTS = _JOINS | {"rebatch", "group_by_window"}
_OPENS = frozenset({"flat_map", "interleave", "unbatch", "window"})
_CLOCK_SECONDS = 0.2
_TRIES = 3
_WARM_UP = 2  # elements, after which every function of a pipeline has run once


@dataclasses.dataclass(frozen=True)
class StageCost:
    """The time that one stage adds to each example.

    Attributes:
        stage: The stage as written, such as `"map(decode)"` or `"batch(32)"`.
        microseconds_per_example: Time added in the first epoch, at least 0, as seen by the
            consumer. Work done in parallel or ahead of time only counts as far as the consumer
            waits for it. None if it was not measured.
        later_microseconds_per_example: The same in later epochs, which read from caches. None if it
            was not measured, for example because a cache was not filled in time.
    """

    stage: str
    microseconds_per_example: float | None
    later_microseconds_per_example: float | None


@dataclasses.dataclass(frozen=True)
class PipelineReport:
    """What `measure` found. Printed, it is a table.

    Attributes:
        examples_per_second: Examples per second, after the first batch. Caches filled while stages
            were measured are read, as in later epochs.
        batches_per_second: Elements of the dataset per second, after the first.
        first_batch_seconds: Time from the start of an iteration to its first element, including the
            filling of shuffle buffers.
        batches: Number of elements measured.
        examples: Number of examples in them.
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
        """The stage that adds the most time; None if none was measured."""
        measured = [one for one in self.stages if one.microseconds_per_example is not None]
        if not measured:
            return None
        return max(measured, key=lambda one: one.microseconds_per_example or 0.0).stage

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        return {**dataclasses.asdict(self), "slowest": self.slowest}

    def __str__(self) -> str:
        """A table of at most 80 columns."""
        lines = [
            f"{self.examples_per_second:,.0f} examples/s, {self.batches_per_second:,.1f} batches/s "
            f"(measured on {self.batches:,}); the first after {self.first_batch_seconds:.2f} s",
            "",
            f"{'stage':34} {'us/example':>12} {'share':>6} {'later epochs':>13}",
        ]
        total = sum(one.microseconds_per_example or 0.0 for one in self.stages)
        for cost in self.stages:
            spent, later = cost.microseconds_per_example, cost.later_microseconds_per_example
            name = cost.stage if len(cost.stage) <= 34 else f"{cost.stage[:31]}..."
            share = f"{spent / total:.0%}" if spent is not None and total else "-"
            line = f"{name:34} {_figure(spent):>12} {share:>6} {_figure(later):>13}"
            lines.append(f"{line} slowest" if cost.stage == self.slowest else line)
        return "\n".join(lines)


def _figure(microseconds: float | None) -> str:
    return "-" if microseconds is None else f"{microseconds:,.1f}"


def measure(dataset: tf.data.Dataset, *, seconds: float = 5.0) -> PipelineReport:
    """Iterate a pipeline without training, and report its speed and the cost of each stage.

    The pipeline is run up to each of its stages and as a complete pipeline. A stage's cost is the
    additional time per example with it. Combined datasets (`zip`, `choose_from_datasets`), opened
    files (`interleave`, `flat_map`) and everything before them are one stage; so are shuffling,
    batching and augmentation inside a `train_pipeline`. The cost of a stage that removes examples,
    such as `filter`, includes reading the removed ones.

    Options are not changed, except that tf.data's tuning is off while single stages are measured,
    because dropping a tuned iterator can stall for up to a minute. So a serial map that tuning
    would make parallel is timed as written. The epoch of a `train_pipeline` does not change;
    `shuffle` draws the orders of some epochs, and caches are filled as in training.

    Args:
        dataset: The dataset for `fit`, before it is distributed.
        seconds: Total time to measure; longer if three elements of each stage take longer. Filling
            a shuffle buffer is extra: if that takes longer than a stage's part of the time, the
            stages after the shuffle are skipped.

    Raises:
        ValueError: `dataset` is not a `tf.data.Dataset` or is empty, or `seconds` is not positive.

    >>> report = measure(tf.data.Dataset.range(1000).batch(10).prefetch(2), seconds=0.5)
    >>> [cost.stage for cost in report.stages]
    ['range', 'batch(10)', 'prefetch(2)']
    >>> report.examples_per_second > report.batches_per_second > 0
    True
    """
    require_dataset("dataset", dataset)
    seconds = checks.number("seconds", seconds, above=0)
    end = _structure.end_of(dataset)
    with undisturbed(dataset):
        costs = _costs(end, _examples_in_batch(dataset, end), seconds / 2)
        return _iterated(dataset, seconds / 2, is_batched=_is_batched(end), stages=tuple(costs))


@contextlib.contextmanager
def undisturbed(dataset: tf.data.Dataset) -> Iterator[None]:
    """Keep the epoch of every `train_pipeline` inside a dataset."""
    with contextlib.ExitStack() as counters:
        for stage, _ in _structure.paths(_structure.end_of(dataset)):
            if isinstance(stage.made_by, TrainDataset):
                counters.enter_context(stage.made_by.epoch_counter.undisturbed())
        yield


def _is_batched(end: Stage) -> bool:
    """Return whether elements are batches, as far as the stages show."""
    for stage in reversed(_structure.line(end)):
        if stage.kind in _CUTS:
            return True
        if stage.kind in _OPENS:
            return False
        if len(stage.inputs) > 1:
            return any(map(_is_batched, stage.inputs))
    return False


def _examples_in(element: Any) -> int:
    shape = tf.nest.flatten(element)[0].shape
    return int(shape[0] or 0) if len(shape) else 1  # a batch that was reduced to one number


def _examples_in_batch(dataset: tf.data.Dataset, end: Stage) -> int:
    """Count the examples of a full batch, 1 where there are no batches."""
    if not _is_batched(end):
        return 1
    batching = [stage for stage in _structure.line(end) if stage.kind in _CUTS]
    known = _elements_joined(batching[-1]) if batching and batching[-1].kind in _JOINS else None
    return known or max([1, *(_examples_in(element) for element in dataset.take(1))])


def _iterated(
    dataset: tf.data.Dataset, seconds: float, *, is_batched: bool, stages: tuple[StageCost, ...]
) -> PipelineReport:
    """Iterate the dataset as `fit` does, for some time."""
    began = time.perf_counter()
    examples: list[int] = []
    first = ended = began
    for element in dataset:
        examples.append(_examples_in(element) if is_batched else 1)
        ended = time.perf_counter()
        first = first if len(examples) > 1 else ended
        if ended - first > seconds:
            break
    if not examples:
        checks.fail("`dataset` is empty.", dataset=dataset.element_spec)
    counted = examples[1:] or examples  # if there is only one, with the time it took
    elapsed = ended - first if len(examples) > 1 else first - began
    return PipelineReport(
        sum(counted) / elapsed,
        len(counted) / elapsed,
        first_batch_seconds=first - began,
        batches=len(examples),
        examples=sum(examples),
        stages=stages,
    )


def _costs(end: Stage, size: int, seconds: float) -> list[StageCost]:
    """Measure what each stage adds, from the source on."""
    measured = _measured_stages(end, size)
    each = seconds / (len(measured) + 1)
    clock = _fastest(tf.data.Dataset.from_tensors(0).repeat(), min(each, _CLOCK_SECONDS))
    costs: list[StageCost] = []
    before = 0.0  # seconds per example, as seen by the next stage
    reads_cache = not any(stage.kind == "cache" for stage, _ in measured)
    for stage, per_example in measured:
        if _fills_too_long(stage, before, each):
            break
        is_filled = False
        if stage.kind == "cache":
            taken, is_filled = _run(stage.dataset, each)
        else:
            taken = _fastest(stage.dataset, each)
        spent = max(0.0, taken - clock) * per_example
        added = 1e6 * max(0.0, spent - before)
        later = added if reads_cache else None
        if is_filled:
            reads_cache = True
            spent = max(0.0, _fastest(stage.dataset, each) - clock) * per_example
            costs = [dataclasses.replace(one, later_microseconds_per_example=0.0) for one in costs]
            later = 1e6 * spent
        costs.append(StageCost(stage.label, added, later))
        before = spent
    return [*costs, *(StageCost(stage.label, None, None) for stage, _ in measured[len(costs) :])]


def _measured_stages(end: Stage, size: int) -> list[tuple[Stage, float]]:
    """Return the stages whose elements can be counted, and their elements per final example."""
    stages: list[tuple[Stage, float]] = []
    per_example = 1 / size
    for stage in reversed(_structure.line(end)):
        stages.append((stage, per_example))
        joined = _elements_joined(stage)
        if joined is None:
            break
        per_example *= joined
    return stages[::-1]


def _elements_joined(stage: Stage) -> int | None:
    """Return how many input elements a stage combines into one; None if unknown."""
    if isinstance(stage.made_by, TrainDataset):
        return stage.made_by.global_batch_size
    if stage.kind in _OPENS or stage.kind in _CUTS - _JOINS:
        return None
    return stage.setting("batch_size") if stage.kind in _JOINS else 1


def _fills_too_long(stage: Stage, seconds_per_element: float, available_seconds: float) -> bool:
    """Return whether filling a shuffle buffer takes longer than measuring a stage."""
    if stage.kind != "shuffle":
        return False
    buffer, available = stage.setting("buffer_size") or 0, stage.inputs[0].cardinality
    filled = min(buffer, available) if available is not None and available >= 0 else buffer
    return filled * seconds_per_element > available_seconds


def _fastest(dataset: tf.data.Dataset, seconds: float) -> float:
    """Return the seconds per element of the fastest of a few runs; others were disturbed."""
    until = time.perf_counter() + seconds
    fastest, _ = _run(dataset, seconds / _TRIES)
    for _ in range(_TRIES - 1):
        if time.perf_counter() < until:
            fastest = min(fastest, _run(dataset, seconds / _TRIES)[0])
    return fastest


def _run(dataset: tf.data.Dataset, seconds: float) -> tuple[float, bool]:
    """Take elements inside TensorFlow, without Python's overhead.

    Return the seconds per element, without the first two if there are more, and whether the dataset
    ended.
    """
    started = tf.timestamp()
    nothing = (tf.constant(0, tf.int64), started)  # elements so far, and the start time

    def count(state: Any, *_: Any) -> Any:
        number, clock = state
        now = tf.timestamp()
        clock = tf.where(number < _WARM_UP, now, clock)
        return (number + 1, clock), (number + 1, clock, now)

    def is_in_time(number: tf.Tensor, clock: tf.Tensor, now: tf.Tensor) -> tf.Tensor:
        return (number <= _WARM_UP + 1) | (now - clock < seconds)

    until = dataset.scan(nothing, count).take_while(is_in_time)
    number, clock, last = untuned(until).reduce((*nothing, started), lambda _, new: new)
    ended = tf.timestamp()
    counted = int(number) - _WARM_UP
    if counted < 1:
        return float(ended - started) / max(1, int(number)), True
    return float(last - clock) / counted, bool(ended - clock < seconds)
