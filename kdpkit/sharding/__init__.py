"""Training on many devices on JAX with `jax.sharding`: meshes, sharded batches and weights.

A program under `jax.jit` sees the global batch, and XLA splits the work, so means, batch statistics
and dropout masks equal those of one device on any number of devices. Only the arrays have to be
placed: variables on every device, batches sharded along their examples. `DataParallel` does that
for Keras' `fit`, and `ModelParallel` where a model is larger than a device;
`kdpkit.training.TrainingLoop` does it itself, and `replicated` and `by_examples` are for your own
loop.
"""

from kdpkit.cluster._joining import join_processes
from kdpkit.sharding._batches import (
    by_examples,
    place_batch,
    place_batches,
    replicated,
    split_examples,
)
from kdpkit.sharding._distributions import (
    DataParallel,
    ModelParallel,
    describe,
    gathered_on_read,
)
from kdpkit.sharding._meshes import (
    BATCH_AXIS,
    MODEL_AXIS,
    as_mesh,
    data_mesh,
    describe_choice,
    tpu_devices,
)

__all__ = [
    "BATCH_AXIS",
    "MODEL_AXIS",
    "DataParallel",
    "ModelParallel",
    "as_mesh",
    "by_examples",
    "data_mesh",
    "describe",
    "describe_choice",
    "gathered_on_read",
    "join_processes",
    "place_batch",
    "place_batches",
    "replicated",
    "split_examples",
    "tpu_devices",
]
