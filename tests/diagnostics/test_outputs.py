"""Outputs that a cross-entropy does not take, as people write them, and their correct twins."""

import keras
import numpy as np
import pytest

from kdpkit.diagnostics import check_input

layers, losses = keras.layers, keras.losses
X = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")
CLASSES = np.arange(32) % 4
ONE_HOT, TWO = np.eye(4, dtype="float32")[CLASSES], CLASSES % 2
SPARSE, CATEGORICAL, BINARY = (
    "sparse_categorical_crossentropy",
    "categorical_crossentropy",
    "binary_crossentropy",
)
SPARSE_LOGITS, CATEGORICAL_LOGITS, BINARY_LOGITS = (
    kind(from_logits=True)
    for kind in (
        losses.SparseCategoricalCrossentropy,
        losses.CategoricalCrossentropy,
        losses.BinaryCrossentropy,
    )
)


class Subclassed(keras.Model):
    def __init__(self, *ends):
        super().__init__()
        self.ends = [*ends]

    def call(self, x):
        for end in self.ends:
            x = end(x)
        return x


def sequential(*ends):
    return keras.Sequential([keras.Input((8,)), *ends])


def dense(units, activation=None):
    return layers.Dense(units, activation=activation)


def two_outputs(activation):
    inputs = keras.Input((8,))
    return keras.Model(inputs, [end(inputs) for end in (dense(4, activation), dense(1))])


class UsersLoss(losses.SparseCategoricalCrossentropy):
    pass


# What is wrong: the model, or the units and activation of its last layer; its loss, and the labels.
WRONG = {
    "no softmax": ((4, None), SPARSE, CLASSES),
    "no softmax, one-hot": ((4, None), CATEGORICAL, ONE_HOT),
    "no softmax, a class": ((4, None), losses.SparseCategoricalCrossentropy(), CLASSES),
    "no softmax, a function": ((4, None), losses.sparse_categorical_crossentropy, CLASSES),
    "no softmax, subclassed": (lambda: Subclassed(dense(4)), SPARSE, CLASSES),
    "no sigmoid": ((1, None), BINARY, TWO),
    "softmax and logits": ((4, "softmax"), SPARSE_LOGITS, CLASSES),
    "softmax layer and logits": (
        *(lambda: Subclassed(dense(4), layers.Softmax()), CATEGORICAL_LOGITS, ONE_HOT),
    ),
    "sigmoid and logits": ((1, "sigmoid"), BINARY_LOGITS, TWO),
    "sigmoid of four classes": ((4, "sigmoid"), SPARSE, CLASSES),
    "relu": ((4, "relu"), SPARSE, CLASSES),
    "relu and logits": ((4, "relu"), SPARSE_LOGITS, CLASSES),
    "tanh": ((1, "tanh"), BINARY, TWO),
    "softmax of one output": ((1, "softmax"), BINARY, TWO),
    "softmax of one output, one class": ((1, "softmax"), SPARSE, 0 * CLASSES),
    "one of two outputs": (lambda: two_outputs("softmax"), [SPARSE, BINARY], (CLASSES, TWO)),
    "one for many classes": ((1, "sigmoid"), SPARSE, CLASSES),
    "classes from 1": ((4, "softmax"), SPARSE, CLASSES + 1),
    "one-hot for sparse": ((4, "softmax"), SPARSE, ONE_HOT),
    "classes for one-hot": ((4, "softmax"), CATEGORICAL, CLASSES),
}
RIGHT = {
    "softmax": ((4, "softmax"), SPARSE, CLASSES),
    "softmax, one-hot": ((4, "softmax"), CATEGORICAL, ONE_HOT),
    "softmax layer": (lambda: sequential(dense(4), layers.Softmax()), SPARSE, CLASSES),
    "activation layer": (
        lambda: sequential(dense(4), layers.Activation("softmax")),
        *(losses.SparseCategoricalCrossentropy(), CLASSES),
    ),
    "softmax, subclassed": (lambda: Subclassed(dense(4, "softmax")), SPARSE, CLASSES),
    "in half precision": (
        lambda: sequential(layers.Dense(4, activation="softmax", dtype="mixed_bfloat16")),
        *(SPARSE, CLASSES),
    ),
    "sigmoid": ((1, "sigmoid"), BINARY, TWO),
    "sigmoid, several labels": ((4, "sigmoid"), BINARY, ONE_HOT),
    "logits": ((4, None), SPARSE_LOGITS, CLASSES),
    "logits, subclassed": (lambda: Subclassed(dense(4)), CATEGORICAL_LOGITS, ONE_HOT),
    "binary logits": ((1, None), BINARY_LOGITS, TWO),
    "logits that begin at zero": (
        lambda: sequential(layers.Dense(1, kernel_initializer="zeros")),
        *(BINARY_LOGITS, TWO),
    ),
    "relu in a regression": ((1, "relu"), "mse", TWO),
    "two outputs": (lambda: two_outputs("softmax"), [SPARSE, "mse"], (CLASSES, TWO)),
    "a loss of one's own": (
        *((4, None), lambda y, x: losses.sparse_categorical_crossentropy(y, x), CLASSES),
    ),
    "a class of one's own": ((4, None), UsersLoss(), CLASSES),
    "softmax along another axis": (
        lambda: sequential(dense(6), layers.Reshape((2, 3)), layers.Softmax(axis=1)),
        losses.CategoricalCrossentropy(axis=1),
        np.eye(2, dtype="float32")[np.arange(96) % 2].reshape(32, 3, 2).transpose(0, 2, 1),
    ),
    "softmax by operations": (
        lambda: sequential(
            dense(4), layers.Lambda(lambda x: x / keras.ops.sum(x, -1, keepdims=True) * 0 + 0.25)
        ),
        *(SPARSE, CLASSES),
    ),
}


def report(make, loss, y):
    model = make() if callable(make) else sequential(dense(*make))
    model.compile("sgd", loss)
    return check_input((X, y), model=model)


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_what_the_loss_does_not_take_is_found(case):
    found = report(*case)
    assert not found.clean
    assert {finding.rule for finding in found.findings} <= {"outputs", "labels", "step"}
    assert max(map(len, str(found).splitlines())) <= 80


@pytest.mark.parametrize("case", RIGHT.values(), ids=RIGHT)
def test_what_the_loss_takes_is_not(case):
    found = report(*case)
    assert found.clean, found
