"""Measure the speed of a `tf.data` pipeline and the cost of its stages."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from kdpkit._internal import checks
from kdpkit._internal.datasets import untuned
from kdpkit.pipelines._counting import require_dataset
from kdpkit.pipelines._epochs import TrainDataset
from kdpkit.pipelines._stages import Stage, line, paths

_JOINS = ("batch", "padded_batch", "ragged_batch", "train_pipeline")
_CUTS = ("rebatch", "group_by_window")
_OPENS = ("flat_map", "interleave", "unbatch", "window")
_CLOCK_SECONDS = 0.2
_TRIES = 3


@dataclasses.dataclass(frozen=True)
class StageCost:
    """The time that one stage adds to each example.

    Attributes:
        stage: The stage as written, such as `"map(decode)"` or `"batch(32)"`.
        microseconds_per_example: Time added in the first epoch, at least 0, as seen by the
            consumer. Work done in parallel or ahead of time only counts as far as the consumer
            waits for it. None if it was not measured.
    """

    stage: str
    microseconds_per_example: float | None


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
            f"{'stage':48} {'us/example':>12} {'share':>6}",
        ]
        total = sum(one.microseconds_per_example or 0.0 for one in self.stages)
        for cost in self.stages:
            spent = cost.microseconds_per_example
            name = cost.stage if len(cost.stage) <= 48 else f"{cost.stage[:45]}..."
            figure = "-" if spent is None else f"{spent:,.1f}"
            share = "-" if spent is None or not total else f"{spent / total:.0%}"
            row = f"{name:48} {figure:>12} {share:>6}"
            lines.append(f"{row} slowest" if cost.stage == self.slowest else row)
        return "\n".join(lines)


def measure(dataset: tf.data.Dataset, *, seconds: float = 5.0) -> PipelineReport:
    """Iterate a pipeline without training, and report its speed and the cost of each stage.

    The pipeline is run up to each of its stages and as a complete pipeline. A stage's cost is the
    additional time per example with it. Combined datasets (`zip`, `choose_from_datasets`), opened
    files (`interleave`, `flat_map`) and everything before them are one stage; so are shuffling,
    batching and augmentation inside a `train_pipeline`. The cost of a stage that removes examples,
    such as `filter`, includes reading the removed ones; that of stages before a cache is paid in
    the first epoch only.

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
    end = Stage(dataset)
    with undisturbed(dataset):
        costs = _costs(end, seconds / 2)
        run = _Run(dataset, seconds / 2)
    if not run.sizes:
        checks.fail("`dataset` is empty.", dataset=dataset.element_spec)
    sizes = run.sizes if _is_batched(end) else [1] * len(run.sizes)
    counted = sizes[1:] or sizes
    return PipelineReport(
        sum(counted) / len(counted) / run.each,
        1 / run.each,
        first_batch_seconds=run.first,
        batches=len(sizes),
        examples=sum(sizes),
        stages=tuple(costs),
    )


@contextlib.contextmanager
def undisturbed(dataset: tf.data.Dataset) -> Iterator[None]:
    """Keep the epoch of every `train_pipeline` inside a dataset."""
    with contextlib.ExitStack() as counters:
        for stage, _ in paths(Stage(dataset)):
            if isinstance(stage.dataset, TrainDataset):
                counters.enter_context(stage.dataset.epoch_counter.undisturbed())
        yield


class _Run:
    """An iteration of a dataset as `fit` does it, for some seconds after the first element.

    Attributes:
        sizes: The examples of each element, if it is a batch.
        first: Seconds before the first element.
        each: Seconds for each later one; of the first if there is no other.
        is_complete: Whether the dataset ended.
    """

    def __init__(self, dataset: tf.data.Dataset, seconds: float) -> None:
        self.sizes: list[int] = []
        self.is_complete = True
        began = started = ended = time.perf_counter()
        for element in dataset:
            ended = time.perf_counter()
            started = ended if not self.sizes else started
            shape = tf.nest.flatten(element)[0].shape
            self.sizes.append(int(shape[0] or 0) if len(shape) else 1)  # or a number for a batch
            if ended - started > seconds:
                self.is_complete = False
                break
        self.first = started - began
        self.each = (ended - started) / (len(self.sizes) - 1) if self.sizes[1:] else self.first


def _is_batched(end: Stage) -> bool:
    """Return whether elements are batches, as far as the stages show."""
    for stage in reversed(line(end)):
        if stage.kind in (*_JOINS, *_CUTS, *_OPENS):
            return stage.kind not in _OPENS
        if len(stage.inputs) > 1:
            return any(map(_is_batched, stage.inputs))
    return False


def _joined(stage: Stage) -> int | None:
    """Return how many input elements a stage combines into one; None if unknown."""
    if isinstance(stage.dataset, TrainDataset):
        return stage.dataset.global_batch_size
    if stage.kind in (*_OPENS, *_CUTS):
        return None
    return stage.setting("batch_size") if stage.kind in _JOINS else 1


def _costs(end: Stage, seconds: float) -> list[StageCost]:
    """Measure what each stage adds, from where datasets are combined, or the source, to the end."""
    measured: list[tuple[Stage, int]] = []  # and its elements in one of the last
    joined, elements = _joined(end), 1
    for stage in reversed(line(end)):
        if joined is not None:
            measured.insert(0, (stage, elements))
            joined = _joined(stage)
            elements *= joined or 1
    size = elements
    if size == 1 and _is_batched(end):  # no stage shows how many examples a batch has
        size = max([1, *_Run(end.dataset.take(1), 0).sizes])
    each = seconds / (len(measured) + 1)
    clock = _fastest(tf.data.Dataset.from_tensors(0).repeat(), min(each, _CLOCK_SECONDS))
    costs: list[StageCost] = []
    earlier = 0.0  # seconds for an example, as the next stage has it
    for stage, elements in measured:
        if _fills_too_long(stage, earlier, each):
            break
        run = _Run(untuned(stage.dataset), each) if stage.kind == "cache" else None
        spent = (run.each if run else _fastest(stage.dataset, each)) - clock
        costs.append(StageCost(stage.label, 1e6 * max(0.0, spent * elements / size - earlier)))
        if run and run.is_complete:  # the next stage reads the cache
            spent = _fastest(stage.dataset, each) - clock
        earlier = max(0.0, spent * elements / size)
    return [*costs, *(StageCost(stage.label, None) for stage, _ in measured[len(costs) :])]


def _fills_too_long(stage: Stage, seconds_per_element: float, available_seconds: float) -> bool:
    """Return whether filling a shuffle buffer takes longer than measuring a stage."""
    if stage.kind != "shuffle":
        return False
    buffer, available = stage.setting("buffer_size") or 0, stage.inputs[0].cardinality
    filled = min(buffer, available) if available is not None and available >= 0 else buffer
    return filled * seconds_per_element > available_seconds


def _fastest(dataset: tf.data.Dataset, seconds: float) -> float:
    """Return the seconds of an element in the fastest of a few runs; others were disturbed."""
    return min(_Run(untuned(dataset), seconds / _TRIES).each for _ in range(_TRIES))
