"""A program that trains on JAX as one of several processes, or alone; tests/test_processes.py.

    python -m tests.jax_process SETTINGS.json

It prints what came out as one line of JSON.
"""

# ruff: noqa: ARG002, E402, T201 JAX asks for its devices when it is imported

import json
import os
import sys
import time

SETTINGS = json.loads(sys.argv[1])
PROCESSES, INDEX = SETTINGS["processes"], SETTINGS["index"]
os.environ["KERAS_BACKEND"] = "jax"
os.environ["XLA_FLAGS"] = " ".join(
    [os.getenv("XLA_FLAGS", ""), f"--xla_force_host_platform_device_count={4 // PROCESSES}"]
)

import jax
import keras
import numpy as np

from kdpkit import callbacks, experiment, sharding, testing
from kdpkit.batches import ArrayBatches
from kdpkit.training import TrainingLoop, replica_exact


def build():
    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(8, activation="tanh"),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(3),
        ]
    )


class Slow(keras.callbacks.Callback):
    """Makes steps last, so that there is time to disturb them, and tells of the first ones."""

    def on_train_batch_end(self, batch, logs=None):
        print(f"step {batch}", flush=True)
        time.sleep(SETTINGS.get("seconds_a_step", 0))
        if SETTINGS.get("fails_at") == batch:
            raise ZeroDivisionError("a mistake of this process alone")


def datasets():
    x, y = testing.toy_classification(64)
    place = {"process_count": PROCESSES, "process_index": INDEX}
    if SETTINGS.get("same_data"):
        place = {}
    rows = SETTINGS.get("rows", 64)
    train = ArrayBatches((x[:rows], y[:rows]), global_batch_size=16, seed=0, **place)
    test = ArrayBatches(
        (x[:13], y[:13]), global_batch_size=8, remainder="pad", mode="eval", **place
    )
    if SETTINGS.get("unknown_length"):
        return (train[i] for i in range(len(train))), None
    return train, test


def by_loop(train, test, watching):
    loop = TrainingLoop(
        build(),
        optimizer="adam",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
        strategy=sharding.data_mesh(),
        steps_per_loop=SETTINGS.get("steps_per_loop", 1),
        **SETTINGS.get("loop", {}),
    )
    history = loop.fit(
        train, test, epochs=SETTINGS["epochs"], callbacks=watching, verbose=0
    ).history
    return loop.model, history, loop.evaluate(test, verbose=0), loop.predict(test, verbose=0)


def by_fit(train, test, watching):
    keras.distribution.set_distribution(sharding.DataParallel())
    model = replica_exact(build())
    model.compile(
        "adam",
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
    )
    history = model.fit(
        train,
        validation_data=test,
        epochs=SETTINGS["epochs"],
        shuffle=False,
        callbacks=watching,
        verbose=0,
    ).history
    evaluated = model.evaluate(test, verbose=0, return_dict=True)
    return model, history, evaluated, model.predict(test, verbose=0)


def main():
    if PROCESSES > 1:
        sharding.join_processes(
            f"localhost:{SETTINGS['port']}",
            process_count=PROCESSES,
            process_index=INDEX,
            **SETTINGS.get("joining", {}),
        )
    assert jax.device_count() == 4
    train, test = datasets()
    watching = [Slow()]
    if SETTINGS.get("monitors"):
        watching.append(callbacks.DeviceMonitor())
    if "directory" in SETTINGS:
        resume = callbacks.Resume(SETTINGS["directory"], save_freq=3)
        train = resume.track(train)
        watching.append(resume)
    by = {"loop": by_loop, "fit": by_fit}[SETTINGS["by"]]
    model, history, evaluated, predicted = by(train, test, watching)
    found = {
        "history": history,
        "evaluated": evaluated,
        "predicted": np.asarray(predicted)[: test.examples].tolist(),
        "weights": [np.asarray(v.value).tolist() for v in model.variables],
        "optimizer": [np.asarray(v.value).tolist() for v in model.optimizer.variables],
    }
    print(json.dumps(found, default=float))


if __name__ == "__main__":
    experiment.run(main)
