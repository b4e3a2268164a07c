"""A process of a cluster with parameter servers, for tests/test_parameter_server.py.

    kdpkit launch --workers 2 --parameter-servers 1 -- python -m tests.parameter_server_process '{}'

The chief prints a line of JSON; without TF_CONFIG one device trains, and prints the same.
"""

import json
import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

from kdpkit import experiment, pipelines, strategies, testing, training
from kdpkit.callbacks import Resume

STEPS = 8  # in an epoch


class Rates(keras.optimizers.schedules.LearningRateSchedule):
    """A rate that falls to zero over the run."""

    def __init__(self, steps):
        self.steps = steps

    def __call__(self, step):
        return 0.05 * (1 - tf.cast(step, tf.float32) / self.steps)

    def get_config(self):
        return {"steps": self.steps}


class Noting(keras.callbacks.Callback):
    """Notes what callbacks see, prints how far it is, and takes its time."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append([batch, int(self.model.optimizer.iterations.numpy())])
        print(f"step {batch + 1}", flush=True)
        time.sleep(self.seconds)


def build(settings):
    keras.utils.set_random_seed(0)
    layers = [
        keras.Input((4,)),
        keras.layers.Dense(16, activation="tanh", kernel_regularizer="l2"),
        keras.layers.Dense(3),
    ]
    if settings.get("batch_norm"):
        layers.insert(2, keras.layers.BatchNormalization())
    return keras.Sequential(layers)


def data(settings):
    rows = settings.get("rows", 61)
    source = tf.data.Dataset.from_tensor_slices(testing.toy_classification(rows))
    return pipelines.train_pipeline(
        source, pipelines.PipelineConfig(seed=0, remainder="keep"), global_batch_size=8
    )


def of_worker(worker, workers):
    x, y = testing.toy_classification(64)
    return tf.data.Dataset.from_tensor_slices((x, y)).shard(workers, worker).batch(8)


def main():
    settings = json.loads(sys.argv[1])
    strategies.serve_if_server()
    kind = "parameter_server" if os.environ.get("TF_CONFIG") else "one"
    strategy = strategies.select_strategy(kind)
    epochs = settings.get("epochs", 3)
    with strategy.scope():
        model = build(settings)
    loop = training.TrainingLoop(
        model,
        optimizer=keras.optimizers.Adam(Rates(epochs * STEPS)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        weighted_metrics=[keras.metrics.SparseTopKCategoricalAccuracy(2, name="top")],
        strategy=strategy,
        steps_per_loop=settings.get("steps_per_loop", 4),
        accumulation=settings.get("accumulation", 1),
    )
    train = data(settings)
    noting = Noting(settings.get("seconds_a_window", 0))
    watching = [noting]
    if settings.get("directory"):
        resume = Resume(settings["directory"], save_freq=4)
        train = resume.track(train)
        watching.append(resume)
    x, y = testing.toy_classification(21, seed=1)
    weight = np.linspace(0.0, 1.0, 21, dtype="float32")
    held_out = tf.data.Dataset.from_tensor_slices((x, y, weight)).batch(4)
    own = {"train": of_worker, "steps_per_epoch": STEPS} if settings.get("own") else {}
    history = loop.fit(
        **{"train": train} | own,
        validation=held_out,
        epochs=epochs,
        callbacks=watching,
        verbose=0,
    )
    result = {
        "history": history.history,
        "test": loop.evaluate(held_out, verbose=0),
        "predictions": loop.predict(held_out, verbose=0).tolist(),
        "weights": [w.tolist() for w in model.get_weights()],
        "iterations": int(model.optimizer.iterations.numpy()),
        "seen": noting.seen,
    }
    if settings.get("model"):
        model.save(settings["model"])
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    experiment.run(main)
