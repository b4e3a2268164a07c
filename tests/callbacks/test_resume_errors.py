"""What `Resume` cannot continue exactly raises, or is reported, in a sentence."""

# ruff: noqa: ARG002 Keras calls its hooks with arguments that not every callback needs

import datetime

import keras
import numpy as np
import pytest
from keras import layers

from kdpkit import testing
from kdpkit.callbacks import Resume
from kdpkit.checkpoints import Position
from tests.callbacks.resume_programs import (
    STEPS,
    Shuffled,
    batches,
    compiled,
    data_of_a_loop,
    fit,
    pipeline,
)
from tests.callbacks.test_resume import Stop


def stopped(resume, model, train, step, *others):
    stop = Stop("request", step)
    stop.resume = resume
    with pytest.raises(SystemExit):
        fit(model, train, *others, stop, resume)


class LikeImageDataGenerator(keras.utils.PyDataset):
    total_batches_seen = 0


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: Resume(path, save_freq=0), "`save_freq` must be a positive integer.*0"),
        (lambda path: Resume(path, save_freq="batch"), "`save_freq`.*'batch'"),
        (lambda path: Resume(path, keep=0), "`keep` must be a positive integer"),
        (lambda path: Resume(path).track(range(2)), "arrays.*tf.data.*PyDataset.*Grain.*'range'"),
        (lambda path: Resume(path).track([1, 2]), "`global_batch_size`.*'list'"),
        (lambda path: Resume(path).track(batches(), global_batch_size=4), "have their own.*=4"),
        (lambda path: Resume(path).track(Resume(path).track(batches())), "tracked already"),
        (lambda path: Resume(path).track(LikeImageDataGenerator()), "'LikeImageDataGenerator'"),
        (lambda path: Resume(path).track(Shuffled(), seed=3), "`seed` fixes the order.*seed=3"),
        (
            lambda path: Resume(path, callbacks=[keras.callbacks.Callback()]),
            "does not know the state of this callback.*get_state",
        ),
        (lambda path: fit(compiled(), batches(), Resume(path)), r"train on `resume.track\(dataset"),
    ],
)
def test_bad_arguments_raise(tmp_path, make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(tmp_path)


@pytest.mark.parametrize(
    ("add", "sentence"),
    [
        (lambda data, _: data.shuffle(3), r"`shuffle\(3\)` has another order.*`seed="),
        (lambda data, tf: data.map(lambda _: tf.random.uniform([])), "map.*stateless"),
        (lambda data, _: data.shuffle(3, seed=1).cache(), "cache.*Move `shuffle` after it"),
        (
            lambda data, tf: (
                data.interleave(lambda x: tf.data.Dataset.from_tensors(x), num_parallel_calls=2)
                .cache()
                .apply(tf.data.experimental.assert_cardinality(9))
            ),
            "stage='cache'.*without `num_parallel_calls`",
        ),
        (lambda data, _: data.filter(lambda x: x > 3), "assert_cardinality"),
        (lambda data, _: data.shuffle(9, seed=1).repeat().batch(2).prefetch(1).take(7), "`take`"),
        (lambda data, _: data.shuffle(9, seed=1).repeat(3).map(lambda x: x).take(7), "`take`"),
        (lambda data, tf: data.flat_map(lambda _: tf.data.Dataset.range(3).shuffle(3)), "flat_map"),
    ],
)
def test_a_pipeline_of_unknown_order_or_length_raises(tmp_path, add, sentence):
    import tensorflow as tf

    tf.random.set_seed(None)
    with pytest.raises(ValueError, match=sentence):
        Resume(tmp_path).track(add(tf.data.Dataset.range(9), tf))


@pytest.mark.tensorflow
def test_pipelines_are_tracked_as_they_are_and_once(tmp_path):
    train, resume = pipeline(), Resume(tmp_path)
    with pytest.raises(ValueError, match="without further stages"):
        resume.track(train.map(lambda x, y: (x, y)))
    with pytest.raises(ValueError, match="tracked already; pass the dataset itself"):
        resume.track(resume.track(train))


@pytest.mark.tensorflow
def test_a_tracked_pipeline_gives_what_it_gave_and_can_begin_anywhere(tmp_path):
    def given(dataset):
        return [[x.tolist() for x, _ in dataset.as_numpy_iterator()] for _ in range(3)]

    complete = given(pipeline())
    resume = Resume(tmp_path)
    tracked = resume.track(pipeline())
    assert given(tracked) == complete
    assert int(tracked.map(lambda *batch: batch).cardinality()) == STEPS  # as `class_weight` maps
    resume._dataset.go_to(Position(1, 1))
    assert int(tracked.cardinality()) == STEPS - 1
    assert resume._dataset.first_batch()[0].numpy().tolist() == complete[1][1]
    resume._dataset.go_to(Position(1, 1))
    assert given(tracked)[:2] == [complete[1][1:], complete[2]]


@pytest.mark.tensorflow
@pytest.mark.parametrize("batches_of_an_epoch", range(1, 9))
@pytest.mark.parametrize("repeats", [3, None])
@pytest.mark.parametrize("size", [3, 5])
def test_an_epoch_of_fixed_steps_is_the_next_iteration_of_the_dataset(
    tmp_path, batches_of_an_epoch, repeats, size
):
    import tensorflow as tf

    def make():
        shuffled = tf.data.Dataset.range(10).shuffle(10, seed=1)
        return shuffled.repeat(repeats).batch(size).take(batches_of_an_epoch)

    plain, tracked = make(), Resume(tmp_path).track(make())
    for _ in range(3):
        expected, found = (np.concatenate([*data.as_numpy_iterator()]) for data in (plain, tracked))
        np.testing.assert_array_equal(found, expected)


def test_another_dataset_than_the_tracked_one_raises(tmp_path):
    resume = Resume(tmp_path)
    train = resume.track(batches())
    train[0]
    with pytest.raises(ValueError, match=r"trains on another dataset.*`resume.track"):
        fit(compiled(), batches(), resume)


def test_batches_that_keras_shuffles_raise(tmp_path):
    resume = Resume(tmp_path)
    train = resume.track(batches(testing.toy_classification(400)))
    with pytest.raises(Exception, match="`shuffle=False`"):  # TensorFlow wraps it
        fit(compiled(), train, resume, shuffle=True)


def test_steps_belong_to_the_dataset(tmp_path):
    resume = Resume(tmp_path)
    with pytest.raises(ValueError, match="Pass `steps_per_epoch` to the dataset"):
        fit(compiled(), resume.track(batches()), resume, steps_per_epoch=1)


def test_a_bucket_that_is_not_there_is_named_before_training():
    resume = Resume("file:///sys/kernel/states")
    with pytest.raises(ValueError, match="file:///sys/kernel/states/.lock"):
        fit(compiled(), resume.track(batches()), resume)


# Programs that are started again with other settings.


@pytest.mark.parametrize(
    ("model", "settings", "sentence"),
    [
        (compiled, {"global_batch_size": 2}, "`batches in an epoch` differs, and stop.*saved=5"),
        (compiled, {"seed": 2}, "`seed` differs, and stopped inside.* saved=1, seed=2"),
        (lambda: compiled("sgd"), {}, "a run in which `optimizers` differs"),
        (lambda: compiled(None, layers.Dense(4)), {}, "variables of the model"),
    ],
)
def test_what_is_not_the_same_run_raises(tmp_path, model, settings, sentence):
    resume = Resume(tmp_path)
    stopped(resume, compiled(), resume.track(batches()), 2)
    resume = Resume(tmp_path)
    with pytest.raises(ValueError, match=sentence):
        fit(model(), resume.track(batches(**settings)), resume)


def test_a_callback_after_resume_that_forgets_raises(tmp_path):
    early = keras.callbacks.EarlyStopping("loss", patience=5)
    resume = Resume(tmp_path, callbacks=[early])
    fit(compiled(), resume.track(batches()), early, resume, epochs=2)
    early = keras.callbacks.EarlyStopping("loss", patience=5)
    resume = Resume(tmp_path, callbacks=[early])
    with pytest.raises(ValueError, match="`Resume` must be the last callback.*EarlyStopping"):
        fit(compiled(), resume.track(batches()), resume, early)


def test_data_that_cannot_go_back_raise(tmp_path):
    resume = Resume(tmp_path)
    model, train = compiled(), resume.track(Shuffled())
    stopped(resume, model, train, STEPS + 2)
    with pytest.raises(ValueError, match="cannot go back .*dataset='Shuffled'"):
        fit(model, train, resume)


class Unfreezes(keras.callbacks.Callback):
    """Has a layer trained from the second epoch on."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            self.model.get_layer("base").trainable = True


@pytest.mark.tensorflow
def test_a_callback_that_unfreezes_in_an_earlier_epoch_only_raises(tmp_path):
    def make():
        model = compiled(keras.optimizers.SGD(0.1), layers.Dense(4, name="base", trainable=False))
        model.optimizer.build(model.weights)
        resume = Resume(tmp_path)
        return resume, model, resume.track(batches())

    for steps in STEPS, STEPS + 2:
        stopped(*make(), steps, Unfreezes())
    resume, model, train = make()
    with pytest.raises(ValueError, match="other variables were trainable.*base/kernel.*saved=True"):
        fit(model, train, Unfreezes(), resume, epochs=4)


# What a state cannot hold.


def test_validation_that_continues_from_epoch_to_epoch_is_reported(tmp_path):
    resume = Resume(tmp_path)
    settings = {"validation_data": data_of_a_loop(), "validation_steps": 2, "epochs": 2}
    with pytest.warns(UserWarning, match="validates on the batches after those of the epoch"):
        fit(compiled(), resume.track(data_of_a_loop()), resume, **settings)


class LogsATime(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        logs["when"] = datetime.datetime(2026, 1, 1)


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


@pytest.mark.parametrize(
    ("callback", "sentence"),
    [
        (LogsATime(), "holds numbers, text.*value=datetime"),
        (CountsEpochs(), "must be strings.*callback='CountsEpochs', key=0"),
    ],
)
def test_what_a_state_cannot_hold_raises(tmp_path, callback, sentence):
    learning = [callback] if hasattr(callback, "get_state") else []
    resume = Resume(tmp_path, callbacks=learning)
    with pytest.raises(ValueError, match=sentence):
        fit(compiled(), resume.track(batches()), callback, resume)
