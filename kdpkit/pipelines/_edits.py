"""Edits that make a `tf.data` pipeline faster, each as a dataset on which it can be tried."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from kdpkit.pipelines import _structure
from kdpkit.pipelines._structure import Stage

_AUTOTUNE = "tf.data.AUTOTUNE"
_FILES = 8  # that are read at once, where nothing is said
_BATCHES_KEPT = 4  # for a trial, in place of the whole data
_AHEAD = frozenset({"prefetch", "distribute", "train_pipeline"})


@dataclasses.dataclass(frozen=True)
class PipelineEdit:
    """One change of a pipeline.

    Attributes:
        text: What to write.
        make: Gives the pipeline with this change, to be trained on for a while: it may go on
            without end.
        memory_bytes: What it keeps in memory for the whole data; None if that is not known, 0 if it
            keeps nothing.
    """

    text: str
    make: Callable[[], tf.data.Dataset]
    memory_bytes: int | None = 0


def edits(dataset: tf.data.Dataset) -> Iterator[PipelineEdit]:
    """Give the changes of a pipeline that can be tried: parallel work, a prefetch, a cache.

    A pipeline is made again from the place of the change on. Stages that cannot be made again (a
    `train_pipeline`, a cache on disk, what `unbatch` adds) leave the changes before them out.
    """
    stages = _structure.line(_structure.end_of(dataset))
    made_again = functools.partial(_made_again, options=dataset.options())
    for index, stage in enumerate(stages):
        following = stages[index + 1 :]
        if stage.inputs and _is_serial_work(stage) and _can_follow([stage, *following]):
            yield PipelineEdit(
                _parallel_text(stage),
                functools.partial(made_again, _in_parallel, stage, following),
            )
    if stages[-1].kind not in _AHEAD:
        yield PipelineEdit(
            f"End the pipeline with `.prefetch({_AUTOTUNE})`.",
            lambda: dataset.prefetch(tf.data.AUTOTUNE),
        )
    yield from _cache(stages, dataset.options())


def _made_again(
    change: Callable[[Stage], tf.data.Dataset],
    stage: Stage,
    following: Sequence[Stage],
    options: tf.data.Options,
) -> tf.data.Dataset:
    return _followed(change(stage), following).with_options(options)


# Parallel work.


def _is_serial_work(stage: Stage) -> bool:
    if stage.kind not in ("map", "interleave") or stage.is_parallel or not stage.functions:
        return False
    return stage.kind == "interleave" or not stage.functions[0].is_cheap


def _parallel_text(stage: Stage) -> str:
    name = stage.functions[0].name or "..."
    if stage.kind == "map":
        return f"Write `.map({name}, num_parallel_calls={_AUTOTUNE})`."
    files = _files_at_once(stage)
    return f"Write `.interleave({name}, cycle_length={files}, num_parallel_calls={files})`."


def _in_parallel(stage: Stage) -> tf.data.Dataset:
    source, call = stage.inputs[0].dataset, stage.functions[0].call
    if stage.kind == "map":
        return source.map(call, num_parallel_calls=tf.data.AUTOTUNE)
    files = _files_at_once(stage)
    # Not as tf.data would tune it, which takes the processor's cores: readers wait.
    return source.interleave(
        call,
        cycle_length=files,
        block_length=stage.setting("block_length"),
        num_parallel_calls=files,
    )


def _files_at_once(stage: Stage) -> int:
    """Give the datasets that an `interleave` goes through at once."""
    given = stage.setting("cycle_length") or 0
    return given if given > 1 else _FILES


# A cache.


def _cache(stages: tuple[Stage, ...], options: tf.data.Options) -> Iterator[PipelineEdit]:
    """Look for the last place where a cache keeps what is the same in every epoch."""
    if any(stage.kind in _structure.KEEPS for stage in stages):
        return
    fixed = _leading(stages, _is_fixed)
    if not fixed:
        return
    shuffle = stages[len(fixed) : len(fixed) + 1]
    moved: tuple[Stage, ...] = ()
    if shuffle and shuffle[0].kind == "shuffle":
        moved = _leading(stages[len(fixed) + 1 :], _is_of_one_element)
    following = (*shuffle, *stages[len(fixed) + len(shuffle) + len(moved) :])
    if not any(map(_structure.has_work, (*fixed, *moved))) or not _can_follow((*moved, *following)):
        return

    def make() -> tf.data.Dataset:
        whole = _followed(fixed[-1].dataset, moved)
        kept = whole.take(_BATCHES_KEPT * _in_a_batch(following)).cache()
        for _ in kept:
            pass
        return _followed(kept.repeat(), following).with_options(options)

    yield PipelineEdit(_cache_text(fixed, moved), make, _bytes_of(fixed[-1], moved))


def _leading(stages: tuple[Stage, ...], wanted: Callable[[Stage], bool]) -> tuple[Stage, ...]:
    """Give the first stages, as long as they are of a kind."""
    count = next((i for i, stage in enumerate(stages) if not wanted(stage)), len(stages))
    return stages[:count]


def _is_fixed(stage: Stage) -> bool:
    """Tell whether a stage gives the same elements in the same order in each epoch."""
    if stage.kind in ("shuffle", "repeat", *_AHEAD) or stage.cardinality == -1:
        return False
    of_one = [stage] if len(stage.inputs) == 1 else [stage, *_structure.before(stage)]
    return not any(
        _structure.shuffles(one) or any(function.draws for function in one.functions)
        for one in of_one
    )


def _is_of_one_element(stage: Stage) -> bool:
    return stage.kind == "map" and _is_fixed(stage)


def _cache_text(fixed: tuple[Stage, ...], moved: tuple[Stage, ...]) -> str:
    if moved:
        names = ", ".join(f"`{stage.label}`" for stage in moved)
        return f"Put {names} and then `.cache()` before the `shuffle`."
    return f"Put `.cache()` behind `{fixed[-1].label}`."


def _in_a_batch(following: Sequence[Stage]) -> int:
    sizes = [stage.setting("batch_size") or 1 for stage in following if stage.kind in _BATCHES]
    return math.prod(sizes)


def _bytes_of(last: Stage, moved: tuple[Stage, ...]) -> int | None:
    """Give the bytes of all elements; None if their number or a size is not known."""
    spec = _followed(last.dataset, moved).element_spec
    parts = tf.nest.flatten(spec)
    sizes = [_bytes_of_part(part) for part in parts]
    if last.cardinality is None or None in sizes:
        return None
    return last.cardinality * sum(size or 0 for size in sizes)


def _bytes_of_part(spec: tf.TensorSpec) -> int | None:
    shape = getattr(spec, "shape", None)
    if shape is None or not shape.is_fully_defined() or spec.dtype == tf.string:
        return None
    return int(shape.num_elements()) * int(spec.dtype.size)


# Stages made again, on another dataset.


def _can_follow(stages: Sequence[Stage]) -> bool:
    return all(
        stage.kind in _AGAIN and all(function.call for function in stage.functions)
        for stage in stages
    )


def _followed(dataset: tf.data.Dataset, stages: Sequence[Stage]) -> tf.data.Dataset:
    for stage in stages:
        parallel = stage.setting("num_parallel_calls") if stage.is_parallel else None
        dataset = _AGAIN[stage.kind](stage, dataset, parallel)
    return dataset


def _map(stage: Stage, dataset: tf.data.Dataset, parallel: int | None) -> tf.data.Dataset:
    return dataset.map(stage.functions[0].call, num_parallel_calls=parallel)


def _interleave(stage: Stage, dataset: tf.data.Dataset, parallel: int | None) -> tf.data.Dataset:
    return dataset.interleave(
        stage.functions[0].call,
        cycle_length=stage.setting("cycle_length"),
        block_length=stage.setting("block_length"),
        num_parallel_calls=parallel,
    )


def _batch(stage: Stage, dataset: tf.data.Dataset, parallel: int | None) -> tf.data.Dataset:
    return dataset.batch(
        stage.setting("batch_size"),
        drop_remainder=stage.setting("drop_remainder"),
        num_parallel_calls=parallel,
    )


def _padded_batch(stage: Stage, dataset: tf.data.Dataset, _: int | None) -> tf.data.Dataset:
    return dataset.padded_batch(
        stage.setting("batch_size"),
        padded_shapes=stage.argument("padded_shapes"),
        padding_values=stage.argument("padding_values"),
        drop_remainder=stage.setting("drop_remainder"),
    )


def _shuffle(stage: Stage, dataset: tf.data.Dataset, _: int | None) -> tf.data.Dataset:
    # With a seed, as TensorFlow's own random numbers would go on by one without.
    return dataset.shuffle(stage.setting("buffer_size"), seed=0)


_BATCHES = frozenset({"batch", "padded_batch"})
_AGAIN: dict[str, Callable[[Stage, tf.data.Dataset, int | None], tf.data.Dataset]] = {
    "map": _map,
    "filter": lambda stage, dataset, _: dataset.filter(stage.functions[0].call),
    "interleave": _interleave,
    "batch": _batch,
    "padded_batch": _padded_batch,
    "shuffle": _shuffle,
    "prefetch": lambda stage, dataset, _: dataset.prefetch(stage.setting("buffer_size")),
    "repeat": lambda stage, dataset, _: dataset.repeat(stage.setting("count")),
    "take": lambda stage, dataset, _: dataset.take(stage.setting("count")),
    "skip": lambda stage, dataset, _: dataset.skip(stage.setting("count")),
}
