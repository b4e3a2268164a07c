"""A program that trains as one of several processes of TensorFlow; tests/test_workers.py.

    TF_CONFIG=... python -m tests.worker_process DIRECTORY DEVICES
    python -m tests.worker_process starts | late | uneven | lost

It prints what came out as one line of JSON, and then trains until it is ended. The test process
calls the same functions on one device.
"""

# ruff: noqa: ARG002, T201 it prints for the test that started it

import contextlib
import json
import os
import pathlib
import socket
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

from kdpkit import callbacks, experiment, strategies, testing
from kdpkit._internal import processes
from kdpkit.training import TrainingLoop, replica_exact

EXAMPLES, BATCH = 22, 7  # shards of 2, 2, 2 and 1 examples, and at the end of the epoch one example


def toy_data(examples=EXAMPLES):
    x, y = testing.toy_classification(examples)
    weights = 1 + np.arange(examples, dtype="float32") % 3
    return x, y, weights


def dataset(examples=EXAMPLES, *, seed=3):
    """Shuffled batches; those of an epoch have sizes that no number of replicas divides."""
    data = tf.data.Dataset.from_tensor_slices(toy_data(examples))
    return data.shuffle(examples, seed=seed).batch(BATCH)


def model_of(strategy):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = keras.layers
        return keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(8, activation="tanh", kernel_regularizer="l2"),
                layers.BatchNormalization(synchronized=True, momentum=0.9),
                layers.Dense(3),
            ]
        )


def crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def weights_of(model):
    return [weight.tolist() for weight in model.get_weights()]


def watching(directory):
    """Callbacks that write into a directory that all processes use."""
    if directory is None:
        return []
    return [
        keras.callbacks.ModelCheckpoint(directory / "keras-{epoch}.keras"),
        callbacks.ModelCheckpoint(directory / "ours-{epoch}.weights.h5", save_weights_only=True),
        keras.callbacks.CSVLogger(directory / "log.csv"),
        callbacks.TensorBoard(directory / "board"),
    ]


def by_fit(strategy, directory=None, *, steps_per_execution=1, compiled_in=None):
    """Train with Keras' `fit`, validate, evaluate and predict."""
    model = replica_exact(model_of(strategy))
    with compiled_in or strategy.scope():
        model.compile(
            keras.optimizers.Adam(0.01, clipnorm=0.1, gradient_accumulation_steps=2),
            crossentropy(),
            weighted_metrics=["accuracy"],
            steps_per_execution=steps_per_execution,
        )
    history = model.fit(
        dataset().map(lambda x, y, _: (x, y)),
        validation_data=dataset(),
        epochs=2,
        class_weight={0: 0.5, 1: 2.0, 2: 1.0},
        callbacks=watching(directory),
        verbose=0,
    ).history
    x, y, weights = toy_data()
    found = {
        "history": history,
        "evaluated": model.evaluate(x, y, BATCH, sample_weight=weights, verbose=0),
        "predicted": model.predict(x, BATCH, verbose=0).tolist(),
        "on_batch": [
            model.train_on_batch(x[:5], y[:5], weights[:5]),
            model.test_on_batch(x[:9], y[:9]),
            model.predict_on_batch(x[:5]).tolist(),
        ],
    }
    return found | {"weights": weights_of(model)}


def by_loop(strategy, *, accumulation=1, **settings):
    """Train with a loop, several steps in a call."""
    model = model_of(strategy) if accumulation == 1 else testing_model(strategy)
    loop = TrainingLoop(
        model,
        optimizer="adam",
        loss=crossentropy(),
        metrics=["accuracy"],
        strategy=strategy,
        steps_per_loop=3,
        accumulation=accumulation,
        **settings,
    )
    unknown_length = dataset().filter(lambda *_: True)
    history = loop.fit(unknown_length, dataset(), epochs=2, verbose=0).history
    x, y, _ = toy_data()
    examples = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    return {
        "history": history,
        "evaluated": loop.evaluate(examples, verbose=0),
        "predicted": loop.predict(examples, verbose=0).tolist(),
        "weights": weights_of(model),
    }


def testing_model(strategy):
    with strategy.scope():
        return testing.tiny_classifier()


def trained(strategy, directory=None):
    """Train in every way."""
    return {
        "fit": by_fit(strategy, directory),
        "fit, 2 steps in an execution": by_fit(
            strategy, steps_per_execution=2, compiled_in=contextlib.nullcontext()
        ),
        "loop": by_loop(strategy),
        "loop, 2 micro-batches": by_loop(strategy, accumulation=2),
    }


def disagreements(strategy):
    """Train on data that are not the same in all processes; return the sentences."""
    index = processes.index()
    model = replica_exact(testing_model(strategy))
    model.compile("sgd", crossentropy())
    loop = TrainingLoop(
        testing_model(strategy), optimizer="sgd", loss=crossentropy(), strategy=strategy
    )
    own_order = dataset(seed=index).map(lambda x, y, _: (x, y))
    own_length = dataset(EXAMPLES + BATCH * index)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    off = dataset().with_options(options)
    ways = {
        "policy": lambda: model.evaluate(off, verbose=0),
        "order, fit": lambda: model.fit(own_order, verbose=0),
        "length, fit": lambda: model.fit(own_length, verbose=0),
        "end, loop": lambda: loop.fit(of_unknown_length(3 + index), epochs=1, verbose=0),
    }
    outside = replica_exact(testing_model(strategy))
    outside.compile("sgd", crossentropy(), metrics=[keras.metrics.SparseCategoricalAccuracy()])
    ways["metric"] = lambda: outside.fit(dataset().map(lambda x, y, _: (x, y)), verbose=0)
    return {name: sentence_of(way) for name, way in ways.items()}


def of_unknown_length(batches):
    """Return the same batches in all processes, but as many as asked for, which nobody knows."""
    x, y, _ = toy_data(EXAMPLES + BATCH)
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).take(batches)
    return batches.filter(lambda *_: True)


def sentence_of(way):
    try:
        way()
    except ValueError as error:
        return str(error)
    return None


class Printing(keras.callbacks.Callback):
    """Prints its steps, which last."""

    def on_train_batch_end(self, batch, logs=None):
        print(f"step {batch}", flush=True)
        time.sleep(0.2)


def failed_starts():
    """Start where it cannot work; return the sentences."""
    with socket.socket() as absent, socket.socket() as taken:
        absent.bind(("localhost", 0))
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        nobody, somebody = (f"localhost:{s.getsockname()[1]}" for s in (absent, taken))
        with socket.create_server(("localhost", 0)) as probe:
            free = f"localhost:{probe.getsockname()[1]}"
        same = somebody.replace("localhost", "127.0.0.1")
        return {
            "the other does not come": failed_start(free, nobody),
            "the port is taken": failed_start(somebody, same),
            "again": failed_start(somebody, same),
        }


def failed_start(*addresses, index=0):
    task = {"type": "worker", "index": index}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
    return sentence_of(lambda: strategies.select_strategy("multi_worker", start_timeout_seconds=2))


def train_until_ended(strategy):
    model = replica_exact(testing_model(strategy))
    model.compile("sgd", crossentropy())
    model.fit(dataset().repeat(), steps_per_epoch=1000, callbacks=[Printing()], verbose=0)


def main():
    if sys.argv[1] == "starts":
        print(json.dumps(failed_starts()))
        os._exit(0)  # TensorFlow would try the port again
    if sys.argv[1] == "uneven":
        task = json.loads(os.environ["TF_CONFIG"])["task"]
        strategies.split_device("CPU", 1 + task["index"])
        strategies.select_strategy("multi_worker")
    if sys.argv[1] == "lost":
        strategy = strategies.select_strategy("multi_worker", communication="ring")
        print("joined", flush=True)
        time.sleep(2)  # in which the other is killed
        model_of(strategy)
        return
    if sys.argv[1] == "late":
        strategies.select_strategy("multi_worker", start_timeout_seconds=2)
    directory, devices = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    strategies.split_device("CPU", devices)
    strategy = strategies.select_strategy("multi_worker", communication="ring")
    found = {
        "strategy": strategies.describe(strategy),
        "is_chief": strategies.is_chief(),
        "trained": trained(strategy, directory),
        "disagreements": disagreements(strategy),
    }
    print(json.dumps(found, default=float), flush=True)
    train_until_ended(strategy)


if __name__ == "__main__":
    experiment.run(main)
