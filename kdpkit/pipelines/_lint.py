"""Mistakes in a `tf.data` pipeline that can be read from its stages, without running it."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import TypeAlias

import tensorflow as tf

from kdpkit._internal import checks, shuffle_buffer
from kdpkit._internal.check_results import Finding, in_order
from kdpkit.pipelines import _structure
from kdpkit.pipelines._counting import require_dataset
from kdpkit.pipelines._structure import Stage

_BATCHES = frozenset({"batch", "padded_batch", "ragged_batch", "rebatch", "group_by_window"})
_OPENS = frozenset({"flat_map", "interleave", "unbatch", "group_by_window", "window"})
_SHORT_PART = 0.25  # of a batch
_ONCE = "; the cache after it makes it do so once."


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
    end = _structure.end_of(dataset)
    pipeline = _Pipeline(
        dataset,
        _structure.line(end),
        tuple(_structure.paths(end)),
        replicas=checks.integer("replicas", replicas),
        workers=checks.integer("workers", workers),
        epochs=_count("epochs", epochs),
        steps=_count("steps_per_epoch", steps_per_epoch),
    )
    rules = {**_RULES, **_TRAINING_RULES} if training else _RULES
    return [
        *in_order(
            Finding(name, level, pipeline.where(stage), problem, remedy)
            for name, rule in rules.items()
            for level, stage, problem, remedy in rule(pipeline)
        )
    ]


def _count(name: str, value: int | None) -> int | None:
    return None if value is None else checks.integer(name, value)


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
    def caches(self) -> list[tuple[Stage, tuple[Stage, ...]]]:
        """Stages that keep what they are given, with those that follow."""
        return [(stage, after) for stage, after in self.stages if stage.keeps]

    @property
    def length(self) -> int | None:
        """Elements of the dataset: None if TensorFlow does not know, infinity as -1."""
        return self.line[-1].cardinality

    @property
    def shard_policy(self) -> tf.data.experimental.AutoShardPolicy:
        """How the workers divide it."""
        return self.dataset.options().experimental_distribute.auto_shard_policy

    def where(self, stage: Stage) -> str:
        """Name a stage, and its position where it has one."""
        if stage not in self.line:
            return stage.label
        return f"{stage.label}, stage {self.line.index(stage) + 1} of {len(self.line)}"

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


_Fault: TypeAlias = tuple[str, Stage, str, str]  # level, stage, problem, remedy
_Rule: TypeAlias = Callable[[_Pipeline], Iterator[_Fault]]
_RULES: dict[str, _Rule] = {}
_TRAINING_RULES: dict[str, _Rule] = {}


def _rule(name: str, *, training: bool = False) -> Callable[[_Rule], _Rule]:
    """Keep a rule under its name, among those for training alone or among those for all data."""

    def keep(rule: _Rule) -> _Rule:
        (_TRAINING_RULES if training else _RULES)[name] = rule
        return rule

    return keep


def _first(kind: str, stages: tuple[Stage, ...]) -> Stage | None:
    return next((stage for stage in stages if stage.kind == kind), None)


# What a cache keeps.


@_rule("shuffle-before-cache", training=True)
def _shuffle_before_cache(pipeline: _Pipeline) -> Iterator[_Fault]:
    for cache, after in pipeline.caches:
        shuffle = next((stage for stage in _structure.before(cache) if stage.shuffles), None)
        if shuffle is not None and not any(stage.shuffles for stage in after):
            yield (
                "wrong",
                cache,
                f"The cache keeps the order that `{shuffle.label}` drew in the first epoch, so "
                "every epoch has the same.",
                f"Move `shuffle` after it: `.{cache.kind}(...).shuffle(...)`.",
            )


@_rule("random-before-cache", training=True)
def _random_before_cache(pipeline: _Pipeline) -> Iterator[_Fault]:
    for cache, _ in pipeline.caches:
        for stage in _structure.before(cache):
            if any(function.draws for function in stage.functions):
                yield (
                    "wrong",
                    stage,
                    f"It draws at random, and `{cache.label}` after it keeps what it drew in the "
                    "first epoch: every epoch has the same.",
                    "Move this stage after the cache, and leave before it what is the same each "
                    "time.",
                )


@_rule("repeat-before-cache")
def _repeat_before_cache(pipeline: _Pipeline) -> Iterator[_Fault]:
    remedy = "Put `repeat` after the cache."
    for cache, _ in pipeline.caches:
        repeat = _first("repeat", _structure.line(cache))
        if cache.inputs and cache.inputs[0].cardinality == tf.data.INFINITE_CARDINALITY:
            yield (
                "wrong",
                cache,
                "What comes before the cache never ends, so the cache is never complete: it grows "
                "until memory or disk is full, and nothing is read from it.",
                remedy,
            )
        elif repeat is not None and repeat.setting("count") != 1:
            problem = f"It keeps every example as often as `{repeat.label}` gives it."
            yield "slow", cache, problem, remedy


# How examples are mixed.


@_rule("batch-before-shuffle", training=True)
def _batch_before_shuffle(pipeline: _Pipeline) -> Iterator[_Fault]:
    batches = [stage for stage in pipeline.line if stage.kind in _BATCHES]
    following = pipeline.following(batches[-1]) if batches else ()
    shuffle = _first("shuffle", following)
    if shuffle is None or any(stage.kind in _OPENS for stage in following):
        return
    batch = batches[-1]
    is_mixed = any(stage.kind == "shuffle" or stage.shuffles for stage in _structure.before(batch))
    if is_mixed and any(stage.keeps for stage in following[: following.index(shuffle)]):
        yield (
            "note",
            shuffle,
            "The cache before it holds batches, so every epoch has the same batches, in another "
            "order.",
            "Cache examples: `.cache().shuffle(...).batch(...)`.",
        )
    elif not is_mixed and batch.kind != "group_by_window":
        yield (
            "wrong",
            shuffle,
            f"It shuffles batches, as it comes after `{batch.label}`: the examples of a batch are "
            "neighbors in the source, and the same in every epoch.",
            f"Put `.shuffle(...)` before `.{batch.kind}(...)`, with a buffer counted in examples.",
        )


@_rule("small-shuffle", training=True)
def _small_shuffle(pipeline: _Pipeline) -> Iterator[_Fault]:
    for shuffle, after in pipeline.stages:
        buffer = shuffle.setting("buffer_size") if shuffle.kind == "shuffle" else None
        is_of_examples = not (
            any(stage.kind in _OPENS for stage in after)
            or any(stage.kind in {*_BATCHES, "shuffle"} for stage in _structure.before(shuffle))
        )
        if buffer is None or not is_of_examples:
            continue
        examples = shuffle.inputs[0].cardinality if shuffle.inputs else None
        sizes = (stage.setting("batch_size") for stage in after if stage.kind in _BATCHES)
        fault = shuffle_buffer.fault(buffer, examples=examples, batch_size=next(sizes, None))
        if fault:
            level, problem, remedy = fault
            yield level, shuffle, problem, remedy


@_rule("repeat-before-batch", training=True)
def _repeat_before_batch(pipeline: _Pipeline) -> Iterator[_Fault]:
    for repeat in pipeline.line:
        following = pipeline.following(repeat)
        mixing = next((one for one in following if one.kind in {*_BATCHES, "shuffle"}), None)
        if repeat.kind == "repeat" and mixing is not None and repeat.setting("count") != 1:
            yield (
                "note",
                repeat,
                f"`{mixing.label}` after it mixes the end of one pass with the beginning of the "
                "next: an example may come twice before another comes once.",
                f"If each epoch is to have every example once, move `repeat` after "
                f"`{mixing.kind}`.",
            )


@_rule("split-after-shuffle")
def _split_after_shuffle(pipeline: _Pipeline) -> Iterator[_Fault]:
    for split, _ in pipeline.stages:
        before = [*_structure.before(split)] if split.kind in ("skip", "take") else []
        shuffle = next((one for one in before if one.kind == "shuffle" and one.shuffles), None)
        if shuffle is None or any(one.keeps or one.kind == "repeat" for one in before):
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
def _repeat(pipeline: _Pipeline) -> Iterator[_Fault]:
    repeats = [stage for stage in pipeline.line if stage.kind == "repeat"]
    if pipeline.steps is not None:
        return
    if pipeline.length == tf.data.INFINITE_CARDINALITY:
        stage = repeats[-1] if repeats else pipeline.line[0]
        remedy = (
            "Pass `steps_per_epoch` to `fit`, or leave out `repeat()`: `fit(epochs=...)` begins "
            "again by itself."
        )
        if pipeline.epochs is None:
            yield "note", stage, "It never ends, so `fit` needs `steps_per_epoch`.", remedy
        else:
            problem = (
                "It never ends, and `fit` has no `steps_per_epoch`: the first epoch does not end "
                "either."
            )
            yield "wrong", stage, problem, remedy
    for stage in repeats:
        count = stage.setting("count")
        if count is None or count <= 1 or pipeline.epochs == 1:
            continue
        is_cut = any(one.kind in ("take", "take_while") for one in pipeline.following(stage))
        epochs = None if is_cut else pipeline.epochs
        times = f"{count} * N" if epochs is None else f"{count} * {epochs} = {count * epochs}"
        yield (
            "note" if epochs is None else "wrong",
            stage,
            f"One iteration gives the data {count} times, and `fit(epochs={epochs or 'N'})` "
            f"{times} times.",
            "Leave out `repeat`, and let `epochs` count the passes.",
        )


@_rule("runs-out", training=True)
def _runs_out(pipeline: _Pipeline) -> Iterator[_Fault]:
    batches, steps, epochs = pipeline.length, pipeline.steps, pipeline.epochs
    if steps is None or batches is None or batches <= 0:
        return
    complete, left = divmod(batches, steps)
    if complete == 0:
        problem = f"An epoch is to have {steps} steps, and ends after {batches}"
    elif left and epochs is not None and epochs > complete:
        problem = (
            f"{epochs} epochs of {steps} steps are to be trained, but epoch {complete + 1} ends "
            f"after {left}"
        )
    else:
        return
    yield (
        "wrong",
        pipeline.line[-1],
        f"{problem}: the dataset has no more, so a schedule made for all steps does not reach its "
        "end.",
        "Write `.repeat()` last, or leave out `steps_per_epoch`.",
    )


@_rule("unknown-length", training=True)
def _unknown_length(pipeline: _Pipeline) -> Iterator[_Fault]:
    if pipeline.length is None and pipeline.steps is None:
        yield (
            "note",
            next(stage for stage in pipeline.line if stage.cardinality is None),
            "TensorFlow does not know how many elements it gives, so `fit` shows no progress in "
            "the first epoch, and a schedule cannot know its steps.",
            "If you need them: `steps = kdpkit.pipelines.count_batches(dataset)`, once, and "
            "`dataset.apply(tf.data.experimental.assert_cardinality(steps))`.",
        )


@_rule("short-batch", training=True)
def _short_batch(pipeline: _Pipeline) -> Iterator[_Fault]:
    batch = next((stage for stage in reversed(pipeline.line) if stage.kind in _BATCHES), None)
    if batch is None or batch.kind not in ("batch", "padded_batch") or not batch.inputs:
        return
    size, examples = batch.setting("batch_size"), batch.inputs[0].cardinality
    if not size or not examples or examples < 0 or batch.setting("drop_remainder") is not False:
        return
    last = examples % size
    if last and (pipeline.replicas > 1 or last <= _SHORT_PART * size):
        is_uneven = last % pipeline.replicas
        uneven = f", split unevenly over {pipeline.replicas} replicas" if is_uneven else ""
        yield (
            "note",
            batch,
            f"The last batch has {last} of {size} examples{uneven}; it weighs as much in the "
            "training as a full one, and XLA compiles for its shape too.",
            "Use `drop_remainder=True` for training, or `kdpkit.pipelines.pad_to_global_batch`.",
        )


# What makes training wait.


def _is_python(stage: Stage) -> bool:
    return stage.kind == "from_generator" or any(one.calls_python for one in stage.functions)


def _augments_in_python(stage: Stage) -> bool:
    end = _structure.end_of(stage.made_by._epochs)
    return any(_is_python(one) for one, _ in _structure.paths(end))


@_rule("python")
def _python(pipeline: _Pipeline) -> Iterator[_Fault]:
    for stage, after in pipeline.stages:
        augments = stage.kind == "train_pipeline" and _augments_in_python(stage)
        if augments or _is_python(stage):
            once = any(one.keeps for one in after)
            yield (
                "note" if once else "slow",
                stage,
                "It calls Python, one call at a time, which also holds up the training step's own "
                f"Python{_ONCE if once else '.'}",
                "Write it in TensorFlow operations, prepare the data beforehand (TFRecord files), "
                "or cache its result.",
            )


@_rule("overwritten-arrays")
def _overwritten_arrays(pipeline: _Pipeline) -> Iterator[_Fault]:
    """Look for batches that are still arrays of Python's when replicas split them."""
    for stage, after in pipeline.stages:
        is_copied = any(one.kind in ("batch", "padded_batch") for one in after)
        if pipeline.replicas > 1 and _is_python(stage) and not is_copied:
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
def _serial_map(pipeline: _Pipeline) -> Iterator[_Fault]:
    fixes = pipeline.is_fixed_by("map_parallelization")
    for stage, after in pipeline.stages:
        is_work = stage.kind == "map" and any(not one.is_cheap for one in stage.functions)
        if stage.is_parallel or not is_work:
            continue
        once = any(one.keeps for one in after)
        is_fixed = fixes and not stage.functions[0].is_stateful
        because = "; TensorFlow makes it parallel by itself, while its autotune is on."
        because = _ONCE if once else because if is_fixed else "."
        yield (
            "note" if once or is_fixed else "slow",
            stage,
            f"It makes one element after the other, on one core{because}",
            "Write `.map(..., num_parallel_calls=tf.data.AUTOTUNE)`.",
        )


@_rule("serial-interleave")
def _serial_interleave(pipeline: _Pipeline) -> Iterator[_Fault]:
    for stage, after in pipeline.stages:
        is_reading = any(function.reads_files for function in stage.functions)
        if stage.kind == "interleave" and is_reading and not stage.is_parallel:
            once = any(one.keeps for one in after)
            yield (
                "note" if once else "slow",
                stage,
                "It reads one file at a time, in the thread that waits for the data"
                f"{_ONCE if once else '.'}",
                "Write `.interleave(..., num_parallel_calls=tf.data.AUTOTUNE)`, or use "
                "`kdpkit.pipelines.interleave_files`.",
            )


@_rule("no-prefetch")
def _no_prefetch(pipeline: _Pipeline) -> Iterator[_Fault]:
    """Look for work that begins when the training asks for its result."""
    late: list[Stage] = []  # the last one first
    ahead = None
    for stage in reversed(pipeline.line):
        if stage.is_parallel or stage.kind in ("prefetch", "distribute", "train_pipeline"):
            ahead = stage
            break
        late.append(stage)
    working = [stage for stage in late if not _is_light(stage)]
    if not working or (ahead is None and not any(stage.has_work for stage in pipeline.line)):
        return
    is_fixed = pipeline.is_fixed_by("inject_prefetch")
    early = _first("prefetch", pipeline.line[::-1])
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

_DIVIDE = (
    "Let each worker keep its shard of the examples: "
    "`.apply(kdpkit.pipelines.auto_shard('data'))`; or write as many files as there are workers, "
    "or more."
)


@_rule("file-shards")
def _file_shards(pipeline: _Pipeline) -> Iterator[_Fault]:
    by_file = pipeline.shard_policy == tf.data.experimental.AutoShardPolicy.FILE
    may_be = pipeline.shard_policy == tf.data.experimental.AutoShardPolicy.AUTO
    if not by_file and not (may_be and pipeline.workers > 1):
        return
    workers = max(pipeline.workers, 2)
    is_read = False
    for stage, _ in pipeline.stages:
        files = stage.files
        is_read = is_read or files is not None
        if files is not None and files < workers:
            problem = (
                f"It reads {files} file{'s' * (files > 1)}, which {workers} workers cannot divide: "
                "a worker without a file has no data."
            )
            yield "error", stage, problem, _DIVIDE
    for stage in _sources(pipeline) if by_file and not is_read else ():
        problem = "It reads no files, and the workers' policy is to divide files."
        yield "error", stage, problem, _DIVIDE


@_rule("python-shards")
def _python_shards(pipeline: _Pipeline) -> Iterator[_Fault]:
    may_be = pipeline.shard_policy == tf.data.experimental.AutoShardPolicy.AUTO
    is_read = any(stage.files for stage, _ in pipeline.stages)
    if may_be and pipeline.workers > 1 and not is_read:
        for stage in _sources(pipeline):
            if stage.kind == "from_generator":
                yield (
                    "slow",
                    stage,
                    f"Each of {pipeline.workers} workers runs all of the generator and keeps its "
                    "shard.",
                    "Write TFRecord files, one or more for each worker.",
                )


def _sources(pipeline: _Pipeline) -> list[Stage]:
    """Return what gives elements, where it is not files that they are read from."""
    sources = [stage for stage, _ in pipeline.stages if not stage.inputs]
    return [stage for stage in sources if not stage.kind.endswith("Dataset")]
