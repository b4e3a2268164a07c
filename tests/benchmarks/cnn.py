"""Images a second of the CNN recipe, one device, against stock `fit` and the article's loop."""

import keras
import numpy as np
import tensorflow as tf

from kdpkit import corpora, pipelines, strategies
from kdpkit.training import TrainingLoop
from recipes import cnn_custom_loop
from tests.benchmarks.paired import compared, in_turns, seconds_of

BATCH = 64
EPOCHS = 2  # in a turn
_NOTE = (
    "At the end of some epochs TensorFlow's tuning of the input holds up stock `fit` and the "
    "article's loop for as long as the epoch took; ours has it switched off."
)


def rows(args):
    """Measure some epochs of each."""
    splits = corpora.load_images(args.images)
    images, labels = splits.train
    epochs = {
        "ours": ours(images, labels, splits.classes),
        "stock fit": stock(images, labels, splits.classes),
        "the article's loop": article(images, labels, splits.classes),
        "its convolutions alone": convolutions(images, splits.classes),
    }
    count = EPOCHS * (len(images) // BATCH * BATCH)
    contestants = {
        name: lambda epoch=epoch: count / seconds_of(lambda: [epoch() for _ in range(EPOCHS)])
        for name, epoch in epochs.items()
    }
    figures = in_turns(contestants, args.rounds or 7)
    goals = {"stock fit": (">=", 1.0), "the article's loop": (">=", 1.3)}
    goals |= {"its convolutions alone": None}
    return [
        compared(
            f"CNN, one device, against {name}",
            "images/s",
            figures["ours"],
            figures[name],
            goal=goal,
            note=_NOTE if name == "the article's loop" else "",
        )
        for name, goal in goals.items()
    ]


def build(images, classes):
    """Build the article's network."""
    keras.utils.set_random_seed(0)
    return cnn_custom_loop.build_model(images.shape[1:], classes)


def ours(images, labels, classes):
    """Return an epoch as `cnn_custom_loop.py` trains it."""
    data = pipelines.train_pipeline(
        tf.data.Dataset.from_tensor_slices((images, labels)), global_batch_size=BATCH
    )
    loop = TrainingLoop(
        build(images, classes),
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(),
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        steps_per_loop=10,
        jit=False,
    )
    return lambda: loop.fit(data, epochs=1, verbose=0)


def stock(images, labels, classes):
    """Return an epoch of `fit` on the usual pipeline."""
    data = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(10_000)
    data = data.batch(BATCH, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
    model = build(images, classes)
    model.compile(
        keras.optimizers.Adam(1e-3),
        keras.losses.SparseCategoricalCrossentropy(),
        metrics=["accuracy"],
    )
    return lambda: model.fit(data, verbose=0)


def article(images, labels, classes):
    """Return an epoch of the article's loop: floats and one-hot labels, a call for each batch."""
    strategy = strategies.select_strategy("mirrored", devices=1)
    floats = (images / 255).astype("float32")
    one_hot = np.eye(classes, dtype="float32")[labels]
    data = tf.data.Dataset.from_tensor_slices((floats, one_hot)).shuffle(len(images))
    data = data.batch(BATCH, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
    with strategy.scope():
        model = without_rescaling(images, classes)
        optimizer = keras.optimizers.Adam(1e-3)
        optimizer.build(model.trainable_variables)
        loss_of = keras.losses.CategoricalCrossentropy(reduction="none")
        accuracy = keras.metrics.CategoricalAccuracy()

    def step(x, y):
        with tf.GradientTape() as tape:
            predictions = model(x, training=True)
            loss = tf.nn.compute_average_loss(loss_of(y, predictions), global_batch_size=BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(y, predictions)
        return loss

    @tf.function
    def distributed_step(x, y):
        losses = strategy.run(step, args=(x, y))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    distributed = strategy.experimental_distribute_dataset(data)

    def epoch():
        total = 0.0
        for x, y in distributed:
            total += distributed_step(x, y)
        return float(total)

    return epoch


def without_rescaling(images, classes):
    """Build the network for images that are floats already."""
    layers = build(images, classes).layers
    return keras.Sequential([keras.Input(images.shape[1:]), *layers[1:]])


def convolutions(images, classes):
    """Return the convolutions of an epoch, forwards and back: what no loop around them can save."""
    model = build(images, classes)
    kinds = [layer for layer in model.layers if isinstance(layer, keras.layers.Conv2D)]
    inputs = [tf.random.normal((BATCH, *layer.input.shape[1:])) for layer in kinds]

    @tf.function
    def step(inputs):
        found = []
        for number, (layer, x) in enumerate(zip(kinds, inputs, strict=True)):
            kernel = tf.convert_to_tensor(layer.kernel)
            with tf.GradientTape() as tape:
                tape.watch((x, kernel))
                y = tf.nn.conv2d(x, kernel, layer.strides, layer.padding.upper())
            # Nothing asks for the gradient of the images. What is returned is computed.
            found += [y, tape.gradient(y, (x, kernel) if number else kernel, tf.ones_like(y))]
        return found

    def epoch():
        for _ in range(len(images) // BATCH):
            found = step(inputs)
        return found[0].numpy()

    return epoch
