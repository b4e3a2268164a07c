"""Keras' Dropout fails on a mesh with Explicit axes, as `jax.make_mesh` creates it."""

import os

os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ.setdefault("PJRT_NPROC", "4")

import jax
import keras
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

failed = []
for axes in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(axes,))
    everywhere = NamedSharding(mesh, PartitionSpec())
    by_rows = NamedSharding(mesh, PartitionSpec("batch"))
    dropout = keras.layers.Dropout(0.5, seed=1)
    dropout.build((4, 3))
    seeds = [jax.device_put(seed.value, everywhere) for seed in dropout.non_trainable_variables]
    x = jax.device_put(np.ones((4, 3), "float32"), by_rows)
    try:
        jax.jit(lambda x, d=dropout, s=seeds: d.stateless_call([], s, x, training=True))(x)
        failed.append(False)
        print(f"{axes}: no error")
    except Exception as error:
        failed.append(True)
        print(f"{axes}: {type(error).__name__}: {' '.join(str(error).split())[:160]}")

raise SystemExit(int(failed == [False, True]))
