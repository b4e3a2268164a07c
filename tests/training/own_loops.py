"""Training loops as public guides have them, in small: each is unchanged but for its decorator.

A loop is a function of the decorator: `tf.function` on one device, `replica_exact` on replicas. It
yields the variables before it trains them, and then what its steps have returned.
"""

import functools

import keras
import numpy as np
import tensorflow as tf
from keras import layers

LOOPS = {}
RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.normal(size=(12, 8, 8, 2)).astype("float32")
LABELS = RANDOM.integers(0, 3, 12)


def loop(function):
    LOOPS[function.__name__] = function
    return function


def batches(*arrays, size=7):
    """Return batches of 7 and 5 examples."""
    return tf.data.Dataset.from_tensor_slices(arrays or (IMAGES, LABELS)).batch(size)


def sgd(rate=0.05):
    return keras.optimizers.SGD(rate, momentum=0.5)


def update(optimizer, tape, loss, model):
    variables = model.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))


@loop
def tensorflow_custom_training(decorate):
    """A module with variables of its own, updated without an optimizer."""

    class Linear(tf.Module):
        def __init__(self):
            super().__init__()
            self.w, self.b = tf.Variable(tf.ones((2, 1)) / 9), tf.Variable([0.1])

        def __call__(self, x):
            return x @ self.w + self.b

    model = Linear()
    yield model.variables

    @decorate
    def train(x, y, learning_rate):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - model(x)))
        dw, db = tape.gradient(loss, [model.w, model.b])
        model.w.assign_sub(learning_rate * dw)
        model.b.assign_sub(learning_rate * db)
        return loss

    data = batches(IMAGES[:, 0, 0], IMAGES[:, 1, 1, :1])
    yield [train(x, y, 0.1) for _ in range(2) for x, y in data]


@loop
def keras_from_scratch(decorate):
    """Metrics, a loss of a layer, a step that AutoGraph reads, and one that evaluates."""
    convolution = layers.Conv2D(4, 3, 2, padding="same", use_bias=False)
    normalized = convolution, layers.BatchNormalization(), layers.Activation("relu")
    head = layers.Dropout(0.4), layers.Dense(3, kernel_regularizer="l2", activity_regularizer="l2")
    model = keras.Sequential([keras.Input((8, 8, 2)), *normalized, layers.Flatten(), *head])
    optimizer, loss_fn = sgd(), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    train_metric, val_metric = (keras.metrics.SparseCategoricalAccuracy() for _ in range(2))
    optimizer.build(model.trainable_variables)
    yield model.variables

    @decorate
    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss_value = loss_fn(y, logits) + sum(model.losses)
        if loss_value > 0.0:
            update(optimizer, tape, loss_value, model)
        train_metric.update_state(y, logits)
        return loss_value

    @decorate
    def test_step(x, y):
        val_metric.update_state(y, model(x, training=False))

    shown = []
    for _ in range(2):
        for step, (x, y) in enumerate(batches()):
            loss_value = train_step(x, y)
            if step % 2 == 0:
                shown.append(float(loss_value))
        for x, y in batches(size=5):
            test_step(x, y)
        shown += [train_metric.result(), val_metric.result()]
        train_metric.reset_state()
        val_metric.reset_state()
    yield shown


@loop
def fixmatch(decorate):
    """Five unlabeled examples for each labeled one, of which the sure ones count."""
    model = keras.Sequential([keras.Input((8, 8, 2)), layers.Flatten(), layers.Dense(3)])
    optimizer = sgd()
    yield model.variables

    @decorate
    @functools.partial(tf.function, reduce_retracing=True)  # all lengths are unknown from batch two
    def train_step(x, y, weak, strong):
        with tf.GradientTape() as tape:
            sparse = tf.nn.sparse_softmax_cross_entropy_with_logits
            loss = tf.reduce_mean(sparse(y, model(x, training=True)))
            guesses = tf.nn.softmax(model(weak, training=True))
            is_sure = tf.reduce_max(guesses, axis=1) > 0.4
            labels = tf.boolean_mask(tf.argmax(guesses, axis=1), is_sure)
            logits = tf.boolean_mask(model(strong, training=True), is_sure)
            loss += tf.reduce_sum(sparse(labels, logits)) / tf.cast(len(weak), tf.float32)
        update(optimizer, tape, loss, model)
        return loss

    outputs = []
    for x, y in batches():
        unlabeled = tf.repeat(x, 5, axis=0)
        outputs.append(train_step(x, y, unlabeled, unlabeled[:, ::-1]))
    yield outputs


@loop
def dqn(decorate):
    """Batches that NumPy samples from a replay memory, and a target network."""

    def q_network():
        return keras.Sequential([keras.Input((4,)), layers.Dense(8, "relu"), layers.Dense(2)])

    online, target = q_network(), q_network()
    target.set_weights(online.get_weights())
    optimizer, huber = keras.optimizers.SGD(0.1, clipnorm=1.0), keras.losses.Huber()
    random = np.random.default_rng(1)
    memory = random.normal(size=(2, 30, 4)).astype("float32"), random.integers(0, 2, 30)
    yield online.variables + target.variables

    @decorate
    def act(state):
        return tf.argmax(online(state), axis=1)

    @decorate
    def learn(states, actions, rewards, next_states, done):
        future = tf.reduce_max(target(next_states), axis=1)
        updated = rewards + 0.9 * future * (1 - done)
        masks = tf.one_hot(actions, 2)
        with tf.GradientTape() as tape:
            q_action = tf.reduce_sum(tf.multiply(online(states), masks), axis=1)
            loss = huber(updated, q_action)
        update(optimizer, tape, loss, online)
        return loss

    outputs = []
    for frame in range(5):
        outputs.append(act(memory[0][0][frame : frame + 1]))
        chosen = random.choice(30, size=7)
        rewards = random.normal(size=7).astype("float32")
        states, next_states = memory[0][:, chosen]
        done = (rewards > 1).astype("float32")
        outputs.append(learn(states, memory[1][chosen], rewards, next_states, done))
        if frame % 3 == 2:
            target.set_weights(online.get_weights())
    yield outputs
