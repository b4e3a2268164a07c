"""Programs that train with `Resume`, each in a way of its own; test_resume.py stops them.

Each takes `Resume` and callbacks that come before it, and returns the trained model. `PROGRAMS` has
them by name.
"""

# ruff: noqa: ARG002 Keras calls its hooks with arguments that not every callback needs

import keras
import numpy as np
import pytest
from keras import layers

from kdpkit import testing
from kdpkit.batches import ArrayBatches
from kdpkit.training import replica_exact

ON_JAX = keras.backend.backend() == "jax"
STEPS, EPOCHS = 5, 3
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
ARRAYS = testing.toy_classification(20)
UNEVEN = testing.toy_classification(23)  # five batches of five, the last one smaller
PROGRAMS, LEARNING = {}, {}  # the latter: callbacks with state, which a program has in a directory


class CrashError(Exception):
    """An error in a step."""


def program(backend=None, *, learning=lambda _: []):
    """Note a program, of one backend or both."""

    def noted(train):
        if backend in (None, keras.backend.backend()):
            PROGRAMS[train.__name__] = train
            LEARNING[train.__name__] = learning
        return train

    return noted


def batches(arrays=ARRAYS, **settings):
    return ArrayBatches(arrays, **{"global_batch_size": 4, "seed": 1} | settings)


def pipeline():
    import tensorflow as tf

    from kdpkit import pipelines

    def shaken(batch, seed):
        return batch[0] + tf.random.stateless_normal(tf.shape(batch[0]), seed, stddev=0.1), batch[1]

    return pipelines.train_pipeline(
        tf.data.Dataset.from_tensor_slices(ARRAYS),
        pipelines.PipelineConfig(seed=1),
        global_batch_size=4,
        augment=shaken,
    )


def held_out():
    settings = {"global_batch_size": 8, "seed": None, "remainder": "keep"}
    if ON_JAX:
        return batches(**settings)
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(ARRAYS).batch(8)


def build(*inner):
    return keras.Sequential(
        [keras.Input((4,)), *inner, layers.Dense(8, "tanh"), layers.Dropout(0.3), layers.Dense(3)]
    )


def compiled(optimizer=None, *inner, **settings):
    model = build(*inner)
    model.compile(optimizer or keras.optimizers.Adam(0.05), LOSS, **settings)
    return model


def thorough():
    """Build a model whose steps depend on all that must be kept."""
    norm = layers.BatchNormalization(synchronized=not ON_JAX)
    rate = keras.optimizers.schedules.PolynomialDecay(0.02, STEPS * EPOCHS)
    return compiled(keras.optimizers.Adam(rate), layers.Dense(8), norm, metrics=["accuracy"])


def fit(model, train, *watching, **settings):
    settings = {"epochs": EPOCHS, "shuffle": False, "verbose": 0} | settings
    model.fit(train, callbacks=[*watching], **settings)
    return model


# With validation, and all that a state has.


def learning_from_validation(directory):
    return [
        keras.callbacks.EarlyStopping("val_loss", patience=9, restore_best_weights=True),
        keras.callbacks.ModelCheckpoint(directory / "best.keras", save_best_only=True),
    ]


@program(learning=learning_from_validation)
def by_fit(resume, *others):
    train, watching = resume.track(batches()), resume.callbacks
    model = replica_exact(thorough())
    return fit(model, train, *others, *watching, resume, validation_data=held_out())


@program()
def on_a_pipeline_by_several_steps(resume, *others):
    train = resume.track(batches() if ON_JAX else pipeline())
    model = thorough()
    model.compile(model.optimizer, LOSS, metrics=["accuracy"], steps_per_execution=2)
    return fit(replica_exact(model), train, *others, resume, validation_data=held_out())


# Epochs, executions and calls of `fit`.


@program()
def with_long_executions_and_validation_on_what_it_trains_on(resume, *others):
    model, train = compiled(steps_per_execution=2), resume.track(batches())
    return fit(model, train, *others, resume, validation_data=train)


@program("tensorflow")
def from_a_later_epoch_of_endless_data(resume, *others):
    model, train = compiled(steps_per_execution=2), resume.track(slices().batch(5).repeat())
    settings = {"epochs": 5, "initial_epoch": 2, "steps_per_epoch": 3}
    return fit(model, train, *others, resume, **settings)


@program()
def in_two_phases(resume, *others):
    model = compiled(None, layers.Dense(4, name="base"))
    model.get_layer("base").trainable = False
    model.compile(keras.optimizers.Adam(0.1), LOSS)
    train = resume.track(batches())
    fit(model, train, *others, resume, epochs=1)
    model.get_layer("base").trainable = True
    model.compile(keras.optimizers.Adam(1e-3), LOSS)
    return fit(model, train, *others, resume, epochs=4, initial_epoch=1)


@program(learning=lambda _: [keras.callbacks.EarlyStopping("loss", patience=0, min_delta=9.0)])
def in_phases_of_which_the_first_is_stopped(resume, *others):
    """Train until `EarlyStopping` ends it, and then on, on other batches, for three epochs."""
    model, train = compiled(), resume.track(batches())
    settings = {"validation_data": held_out(), "validation_freq": 2}
    fit(model, train, *others, *resume.callbacks, resume, epochs=9, **settings)
    history = model.history.history
    assert {name: len(values) for name, values in history.items()} == {"loss": 2, "val_loss": 1}
    epochs = len(model.history.epoch)
    model.compile(keras.optimizers.Adam(1e-3), LOSS, metrics=["accuracy"])
    train = resume.track(batches(global_batch_size=5, seed=2))
    settings |= {"initial_epoch": epochs, "epochs": epochs + 3}
    return fit(model, train, *others, resume, **settings)


# What models, optimizers and callbacks hold.


class Subclassed(keras.Model):
    """A model that nobody has built when training begins."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(8), layers.Dense(3)

    def call(self, x):
        return self.out(self.hidden(x))

    def fit(self, n_epochs, train, callbacks):
        """Train, with other arguments than Keras'."""
        return super().fit(train, epochs=n_epochs, callbacks=callbacks, shuffle=False, verbose=0)


class Halving(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        rate = self.model.optimizer.learning_rate
        self.model.optimizer.learning_rate = 0.5 * float(rate)


class Shuffled(keras.utils.PyDataset):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.random = np.random.default_rng(3)
        self.order = np.arange(20)

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        rows = self.order[4 * index : 4 * index + 4]
        return tuple(array[rows] for array in ARRAYS)

    def on_epoch_end(self):
        self.random.shuffle(self.order)


@program()
def with_a_model_not_built_a_rate_that_is_halved_and_data_that_shuffle_themselves(resume, *others):
    model = Subclassed()
    model.compile("sgd", LOSS, metrics=["accuracy"])
    with pytest.warns(UserWarning, match="without workers .workers=3"):
        train = resume.track(Shuffled(workers=3, use_multiprocessing=True))
    model.fit(4, train, [*others, Halving(), resume])
    np.testing.assert_allclose(float(model.optimizer.learning_rate), 0.01 / 16, rtol=1e-6)
    return model


def averages_and_every_fourth_batch(directory):
    path, settings = directory / "last.weights.h5", {"save_freq": 4, "save_weights_only": True}
    saved = keras.callbacks.ModelCheckpoint(path, **settings)
    return [keras.callbacks.SwapEMAWeights(swap_on_epoch=True), saved]


@program(learning=averages_and_every_fourth_batch)
def with_averages_that_are_swapped_and_a_checkpoint_of_every_fourth_batch(resume, *others):
    optimizer = keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.8)
    model = fit(compiled(optimizer), resume.track(batches()), *others, *resume.callbacks, resume)
    model.load_weights(resume.callbacks[1].filepath)
    return model


class Noise(layers.Layer):
    def call(self, x, training=False):
        return x + 0.3 * keras.random.normal(keras.ops.shape(x)) if training else x


class Largest(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="largest")
        self.total = self.add_weight(shape=(), initializer="zeros")
        self.batches = self.add_weight(shape=(), initializer="zeros", dtype="int32")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.max(y_pred))
        self.batches.assign_add(1)

    def result(self):
        return self.total / keras.ops.cast(self.batches, "float32")


@program("tensorflow")
def with_a_metric_of_its_own_and_numbers_without_a_seed_on_two_replicas(resume, *others):
    from kdpkit import strategies

    with strategies.select_strategy("mirrored", devices=2).scope():
        model = replica_exact(compiled(None, Noise(), metrics=[Largest()]))
        return fit(model, resume.track(pipeline()), *others, resume)


class DrawsAsTensorFlowDoes(layers.Layer):
    def __init__(self):
        import tensorflow as tf

        super().__init__()
        self.generator = tf.random.Generator.from_seed(1)

    def call(self, x):
        return x + self.generator.normal(keras.ops.shape(x))


class Centered(keras.losses.Loss):
    """Keeps a mean of what it has seen."""

    def __init__(self):
        super().__init__()
        self.mean = keras.Variable(np.zeros(3, "float32"))

    def call(self, y_true, y_pred):
        self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(y_pred, axis=0))
        return LOSS(y_true, y_pred - self.mean)


@program("tensorflow")
def with_states_of_layers_and_losses_that_keras_does_not_list(resume, *others):
    recurrent = layers.GRU(3, stateful=True)
    model = keras.Sequential(
        [keras.Input((2, 2), batch_size=4), DrawsAsTensorFlowDoes(), recurrent, layers.Dense(3)]
    )
    model.compile("adam", Centered())
    train = batches((ARRAYS[0].reshape(-1, 2, 2), ARRAYS[1]))
    return fit(model, resume.track(train), *others, resume)


class Adversaries(keras.Model):
    def __init__(self):
        super().__init__()
        self.parts = [keras.Sequential([layers.Dense(n)]) for n in (4, 1)]
        self.held = {"each": [keras.optimizers.Adam(0.05), keras.optimizers.Adam(0.02)]}

    def call(self, x):
        return self.parts[1](self.parts[0](x))

    def train_step(self, data):
        import tensorflow as tf

        with tf.GradientTape(persistent=True) as tape:
            loss = keras.ops.mean(keras.ops.softplus(self(data[0], training=True)))
        for part, optimizer, sign in zip(self.parts, self.held["each"], (1, -1), strict=True):
            weights = part.trainable_variables
            gradients = [sign * gradient for gradient in tape.gradient(loss, weights)]
            optimizer.apply(gradients, weights)
        return {"loss": loss}


@program("tensorflow")
def with_optimizers_in_a_container(resume, *others):
    model = Adversaries()
    model.unused = keras.optimizers.Adam()
    model.compile()
    fit(model, resume.track(batches()), *others, resume)
    assert not model.unused.built
    return model


# Data of every kind.


def slices():
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(UNEVEN)


@program("tensorflow")
def on_shuffled_stages(resume, *others):
    from kdpkit._internal.datasets import untuned  # the tuning thread would hold up each end

    shuffled = slices().cache().shuffle(23, seed=3).map(lambda x, y: (2 * x, y))
    train = resume.track(untuned(shuffled.batch(5).prefetch(1)))
    return fit(compiled(), train, *others, resume, class_weight={0: 3.0, 1: 1.0, 2: 1.0})
