"""Training on many devices on JAX with `jax.sharding`: sharded batches and weights.

A program under `jax.jit` sees the global batch, and XLA splits the work, so means, batch statistics
and dropout masks equal those of one device on any number of devices. Only the arrays have to be
placed: variables on every device, batches sharded along their examples. `DataParallel` does that
for Keras' `fit` and for steps of one's own, and `ModelParallel` where a model is larger
than a device.
"""

from kdpkit.cluster._joining import join_processes
from kdpkit.sharding._distributions import DataParallel, ModelParallel, describe, gathered_on_read
from kdpkit.sharding._meshes import describe_choice, tpu_devices

__all__ = [
    "DataParallel",
    "ModelParallel",
    "describe",
    "describe_choice",
    "gathered_on_read",
    "join_processes",
    "tpu_devices",
]
