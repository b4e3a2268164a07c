"""On a mesh of two axes XLA computes wrong gradients of grouped convolutions. Run: python FILE"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ.setdefault("PJRT_NPROC", "8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("batch", "model"))
random = np.random.default_rng(0)
images = random.normal(size=(4, 8, 8, 4)).astype("float32")
kernel = random.normal(size=(3, 3, 2, 8)).astype("float32")  # of two groups


def loss(kernel, images):
    found = jax.lax.conv_general_dilated(
        images,
        kernel,
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=2,
    )
    return jnp.mean(jnp.sin(found))


gradient = jax.jit(jax.grad(loss))
placed = [
    jax.device_put(kernel, NamedSharding(mesh, PartitionSpec(None, None, "model"))),
    jax.device_put(images, NamedSharding(mesh, PartitionSpec("batch"))),
]
given, expected = np.asarray(gradient(*placed)), np.asarray(gradient(kernel, images))
print("largest error of the gradient:", np.abs(given - expected).max() / np.abs(expected).max())
raise SystemExit(int(not np.allclose(given, expected, rtol=1e-3, atol=1e-6)))
