"""Mistakes in a `tf.data` pipeline that can be read from its stages, without running it."""

from collections.abc import Callable, Iterator

import tensorflow as tf

from kdpkit import _checks
from kdpkit._findings import Finding, in_order
from kdpkit.pipelines import _lint_epochs, _linted, _structure
from kdpkit.pipelines._counting import require_dataset
from kdpkit.pipelines._linted import CUTS, Pipeline
from kdpkit.pipelines._structure import KEEPS, Stage, has_work, is_kept, shuffles

_OPENS = frozenset({"flat_map", "interleave", "unbatch", "group_by_window", "window"})
_SMALL_BUFFER = 1000  # examples; below it, and below this part of the data, a shuffle is local
_SMALL_PART = 0.01


def lint(
    dataset: tf.data.Dataset,
    *,
    training: bool = True,
    replicas: int = 1,
    workers: int = 1,
    epochs: int | None = None,
    steps_per_epoch: int | None = None,
) -> list[Finding]:
    """Find mistakes in a pipeline from its stages alone; nothing is run.

    Each finding has a level: `"refused"` stops there, `"wrong"` trains something other than what
    was meant, `"slow"` wastes time, and `"note"` is good to know and may be as you want it. A
    pipeline that has notes alone is fine. The rules:

    - `shuffle-before-cache`, `random-before-cache` (wrong): a cache keeps what the first epoch
      drew, so every epoch has its order, or its augmentation.
    - `batch-before-shuffle` (wrong): whole batches are shuffled, and their examples never mixed.
    - `small-shuffle` (wrong or a note): a buffer below one batch, or a small part of the data.
    - `repeat-before-cache` (wrong): the cache holds the repeats too, and fills memory if these
      have no end. `repeat-before-batch` (a note): epochs whose examples mix.
    - `repeat` (a note, or wrong where the `fit` is known): data that never end, or that each epoch
      gives several times. `runs-out` (wrong): fewer batches than `fit` is to take.
    - `overwritten-arrays` (wrong): several replicas of plain Keras write into what Python gave.
    - `python` (slow): `py_function`, `numpy_function`, `from_generator`.
    - `serial-map`, `serial-interleave`, `no-prefetch` (slow, or a note where TensorFlow mends it by
      itself, as it does with stateless maps and a missing prefetch while its autotune is on).
    - `file-shards` (refused), `python-shards` (slow): what several workers cannot divide.
    - `unknown-length`, `short-batch`: notes.

    What is done before a cache is done once, so slow work there is a note. What `train_pipeline`
    and `eval_pipeline` add is right, and what you give them is looked at like all else, `augment`
    excepted.

    Args:
        dataset: What `fit` is to be given; on several replicas, before it is distributed.
        training: Whether it is for training. For validation only the rules about speed, caches and
            workers count: nothing needs a new order there.
        replicas: Replicas that share a batch; with several a smaller last batch is a note.
        workers: Processes that divide the dataset between them (see `auto_shard`).
        epochs: Those of `fit`. None says that the `fit` is not known: what depends on it is a note.
        steps_per_epoch: That of `fit`; None is the whole dataset.

    Returns:
        The findings, the worst first.

    Raises:
        ValueError: It is no `tf.data.Dataset`, or a count below one.

    >>> images = tf.data.Dataset.range(1000).shuffle(1000).cache().batch(50).prefetch(2)
    >>> for finding in lint(images):
    ...     print(finding)
    wrong    shuffle-before-cache: cache, stage 3 of 5
        The cache keeps the order that `shuffle(1000)` drew in the first epoch, so
        every epoch has the same.
        Remedy: Move `shuffle` behind it: `.cache(...).shuffle(...)`.
    """
    require_dataset("dataset", dataset)
    replicas = _checks.integer("replicas", replicas)
    workers = _checks.integer("workers", workers)
    fit = _lint_epochs.Fit(epochs, steps_per_epoch)
    pipeline = _linted.read(dataset)
    rules: list[Callable[[Pipeline], Iterator[Finding]]] = [_python, _serial, _no_prefetch]
    if training:
        rules += [_frozen, _batches_shuffled, _small_shuffle]
        rules.append(lambda pipeline: _lint_epochs.findings(pipeline, fit, replicas))
    rules += [_repeats_kept, lambda pipeline: _shards(pipeline, workers)]
    if replicas > 1:
        rules.append(_overwritten)
    return [*in_order(finding for rule in rules for finding in rule(pipeline))]


def _frozen(pipeline: Pipeline) -> Iterator[Finding]:
    """Look for caches that keep what should be drawn anew."""
    for cache, after in pipeline.stages:
        if cache.kind not in KEEPS:
            continue
        shuffle = next((stage for stage in _structure.before(cache) if shuffles(stage)), None)
        if shuffle is not None and not any(map(shuffles, after)):
            yield Finding(
                "shuffle-before-cache",
                "wrong",
                pipeline.where(cache),
                f"The cache keeps the order that `{shuffle.label}` drew in the first epoch, so "
                "every epoch has the same.",
                f"Move `shuffle` behind it: `.{cache.kind}(...).shuffle(...)`.",
            )
        for stage in _structure.before(cache):
            if any(function.draws for function in stage.functions):
                yield Finding(
                    "random-before-cache",
                    "wrong",
                    pipeline.where(stage),
                    f"It draws at random, and `{cache.label}` behind it keeps what it drew in the "
                    "first epoch: every epoch has the same.",
                    "Move this stage behind the cache, and leave before it what is the same each "
                    "time.",
                )


def _batches_shuffled(pipeline: Pipeline) -> Iterator[Finding]:
    """Look for a shuffle of whole batches."""
    cuts = [stage for stage in pipeline.line if stage.kind in CUTS]
    if not cuts:
        return
    batch = cuts[-1]
    following = pipeline.line[pipeline.line.index(batch) + 1 :]
    shuffle = next((stage for stage in following if stage.kind == "shuffle"), None)
    if shuffle is None or any(stage.kind in _OPENS for stage in following):
        return
    is_mixed = any(stage.kind == "shuffle" or shuffles(stage) for stage in _structure.before(batch))
    between = following[: following.index(shuffle)]
    if is_mixed and is_kept(between):
        yield Finding(
            "batch-before-shuffle",
            "note",
            pipeline.where(shuffle),
            "The cache before it holds whole batches, so every epoch has the same batches, in "
            "another order.",
            "Cache examples: `.cache().shuffle(...).batch(...)`.",
        )
    elif not is_mixed and batch.kind != "group_by_window":
        yield Finding(
            "batch-before-shuffle",
            "wrong",
            pipeline.where(shuffle),
            f"It shuffles whole batches, as it comes behind `{batch.label}`: the examples of a "
            "batch are neighbours of the source, and the same in every epoch.",
            f"Put `.shuffle(...)` before `.{batch.kind}(...)`, with a buffer counted in examples.",
        )


def _small_shuffle(pipeline: Pipeline) -> Iterator[Finding]:
    """Look for shuffles of examples that hardly move them."""
    for shuffle, after in pipeline.stages:
        sizes = [stage.setting("batch_size") for stage in after if stage.kind in CUTS]
        buffer = shuffle.setting("buffer_size") if shuffle.kind == "shuffle" else None
        before = [*_structure.before(shuffle)]
        is_of_examples = not any(stage.kind in _OPENS for stage in after) and not any(
            stage.kind in CUTS for stage in before
        )
        if buffer is None or not is_of_examples or any(one.kind == "shuffle" for one in before):
            continue
        examples = shuffle.inputs[0].cardinality if shuffle.inputs else None
        if examples is not None and 0 <= examples <= buffer:
            continue
        remedy = "Use a buffer of the size of the data, or of as many examples as memory allows."
        if sizes and sizes[0] is not None and buffer < sizes[0]:
            yield Finding(
                "small-shuffle",
                "wrong",
                pipeline.where(shuffle),
                f"The buffer holds {buffer} examples, fewer than the {sizes[0]} of a batch, so "
                "that neighbours of the source stay together.",
                remedy,
            )
        elif examples and 0 < buffer < min(_SMALL_BUFFER, _SMALL_PART * examples):
            yield Finding(
                "small-shuffle",
                "note",
                pipeline.where(shuffle),
                f"The buffer holds {buffer} of {examples} examples: if the source is in an order, "
                "such as one class after the other, it stays nearly so.",
                remedy,
            )


def _repeats_kept(pipeline: Pipeline) -> Iterator[Finding]:
    """Look for caches that hold more than the data."""
    for cache, _ in pipeline.stages:
        if cache.kind not in KEEPS or not cache.inputs:
            continue
        if cache.inputs[0].cardinality == tf.data.INFINITE_CARDINALITY:
            yield Finding(
                "repeat-before-cache",
                "wrong",
                pipeline.where(cache),
                "What comes before the cache never ends, so the cache is never whole: it grows "
                "until memory or disk is full, and nothing is read from it.",
                "Put `repeat()` behind the cache.",
            )
            continue
        upstream = _structure.line(cache)[:-1]
        repeat = next((one for one in upstream if one.kind == "repeat"), None)
        if repeat is not None and repeat.setting("count") != 1:
            yield Finding(
                "repeat-before-cache",
                "slow",
                pipeline.where(cache),
                f"It keeps every example as often as `{repeat.label}` gives it.",
                "Put `repeat` behind the cache.",
            )


def _python(pipeline: Pipeline) -> Iterator[Finding]:
    for stage, after in pipeline.stages:
        if not _is_python(stage):
            continue
        once = is_kept(after)
        yield Finding(
            "python",
            "note" if once else "slow",
            pipeline.where(stage),
            "It calls Python, one call at a time, which also stands in the way of the training "
            "step's own Python" + ("; the cache behind it makes it do so once." if once else "."),
            "Write it in TensorFlow operations, prepare the data beforehand (TFRecord files), or "
            "cache its result.",
        )


def _is_python(stage: Stage) -> bool:
    return stage.kind == "from_generator" or any(one.calls_python for one in stage.functions)


def _overwritten(pipeline: Pipeline) -> Iterator[Finding]:
    """Look for batches that lie in arrays of Python's when replicas cut them."""
    for stage, after in pipeline.stages:
        if _is_python(stage) and not any(one.kind in ("batch", "padded_batch") for one in after):
            yield Finding(
                "overwritten-arrays",
                "wrong",
                pipeline.where(stage),
                "It gives whole batches from Python. TensorFlow does not copy them, and plain "
                "Keras on several replicas writes into them: if they are views of your arrays, "
                "these hold other labels after the first epoch.",
                "Give single examples and `.batch(...)` them here; or have Python give copies "
                "(`y[i:j].copy()`); or train with `kdpkit.training.replica_exact(model)`.",
            )


def _serial(pipeline: Pipeline) -> Iterator[Finding]:
    """Look for work that waits for the work before it."""
    for stage, after in pipeline.stages:
        if stage.is_parallel or stage.kind not in ("map", "interleave") or not stage.functions:
            continue
        function, once = stage.functions[0], is_kept(after)
        if stage.kind == "interleave":
            if function.reads_files:
                yield _serial_interleave(pipeline.where(stage), once=once)
        elif not function.is_cheap:
            mended = pipeline.mends_maps and not function.is_stateful
            yield _serial_map(pipeline.where(stage), once=once, mended=mended)


def _serial_map(where: str, *, once: bool, mended: bool) -> Finding:
    because = "; TensorFlow makes it parallel by itself, while its autotune is on" if mended else ""
    because = "; the cache behind it makes it do so once" if once else because
    return Finding(
        "serial-map",
        "note" if once or mended else "slow",
        where,
        f"It makes one element after the other, on one core{because}.",
        "Write `.map(..., num_parallel_calls=tf.data.AUTOTUNE)`.",
    )


def _serial_interleave(where: str, *, once: bool) -> Finding:
    return Finding(
        "serial-interleave",
        "note" if once else "slow",
        where,
        "It reads one file at a time, in the thread that waits for the data"
        + ("; the cache behind it makes it do so once." if once else "."),
        "Write `.interleave(..., num_parallel_calls=tf.data.AUTOTUNE)`, or use "
        "`kdpkit.pipelines.interleave_files`.",
    )


def _no_prefetch(pipeline: Pipeline) -> Iterator[Finding]:
    """Look for work that begins when the training asks for its result."""
    last_work = None
    for stage in reversed(pipeline.line):
        if stage.is_parallel or stage.kind in ("prefetch", "distribute", "train_pipeline"):
            break
        if not _is_light(stage):
            last_work = last_work or stage
    else:
        if not any(map(has_work, pipeline.line)):
            return
    if last_work is None:
        return
    early = next((one for one in reversed(pipeline.line) if one.kind == "prefetch"), None)
    place = f"`{early.label}` comes before" if early else "There is no `prefetch` behind"
    mended = "; TensorFlow adds one by itself, while its autotune is on"
    yield Finding(
        "no-prefetch",
        "note" if pipeline.mends_prefetch else "slow",
        pipeline.where(last_work),
        f"{place} this stage, so its work begins when the training step before has ended"
        f"{mended if pipeline.mends_prefetch else ''}.",
        "End the pipeline with `.prefetch(tf.data.AUTOTUNE)`.",
    )


def _is_light(stage: Stage) -> bool:
    """Tell whether a stage hands elements on, or moves a few numbers."""
    if stage.functions:
        return stage.kind in ("map", "filter") and all(one.is_cheap for one in stage.functions)
    return stage.kind not in (*CUTS, "shuffle")


def _shards(pipeline: Pipeline, workers: int) -> Iterator[Finding]:
    """Look for sources that workers cannot divide as they are told to."""
    policy = pipeline.end.dataset.options().experimental_distribute.auto_shard_policy
    policies = tf.data.experimental.AutoShardPolicy
    by_file = policy == policies.FILE
    if policy not in (policies.FILE, policies.AUTO) or (workers == 1 and not by_file):
        return
    remedy = (
        "Let each worker keep its share of the examples: "
        "`.apply(kdpkit.pipelines.auto_shard('data'))`; or write as many files as there are "
        "workers, or more."
    )
    reading = [
        (stage, files) for stage, _ in pipeline.stages if (files := _structure.files_of(stage))
    ]
    for stage, files in reading:
        if files < max(workers, 2):
            yield Finding(
                "file-shards",
                "refused",
                pipeline.where(stage),
                f"It reads {files} file{'s' * (files > 1)}, which {max(workers, 2)} workers cannot "
                "divide: a worker without a file has no data.",
                remedy,
            )
    for stage, _ in pipeline.stages:
        if stage.inputs or reading or stage.kind.endswith("Dataset"):
            continue
        if by_file:
            yield Finding(
                "file-shards",
                "refused",
                pipeline.where(stage),
                "It reads no files, and the workers are told to divide files.",
                remedy,
            )
        elif stage.kind == "from_generator":
            yield Finding(
                "python-shards",
                "slow",
                pipeline.where(stage),
                f"Each of {workers} workers runs the whole generator and keeps its share.",
                "Write TFRecord files, one or more for each worker.",
            )
