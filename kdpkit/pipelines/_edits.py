"""Edits that make a `tf.data` pipeline faster, each with a dataset to try it on."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from kdpkit.pipelines import _structure
from kdpkit.pipelines._structure import Stage

_AUTOTUNE = "tf.data.AUTOTUNE"
_FILES = 8  # read in parallel, unless the user set a number
_BATCHES_KEPT = 4  # for a trial, instead of all the data
_AHEAD = frozenset({"prefetch", "distribute", "train_pipeline"})
# Dataset methods that can be applied again, with the arguments that matter.
_AGAIN = {
    "map": ("map_func", "num_parallel_calls"),
    "filter": ("predicate",),
    "interleave": ("map_func", "cycle_length", "block_length", "num_parallel_calls"),
    "batch": ("batch_size", "drop_remainder", "num_parallel_calls"),
    "padded_batch": ("batch_size", "padded_shapes", "padding_values", "drop_remainder"),
    "shuffle": ("buffer_size", "seed"),
    "prefetch": ("buffer_size",),
    "repeat": ("count",),
    "take": ("count",),
    "skip": ("count",),
}


@dataclasses.dataclass(frozen=True)
class PipelineEdit:
    """One change of a pipeline.

    Attributes:
        text: What to write.
        make: Returns the pipeline with this change for a trial; it may be endless.
        memory_bytes: The memory it needs for all the data; None if unknown, 0 if it stores nothing.
    """

    text: str
    make: Callable[[], tf.data.Dataset]
    memory_bytes: int | None = 0


def edits(dataset: tf.data.Dataset) -> Iterator[PipelineEdit]:
    """Yield the changes of a pipeline that can be tried: parallel work, a prefetch, a cache.

    The stages after the change are applied again. Changes before a stage that cannot be applied
    again (a `train_pipeline`, a cache on disk, what `unbatch` adds) are not tried.
    """
    stages = _structure.line(_structure.end_of(dataset))
    for index, stage in enumerate(stages):
        if _is_serial_work(stage) and _can_follow(stages[index:]):
            yield _in_parallel(stage, stages[index + 1 :], dataset.options())
    if stages[-1].kind not in _AHEAD:
        yield PipelineEdit(
            f"End the pipeline with `.prefetch({_AUTOTUNE})`.",
            lambda: dataset.prefetch(tf.data.AUTOTUNE),
        )
    yield from _cached(stages, dataset.options())


def _is_serial_work(stage: Stage) -> bool:
    if stage.kind not in ("map", "interleave") or stage.is_parallel or not stage.functions:
        return False
    return stage.kind == "interleave" or not stage.functions[0].is_cheap


def _in_parallel(
    stage: Stage, following: Sequence[Stage], options: tf.data.Options
) -> PipelineEdit:
    changed: dict[str, int] = {"num_parallel_calls": tf.data.AUTOTUNE}
    written = f"num_parallel_calls={_AUTOTUNE}"
    if stage.kind == "interleave":
        given = stage.setting("cycle_length") or 0
        files = given if given > 1 else _FILES
        # A fixed number: tf.data would tune it to the number of cores, but readers wait for files.
        changed = {"cycle_length": files, "num_parallel_calls": files}
        written = f"cycle_length={files}, num_parallel_calls={files}"

    def make() -> tf.data.Dataset:
        parallel = _again(stage, stage.inputs[0].dataset, **changed)
        return _followed(parallel, following).with_options(options)

    name = stage.functions[0].name or "..."
    return PipelineEdit(f"Write `.{stage.kind}({name}, {written})`.", make)


def _cached(stages: Sequence[Stage], options: tf.data.Options) -> Iterator[PipelineEdit]:
    """Find the last position where a cache stores what is the same in every epoch."""
    fixed = [*itertools.takewhile(_is_fixed, stages)]
    following = stages[len(fixed) :]
    if not fixed or any(stage.keeps for stage in stages):
        return
    moved: list[Stage] = []  # maps after a shuffle, which can also be before the cache
    if following and following[0].kind == "shuffle":
        shuffle, *after = following
        moved = [*itertools.takewhile(lambda one: one.kind == "map" and _is_fixed(one), after)]
        following = (shuffle, *after[len(moved) :])
    has_work = any(stage.has_work for stage in (*fixed, *moved))
    if not has_work or not _can_follow((*moved, *following)):
        return
    kept = _followed(fixed[-1].dataset, moved)

    def make() -> tf.data.Dataset:
        sizes = [stage.setting("batch_size") or 1 for stage in following if "batch" in stage.kind]
        first = kept.take(_BATCHES_KEPT * math.prod(sizes)).cache()
        for _ in first:
            pass
        return _followed(first.repeat(), following).with_options(options)

    names = ", ".join(f"`{stage.label}`" for stage in moved)
    text = f"Put `.cache()` after `{fixed[-1].label}`."
    if moved:
        text = f"Put {names} and then `.cache()` before the `shuffle`."
    yield PipelineEdit(text, make, _bytes_of(kept, fixed[-1].cardinality))


def _is_fixed(stage: Stage) -> bool:
    """Return whether a stage yields the same elements in the same order in each epoch."""
    if stage.kind in ("shuffle", "repeat", *_AHEAD) or stage.cardinality == -1:
        return False
    of_one = [stage] if len(stage.inputs) == 1 else [stage, *_structure.before(stage)]
    return not any(
        one.shuffles or any(function.draws for function in one.functions) for one in of_one
    )


def _bytes_of(dataset: tf.data.Dataset, elements: int | None) -> int | None:
    """Return the bytes of all elements; None if their number or a size is unknown."""
    size = 0
    for part in tf.nest.flatten(dataset.element_spec):
        shape = getattr(part, "shape", None)
        if shape is None or not shape.is_fully_defined() or part.dtype == tf.string:
            return None
        size += shape.num_elements() * part.dtype.size
    return None if elements is None else elements * size


def _can_follow(stages: Sequence[Stage]) -> bool:
    return all(
        stage.kind in _AGAIN and all(function.call for function in stage.functions)
        for stage in stages
    )


def _followed(dataset: tf.data.Dataset, stages: Sequence[Stage]) -> tf.data.Dataset:
    for stage in stages:
        dataset = _again(stage, dataset)
    return dataset


def _again(stage: Stage, dataset: tf.data.Dataset, **changed: Any) -> tf.data.Dataset:
    """Apply a stage to another dataset."""
    arguments: dict[str, Any] = {}
    for name in _AGAIN[stage.kind]:
        value = stage.setting(name)
        arguments[name] = stage.argument(name) if value is None else value
    if stage.functions:
        arguments[_AGAIN[stage.kind][0]] = stage.functions[0].call
    if stage.kind == "shuffle":  # else TensorFlow's own random numbers would advance by one
        arguments["seed"] = 0
    return getattr(dataset, stage.kind)(**{**arguments, **changed})
