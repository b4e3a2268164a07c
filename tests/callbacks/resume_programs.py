"""Programs that train with `Resume`, each in a way of its own; test_resume.py stops them.

Each takes `Resume` and callbacks that come before it, and returns the trained model. `PROGRAMS` has
them by name.
"""

# ruff: noqa: ARG002 Keras calls its hooks with arguments that not every callback needs

import contextlib
import functools
import pathlib

import keras
import numpy as np
from keras import layers

from kdpkit import callbacks, testing
from kdpkit.batches import ArrayBatches
from kdpkit.callbacks import Resume
from kdpkit.training import TrainingLoop, replica_exact

ON_JAX = keras.backend.backend() == "jax"
STEPS, EPOCHS = 5, 3
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
ARRAYS = testing.toy_classification(20)
UNEVEN = testing.toy_classification(23)  # five batches of five, the last one smaller
PROGRAMS, LEARNING = {}, {}  # the latter: callbacks with state, which a program has in a directory


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


def data_of_a_loop():
    return batches() if ON_JAX else in_batches()


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


def loop(model, train, *watching, of_loop=None, **settings):
    compiled = {"optimizer": model.optimizer, "loss": LOSS, "metrics": ["accuracy"]}
    settings = {"epochs": EPOCHS, "verbose": 0} | settings
    TrainingLoop(model, **compiled, **(of_loop or {})).fit(train, callbacks=[*watching], **settings)
    return model


def on_replicas(count):
    if ON_JAX:
        devices = [f"cpu:{i}" for i in range(count)]
        return keras.distribution.DataParallel(devices=devices).scope()
    from kdpkit import strategies

    return strategies.select_strategy("mirrored", devices=count).scope()


# With validation, and all that a state has.


def learning_from_validation(directory):
    return [
        keras.callbacks.EarlyStopping("val_loss", patience=9, restore_best_weights=True),
        keras.callbacks.ModelCheckpoint(directory / "best.keras", save_best_only=True),
    ]


@program(learning=learning_from_validation)
def by_fit(resume, *others, train=None):
    train, watching = resume.track(batches() if train is None else train), resume.callbacks
    model = replica_exact(thorough())
    return fit(model, train, *others, *watching, resume, validation_data=held_out())


@program()
def by_fit_on_a_pipeline(resume, *others):
    return by_fit(resume, *others, train=pipeline())


@program("tensorflow", learning=learning_from_validation)
def by_fit_on_two_replicas(resume, *others):
    with on_replicas(2):
        return by_fit_on_a_pipeline(resume, *others)


@program()
def by_a_loop(resume, *others, **settings):
    train = resume.track(batches() if ON_JAX else pipeline())
    return loop(thorough(), train, *others, resume, validation=held_out(), of_loop=settings)


@program()
def by_a_loop_in_micro_batches(resume, *others):
    return by_a_loop(resume, *others, accumulation=2)


@program()
def by_a_loop_of_several_steps_in_a_call(resume, *others):
    return by_a_loop(resume, *others, steps_per_loop=1 if ON_JAX else 2)


@program("jax")
def by_a_loop_on_four_devices(resume, *others):
    from kdpkit import sharding

    return by_a_loop(resume, *others, strategy=sharding.data_mesh(4))


@program("tensorflow")
def by_a_loop_on_two_replicas(resume, *others):
    with on_replicas(2):
        return by_a_loop(resume, *others)


class OwnLogs(keras.Sequential):
    """A model whose logs are those of a step: Keras has no metrics to compute them from."""

    def train_step(self, *given):
        found = super().train_step(*given)
        logs, *state = found if ON_JAX else (found,)
        logs = {"of the step": logs["loss"]}
        return (logs, *state) if state else logs


@program()
def with_logs_of_its_own(resume, *others):
    model = OwnLogs([keras.Input((4,)), layers.Dense(3)])
    model.compile("adam", LOSS)
    return fit(model, resume.track(batches()), *others, resume, validation_data=held_out())


class AlwaysDropout(layers.Dropout):
    def call(self, inputs, training=False):
        return super().call(inputs, training=True)


@program()
def with_validation_that_draws(resume, *others):
    model, held_out = compiled(None, AlwaysDropout(0.5)), batches(seed=None)
    return fit(model, resume.track(batches()), *others, resume, validation_data=held_out)


@program()
def with_validation_on_what_it_trains_on(resume, *others):
    train = resume.track(batches())
    return fit(compiled(), train, *others, resume, validation_data=train)


@program("tensorflow")
def with_validation_on_the_pipeline_that_it_trains_on(resume, *others):
    train = resume.track(shuffled())
    return fit(compiled(), train, *others, resume, validation_data=train)


# Epochs, executions and calls of `fit`.


@program()
def with_executions_that_pass_the_end_of_an_epoch(resume, *others):
    model = compiled(steps_per_execution=2)
    return fit(model, resume.track(batches()), *others, resume)


@program()
def from_a_later_epoch(resume, *others):
    return fit(compiled(), resume.track(batches()), *others, resume, epochs=5, initial_epoch=2)


@program()
def from_a_later_epoch_in_a_loop(resume, *others):
    train = resume.track(batches() if ON_JAX else shuffled())
    watching = [*others, callbacks.LearningRateLogger(), resume]
    return loop(compiled(), train, *watching, epochs=5, initial_epoch=2)


@program("tensorflow")
def from_a_later_epoch_of_endless_data(resume, *others):
    settings = {"epochs": 5, "initial_epoch": 2, "steps_per_epoch": 3}
    return fit(compiled(), resume.track(in_batches().repeat()), *others, resume, **settings)


@program("tensorflow")
def with_more_steps_in_an_execution_than_are_left(resume, *others):
    model, train = compiled(steps_per_execution=2), resume.track(in_batches().repeat())
    return fit(model, train, *others, resume, epochs=4, steps_per_epoch=3)


@program()
def in_two_phases(resume, *others):
    """Train the head, then all with a lower rate."""
    model = compiled(None, layers.Dense(4, name="base"))
    model.get_layer("base").trainable = False
    model.compile(keras.optimizers.Adam(0.1), LOSS)
    train = resume.track(batches())
    fit(model, train, *others, resume, epochs=1)
    model.get_layer("base").trainable = True
    model.compile(keras.optimizers.Adam(1e-3), LOSS)
    return fit(model, train, *others, resume, epochs=4, initial_epoch=1)


@program()
def on_other_data_with_another_optimizer(resume, *others):
    """Train on small batches, then on large ones that more steps of another optimizer see."""
    model = compiled()
    fit(model, resume.track(batches()), *others, resume, epochs=1)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), LOSS)
    train = resume.track(batches(global_batch_size=5, seed=2))
    return fit(model, train, *others, resume, epochs=4, initial_epoch=1)


@program(learning=lambda _: [keras.callbacks.EarlyStopping("loss", patience=0, min_delta=9.0)])
def in_phases_of_which_the_first_is_stopped(resume, *others):
    """Train until `EarlyStopping` ends it after two epochs, and then on, for three more."""
    model, train = compiled(), resume.track(batches())
    epochs = len(fit(model, train, *others, *resume.callbacks, resume, epochs=9).history.epoch)
    model.compile(keras.optimizers.Adam(1e-3), LOSS)
    noise = keras.ops.convert_to_numpy(keras.random.normal((20, 4)))
    train = resume.track(batches((ARRAYS[0] + noise, ARRAYS[1])))
    return fit(model, train, *others, resume, initial_epoch=epochs, epochs=epochs + 3)


@program()
def with_low_rank_weights_in_the_second_phase(resume, *others):
    model, train = compiled(), resume.track(batches())
    fit(model, train, *others, resume, epochs=1)
    model.layers[0].enable_lora(2)
    model.compile(keras.optimizers.Adam(0.05), LOSS)
    return fit(model, train, *others, resume, epochs=4, initial_epoch=1)


@program()
def with_a_model_that_is_loaded_between(resume, *others):
    model, train = compiled(), resume.track(batches())
    fit(model, train, *others, resume, epochs=1)
    file = f"{resume._checkpoints.directory}.keras"
    if not pathlib.Path(file).exists():
        model.set_weights([weight / 2 for weight in model.get_weights()])
        model.save(file)
    model = keras.models.load_model(file)
    return fit(model, train, *others, resume, epochs=4, initial_epoch=1)


@program()
def epoch_by_epoch(resume, *others):
    model, train = compiled(), resume.track(batches())
    for epoch in range(4):
        fit(model, train, *others, resume, epochs=epoch + 1, initial_epoch=epoch)
    return model


@program()
def of_folds(resume, *others):
    """Train a model for each fold, with a directory each, and return the last."""
    for fold in range(3):
        of_fold = Resume(f"{resume._checkpoints.directory}/{fold}")
        for other in others:
            other.resume = of_fold
        x, y = (np.delete(array, slice(4 * fold, 4 * fold + 4), axis=0) for array in ARRAYS)
        model = fit(compiled(), of_fold.track(batches((x, y), seed=fold)), *others, of_fold)
    return model


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
    """A schedule that continues from the rate that it finds."""

    def on_epoch_begin(self, epoch, logs=None):
        rate = self.model.optimizer.learning_rate
        self.model.optimizer.learning_rate = 0.5 * float(rate)


@program()
def with_a_model_not_built_and_a_rate_that_is_lowered_each_epoch(resume, *others):
    model = Subclassed()
    model.compile("sgd", LOSS, metrics=["accuracy"])
    model.fit(4, resume.track(batches()), [*others, Halving(), resume])
    np.testing.assert_allclose(float(model.optimizer.learning_rate), 0.01 / 16, rtol=1e-6)
    return model


@program(learning=lambda _: [keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=9.0)])
def with_a_rate_that_a_plateau_lowers(resume, *others):
    model = compiled(keras.optimizers.SGD(0.1))
    return fit(model, resume.track(batches()), *others, *resume.callbacks, resume, epochs=4)


@program(learning=lambda _: [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)])
def with_averages_that_are_swapped(resume, *others):
    optimizer = keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.8)
    return fit(compiled(optimizer), resume.track(batches()), *others, *resume.callbacks, resume)


@program()
def with_a_backup_of_keras(resume, *others):
    backup = keras.callbacks.BackupAndRestore(f"{resume._checkpoints.directory}-backup")
    model = compiled(metrics=["accuracy"])
    return fit(model, resume.track(batches()), *others, backup, resume)


@program()
def with_an_optimizer_that_nothing_uses(resume, *others):
    model = compiled()
    model.unused = keras.optimizers.Adam()
    fit(model, resume.track(batches()), *others, resume)
    assert not model.unused.built
    return model


class Noise(layers.Layer):
    """Draws from Keras' global seeds."""

    def call(self, x, training=False):
        return x + 0.3 * keras.random.normal(keras.ops.shape(x)) if training else x


class NoisyBatches(ArrayBatches):
    """Draws from Keras' global seeds, which no step on JAX can."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 0.3 * keras.ops.convert_to_numpy(keras.random.normal(x.shape)), y


@program()
def with_numbers_drawn_without_a_seed(resume, *others, train=fit):
    model = compiled(None, *([] if ON_JAX else [Noise()]))
    data = NoisyBatches(ARRAYS, global_batch_size=4) if ON_JAX else pipeline()
    return train(
        model if train is loop else replica_exact(model), resume.track(data), *others, resume
    )


@program()
def with_numbers_drawn_without_a_seed_on_two_replicas(resume, *others):
    with on_replicas(2):
        return with_numbers_drawn_without_a_seed(resume, *others)


@program()
def with_numbers_drawn_without_a_seed_in_a_loop(resume, *others):
    return with_numbers_drawn_without_a_seed(resume, *others, train=loop)


class DrawsAsTensorFlowDoes(layers.Layer):
    """Draws from a generator of TensorFlow, which the layer holds."""

    def __init__(self):
        import tensorflow as tf

        super().__init__()
        self.generator = tf.random.Generator.from_seed(1)

    def call(self, x):
        return x + self.generator.normal(keras.ops.shape(x))


@program("tensorflow")
def with_a_generator_of_tensorflow(resume, *others):
    model = compiled(None, DrawsAsTensorFlowDoes())
    return fit(model, resume.track(batches()), *others, resume)


@program("tensorflow")
def with_a_recurrent_layer_that_keeps_its_state(resume, *others):
    model = keras.Sequential(
        [keras.Input((2, 2), batch_size=4), layers.GRU(3, stateful=True), layers.Dense(3)]
    )
    model.compile("adam", LOSS)
    train = batches((ARRAYS[0].reshape(-1, 2, 2), ARRAYS[1]))
    return fit(model, resume.track(train), *others, resume)


class Centered(keras.losses.Loss):
    """Keeps a mean of what it has seen."""

    def __init__(self):
        super().__init__()
        self.mean = keras.Variable(np.zeros(3, "float32"))

    def call(self, y_true, y_pred):
        self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(y_pred, axis=0))
        return LOSS(y_true, y_pred - self.mean)


@program("tensorflow")
def with_a_loss_that_has_a_variable(resume, *others):
    model = build()
    model.compile("adam", Centered())
    return fit(model, resume.track(batches()), *others, resume)


class Adversaries(keras.Model):
    """A generator and a discriminator, whose optimizers are in a container."""

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
    model.compile()
    return fit(model, resume.track(batches()), *others, resume)


@program("tensorflow")
def with_optimizers_that_its_own_step_builds(resume, *others):
    from tests.training.programs import generative

    with on_replicas(2):
        model = replica_exact(generative._gan(kind=generative.GANWithNoiseByExample))
    x = np.random.default_rng(0).random((18, 8, 8, 1), "float32")
    return fit(model, resume.track((x, np.zeros(18)), global_batch_size=4), *others, resume)


class TwoOptimizers(keras.Model):
    """Trains its halves with one optimizer each on JAX, where Keras keeps the state of one."""

    def __init__(self):
        super().__init__()
        self.halves = [keras.Sequential([keras.Input((4,)), layers.Dense(n)]) for n in (4, 3)]
        self.noise = keras.random.SeedGenerator(5)
        self.built = True
        self.compile("sgd", LOSS)
        self.optimizer.build(self.halves[0].trainable_variables)
        self.other = keras.optimizers.Adam(0.01)
        self.other.build(self.halves[1].trainable_variables)
        self.state_of_other = self.other.variables  # Keras keeps these with its model

    def call(self, x):
        return self.halves[1](self.halves[0](x))

    def train_step(self, state, data):
        import jax

        trainable, rest, of_optimizer, of_metrics = state
        others = dict(zip(map(id, self.non_trainable_variables), rest, strict=True))

        def loss(trainable):
            mapping = [*zip(self.trainable_variables, trainable, strict=True)]
            mapping.append((self.noise.state, others[id(self.noise.state)]))
            with keras.StatelessScope(state_mapping=mapping) as scope:
                x = data[0] + 0.1 * keras.random.normal((4, 4), seed=self.noise)
                return LOSS(data[1], self(x)), scope.get_current_value(self.noise.state)

        (value, seed), gradients = jax.value_and_grad(loss, has_aux=True)(trainable)
        first, of_optimizer = self.optimizer.stateless_apply(
            of_optimizer, gradients[:2], trainable[:2]
        )
        second, own = self.other.stateless_apply(
            [others[id(v)] for v in self.state_of_other], gradients[2:], trainable[2:]
        )
        others |= dict(zip(map(id, self.state_of_other), own, strict=True))
        others[id(self.noise.state)] = seed
        return {"loss": value}, ([*first, *second], [*others.values()], of_optimizer, of_metrics)


@program("jax")
def with_two_optimizers(resume, *others):
    return fit(TwoOptimizers(), resume.track(batches()), *others, resume)


# Data of every kind.


class Shuffled(keras.utils.PyDataset):
    """Shuffles between epochs with random numbers of its own."""

    def __init__(self):
        super().__init__()
        self.random = np.random.default_rng(3)
        self.order = np.arange(20)

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        rows = self.order[4 * index : 4 * index + 4]
        return tuple(array[rows] for array in ARRAYS)

    def on_epoch_end(self):
        self.random.shuffle(self.order)


class ShuffledAndCounted(Shuffled):
    epoch = 0

    def on_epoch_end(self):
        super().on_epoch_end()
        self.epoch += 1


def slices():
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(UNEVEN)


def shuffled():
    mapped = slices().cache().shuffle(23, seed=3).map(lambda x, y: (2 * x, y))
    return mapped.batch(5).prefetch(1)


def of_the_global_seed():
    return slices().shuffle(23).batch(5)


def in_batches():
    return slices().batch(5)


def repeated():
    return slices().shuffle(23, seed=3).repeat(2).batch(5)


def known(count):
    import tensorflow as tf

    return tf.data.experimental.assert_cardinality(count)


def pairs():
    import tensorflow as tf

    first = tf.data.Dataset.from_tensor_slices(UNEVEN[1]).shuffle(9, seed=1)
    count = sum(int(y) < 2 for y in first)
    first, second = slices().shuffle(9, seed=1), slices().shuffle(9, seed=2)
    together = tf.data.Dataset.zip((first, second)).map(lambda a, b: (a[0] + b[0], a[1]))
    return together.filter(lambda _, y: y < 2).apply(known(count)).batch(5)


def from_python():
    import tensorflow as tf

    x, y = UNEVEN
    spec = (tf.TensorSpec(x.shape[1:], tf.float32), tf.TensorSpec([], tf.int64))
    examples = tf.data.Dataset.from_generator(
        lambda: zip(x.astype("float32"), y, strict=True), output_signature=spec
    )
    return examples.apply(known(23)).shuffle(23, seed=2).batch(5)


def few_batches(count):
    return batches(tuple(array[: 4 * count] for array in ARRAYS))


def of_examples():
    import grain

    return grain.MapDataset.source([*zip(*UNEVEN, strict=True)]).seed(4)


def of_two_classes():
    return of_examples().shuffle().repeat().filter(lambda pair: pair[1] < 2)


def grain_that_ends():
    import grain

    examples = of_examples().shuffle().filter(lambda pair: pair[1] < 2).to_iter_dataset()
    return grain.experimental.WindowShuffleIterDataset(examples, window_size=6, seed=1).batch(3)


def grain_packed():
    import grain

    tokens = of_examples().map(lambda pair: {"x": np.full(1 + pair[1], pair[0][0], "float32")})
    packed = grain.experimental.FirstFitPackIterDataset(
        tokens.shuffle().repeat().to_iter_dataset(), length_struct={"x": 4}, num_packing_bins=3
    )
    return packed.map(lambda row: (row["x"], np.int64(row["x_segment_ids"].max() % 3))).batch(4)


def grain_loader():
    import grain

    return grain.DataLoader(
        data_source=[*zip(*UNEVEN, strict=True)],
        sampler=grain.samplers.IndexSampler(23, shuffle=True, seed=1),
        operations=[grain.transforms.Batch(5)],
    )


DATA = {  # with the steps of an epoch, if it does not know them
    "arrays": (lambda: UNEVEN, None),
    "weighted arrays": (lambda: (*UNEVEN, 1.0 + UNEVEN[1]), None),
    "a PyDataset that shuffles": (Shuffled, None),
    "a PyDataset that shuffles and counts": (ShuffledAndCounted, None),
    "one batch": (lambda: few_batches(1), None),
    "two batches": (lambda: few_batches(2), None),
    "shuffled": (shuffled, None),
    "shuffled by the global seed": (of_the_global_seed, None),
    "repeated": (repeated, None),
    "pairs": (pairs, None),
    "batches in order": (in_batches, None),
    "from Python": (from_python, None),
    "endless": (lambda: shuffled().repeat(), 4),
    "grain": (lambda: of_examples().shuffle().batch(5), None),
    "grain, repeated": (lambda: of_examples().shuffle().repeat().batch(5), 4),
    "grain, filtered": (lambda: of_two_classes().to_iter_dataset().batch(5), 4),
    "grain that ends": (grain_that_ends, 4),
    "grain, packed": (grain_packed, 4),
    "grain's loader": (grain_loader, 4),
}


def on_data(make, steps, replicas, resume, *others):
    """Train a model whose weights depend on the order of its batches."""
    with on_replicas(replicas) if replicas > 1 else contextlib.nullcontext():
        model = replica_exact(testing.tiny_classifier())
        model.compile(keras.optimizers.Adam(0.05), LOSS)
        made = make()
        settings = {"global_batch_size": 5, "seed": 7} if isinstance(made, tuple) else {}
        train = resume.track(made, **settings)
        return fit(model, train, *others, resume, steps_per_epoch=steps)


for _name, (_make, _steps) in DATA.items():
    for _replicas in (1, 2):
        _label = f"on {_name}" + (", two replicas" if _replicas > 1 else "")
        PROGRAMS[_label] = functools.partial(on_data, _make, _steps, _replicas)
        LEARNING[_label] = lambda _: []
