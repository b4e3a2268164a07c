"""What a step takes, and how much of it waits for input, where both are known."""

import time

import keras
import numpy as np
import pytest

from kdpkit import batches, callbacks, testing, training
from kdpkit.diagnostics import check_input, check_speed
from kdpkit.diagnostics._doctor import speed

FEATURES, BATCH = 64, 16
X, Y = testing.toy_classification(2048, features=FEATURES)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
IS_JAX = keras.backend.backend() == "jax"


@pytest.fixture(autouse=True)
def one_round(monkeypatch):
    """Measure in one round: more are for machines that are busy with something else."""
    monkeypatch.setattr(speed, "_ROUNDS", 1)


def compiled(model, **settings):
    model.compile("adam", LOSS, metrics=["accuracy"], **settings)
    return model


def small():
    return compiled(testing.tiny_classifier(features=FEATURES))


class Reading(keras.utils.PyDataset):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def __len__(self):
        return 12

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return X[:BATCH], Y[:BATCH]


def test_slow_input_is_waited_for_and_the_step_takes_as_long():
    report = check_speed(Reading(0.4), model=small(), seconds=0.1)
    assert report.step_seconds > 0.2  # the first timed step may be noted late
    assert report.waiting_share > 0.5
    assert not report.clean
    assert [finding.rule for finding in report.findings] == ["input"]


class LongStep(keras.Sequential):
    """Trains so slowly that no other program's load on the machine can be seen in it."""

    def train_step(self, *arguments):
        time.sleep(0.2)
        return super().train_step(*arguments)


@pytest.mark.slow
def test_a_long_step_on_arrays_in_memory_waits_for_nothing(monkeypatch):
    monkeypatch.undo()
    model = compiled(LongStep([keras.layers.Dense(3)]), run_eagerly=True)
    data = batches.ArrayBatches((X, Y), global_batch_size=256, seed=0)
    report = check_speed(data, model=model, seconds=0.2)
    assert report.clean, report
    assert str(report).endswith("\n\nNothing found.")
    assert report.slowest_stage is None


@pytest.mark.tensorflow
def test_the_slowest_stage_of_a_pipeline_is_named():
    import tensorflow as tf

    from kdpkit._internal.datasets import untuned

    def wait(x):
        time.sleep(0.02)
        return x

    def decode(x, y):
        return tf.ensure_shape(tf.numpy_function(wait, [x], tf.float32), x.shape), y

    data = tf.data.Dataset.from_tensor_slices((X, Y)).map(decode)
    data = data.shuffle(10).batch(BATCH).prefetch(2)
    report = check_speed(untuned(data), model=small(), seconds=0.4)
    assert report.slowest_stage == "map(decode)"
    assert max(map(len, str(report).splitlines())) <= 80


# What is left behind: nothing.


def state_of(model):
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def test_nothing_is_trained_and_training_goes_on_as_if_nothing_had_been_measured():
    data = batches.ArrayBatches((X[:64], Y[:64]), global_batch_size=BATCH, seed=0)
    layers = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.5), keras.layers.Dense(3)]
    model = compiled(keras.Sequential([keras.Input((FEATURES,)), *layers]))
    model.fit(data, shuffle=False, verbose=0)
    before, epoch = state_of(model), vars(data).get("epoch")
    assert check_speed(data, model=model, seconds=0.2).step_seconds > 0
    np.testing.assert_equal(state_of(model), before)
    assert vars(data).get("epoch") == epoch
    assert not model.stop_training


def test_what_resume_tracks_is_checked_and_stays_at_its_epoch(tmp_path):
    data = batches.ArrayBatches((X[:64], Y[:64]), global_batch_size=BATCH, seed=0)
    tracked = callbacks.Resume(tmp_path).track(data)
    assert check_input(tracked, model=small()).checked == ("train", "step")
    assert check_speed(tracked, model=small(), seconds=0.2).step_seconds > 0
    assert data.epoch == 0
    assert not tracked.was_read


def test_a_model_that_was_not_built_is_built_and_not_trained():
    model = compiled(keras.Sequential([keras.layers.Dense(3)]))
    check_speed((X[:64], Y[:64]), model=model, batch_size=BATCH, seconds=0.2)
    assert model.built
    assert int(model.optimizer.iterations) == 0


@pytest.mark.tensorflow
def test_stock_keras_on_replicas_would_write_into_arrays_and_raises():
    from kdpkit import strategies

    with strategies.select_strategy("mirrored", devices=2).scope():
        model = small()
    with pytest.raises(ValueError, match="MirroredStrategy.*replica_exact"):
        check_speed((X, Y), model=model)


@pytest.mark.tensorflow
def test_the_epoch_of_a_train_pipeline_does_not_move_on_two_replicas():
    import tensorflow as tf

    from kdpkit import pipelines, strategies

    source = tf.data.Dataset.from_tensor_slices((X[:64], Y[:64]))
    train = pipelines.train_pipeline(source, global_batch_size=BATCH, replicas=2)
    with strategies.select_strategy("mirrored", devices=2).scope():
        model = compiled(training.replica_exact(testing.tiny_classifier(features=FEATURES)))
    before, position = state_of(model), train.epoch_counter.position()
    check_speed(train, model=model, seconds=0.2)
    assert train.epoch_counter.position() == position
    for array, former in zip(state_of(model), before, strict=False):
        np.testing.assert_array_equal(array, former)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"model": testing.tiny_classifier()}, "`model` is not compiled"),
        ({"dataset": (x for x in [X])}, "`dataset` must be a"),
        ({"dataset": (X[:, :3], Y)}, "The training fails, so it has no speed"),
    ],
)
def test_bad_input_is_one_sentence(arguments, sentence):
    given = {"dataset": (X, Y), "model": small(), "seconds": 0.2} | arguments
    with pytest.raises(ValueError, match=sentence):
        check_speed(given.pop("dataset"), **given)
