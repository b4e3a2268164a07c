"""Any epoch of a user's dataset, from any of its batches, in the order of an uninterrupted run.

`shuffle(seed=...)` draws a new order whenever an iterator of the same object is started, and that
count cannot be set. So the stages after the sources and caches are made again for each epoch, with
the order that each `shuffle` has in that epoch.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import tensorflow as tf

from kdpkit._internal import checks
from kdpkit._internal.datasets import with_private_batches
from kdpkit.pipelines._epochs import EpochCounter, TrainDataset, as_written, rewriting
from kdpkit.pipelines._stages import ASSIGNING, Stage, before, paths

# Arguments that a stage does not store, or that let threads change the order.
_ARGUMENTS = {"deterministic": True, "sloppy": False, "row_splits_dtype": tf.int64}
_PHILOX = 1  # the algorithm of tf.data's random numbers


def replayed(dataset: tf.data.Dataset) -> TrainDataset:
    """Return a dataset with the same epochs that can start at any batch of any of them.

    The first epoch is that of a new program, even if this dataset was iterated before. Stages with
    `deterministic=False` are in order. It raises if the order depends on more than the program.
    """
    private = with_private_batches(dataset)
    batches = int(dataset.cardinality())
    end = Stage(private, is_hidden=private is not dataset)
    stages = [*_all(end)]
    uses = Counter(id(stage.dataset) for stage in stages if stage.reshuffles)
    for is_met, problem, remedy in _REJECTED:
        for stage in filter(is_met, stages):
            library = stage.library_call.partition(".")[0]
            written = (each for each in stages if library and each.library_call.startswith(library))
            _reject(next(written, stage), problem, _OF_LIBRARY if library else remedy)
    for stage in stages:
        if uses[id(stage.dataset)] > 1:
            _reject(stage, "is read at several positions", "Make a `shuffle` for each of them.")
    _require_endless_repeats(end)
    if batches == tf.data.UNKNOWN_CARDINALITY:
        checks.fail(
            "The number of batches is unknown, so the end of an epoch is, too.",
            last_stage=next(stage for stage in stages if not stage.is_hidden).label,
            remedy="Add `.apply(tf.data.experimental.assert_cardinality(batches))`, where `batches "
            "= sum(1 for _ in dataset)` counts them, or `.repeat()` if the dataset never ends.",
        )
    replay = _Replay(rewriting())

    def one_epoch(epoch: tf.Tensor, skipped: tf.Tensor) -> tf.data.Dataset:
        return replay.iteration(end, epoch, skipped).enumerate(skipped)

    counter = EpochCounter(batches=batches)
    options = tf.data.Options().merge(dataset.options())
    options.deterministic = True
    sizes = (stage.setting("batch_size") for stage in stages if "batch" in stage.kind)
    return TrainDataset(
        counter.dataset(one_epoch, prefetch=1).with_options(options),
        counter,
        global_batch_size=next(sizes, None),
        seed=[stage.seeds for stage in stages if stage.kind == "shuffle"] or None,
        examples=dataset,
    )


def num_examples(dataset: TrainDataset) -> int | None:
    """Return how many elements the last stage before a batch has that knows it, as of files."""
    stages = [*_all(Stage(dataset.examples))]
    batch = next((index for index, stage in enumerate(stages) if "batch" in stage.kind), -1)
    counts = (stage.cardinality for stage in stages[batch + 1 :])
    return next((count for count in counts if count is not None and count >= 0), None)


def _all(end: Stage) -> Iterator[Stage]:
    """Yield all stages, hidden ones too, with those that choose between datasets."""
    yield end
    for stage in end.inputs:
        yield from _all(stage)
    if (selector := end.argument("selector_input")) is not None:
        yield from _all(Stage(selector))


_OF_LIBRARY = "Leave out its shuffling or sampling, and write `.shuffle(..., seed=...)` after it."
# What a resumed run cannot repeat: the condition for a stage, the reason, and the fix.
_REJECTED: tuple[tuple[Callable[[Stage], bool], str, str], ...] = (
    (
        lambda stage: stage.kind in ("shuffle", "random") and stage.seeds == [0, 0],
        "has another order in each run of the program",
        "Pass `seed=...`.",
    ),
    (
        lambda stage: stage.kind == "random" and bool(stage.argument("rerandomize")),
        "counts its iterators",
        "Leave out `rerandomize_each_iteration=True`.",
    ),
    (
        lambda stage: stage.kind == "distribute",
        "has the order in which services answer",
        "Prepare the examples here, or fill a cache on disk once and read that.",
    ),
    (
        lambda stage: stage.kind == "train_pipeline",
        "keeps its own position, and is tracked without further stages",
        "Pass further stages to `train_pipeline` as `prepare` or `augment`.",
    ),
    (
        lambda stage: stage.caches and any(earlier.shuffles for earlier in before(stage)),
        "keeps the order of whichever iterator was the first to fill it",
        "Move `shuffle` after it, or shuffle with `reshuffle_each_iteration=False`.",
    ),
    (
        lambda stage: any(f.draws or f.has_unseeded_order for f in stage.functions),
        "draws random numbers that a resumed run cannot draw again",
        "Draw with `tf.random.stateless_*` from seeds in the data, as of "
        "`tf.data.Dataset.random(seed)`, in a layer of the model, or in "
        "`train_pipeline(augment=...)`.",
    ),
    (
        lambda stage: stage.runs(ASSIGNING),
        "changes a variable, whose value a resumed run does not have",
        "Use `Dataset.scan`, whose state is that of an iterator.",
    ),
    (
        lambda stage: any(function.captures_datasets for function in stage.functions),
        "uses a dataset from outside of its function, whose order is not known here",
        "Make that dataset in the function.",
    ),
)


def _require_endless_repeats(end: Stage) -> None:
    """Raise for a `repeat` of a `shuffle` that ends, since it starts that once more at its end."""
    for stage, after in paths(end):
        if stage.kind != "repeat" or not _reshuffles(stage):
            continue
        lengths = {later.cardinality for later in (end, stage, *after)}
        if lengths != {tf.data.INFINITE_CARDINALITY}:
            _reject(
                stage,
                "starts `shuffle` again in an epoch, and how often depends on what is read ahead",
                "Track the dataset without `repeat` and `take`, or with only an endless `repeat`, "
                "and call `fit` with `steps_per_epoch`.",
            )


def _reshuffles(end: Stage) -> bool:
    return any(stage.reshuffles for stage in _all(end))


def _reject(stage: Stage, problem: str, remedy: str) -> NoReturn:
    checks.fail(
        f"Training cannot continue on this dataset where it stopped: `{stage.label}` {problem}.",
        stage=stage.kind,
        remedy=remedy,
    )


class _Replay:
    """Makes stages again for an iteration; `trace` decorates users' functions, as `rewriting`."""

    def __init__(self, trace: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._trace = trace

    def iteration(
        self, stage: Stage, number: tf.Tensor, skip: tf.Tensor | None = None
    ) -> tf.data.Dataset:
        """Return iteration `number` of a stage, without its first `skip` elements."""
        if not stage.inputs:
            return _after(stage.dataset, skip)
        if stage.kind == "cache":
            return _after(_unchanged(stage), skip)
        if stage.kind == "repeat" and _reshuffles(stage):
            repetition = as_written(lambda index: self.iteration(stage.inputs[0], index))
            return _after(tf.data.Dataset.counter().flat_map(repetition), skip)
        if stage.kind == "shuffle":
            inner = self.iteration(stage.inputs[0], number)
            return _after(_shuffled(stage, inner, number), skip)
        if stage.kind == "assert_cardinality" and skip is not None:
            left = tf.data.experimental.assert_cardinality(stage.dataset.cardinality() - skip)
            return self.iteration(stage.inputs[0], number, skip).apply(left)
        input_skip = _skip_of_inputs(stage, skip)
        rebuilt = self._rebuilt(stage, lambda data: self.iteration(Stage(data), number, input_skip))
        if rebuilt is None:
            return _after(_unchanged(stage), skip)
        return rebuilt if input_skip is not None else _after(rebuilt, skip)

    def _rebuilt(
        self, stage: Stage, replace: Callable[[tf.data.Dataset], tf.data.Dataset]
    ) -> tf.data.Dataset | None:
        """Return a stage on replaced inputs, in order; None if its arguments are not known."""
        dataset = stage.dataset
        if stage.kind == "options":
            return replace(stage.inputs[0].dataset)

        def argument(value: Any) -> Any:
            if isinstance(value, tf.data.Dataset):
                return replace(value)
            if not isinstance(value, tf.Tensor):
                return self._trace(value._func) if hasattr(value, "_func") else value
            known = tf.get_static_value(value)
            if known is None or value.dtype not in (tf.bool, tf.int64):
                return value
            return known if known.shape else known.item()

        arguments = {}
        for name, parameter in inspect.signature(type(dataset)).parameters.items():
            attribute = "_input_dataset" if name == "dataset" else f"_{name}"
            value = _ARGUMENTS.get(name, getattr(dataset, attribute, parameter.default))
            if value is parameter.empty:
                return None
            is_data = name in ("padding_values", "initial_state")  # whose type must stay
            arguments[name] = value if is_data else tf.nest.map_structure(argument, value)
        rebuilt = type(dataset)(**arguments)
        return rebuilt if rebuilt.element_spec == dataset.element_spec else None


def _after(dataset: tf.data.Dataset, skip: tf.Tensor | None) -> tf.data.Dataset:
    return dataset if skip is None else dataset.skip(skip)


def _unchanged(stage: Stage) -> tf.data.Dataset:
    """Return the dataset of a stage whose order is the same in each iteration; else raise."""
    for earlier in _all(stage):
        # An `interleave` does not store whether it is deterministic.
        is_interleave = "ParallelInterleave" in type(earlier.dataset).__name__
        if earlier.reshuffles or is_interleave or earlier.argument("deterministic") == "false":
            _reject(
                stage,
                "cannot be made again, after a `shuffle` or with threads",
                "Put `shuffle` after it, read without `num_parallel_calls` or after it, or use "
                "`kdpkit.pipelines.train_pipeline`.",
            )
    return stage.dataset


def _skip_of_inputs(stage: Stage, skip: tf.Tensor | None) -> Any:
    """Return how many elements the inputs can skip instead; None if the stage has to skip."""
    if skip is None:
        return None
    if stage.kind in ("batch", "padded_batch"):
        return skip * stage.setting("batch_size")
    is_pure = not any(function.is_stateful for function in stage.functions)
    return skip if stage.kind in ("map", "zip", "prefetch", "options") and is_pure else None


def _shuffled(stage: Stage, inner: tf.data.Dataset, iteration: tf.Tensor) -> tf.data.Dataset:
    """Shuffle in the order of one iteration of a `shuffle`.

    Each iteration takes the next two numbers of a generator as its seeds (`RandomSeedGenerator` in
    tensorflow/core/data/random_seed_generator of TensorFlow 2.20 and 2.21); here they are computed
    at their position.
    """
    seed, seed2 = (tf.constant(value, tf.int64) for value in stage.seeds)
    if stage.reshuffles:
        block = tf.raw_ops.StatelessRandomUniformFullIntV2(
            shape=[2, 2],
            key=tf.cast([seed], tf.uint64),
            counter=tf.cast(tf.stack([iteration // 2, seed2]), tf.uint64),
            alg=_PHILOX,
            dtype=tf.uint32,
        )
        seed, seed2 = tf.unstack(tf.cast(block, tf.int64)[iteration % 2])
    variant = tf.raw_ops.ShuffleDatasetV3(
        input_dataset=tf.data.experimental.to_variant(inner),
        buffer_size=tf.constant(stage.setting("buffer_size"), tf.int64),
        seed=seed,
        seed2=seed2,
        seed_generator=tf.raw_ops.DummySeedGenerator(),
        reshuffle_each_iteration=False,
        **inner._flat_structure,
    )
    return tf.data.experimental.from_variant(variant, inner.element_spec)
