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
from kdpkit.training import replica_exact
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
    def __init__(self, name="examples", **settings):
        super().__init__(name=name, **settings)
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.cast(keras.ops.shape(y_pred)[0], "float32"))

    def result(self):
        return 1.0 * self.total  # Keras would read the variable itself after validation.


def falling(steps):
    return keras.optimizers.schedules.PolynomialDecay(0.05, steps, end_learning_rate=0.0)


def slope(products):
    """Return a loss whose gradient is 1: every update takes its rate off the weight.

    A step that computes some products lasts.
    """

    def loss(_, predictions):
        tf.print("takes a step")
        large = tf.random.stateless_uniform([512, 512], [0, 0])
        _, last = tf.while_loop(
            lambda i, _: i < products,
            lambda i, product: (i + 1, tf.tanh(product @ product)),
            (0, large),
        )
        return predictions[:, 0] + 0.0 * tf.stop_gradient(tf.reduce_mean(last))

    return loss


class OwnStep(keras.Sequential):
    """Has two optimizers, and logs that are results of metrics, and one that is not."""

    def __init__(self, layers):
        super().__init__(layers)
        self.other, self.tracker = keras.optimizers.SGD(falling(16)), keras.metrics.Mean()

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.compute_loss(*data[:1], data[1], self(data[0])))
        weights = self.trainable_variables
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply(gradients[:1], weights[:1])
        self.other.apply(gradients[1:], weights[1:])
        self.tracker.update_state(loss)
        return {"mean": self.tracker.result(), "last": loss}


def train_own(strategy):
    with strategy.scope():
        model = replica_exact(OwnStep(process_programs.classifier().layers))
    model.compile("adam", process_programs.LOSS, steps_per_execution=3)
    data = tf.data.Dataset.from_tensor_slices(testing.toy_classification(EXAMPLES)).batch(8)
    history = model.fit(data, epochs=2, verbose=0).history
    counts = [int(one.iterations.numpy()) for one in (model.optimizer, model.other)]
    weights = [weight.tolist() for weight in model.get_weights()]
    return {"history": history, "iterations": counts, "weights": weights}


def train_classifier(strategy, *, epochs=3, directory=None, seconds=0.0):
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
    compiled = {
        "optimizer": keras.optimizers.Adam(falling(8 * epochs), global_clipnorm=0.5),
        "metrics": ["accuracy", Examples()],
        "weighted_metrics": [keras.metrics.SparseCategoricalAccuracy(name="weighted")],
        "steps_per_execution": 4,
    }
    found = process_programs.by_fit(
        model, train, held_out, epochs=epochs, callbacks=watching, compiled=compiled
    )
    return found | {"iterations": int(model.optimizer.iterations.numpy()), "seen": noting.seen}


def train_slope(strategy, *, epochs=2, steps=50, products=0, until=None):
    """Add up the rates of all updates in a weight; workers print that they take a step."""
    with strategy.scope():
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((1,)), layer])
    model = replica_exact(model)
    optimizer = keras.optimizers.SGD(falling(epochs * steps))
    execution = {"steps_per_execution": steps // 2}
    model.compile(optimizer, slope(products), metrics=[Examples()], **execution)
    x = np.ones((8 * steps, 1), "float32")
    train = tf.data.Dataset.from_tensor_slices((x, x)).batch(8).repeat()
    noting = Noting(until=until)
    history = model.fit(train, steps_per_epoch=steps, epochs=epochs, callbacks=[noting], verbose=0)
    return {
        "examples": history.history["examples"],
        "weight": float(model.get_weights()[0][0, 0]),
        "iterations": int(model.optimizer.iterations.numpy()),
        "seen": noting.seen,
    }


def main():
    strategy = strategies.select_strategy("parameter_server")
    runs = {"classifier": train_classifier, "own": train_own, "slope": train_slope}
    for name, settings in json.loads(sys.argv[1]):
        print(json.dumps(runs[name](strategy, **settings), default=float), flush=True)


if __name__ == "__main__":
    experiment.run(main)
