"""Mistakes in a `tf.data` pipeline that can be read from its stages, without running it."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import tensorflow as tf

from kdpkit._internal import check_results, checks
from kdpkit._internal.check_results import Finding
from kdpkit.pipelines._counting import require_dataset
from kdpkit.pipelines._stages import READING, Stage, before, line, paths

_CACHES = ("cache", "snapshot")
_COPYING = ("batch", "padded_batch")
_BATCHES = (*_COPYING, "ragged_batch", "rebatch", "group_by_window")
_OPENS = ("flat_map", "interleave", "unbatch", "group_by_window", "window")
_AHEAD = ("prefetch", "distribute", "train_pipeline")
_SHORT_PART = 0.25  # of a batch
_Policy = tf.data.experimental.AutoShardPolicy


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

    Each finding has a level: `"error"` raises in training, `"wrong"` trains something other than
    what was meant, `"slow"` wastes time, and `"note"` is good to know and may be as you want it. A
    pipeline that has notes alone is fine. The rules:

    - `shuffle-before-cache`, `random-before-cache`, `repeat-before-cache`: a cache keeps what each
      epoch should draw again, or the data several times.
    - `batch-before-shuffle`, `small-shuffle`, `repeat-before-batch`: examples hardly mix, or those
      of several epochs do.
    - `split-after-shuffle`: `take` and `skip` that do not part the same examples in each epoch.
    - `repeat`, `runs-out`, `unknown-length`, `short-batch`: what an epoch is for `fit`.
    - `overwritten-arrays`: several replicas of plain Keras write into what Python gave.
    - `python`, `serial-map`, `serial-interleave`, `no-prefetch`: what makes training wait. It is a
      note where a cache makes it happen once, or TensorFlow's autotune fixes it by itself.
    - `file-shards`, `python-shards`: what several workers cannot divide.

    What `train_pipeline` and `eval_pipeline` add is right. What you pass them is checked like all
    else; of `augment` only whether it calls Python.

    Args:
        dataset: What is passed to `fit`; on several replicas, before it is distributed.
        training: Whether it is for training. For validation only the rules about speed, caches and
            workers count: nothing needs a new order there.
        replicas: Replicas that a batch is split over; with several a smaller last batch is a note.
        workers: Processes that divide the dataset between them (see `auto_shard`).
        epochs: As `fit` gets it. None if that is not known: what depends on it is a note.
        steps_per_epoch: As `fit` gets it; None is all of the dataset.

    Returns:
        The findings, the worst first.

    >>> images = tf.data.Dataset.range(1000).shuffle(1000).cache().batch(50).prefetch(2)
    >>> for finding in lint(images):
    ...     print(finding)
    wrong    shuffle-before-cache: cache, stage 3 of 5
        The cache keeps the order that `shuffle(1000)` drew in the first epoch, so
        every epoch has the same.
        Remedy: Move `shuffle` after it: `.cache(...).shuffle(...)`.
    """
    require_dataset("dataset", dataset)
    end = Stage(dataset)
    pipeline = _Pipeline(
        dataset,
        line(end),
        tuple(paths(end)),
        replicas=checks.integer("replicas", replicas),
        workers=checks.integer("workers", workers),
        epochs=None if epochs is None else checks.integer("epochs", epochs),
        steps=None
        if steps_per_epoch is None
        else checks.integer("steps_per_epoch", steps_per_epoch),
    )
    rules = {**_RULES, **_TRAINING_RULES} if training else _RULES
    return [*check_results.found(rules, pipeline, pipeline.where)]


@dataclasses.dataclass(frozen=True)
class _Pipeline:
    """A dataset, and what is known of the `fit` that it is for.

    Attributes:
        dataset: The dataset.
        line: Its stages, from where datasets come together to the end.
        stages: All of them, with those that follow.
        replicas: Replicas that a batch is split over.
        workers: Processes that divide the dataset.
        epochs: Epochs that are trained; None where the `fit` is not known.
        steps: Batches of an epoch; None for all of the dataset.
    """

    dataset: tf.data.Dataset
    line: tuple[Stage, ...]
    stages: tuple[tuple[Stage, tuple[Stage, ...]], ...]
    replicas: int
    workers: int
    epochs: int | None
    steps: int | None

    @property
    def length(self) -> int | None:
        """Elements of the dataset: None if TensorFlow does not know, infinity as -1."""
        return Stage(self.dataset).cardinality

    @property
    def policy(self) -> tf.data.experimental.AutoShardPolicy:
        """How the workers divide it."""
        return self.dataset.options().experimental_distribute.auto_shard_policy

    @property
    def sources(self) -> list[Stage]:
        """The stages that read no files and have no inputs."""
        sources = [stage for stage, _ in self.stages if not stage.inputs]
        return [stage for stage in sources if not stage.kind.endswith("Dataset")]

    def of(self, *kinds: str) -> Iterator[tuple[Stage, tuple[Stage, ...]]]:
        """Yield the stages of some kinds, with those that follow."""
        return ((stage, after) for stage, after in self.stages if stage.kind in kinds)

    def where(self, stage: Stage) -> str:
        """Name a stage, its position, and where its function is in the user's source."""
        position = ""
        if stage in self.line:
            position = f", stage {self.line.index(stage) + 1} of {len(self.line)}"
        place = stage.functions[0].place if stage.functions else ""
        return stage.label + position + (place and f", {place}")

    def following(self, stage: Stage) -> tuple[Stage, ...]:
        """Return the stages of the line that follow one of it."""
        return self.line[self.line.index(stage) + 1 :]

    def is_fixed_by(self, optimization: str) -> bool:
        """Return whether TensorFlow applies one of its optimizations by itself."""
        options = self.dataset.options()
        asked = getattr(options.experimental_optimization, optimization)
        by_default = options.experimental_optimization.apply_default_optimizations
        applies = asked if asked is not None else by_default is not False
        return bool(applies and options.autotune.enabled is not False)


_Found: TypeAlias = Iterator[tuple[str, Stage, str, str]]  # level, stage, problem, remedy
_Rule: TypeAlias = Callable[[_Pipeline], _Found]
_RULES: dict[str, _Rule] = {}
_TRAINING_RULES: dict[str, _Rule] = {}


def _rule(name: str, *, training: bool = False) -> Callable[[_Rule], _Rule]:
    """Keep a rule under its name, among those for training only or among those for all data."""
    return lambda rule: (_TRAINING_RULES if training else _RULES).setdefault(name, rule)


def _first(stages: Iterable[Stage], *kinds: str) -> Stage | None:
    return next((stage for stage in stages if stage.kind in kinds), None)


# What a cache keeps.


@_rule("shuffle-before-cache", training=True)
def _shuffle_before_cache(pipeline: _Pipeline) -> _Found:
    for cache, after in pipeline.of(*_CACHES):
        shuffle = next((stage for stage in before(cache) if stage.shuffles), None)
        if shuffle is not None and not any(stage.shuffles for stage in after):
            problem = (
                f"The cache keeps the order that `{shuffle.label}` drew in the first epoch, so "
                "every epoch has the same."
            )
            remedy = f"Move `shuffle` after it: `.{cache.kind}(...).shuffle(...)`."
            yield "wrong", cache, problem, remedy


@_rule("random-before-cache", training=True)
def _random_before_cache(pipeline: _Pipeline) -> _Found:
    remedy = "Move this stage after the cache, and leave before it what is the same each time."
    for cache, _ in pipeline.of(*_CACHES):
        for stage in before(cache):
            if any(function.draws for function in stage.functions):
                problem = (
                    f"It draws at random, and `{cache.label}` after it keeps what it drew in the "
                    "first epoch: every epoch has the same."
                )
                yield "wrong", stage, problem, remedy


@_rule("repeat-before-cache")
def _repeat_before_cache(pipeline: _Pipeline) -> _Found:
    for cache, _ in pipeline.of(*_CACHES):
        repeat = _first(line(cache), "repeat")
        level, problem = "slow", ""
        if cache.inputs and cache.inputs[0].cardinality == tf.data.INFINITE_CARDINALITY:
            level = "wrong"
            problem = (
                "What comes before the cache never ends, so the cache is never complete: it grows "
                "until memory or disk is full, and nothing is read from it."
            )
        elif repeat is not None and repeat.setting("count") != 1:
            problem = f"It keeps every example as often as `{repeat.label}` gives it."
        if problem:
            yield level, cache, problem, "Put `repeat` after the cache."


# How examples are mixed.


@_rule("batch-before-shuffle", training=True)
def _batch_before_shuffle(pipeline: _Pipeline) -> _Found:
    batch = _first(reversed(pipeline.line), *_BATCHES)
    following = pipeline.following(batch) if batch else ()
    shuffle = _first(following, "shuffle")
    if batch is None or shuffle is None or _first(following, *_OPENS):
        return
    is_mixed = any(stage.kind == "shuffle" or stage.shuffles for stage in before(batch))
    if is_mixed and any(stage.keeps for stage in following[: following.index(shuffle)]):
        problem = (
            "The cache before it holds batches, so every epoch has the same batches, in another "
            "order."
        )
        yield "note", shuffle, problem, "Cache examples: `.cache().shuffle(...).batch(...)`."
    elif not is_mixed and batch.kind != "group_by_window":
        problem = (
            f"It shuffles batches, as it comes after `{batch.label}`: the examples of a batch are "
            "neighbors in the source, and the same in every epoch."
        )
        buffer = f"`.shuffle(...)` before `.{batch.kind}(...)`, with a buffer counted in examples"
        yield "wrong", shuffle, problem, f"Put {buffer}."


@_rule("small-shuffle", training=True)
def _small_shuffle(pipeline: _Pipeline) -> _Found:
    for shuffle, after in pipeline.of("shuffle"):
        buffer = shuffle.setting("buffer_size")
        is_of_batches = _first(after, *_OPENS) or _first(before(shuffle), *_BATCHES, "shuffle")
        if buffer is None or is_of_batches:
            continue
        batch = _first(after, *_BATCHES)
        fault = check_results.small_buffer(
            buffer,
            examples=shuffle.inputs[0].cardinality,
            batch_size=batch.setting("batch_size") if batch else None,
        )
        if fault:
            level, problem, remedy = fault
            yield level, shuffle, problem, remedy


@_rule("repeat-before-batch", training=True)
def _repeat_before_batch(pipeline: _Pipeline) -> _Found:
    for repeat in pipeline.line:
        mixing = _first(pipeline.following(repeat), *_BATCHES, "shuffle")
        if repeat.kind == "repeat" and mixing is not None and repeat.setting("count") != 1:
            problem = (
                f"`{mixing.label}` after it mixes the end of one pass with the beginning of the "
                "next: an example may come twice before another comes once."
            )
            remedy = "If each epoch is to have every example once, move `repeat` after "
            yield "note", repeat, problem, f"{remedy}`{mixing.kind}`."


@_rule("split-after-shuffle")
def _split_after_shuffle(pipeline: _Pipeline) -> _Found:
    for split, _ in pipeline.of("skip", "take"):
        shuffle = next((one for one in before(split) if one.reshuffles), None)
        if shuffle is None or any(one.keeps or one.kind == "repeat" for one in before(split)):
            continue
        yield (
            "wrong" if split.kind == "skip" else "note",
            split,
            f"`{shuffle.label}` before it draws another order in each epoch, so it has other "
            "examples in each. If the rest is held out, validation is on examples that were "
            "trained on.",
            f"Put `{split.kind}` before `shuffle`, or pass `shuffle` "
            "`reshuffle_each_iteration=False`.",
        )


# What an epoch is for `fit`.


@_rule("repeat", training=True)
def _repeat(pipeline: _Pipeline) -> _Found:
    repeats = [stage for stage in pipeline.line if stage.kind == "repeat"]
    if pipeline.steps is not None:
        return
    if pipeline.length == tf.data.INFINITE_CARDINALITY:
        level, problem = "note", "It never ends, so `fit` needs `steps_per_epoch`."
        if pipeline.epochs is not None:
            level = "wrong"
            problem = (
                "It never ends, and `fit` has no `steps_per_epoch`: the first epoch does not end "
                "either."
            )
        remedy = (
            "Pass `steps_per_epoch` to `fit`, or leave out `repeat()`: `fit(epochs=...)` begins "
            "again by itself."
        )
        yield level, [pipeline.line[0], *repeats][-1], problem, remedy
    for stage in repeats:
        count = stage.setting("count")
        if count is None or count <= 1 or pipeline.epochs == 1:
            continue
        is_cut = _first(pipeline.following(stage), "take", "take_while")
        epochs = None if is_cut else pipeline.epochs
        times = f"{count} * N" if epochs is None else f"{count} * {epochs} = {count * epochs}"
        problem = (
            f"One iteration gives the data {count} times, and `fit(epochs={epochs or 'N'})` "
            f"{times} times."
        )
        remedy = "Leave out `repeat`, and let `epochs` count the passes."
        yield "note" if epochs is None else "wrong", stage, problem, remedy


@_rule("runs-out", training=True)
def _runs_out(pipeline: _Pipeline) -> _Found:
    batches, steps, epochs = pipeline.length, pipeline.steps, pipeline.epochs
    if steps is None or batches is None or batches <= 0:
        return
    complete, left = divmod(batches, steps)
    if complete == 0:
        problem = f"An epoch is to have {steps} steps, and ends after {batches}"
    elif left and epochs is not None and epochs > complete:
        asked = f"{epochs} epochs of {steps} steps are to be trained"
        problem = f"{asked}, but epoch {complete + 1} ends after {left}"
    else:
        return
    effect = "the dataset has no more, so a schedule made for all steps does not reach its end."
    remedy = "Write `.repeat()` last, or leave out `steps_per_epoch`."
    yield "wrong", pipeline.line[-1], f"{problem}: {effect}", remedy


@_rule("unknown-length", training=True)
def _unknown_length(pipeline: _Pipeline) -> _Found:
    if pipeline.length is None and pipeline.steps is None:
        following = reversed(pipeline.line)
        *_, first = itertools.takewhile(lambda stage: stage.cardinality is None, following)
        yield (
            "note",
            first,
            "TensorFlow does not know how many elements it gives, so `fit` shows no progress in "
            "the first epoch, and a schedule cannot know its steps.",
            "If you need them: `steps = kdpkit.pipelines.count_batches(dataset)`, once, and "
            "`dataset.apply(tf.data.experimental.assert_cardinality(steps))`.",
        )


@_rule("short-batch", training=True)
def _short_batch(pipeline: _Pipeline) -> _Found:
    batch = _first(reversed(pipeline.line), *_BATCHES)
    if batch is None or batch.kind not in _COPYING or not batch.inputs:
        return
    size, examples = batch.setting("batch_size"), batch.inputs[0].cardinality
    if not size or not examples or examples < 0 or batch.setting("drop_remainder") is not False:
        return
    last = examples % size
    if last and (pipeline.replicas > 1 or last <= _SHORT_PART * size):
        is_uneven = last % pipeline.replicas
        uneven = f", split unevenly over {pipeline.replicas} replicas" if is_uneven else ""
        problem = (
            f"The last batch has {last} of {size} examples{uneven}; it weighs as much in the "
            "training as a full one, and XLA compiles for its shape too."
        )
        remedy = (
            "Use `drop_remainder=True` for training, or `kdpkit.pipelines.pad_to_global_batch`."
        )
        yield "note", batch, problem, remedy


# What makes training wait. Where a cache after it makes it happen once, it is a note.


def _waiting(stage: Stage, after: tuple[Stage, ...], problem: str, remedy: str) -> _Found:
    is_once = any(one.keeps for one in after)
    end = "; the cache after it makes it do so once." if is_once else "."
    yield "note" if is_once else "slow", stage, problem + end, remedy


@_rule("python")
def _python(pipeline: _Pipeline) -> _Found:
    problem = "It calls Python, one call at a time, which also holds up the training step's own "
    remedy = (
        "Write it in TensorFlow operations, prepare the data beforehand (TFRecord files), or cache "
        "its result."
    )
    for stage, after in pipeline.stages:
        inner = paths(Stage(stage.dataset._epochs)) if stage.kind == "train_pipeline" else ()
        if stage.calls_python or any(one.calls_python for one, _ in inner):
            yield from _waiting(stage, after, f"{problem}Python", remedy)


@_rule("overwritten-arrays")
def _overwritten_arrays(pipeline: _Pipeline) -> _Found:
    """Look for batches that are still arrays of Python's when replicas split them."""
    for stage, after in pipeline.stages:
        if pipeline.replicas > 1 and stage.calls_python and not _first(after, *_COPYING):
            yield (
                "wrong",
                stage,
                "It gives batches from Python. TensorFlow does not copy them, and plain Keras on "
                "several replicas writes into them: if they are views of your arrays, these hold "
                "other labels after the first epoch.",
                "Pass single examples and `.batch(...)` them here; or have Python give copies "
                "(`y[i:j].copy()`); or train with `kdpkit.training.replica_exact(model)`.",
            )


@_rule("serial-map")
def _serial_map(pipeline: _Pipeline) -> _Found:
    problem = "It makes one element after the other, on one core"
    remedy = "Write `.map(..., num_parallel_calls=tf.data.AUTOTUNE)`."
    for stage, after in pipeline.of("map"):
        is_stateful = any(one.is_stateful for one in stage.functions[:1])
        is_fixed = pipeline.is_fixed_by("map_parallelization") and not is_stateful
        if stage.is_parallel or not stage.has_work:
            continue
        if is_fixed and not any(one.keeps for one in after):
            by_itself = "; TensorFlow makes it parallel by itself, while its autotune is on."
            yield "note", stage, problem + by_itself, remedy
        else:
            yield from _waiting(stage, after, problem, remedy)


@_rule("serial-interleave")
def _serial_interleave(pipeline: _Pipeline) -> _Found:
    problem = "It reads one file at a time, in the thread that waits for the data"
    remedy = (
        "Write `.interleave(..., num_parallel_calls=tf.data.AUTOTUNE)`, or use "
        "`kdpkit.pipelines.interleave_files`."
    )
    for stage, after in pipeline.of("interleave"):
        if stage.runs(READING) and not stage.is_parallel:
            yield from _waiting(stage, after, problem, remedy)


@_rule("no-prefetch")
def _no_prefetch(pipeline: _Pipeline) -> _Found:
    """Look for work that begins when the training asks for its result."""

    def is_late(stage: Stage) -> bool:
        return not stage.is_parallel and stage.kind not in _AHEAD

    late = [*itertools.takewhile(is_late, reversed(pipeline.line))]  # the last one first
    working = [stage for stage in late if not _is_light(stage)]
    has_work = len(late) < len(pipeline.line) or any(stage.has_work for stage in late)
    if not working or not has_work:
        return
    is_fixed = pipeline.is_fixed_by("inject_prefetch")
    early = _first(reversed(pipeline.line), "prefetch")
    position = f"`{early.label}` comes before" if early else "There is no `prefetch` after"
    fixed = "; TensorFlow adds one by itself, while its autotune is on" if is_fixed else ""
    yield (
        "note" if is_fixed else "slow",
        working[0],
        f"{position} this stage, so its work begins when the training step before has ended"
        f"{fixed}.",
        "End the pipeline with `.prefetch(tf.data.AUTOTUNE)`.",
    )


def _is_light(stage: Stage) -> bool:
    """Return whether a stage hands elements on, or moves a few numbers."""
    if stage.functions:
        return stage.kind in ("map", "filter") and all(one.is_cheap for one in stage.functions)
    return stage.kind not in {*_BATCHES, "shuffle"}


# What several workers cannot divide.


@_rule("file-shards")
def _file_shards(pipeline: _Pipeline) -> _Found:
    by_file = pipeline.policy == _Policy.FILE
    if not by_file and not (pipeline.policy == _Policy.AUTO and pipeline.workers > 1):
        return
    workers = max(pipeline.workers, 2)
    files = {stage: stage.files for stage, _ in pipeline.stages if stage.files is not None}
    remedy = (
        "Let each worker keep its shard of the examples: "
        "`.apply(kdpkit.pipelines.auto_shard('data'))`; or write as many files as there are "
        "workers, or more."
    )
    for stage, count in files.items():
        if count < workers:
            problem = (
                f"It reads {count} file{'s' * (count > 1)}, which {workers} workers cannot divide: "
                "a worker without a file has no data."
            )
            yield "error", stage, problem, remedy
    for stage in pipeline.sources if by_file and not files else ():
        problem = "It reads no files, and the workers' policy is to divide files."
        yield "error", stage, problem, remedy


@_rule("python-shards")
def _python_shards(pipeline: _Pipeline) -> _Found:
    is_read = any(stage.files for stage, _ in pipeline.stages)
    if pipeline.policy == _Policy.AUTO and pipeline.workers > 1 and not is_read:
        workers = f"Each of {pipeline.workers} workers"
        for stage, _ in pipeline.of("from_generator"):
            problem = f"{workers} runs all of the generator and keeps its shard."
            remedy = "Write TFRecord files, one or more for each worker."
            yield "slow", stage, problem, remedy
