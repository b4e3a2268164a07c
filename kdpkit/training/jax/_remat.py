"""Rematerialization on JAX."""

import jax

from kdpkit.training._remat import BlockCall, BlockScope, Result


def checkpointed(block: BlockCall) -> Result:
    """Compute a block, and again for the gradients, of variables that the call reads as well."""
    return jax.checkpoint(lambda tensors: block(tensors, BlockScope()))(block.tensors)
