"""A process of a cluster with parameter servers, for tests/test_parameter_server.py.

    python -m tests.parameter_server_process SETTINGS

The chief makes one run after the other, and prints what came out of each as a line of JSON.
"""

# ruff: noqa: ARG002, T201 Keras calls with arguments that not all need; it is a program

import json
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from kdpkit import experiment, strategies

if __name__ == "__main__":
    experiment.run(strategies.serve_if_server)  # servers need none of what is imported now

import keras
import numpy as np
import tensorflow as tf

from kdpkit import callbacks, pipelines, testing
from kdpkit.training import TrainingLoop
from tests import process_programs

EXAMPLES = 61  # the last of eight batches is smaller


class Noting(process_programs.Steps):
    """Notes the last step of every call and the count then; ends with a file `until`."""

    def __init__(self, seconds=0.0, until=None):
        super().__init__(seconds)
        self.until = until and pathlib.Path(until)
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append([batch + 1, int(self.model.optimizer.iterations.numpy())])
        super().on_train_batch_end(batch)
        if self.until and self.until.exists():
            self.model.stop_training = True


class Examples(keras.metrics.Metric):
    """Counts the examples."""

    def __init__(self, name="examples", **settings):
        super().__init__(name=name, **settings)
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.cast(keras.ops.shape(y_pred)[0], "float32"))

    def result(self):
        return self.total


def falling(steps):
    """Return a rate that falls with every step."""
    return keras.optimizers.schedules.PolynomialDecay(0.05, steps, end_learning_rate=0.0)


class Slope(TrainingLoop):
    """A loss whose gradient is 1: every update takes its rate off the weight."""

    products = 0  # to compute in a step, so that it lasts

    def per_example_loss(self, x, y, *, training):
        predictions = self.model(x, training=training)
        tf.print("takes a step")
        large = tf.random.stateless_uniform([512, 512], [0, 0])
        _, last = tf.while_loop(
            lambda i, _: i < self.products,
            lambda i, product: (i + 1, tf.tanh(product @ product)),
            (0, large),
        )
        return predictions[:, 0] + 0.0 * tf.stop_gradient(tf.reduce_mean(last)), predictions


def train_classifier(strategy, *, epochs=3, directory=None, seconds=0.0):
    """Train, evaluate, predict: weights, logs and counts."""
    with strategy.scope():
        model = process_programs.classifier()
    train = pipelines.train_pipeline(
        tf.data.Dataset.from_tensor_slices(testing.toy_classification(EXAMPLES)),
        pipelines.PipelineConfig(seed=0, remainder="keep"),
        global_batch_size=8,
    )
    noting = Noting(seconds)
    watching = [noting]
    if directory:
        resume = callbacks.Resume(directory, save_freq=4)
        train, watching = resume.track(train), [noting, resume]
    x, y = testing.toy_classification(21, seed=1)
    held_out = tf.data.Dataset.from_tensor_slices((x, y, np.linspace(0.0, 1.0, 21))).batch(4)
    found = process_programs.by_loop(
        model,
        train,
        held_out,
        epochs=epochs,
        callbacks=watching,
        optimizer=keras.optimizers.Adam(falling(8 * epochs), global_clipnorm=0.5),
        metrics=["accuracy", Examples()],
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy(name="weighted")],
        strategy=strategy,
        steps_per_loop=4,
        accumulation=2,
    )
    return found | {"iterations": int(model.optimizer.iterations.numpy()), "seen": noting.seen}


def train_slope(strategy, *, epochs=2, steps=50, products=0, until=None):
    """Add up the rates of all updates in a weight; workers print that they take a step."""
    with strategy.scope():
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((1,)), layer])
    loop = Slope(
        model,
        optimizer=keras.optimizers.SGD(falling(epochs * steps)),
        loss=None,
        metrics=[Examples()],
        strategy=strategy,
        steps_per_loop=steps // 2,
    )
    loop.products = products
    x = np.ones((8 * steps, 1), "float32")
    train = tf.data.Dataset.from_tensor_slices((x, x)).batch(8).repeat()
    noting = Noting(until=until)
    history = loop.fit(train, steps_per_epoch=steps, epochs=epochs, callbacks=[noting], verbose=0)
    return {
        "examples": history.history["examples"],
        "weight": float(model.get_weights()[0][0, 0]),
        "iterations": int(model.optimizer.iterations.numpy()),
        "seen": noting.seen,
    }


def main():
    strategy = strategies.select_strategy("parameter_server")
    runs = {"classifier": train_classifier, "slope": train_slope}
    for name, settings in json.loads(sys.argv[1]):
        print(json.dumps(runs[name](strategy, **settings), default=float), flush=True)


if __name__ == "__main__":
    experiment.run(main)
