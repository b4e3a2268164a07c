"""Batches of NumPy arrays by the rules of `kdpkit.pipelines`, without TensorFlow.

`ArrayBatches` is a `keras.utils.PyDataset`, so `fit` and `evaluate` take it on
every backend. It splits arrays, or a `Source` of examples, as `from_datasets` and `from_grain`
return.
"""

from kdpkit.batches._array_batches import ArrayBatches
from kdpkit.batches._sources import Source, from_datasets, from_grain

__all__ = ["ArrayBatches", "Source", "from_datasets", "from_grain"]
