"""Measure the speed of a `tf.data` pipeline and the cost of its stages."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator

import tensorflow as tf

from kdpkit._internal import checks
from kdpkit._internal.datasets import untuned
from kdpkit.pipelines._epochs import TrainDataset
from kdpkit.pipelines._stages import Stage, line, paths, require_dataset

_JOINS = ("batch", "padded_batch", "ragged_batch", "train_pipeline")
_REGROUPS = ("rebatch", "group_by_window", "flat_map", "interleave", "unbatch", "window")
_CLOCK_SECONDS = 0.2
_TRIES = 3


@dataclasses.dataclass(frozen=True)
class PipelineReport:
    """What `measure` found. Printed, it is a table.

    Attributes:
        batches_per_second: Elements of the dataset per second, after the first. Caches filled while
            stages were measured are read, as in later epochs.
        stages: Each stage as written, such as `"map(decode)"`, the source first, with the
            milliseconds that it adds to a batch in the first epoch, as seen by the consumer: work
            done in parallel or ahead of time only counts as far as the consumer waits for it. None
            if it was not measured.
    """

    batches_per_second: float
    stages: tuple[tuple[str, float | None], ...]

    @property
    def slowest(self) -> str | None:
        """The stage that adds the most time; None if none was measured."""
        measured = [(spent, stage) for stage, spent in self.stages if spent is not None]
        return max(measured)[1] if measured else None

    def __str__(self) -> str:
        """A table of at most 80 columns."""
        lines = [f"{self.batches_per_second:,.1f} batches/s", "", f"{'stage':56} {'ms/batch':>12}"]
        for stage, spent in self.stages:
            name = stage if len(stage) <= 56 else f"{stage[:53]}..."
            row = f"{name:56} {'-' if spent is None else f'{spent:,.3f}':>12}"
            lines.append(f"{row} slowest" if stage == self.slowest else row)
        return "\n".join(lines)


def measure(dataset: tf.data.Dataset, *, seconds: float = 5.0) -> PipelineReport:
    """Iterate a pipeline without training, and report its speed and the cost of each stage.

    The pipeline is run up to each of its stages and as a complete pipeline. A stage's cost is the
    additional time with it. Combined datasets (`zip`, `choose_from_datasets`), opened files
    (`interleave`, `flat_map`) and everything before them are one stage; so are shuffling, batching
    and augmentation inside a `train_pipeline`. The cost of a stage that removes examples, such as
    `filter`, includes reading the removed ones; that of stages before a cache is paid in the first
    epoch only.

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
    >>> [stage for stage, milliseconds in report.stages]
    ['range', 'batch(10)', 'prefetch(2)']
    """
    require_dataset("dataset", dataset)
    seconds = checks.number("seconds", seconds, above=0)
    with undisturbed(dataset):
        costs = _costs(Stage(dataset), seconds / 2)
        each, _ = _run(dataset, seconds / 2)
    return PipelineReport(1 / each, tuple(costs))


@contextlib.contextmanager
def undisturbed(dataset: tf.data.Dataset) -> Iterator[None]:
    """Keep the epoch of every `train_pipeline` inside a dataset."""
    with contextlib.ExitStack() as counters:
        for stage, _ in paths(Stage(dataset)):
            if isinstance(stage.dataset, TrainDataset):
                counters.enter_context(stage.dataset.epoch_counter.undisturbed())
        yield


def _costs(end: Stage, seconds: float) -> list[tuple[str, float | None]]:
    """Measure what each stage adds, from where datasets are combined, or the source, to the end."""
    measured: list[tuple[Stage, int]] = []  # and its elements in one of the last
    joined, elements = _joined(end), 1
    for stage in reversed(line(end)):
        if joined is not None:
            measured.insert(0, (stage, elements))
            joined = _joined(stage)
            elements *= joined or 1
    each = seconds / (len(measured) + 1)
    clock = _fastest(tf.data.Dataset.from_tensors(0).repeat(), min(each, _CLOCK_SECONDS))
    costs: list[tuple[str, float | None]] = []
    earlier = 0.0  # seconds for an element of the last stage
    for stage, elements in measured:
        if _fills_too_long(stage, earlier / elements, each):
            break
        is_cache, is_complete = stage.kind == "cache", False
        if is_cache:
            spent, is_complete = _run(untuned(stage.dataset), each)
        else:
            spent = _fastest(stage.dataset, each)
        costs.append((stage.label, 1e3 * max(0.0, (spent - clock) * elements - earlier)))
        if is_complete:  # the next stage reads the cache
            spent = _fastest(stage.dataset, each)
        earlier = max(0.0, (spent - clock) * elements)
    return [*costs, *((stage.label, None) for stage, _ in measured[len(costs) :])]


def _joined(stage: Stage) -> int | None:
    """Return how many input elements a stage combines into one; None if unknown."""
    if isinstance(stage.dataset, TrainDataset):
        return stage.dataset.global_batch_size
    if stage.kind in _REGROUPS:
        return None
    return stage.setting("batch_size") if stage.kind in _JOINS else 1


def _fills_too_long(stage: Stage, seconds_per_element: float, available_seconds: float) -> bool:
    """Return whether filling a shuffle buffer takes longer than measuring a stage."""
    if stage.kind != "shuffle":
        return False
    buffer, available = stage.setting("buffer_size") or 0, stage.inputs[0].cardinality
    filled = min(buffer, available) if available is not None and available >= 0 else buffer
    return filled * seconds_per_element > available_seconds


def _run(dataset: tf.data.Dataset, seconds: float) -> tuple[float, bool]:
    """Iterate for some seconds after the first element.

    Returns:
        Seconds for each later element (of the only one if there is no other), and whether the
        dataset ended.
    """
    count, is_complete = 0, True
    began = started = ended = time.perf_counter()
    for _ in dataset:
        ended = time.perf_counter()
        started = started if count else ended
        count += 1
        if ended - started > seconds:
            is_complete = False
            break
    if not count:
        checks.fail("`dataset` is empty.", dataset=dataset.element_spec)
    return (ended - started) / (count - 1) if count > 1 else started - began, is_complete


def _fastest(dataset: tf.data.Dataset, seconds: float) -> float:
    """Return the seconds of an element in the fastest of a few runs; others were disturbed."""
    return min(_run(untuned(dataset), seconds / _TRIES)[0] for _ in range(_TRIES))
