"""A program that trains on JAX as one of several processes, or alone; tests/test_processes.py.

    python -m tests.jax_process SETTINGS

The settings, as JSON, have `runs`, which are made one after the other: starting JAX is what costs.
What came out of each is printed as a line of JSON.
"""

# ruff: noqa: E402, T201 JAX asks for its devices when it is imported

import json
import os
import sys

SETTINGS = json.loads(sys.argv[1])
PROCESSES, INDEX = SETTINGS["processes"], SETTINGS["index"]
DEVICES = 4  # of all processes
os.environ["KERAS_BACKEND"] = "jax"
os.environ["XLA_FLAGS"] = " ".join(
    [os.getenv("XLA_FLAGS", ""), f"--xla_force_host_platform_device_count={DEVICES // PROCESSES}"]
)
os.environ["PJRT_NPROC"] = str(2 * DEVICES // PROCESSES)  # see kdpkit/_internal/machine.py

import jax
import keras

from kdpkit import callbacks, experiment, sharding, testing
from kdpkit._internal import processes, shards
from kdpkit.batches import ArrayBatches
from tests import process_programs

shards.SMALL = 1  # every variable that the devices divide can be sharded


def datasets(*, examples=64, same_data=False, unknown_length=False):
    x, y = testing.toy_classification(64)
    position = {"process_count": PROCESSES, "process_index": INDEX}
    of_train = {} if same_data else position
    train = ArrayBatches((x[:examples], y[:examples]), global_batch_size=16, seed=0, **of_train)
    test = ArrayBatches(
        (x[:13], y[:13]), global_batch_size=8, remainder="pad", mode="eval", **position
    )
    return (train[i] for i in range(len(train))) if unknown_length else train, test


def trained(
    *,
    by="loop",
    epochs=3,
    seconds_a_step=0,
    fails_at=None,
    monitors=False,
    data=None,
    own_data=None,
    shard="none",
    seeds=None,
    **settings,
):
    """Train in one way; `own_data` and `seeds` have what differs between the processes."""
    train, test = datasets(**(data or {}), **(own_data or [{}] * PROCESSES)[INDEX])
    model = process_programs.classifier(dropout=0.3, seed=(seeds or [0, 0])[INDEX])
    watching = [process_programs.Steps(seconds_a_step, fails_at if INDEX else None)]
    watching += [callbacks.DeviceMonitor()] if monitors else []
    settings |= {"epochs": epochs, "callbacks": watching, "examples": test.examples}
    strategy = sharding.DataParallel(shard=shard)
    if by == "loop":
        return process_programs.by_loop(model, train, test, strategy=strategy, **settings)
    keras.distribution.set_distribution(strategy)
    try:
        return process_programs.by_fit(model, train, test, **settings)
    finally:
        keras.distribution.set_distribution(None)


def explained(**settings):
    with processes.explain_lost_process():  # as `experiment.run` does
        trained(**settings)


def main():
    if PROCESSES > 1:
        coordinator = f"localhost:{SETTINGS['port']}"
        sharding.join_processes(coordinator, process_count=PROCESSES, process_index=INDEX)
    assert jax.device_count() == DEVICES
    for run in SETTINGS["runs"]:
        if run.pop("raises", False):
            found = process_programs.sentence_of(lambda run=run: explained(**run))
        else:
            found = trained(**run)
        print(json.dumps({"found": found}, default=float), flush=True)


if __name__ == "__main__":
    experiment.run(main)
