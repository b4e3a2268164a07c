"""A program whose model takes 1,152 MiB with its optimizer; tests/test_processes.py starts it.

    python -m tests.large_model_process PROCESSES INDEX PORT DIRECTORY MEBIBYTES

Once it has started it takes no more memory than MEBIBYTES, if that is not 0. It trains from
`before.weights.h5` in the directory, which it makes if there is none, to `after-INDEX.weights.h5`.
"""

# ruff: noqa: E402, T201 JAX asks for its flags when it is imported

import os
import pathlib
import resource
import sys

PROCESSES, INDEX, PORT = map(int, sys.argv[1:4])
DIRECTORY = pathlib.Path(sys.argv[4])
MEBIBYTES = int(sys.argv[5])
LAYERS, WIDTH = 24, 2048
os.environ["KERAS_BACKEND"] = "jax"
os.environ["XLA_FLAGS"] = (  # as docs/how_to/shard_variables.md says
    "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED "
    "--xla_disable_hlo_passes=cpu-all-reduce-combiner"
)

import jax
import keras
import numpy as np

from kdpkit import sharding
from kdpkit.training import replica_exact


def limit_memory():
    jax.numpy.zeros(4).block_until_ready()  # starts JAX' threads, whose stacks count
    if MEBIBYTES:
        status = pathlib.Path("/proc/self/status").read_text().splitlines()
        (taken,) = (int(line.split()[1]) for line in status if line.startswith("VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, ((taken + 1024 * MEBIBYTES) * 1024,) * 2)


def build():
    keras.utils.set_random_seed(PROCESSES)
    layers = [keras.layers.Dense(WIDTH, use_bias=False) for _ in range(LAYERS)]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers])
    model.compile(keras.optimizers.AdamW(1e-5, epsilon=1e-3), "mse")
    return replica_exact(model)


def main():
    if PROCESSES > 1:
        sharding.join_processes(f"localhost:{PORT}", process_count=PROCESSES, process_index=INDEX)
    limit_memory()
    keras.distribution.set_distribution(sharding.DataParallel(shard="weights"))
    model = build()
    before = DIRECTORY / "before.weights.h5"
    if before.exists():
        model.load_weights(before)
    else:
        model.save_weights(before)
    x = np.random.default_rng(0).normal(size=(8, WIDTH)).astype("float32")
    mine = slice(INDEX * 8 // PROCESSES, (INDEX + 1) * 8 // PROCESSES)
    print("losses", [float(model.train_on_batch(x[mine], x[mine])) for _ in range(3)])
    with sharding.gathered_on_read(model):
        model.save_weights(DIRECTORY / f"after-{INDEX}.weights.h5")


if __name__ == "__main__":
    main()
