"""Training loops as public guides have them, in small: each is unchanged but for its decorator.

A loop is a function of the decorator: `tf.function` on one device, `replica_exact` on replicas. It
yields the variables before it trains them, and then what its steps have returned.
"""

import functools

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

LOOPS = {}
RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.normal(size=(12, 8, 8, 2)).astype("float32")
LABELS = RANDOM.integers(0, 3, 12)
CROSS_ENTROPY = keras.losses.BinaryCrossentropy(from_logits=True)


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


def convolution(filters, strides=2, layer=layers.Conv2D):
    return layer(filters, 3, strides, padding="same", use_bias=False)


def discriminator(shape=(8, 8, 2)):
    normalized = (
        convolution(4),
        layers.BatchNormalization(),
        layers.LeakyReLU(),
        layers.Dropout(0.3),
    )
    return keras.Sequential([keras.Input(shape), *normalized, layers.Flatten(), layers.Dense(1)])


def image_to_image(channels=2):
    """Build a U-Net of one level."""
    inputs = keras.Input((8, 8, channels))
    down = layers.LeakyReLU()(layers.BatchNormalization()(convolution(4)(inputs)))
    up = layers.Dropout(0.2)(convolution(4, layer=layers.Conv2DTranspose)(down))
    outputs = layers.Conv2D(2, 3, padding="same", activation="tanh")
    return keras.Model(inputs, outputs(layers.Concatenate()([up, inputs])))


def generator():
    middle = layers.Dense(16 * 4, use_bias=False), layers.BatchNormalization(), layers.LeakyReLU()
    last = convolution(2, layer=layers.Conv2DTranspose), layers.Activation("tanh")
    return keras.Sequential([keras.Input((5,)), *middle, layers.Reshape((4, 4, 4)), *last])


def real_or_fake(real, fake):
    return CROSS_ENTROPY(tf.ones_like(real), real) + CROSS_ENTROPY(tf.zeros_like(fake), fake)


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
    """Metrics, a loss of a layer, and a step that evaluates."""
    normalized = convolution(4), layers.BatchNormalization(), layers.Activation("relu")
    head = layers.Dropout(0.4), layers.Dense(3, kernel_regularizer="l2", activity_regularizer="l2")
    model = keras.Sequential([keras.Input((8, 8, 2)), *normalized, layers.Flatten(), *head])
    optimizer, loss_fn = sgd(), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    train_metric, val_metric = (keras.metrics.SparseCategoricalAccuracy() for _ in range(2))
    yield model.variables

    @decorate
    def train_step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss_value = loss_fn(y, logits) + sum(model.losses)
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
def dcgan(decorate):
    g, d, g_optimizer, d_optimizer = generator(), discriminator(), sgd(), sgd()
    seed = keras.random.SeedGenerator(3)
    yield g.variables + d.variables

    @decorate
    def train_step(images):
        noise = keras.random.normal([tf.shape(images)[0], 5], seed=seed)
        with tf.GradientTape() as gen_tape, tf.GradientTape() as disc_tape:
            generated = g(noise, training=True)
            real, fake = d(images, training=True), d(generated, training=True)
            gen_loss, disc_loss = CROSS_ENTROPY(tf.ones_like(fake), fake), real_or_fake(real, fake)
        update(g_optimizer, gen_tape, gen_loss, g)
        update(d_optimizer, disc_tape, disc_loss, d)
        return gen_loss, disc_loss

    outputs = [train_step(images) for images, _ in batches()]
    yield [*outputs, g(tf.ones((2, 5)), training=False)]


@loop
def cyclegan(decorate):
    """Two generators and two discriminators, with one persistent tape."""
    g, f = image_to_image(), image_to_image()
    dx, dy = discriminator(), discriminator()
    optimizers = [sgd() for _ in range(4)]
    yield [v for model in (g, f, dx, dy) for v in model.variables]

    @decorate
    def train_step(real_x, real_y):
        with tf.GradientTape(persistent=True) as tape:
            fake_y, fake_x = g(real_x, training=True), f(real_y, training=True)
            cycled = f(fake_y, training=True), g(fake_x, training=True)
            cycle_loss = sum(
                tf.reduce_mean(tf.abs(real - again))
                for real, again in zip((real_x, real_y), cycled, strict=True)
            )
            same = tf.reduce_mean(tf.abs(real_y - g(real_y, training=True)))
            judged_x, judged_y = dx(fake_x, training=True), dy(fake_y, training=True)
            g_loss = CROSS_ENTROPY(tf.ones_like(judged_y), judged_y) + 10 * cycle_loss + 5 * same
            f_loss = CROSS_ENTROPY(tf.ones_like(judged_x), judged_x) + 10 * cycle_loss
            dx_loss = 0.5 * real_or_fake(dx(real_x, training=True), judged_x)
            dy_loss = 0.5 * real_or_fake(dy(real_y, training=True), judged_y)
        losses = g_loss, f_loss, dx_loss, dy_loss
        for optimizer, loss, model in zip(optimizers, losses, (g, f, dx, dy), strict=True):
            update(optimizer, tape, loss, model)
        return losses

    outputs = [train_step(x, x[:, ::-1]) for x, _ in batches()]
    yield outputs


@loop
def pix2pix(decorate):
    """A discriminator of pairs, and a step counter that a summary would take."""
    g, d, g_optimizer, d_optimizer = image_to_image(), discriminator((8, 8, 4)), sgd(), sgd()
    yield g.variables + d.variables

    @decorate
    def train_step(input_image, target, step):
        with tf.GradientTape() as gen_tape, tf.GradientTape() as disc_tape:
            output = g(input_image, training=True)
            real = d(tf.concat([input_image, target], -1), training=True)
            fake = d(tf.concat([input_image, output], -1), training=True)
            l1 = tf.reduce_mean(tf.abs(target - output))
            gen_loss = CROSS_ENTROPY(tf.ones_like(fake), fake) + 100 * l1
            disc_loss = real_or_fake(real, fake)
        update(g_optimizer, gen_tape, gen_loss, g)
        update(d_optimizer, disc_tape, disc_loss, d)
        return l1, step + 1

    numbered = batches().repeat(2).enumerate()
    outputs = [train_step(x, x[:, :, ::-1], step) for step, (x, _) in numbered]
    yield outputs


@loop
def ddpm(decorate):
    """Times and noise are drawn for each image; an average of the weights is kept by hand."""
    images, times = keras.Input((8, 8, 2)), keras.Input((), dtype="int32")
    shift = layers.Reshape((1, 1, 4))(layers.Embedding(10, 4)(times))
    hidden = layers.Activation("silu")(layers.Conv2D(4, 3, padding="same")(images) + shift)
    outputs = layers.Conv2D(2, 3, padding="same")(layers.GroupNormalization(2)(hidden))
    network = keras.Model([images, times], outputs)
    average = keras.models.clone_model(network)
    average.set_weights(network.get_weights())
    optimizer, seed = sgd(), keras.random.SeedGenerator(4)
    kept = tf.math.cumprod(1 - tf.linspace(0.01, 0.3, 10))
    yield network.variables + average.variables

    @decorate
    def train_step(images):
        count = tf.shape(images)[0]
        t = keras.random.randint((count,), 0, 10, seed=seed)
        noise = keras.random.normal(tf.shape(images), seed=seed)
        alpha = tf.reshape(tf.gather(kept, t), (-1, 1, 1, 1))
        with tf.GradientTape() as tape:
            noisy = tf.sqrt(alpha) * images + tf.sqrt(1 - alpha) * noise
            loss = tf.reduce_mean((noise - network([noisy, t], training=True)) ** 2)
        update(optimizer, tape, loss, network)
        for slow, weight in zip(average.weights, network.weights, strict=True):
            slow.assign(0.9 * slow + 0.1 * weight)
        return loss

    outputs = [train_step(images) for _ in range(2) for images, _ in batches()]
    yield outputs


@loop
def wgan_gp(decorate):
    """Several updates of the critic in a step, with a penalty on its gradient."""
    stack = layers.Conv2D(4, 3, 2), layers.LeakyReLU(), layers.Flatten(), layers.Dense(1)
    critic, g = keras.Sequential([keras.Input((8, 8, 2)), *stack]), generator()
    c_optimizer, g_optimizer, seed = sgd(0.01), sgd(0.01), keras.random.SeedGenerator(5)

    def noise(count):
        return keras.random.normal((count, 5), seed=seed)

    def penalty(real, fake):
        alpha = keras.random.uniform((tf.shape(real)[0], 1, 1, 1), seed=seed)
        between = real + alpha * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            score = critic(between, training=True)
        gradient = tape.gradient(score, [between])[0]
        norm = tf.sqrt(tf.reduce_sum(tf.square(gradient), axis=[1, 2, 3]))
        return tf.reduce_mean((norm - 1.0) ** 2)

    yield critic.variables + g.variables

    @decorate
    def train_step(real):
        count = tf.shape(real)[0]
        for _ in range(2):
            with tf.GradientTape() as tape:
                fake = g(noise(count), training=True)
                cost = tf.reduce_mean(critic(fake, training=True))
                cost -= tf.reduce_mean(critic(real, training=True))
                c_loss = cost + 10.0 * penalty(real, fake)
            update(c_optimizer, tape, c_loss, critic)
        with tf.GradientTape() as tape:
            g_loss = -tf.reduce_mean(critic(g(noise(count), training=True), training=True))
        update(g_optimizer, tape, g_loss, g)
        return {"c_loss": c_loss, "g_loss": g_loss}

    outputs = [train_step(images) for images, _ in batches()]
    yield outputs


@loop
def simclr(decorate):
    """Every image is compared with all others of the batch."""
    stack = convolution(4), layers.BatchNormalization(), layers.Activation("relu")
    encoder = keras.Sequential([keras.Input((8, 8, 2)), *stack, layers.Flatten(), layers.Dense(6)])
    augment = keras.Sequential([layers.RandomFlip(seed=1), layers.GaussianNoise(0.1, seed=2)])
    optimizer, accuracy = sgd(), keras.metrics.SparseCategoricalAccuracy()
    yield encoder.variables

    @decorate
    def train_step(images):
        first, second = augment(images, training=True), augment(images, training=True)
        with tf.GradientTape() as tape:
            a, b = (ops.normalize(encoder(x, training=True), axis=1) for x in (first, second))
            similarities = ops.matmul(a, ops.transpose(b)) / 0.1
            labels = ops.arange(ops.shape(a)[0])
            losses = keras.losses.sparse_categorical_crossentropy(
                ops.concatenate([labels, labels]),
                ops.concatenate([similarities, ops.transpose(similarities)]),
                from_logits=True,
            )
            loss = tf.reduce_mean(losses)
        update(optimizer, tape, loss, encoder)
        accuracy.update_state(labels, similarities)
        return loss

    outputs = [train_step(images) for images, _ in batches()]
    yield [*outputs, accuracy.result()]


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


@loop
def vae(decorate):
    """A model with methods of its own, and a loss for every image."""

    class CVAE(keras.Model):
        def __init__(self):
            super().__init__()
            stack = layers.Conv2D(4, 3, 2, activation="relu"), layers.Flatten(), layers.Dense(6)
            self.encoder, self.decoder = (
                keras.Sequential(stack),
                keras.Sequential(
                    [
                        layers.Dense(64, "relu"),
                        layers.Reshape((4, 4, 4)),
                        convolution(2, layer=layers.Conv2DTranspose),
                    ]
                ),
            )
            self.seed = keras.random.SeedGenerator(7)
            self.encoder.build((None, 8, 8, 2))
            self.decoder.build((None, 3))

    model, optimizer, mean_loss = CVAE(), sgd(), keras.metrics.Mean()

    def compute_loss(x):
        mean, logvar = tf.split(model.encoder(x), 2, axis=1)
        z = keras.random.normal(tf.shape(mean), seed=model.seed) * tf.exp(logvar * 0.5) + mean
        likelihood = -tf.reduce_sum((model.decoder(z) - x) ** 2, axis=[1, 2, 3])
        divergence = 0.5 * tf.reduce_sum(tf.exp(logvar) + mean**2 - 1 - logvar, axis=1)
        return -tf.reduce_mean(likelihood - divergence)

    yield [*model.encoder.variables, *model.decoder.variables]

    @decorate
    def train_step(x):
        with tf.GradientTape() as tape:
            loss = compute_loss(x)
        variables = model.encoder.trainable_variables + model.decoder.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    for x, _ in batches():
        train_step(x / 8)
    for x, _ in batches():
        mean_loss(decorate(compute_loss)(x / 8))
    yield [mean_loss.result()]


@loop
def gan_of_several_functions(decorate):
    """A class whose methods are decorated, in either order, and that calls them in turn."""

    class Trainer:
        def __init__(self):
            self.g, self.d = generator(), discriminator()
            self.optimizers = sgd(), sgd()
            self.seed = keras.random.SeedGenerator(8)

        @decorate
        def train_discriminator(self, images, noise):
            with tf.GradientTape() as tape:
                fake = self.d(self.g(noise, training=False), training=True)
                loss = real_or_fake(self.d(images, training=True), fake)
            update(self.optimizers[0], tape, loss, self.d)
            return loss

        @decorate
        @tf.function
        def train_generator(self, noise, training=True):
            with tf.GradientTape() as tape:
                fake = self.d(self.g(noise, training=training), training=training)
                loss = CROSS_ENTROPY(tf.ones_like(fake), fake)
            if loss > 0.0:  # by AutoGraph
                update(self.optimizers[1], tape, loss, self.g)
            return loss

    trainer, outputs = Trainer(), []
    yield trainer.g.variables + trainer.d.variables
    trainer.optimizers[1].build(trainer.g.trainable_variables)
    for images, _ in batches():
        noise = keras.random.normal((len(images), 5), seed=trainer.seed)
        outputs.append(trainer.train_discriminator(images, noise))
        outputs.append(trainer.train_generator(noise=noise))
    yield outputs
