"""Draw the figure of the documentation's first page: one training, on one device and on replicas.

    python -m tools.learning_curves docs/learning_curves.svg

trains a network that predicts the next character of Python's documentation three times: with stock
Keras on one device, and on four replicas with stock Keras and with `replica_exact`. All begin with
the same weights and read the same batches. Four logical CPUs are real replicas. On one device the
learning rate is the best of 20, 50 and 100 (`--learning-rate`).
"""

import argparse
import pathlib

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
from keras import layers

from kdpkit import corpora, strategies
from kdpkit.training import replica_exact

EPOCHS, LENGTH = 6, 32
TEXT = "#757b85"  # this and the others are readable on a light and on a dark page
COLORS = {"one": "#9ea5ae", "exact": "#3b82f6", "stock": "#e8590c"}


def sequences(lines, characters):
    """Return a dataset of batches of ASCII codes, each with the code of the next character."""
    text = "\n".join(lines).encode("ascii", "replace")[: characters + 1]
    codes = np.frombuffer(text, np.uint8).astype("int32")
    inputs, labels = (part.reshape(-1, LENGTH) for part in (codes[:-1], codes[1:]))
    options = tf.data.Options()
    options.autotune.enabled = False  # tf.data's tuning thread can stall the end of an epoch
    examples = tf.data.Dataset.from_tensor_slices((inputs, labels))
    examples = examples.shuffle(len(inputs), seed=0, reshuffle_each_iteration=False)
    return examples.batch(32).with_options(options)


def validation_losses(learning_rate, strategy, prepare=lambda model: model):
    """Train in a strategy's scope, and return the validation loss of each epoch."""
    text = corpora.load_text()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = prepare(
            keras.Sequential(
                [
                    keras.Input((LENGTH,), dtype="int32"),
                    layers.Embedding(128, 32),
                    layers.GRU(64, return_sequences=True),
                    layers.Dense(128),
                ]
            )
        )
        model.compile(
            keras.optimizers.SGD(learning_rate, global_clipnorm=0.05),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    trained = model.fit(
        sequences(text.train, 60_000),  # the last of 59 batches has 19 examples
        validation_data=sequences(text.validation, 19_200),
        epochs=EPOCHS,
        verbose=0,
    )
    return trained.history["val_loss"]


def set_style():
    """Set colors that are readable on a light and on a dark page."""
    names = ("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    plt.rcParams.update({**dict.fromkeys(names, TEXT), "legend.labelcolor": TEXT})
    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "kdpkit"})


def save(figure, file):
    """Write a figure as an SVG without a background: the same file for the same figure."""
    figure.savefig(file, transparent=True, metadata={"Date": None, "Creator": None})


def draw(curves, file):
    """Plot the validation losses."""
    set_style()
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    epochs = range(1, EPOCHS + 1)
    for name, style in (
        ("stock", {"linewidth": 2}),
        ("one", {"linewidth": 6, "solid_capstyle": "round"}),
        ("exact", {"linewidth": 1.5, "marker": "o", "markersize": 3}),
    ):
        label, losses = curves[name]
        axes.plot(epochs, losses, color=COLORS[name], label=label, **style)
    axes.set(xlabel="epoch", ylabel="validation loss (lower is better)", xticks=epochs)
    axes.legend(frameon=False)
    save(figure, file)


def main(argv=None):
    """Train three times, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("figure", type=pathlib.Path, help="the .svg file to write")
    parser.add_argument("--learning-rate", type=float, default=50.0)
    args = parser.parse_args(argv)
    one = strategies.select_strategy("one")
    four = strategies.select_strategy("mirrored", devices=strategies.split_device("CPU", 4))
    rate = args.learning_rate
    curves = {
        "stock": ("4 replicas, stock Keras", validation_losses(rate, four)),
        "one": ("1 device", validation_losses(rate, one)),
        "exact": ("4 replicas, replica_exact", validation_losses(rate, four, replica_exact)),
    }
    for label, losses in curves.values():
        print(f"{label:26}", *(f"{loss:.4f}" for loss in losses))
    draw(curves, args.figure)


if __name__ == "__main__":
    main()
