"""Batches on the devices of a mesh, of any size."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kdpkit._internal import checks
from kdpkit.batches._array_batches import num_examples
from kdpkit.sharding import _shards as shards


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding that copies an array to every device."""
    return NamedSharding(mesh, PartitionSpec())


def by_examples(mesh: Mesh) -> NamedSharding:
    """Return the sharding that divides an array along its first axis, the examples.

    The devices must divide their number. Devices that share a model have the same examples.
    """
    return NamedSharding(mesh, PartitionSpec(shards.batch_axis(mesh)))


def place_batch(batch: Any, mesh: Mesh) -> Any:
    """Put a batch of any size on the devices, for a program that calls `split_examples`.

    If the devices divide its examples each gets a part, otherwise each gets the complete batch.
    """
    return _placed(batch, mesh, examples=num_examples(batch), sharded=by_examples(mesh))


def _placed(batch: Any, mesh: Mesh, *, examples: int, sharded: NamedSharding) -> Any:
    count = shards.batch_shards(mesh)
    if jax.process_count() == 1:
        return jax.device_put(batch, replicated(mesh) if examples % count else sharded)
    local_devices = count // jax.process_count()
    if examples % local_devices:
        checks.fail(
            "With several processes each must pass a number of examples that its devices divide.",
            examples=examples,
            devices_of_this_process=local_devices,
            remedy='Drop or pad the last batch: `ArrayBatches(remainder="pad")`.',
        )
    return jax.tree.map(
        lambda part: jax.make_array_from_process_local_data(sharded, np.asarray(part)), batch
    )


def split_examples(batch: Any, mesh: Mesh) -> Any:
    """Have the devices divide the work on a batch of any size, inside `jax.jit`.

    A batch that the devices do not divide enters a program complete, on every device, as JAX
    accepts no unevenly sharded inputs. Inside the program XLA divides it: into shards of
    ceil(examples / devices), the last ones smaller or empty, with the results of one device.
    Outside `jax.jit` this changes nothing.
    """
    even = by_examples(mesh)
    # Devices that share a model divide it too: docs/upstream/xla_adds_up_padding.py
    uneven = NamedSharding(mesh, PartitionSpec(mesh.axis_names))

    def split(part: Any) -> Any:
        if not part.ndim:
            return part
        is_even = part.shape[0] % shards.batch_shards(mesh) == 0
        return jax.lax.with_sharding_constraint(part, even if is_even else uneven)

    is_traced = any(isinstance(part, jax.core.Tracer) for part in jax.tree.leaves(batch))
    return jax.tree.map(split, batch) if is_traced else batch
