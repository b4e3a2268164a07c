"""XLA returns the wrong element for a strided slice of one element. Run: python FILE"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ.setdefault("PJRT_NPROC", "8")

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

by_rows = NamedSharding(Mesh(np.array(jax.devices()), ("batch",)), PartitionSpec("batch"))


@jax.jit
def parts(x):
    x = jax.lax.with_sharding_constraint(x, by_rows)
    slices = (x[index::4] for index in range(4))
    return [jax.lax.with_sharding_constraint(part, by_rows).sum() for part in slices]


rows = np.arange(4.0)
given = [float(part) for part in parts(rows)]
print("examples:", rows.tolist(), "and taken one by one:", given)

raise SystemExit(int(given != rows.tolist()))
