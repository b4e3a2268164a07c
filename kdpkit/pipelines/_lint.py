"""Mistakes in a `tf.data` pipeline that can be read from its stages, without running it."""

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from kdpkit._internal import check_results, checks
from kdpkit._internal.check_results import Finding
from kdpkit.pipelines._stages import (
    Stage,
    before,
    have_one_length,
    label_run,
    line,
    maker,
    makes_batches,
    paths,
    require_dataset,
)

_CACHES = ("cache", "snapshot")
_COPYING = ("batch", "padded_batch")
_BATCHES = (*_COPYING, "ragged_batch", "rebatch", "group_by_window")
_OPENS = ("flat_map", "interleave", "unbatch", "group_by_window", "window")
_MADE_UP = {"range", "random", "from_tensors"}  # sources that are no data
_SHORT_PART = 0.25  # of a batch
_SMALL_BUFFER = 1000  # examples; below it, and below this part of the data, a shuffle is local
_SMALL_PART = 0.01
_EVEN = 0.9  # of the longest of sampled datasets


def lint(
    dataset: tf.data.Dataset,
    *,
    training: bool = True,
    replicas: int = 1,
    epochs: int | None = None,
    steps_per_epoch: int | None = None,
) -> list[Finding]:
    """Find mistakes in a pipeline by reading its stages.

    Nothing is called; but where little is shuffled, labels are read for a second, unless that
    changes something for a later reader.

    Each finding has a level: `"error"` raises in `fit`, `"wrong"` trains something other than what
    was meant, `"slow"` wastes time, and `"note"` may be as you want it. A pipeline that has only
    notes is fine. The rules:

    - `batched-twice`, `not-batched`: batches of batches, and single examples.
    - `shuffle-before-cache`, `random-before-cache`, `repeat-before-cache`, `cut-cache`: a cache
      keeps what each epoch should draw again, or the data several times, or nothing.
    - `batch-before-shuffle`, `small-shuffle`, `never-shuffled`: examples hardly mix.
    - `shuffled-apart`, `shuffle-before-shard`, `shuffle-before-window`, `repeat-before-shuffle`:
      labels, shards, windows or epochs are mixed.
    - `uneven-samples`, `ignored-errors`: examples are missing, or come without others.
    - `constant-random`: random numbers of Python or NumPy, which are drawn once.
    - `split-after-shuffle`: `take` and `skip` that do not part the same examples in each epoch.
    - `repeat`, `runs-out`, `short-batch`: what an epoch is for `fit`.
    - `overwritten-arrays`: several replicas of plain Keras write into what Python gave.
    - `padded-metrics`: padding counts in `metrics`, and not in `weighted_metrics`.
    - `python`, `serial-map`: what makes training wait, unless a cache makes it happen once.

    Of what you pass to `train_pipeline` as `augment`, only whether it calls Python is checked.

    Args:
        dataset: What is passed to `fit`; on several replicas, before it is distributed.
        training: Whether it is for training. Validation needs no new order, and only the rules
            about speed, caches and splits count.
        replicas: Replicas that a batch is split over; with several a smaller last batch is a note.
        epochs: As `fit` gets it. None if that is not known: what depends on it is a note.
        steps_per_epoch: As `fit` gets it; None is all of the dataset.

    Raises:
        ValueError: `dataset` is not a `tf.data.Dataset`, or a count is below one.

    >>> images = tf.data.Dataset.range(1000).shuffle(1000).cache().batch(50).prefetch(2)
    >>> for finding in lint(images):
    ...     print(finding)
    wrong    shuffle-before-cache: cache, stage 3 of 5
        It keeps the order that `shuffle(1000)` drew first: all epochs have that.
        Remedy: Move `shuffle` after it: `.cache().shuffle(...)`.
    """
    require_dataset("dataset", dataset)
    end = Stage(dataset)
    checks.integer("replicas", replicas)
    for name, count in (("epochs", epochs), ("steps_per_epoch", steps_per_epoch)):
        if count is not None:
            checks.integer(name, count)
    pipeline = _Pipeline(dataset, line(end), tuple(paths(end)), replicas, epochs, steps_per_epoch)
    findings = (
        Finding(name, level, pipeline.where(stage), problem, remedy)
        for name, remedy, only_training, rule in _RULES
        if training or not only_training
        for level, stage, problem in rule(pipeline)
    )
    return [*check_results.in_order(findings)]


@dataclasses.dataclass(frozen=True)
class _Pipeline:
    """A dataset, its stages, and what is known of the `fit` that it is for.

    `line` has the stages from where datasets come together to the end, `stages` all of them, with
    those that follow.
    """

    dataset: tf.data.Dataset
    line: tuple[Stage, ...]
    stages: tuple[tuple[Stage, tuple[Stage, ...]], ...]
    replicas: int
    epochs: int | None
    steps: int | None

    @property
    def length(self) -> int | None:
        """Elements of the dataset: None if TensorFlow does not know, infinity as -1."""
        return Stage(self.dataset).cardinality

    @functools.cached_property
    def label_run(self) -> int:
        """Neighbors with the same label before anything is shuffled, cached or batched; or 0."""
        examples = [*itertools.takewhile(lambda stage: stage.is_readable, self.line)]
        is_plain = examples and not _first(self.following(examples[-1]), *_OPENS)
        return label_run(examples[-1]) if is_plain else 0

    def of(self, *kinds: str) -> Iterator[tuple[Stage, tuple[Stage, ...]]]:
        """Yield the stages of some kinds, with those that follow."""
        return ((stage, after) for stage, after in self.stages if stage.kind in kinds)

    def where(self, stage: Stage) -> str:
        """Name a stage, its position, and where its function is in the user's source."""
        position = ""
        if stage in self.line:
            position = f", stage {self.line.index(stage) + 1} of {len(self.line)}"
        location = stage.functions[0].location if stage.functions else ""
        return stage.label + position + (location and f", {location}")

    def following(self, stage: Stage) -> tuple[Stage, ...]:
        """Return the stages of the line that follow one of it."""
        return self.line[self.line.index(stage) + 1 :]


_Faults: TypeAlias = Iterator[tuple[str, Stage, str]]  # level, stage, problem
_Rule: TypeAlias = Callable[[_Pipeline], _Faults]
_RULES: list[tuple[str, str, bool, _Rule]] = []  # name, remedy, whether only for training


def _rule(name: str, remedy: str, *, training: bool = False) -> Callable[[_Rule], None]:
    return lambda rule: _RULES.append((name, remedy, training, rule))


def _inside(stage: Stage) -> Iterator[Stage]:
    """Yield a stage, and those that make the batches of a `train_pipeline`."""
    yield stage
    if stage.kind == "train_pipeline":
        yield from before(Stage(stage.dataset._epochs))


def _first(stages: Iterable[Stage], *kinds: str) -> Stage | None:
    return next((stage for stage in stages if stage.kind in kinds), None)


# What a batch has.


@_rule("batched-twice", "Leave out one of the two, or put `.unbatch()` between them.")
def _batched_twice(pipeline: _Pipeline) -> _Faults:
    for batch, _ in pipeline.of(*_COPYING):
        inner = maker(batch.inputs[0])
        if makes_batches(inner):
            # Complete windows of labelled steps, and sentences of texts, are batched twice.
            may_be_meant = batch.kind != "batch" or inner.setting("drop_remainder") is True
            problem = f"Its elements are batches already, of `{inner.label}`."
            yield "note" if may_be_meant else "wrong", batch, problem
        elif inner.kind == "from_tensors" and have_one_length(inner.dataset):
            slices = "makes one element of all examples, and `from_tensor_slices` one of each."
            yield "wrong", batch, f"`from_tensors` {slices}"


@_rule("not-batched", "Add `.batch(global_batch_size)`.")
def _not_batched(pipeline: _Pipeline) -> _Faults:
    specs = tf.nest.flatten(pipeline.dataset.element_spec)
    has_numbers = any(getattr(spec, "shape", None) == () for spec in specs)
    if has_numbers and not any(stage.kind in _BATCHES for stage, _ in pipeline.stages):
        problem = "`fit` takes each element for a batch, and these are single examples."
        yield "error", pipeline.line[-1], problem


# What a cache keeps.


@_rule("shuffle-before-cache", "Move `shuffle` after it: `.cache().shuffle(...)`.", training=True)
def _shuffle_before_cache(pipeline: _Pipeline) -> _Faults:
    for cache, after in pipeline.of(*_CACHES):
        shuffle = next((stage for stage in before(cache) if stage.shuffles), None)
        if shuffle is not None and not any(stage.shuffles for stage in after):
            problem = f"It keeps the order that `{shuffle.label}` drew first: all epochs have that."
            yield "wrong", cache, problem


@_rule("random-before-cache", "Move it after the cache.", training=True)
def _random_before_cache(pipeline: _Pipeline) -> _Faults:
    for cache, _ in pipeline.of(*_CACHES):
        for stage in before(cache):
            if any(function.draws for function in stage.functions):
                problem = "It draws at random, and each epoch has what the first one drew, since "
                yield "wrong", stage, f"{problem}`{cache.label}` keeps it."


@_rule("cut-cache", "Put the cache after `take`: `.take(...).cache()`.")
def _cut_cache(pipeline: _Pipeline) -> _Faults:
    problem = "It is not read to its end, so TensorFlow discards it: each epoch prepares all again."
    for take, _ in pipeline.of("take"):
        cache = _first(reversed(line(take)), *_CACHES, "shuffle", "repeat")
        count, available = take.setting("count"), take.inputs[0].cardinality
        is_cut = count is not None and 0 <= count <= (available or count)
        if is_cut and cache and cache.kind == "cache":
            yield "slow", cache, problem


@_rule("repeat-before-cache", "Put `repeat` after the cache.")
def _repeat_before_cache(pipeline: _Pipeline) -> _Faults:
    for cache, _ in pipeline.of(*_CACHES):
        repeat = _first(line(cache), "repeat")
        if cache.inputs and cache.inputs[0].cardinality == tf.data.INFINITE_CARDINALITY:
            problem = "What it keeps never ends: it grows until memory or disk is full."
            yield "wrong", cache, problem
        elif repeat is not None and repeat.setting("count") != 1:
            yield "slow", cache, f"It keeps every example as often as `{repeat.label}` gives it."


# How examples are mixed.


@_rule("batch-before-shuffle", "Put `shuffle`, of examples, before the batch.", training=True)
def _batch_before_shuffle(pipeline: _Pipeline) -> _Faults:
    batch = _first(reversed(pipeline.line), *_BATCHES)
    following = pipeline.following(batch) if batch else ()
    shuffle = _first(following, "shuffle")
    if batch is None or shuffle is None or _first(following, *_OPENS):
        return
    is_mixed = any(stage.kind == "shuffle" or stage.shuffles for stage in before(batch))
    if not is_mixed and batch.kind != "group_by_window":
        problem = f"It shuffles batches, of `{batch.label}`, which are the same in every epoch."
        yield "wrong", shuffle, problem


@_rule("small-shuffle", "Use a larger buffer, or shuffle the data beforehand.", training=True)
def _small_shuffle(pipeline: _Pipeline) -> _Faults:
    for shuffle, after in pipeline.of("shuffle"):
        buffer, examples = shuffle.setting("buffer_size"), shuffle.inputs[0].cardinality
        is_of_batches = _first(after, *_OPENS) or _first(before(shuffle), *_BATCHES, "shuffle")
        if is_of_batches or buffer is None or buffer < 0 or 0 <= (examples or -1) <= buffer:
            continue
        batch = _first(after, *_BATCHES)
        size = (batch.setting("batch_size") if batch else None) or 0
        held = f"The buffer holds {buffer:,} examples"
        if buffer < size:
            yield "wrong", shuffle, f"{held}, fewer than a batch of {size:,}."
        elif buffer < (run := pipeline.label_run):
            yield "wrong", shuffle, f"{held}, and about {run:,} in a row have the same label."
        elif examples is not None and buffer < min(_SMALL_BUFFER, _SMALL_PART * examples):
            yield "note", shuffle, f"{held} of {examples:,}: an order of the source nearly stays."


@_rule("never-shuffled", "Add `.shuffle(examples)` before `.batch(...)`.", training=True)
def _never_shuffled(pipeline: _Pipeline) -> _Faults:
    has_shuffle = any(stage.shuffles or stage.kind == "shuffle" for stage, _ in pipeline.stages)
    if not has_shuffle and (count := pipeline.label_run):
        problem = f"About {count:,} examples in a row have the same label, and nothing shuffles."
        yield "wrong", pipeline.line[0], problem


@_rule("repeat-before-shuffle", "Put `shuffle` before `repeat`.", training=True)
def _repeat_before_shuffle(pipeline: _Pipeline) -> _Faults:
    problem = "`repeat` before it mixes epochs: examples come twice before others come once."
    for shuffle, after in pipeline.of("shuffle"):
        repeat = _first(reversed(line(shuffle)), "repeat", *_CACHES)
        is_mixed = repeat and repeat.kind == "repeat" and repeat.setting("count") != 1
        if is_mixed and not _first(after, *_OPENS):
            yield "note", shuffle, problem


@_rule("shuffle-before-window", "Make windows first, and shuffle them.", training=True)
def _shuffle_before_window(pipeline: _Pipeline) -> _Faults:
    for window, after in pipeline.of("window", *_COPYING):
        shuffle = _first(before(window), "shuffle", *_OPENS)
        following = _first(after, *_BATCHES, "unbatch")
        is_batched = following and following.kind in _COPYING and not makes_batches(window)
        if (window.kind == "window" or is_batched) and shuffle and shuffle.kind == "shuffle":
            problem = f"`{shuffle.label}` before it mixes what is consecutive in a window."
            # Windows that overlap are of a sequence; others may be groups of any examples.
            overlaps = (window.setting("shift") or np.inf) < (window.setting("size") or 0)
            yield "wrong" if overlaps else "note", window, problem


@_rule("shuffle-before-shard", "Put `shard` first; or pass a seed and `deterministic=True`.")
def _shuffle_before_shard(pipeline: _Pipeline) -> _Faults:
    for shard, _ in pipeline.of("shard"):
        earlier = next((stage for stage in before(shard) if stage.has_own_order), None)
        if earlier and shard.setting("num_shards") != 1:
            problem = f"`{earlier.label}` has another order in each process: shards overlap."
            yield "wrong", shard, problem


@_rule("shuffled-apart", "Shuffle once after it: `Dataset.zip((x, y)).shuffle(...)`.")
def _shuffled_apart(pipeline: _Pipeline) -> _Faults:
    problem = "Each of its datasets has an order of its own: features get the labels of others."
    for combined, after in pipeline.of("zip"):
        specs: Any = [stage.dataset.element_spec for stage in combined.inputs]
        if after and all(getattr(spec, "dtype", None) == tf.string for spec in specs):
            specs = after[0].dataset.element_spec  # what was read from files with these names
        if _belong_together(specs) and _differ_in_order(combined.inputs):
            yield "wrong", combined, problem


def _belong_together(specs: Any) -> bool:
    """Return whether elements are features and labels, rather than examples of one kind."""
    parts = [tf.nest.flatten(spec) for spec in specs] if isinstance(specs, tuple | list) else []
    single = [part[0] for part in parts if len(part) == 1]
    has_label = any(spec.dtype != tf.string and len(spec.shape) <= 1 for spec in single)
    has_two_of_a_kind = any(spec in parts[0] for part in parts[1:] for spec in part)
    return (has_label or len(single) == len(parts)) and not has_two_of_a_kind


def _differ_in_order(datasets: Iterable[Stage]) -> bool:
    """Return whether datasets come in different orders; each reader of a `shuffle` draws one."""
    orders, shuffles = set(), []
    for end in datasets:
        stages = [stage for stage, _ in paths(end)]
        if not _MADE_UP.isdisjoint(stage.kind for stage in stages):
            return False
        order = [stage for stage in stages if stage.kind == "shuffle" or stage.has_own_order]
        shuffles += [id(stage.dataset) for stage in order if stage.reshuffles]
        orders.add((*((s.has_own_order and id(s.dataset), s.label, *s.seeds) for s in order),))
    return len(orders) > 1 or len({*shuffles}) < len(shuffles)


@_rule("uneven-samples", "Repeat each, or pass `stop_on_empty_dataset=True`.", training=True)
def _uneven_samples(pipeline: _Pipeline) -> _Faults:
    problem = "One of its datasets ends before the others, of which the rest comes without it."
    for choice, _ in pipeline.of("choose_from_datasets"):
        lengths = np.array([stage.cardinality or np.nan for stage in choice.inputs], float)
        lengths[lengths < 0] = np.inf
        functions = choice.argument("selector_input")._functions()
        captured = [t for f in functions for t in f.function.captured_inputs]
        weights = [np.exp(tensor).ravel() for tensor in captured if tensor.dtype.is_floating]
        ends = lengths / (weights[0] if weights else 1)
        is_even = np.all(lengths == np.inf) or np.min(ends) >= _EVEN * np.max(ends)
        if not (is_even or choice.setting("stop_on_empty_dataset")):
            yield "note" if np.any(np.isnan(ends)) else "wrong", choice, problem


@_rule("ignored-errors", "Write the file again, or filter what you know is damaged.")
def _ignored_errors(pipeline: _Pipeline) -> _Faults:
    problem = "It leaves out damaged examples, and what comes after them in a file, in silence."
    return (("note", stage, problem) for stage, _ in pipeline.of("ignore_errors"))


@_rule("constant-random", "Draw with `tf.random`, or in a Keras layer.", training=True)
def _constant_random(pipeline: _Pipeline) -> _Faults:
    problem = "TensorFlow calls it once, so what Python draws in it is the same for all examples."
    for stage, _ in pipeline.stages:
        if any(each.draws_while_traced for each in _inside(stage)):
            yield "wrong", stage, problem


@_rule(
    "split-after-shuffle",
    "Put it before `shuffle`, or pass `shuffle` `reshuffle_each_iteration=False`.",
)
def _split_after_shuffle(pipeline: _Pipeline) -> _Faults:
    for split, _ in pipeline.of("skip", "take"):
        earlier = [*before(split)]
        new = (s for s in earlier if s.reshuffles or (s.kind != "shuffle" and s.has_own_order))
        shuffle = next(new, None)
        if shuffle and not any(stage.caches or stage.kind == "repeat" for stage in earlier):
            order = f"`{shuffle.label}` before it has another order in each epoch"
            problem = f"{order}. If the rest is held out, examples of it are trained on."
            yield "wrong" if split.kind == "skip" else "note", split, problem


# What an epoch is for `fit`.


@_rule("repeat", "Leave out `repeat`, or pass `steps_per_epoch` to `fit`.", training=True)
def _repeat(pipeline: _Pipeline) -> _Faults:
    repeats = [stage for stage in pipeline.line if stage.kind == "repeat"]
    is_known = pipeline.epochs is not None
    if pipeline.steps is not None:
        return
    if pipeline.length == tf.data.INFINITE_CARDINALITY:
        problem = "It never ends, and without `steps_per_epoch` the first epoch does not either."
        yield "wrong" if is_known else "note", [pipeline.line[0], *repeats][-1], problem
    for stage in repeats:
        count = stage.setting("count") or 1
        if count > 1 and pipeline.epochs != 1:
            is_cut = _first(pipeline.following(stage), "take", "take_while")
            epochs = pipeline.epochs or "N"
            problem = f"`fit(epochs={epochs})` gives the data {count} * {epochs} times."
            yield "note" if is_cut or not is_known else "wrong", stage, problem


@_rule("runs-out", "Write `.repeat()` last, or leave out `steps_per_epoch`.", training=True)
def _runs_out(pipeline: _Pipeline) -> _Faults:
    batches, steps, epochs = pipeline.length, pipeline.steps, pipeline.epochs
    if steps is None or batches is None or batches <= 0:
        return
    complete, left = divmod(batches, steps)
    if complete == 0 or (left and epochs is not None and epochs > complete):
        problem = f"Epoch {complete + 1} ends after {left} of {steps} steps: the dataset has no "
        yield "wrong", pipeline.line[-1], f"{problem}more, and schedules do not reach their end."


@_rule(
    "short-batch",
    "Use `drop_remainder=True` for training, or `kdpkit.pipelines.pad_to_global_batch`.",
    training=True,
)
def _short_batch(pipeline: _Pipeline) -> _Faults:
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
        problem = f"The last batch has {last} of {size} examples{uneven}; it weighs as much as a "
        yield "note", batch, f"{problem}full one, and XLA compiles for its shape too."


# What makes training wait, unless a cache after it makes it happen once.


@_rule("python", "Write it in TensorFlow operations, or prepare or cache the data beforehand.")
def _python(pipeline: _Pipeline) -> _Faults:
    problem = "It calls Python, one call at a time, which also holds up that of the training step."
    for stage, after in pipeline.stages:
        if any(each.calls_python for each in _inside(stage)) and not _first(after, *_CACHES):
            yield "slow", stage, problem


@_rule(
    "overwritten-arrays",
    "Pass single examples and `.batch(...)` them here; or have Python give copies "
    "(`y[i:j].copy()`); or train with `kdpkit.training.replica_exact(model)`.",
)
def _overwritten_arrays(pipeline: _Pipeline) -> _Faults:
    """Look for batches that are still arrays from Python when replicas split them."""
    problem = (
        "Plain Keras on several replicas writes into its batches, which TensorFlow does not copy: "
        "if they are views of your arrays, these hold other labels after the first epoch."
    )
    for stage, after in pipeline.stages:
        batches = (each.kind in _COPYING or _calls_batch(each) for each in after)
        if pipeline.replicas > 1 and stage.calls_python and not any(batches):
            yield "wrong", stage, problem


def _calls_batch(stage: Stage) -> bool:
    """Return whether its functions make batches, as those of `bucket_by_sequence_length` do."""
    return any(function.runs("(Padded|Parallel)?BatchDataset.*") for function in stage.functions)


@_rule("serial-map", "Write `.map(..., num_parallel_calls=tf.data.AUTOTUNE)`.")
def _serial_map(pipeline: _Pipeline) -> _Faults:
    """Look for a function with a state, which TensorFlow does not call in parallel by itself."""
    for stage, after in pipeline.of("map"):
        is_stateful = any(function.is_stateful for function in stage.functions)
        is_parallel = "Parallel" in type(stage.dataset).__name__ or stage.library_call
        if is_stateful and not (is_parallel or stage.calls_python or _first(after, *_CACHES)):
            yield "slow", stage, "It makes one element after the other, on one core."


@_rule("padded-metrics", "Compile the model with `weighted_metrics` in place of `metrics`.")
def _padded_metrics(pipeline: _Pipeline) -> _Faults:
    problem = "Padding has weight 0, which `metrics` ignore: there each padding counts."
    for stage, _ in pipeline.of("map"):
        pad = inspect.unwrap(stage.functions[0].call or len)
        if pad.__module__ == "kdpkit.pipelines._padding" and pad.__name__ == "pad":
            yield "note", stage, problem
