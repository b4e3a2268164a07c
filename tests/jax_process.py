"""A program that trains on JAX as one of several processes, or alone; tests/test_processes.py.

    python -m tests.jax_process SETTINGS

The settings, as JSON, have `runs`, which are made one after the other: starting JAX is what costs.
What came out of each is printed as a line of JSON.
"""

# ruff: noqa: E402, T201 JAX asks for its devices when it is imported

import json
import os
import pathlib
import resource
import sys

SETTINGS = json.loads(sys.argv[1])
PROCESSES, INDEX = SETTINGS["processes"], SETTINGS["index"]
DEVICES = 4  # of all processes
os.environ["KERAS_BACKEND"] = "jax"
os.environ["XLA_FLAGS"] = SETTINGS.get("flags") or " ".join(
    [os.getenv("XLA_FLAGS", ""), f"--xla_force_host_platform_device_count={DEVICES // PROCESSES}"]
)
os.environ["PJRT_NPROC"] = str(2 * DEVICES // PROCESSES)  # see kdpkit/_internal/machine.py

import jax
import keras
import numpy as np

from kdpkit import callbacks, experiment, sharding, testing
from kdpkit._internal import processes
from kdpkit.batches import ArrayBatches
from kdpkit.sharding import _shards as shards
from kdpkit.training import replica_exact
from tests import process_programs

shards.SMALL = 1  # every variable that the devices divide can be sharded


def datasets(*, examples=64, same_data=False):
    x, y = testing.toy_classification(64)
    position = {"process_count": PROCESSES, "process_index": INDEX}
    of_train = {} if same_data else position
    train = ArrayBatches((x[:examples], y[:examples]), global_batch_size=16, seed=0, **of_train)
    test = ArrayBatches(
        (x[:13], y[:13]), global_batch_size=8, remainder="pad", mode="eval", **position
    )
    return train, test


def trained(
    *,
    by="fit",
    epochs=3,
    seconds_a_step=0,
    fails_at=None,
    monitors=False,
    own_data=None,
    generated=False,
    shard="none",
    seeds=None,
    groups_of=None,
    accumulation=None,
    **compiled,
):
    """Train in one way; `own_data`, `seeds` and `groups_of` have what differs between processes.

    So many devices share the model; with 0 there is no distribution.
    """
    assert jax.device_count() == DEVICES
    train, test = datasets(**(own_data or [{}] * PROCESSES)[INDEX])
    model = process_programs.classifier(dropout=0.3, seed=(seeds or [0, 0])[INDEX])
    watching = [process_programs.Steps(seconds_a_step, fails_at if INDEX else None)]
    watching += [callbacks.DeviceMonitor()] if monitors else []
    compiled["optimizer"] = keras.optimizers.Adam(gradient_accumulation_steps=accumulation)
    strategy = sharding.DataParallel(shard=shard)
    if groups_of:
        size = groups_of[INDEX]
        strategy = sharding.ModelParallel(model=size) if size else None
    keras.distribution.set_distribution(strategy)
    try:
        if by == "step":
            return process_programs.by_step(model, train, epochs=epochs)
        batches = (train[index] for index in range(len(train))) if generated else train
        settings = {"epochs": epochs, "callbacks": watching, "examples": test.examples}
        return process_programs.by_fit(model, batches, test, compiled=compiled, **settings)
    finally:
        keras.distribution.set_distribution(None)


def trained_in(mebibytes, directory, *, layers=24, width=2048):
    """Train a model that takes 1,152 MiB with its optimizer, in no more memory than asked for.

    It begins with `before.weights.h5`, which is made if there is none, and ends with
    `after-INDEX.weights.h5`.
    """
    jax.numpy.zeros(4).block_until_ready()  # starts JAX' threads, whose stacks count
    if mebibytes:
        status = pathlib.Path("/proc/self/status").read_text().splitlines()
        (taken,) = (int(line.split()[1]) for line in status if line.startswith("VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, ((taken + 1024 * mebibytes) * 1024,) * 2)
    keras.distribution.set_distribution(sharding.DataParallel(shard="weights"))
    keras.utils.set_random_seed(PROCESSES)
    stack = [keras.layers.Dense(width, use_bias=False) for _ in range(layers)]
    model = replica_exact(keras.Sequential([keras.Input((width,)), *stack]))
    model.compile(keras.optimizers.AdamW(1e-5, epsilon=1e-3), "mse")
    before = pathlib.Path(directory, "before.weights.h5")
    (model.load_weights if before.exists() else model.save_weights)(before)
    x = np.random.default_rng(0).normal(size=(8, width)).astype("float32")
    x = x[INDEX * 8 // PROCESSES : (INDEX + 1) * 8 // PROCESSES]
    losses = [float(model.train_on_batch(x, x)) for _ in range(3)]
    with sharding.gathered_on_read(model):
        model.save_weights(before.with_name(f"after-{INDEX}.weights.h5"))
    return losses


def explained(**settings):
    with processes.explain_lost_process():  # as `experiment.run` does
        trained(**settings)


def main():
    if PROCESSES > 1:
        coordinator = f"localhost:{SETTINGS['port']}"
        sharding.join_processes(coordinator, process_count=PROCESSES, process_index=INDEX)
    for run in SETTINGS["runs"]:
        if "mebibytes" in run:
            found = trained_in(**run)
        elif run.pop("raises", False):
            found = process_programs.sentence_of(lambda run=run: explained(**run))
        else:
            found = trained(**run)
        print(json.dumps({"found": found}, default=float), flush=True)


if __name__ == "__main__":
    experiment.run(main)
