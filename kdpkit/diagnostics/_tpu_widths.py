"""How well the layers of a model fill a TPU's tiles of 8 x 128 numbers."""

import math
from collections.abc import Collection, Iterator
from typing import Any

from kdpkit._findings import Finding

GUIDE = "https://cloud.google.com/tpu/docs/performance-guide"
SUBLANES = 8  # a TPU computes on tiles of 8 x 128 numbers
_LANES = 128
_MOST_WASTE = 0.1
_LEAST_SHARE = 0.1  # of the model's parameters, in a layer that is worth a word


def findings(model: Any, output_widths: Collection[int]) -> Iterator[Finding]:
    """Check the widths of the layers that hold much of the model.

    Args:
        model: A built model.
        output_widths: Of what the model gives; labels dictate them, as text does a vocabulary, so
            both are left alone.
    """
    total = sum(math.prod(variable.shape) for variable in model.trainable_variables)
    for variable in model.trainable_variables:
        if len(variable.shape) < 2 or math.prod(variable.shape) < _LEAST_SHARE * total:
            continue
        width = _width(variable)
        if width in output_widths or fills_tiles(width):
            continue
        padded = math.ceil(width / _LANES) * _LANES
        nearest = padded if width > _LANES else math.ceil(width / SUBLANES) * SUBLANES
        yield Finding(
            "tile-width",
            "slow",
            f"layer {variable.path.rpartition('/')[0]}",
            f"It is {width} wide, and a TPU computes on tiles of 8 x 128: up to "
            f"{1 - width / padded:.0%} of its work here is padding "
            f"({GUIDE}).",
            f"Make it {nearest} wide: a multiple of 8 below 128, of 128 above.",
        )


def fills_tiles(width: int) -> bool:
    """Tell whether a width wastes little.

    >>> [fills_tiles(width) for width in (8, 64, 100, 128, 200, 250, 300, 384)]
    [True, True, False, True, False, True, False, True]
    """
    if width < _LANES and width % SUBLANES == 0:
        return True
    return width >= (1 - _MOST_WASTE) * math.ceil(width / _LANES) * _LANES


def _width(variable: Any) -> int:
    *_, before, last = variable.shape
    return before * last if "depthwise" in variable.path else last
