"""Batches on the devices of a mesh, of any size."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kdpkit._internal import checks, shards
from kdpkit.batches._array_batches import num_examples


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding that copies an array to every device."""
    return NamedSharding(mesh, PartitionSpec())


def by_examples(mesh: Mesh) -> NamedSharding:
    """Return the sharding that splits an array along its first axis, the examples.

    The parts have to be equally large. Devices that share a model have the same examples.

    >>> from kdpkit.sharding._meshes import data_mesh
    >>> x = jax.device_put(np.arange(4.0), by_examples(data_mesh(2)))
    >>> [shard.data.shape for shard in x.addressable_shards]
    [(2,), (2,)]
    """
    return NamedSharding(mesh, PartitionSpec(shards.batch_axis(mesh)))


def place_batch(batch: Any, mesh: Mesh) -> Any:
    """Put a batch of any size on the devices, for a program that calls `split_examples`.

    A batch that the devices divide is sharded; any other is replicated.
    """
    return _placed(batch, mesh, examples=num_examples(batch), sharded=by_examples(mesh))


def place_batches(batches: Sequence[Any], mesh: Mesh) -> Any:
    """Stack batches of equal shapes along a new first axis, and place them as `place_batch`."""
    stacked = jax.tree.map(lambda *parts: np.stack(parts), *batches)
    sharded = NamedSharding(mesh, PartitionSpec(None, shards.batch_axis(mesh)))
    return _placed(stacked, mesh, examples=num_examples(batches[0]), sharded=sharded)


def _placed(batch: Any, mesh: Mesh, *, examples: int, sharded: NamedSharding) -> Any:
    count = shards.batch_shards(mesh)
    if jax.process_count() == 1:
        return jax.device_put(batch, replicated(mesh) if examples % count else sharded)
    own_devices, rest = divmod(count, jax.process_count())
    if rest or not own_devices:
        checks.fail(
            "With several processes each has examples of its own, and so devices that share the "
            "model must be of one process.",
            parts_of_a_batch=count,
            processes=jax.process_count(),
            remedy="Use a smaller `model`.",
        )
    if examples % own_devices:
        checks.fail(
            "With several processes each must pass a number of examples that its devices divide.",
            examples=examples,
            devices_of_this_process=own_devices,
            remedy='Drop or pad the last batch: `ArrayBatches(remainder="pad")`.',
        )
    return jax.tree.map(
        lambda part: jax.make_array_from_process_local_data(sharded, np.asarray(part)), batch
    )


def split_examples(batch: Any, mesh: Mesh) -> Any:
    """Shard the work on a batch of any size along its examples, inside `jax.jit`.

    JAX does not accept unevenly sharded arrays as inputs of a program. Inside it, XLA splits into
    shards of ceil(examples / devices), the last ones smaller or empty, and computes what one device
    would, batch statistics included. Outside `jax.jit` an uneven batch stays replicated: every
    device computes with all of it.

    Where devices share a model, an uneven batch is split over all of them.
    """
    # docs/upstream/xla_adds_up_padding.md
    each = by_examples(mesh)
    of_all = NamedSharding(mesh, PartitionSpec(mesh.axis_names))

    def split(part: Any) -> Any:
        is_even = part.shape[0] % shards.batch_shards(mesh) == 0
        return jax.lax.with_sharding_constraint(part, each if is_even else of_all)

    is_traced = any(isinstance(part, jax.core.Tracer) for part in jax.tree.leaves(batch))
    return jax.tree.map(split, batch) if is_traced else batch
