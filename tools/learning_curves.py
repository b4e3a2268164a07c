"""Draw the figure of the documentation's first page: one training, on one device and on replicas.

    python -m tools.learning_curves docs/learning_curves.svg

trains a network for handwritten digits three times: with stock Keras on one device, and on four
replicas with stock Keras and with `replica_exact`. All begin with the same weights and read the
same batches. Four logical CPUs are real replicas.
"""

import argparse
import pathlib

import keras
import matplotlib.pyplot as plt
import tensorflow as tf
from keras import layers

from kdpkit import corpora, strategies
from kdpkit.training import replica_exact

EPOCHS, BATCH = 6, 8  # two examples for each replica
TEXT = "#757b85"  # this and the others are readable on a light and on a dark page
COLORS = {"one": "#9ea5ae", "exact": "#3b82f6", "stock": "#e8590c"}


def train(images, strategy, prepare=lambda model: model):
    """Train in a strategy's scope, and return the validation loss after each epoch."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = prepare(
            keras.Sequential(
                [
                    keras.Input(images.train.images.shape[1:]),
                    layers.Rescaling(1 / 255),
                    layers.Conv2D(16, 3, use_bias=False),
                    layers.BatchNormalization(),
                    layers.ReLU(),
                    layers.Flatten(),
                    layers.Dense(32, use_bias=False),
                    layers.BatchNormalization(),
                    layers.ReLU(),
                    layers.Dense(images.classes, "softmax"),
                ]
            )
        )
        model.compile("adam", "sparse_categorical_crossentropy")

    losses, loss = [], keras.losses.SparseCategoricalCrossentropy()

    def validate(*_):
        losses.append(float(loss(images.test.labels, model(images.test.images))))

    # Full batches: in stock Keras a replica without examples makes NaN. And one iterator of data,
    # because tf.data can stall for up to a minute when one is deleted.
    data = tf.data.Dataset.from_tensor_slices(tuple(images.train)).batch(BATCH, drop_remainder=True)
    model.fit(
        data.repeat(),
        steps_per_epoch=len(data),
        epochs=EPOCHS,
        callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=validate)],
        verbose=0,
    )
    return losses


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
    file = parser.parse_args(argv).figure
    one = strategies.select_strategy("one")
    four = strategies.select_strategy("mirrored", devices=strategies.split_device("CPU", 4))
    images = corpora.load_images()
    curves = {
        "one": ("1 device", train(images, one)),
        "exact": ("4 replicas, replica_exact", train(images, four, replica_exact)),
        "stock": ("4 replicas, stock Keras", train(images, four)),
    }
    for label, losses in curves.values():
        print(f"{label:26}", *(f"{loss:.4f}" for loss in losses))
    draw(curves, file)


if __name__ == "__main__":
    main()
