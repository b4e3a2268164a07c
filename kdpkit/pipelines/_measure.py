"""Which stage of a `tf.data` pipeline takes longest."""

import contextlib
import time
from collections.abc import Iterator

import tensorflow as tf

from kdpkit._internal.datasets import untuned
from kdpkit.pipelines._epochs import TrainDataset
from kdpkit.pipelines._stages import Stage, line, paths

_JOINS = ("batch", "padded_batch", "ragged_batch", "train_pipeline")
_REGROUPS = ("rebatch", "group_by_window", "flat_map", "interleave", "unbatch", "window")
_CLOCK_SECONDS = 0.2
_TRIES = 3  # of which the fastest counts, since other work slows some down


def slowest_stage(dataset: tf.data.Dataset, *, seconds: float) -> str | None:
    """Return the stage that adds most time to a batch, such as `"map(decode)"`.

    The pipeline runs up to each of its stages, and the cost of a stage is the time that it adds.
    (tf.data's tuning is off, as ending a tuned iterator can stall for up to a minute.) Work in
    parallel or ahead of time counts as far as the consumer waits for it. Combined datasets (`zip`),
    opened files (`interleave`) and everything before them are one stage, and so is a
    `train_pipeline`. A stage after a `shuffle` whose buffer fills too slowly is not measured.
    Measuring takes about the given seconds, or longer if three elements of each stage do.
    """
    measured: list[tuple[Stage, int]] = []  # a stage, and its elements in one batch
    end = Stage(dataset)
    joined, elements = _joined(end), 1
    for stage in reversed(line(end)):
        if joined is not None:
            measured.insert(0, (stage, elements))
            joined = _joined(stage)
            elements *= joined or 1
    each = seconds / (len(measured) + 1)
    clock = _seconds(tf.data.Dataset.from_tensors(0).repeat(), min(each, _CLOCK_SECONDS))
    costs = []
    earlier = 0.0  # seconds that a batch takes up to the stage before
    for stage, elements in measured:
        if stage.kind == "shuffle":
            buffered = int(stage.setting("buffer_size") or 0)
            available = stage.inputs[0].cardinality
            if available is not None and available >= 0:
                buffered = min(buffered, available)
            if buffered * earlier / elements > each:
                break
        total = max(0.0, (_seconds(stage.dataset, each) - clock) * elements)
        costs.append((total - earlier, stage.label))
        earlier = total
    return max(costs)[1] if costs else None


@contextlib.contextmanager
def undisturbed(dataset: tf.data.Dataset) -> Iterator[None]:
    """Keep the epoch of every `train_pipeline` inside a dataset."""
    with contextlib.ExitStack() as counters:
        for stage, _ in paths(Stage(dataset)):
            if isinstance(stage.dataset, TrainDataset):
                counters.enter_context(stage.dataset.epoch_counter.undisturbed())
        yield


def _joined(stage: Stage) -> int | None:
    """Return how many input elements a stage combines into one; None if unknown."""
    if isinstance(stage.dataset, TrainDataset):
        return stage.dataset.global_batch_size
    if stage.kind in _REGROUPS:
        return None
    return stage.setting("batch_size") if stage.kind in _JOINS else 1


def _seconds(dataset: tf.data.Dataset, seconds: float) -> float:
    """Return the seconds of an element after the first, or of the only one."""
    return min(_run(untuned(dataset), seconds / _TRIES) for _ in range(_TRIES))


def _run(dataset: tf.data.Dataset, seconds: float) -> float:
    count = 0
    began = started = ended = time.perf_counter()
    for _ in dataset:
        ended = time.perf_counter()
        started = started if count else ended
        count += 1
        if ended - started > seconds:
            break
    return (ended - started) / (count - 1) if count > 1 else started - began
