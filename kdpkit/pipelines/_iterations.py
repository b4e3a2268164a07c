"""Any iteration of a user's dataset, from any of its batches, in the order of an undisturbed run.

`shuffle(seed=...)` draws another order each time that an iterator of the same object is started,
for whatever reason, and nothing outside can set that count. So the stages after the sources and
caches are made again for each epoch, with an order of each `shuffle` that follows from its seed,
the epoch, and the passes of the `repeat`s after it.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeAlias

import tensorflow as tf

from kdpkit._internal import checks
from kdpkit._internal.datasets import with_private_batches
from kdpkit.pipelines._epochs import EpochCounter, TrainDataset
from kdpkit.pipelines._stages import ASSIGNING, ORDERING, Stage, before
from kdpkit.pipelines._tracing import as_written, rewriting

# Arguments that stages do not keep, or that let threads change the order.
_ARGUMENTS = {"deterministic": True, "sloppy": False, "row_splits_dtype": tf.int64}
_PHILOX = 1  # the algorithm of tf.data's random numbers
_MANY = 1 << 32  # passes of a `repeat` without end


def replayed(dataset: tf.data.Dataset) -> TrainDataset:
    """Return a dataset whose epochs can start at any batch of any of them.

    Epoch E has the order of the dataset's E-th iteration in a new program, unless a `repeat(n)`
    starts `shuffle` from behind other stages: then it has one of its own. Stages with
    `deterministic=False` are in order.

    Raises:
        ValueError: The order depends on more than the program, or the length is unknown.
    """
    dataset = with_private_batches(dataset)
    batches = int(dataset.cardinality())
    end = Stage(dataset)
    stages = [*_all(end)]
    _require_an_order(stages)
    if batches == tf.data.UNKNOWN_CARDINALITY:
        checks.fail(
            "The number of batches is unknown, which tells one epoch from the next.",
            last_stage=next(stage for stage in stages if not stage.is_hidden).label,
            remedy="Add `.apply(tf.data.experimental.assert_cardinality(batches))`, which "
            "`kdpkit.pipelines.count_batches` can count, or `.repeat()` if the dataset never ends.",
        )
    traced = rewriting()

    def one_epoch(epoch: tf.Tensor, skipped: tf.Tensor) -> tf.data.Dataset:
        return _iteration(end, epoch, traced, skipped).enumerate(skipped)

    counter = EpochCounter(batches=batches)
    options = tf.data.Options().merge(dataset.options())
    options.deterministic = True
    sizes = (stage.setting("batch_size") for stage in stages if "batch" in stage.kind)
    return TrainDataset(
        counter.dataset(one_epoch, prefetch=1).with_options(options),
        counter,
        global_batch_size=next(sizes, None),
        seed=[_seeds(stage) for stage in stages if stage.kind == "shuffle"] or None,
        examples=dataset,
    )


def _all(end: Stage) -> Iterator[Stage]:
    """Yield all stages, hidden ones too, with those that choose between datasets."""
    yield end
    for stage in end.inputs:
        yield from _all(stage)
    if (selector := end.argument("selector_input")) is not None:
        yield from _all(Stage(selector))


def _seeds(stage: Stage) -> list[Any]:
    return [stage.setting("seed"), stage.setting("seed2")]


def _require_an_order(stages: list[Stage]) -> None:
    uses = Counter(id(stage.dataset) for stage in stages if stage.reshuffles)
    for stage in stages:
        if uses[id(stage.dataset)] > 1:
            _reject(stage, "is read at several positions", "Make a `shuffle` for each of them.")
        if (found := _not_reproducible(stage)) is not None:
            _reject(stage, *found)


def _not_reproducible(stage: Stage) -> tuple[str, str] | None:
    """Return why another program's run cannot repeat a stage, and what to do instead."""
    is_unseeded = stage.kind in ("shuffle", "random") and _seeds(stage) == [0, 0]
    if is_unseeded or (stage.kind == "random" and stage.argument("rerandomize")):
        return (
            "has another order in each run of the program",
            "Pass `seed=...`, and no `rerandomize_each_iteration`.",
        )
    if stage.kind == "distribute":
        return (
            "has the order in which services answer",
            "Prepare the examples here, or fill a cache on disk once and read that.",
        )
    if stage.kind == "train_pipeline":
        return (
            "keeps its own position, and is tracked without further stages",
            "Pass further stages to `train_pipeline` as `prepare` or `augment`.",
        )
    if stage.keeps and any(one.shuffles for one in before(stage)):
        return (
            "keeps the order of whichever iterator was the first to fill it",
            "Move `shuffle` after it, or shuffle with `reshuffle_each_iteration=False`.",
        )
    if stage.runs(ORDERING) or any(one.captures_datasets for one in stage.functions):
        return (
            "shuffles in its function, or uses a dataset from outside of it",
            "Shuffle outside of the function, and make the dataset in it.",
        )
    if any(one.draws for one in stage.functions):
        return (
            "draws random numbers that a resumed run cannot draw again",
            "Draw with `tf.random.stateless_*` from seeds in the data, as of "
            "`tf.data.Dataset.random(seed)`, in a layer of the model, or in "
            "`train_pipeline(augment=...)`.",
        )
    if stage.runs(ASSIGNING):
        return (
            "changes a variable, whose value a resumed run does not have",
            "Use `Dataset.scan`, whose state is that of an iterator.",
        )
    return None


def _reject(stage: Stage, problem: str, remedy: str) -> NoReturn:
    checks.fail(
        f"Training cannot continue on this dataset where it stopped: `{stage.label}` {problem}.",
        stage=stage.kind,
        remedy=remedy,
    )


# What is made again.

_Tracing: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]


def _iteration(
    stage: Stage, number: tf.Tensor, traced: _Tracing, skip: tf.Tensor | None = None
) -> tf.data.Dataset:
    """Return an iteration of a stage.

    Args:
        stage: The stage.
        number: Which iteration: the epoch, or the pass of a `repeat`, counted over all epochs.
        traced: Returns a user's function as it is to be traced.
        skip: Elements to skip.
    """
    if not stage.inputs:
        return _after(stage.dataset, skip)
    if stage.kind == "cache":
        return _after(_as_it_is(stage), skip)
    if stage.kind == "repeat" and any(one.reshuffles for one in _all(stage)):
        return _after(_repeated(stage, number, traced), skip)
    if stage.kind == "shuffle":
        inner = _iteration(stage.inputs[0], number, traced)
        return _after(_shuffled(stage, inner, number), skip)
    if stage.kind == "assert_cardinality" and skip is not None:
        left = tf.data.experimental.assert_cardinality(stage.dataset.cardinality() - skip)
        return _iteration(stage.inputs[0], number, traced, skip).apply(left)
    sooner = _skipped_before(stage, skip)
    made = _remade(stage, lambda one: _iteration(Stage(one), number, traced, sooner), traced)
    if made is None:
        return _after(_as_it_is(stage), skip)
    return made if sooner is not None else _after(made, skip)


def _repeated(stage: Stage, number: tf.Tensor, traced: _Tracing) -> tf.data.Dataset:
    """Return the passes over the input that one iteration of a `repeat` makes."""
    count = stage.setting("count")
    passes = tf.data.Dataset.counter() if count < 0 else tf.data.Dataset.range(count)
    first = number * (_MANY if count < 0 else count)
    return passes.flat_map(
        as_written(lambda index: _iteration(stage.inputs[0], first + index, traced))
    )


def _remade(
    stage: Stage, other: Callable[[tf.data.Dataset], tf.data.Dataset], traced: _Tracing
) -> tf.data.Dataset | None:
    """Return a stage on other inputs, with its threads in order; None if that is not known."""
    dataset = stage.dataset
    if stage.kind == "options":
        return other(stage.inputs[0].dataset)

    def again(value: Any) -> Any:
        if isinstance(value, tf.data.Dataset):
            return other(value)
        if not isinstance(value, tf.Tensor):
            return traced(value._func) if hasattr(value, "_func") else value
        known = tf.get_static_value(value)
        if known is None or value.dtype not in (tf.bool, tf.int64):
            return value
        return known if known.shape else known.item()

    arguments = {}
    for name, parameter in inspect.signature(type(dataset)).parameters.items():
        kept = "_input_dataset" if name == "dataset" else f"_{name}"
        value = _ARGUMENTS.get(name, getattr(dataset, kept, parameter.default))
        if value is parameter.empty:
            return None
        is_data = name in ("padding_values", "initial_state")  # whose type counts
        arguments[name] = value if is_data else tf.nest.map_structure(again, value)
    made = type(dataset)(**arguments)
    return made if made.element_spec == dataset.element_spec else None


def _after(dataset: tf.data.Dataset, skip: tf.Tensor | None) -> tf.data.Dataset:
    return dataset if skip is None else dataset.skip(skip)


def _as_it_is(stage: Stage) -> tf.data.Dataset:
    """Return the dataset of a stage that cannot be made again, and need not be."""
    for one in _all(stage):
        # An `interleave` does not keep `deterministic`.
        is_interleave = "ParallelInterleave" in type(one.dataset).__name__
        if one.reshuffles or is_interleave or one.argument("deterministic") == "false":
            _reject(
                stage,
                "cannot be made again, after a `shuffle` or with threads",
                "Put `shuffle` after it, read without `num_parallel_calls` or after it, or use "
                "`kdpkit.pipelines.train_pipeline`.",
            )
    return stage.dataset


def _skipped_before(stage: Stage, skip: tf.Tensor | None) -> Any:
    """Return how many elements its inputs can skip instead; None if it has to skip itself."""
    if skip is None:
        return None
    if stage.kind in ("batch", "padded_batch"):
        return skip * stage.setting("batch_size")
    is_pure = not any(function.is_stateful for function in stage.functions)
    return skip if stage.kind in ("map", "zip", "prefetch", "options") and is_pure else None


def _shuffled(stage: Stage, inner: tf.data.Dataset, number: tf.Tensor) -> tf.data.Dataset:
    """Shuffle in the order that an iteration of a `shuffle` has.

    Each iteration takes the next two numbers of a generator as its seeds (`RandomSeedGenerator` in
    tensorflow/core/data/random_seed_generator of TensorFlow 2.20 and 2.21); here they are computed
    at their position.
    """
    seed, seed2 = (tf.constant(value, tf.int64) for value in _seeds(stage))
    if stage.reshuffles:
        block = tf.raw_ops.StatelessRandomUniformFullIntV2(
            shape=[2, 2],
            key=tf.cast([seed], tf.uint64),
            counter=tf.cast(tf.stack([number // 2, seed2]), tf.uint64),
            alg=_PHILOX,
            dtype=tf.uint32,
        )
        seed, seed2 = tf.unstack(tf.cast(block, tf.int64)[number % 2])
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
