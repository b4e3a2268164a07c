"""Draw the picture of the documentation's first page: one training, on one device and on replicas.

    python -m tools.learning_curves docs/learning_curves.svg

trains a network for digits three times, in a few minutes: with stock Keras on one device, and on
four replicas with stock Keras and with `replica_exact`. All begin with the same weights and read
the same batches. Four logical CPUs are real replicas.
"""

import argparse
import pathlib

import keras
import matplotlib.pyplot as plt
from keras import layers

from kdpkit import corpora, strategies
from kdpkit.training import replica_exact

EPOCHS = 12
TEXT = "#757b85"  # this and the others are readable on a light and on a dark page
COLORS = {"one": "#9ea5ae", "exact": "#3b82f6", "stock": "#e8590c"}


def validation_losses(strategy, prepare=lambda model: model):
    """Train in a strategy's scope, and return the validation loss of each epoch."""
    images = corpora.load_images()
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
                    layers.Dropout(0.5),
                    layers.Dense(images.classes, "softmax"),
                ]
            )
        )
        optimizer = keras.optimizers.SGD(0.03, momentum=0.9, global_clipnorm=0.5)
        model.compile(optimizer, "sparse_categorical_crossentropy")
    trained = model.fit(
        *images.train,
        batch_size=64,  # the last batch of an epoch has 34 examples
        epochs=EPOCHS,
        validation_data=tuple(images.test),
        verbose=0,
    )
    return trained.history["val_loss"]


def draw(curves, file):
    """Write the curves as an SVG without a background."""
    colors = dict.fromkeys(
        ("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), TEXT
    )
    plt.rcParams.update(
        {**colors, "svg.fonttype": "none", "svg.hashsalt": "kdpkit", "axes.spines.top": False}
    )
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    axes.spines.right.set_visible(False)
    epochs = range(1, EPOCHS + 1)
    for name, style in (
        ("stock", {"linewidth": 2}),
        ("one", {"linewidth": 6, "solid_capstyle": "round"}),
        ("exact", {"linewidth": 1.5, "marker": "o", "markersize": 3}),
    ):
        label, losses = curves[name]
        axes.plot(epochs, losses, color=COLORS[name], label=label, **style)
    axes.set(xlabel="epoch", ylabel="validation loss", xticks=epochs)
    axes.legend(frameon=False, labelcolor=TEXT)
    figure.savefig(file, transparent=True, metadata={"Date": None, "Creator": None})


def main(argv=None):
    """Train three times, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("picture", type=pathlib.Path, help="the .svg file to write")
    picture = parser.parse_args(argv).picture
    cpus = strategies.split_device("CPU", 4)
    one = strategies.select_strategy("one")
    four = strategies.select_strategy("mirrored", devices=cpus)
    curves = {
        "one": ("one device", validation_losses(one)),
        "exact": ("4 replicas, replica_exact", validation_losses(four, replica_exact)),
        "stock": ("4 replicas, stock Keras", validation_losses(four)),
    }
    for label, losses in curves.values():
        print(f"{label:26}", *(f"{loss:.4f}" for loss in losses))
    draw(curves, picture)


if __name__ == "__main__":
    main()
