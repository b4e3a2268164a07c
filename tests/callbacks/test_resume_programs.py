"""Programs that call `fit` in ways of their own, stopped once and gone on with."""

# ruff: noqa: ARG002 Keras calls its hooks with arguments that not every callback needs

import datetime
import pathlib

import keras
import numpy as np
import pytest
from keras import layers

from kdpkit import callbacks, testing
from kdpkit.batches import ArrayBatches
from kdpkit.callbacks import Resume
from kdpkit.training import TrainingLoop
from tests.callbacks.test_resume import assert_same_weights

ON_JAX = keras.backend.backend() == "jax"
STEPS = 5  # of an epoch
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
ARRAYS = testing.toy_classification(20)


def build(*inner):
    return keras.Sequential(
        [keras.Input((4,)), *inner, layers.Dense(8, "tanh"), layers.Dropout(0.3), layers.Dense(3)]
    )


def compiled(optimizer=None, *inner, **settings):
    model = build(*inner)
    model.compile(optimizer or keras.optimizers.Adam(0.05), LOSS, **settings)
    return model


def batches():
    return ArrayBatches(ARRAYS, global_batch_size=4, seed=1)


def batches_for_a_loop():
    if ON_JAX:
        return batches()
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(ARRAYS).shuffle(20, seed=1).batch(4)


def fit(model, train, *watching, **settings):
    model.fit(train, callbacks=[*watching], shuffle=False, verbose=0, **settings)
    return model


def endless():
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(ARRAYS).batch(4).repeat()


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


# Each takes `Resume` and the callbacks that come before it, and returns the trained model.


def from_a_later_epoch(resume, *others):
    return fit(compiled(), resume.track(batches()), *others, resume, epochs=5, initial_epoch=2)


def from_a_later_epoch_in_a_loop(resume, *others):
    loop = TrainingLoop(build(), optimizer="adam", loss=LOSS)
    watching = [*others, callbacks.LearningRateLogger(), resume]
    loop.fit(
        resume.track(batches_for_a_loop()), epochs=5, initial_epoch=2, callbacks=watching, verbose=0
    )
    return loop.model


def from_a_later_epoch_of_endless_data(resume, *others):
    epochs = {"epochs": 5, "initial_epoch": 2, "steps_per_epoch": 3}
    return fit(compiled(), resume.track(endless()), *others, resume, **epochs)


def with_more_steps_in_an_execution_than_are_left(resume, *others):
    model = compiled(steps_per_execution=2)
    return fit(model, resume.track(endless()), *others, resume, epochs=4, steps_per_epoch=3)


def in_two_phases(resume, *others):
    """Train the head, then all with a lower rate."""
    model = compiled(None, layers.Dense(4, name="base"))
    model.get_layer("base").trainable = False
    model.compile(keras.optimizers.Adam(0.1), LOSS)
    train = resume.track(batches())
    fit(model, train, *others, resume, epochs=1)
    model.get_layer("base").trainable = True
    model.compile(keras.optimizers.Adam(1e-3), LOSS)
    fit(model, train, *others, resume, epochs=4, initial_epoch=1)
    assert float(model.optimizer.learning_rate) == pytest.approx(1e-3)
    return model


def on_other_data_with_another_optimizer(resume, *others):
    """Train on small batches, then on large ones that more steps of another optimizer see."""
    model = compiled()
    fit(model, resume.track(batches()), *others, resume, epochs=1)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), LOSS)
    train = resume.track(ArrayBatches(ARRAYS, global_batch_size=5, seed=2))
    return fit(model, train, *others, resume, epochs=4, initial_epoch=1)


def in_phases_of_which_the_first_is_stopped(resume, *others):
    """Train until `EarlyStopping` ends it, and then on, for three epochs more than there are."""
    (early,) = resume.callbacks
    model, train = compiled(), resume.track(batches())
    epochs = len(fit(model, train, *others, early, resume, epochs=9).history.epoch)
    model.compile(keras.optimizers.Adam(1e-3), LOSS)
    noise = keras.ops.convert_to_numpy(keras.random.normal((20, 4)))
    train = resume.track(ArrayBatches((ARRAYS[0] + noise, ARRAYS[1]), global_batch_size=4, seed=1))
    return fit(model, train, *others, resume, initial_epoch=epochs, epochs=epochs + 3)


def with_low_rank_weights_in_the_second_phase(resume, *others):
    model, train = compiled(), resume.track(batches())
    fit(model, train, *others, resume, epochs=1)
    model.layers[0].enable_lora(2)
    model.compile(keras.optimizers.Adam(0.05), LOSS)
    return fit(model, train, *others, resume, epochs=4, initial_epoch=1)


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


def with_optimizers_in_a_container(resume, *others):
    model = Adversaries()
    model.compile()
    return fit(model, resume.track(batches()), *others, resume, epochs=4)


def with_validation_that_draws(resume, *others):
    model = compiled(None, AlwaysDropout(0.5))
    settings = {"validation_data": batches(), "epochs": 4}
    return fit(model, resume.track(batches()), *others, resume, **settings)


class AlwaysDropout(layers.Dropout):
    def call(self, inputs, training=False):
        return super().call(inputs, training=True)


def with_validation_on_what_it_trains_on(resume, *others):
    train = resume.track(batches())
    return fit(compiled(), train, *others, resume, epochs=4, validation_data=train)


def with_validation_on_the_pipeline_that_it_trains_on(resume, *others):
    import tensorflow as tf

    train = tf.data.Dataset.from_tensor_slices(ARRAYS).shuffle(20, seed=1).batch(4)
    train = resume.track(train)
    return fit(compiled(), train, *others, resume, epochs=4, validation_data=train)


class OwnFit(keras.Model):
    """Has a `fit` of its own, with other arguments."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(3)

    def call(self, x):
        return self.inner(x)

    def fit(self, n_epochs, train, callbacks):
        return super().fit(train, epochs=n_epochs, callbacks=callbacks, shuffle=False, verbose=0)


def with_a_fit_of_its_own(resume, *others):
    model = OwnFit()
    model.compile("adam", LOSS)
    model.fit(4, resume.track(batches()), [*others, resume])
    return model


def with_a_backup_of_keras(resume, *others):
    backup = keras.callbacks.BackupAndRestore(f"{resume._checkpoints.directory}-backup")
    model = compiled(metrics=["accuracy"])
    return fit(model, resume.track(batches()), *others, backup, resume, epochs=4)


def with_a_model_that_is_loaded_between(resume, *others):
    model, train = compiled(), resume.track(batches())
    fit(model, train, *others, resume, epochs=1)
    file = f"{resume._checkpoints.directory}.keras"
    if not pathlib.Path(file).exists():
        model.set_weights([weight / 2 for weight in model.get_weights()])
        model.save(file)
    model = keras.models.load_model(file)
    return fit(model, train, *others, resume, epochs=4, initial_epoch=1)


class Centered(keras.losses.Loss):
    """Keeps a mean of what it has seen."""

    def __init__(self):
        super().__init__()
        self.mean = keras.Variable(np.zeros(3, "float32"))

    def call(self, y_true, y_pred):
        self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(y_pred, axis=0))
        return LOSS(y_true, y_pred - self.mean)


def with_a_loss_that_has_a_variable(resume, *others):
    model = build()
    model.compile("adam", Centered())
    return fit(model, resume.track(batches()), *others, resume, epochs=4)


def of_folds(resume, *others):
    """Train a model for each fold, with a directory each, and return the last."""
    for fold in range(3):
        of_fold = Resume(f"{resume._checkpoints.directory}/{fold}")
        for other in others:
            other.resume = of_fold
        x, y = (np.delete(array, slice(4 * fold, 4 * fold + 4), axis=0) for array in ARRAYS)
        train = of_fold.track(ArrayBatches((x, y), global_batch_size=4, seed=fold))
        model = fit(compiled(), train, *others, of_fold, epochs=2)
    return model


def epoch_by_epoch(resume, *others):
    model, train = compiled(), resume.track(batches())
    for epoch in range(4):
        fit(model, train, *others, resume, epochs=epoch + 1, initial_epoch=epoch)
    return model


def with_averages_that_are_swapped(resume, *others):
    optimizer = keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.8)
    (swap,) = resume.callbacks
    return fit(compiled(optimizer), resume.track(batches()), *others, swap, resume, epochs=4)


def on_data_that_shuffle(resume, *others):
    return fit(compiled(), resume.track(Shuffled()), *others, resume, epochs=4)


def on_data_that_shuffle_and_count(resume, *others):
    return fit(compiled(), resume.track(ShuffledAndCounted()), *others, resume, epochs=4)


class DrawsAsTensorFlowDoes(layers.Layer):
    """Draws from a generator of TensorFlow, which the layer holds."""

    def __init__(self):
        import tensorflow as tf

        super().__init__()
        self.generator = tf.random.Generator.from_seed(1)

    def call(self, x):
        return x + self.generator.normal(keras.ops.shape(x))


def with_a_generator_of_tensorflow(resume, *others):
    return fit(
        compiled(None, DrawsAsTensorFlowDoes()), resume.track(batches()), *others, resume, epochs=4
    )


def with_a_recurrent_layer_that_keeps_its_state(resume, *others):
    model = keras.Sequential(
        [keras.Input((2, 2), batch_size=4), layers.GRU(3, stateful=True), layers.Dense(3)]
    )
    model.compile("adam", LOSS)
    x, y = ARRAYS
    train = ArrayBatches((x.reshape(-1, 2, 2), y), global_batch_size=4, seed=1)
    return fit(model, resume.track(train), *others, resume, epochs=4)


class Asks(keras.callbacks.Callback):
    """Asks for a stop after a step, counted over all calls of `fit`."""

    def __init__(self, resume, step):
        super().__init__()
        self.resume = resume
        self.step = step

    def on_train_batch_end(self, batch, logs=None):
        self.step -= 1
        if self.step == 0:
            self.resume.request_stop()


def resume_of(program, directory):
    with_state = {
        with_averages_that_are_swapped: [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)],
        # after two epochs
        in_phases_of_which_the_first_is_stopped: [
            keras.callbacks.EarlyStopping("loss", patience=0, min_delta=9.0)
        ],
    }
    return Resume(directory, callbacks=with_state.get(program, ()))


def trained(program, directory, stop_after=0):
    keras.utils.set_random_seed(0)
    resume = resume_of(program, directory)
    model = program(resume, Asks(resume, stop_after))
    return model.get_weights(), model.history.history


@pytest.mark.filterwarnings("ignore:Nothing is left to train")
@pytest.mark.parametrize(
    ("program", "stop_after"),
    [
        (from_a_later_epoch, STEPS + 2),
        (in_two_phases, STEPS + 2),
        (epoch_by_epoch, STEPS + 2),
        (with_averages_that_are_swapped, STEPS),
        *(
            pytest.param(program, stop_after, marks=pytest.mark.slow)
            for program, stop_after in [
                (from_a_later_epoch_in_a_loop, 2 * STEPS),
                (from_a_later_epoch_of_endless_data, STEPS),
                (with_more_steps_in_an_execution_than_are_left, STEPS),
                (in_two_phases, STEPS),
                (epoch_by_epoch, STEPS),
                (on_other_data_with_another_optimizer, STEPS + 2),
                (on_other_data_with_another_optimizer, STEPS),
                (of_folds, 10),
                (in_phases_of_which_the_first_is_stopped, STEPS + 2),
                (in_phases_of_which_the_first_is_stopped, 2 * STEPS),
                (in_phases_of_which_the_first_is_stopped, 3 * STEPS + 2),
                (with_low_rank_weights_in_the_second_phase, STEPS + 2),
                (with_validation_that_draws, STEPS),
                (with_validation_on_what_it_trains_on, 2 * STEPS + 2),
                (with_validation_on_the_pipeline_that_it_trains_on, 2 * STEPS + 2),
                (with_a_fit_of_its_own, STEPS + 2),
                (with_a_model_that_is_loaded_between, STEPS + 2),
                (with_a_model_that_is_loaded_between, STEPS),
                (with_a_backup_of_keras, STEPS + 2),
                (with_averages_that_are_swapped, STEPS + 2),
                (on_data_that_shuffle, STEPS + 2),
                (on_data_that_shuffle_and_count, STEPS + 2),
            ]
        ),
        *(
            pytest.param(program, STEPS + 2, marks=[pytest.mark.slow, pytest.mark.tensorflow])
            for program in (
                with_a_generator_of_tensorflow,
                with_a_recurrent_layer_that_keeps_its_state,
                with_optimizers_in_a_container,
                with_a_loss_that_has_a_variable,
            )
        ),
    ],
)
def test_a_program_that_was_stopped_ends_as_one_that_was_not(tmp_path, program, stop_after):
    weights, history = trained(program, tmp_path / "undisturbed")
    with pytest.raises(SystemExit, match="42"):
        trained(program, tmp_path / "stopped", stop_after)
    weights_of_resumed, history_of_resumed = trained(program, tmp_path / "stopped")
    assert_same_weights(weights_of_resumed, weights)
    assert history_of_resumed.keys() == history.keys()
    for name, values in history.items():
        np.testing.assert_allclose(history_of_resumed[name], values, rtol=1e-6)


def test_what_is_changed_between_two_calls_of_fit_stays(tmp_path):
    resume = Resume(tmp_path)
    train, model = resume.track(batches()), compiled()
    fit(model, train, resume)
    model.set_weights([np.zeros_like(weight) for weight in model.get_weights()])
    model.compile(keras.optimizers.Adam(1e-9), LOSS)
    fit(model, train, resume, epochs=2)
    model.compile(keras.optimizers.SGD(1e-9), LOSS)
    fit(model, train, resume, epochs=3)
    assert model.history.epoch == [0, 1, 2]
    assert max(np.abs(weight).max() for weight in model.get_weights()) < 1e-6


def test_another_optimizer_in_a_program_that_is_started_again_raises(tmp_path):
    resume = Resume(tmp_path)
    fit(compiled(), resume.track(batches()), resume)
    resume = Resume(tmp_path)
    with pytest.raises(ValueError, match="a run in which `optimizers` differs"):
        fit(compiled(keras.optimizers.SGD()), resume.track(batches()), resume, epochs=2)


class EndsAfter(keras.callbacks.Callback):
    """Asks for a stop, and ends training itself, after a step."""

    def __init__(self, resume, step):
        super().__init__()
        self.resume = resume
        self.step = step

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.step:
            self.resume.request_stop()
            self.model.stop_training = True


@pytest.mark.parametrize("step", [2, STEPS - 1])
def test_a_request_of_who_ends_training_as_well_is_a_stop(tmp_path, capfd, step):
    resume = Resume(tmp_path)
    with pytest.raises(SystemExit, match="42"):
        fit(compiled(), resume.track(batches()), EndsAfter(resume, step), resume, epochs=3)
    assert "Training was stopped by request_stop()" in capfd.readouterr().err


class AsksLate(keras.callbacks.Callback):
    """Asks for a stop when the last epoch is over."""

    def __init__(self, resume):
        super().__init__()
        self.resume = resume

    def on_epoch_end(self, epoch, logs=None):
        self.resume.request_stop()


def test_a_request_after_the_last_epoch_has_no_effect(tmp_path):
    resume = Resume(tmp_path)
    late = AsksLate(resume)
    assert fit(compiled(), resume.track(batches()), resume, late).history.epoch == [0]


def test_a_run_that_a_callback_has_ended_says_how_to_train_on(tmp_path):
    def ends_itself(epochs):
        early = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=9.0)
        resume = Resume(tmp_path, callbacks=[early])
        model, train = compiled(), resume.track(batches())
        return fit(model, train, early, resume, epochs=epochs), train, early, resume

    assert ends_itself(5)[0].history.epoch == [0, 1]
    with pytest.warns(UserWarning, match="a callback stopped after 2 epochs. To train on, call"):
        model, train, early, resume = ends_itself(8)
    assert model.history.epoch == [0, 1]
    assert fit(model, train, early, resume, epochs=3).history.epoch == [0, 1, 2]


def test_a_callback_after_resume_that_forgets_raises(tmp_path):
    def first(resume, early):
        fit(compiled(), resume.track(batches()), resume, early, epochs=3)

    early = keras.callbacks.EarlyStopping("loss", patience=5)
    resume = Resume(tmp_path, callbacks=[early])
    fit(compiled(), resume.track(batches()), early, resume, epochs=2)
    early = keras.callbacks.EarlyStopping("loss", patience=5)
    with pytest.raises(ValueError, match="`Resume` must be the last callback.*EarlyStopping"):
        first(Resume(tmp_path, callbacks=[early]), early)


def test_data_that_cannot_go_back_raise(tmp_path):
    resume = Resume(tmp_path)
    model, train = compiled(), resume.track(Shuffled())
    with pytest.raises(SystemExit):
        fit(model, train, Asks(resume, STEPS + 2), resume, epochs=3)
    with pytest.raises(ValueError, match="cannot go back .*dataset='Shuffled'"):
        fit(model, train, resume, epochs=3)


def test_validation_that_goes_on_from_epoch_to_epoch_is_said(tmp_path):
    def validated(steps):
        resume = Resume(tmp_path / str(steps))
        settings = {"validation_data": batches(), "validation_steps": steps, "epochs": 2}
        fit(compiled(), resume.track(batches()), resume, **settings)

    validated(STEPS)
    with pytest.warns(UserWarning, match="validates on the batches after those of the epoch"):
        validated(2)


def test_a_loop_says_that_its_validation_goes_on(tmp_path):
    resume = Resume(tmp_path)
    loop = TrainingLoop(build(), optimizer="adam", loss=LOSS)
    with pytest.warns(UserWarning, match="validates on the batches after those of the epoch"):
        loop.fit(
            resume.track(batches_for_a_loop()),
            batches_for_a_loop(),
            validation_steps=2,
            epochs=2,
            callbacks=[resume],
            verbose=0,
        )


class Unfreezes(keras.callbacks.Callback):
    """Has a layer trained from the second epoch on."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            self.model.get_layer("base").trainable = True


@pytest.mark.tensorflow
def test_a_callback_that_unfreezes_in_an_earlier_epoch_alone_raises(tmp_path):
    def train(stop_after=0):
        model = compiled(keras.optimizers.SGD(0.1), layers.Dense(4, name="base", trainable=False))
        model.optimizer.build(model.weights)
        resume = Resume(tmp_path)
        watching = [Unfreezes(), Asks(resume, stop_after)]
        fit(model, resume.track(batches()), *watching, resume, epochs=4)

    for stop_after in STEPS, STEPS + 2:
        with pytest.raises(SystemExit):
            train(stop_after)
    with pytest.raises(ValueError, match="other variables were trainable.*base/kernel.*saved=True"):
        train()


class LogsATime(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        logs["when"] = datetime.datetime(2026, 1, 1)


def test_a_log_that_a_state_cannot_hold_raises(tmp_path):
    resume = Resume(tmp_path)
    with pytest.raises(ValueError, match="holds numbers, text.*value=datetime"):
        fit(compiled(), resume.track(batches()), LogsATime(), resume)


def test_evaluate_takes_the_callback_too(tmp_path):
    resume = Resume(tmp_path)
    model, train = compiled(), resume.track(batches())
    before = model.evaluate(batches(), callbacks=[resume], verbose=0)
    fit(model, train, resume)
    assert model.evaluate(batches(), callbacks=[resume], verbose=0) < before


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Nothing is left to train")
def test_a_program_that_is_over_trains_nothing_when_started_again(tmp_path):
    def started():
        return trained(in_phases_of_which_the_first_is_stopped, tmp_path)

    (weights, history), (same_weights, same_history) = started(), started()
    assert_same_weights(same_weights, weights)
    assert same_history == history


class CountsEpochs(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.of_epochs = {}

    def on_epoch_end(self, epoch, logs=None):
        self.of_epochs[epoch] = 1

    def get_state(self):
        return {"seen": [self.of_epochs]}

    def set_state(self, values):
        self.of_epochs = values["seen"][0]


def test_keys_that_json_changes_raise(tmp_path):
    counts = CountsEpochs()
    resume = Resume(tmp_path, callbacks=[counts])
    with pytest.raises(ValueError, match="must be strings.*callback='CountsEpochs', key=0"):
        fit(compiled(), resume.track(batches()), counts, resume)


def test_another_dataset_is_found_where_a_batch_was_looked_at(tmp_path):
    resume = Resume(tmp_path)
    train = resume.track(batches())
    train[0]
    with pytest.raises(ValueError, match="`fit` trains on another dataset"):
        fit(compiled(), batches(), resume)


class LikeImageDataGenerator(keras.utils.PyDataset):
    total_batches_seen = 0


@pytest.mark.parametrize(
    ("dataset", "settings", "sentence"),
    [
        (LikeImageDataGenerator(), {}, "`ImageDataGenerator` .*dataset='LikeImageDataGenerator'"),
        (Shuffled(), {"seed": 3}, "`seed` fixes the order of arrays.*seed=3"),
    ],
)
def test_what_cannot_be_tracked_is_named(tmp_path, dataset, settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        Resume(tmp_path).track(dataset, **settings)
