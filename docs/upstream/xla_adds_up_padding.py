"""On a mesh of two axes XLA adds the gradient of padding to a table. Run: python FILE"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ.setdefault("PJRT_NPROC", "8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("batch", "model"))
table = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
tokens = np.array([1, 2, 3])  # which two shards do not divide


def loss(table, tokens):
    found = jnp.take(table, tokens, axis=0)
    return jnp.sum(jnp.sin(found / jnp.sqrt(jnp.mean(found**2, axis=-1, keepdims=True) + 1e-6)))


@jax.jit
def sharded(table, tokens):
    tokens = jax.lax.with_sharding_constraint(tokens, NamedSharding(mesh, PartitionSpec("batch")))
    return jax.grad(loss)(table, tokens)


placed = jax.device_put(table, NamedSharding(mesh, PartitionSpec("model")))
given, expected = (
    np.abs(f).sum(1) for f in (sharded(placed, tokens), jax.grad(loss)(table, tokens))
)
print("gradient of row 0, which is not looked up:", given[0])
raise SystemExit(int(not np.allclose(given, expected, rtol=1e-4, atol=1e-5)))
