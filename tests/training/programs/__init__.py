"""Small programs in the manner of public Keras guides and examples, as their authors would write.

A program builds and compiles a model as on one device, and has the arguments of `fit`. Nothing in
it knows of replicas. Most of those with a `train_step` of their own are a `CustomStep`, which has
the tape and the update; where the way of writing is the point, a program has a complete step.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops


@dataclasses.dataclass(frozen=True)
class Program:
    """A training program as somebody would publish it.

    Attributes:
        name: What it is, in a few words.
        build: Builds and compiles the model; runs in the strategy's scope.
        data: Returns the arguments of `fit`: with an uneven first batch, and an uneven last one.
        backends: Where it runs; a step of its own with `tf.GradientTape` runs on TensorFlow only.
        tolerance: The largest difference of any weight over the largest change of any weight.
        run: "quick", "slow" if `pytest --all` runs it, or "exhaustive" if it repeats others.
    """

    name: str
    build: Callable[[], Any]
    data: Callable[[], dict[str, Any]]
    backends: tuple[str, ...] = ("tensorflow", "jax")
    tolerance: float = 1e-5
    run: str = "exhaustive"


PROGRAMS: list[Program] = []
TENSORFLOW = {"backends": ("tensorflow",)}


def vectors(rows=17, seed=0):
    """Return vectors with labels of three classes, in batches of 7, 7 and 3."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, 6)).astype("float32")
    return {"x": x, "y": random.integers(0, 3, rows), "batch_size": 7}


def numbers():
    """Return vectors with a number for each."""
    x = vectors()["x"]
    return {"x": x, "y": x[:, :1] * x[:, 1:2], "batch_size": 7}


def small_at_first(scale=0.01):
    """Return vectors of which those of the first batch are small."""
    data = vectors()
    data["x"][:7] *= scale
    return data


def images(rows=17, channels=3, seed=0):
    """Return images with labels of four classes, in batches of 7."""
    random = np.random.default_rng(seed)
    x = random.uniform(size=(rows, 8, 8, channels)).astype("float32")
    return {"x": x, "y": random.integers(0, 4, rows), "batch_size": 7}


def program(name, data=vectors, *, backends=None, tolerance=1e-5, run="exhaustive", **compiled):
    """Add what is decorated to `PROGRAMS`: a class of models, or a function that builds one.

    Args:
        name: The program's.
        data: Returns the arguments of `fit`.
        backends: TensorFlow only for a class, which has a step of its own, and both for a function.
        tolerance: The program's.
        run: The program's.
        compiled: What the model of a class is compiled with.
    """

    def add(build):
        is_class = isinstance(build, type)
        where = backends or (("tensorflow",) if is_class else ("tensorflow", "jax"))
        make = (lambda: compile_model(build(), **compiled)) if is_class else build
        PROGRAMS.append(Program(name, make, data, where, tolerance, run))
        return build

    return add


def on_tensorflow(name, build=None, data=vectors, **settings):
    """Add a program for TensorFlow only, whose model a function or class builds, or decorate it."""
    add = program(name, data, **TENSORFLOW | settings)
    return add(build) if build else add


def compile_model(model, optimizer="sgd", loss=None, **settings):
    """Compile a model with an optimizer, or with the one that a function makes; return it."""
    optimizer = optimizer() if callable(optimizer) else optimizer
    model.compile(sgd() if optimizer == "sgd" else optimizer, loss, **settings)
    return model


def sgd():
    return keras.optimizers.SGD(0.1)


def classifier(*middle, shape=(6,), classes=3, loss=None, **settings):
    """Return a function that builds layers, each made by a function, and a last one for classes."""

    def build():
        hidden = [make() for make in middle]
        model = keras.Sequential([keras.Input(shape), *hidden, layers.Dense(classes)])
        return compile_model(model, loss=loss or sparse_cross_entropy(), **settings)

    return build


def network(outputs=3, inputs=6, dropout=0.0):
    hidden = [layers.Dense(8, activation="tanh"), *([layers.Dropout(dropout)] if dropout else [])]
    return keras.Sequential([keras.Input((inputs,)), *hidden, layers.Dense(outputs)])


def sparse_cross_entropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def cross_entropies(labels, logits):
    """Return the loss of each example."""
    return keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)


def mean_loss(labels, logits):
    return ops.mean(cross_entropies(labels, logits))


class CustomStep(keras.Model):
    """A model with a `train_step` of its own, a classifier unless a program changes parts of it."""

    def __init__(self, net=None):
        super().__init__()
        self.net = net or network()

    def call(self, x, training=False):
        return self.net(x, training=training)

    def step_loss(self, x, y):
        return mean_loss(y, self(x, training=True))

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.step_loss(*data) if isinstance(data, tuple) else self.step_loss(data)
        self.update(tape, loss)
        return {"loss": loss}

    def update(self, tape, loss, weights=None, optimizer=None):
        """Apply the gradients of a loss."""
        weights = self.trainable_variables if weights is None else weights
        gradients = tape.gradient(loss, weights)
        (optimizer or self.optimizer).apply_gradients(zip(gradients, weights, strict=True))
