"""What `Resume` cannot continue exactly raises, or is reported, in a sentence."""

import datetime

import keras
import pytest

from kdpkit import testing
from kdpkit.callbacks import Resume
from tests.callbacks.resume_programs import ARRAYS, STEPS, Shuffled, batches, compiled, fit
from tests.callbacks.test_resume import Stop

DATED = keras.callbacks.LambdaCallback(
    on_epoch_end=lambda _, logs: logs.update(when=datetime.datetime(2026, 1, 1))
)


def train(path, *others, arrays=ARRAYS, data=None, **settings):
    resume = Resume(path)
    tracked = resume.track(batches(arrays))
    tracked[0]  # a read before training is none of training
    return fit(compiled(), data or tracked, *others, resume, **settings)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: Resume(path, save_freq="batch"), "`save_freq`.*\"epoch\".*'batch'"),
        (lambda path: Resume(path).track(Resume(path).track(batches())), "tracked already"),
        (lambda path: Resume(path, callbacks=[keras.callbacks.Callback()]), "know.*get_state"),
        (lambda path: fit(compiled(), batches(), Resume(path)), r"train on `resume.track\(dataset"),
        (lambda path: train(path, steps_per_epoch=1), "`steps_per_epoch` to `fit` if.*ends.*=1"),
        (lambda path: train(path, data=batches()), r"trains on another dataset.*`resume.track"),
        (
            lambda path: train(path, arrays=testing.toy_classification(400), shuffle=True),
            "`shuffle=False`",
        ),
        (lambda path: train(path, DATED), "holds numbers, text.*value=datetime"),
    ],
)
def test_what_resume_cannot_do_raises(tmp_path, make, sentence):
    with pytest.raises(Exception, match=sentence):  # TensorFlow wraps what the data raise
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
        (lambda data, tf: data.flat_map(lambda _: tf.data.Dataset.range(3).shuffle(3)), "flat_map"),
    ],
)
def test_a_pipeline_of_unknown_order_or_length_raises(tmp_path, add, sentence):
    import tensorflow as tf

    tf.random.set_seed(None)
    with pytest.raises(ValueError, match=sentence):
        Resume(tmp_path).track(add(tf.data.Dataset.range(9), tf))


@pytest.mark.parametrize(
    "add",
    [
        lambda data: data.shuffle(3, seed=1),
        lambda data: data.map(lambda *batch: batch),
        lambda data: data.unbatch(),
        lambda data: data.apply(lambda one: one.cache()),
    ],
)
def test_stages_after_track_raise(tmp_path, add):
    import tensorflow as tf

    train = Resume(tmp_path).track(tf.data.Dataset.range(9).batch(3))
    with pytest.raises(ValueError, match="Add this stage before `track`"):
        add(train)


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
    with pytest.raises(SystemExit):
        fit(model, train, Stop("request", STEPS + 2, resume=resume), resume)
    with pytest.raises(ValueError, match="cannot go back .*dataset='Shuffled'"):
        fit(model, train, resume)


def test_a_loop_of_ones_own_prints_where_it_continues(tmp_path, capsys):
    def epoch(number):
        resume = Resume(tmp_path)
        data, model = resume.track(batches()), compiled()
        settings = {"model": model, "epochs": 2, "steps": len(data)}
        with pytest.raises(ValueError, match="saves History: pass `add_history=True`"):
            keras.callbacks.CallbackList([resume], **settings).on_train_begin()
        hooks = keras.callbacks.CallbackList([resume], add_history=True, **settings)
        hooks.on_train_begin()
        hooks.on_epoch_begin(number)
        for step, (x, y) in enumerate(data):
            hooks.on_train_batch_begin(step)
            model.train_on_batch(x, y)
            hooks.on_train_batch_end(step)
        data.on_epoch_end()
        hooks.on_epoch_end(number, {"loss": 0.0})
        hooks.on_train_end()

    epoch(0)
    assert not capsys.readouterr().out
    epoch(1)
    assert "epoch 2 of 2, after 0 of" in capsys.readouterr().out


def test_a_loop_whose_model_has_no_optimizer_is_warned(tmp_path):
    resume, model = Resume(tmp_path), testing.tiny_classifier()
    data = resume.track(batches())
    hooks = keras.callbacks.CallbackList(
        [resume], add_history=True, model=model, epochs=1, steps=len(data)
    )
    with pytest.warns(UserWarning, match=r"has no optimizer.*`model\.compile`"):
        hooks.on_train_begin()
