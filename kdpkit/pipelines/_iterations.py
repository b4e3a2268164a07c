"""Any iteration of a user's dataset, from any of its batches, in the order of an undisturbed run.

`shuffle(seed=...)` draws another order each time that an iterator of the same object is started,
for whatever reason, and nothing outside can set that count. So the stages after the sources and
caches are made again for each epoch, where each `shuffle` starts to count from 0, and draws
once for every epoch before.
"""

import collections
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import tensorflow as tf

from kdpkit._internal import checks
from kdpkit._internal.private_copies import with_private_batches
from kdpkit.pipelines import _structure
from kdpkit.pipelines._epochs import EpochCounter, TrainDataset
from kdpkit.pipelines._structure import Stage
from kdpkit.pipelines._tracing import rewriting


def replayed(dataset: tf.data.Dataset) -> TrainDataset:
    """Return a dataset with the same epochs that can start at any batch of any of them.

    The first iteration is that of a new program, also if this dataset was iterated before. Stages
    with `deterministic=False` are in order.

    Raises:
        ValueError: The order depends on more than the program, or the length is unknown.
    """
    dataset = with_private_batches(dataset)
    batches = int(dataset.cardinality())
    stages = [*_stages(_structure.end_of(dataset))]
    _require_an_order(stages)
    if batches == tf.data.UNKNOWN_CARDINALITY:
        checks.fail(
            "The number of batches is unknown, which tells one epoch from the next.",
            last_stage=stages[0].label,
            remedy="Add `.apply(tf.data.experimental.assert_cardinality(batches))`, which "
            "`kdpkit.pipelines.count_batches` can count, or `.repeat()` if the dataset never ends.",
        )
    draws, traced = _draws_in_an_iteration(dataset), rewriting()

    def one_epoch(epoch: tf.Tensor, skipped: tf.Tensor) -> tf.data.Dataset:
        return _Iteration(epoch, draws, traced).rest(dataset, skipped).enumerate(skipped)

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


def _stages(end: Stage) -> Iterator[Stage]:
    """Yield all stages, with those that choose between datasets."""
    for stage, _ in _structure.paths(end):
        yield stage
        if (selector := stage.argument("selector_input")) is not None:
            yield from _stages(_structure.end_of(selector))


def _seeds(stage: Stage) -> list[Any]:
    return [stage.setting("seed"), stage.setting("seed2")]


def _require_an_order(stages: list[Stage]) -> None:
    """Raise for a stage that another program's run cannot repeat."""
    for stage in stages:
        if stage.kind in ("shuffle", "random") and _seeds(stage) == [0, 0]:
            _reject(stage, "has another order in each run of the program", "Pass `seed=...`.")
        if stage.kind == "random" and stage.argument("rerandomize"):
            _reject(stage, "counts its iterators", "Leave out `rerandomize_each_iteration=True`.")
        if stage.kind == "distribute":
            _reject(
                stage,
                "has the order in which services answer",
                "Prepare the examples here, or fill a cache on disk once and read that.",
            )
        if stage.kind == "train_pipeline":
            checks.fail(
                "What `train_pipeline` returned is tracked as it is, without further stages.",
                dataset=stages[0].label,
                remedy="Pass further stages to `train_pipeline` as `prepare` or `augment`.",
            )
        if stage.keeps and any(before.shuffles for before in _structure.before(stage)):
            _reject(
                stage,
                "keeps the order of whichever iterator was the first to fill it",
                "Move `shuffle` after it, or shuffle with `reshuffle_each_iteration=False`.",
            )
        _require_pure_functions(stage)


def _require_pure_functions(stage: Stage) -> None:
    for function in stage.functions:
        if function.draws or function.has_unseeded_order:
            _reject(
                stage,
                "draws random numbers that a resumed run cannot draw again",
                "Draw with `tf.random.stateless_*` from seeds in the data, as of "
                "`tf.data.Dataset.random(seed)`, in a layer of the model, or in "
                "`train_pipeline(augment=...)`.",
            )
        if function.assigns:
            _reject(
                stage,
                "changes a variable, whose value a resumed run does not have",
                "Use `Dataset.scan`, whose state is that of an iterator.",
            )
        if function.captures_datasets:
            _reject(
                stage,
                "uses a dataset from outside of its function, whose order is not known here",
                "Make that dataset in the function.",
            )


def _reject(stage: Stage, problem: str, remedy: str) -> NoReturn:
    checks.fail(
        f"Training cannot continue on this dataset where it stopped: `{stage.label}` {problem}.",
        stage=stage.kind,
        remedy=remedy,
    )


class _Iteration:
    """One iteration of a dataset, as the graph of an epoch.

    Args:
        epoch: Its number, from 0.
        draws: How many orders an iteration draws, by the `id` of the shuffled dataset.
        traced: Returns a user's function as it is to be traced.
    """

    def __init__(
        self,
        epoch: tf.Tensor,
        draws: Mapping[int, int],
        traced: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        self._epoch = epoch
        self._draws = draws
        self._traced = traced
        self._drawn: list[tf.data.Dataset] = []  # empty, and reading them draws earlier orders
        self._made: dict[tuple[int, int], tuple[Any, tf.data.Dataset]] = {}

    def rest(self, dataset: tf.data.Dataset, skip: tf.Tensor) -> tf.data.Dataset:
        """Return what is left of this iteration after some elements."""
        rest = self.of(dataset, skip)
        nothing = rest.take(0)
        for drawn in self._drawn:
            rest = drawn.flat_map(lambda *_: nothing).concatenate(rest)
        return rest

    def of(self, dataset: tf.data.Dataset, skip: tf.Tensor | None = None) -> tf.data.Dataset:
        """Return a dataset in this iteration, after some elements. Each is made once."""
        key = id(dataset), id(skip)
        if key not in self._made:
            self._made[key] = skip, self._make(dataset, skip)
        return self._made[key][1]

    def _make(self, dataset: tf.data.Dataset, skip: tf.Tensor | None) -> tf.data.Dataset:
        kind = _structure.kind_of(dataset)
        if not dataset._inputs():
            return _after(dataset, skip)
        if kind == "cache":
            return _after(_as_it_is(dataset), skip)
        if kind == "shuffle":
            return _after(self._shuffled(dataset), skip)
        if kind == "assert_cardinality" and skip is not None:
            left = tf.data.experimental.assert_cardinality(dataset.cardinality() - skip)
            return self.of(dataset._inputs()[0], skip).apply(left)
        sooner = _skipped_before(dataset, kind, skip)
        made = _structure.remade(dataset, lambda one: self.of(one, sooner), self._traced)
        if made is None:
            return _after(_as_it_is(dataset), skip)
        return made if sooner is not None else _after(made, skip)

    def _shuffled(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Shuffle with the seeds of the dataset, and note how to draw the orders before."""
        tf.random.set_seed(_static(dataset, "seed"))  # of this graph, the first of two seeds
        shuffled = self.of(dataset._inputs()[0]).shuffle(
            _static(dataset, "buffer_size"),
            seed=_static(dataset, "seed2"),
            reshuffle_each_iteration=_reshuffles(dataset),
        )
        if _reshuffles(dataset):
            # An iterator of this one starts both, which draws an order, and reads the empty one.
            first = tf.data.Dataset.from_tensors(tf.constant(0, tf.int64))
            unread = tf.data.Dataset.choose_from_datasets([shuffled.take(0), shuffled], first)
            drawn = tf.data.Dataset.range(self._epoch * self._draws[id(dataset)])
            self._drawn.append(drawn.flat_map(lambda _: unread))
        return shuffled


def _after(dataset: tf.data.Dataset, skip: tf.Tensor | None) -> tf.data.Dataset:
    return dataset if skip is None else dataset.skip(skip)


def _skipped_before(dataset: tf.data.Dataset, kind: str, skip: tf.Tensor | None) -> Any:
    """Return how many elements its inputs can skip instead; None if it has to skip itself."""
    if skip is None:
        return None
    if kind in ("batch", "padded_batch"):
        return skip * _static(dataset, "batch_size")
    is_pure = not any(function.is_stateful for function in _structure.functions_of(dataset))
    return skip if kind in ("map", "zip", "prefetch", "options") and is_pure else None


def _as_it_is(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Return a dataset whose last stage cannot be made again, and need not be."""
    if any(_may_be_disordered(one) or _reshuffles(one) for one in _all(dataset)):
        checks.fail(
            "Training cannot continue on this dataset where it stopped: this stage cannot be made "
            "again, after a `shuffle` or with threads.",
            stage=_structure.kind_of(dataset),
            remedy="Put `shuffle` after it, read without `num_parallel_calls` or after it, or use "
            "`kdpkit.pipelines.train_pipeline`.",
        )
    return dataset


def _all(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    yield dataset
    for one in dataset._inputs():
        yield from _all(one)


def _reshuffles(dataset: tf.data.Dataset) -> bool:
    is_shuffle = _structure.kind_of(dataset) == "shuffle"
    return is_shuffle and _static(dataset, "reshuffle_each_iteration") is not False


def _may_be_disordered(dataset: tf.data.Dataset) -> bool:
    """Return whether threads may change its order; `interleave` does not keep what it was told."""
    is_interleave = "ParallelInterleave" in type(dataset).__name__
    return is_interleave or getattr(dataset, "_deterministic", None) == "false"


def _draws_in_an_iteration(dataset: tf.data.Dataset) -> Mapping[int, int]:
    """Count how often an iteration of a dataset starts an iterator of each one before it."""
    draws: collections.Counter[int] = collections.Counter()

    def count(one: tf.data.Dataset, times: int, asked: float | None) -> None:
        draws[id(one)] += times
        if _structure.kind_of(one) == "repeat":
            times *= _repeats(one, asked)
        asked = _asked_before(one, asked)
        for before in one._inputs():
            count(before, times, asked)

    count(dataset, 1, math.inf)
    return draws


def _asked_before(dataset: tf.data.Dataset, asked: float | None) -> float | None:
    """Return how many elements a stage asks of its input.

    Infinity is all of them. None is a number that depends on the elements, or on how far threads
    read ahead, as those of any `map`: TensorFlow calls it in parallel by itself.
    """
    kind = _structure.kind_of(dataset)
    if kind == "take" and asked is not None and (count := _static(dataset, "count")) >= 0:
        return min(asked, count)
    if kind == "repeat" or asked in (None, math.inf):
        return math.inf if kind == "repeat" else asked  # see `_repeats`
    if kind in ("batch", "padded_batch"):
        return asked * _static(dataset, "batch_size")
    return asked if kind in ("enumerate", "options", "assert_cardinality") else None


def _repeats(dataset: tf.data.Dataset, asked: float | None) -> int:
    """Return how often a `repeat` starts its input, if these elements are asked of it."""
    count, (repeated,) = _static(dataset, "count"), dataset._inputs()
    most = math.inf if count < 0 else count
    length = int(repeated.cardinality())
    if asked == math.inf or not any(map(_reshuffles, _all(repeated))):
        return 1 if count < 0 else count  # one that never ends has one iteration
    if asked is None or length <= 0:
        checks.fail(
            "Training cannot continue on this dataset where it stopped: how often `repeat` starts "
            "`shuffle` again in an epoch depends on what is read ahead of `take`.",
            stage=f"repeat({count})",
            remedy="Put `take` right after `batch` or `repeat`, or track the dataset without "
            "`take`, and call `fit` with `steps_per_epoch`.",
        )
    return int(min(most, math.ceil(asked / length)))


def _static(dataset: tf.data.Dataset, name: str) -> Any:
    value = getattr(dataset, f"_{name}")
    return tf.get_static_value(value) if tf.is_tensor(value) else value
