"""The verdict is right where the cause is known, and the edit named first helps, measured."""

# ruff: noqa: ARG002 Keras calls its hooks with arguments that not every callback needs

import fnmatch
import gc
import json
import pathlib
import statistics
import time

import keras
import numpy as np
import pytest

from kdpkit import batches, testing, training
from kdpkit.diagnostics import SpeedEdit, SpeedReport, check_speed
from kdpkit.diagnostics._speed import speed_edits, trial_runs

IS_JAX = keras.backend.backend() == "jax"
FEATURES, BATCH = 64, 16
X, Y = testing.toy_classification(2048, features=FEATURES)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
IN_MEMORY = batches.ArrayBatches((X, Y), global_batch_size=BATCH, seed=0)
STEPS = 40


def compiled(model, **settings):
    model.compile("adam", LOSS, metrics=["accuracy"], **settings)
    return model


def small(**settings):
    return compiled(testing.tiny_classifier(features=FEATURES), **settings)


class Clock(keras.callbacks.Callback):
    """Times an epoch from its second call on."""

    def on_train_begin(self, logs=None):
        self.ends = []

    def on_train_batch_end(self, batch, logs=None):
        float(logs["loss"])  # is there
        self.ends.append((batch, time.perf_counter()))

    @property
    def seconds_per_step(self):
        (first, started), *_, (last, ended) = self.ends[1:]
        return (ended - started) / (last - first)


def diagnosed(*arguments, verdict, edit, **settings):
    """Return a report with this verdict that names this edit first; `*` stands for any text."""
    report = check_speed(*arguments, **settings)
    assert (report.verdict, len(report.edits) > 0) == (verdict, True), report
    assert fnmatch.fnmatchcase(report.edits[0].text, edit), report.edits
    return report


def assert_faster(before, after, *, times, steps=STEPS):
    """Train with both alternating, by Keras' own `fit`: the second is so many times as fast."""

    def seconds(case):
        model, dataset, callbacks = case
        clock = Clock()
        model.fit(dataset, steps_per_epoch=steps, verbose=0, callbacks=[*callbacks, clock])
        return clock.seconds_per_step

    for case in (before, after):
        seconds(case)  # compiles, and fills caches
    assert statistics.median(seconds(before) / seconds(after) for _ in range(3)) > times


def untuned(dataset):
    """Spare the test the minute that TensorFlow's tuning may wait."""
    from kdpkit._internal.dataset_tuning import untuned

    return untuned(dataset)


# Slow input.


def in_memory(size=BATCH):
    import tensorflow as tf

    return untuned(tf.data.Dataset.from_tensor_slices((X, Y)).repeat().batch(size))


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.tensorflow
def test_a_slow_map_is_input_bound_and_the_cache_it_names_helps():
    import tensorflow as tf

    def decode(number):
        image = tf.random.stateless_uniform((128, 128), tf.stack([number, number]))
        for _ in range(8):
            image = tf.linalg.matmul(image, image) / 128
        return tf.reshape(image, [-1])[:FEATURES], tf.cast(number % 3, tf.int32)

    def pipeline(*, cached):
        decoded = tf.data.Dataset.range(256).map(decode)
        decoded = decoded.cache() if cached else decoded
        return untuned(decoded.shuffle(64).batch(BATCH))

    report = diagnosed(
        pipeline(cached=False),
        model=small(),
        seconds=6,
        verdict="input-bound",
        edit="Put `.cache()` * `map(decode)`.*",
    )
    assert report.shares["waiting"] > 0.5
    assert report.edits[0].speedup > 2
    model = small()
    # The next epoch begins within `fit`, as the cache is read from the second one on.
    before, after = (pipeline(cached=cached).repeat() for cached in (False, True))
    assert_faster((model, before, ()), (model, after, ()), times=2)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.tensorflow
def test_a_slow_disk_is_input_bound_and_reading_files_at_once_helps(tmp_path):
    """Each reader gets so many bytes a second, as from a disk on the network."""
    import tensorflow as tf

    row, bytes_per_second = 4 * FEATURES, 1e5
    for number in range(8):
        (tmp_path / f"{number}.bin").write_bytes(X[number * 64 :][:64].tobytes())

    def read(path, index):
        with pathlib.Path(path.decode()).open("rb") as file:
            file.seek(int(index) * row)
            data = file.read(row)
        time.sleep(len(data) / bytes_per_second)
        return np.frombuffer(data, "float32")

    def records(path):
        def record(index):
            x = tf.numpy_function(read, [path, index], tf.float32)
            return tf.ensure_shape(x, [FEATURES]), tf.cast(index % 3, tf.int32)

        return tf.data.Dataset.range(64).map(record)

    def pipeline(**parallel):
        files = tf.data.Dataset.list_files(f"{tmp_path}/*.bin", shuffle=False)
        read_all = files.interleave(records, cycle_length=8, **parallel).batch(BATCH)
        options = tf.data.Options()
        options.threading.private_threadpool_size = 16  # calls of Python wait in them
        return untuned(read_all.prefetch(2)).with_options(options)

    report = diagnosed(pipeline(), model=small(), seconds=6, verdict="input-bound", edit="*")
    (parallel,) = [edit for edit in report.edits if "num_parallel_calls=8" in edit.text]
    assert parallel.text == ("Write `.interleave(records, cycle_length=8, num_parallel_calls=8)`.")
    assert parallel.speedup > 2
    assert {parallel, *report.edits[:1]} <= {*report.edits[:2]}  # only a cache may be better
    model = small()
    before = (model, pipeline().repeat(), ())
    assert_faster(before, (model, pipeline(num_parallel_calls=8).repeat(), ()), times=2)


class Slow(keras.utils.PyDataset):
    """Reads for a while, as from a disk."""

    def __len__(self):
        return STEPS + 1

    def __getitem__(self, index):
        time.sleep(0.02)
        return X[:BATCH], Y[:BATCH]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_slow_py_dataset_is_input_bound_and_workers_help():
    diagnosed(
        Slow(),
        model=small(),
        seconds=4,
        verdict="input-bound",
        edit="Set the dataset's `workers=4`.",
    )


# Heavy models.


def recurrent(**settings):
    layers = [keras.layers.LSTM(8), keras.layers.Dense(3)]
    return compiled(keras.Sequential([keras.Input((200, 16)), *layers]), **settings)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.tensorflow
def test_a_heavy_model_is_compute_bound_and_xla_helps_a_recurrent_one():
    import tensorflow as tf

    rows = (np.ones((BATCH, 200, 16), "float32"), Y[:BATCH])
    dataset = untuned(tf.data.Dataset.from_tensors(rows).repeat())
    report = diagnosed(
        dataset,
        model=recurrent(jit_compile=False),
        seconds=6,
        verdict="compute-bound",
        edit="Compile the model with `jit_compile=True`.",
    )
    assert report.shares["computing"] > 0.7
    assert not report.clean
    before, after = (recurrent(jit_compile=jit) for jit in (False, True))
    assert_faster((before, dataset, ()), (after, dataset, ()), times=2)


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("jit", "tried"), [(False, ["Set the loop's `jit=True`."]), ("measure", [])]
)
def test_xla_is_not_tried_on_a_loop_that_tries_it_by_itself(jit, tried):
    loop = training.TrainingLoop(testing.tiny_classifier(), optimizer="adam", loss=LOSS, jit=jit)
    batch = testing.toy_classification(BATCH)
    trainer = trial_runs.Trainer(loop, batch, None)
    assert [trial.text for trial in speed_edits.of_computing(trainer)] == tried


# Python in the step, and around it.


@pytest.mark.slow
def test_an_eager_step_is_host_bound_and_compiling_it_helps():
    diagnosed(
        IN_MEMORY,
        model=small(run_eagerly=True),
        seconds=4,
        verdict="host-bound",
        edit="Compile the model with `run_eagerly=False`.",
    )
    before, after = small(run_eagerly=True), small()
    assert_faster((before, IN_MEMORY, ()), (after, IN_MEMORY, ()), times=2)


@pytest.mark.slow
@pytest.mark.jax
def test_a_step_that_jax_does_not_compile_is_host_bound():
    diagnosed(
        IN_MEMORY,
        model=small(jit_compile=False),
        seconds=4,
        verdict="host-bound",
        edit="Compile the model with `jit_compile=True`.",
    )


class Counting(keras.callbacks.Callback):
    """Computes in Python at every step."""

    def on_train_batch_end(self, batch, logs=None):
        sum(number * number for number in range(200_000))


class Quick(keras.callbacks.Callback):
    """Acts at every step, and does nothing."""

    def on_train_batch_begin(self, batch, logs=None):
        pass


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_slow_callback_is_host_bound_and_is_named():
    model = small()
    report = diagnosed(
        IN_MEMORY,
        model=model,
        callbacks=[Quick(), Counting()],
        seconds=4,
        verdict="host-bound",
        edit="Leave `Counting` out*",
    )
    assert any("Without `Quick`, `Counting`" in sentence for sentence in report.evidence)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.tensorflow
def test_short_steps_are_host_bound_and_many_in_a_call_help():
    diagnosed(
        in_memory(),
        model=small(),
        seconds=4,
        verdict="host-bound",
        edit="Compile the model with `steps_per_execution=16`.",
    )
    data = in_memory()
    before, after = (small(steps_per_execution=count) for count in (1, 16))
    assert_faster((before, data, ()), (after, data, ()), times=2, steps=320)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_short_steps_of_a_loop_are_host_bound_and_many_in_a_call_help():
    def loop(steps):
        return training.TrainingLoop(
            testing.tiny_classifier(features=FEATURES),
            optimizer="adam",
            loss=LOSS,
            steps_per_loop=steps,
        )

    data = batches.ArrayBatches((X, Y), global_batch_size=4) if IS_JAX else in_memory(4)
    diagnosed(
        data,
        model=loop(1),
        seconds=4,
        verdict="host-bound",
        edit="Set the loop's `steps_per_loop=16`.",
    )


# What is left behind: nothing.


def state_of(model):
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def randomly(layers=keras.layers):
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
            layers.Dense(3),
        ]
    )


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("by", ["fit", "loop"])
def test_nothing_is_trained_and_training_goes_on_as_if_nothing_had_been_measured(by):
    data = batches.ArrayBatches((X[:64], Y[:64]), global_batch_size=BATCH, seed=0)
    if by == "loop" and not IS_JAX:
        data = in_memory().take(4)
    model = compiled(randomly())
    trainer = model
    if by == "loop":
        trainer = training.TrainingLoop(model, optimizer="adam", loss=LOSS, metrics=["accuracy"])
    trainer.fit(data, epochs=1, verbose=0, **({} if by == "loop" else {"shuffle": False}))
    gc.collect()  # on JAX a loop ends its last epoch when that is collected
    before, history, epoch = state_of(model), model.history, vars(data).get("epoch")
    settings = {name: getattr(model, name) for name in ("run_eagerly", "steps_per_execution")}
    np.random.seed(5)
    random_state = np.random.get_state()[1].tolist()
    report = check_speed(data, model=trainer, callbacks=[Quick()], seconds=0.2)
    assert report.step_seconds > 0
    for array, former in zip(state_of(model), before, strict=True):
        np.testing.assert_array_equal(array, former)
    assert (model.history, vars(data).get("epoch")) == (history, epoch)
    assert {name: getattr(model, name) for name in settings} == settings
    assert np.random.get_state()[1].tolist() == random_state
    assert not model.stop_training


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_model_that_was_not_built_is_built_and_not_trained():
    model = compiled(keras.Sequential([keras.layers.Dense(3)]))
    check_speed((X[:64], Y[:64]), model=model, batch_size=BATCH, seconds=0.2)
    assert model.built
    assert int(model.optimizer.iterations) == 0


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.tensorflow
def test_the_epoch_of_a_train_pipeline_does_not_move():
    import tensorflow as tf

    from kdpkit import pipelines

    source = tf.data.Dataset.from_tensor_slices((X[:64], Y[:64]))
    train = pipelines.train_pipeline(source, global_batch_size=BATCH)
    place = train.epoch_counter.position()
    check_speed(train, model=small(), seconds=0.2)
    assert train.epoch_counter.position() == place


@pytest.mark.exhaustive
@pytest.mark.tensorflow
def test_replicas_are_measured_together():
    from kdpkit import strategies

    with strategies.select_strategy("mirrored", devices=2).scope():
        model = training.replica_exact(testing.tiny_classifier(features=FEATURES))
        compiled(model)
    before = state_of(model)
    report = check_speed(in_memory(), model=model, seconds=0.5)
    assert sum(report.shares.values()) == pytest.approx(1)
    for array, former in zip(state_of(model), before, strict=False):
        np.testing.assert_array_equal(array, former)


@pytest.mark.slow
def test_callbacks_that_save_are_left_out_and_noted_and_none_of_the_users_is_changed(tmp_path):
    class Noting(keras.callbacks.Callback):
        seen = 0

        def on_train_batch_end(self, batch, logs=None):
            self.seen += 1

    noting = Noting()
    saving = keras.callbacks.ModelCheckpoint(str(tmp_path / "model.keras"), save_freq=1)
    stopping = keras.callbacks.EarlyStopping("loss")
    report = check_speed(
        IN_MEMORY, model=small(), callbacks=[saving, stopping, noting], seconds=0.2
    )
    assert report.notes[0] == "`ModelCheckpoint` may save or log at steps, and was left out."
    assert any("Without `Noting` a step" in sentence for sentence in report.evidence)
    assert not [*tmp_path.iterdir()]
    assert noting.seen == 0


# What it says.


def report_of(verdict="input-bound", edits=()):
    return SpeedReport(
        verdict,
        step_seconds=0.0612,
        waiting_seconds=0.052,
        computing_seconds=0.009,
        host_seconds=0.0002,
        evidence=("Real training makes 16.3 steps/s.",),
        edits=edits,
    )


def test_the_report_is_read_in_80_columns_and_as_plain_values():
    edits = (
        SpeedEdit("waiting", "Put `.cache()` after `map(decode)`." * 2, 0.0094, 6.51),
        SpeedEdit("waiting", "Have others do it.", 0.03, 2.0),
    )
    report = report_of(edits=edits)
    lines = str(report).splitlines()
    assert lines[0] == "Input-bound: a step takes 61.2 ms."
    assert lines[2].split() == ["waiting", "for", "input", "52.0", "ms", "85%"]
    assert max(map(len, lines)) <= 80
    assert "Measured: 9.40 ms a step, 6.5 times as fast." in " ".join(str(report).split())
    assert "2. Have others do it. Measured: 30.0 ms" in lines[-1]
    read = json.loads(json.dumps(report.to_dict()))
    assert (read["verdict"], read["clean"]) == ("input-bound", False)
    assert read["edits"][0]["speedup"] == 6.51


def test_a_report_is_clean_where_the_time_is_computing_and_nothing_helps():
    assert report_of("compute-bound").clean
    assert not report_of("compute-bound", (SpeedEdit("computing", "XLA.", 0.03, 2.0),)).clean
    assert not report_of("host-bound").clean


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"model": None}, "A step's time needs a model"),
        ({"model": testing.tiny_classifier()}, "`model` is not compiled"),
        ({"dataset": (x for x in [X])}, "A generator yields each batch once"),
        ({"seconds": 0}, "`seconds` must be above 0"),
        ({"dataset": (X[:, :3], Y)}, "The training fails, so it has no speed"),
    ],
)
def test_bad_input_is_one_sentence(arguments, sentence):
    given = {"dataset": (X, Y), "model": small(), "seconds": 0.2} | arguments
    with pytest.raises(ValueError, match=sentence):
        check_speed(given.pop("dataset"), **given)
