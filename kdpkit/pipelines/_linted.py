"""A pipeline as the rules of `lint` look at it."""

from dataclasses import dataclass

import tensorflow as tf

from kdpkit.pipelines import _structure
from kdpkit.pipelines._structure import Stage

CUTS = frozenset({"batch", "padded_batch", "ragged_batch", "rebatch", "group_by_window"})


@dataclass(frozen=True)
class Pipeline:
    """A dataset's stages.

    Attributes:
        end: The last one.
        line: All from where datasets come together to the end.
        stages: All, with those that follow.
        mends_maps: Whether TensorFlow makes stateless maps parallel by itself.
        mends_prefetch: Whether it adds a prefetch at the end by itself.
    """

    end: Stage
    line: tuple[Stage, ...]
    stages: tuple[tuple[Stage, tuple[Stage, ...]], ...]
    mends_maps: bool
    mends_prefetch: bool

    def where(self, stage: Stage) -> str:
        """Name a stage, and its place where it has one."""
        if stage not in self.line:
            return stage.label
        return f"{stage.label}, stage {self.line.index(stage) + 1} of {len(self.line)}"


def read(dataset: tf.data.Dataset) -> Pipeline:
    """Read the stages of a dataset, and what its options let TensorFlow mend."""
    end = _structure.end_of(dataset)
    options = dataset.options()
    tunes = options.autotune.enabled is not False
    optimization = options.experimental_optimization
    by_default = optimization.apply_default_optimizations is not False

    def applies(option: bool | None) -> bool:
        return tunes and (by_default if option is None else option)

    return Pipeline(
        end,
        _structure.line(end),
        tuple(_structure.paths(end)),
        applies(optimization.map_parallelization),
        applies(optimization.inject_prefetch),
    )
