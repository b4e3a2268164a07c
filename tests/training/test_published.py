"""The published recipes beside ours, on the same data and from the same weights.

The loop is written as the article on customized training loops describes it, and the other is
KerasHub's guide to data-parallel BERT. Each either drifts from one device or crashes; ours do not.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from kdpkit import corpora, strategies
from kdpkit.training import TrainingLoop
from recipes import cnn_custom_loop
from tests.training import exactness

BATCH = 32
EVEN, UNEVEN = 2 * BATCH, 2 * BATCH + 9  # 9 rows last: 5 and 4
ROUNDING = 1e-4  # Adam divides the rounding of a gradient near zero by its size


def images(rows):
    """Give digits and one-hot labels, as the article has them."""
    x, y = corpora.load_images().train
    labels = np.eye(10, dtype="float32")[y]
    return tf.data.Dataset.from_tensor_slices((x[:rows], labels[:rows])).batch(BATCH)


def convnet():
    """Build the article's network, without dropout, so that runs compare."""
    keras.utils.set_random_seed(0)
    model = cnn_custom_loop.build_model((8, 8, 1), 10)
    model.layers[-2].rate = 0.0
    return model


def article(strategy, data, epochs):
    """Train as the article says: a mean over the global batch size, gradients summed by Keras."""
    with strategy.scope():
        model = convnet()
        optimizer = keras.optimizers.Adam()
        loss_of = keras.losses.CategoricalCrossentropy(reduction="none")

    def train_step(x, y):
        with tf.GradientTape() as tape:
            per_example = loss_of(y, model(x, training=True))
            loss = tf.nn.compute_average_loss(per_example, global_batch_size=BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def distributed_train_step(x, y):
        losses = strategy.run(train_step, args=(x, y))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    for _ in range(epochs):
        for x, y in strategy.experimental_distribute_dataset(data):
            distributed_train_step(x, y)
    return model.get_weights()


def fitted(data, epochs):
    """Train as Keras does on one device."""
    model = convnet()
    model.compile("adam", "categorical_crossentropy")
    model.fit(data, epochs=epochs, verbose=0)
    return model.get_weights()


def looped(strategy, data, epochs):
    """Train with our loop."""
    with strategy.scope():
        model = convnet()
    loop = TrainingLoop(model, optimizer="adam", loss="categorical_crossentropy", strategy=strategy)
    loop.fit(data, epochs=epochs, verbose=0)
    return model.get_weights()


def distance(weights, expected, start):
    """Give the largest difference of any weight over the largest change of any."""
    change = max(np.abs(a - b).max() for a, b in zip(expected, start, strict=True))
    return max(np.abs(a - b).max() for a, b in zip(weights, expected, strict=True)) / change


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_articles_loop_drifts_where_ours_does_not():
    strategy = strategies.select_strategy("mirrored", devices=2)
    start = convnet().get_weights()
    for rows in (EVEN, UNEVEN):
        expected = fitted(images(rows), epochs=2)
        ours = distance(looped(strategy, images(rows), epochs=2), expected, start)
        theirs = distance(article(strategy, images(rows), epochs=2), expected, start)
        assert ours < ROUNDING
        assert theirs < ROUNDING if rows == EVEN else theirs > 0.1


@pytest.mark.slow
def test_the_guides_fit_crashes_where_ours_does_not():
    """That ours gives what one device does is measured with all settings, in test_exact.py."""
    (setting,) = (s for s in exactness.SETTINGS if "KerasHub's guide" in s.name)
    assert {setting.promise_in(column) for column in ("replica_exact", "TrainingLoop")} == {"equal"}
    stock = exactness.measure_apart("stock Keras", 2, [setting.name])[setting.name]
    assert stock.verdict == "crash"
    assert "AddN" in stock.message  # no bool: its padding mask is one
