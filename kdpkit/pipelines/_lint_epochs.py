"""What an epoch is: rules of `lint` about the length of a pipeline, and what `fit` makes of it."""

from collections.abc import Iterator
from dataclasses import dataclass

import tensorflow as tf

from kdpkit import _checks
from kdpkit._findings import Finding
from kdpkit.pipelines._linted import CUTS, Pipeline

_SHORT_PART = 0.25  # of a batch
_LIMITS = frozenset({"take", "take_while"})  # how much of the data is taken


@dataclass(frozen=True)
class Fit:
    """What is known of the `fit` that a dataset is for.

    Attributes:
        epochs: That it trains; None where the whole `fit` is not known.
        steps_per_epoch: Batches that it takes for one; None for the whole dataset.
    """

    epochs: int | None
    steps_per_epoch: int | None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None:
                _checks.integer(name, value)


def findings(pipeline: Pipeline, fit: Fit, replicas: int) -> Iterator[Finding]:
    """Give what is wrong with the length of epochs, and of their last batch."""
    yield from _repeats(pipeline, fit)
    yield from _runs_out(pipeline, fit)
    yield from _unknown_length(pipeline, fit)
    yield from _short_batch(pipeline, replicas)


def _repeats(pipeline: Pipeline, fit: Fit) -> Iterator[Finding]:
    """Look for repeats that blur what an epoch is."""
    found = [stage for stage in pipeline.line if stage.kind == "repeat"]
    is_endless = pipeline.end.cardinality == tf.data.INFINITE_CARDINALITY
    if is_endless and fit.steps_per_epoch is None:
        is_known = fit.epochs is not None
        yield Finding(
            "repeat",
            "wrong" if is_known else "note",
            pipeline.where(found[-1] if found else pipeline.line[0]),
            "The dataset never ends, and `fit` is not told where an epoch does: the first one "
            "goes on for ever."
            if is_known
            else "The dataset never ends, so `fit` must be told where an epoch does.",
            "Give `fit(steps_per_epoch=...)`, or leave out `repeat()`: `fit(epochs=...)` begins "
            "again by itself.",
        )
    for repeat in found:
        count = repeat.setting("count")
        following = pipeline.line[pipeline.line.index(repeat) + 1 :]
        if count is not None and count > 1 and fit.steps_per_epoch is None and fit.epochs != 1:
            is_sure = not any(stage.kind in _LIMITS for stage in following)
            yield _multiplied(pipeline.where(repeat), count, fit.epochs if is_sure else None)
        mixing = next((stage for stage in following if stage.kind in (*CUTS, "shuffle")), None)
        if mixing is not None and count != 1:
            yield Finding(
                "repeat-before-batch",
                "note",
                pipeline.where(repeat),
                f"`{mixing.label}` behind it mixes the end of one pass with the beginning of the "
                "next: an example may come twice before another comes once.",
                f"If each epoch is to have every example once, move `repeat` behind "
                f"`{mixing.kind}`.",
            )


def _multiplied(where: str, count: int, epochs: int | None) -> Finding:
    times = f"{count} * N" if epochs is None else f"{count} * {epochs} = {count * epochs}"
    return Finding(
        "repeat",
        "note" if epochs is None else "wrong",
        where,
        f"One iteration gives the data {count} times, and "
        f"`fit(epochs={'N' if epochs is None else epochs})` {times} times.",
        "Leave out `repeat`, and let `epochs` count the passes.",
    )


def _runs_out(pipeline: Pipeline, fit: Fit) -> Iterator[Finding]:
    """Look for epochs that end before the steps which `fit` was asked for."""
    batches, steps = pipeline.end.cardinality, fit.steps_per_epoch
    if steps is None or batches is None or batches <= 0:
        return
    whole, left = divmod(batches, steps)
    if whole == 0:
        problem = f"An epoch is to have {steps} steps, and ends after {batches}"
    elif left and fit.epochs is not None and fit.epochs > whole:
        problem = (
            f"{fit.epochs} epochs of {steps} steps are to be trained, and epoch {whole + 1} ends "
            f"after {left}"
        )
    else:
        return
    yield Finding(
        "runs-out",
        "wrong",
        pipeline.where(pipeline.end),
        f"{problem}: the dataset has no more, so a schedule made for all steps does not reach its "
        "end.",
        "Write `.repeat()` last, or leave out `steps_per_epoch`.",
    )


def _unknown_length(pipeline: Pipeline, fit: Fit) -> Iterator[Finding]:
    """Look for what hides the number of steps."""
    if pipeline.end.cardinality is not None or fit.steps_per_epoch is not None:
        return
    hiding = next((stage for stage in pipeline.line if stage.cardinality is None), pipeline.end)
    yield Finding(
        "unknown-length",
        "note",
        pipeline.where(hiding),
        "TensorFlow does not know how many elements it gives, so `fit` shows no progress in the "
        "first epoch, and a schedule cannot know its steps.",
        "If you need them: `steps = kdpkit.pipelines.count_batches(dataset)`, once, and "
        "`dataset.apply(tf.data.experimental.assert_cardinality(steps))`.",
    )


def _short_batch(pipeline: Pipeline, replicas: int) -> Iterator[Finding]:
    """Look for a smaller last batch that counts for more than it has."""
    batch = next((one for one in reversed(pipeline.line) if one.kind in CUTS), None)
    if batch is None or batch.kind not in ("batch", "padded_batch") or not batch.inputs:
        return
    size, examples = batch.setting("batch_size"), batch.inputs[0].cardinality
    if not size or batch.setting("drop_remainder") is not False or examples in (-1, None):
        return
    rows = (examples or 0) % size
    if rows == 0 or (replicas == 1 and rows > _SHORT_PART * size):
        return
    shared = f", and {replicas} replicas share them unevenly" if rows % replicas else ""
    yield Finding(
        "short-batch",
        "note",
        pipeline.where(batch),
        f"The last batch has {rows} of {size} examples{shared}; it weighs as much in the training "
        "as a whole one, and XLA compiles for its shape too.",
        "Use `drop_remainder=True` for training, or `kdpkit.pipelines.pad_to_global_batch`.",
    )
