"""Draw how rounding grows in training, for `docs/explanation/what_stays_exact.md`.

    python -m tools.rounding docs/explanation/rounding.svg

trains a network for digits on one device and on four replicas, in float32 and in float64, and on
one device from first weights that are changed by 1e-7, in five ways, and compares all weights with
one device's after each step. Four logical CPUs are real replicas.
"""

import argparse
import contextlib
import pathlib

import keras
import matplotlib.pyplot as plt
import numpy as np
from keras import layers

from kdpkit import corpora, strategies
from kdpkit.training import replica_exact
from tools import learning_curves

EPOCHS = 12  # of 23 steps
SHOWN = (1, 10, 50, 100, 200, 276)  # steps that are printed
DISTURBED = 5  # runs


def build(images):
    """Return a network with augmentation, batch statistics and dropout."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input(images.train.images.shape[1:]),
            layers.Rescaling(1 / 255),
            layers.RandomTranslation(0.1, 0.1),
            layers.Conv2D(16, 3, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(images.classes, "softmax"),
        ]
    )
    model.compile(keras.optimizers.Adam(0.003), "sparse_categorical_crossentropy")
    return model


def flat_weights(model):
    """Return all weights of a model as one array of float64."""
    return np.concatenate([np.ravel(weight) for weight in model.get_weights()]).astype("float64")


def train(strategy, *, dtype="float32", disturbance=0.0, seed=0):
    """Return all weights before training and after each step."""
    images = corpora.load_images()
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = replica_exact(build(images))
    numbers = np.random.default_rng(seed)
    for weight in model.trainable_variables:
        signs = numbers.choice([-1, 1], weight.shape)
        weight.assign(weight.numpy() * (1 + disturbance * signs))
    weights = [flat_weights(model)]
    record = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_, **__: weights.append(flat_weights(model))
    )
    model.fit(*images.train, batch_size=64, epochs=EPOCHS, callbacks=[record], verbose=0)
    return np.stack(weights)


def differences(weights, one):
    """Return the largest difference of a weight by step, over the largest change of one so far."""
    changes = np.maximum.accumulate(np.abs(one - one[0]).max(axis=1))
    return np.abs(weights - one).max(axis=1)[1:] / changes[1:]


def draw(curves, file):
    """Plot the differences. Runs with the same label have one entry in the legend."""
    learning_curves.set_style()
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    for label, color, values in curves:
        width = 6 if label.startswith("1 device") else 1.5  # seen below the replicas' line
        steps = range(1, len(values) + 1)
        axes.semilogy(steps, values, color=color, label=label, linewidth=width)
    axes.set(xlabel="step", ylabel="difference to one device")
    lines = {line.get_label(): line for line in axes.lines}
    axes.legend(lines.values(), lines, frameon=False)
    learning_curves.save(figure, file)


def main(argv=None):
    """Train nine times, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("figure", type=pathlib.Path, help="the .svg file to write")
    file = parser.parse_args(argv).figure
    four = strategies.select_strategy("mirrored", devices=strategies.split_device("CPU", 4))
    one = strategies.select_strategy("one")
    colors = learning_curves.COLORS
    single, double = train(one), train(one, dtype="float64")
    runs = [
        ("1 device, first weights off by 1e-7", colors["one"], single, train(one, **changed))
        for changed in ({"disturbance": 1e-7, "seed": seed} for seed in range(DISTURBED))
    ]
    runs += [
        ("4 replicas", colors["exact"], single, train(four)),
        ("4 replicas, float64", colors["stock"], double, train(four, dtype="float64")),
    ]
    curves = [(label, color, differences(weights, base)) for label, color, base, weights in runs]
    print(f"{'step':36}", *(f"{step:6}" for step in SHOWN))
    for label, _, values in curves:
        print(f"{label:36}", *(f"{values[step - 1]:6.0e}" for step in SHOWN))
    draw(curves, file)


if __name__ == "__main__":
    main()
