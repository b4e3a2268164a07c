"""A program that trains on JAX as one of several processes, or alone; tests/test_processes.py.

    python -m tests.jax_process SETTINGS

The settings, as JSON, have `runs`, which are made one after the other: starting JAX is what costs.
What came out of each is printed as a line of JSON.
"""

# ruff: noqa: ARG002, E402, T201 JAX asks for its devices when it is imported

import json
import os
import sys
import time

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
import numpy as np

from kdpkit import callbacks, experiment, sharding, testing
from kdpkit._internal import processes, shards
from kdpkit.batches import ArrayBatches
from kdpkit.training import TrainingLoop, replica_exact

shards.SMALL = 1  # every variable that the devices divide can be sharded


def build():
    keras.utils.set_random_seed(SEEDS[INDEX])
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(8, activation="tanh", name="first"),
            layers.BatchNormalization(name="norm"),
            layers.Dropout(0.3),
            layers.Dense(3, name="last"),
        ],
        name="net",
    )


SEEDS = [0] * PROCESSES  # of the model in each process


class Slow(keras.callbacks.Callback):
    """Makes steps last, so that there is time to disturb them, and prints the first ones."""

    def __init__(self, seconds, fails_at):
        super().__init__()
        self.seconds = seconds
        self.fails_at = fails_at

    def on_train_batch_end(self, batch, logs=None):
        print(f"step {batch}", flush=True)
        time.sleep(self.seconds)
        if batch == self.fails_at:
            raise ZeroDivisionError("a mistake of this process alone")


def datasets(*, examples=64, same_data=False, unknown_length=False):
    x, y = testing.toy_classification(64)
    position = {"process_count": PROCESSES, "process_index": INDEX}
    of_train = {} if same_data else position
    train = ArrayBatches((x[:examples], y[:examples]), global_batch_size=16, seed=0, **of_train)
    test = ArrayBatches(
        (x[:13], y[:13]), global_batch_size=8, remainder="pad", mode="eval", **position
    )
    return (train[i] for i in range(len(train))) if unknown_length else train, test


def by_loop(train, test, *, epochs, callbacks, shard="none", **settings):
    loop = TrainingLoop(
        build(),
        optimizer="adam",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
        strategy=sharding.DataParallel(shard=shard),
        **settings,
    )
    history = loop.fit(train, test, epochs=epochs, callbacks=callbacks, verbose=0).history
    return loop.model, history, loop.evaluate(test, verbose=0), loop.predict(test, verbose=0)


def by_fit(train, test, *, epochs, callbacks, shard="none"):
    keras.distribution.set_distribution(sharding.DataParallel(shard=shard))
    try:
        model = replica_exact(build())
        model.compile(
            "adam",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            weighted_metrics=["accuracy"],
        )
        history = model.fit(
            train,
            validation_data=test,
            epochs=epochs,
            shuffle=False,
            callbacks=callbacks,
            verbose=0,
        ).history
        evaluated = model.evaluate(test, verbose=0, return_dict=True)
        return model, history, evaluated, model.predict(test, verbose=0)
    finally:
        keras.distribution.set_distribution(None)


def trained(
    *,
    by="loop",
    epochs=3,
    seconds_a_step=0,
    fails_at=None,
    monitors=False,
    data=None,
    own_data=None,
    loop=None,
    seeds=(),
    orbax=None,
):
    """Train in one way; `own_data` has what differs between the processes."""
    SEEDS[: len(seeds)] = seeds
    train, test = datasets(**(data or {}), **(own_data or [{}] * PROCESSES)[INDEX])
    watching = [Slow(seconds_a_step, fails_at if INDEX else None)]
    if monitors:
        watching.append(callbacks.DeviceMonitor())
    if orbax:
        watching.append(keras.callbacks.OrbaxCheckpoint(orbax))
    train_by = {"loop": by_loop, "fit": by_fit}[by]
    model, history, evaluated, predicted = train_by(
        train, test, epochs=epochs, callbacks=watching, **(loop or {})
    )
    return {
        "history": history,
        "evaluated": evaluated,
        "predicted": np.asarray(predicted)[: test.examples].tolist(),
        "weights": values_of(model.variables),
        "optimizer": values_of(model.optimizer.variables),
    }


def values_of(variables):
    return [shards.gather_to_host(v.value).tolist() for v in variables]


def sentence_of(**settings):
    try:
        with processes.explain_lost_process():  # as `experiment.run` does
            trained(**settings)
    except ValueError as error:
        return str(error)
    return None


def main():
    if PROCESSES > 1:
        coordinator = f"localhost:{SETTINGS['port']}"
        sharding.join_processes(coordinator, process_count=PROCESSES, process_index=INDEX)
    assert jax.device_count() == DEVICES
    for run in SETTINGS["runs"]:
        make = sentence_of if run.pop("raises", False) else trained
        print(json.dumps({"found": make(**run)}, default=float), flush=True)


if __name__ == "__main__":
    experiment.run(main)
