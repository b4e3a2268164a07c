"""Draw the picture of the documentation's first page: one training, on one device and on replicas.

    python -m tests.learning_curves docs/learning_curves.svg

trains a network for digits three times, in a minute: with stock Keras on one device, and on four
replicas with stock Keras and with `replica_exact`. All begin with the same weights and read the
same batches. Four logical CPUs are real replicas.
"""

# ruff: noqa: T201 a command-line program prints

import argparse
import pathlib

import keras
import matplotlib.pyplot as plt
from keras import layers

from kdpkit import corpora, strategies
from kdpkit.training import replica_exact

EPOCHS = 12
COLORS = {  # in a light and in a dark browser
    "text": ("#1f2328", "#d8dade"),
    "one": ("#9aa0a8", "#8b9199"),
    "exact": ("#2f5fd0", "#82a8ff"),
    "stock": ("#c2410c", "#ff9950"),
}


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
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5)
        model.compile(optimizer, "sparse_categorical_crossentropy")
    trained = model.fit(
        *images.train,
        batch_size=32,  # the last batch of an epoch has 2 examples
        epochs=EPOCHS,
        validation_data=tuple(images.test),
        verbose=0,
    )
    return trained.history["val_loss"]


def draw(curves, file):
    """Write the curves as an SVG, whose colors are the browser's choice of light or dark."""
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "kdpkit", "font.size": 9})
    figure, axes = plt.subplots(figsize=(6.4, 2.8), layout="constrained")
    epochs = range(1, EPOCHS + 1)
    for name, style in (
        ("stock", {"lw": 1.8}),
        ("one", {"lw": 5, "solid_capstyle": "round"}),
        ("exact", {"lw": 1.5, "marker": "o", "ms": 3}),
    ):
        label, losses = curves[name]
        axes.plot(epochs, losses, color=COLORS[name][0], label=label, **style)
    axes.set(xlabel="epoch", ylabel="validation loss", xticks=epochs)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    text = COLORS["text"][0]
    for part in (axes.xaxis, axes.yaxis):
        part.label.set_color(text)
    axes.tick_params(colors=text, labelcolor=text)
    for item in (*axes.spines.values(), *axes.legend_.get_texts()):
        item.set_color(text)
    figure.savefig(file, transparent=True, metadata={"Date": None, "Creator": None})


def adapt_colors(svg):
    """Return a picture that is readable on a dark page too."""
    light = "; ".join(f"--{name}: {colors[0]}" for name, colors in COLORS.items())
    dark = "; ".join(f"--{name}: {colors[1]}" for name, colors in COLORS.items())
    for name, (color, _) in COLORS.items():
        svg = svg.replace(f": {color}", f": var(--{name})")
    style = f"svg {{ {light} }}\n@media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}\n"
    return svg.replace("<defs>", f"<defs>\n<style>\n{style}</style>", 1)


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
    picture.write_text(adapt_colors(picture.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
