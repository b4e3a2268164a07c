"""Embeddings that are compared within a batch: contrastive, siamese and metric learning."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.training.programs import Program


def _images(rows=17, seed=0):
    return np.random.default_rng(seed).uniform(size=(rows, 8, 8, 3)).astype("float32")


def _labels(classes=3, rows=17):
    return np.random.default_rng(1).integers(0, classes, rows)


def _unlabeled():
    return {"x": _images(), "batch_size": 7}


def _labeled():
    return {"x": _images(), "y": _labels(), "batch_size": 7}


def _encoder(width=8):
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(width, kernel_size=3, strides=2, activation="relu"),
            layers.Conv2D(width, kernel_size=3, strides=2, activation="relu"),
            layers.Flatten(),
            layers.Dense(width, activation="relu"),
        ],
        name="encoder",
    )


def _augmenter():
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.RandomFlip("horizontal"),
            layers.RandomTranslation(0.2, 0.2),
            layers.RandomZoom((-0.3, 0.0), (-0.3, 0.0)),
        ],
        name="augmenter",
    )


class SimCLR(keras.Model):
    """Contrastive pretraining with a linear probe beside it."""

    def __init__(self, temperature=0.1):
        super().__init__()
        self.temperature = temperature
        self.augmenter = _augmenter()
        self.encoder = _encoder()
        self.projection_head = keras.Sequential(
            [keras.Input((8,)), layers.Dense(8, activation="relu"), layers.Dense(8)]
        )
        self.linear_probe = keras.Sequential([keras.Input((8,)), layers.Dense(3)])

    def compile(self, contrastive_optimizer, probe_optimizer, **kwargs):
        super().compile(**kwargs)
        self.contrastive_optimizer = contrastive_optimizer
        self.probe_optimizer = probe_optimizer
        self.probe_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.contrastive_loss_tracker = keras.metrics.Mean(name="c_loss")
        self.probe_loss_tracker = keras.metrics.Mean(name="p_loss")
        self.probe_accuracy = keras.metrics.SparseCategoricalAccuracy(name="p_acc")

    @property
    def metrics(self):
        return [self.contrastive_loss_tracker, self.probe_loss_tracker, self.probe_accuracy]

    def contrastive_loss(self, projections_1, projections_2):
        projections_1 = ops.normalize(projections_1, axis=1)
        projections_2 = ops.normalize(projections_2, axis=1)
        similarities = ops.matmul(projections_1, ops.transpose(projections_2)) / self.temperature
        labels = ops.arange(ops.shape(projections_1)[0])
        loss_1_2 = keras.losses.sparse_categorical_crossentropy(
            labels, similarities, from_logits=True
        )
        loss_2_1 = keras.losses.sparse_categorical_crossentropy(
            labels, ops.transpose(similarities), from_logits=True
        )
        return ops.mean(loss_1_2 + loss_2_1) / 2

    def train_step(self, data):
        images, labels = data
        with tf.GradientTape() as tape:
            features_1 = self.encoder(self.augmenter(images, training=True), training=True)
            features_2 = self.encoder(self.augmenter(images, training=True), training=True)
            contrastive_loss = self.contrastive_loss(
                self.projection_head(features_1, training=True),
                self.projection_head(features_2, training=True),
            )
        weights = self.encoder.trainable_weights + self.projection_head.trainable_weights
        gradients = tape.gradient(contrastive_loss, weights)
        self.contrastive_optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.contrastive_loss_tracker.update_state(contrastive_loss)

        with tf.GradientTape() as tape:
            class_logits = self.linear_probe(self.encoder(images, training=False), training=True)
            probe_loss = self.probe_loss(labels, class_logits)
        weights = self.linear_probe.trainable_weights
        gradients = tape.gradient(probe_loss, weights)
        self.probe_optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.probe_loss_tracker.update_state(probe_loss)
        self.probe_accuracy.update_state(labels, class_logits)
        return {m.name: m.result() for m in self.metrics}


def _simclr():
    model = SimCLR()
    model.compile(
        contrastive_optimizer=keras.optimizers.Adam(), probe_optimizer=keras.optimizers.Adam()
    )
    return model


class SimSiam(keras.Model):
    def __init__(self):
        super().__init__()
        self.augment_one, self.augment_two = _augmenter(), _augmenter()
        self.encoder = keras.Sequential(
            [_encoder(), layers.Dense(8, use_bias=False), layers.BatchNormalization()]
        )
        self.predictor = keras.Sequential(
            [
                keras.Input((8,)),
                layers.Dense(4, use_bias=False, kernel_regularizer=keras.regularizers.L2(5e-4)),
                layers.BatchNormalization(),
                layers.ReLU(),
                layers.Dense(8),
            ]
        )
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.loss_tracker]

    def negative_similarity(self, p, z):
        z = ops.normalize(ops.stop_gradient(z), axis=1)
        return -ops.mean(ops.sum(ops.normalize(p, axis=1) * z, axis=1))

    def train_step(self, data):
        one, two = self.augment_one(data), self.augment_two(data)
        with tf.GradientTape() as tape:
            z1, z2 = self.encoder(one, training=True), self.encoder(two, training=True)
            p1, p2 = self.predictor(z1, training=True), self.predictor(z2, training=True)
            loss = self.negative_similarity(p1, z2) / 2 + self.negative_similarity(p2, z1) / 2
        variables = self.encoder.trainable_variables + self.predictor.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


def _simsiam():
    model = SimSiam()
    schedule = keras.optimizers.schedules.CosineDecay(0.03, decay_steps=6)
    model.compile(optimizer=keras.optimizers.SGD(schedule, momentum=0.6))
    return model


class BarlowLoss(keras.losses.Loss):
    def __init__(self, lambda_amount=5e-3):
        super().__init__()
        self.lambda_amount = lambda_amount

    def standardize(self, z):
        return (z - ops.mean(z, axis=0)) / (ops.std(z, axis=0) + 1e-5)

    def call(self, z_a, z_b):
        batch_size = ops.cast(ops.shape(z_a)[0], z_a.dtype)
        a, b = self.standardize(z_a), self.standardize(z_b)
        correlation = ops.matmul(ops.transpose(a), b) / batch_size
        identity = ops.eye(correlation.shape[0], dtype=correlation.dtype)
        difference = ops.square(correlation - identity)
        return ops.sum(difference * identity + difference * (1 - identity) * self.lambda_amount)


class BarlowTwins(keras.Model):
    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.loss_tracker]

    def train_step(self, batch):
        view_1, view_2 = batch
        with tf.GradientTape() as tape:
            z_a, z_b = self.encoder(view_1, training=True), self.encoder(view_2, training=True)
            loss = self.loss(z_a, z_b)
        variables = self.encoder.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


def _barlow():
    encoder = keras.Sequential(
        [_encoder(), layers.BatchNormalization(), layers.ReLU(), layers.Dense(6)]
    )
    model = BarlowTwins(encoder)
    model.compile(optimizer=keras.optimizers.Adam(), loss=BarlowLoss())
    return model


def _two_views():
    return {"x": _images(), "y": _images(seed=2), "batch_size": 7}


class SupervisedContrastiveLoss(keras.losses.Loss):
    """Every example against those of its class; the published one overrides `__call__`."""

    def __init__(self, temperature=0.5, name=None):
        super().__init__(name=name)
        self.temperature = temperature

    def __call__(self, labels, feature_vectors, sample_weight=None):  # noqa: ARG002 as published
        features = ops.normalize(feature_vectors, axis=1)
        logits = ops.matmul(features, ops.transpose(features)) / self.temperature
        labels = ops.reshape(labels, (-1, 1))
        same = ops.cast(ops.equal(labels, ops.transpose(labels)), logits.dtype)
        targets = same / ops.sum(same, axis=1, keepdims=True)
        return ops.mean(-ops.sum(targets * ops.log_softmax(logits, axis=1), axis=1))


def _supervised_contrastive():
    inputs = keras.Input((8, 8, 3))
    features = _encoder()(layers.RandomFlip("horizontal")(inputs))
    outputs = layers.Dense(8, activation="relu")(features)
    model = keras.Model(inputs, outputs, name="encoder_with_projection_head")
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss=SupervisedContrastiveLoss(0.05))
    return model


def _contrastive_loss(margin=1):
    def loss(y_true, y_pred):
        square_pred = ops.square(y_pred)
        margin_square = ops.square(ops.maximum(margin - y_pred, 0))
        return ops.mean((1 - y_true) * square_pred + y_true * margin_square)

    return loss


def _euclidean_distance(vectors):
    x, y = vectors
    total = ops.sum(ops.square(x - y), axis=1, keepdims=True)
    return ops.sqrt(ops.maximum(total, keras.backend.epsilon()))


def _siamese():
    inputs = keras.Input((8, 8, 3))
    x = layers.BatchNormalization()(inputs)
    x = layers.Conv2D(4, (3, 3), activation="tanh")(x)
    x = layers.AveragePooling2D((2, 2))(x)
    x = layers.BatchNormalization()(layers.Flatten()(x))
    tower = keras.Model(inputs, layers.Dense(6, activation="tanh")(x))
    left, right = keras.Input((8, 8, 3)), keras.Input((8, 8, 3))
    distance = layers.Lambda(_euclidean_distance, output_shape=(1,))([tower(left), tower(right)])
    outputs = layers.Dense(1, activation="sigmoid")(layers.BatchNormalization()(distance))
    model = keras.Model([left, right], outputs)
    model.compile(loss=_contrastive_loss(), optimizer="RMSprop", metrics=["accuracy"])
    return model


def _pairs():
    y = _labels(2).astype("float32")
    return {"x": [_images(), _images(seed=2)], "y": y, "batch_size": 7}


class DistanceLayer(layers.Layer):
    def call(self, anchor, positive, negative):
        ap_distance = ops.sum(ops.square(anchor - positive), -1)
        an_distance = ops.sum(ops.square(anchor - negative), -1)
        return ap_distance, an_distance


class SiameseModel(keras.Model):
    def __init__(self, siamese_network, margin=0.5):
        super().__init__()
        self.siamese_network = siamese_network
        self.margin = margin
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def call(self, inputs):
        return self.siamese_network(inputs)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self._compute_loss(data)
        gradients = tape.gradient(loss, self.siamese_network.trainable_weights)
        self.optimizer.apply_gradients(
            zip(gradients, self.siamese_network.trainable_weights, strict=True)
        )
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def _compute_loss(self, data):
        ap_distance, an_distance = self.siamese_network(data)
        return ops.maximum(ap_distance - an_distance + self.margin, 0.0)

    @property
    def metrics(self):
        return [self.loss_tracker]


class MeanSiameseModel(SiameseModel):
    def _compute_loss(self, data):
        return ops.mean(super()._compute_loss(data))


def _triplets(model=SiameseModel):
    embedding = _encoder()
    images = [keras.Input((8, 8, 3), name=name) for name in ("anchor", "positive", "negative")]
    distances = DistanceLayer()(*[embedding(image) for image in images])
    model = model(keras.Model(images, distances))
    model.compile(optimizer=keras.optimizers.Adam(1e-4), weighted_metrics=[])
    return model


def _triplet_data():
    triplets = _images(), _images(seed=2), _images(seed=3)
    return {"x": tf.data.Dataset.from_tensor_slices(triplets).batch(7).map(lambda *x: (x,))}


def semihard_triplet_loss(labels, embeddings, margin=1.0):
    labels = ops.reshape(labels, (-1, 1))
    squares = ops.sum(ops.square(embeddings), axis=1)
    products = ops.matmul(embeddings, ops.transpose(embeddings))
    distances = ops.maximum(squares[:, None] - 2 * products + squares[None, :], 0.0)
    same = ops.equal(labels, ops.transpose(labels))
    places = ops.arange(ops.shape(embeddings)[0])
    positive = ops.logical_and(same, places[:, None] != places[None, :])
    negative = ops.logical_not(same)[:, None, :]
    to_positive, to_negative = distances[:, :, None], distances[:, None, :]
    semihard = ops.logical_and(negative, to_negative > to_positive)
    nearest = ops.min(ops.where(semihard, to_negative, 1e6), axis=2)
    furthest = ops.max(ops.where(negative, to_negative, 0.0), axis=2)
    chosen = ops.where(ops.any(semihard, axis=2), nearest, furthest)
    positive = ops.cast(positive, distances.dtype)
    losses = ops.maximum(distances - chosen + margin, 0.0) * positive
    return ops.sum(losses) / ops.maximum(ops.sum(positive), 1.0)


def _semihard():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(4, 2, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Dropout(0.3),
            layers.Flatten(),
            layers.Dense(8),
            layers.UnitNormalization(),
        ]
    )
    model.compile(optimizer=keras.optimizers.Adam(0.001), loss=semihard_triplet_loss)
    return model


class DualEncoder(keras.Model):
    """Images and captions of one batch against each other, as in CLIP."""

    def __init__(self, image_encoder, text_encoder, temperature=0.05, **kwargs):
        super().__init__(**kwargs)
        self.image_encoder = image_encoder
        self.text_encoder = text_encoder
        self.temperature = temperature
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.loss_tracker]

    def call(self, features, training=False):
        image_embeddings = self.image_encoder(features["image"], training=training)
        caption_embeddings = self.text_encoder(features["caption"], training=training)
        return caption_embeddings, image_embeddings

    def in_batch_loss(self, caption_embeddings, image_embeddings):
        logits = caption_embeddings @ ops.transpose(image_embeddings) / self.temperature
        images_similarity = image_embeddings @ ops.transpose(image_embeddings)
        captions_similarity = caption_embeddings @ ops.transpose(caption_embeddings)
        targets = ops.softmax((captions_similarity + images_similarity) / (2 * self.temperature))
        captions_loss = keras.losses.categorical_crossentropy(targets, logits, from_logits=True)
        images_loss = keras.losses.categorical_crossentropy(
            ops.transpose(targets), ops.transpose(logits), from_logits=True
        )
        return (captions_loss + images_loss) / 2

    def train_step(self, features):
        with tf.GradientTape() as tape:
            caption_embeddings, image_embeddings = self(features, training=True)
            loss = self.in_batch_loss(caption_embeddings, image_embeddings)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


def _project(embeddings, width=8):
    projected = layers.Dense(width)(embeddings)
    x = layers.Dense(width)(ops.gelu(projected))
    x = layers.Add()([projected, layers.Dropout(0.1)(x)])
    return layers.LayerNormalization()(x)


def _clip():
    image, caption = keras.Input((8, 8, 3), name="image"), keras.Input((6,), name="caption")
    words = layers.GlobalAveragePooling1D()(layers.Embedding(20, 8)(caption))
    model = DualEncoder(
        keras.Model(image, _project(_encoder()(image)), name="image_encoder"),
        keras.Model(caption, _project(words), name="text_encoder"),
    )
    model.compile(optimizer=keras.optimizers.AdamW(learning_rate=1e-3, weight_decay=1e-3))
    return model


def _captioned():
    captions = np.random.default_rng(4).integers(1, 20, (17, 6))
    return {"x": {"image": _images(), "caption": captions}, "batch_size": 7}


class EmbeddingModel(keras.Model):
    def train_step(self, data):
        if isinstance(data, tuple):
            data = data[0]
        anchors, positives = data[0], data[1]
        with tf.GradientTape() as tape:
            anchor_embeddings = self(anchors, training=True)
            positive_embeddings = self(positives, training=True)
            loss = self.similarity_loss(anchor_embeddings, positive_embeddings)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            metric.update_state(loss)
        return {m.name: m.result() for m in self.metrics}

    def similarity_loss(self, anchor_embeddings, positive_embeddings):
        similarities = ops.einsum("ae,pe->ap", anchor_embeddings, positive_embeddings) / 0.2
        sparse_labels = ops.arange(ops.shape(similarities)[0])
        return self.compute_loss(y=sparse_labels, y_pred=similarities)


class AnchorPositivePairs(keras.utils.PyDataset):
    """One anchor and one positive of every class; axis 0 tells the two apart."""

    def __init__(self, classes=5, batches=3):
        super().__init__()
        self.classes = classes
        self.batches = batches

    def __len__(self):
        return self.batches

    def __getitem__(self, index):
        pairs = _images(2 * self.classes, seed=index)
        return pairs.reshape(2, self.classes, 8, 8, 3)


class PairsAsTuple(AnchorPositivePairs):
    def __getitem__(self, index):
        anchors, positives = super().__getitem__(index)
        return ((anchors, positives),)


def _metric_learning():
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(8, 3, strides=2, activation="relu")(inputs)
    x = layers.GlobalAveragePooling2D()(x)
    outputs = layers.UnitNormalization()(layers.Dense(8)(x))
    model = EmbeddingModel(inputs, outputs)
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate=1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


_TENSORFLOW = ("tensorflow",)

PROGRAMS = [
    Program(
        "SimCLR with a linear probe",
        _simclr,
        _labeled,
        _TENSORFLOW,
    ),
    Program("SimSiam", _simsiam, _unlabeled, _TENSORFLOW),
    Program("Barlow Twins", _barlow, _two_views, _TENSORFLOW),
    Program(
        "supervised contrastive learning",
        _supervised_contrastive,
        _labeled,
    ),
    Program("siamese network with contrastive loss", _siamese, _pairs),
    Program(
        "siamese network with triplets in its own step",
        _triplets,
        _triplet_data,
        _TENSORFLOW,
    ),
    Program(
        "siamese network with the mean of its triplets",
        lambda: _triplets(MeanSiameseModel),
        _triplet_data,
        _TENSORFLOW,
    ),
    Program("semi-hard triplet loss", _semihard, _labeled),
    Program(
        "dual encoder of images and captions",
        _clip,
        _captioned,
        _TENSORFLOW,
    ),
    Program(
        "metric learning from anchors and positives",
        _metric_learning,
        lambda: {"x": AnchorPositivePairs()},
        _TENSORFLOW,
    ),
    Program(
        "metric learning from a tuple of anchors and positives",
        _metric_learning,
        lambda: {"x": PairsAsTuple()},
        _TENSORFLOW,
    ),
]
