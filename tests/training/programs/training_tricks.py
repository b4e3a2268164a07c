"""Steps that do more than one gradient of one loss: teachers, memories, inner loops, surgery."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.training.programs import Program


def _data(rows=17, seed=0):
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, 6)).astype("float32")
    return {"x": x, "y": random.integers(0, 3, rows), "batch_size": 7}


def _unlabeled():
    return {"x": _data()["x"], "batch_size": 7}


def _growing():
    """Give examples of which the first batch has small gradients."""
    data = _data()
    data["x"][:7] *= 0.01
    return data


def _mlp(outputs, width=8, dropout=0.0):
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(width, activation="relu"),
            layers.Dropout(dropout),
            layers.Dense(outputs),
        ]
    )


def _cross_entropy(y, logits):
    losses = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
    return ops.mean(losses)


class BYOL(keras.Model):
    """An online network predicts what a slow copy of it makes of another view."""

    def __init__(self):
        super().__init__()
        self.online, self.target = _mlp(4), _mlp(4)
        self.predictor = keras.Sequential([keras.Input((4,)), layers.Dense(4)])
        self.target.set_weights(self.online.get_weights())
        self.target.trainable = False
        self.noise = layers.GaussianNoise(0.1)
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def call(self, x):
        return self.online(x)

    def train_step(self, x):
        one, two = self.noise(x, training=True), self.noise(x, training=True)
        with tf.GradientTape() as tape:
            loss = 0.0
            for seen, wanted in ((one, two), (two, one)):
                predicted = tf.math.l2_normalize(self.predictor(self.online(seen)), axis=-1)
                target = tf.math.l2_normalize(self.target(wanted), axis=-1)
                loss += tf.reduce_mean(2 - 2 * tf.reduce_sum(predicted * target, axis=-1))
        weights = self.online.trainable_weights + self.predictor.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        for slow, fast in zip(self.target.weights, self.online.weights, strict=True):
            slow.assign(0.9 * slow + 0.1 * fast)
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


class MoCo(keras.Model):
    """Contrasts with a queue of keys of the batches before."""

    def __init__(self, queue=16):
        super().__init__()
        self.encoder, self.slow = _mlp(4), _mlp(4)
        self.slow.set_weights(self.encoder.get_weights())
        self.slow.trainable = False
        keys = np.random.default_rng(2).normal(size=(queue, 4)).astype("float32")
        self.queue = tf.Variable(tf.math.l2_normalize(keys, axis=1), trainable=False)

    def call(self, x):
        return self.encoder(x)

    def train_step(self, x):
        keys = tf.math.l2_normalize(self.slow(x + 0.05), axis=1)
        with tf.GradientTape() as tape:
            queries = tf.math.l2_normalize(self.encoder(x), axis=1)
            positive = tf.reduce_sum(queries * keys, axis=1, keepdims=True)
            negative = tf.matmul(queries, self.queue, transpose_b=True)
            logits = tf.concat([positive, negative], axis=1) / 0.2
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(
                    tf.zeros(tf.shape(logits)[0], tf.int32), logits
                )
            )
        weights = self.encoder.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.queue.assign(tf.concat([keys, self.queue], axis=0)[: self.queue.shape[0]])
        for slow, fast in zip(self.slow.weights, self.encoder.weights, strict=True):
            slow.assign(0.99 * slow + 0.01 * fast)
        return {"loss": loss}


class CenterLoss(keras.Model):
    """Draws features to the centers of their classes, which follow the features."""

    def __init__(self):
        super().__init__()
        self.features = _mlp(4)
        self.head = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
        self.centers = self.add_weight(shape=(3, 4), initializer="zeros", trainable=False)

    def call(self, x):
        return self.head(self.features(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            features = self.features(x, training=True)
            centers = ops.take(self.centers, y, axis=0)
            drawn = ops.mean(ops.sum(ops.square(features - centers), axis=1))
            loss = _cross_entropy(y, self.head(features)) + 0.1 * drawn
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        member = ops.one_hot(y, 3)
        counts = ops.sum(member, axis=0)[:, None]
        away = ops.matmul(ops.transpose(member), features) - counts * self.centers
        self.centers.assign_add(0.5 * away / (1.0 + counts))
        return {"loss": loss}


class SAM(keras.Model):
    """Takes the gradient at the worst weights nearby."""

    def __init__(self, radius=0.05):
        super().__init__()
        self.net, self.radius = _mlp(3), radius

    def call(self, x, training=False):
        return self.net(x, training=training)

    def train_step(self, data):
        x, y = data
        weights = self.trainable_variables
        with tf.GradientTape() as tape:
            loss = self.compiled_loss_of(x, y)
        gradients = tape.gradient(loss, weights)
        norm = tf.linalg.global_norm(gradients)
        moves = [gradient * self.radius / (norm + 1e-12) for gradient in gradients]
        for weight, move in zip(weights, moves, strict=True):
            weight.assign_add(move)
        with tf.GradientTape() as tape:
            worst = self.compiled_loss_of(x, y)
        gradients = tape.gradient(worst, weights)
        for weight, move in zip(weights, moves, strict=True):
            weight.assign_sub(move)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": loss, "worst": worst}

    def compiled_loss_of(self, x, y):
        return self.compute_loss(x=x, y=y, y_pred=self(x, training=True))


class RDrop(keras.Model):
    """Two passes with other dropout, and a divergence between what they give."""

    def __init__(self):
        super().__init__()
        self.net = _mlp(3, dropout=0.3)

    def call(self, x, training=False):
        return self.net(x, training=training)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            one, two = (ops.log_softmax(self(x, training=True)) for _ in range(2))
            apart = ops.sum((ops.exp(one) - ops.exp(two)) * (one - two), axis=-1)
            loss = _cross_entropy(y, one) + _cross_entropy(y, two) + 0.5 * ops.mean(apart)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


class GradientSurgery(keras.Model):
    """Two tasks; what the gradient of one has against that of the other is taken out of it."""

    def __init__(self):
        super().__init__()
        self.shared = _mlp(4)
        self.heads = [keras.Sequential([keras.Input((4,)), layers.Dense(n)]) for n in (3, 1)]

    def call(self, x):
        features = self.shared(x)
        return [head(features) for head in self.heads]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            logits, number = self(x)
            classified = _cross_entropy(y, logits)
            regressed = ops.mean(ops.square(number[:, 0] - x[:, 0]))
        own = self.shared.trainable_variables
        kept = []
        for one, other in zip(
            tape.gradient(classified, own), tape.gradient(regressed, own), strict=True
        ):
            against = ops.minimum(ops.sum(one * other), 0.0)
            kept.append(one + other - against / (ops.sum(ops.square(other)) + 1e-12) * other)
        heads = self.heads[0].trainable_variables + self.heads[1].trainable_variables
        gradients = kept + tape.gradient(classified + regressed, heads)
        self.optimizer.apply(gradients, own + heads)
        return {"classified": classified, "regressed": regressed}


class ClippingRarely(keras.Model):
    """Clips gradients of kernels by hand, by more than the first of them have."""

    def __init__(self, clip):
        super().__init__()
        self.net, self.clip = _mlp(3), clip

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = _cross_entropy(y, self(x))
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients = [g if len(g.shape) == 1 else self.clip(g) for g in gradients]
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class MAML(keras.Model):
    """Learns weights from which one step on a task's examples goes far."""

    def __init__(self):
        super().__init__()
        self.kernel = self.add_weight(shape=(6, 3), initializer="glorot_uniform")
        self.bias = self.add_weight(shape=(3,), initializer="zeros")

    def call(self, x):
        return ops.matmul(x, self.kernel) + self.bias

    def train_step(self, data):
        x, y = data
        support, query = x, x[:, ::-1]
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = _cross_entropy(y, self(support))
            steps = inner.gradient(loss, [self.kernel, self.bias])
            kernel, bias = self.kernel - 0.5 * steps[0], self.bias - 0.5 * steps[1]
            after = _cross_entropy(y, ops.matmul(query, kernel) + bias)
        weights = self.trainable_variables
        self.optimizer.apply(outer.gradient(after, weights), weights)
        return {"before": loss, "after": after}


class Codebook(keras.Model):
    """A quantizing autoencoder whose codes are moving averages of what is assigned to them."""

    def __init__(self, codes=5):
        super().__init__()
        self.encoder = _mlp(3)
        self.decoder = keras.Sequential([keras.Input((3,)), layers.Dense(6)])
        start = np.random.default_rng(3).normal(size=(codes, 3)).astype("float32")
        self.codes = tf.Variable(start, trainable=False)
        self.counts = tf.Variable(tf.ones(codes), trainable=False)
        self.sums = tf.Variable(start, trainable=False)

    def call(self, x):
        return self.decoder(self.quantized(self.encoder(x))[0])

    def quantized(self, encoded):
        away = tf.reduce_sum((encoded[:, None] - self.codes[None]) ** 2, axis=-1)
        member = tf.one_hot(tf.argmin(away, axis=-1), self.codes.shape[0])
        return tf.matmul(member, self.codes), member

    def train_step(self, x):
        with tf.GradientTape() as tape:
            encoded = self.encoder(x)
            quantized, member = self.quantized(encoded)
            passed = encoded + tf.stop_gradient(quantized - encoded)
            error = tf.reduce_mean((self.decoder(passed) - x) ** 2)
            commitment = tf.reduce_mean((encoded - tf.stop_gradient(quantized)) ** 2)
            loss = error + 0.25 * commitment
        weights = self.encoder.trainable_variables + self.decoder.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.counts.assign(0.9 * self.counts + 0.1 * tf.reduce_sum(member, axis=0))
        self.sums.assign(0.9 * self.sums + 0.1 * tf.matmul(member, encoded, transpose_a=True))
        self.codes.assign(self.sums / self.counts[:, None])
        return {"loss": loss, "error": error}


class FreeBits(keras.Model):
    """A variational autoencoder whose divergence is free up to an amount."""

    def __init__(self, free):
        super().__init__()
        self.encoder, self.free = _mlp(4), free
        self.decoder = keras.Sequential([keras.Input((2,)), layers.Dense(6)])
        self.seeds = keras.random.SeedGenerator(7)

    def call(self, x):
        return self.decoder(self.encoder(x)[:, :2])

    def train_step(self, x):
        with tf.GradientTape() as tape:
            mean, log_variance = ops.split(self.encoder(x), 2, axis=-1)
            noise = keras.random.normal(ops.shape(mean), seed=self.seeds)
            decoded = self.decoder(mean + noise * ops.exp(0.5 * log_variance))
            divergence = -0.5 * ops.mean(
                ops.sum(1 + log_variance - ops.square(mean) - ops.exp(log_variance), axis=-1)
            )
            error = ops.mean(ops.sum(ops.square(decoded - x), axis=-1))
            loss = error + ops.maximum(divergence, self.free)
        self.optimizer.apply(
            tape.gradient(loss, self.trainable_variables), self.trainable_variables
        )
        return {"error": error, "divergence": divergence}


class Annealing(keras.Model):
    """A variational autoencoder whose divergence, a sum, counts more from step to step."""

    def __init__(self, weight):
        super().__init__()
        self.encoder = _mlp(4)
        self.decoder = keras.Sequential([keras.Input((2,)), layers.Dense(6)])
        self.kl_weight = keras.Variable(0.0, trainable=False) if weight == "variable" else None

    def call(self, x):
        return self.decoder(self.encoder(x)[:, :2])

    def train_step(self, x):
        weight = self.kl_weight
        if weight is None:
            weight = 1e-2 * ops.minimum(ops.cast(self.optimizer.iterations, "float32") / 4.0, 1.0)
        with tf.GradientTape() as tape:
            mean, log_variance = ops.split(self.encoder(x), 2, axis=-1)
            divergence = 1 + log_variance - ops.square(mean) - ops.exp(log_variance)
            error = ops.mean(ops.square(self.decoder(mean) - x))
            loss = error - 0.5 * weight * ops.sum(divergence)
        self.optimizer.apply(
            tape.gradient(loss, self.trainable_variables), self.trainable_variables
        )
        return {"error": error}


class _MoreDivergence(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):  # noqa: ARG002  # Keras'
        self.model.kl_weight.assign(1e-2 * epoch)


class InAFunction(keras.Model):
    """Its step is a `tf.function`, as in old examples."""

    def __init__(self):
        super().__init__()
        self.net = _mlp(3)

    def call(self, x):
        return self.net(x)

    @tf.function
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


class Classifier(keras.Model):
    """A model whose steps are its subclasses'."""

    def __init__(self):
        super().__init__()
        self.net = _mlp(3)

    def call(self, x):
        return self.net(x)


class ClippingEachExample(Classifier):
    """Clips the gradient of each example by itself, as private training does (Abadi et al.)."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
        jacobians = tape.jacobian(losses, self.trainable_variables)
        flat = [tf.reshape(j, (tf.shape(j)[0], -1)) for j in jacobians]
        norms = tf.sqrt(sum(tf.reduce_sum(tf.square(j), axis=1) for j in flat))
        scale = 1.0 / tf.maximum(norms, 1.0)
        number = tf.cast(tf.shape(norms)[0], norms.dtype)
        gradients = [tf.tensordot(scale, j, 1) / number for j in jacobians]
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": tf.reduce_mean(losses)}


class Contractive(Classifier):
    """Adds to the loss how much the outputs change with the inputs (Rifai et al. 2011)."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                logits = self(x, training=True)
            jacobian = inner.batch_jacobian(logits, x)
            penalty = tf.reduce_mean(tf.reduce_sum(tf.square(jacobian), axis=[1, 2]))
            loss = _cross_entropy(y, logits) + 0.1 * penalty
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss, "penalty": penalty}


class InputGradient(keras.Model):
    """Adds to a loss how much a function of it changes with the inputs, by batch statistics too."""

    def __init__(self, function):
        super().__init__()
        self.net = keras.Sequential([_mlp(4), layers.BatchNormalization(), layers.Dense(3)])
        self.cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.function = function

    def call(self, x, training=False):
        return self.net(x, training=training)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = self.cross_entropy(y, self(x, training=True))
                value = self.function(loss)
            gradient = inner.gradient(value, x)
            total = loss + 10.0 * tf.reduce_sum(gradient**2)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(total, weights), weights, strict=True))
        return {"loss": loss, "total": total}


def _compiled(make, optimizer="adam"):
    def build():
        model = make()
        has_loss = isinstance(model, SAM | InAFunction)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True) if has_loss else None
        model.compile(keras.optimizers.get(optimizer), loss)
        return model

    return build


def _program(name, make, data=_data, optimizer="adam"):
    return Program(name, _compiled(make, optimizer), data, backends=("tensorflow",))


PROGRAMS = [
    _program("BYOL with a moving average", BYOL, _unlabeled),
    _program("MoCo with a queue", MoCo, _unlabeled),
    _program("center loss", CenterLoss),
    _program("sharpness-aware minimization", SAM, optimizer="sgd"),
    _program("two passes of dropout", RDrop),
    _program("gradient surgery", GradientSurgery),
    _program(
        "gradients clipped by values they reach later",
        lambda: ClippingRarely(lambda gradient: ops.clip(gradient, -0.2, 0.2)),
        _growing,
        optimizer="sgd",
    ),
    _program(
        "gradients clipped by norms they reach later",
        lambda: ClippingRarely(lambda gradient: tf.clip_by_norm(gradient, 0.6)),
        _growing,
        optimizer="sgd",
    ),
    _program("meta-learning by gradients of gradients", MAML),
    _program(
        "input gradients through batch statistics", lambda: InputGradient(ops.abs), optimizer="sgd"
    ),
    _program(
        "input gradients of the logarithm of a loss",
        lambda: InputGradient(ops.log),
        optimizer="sgd",
    ),
    _program("a codebook of moving averages", Codebook, _unlabeled),
    _program("free bits", lambda: FreeBits(0.3), _unlabeled),
    _program("free bits that the first batches have not", lambda: FreeBits(2.0), _unlabeled),
    _program("divergence that counts more by step", lambda: Annealing("steps"), _unlabeled),
    _program(
        "divergence that a callback counts more",
        lambda: Annealing("variable"),
        lambda: _unlabeled() | {"callbacks": [_MoreDivergence()]},
    ),
    _program("a step that is a tf.function", InAFunction),
    _program("the gradient of each example is clipped", ClippingEachExample, optimizer="sgd"),
    _program("outputs that change little with the inputs", Contractive, optimizer="sgd"),
]
