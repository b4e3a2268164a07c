"""Batches of numpy arrays by the rules of `kdpkit.pipelines`, without TensorFlow.

`ArrayBatches` is a `keras.utils.PyDataset`, so `fit`, `evaluate` and `TrainingLoop` take it on
every backend. It splits arrays, or a `Source` of examples, such as `from_datasets`, `from_parquet`,
`from_images` and `from_grain` return.
"""

from kdpkit.batches._array_batches import ArrayBatches, num_examples
from kdpkit.batches._packing import pack_tokens
from kdpkit.batches._sources import (
    Source,
    from_datasets,
    from_grain,
    from_images,
    from_parquet,
)

__all__ = [
    "ArrayBatches",
    "Source",
    "from_datasets",
    "from_grain",
    "from_images",
    "from_parquet",
    "num_examples",
    "pack_tokens",
]
