"""The verdict is right where the cause is known, and the edit named first helps, measured."""

# ruff: noqa: ARG002 Keras calls its hooks with arguments that not every callback needs

import fnmatch
import functools
import gc
import json
import pathlib
import statistics
import time

import keras
import numpy as np
import pytest

from kdpkit import batches, testing, training
from kdpkit.diagnostics import SpeedEdit, SpeedReport, _speed_edits, _speed_runs, check_speed

IS_JAX = keras.backend.backend() == "jax"
FEATURES, ROWS = 64, 16
X, Y = testing.toy_classification(2048, features=FEATURES)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
IN_MEMORY = batches.ArrayBatches((X, Y), global_batch_size=ROWS, seed=0)
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
    """Give a report with this verdict that names this edit first; `*` stands for any text.

    It is measured anew where another comes: other work may have had the cores meanwhile.
    """
    for _ in range(3):
        report = check_speed(*arguments, **settings)
        if report.verdict == verdict and any(
            fnmatch.fnmatchcase(first.text, edit) for first in report.edits[:1]
        ):
            return report
    raise AssertionError(f"{report.verdict}, not {verdict}: {report.evidence}, {report.edits}")


def assert_faster(before, after, *, times, steps=STEPS):
    """Train with both in turns, by Keras' own `fit`: the second is so many times as fast.

    As with `diagnosed`, other work may have the cores meanwhile, so that it has three attempts.
    """

    def seconds(case):
        model, dataset, callbacks = case
        clock = Clock()
        fit = model.fit if isinstance(model, keras.Model) else functools.partial(loop_fit, model)
        fit(dataset, steps_per_epoch=steps, verbose=0, callbacks=[*callbacks, clock])
        return clock.seconds_per_step

    def measured():
        return statistics.median(seconds(before) / seconds(after) for _ in range(3))

    for case in (before, after):
        seconds(case)  # compiles, and fills caches
    attempts = []
    while len(attempts) < 3 and not (attempts and attempts[-1] > times):
        attempts.append(measured())
    assert attempts[-1] > times, attempts


def loop_fit(loop, dataset, **settings):
    return loop.fit(dataset, epochs=1, **settings)


def untuned(dataset):
    """Spare the test the minute that TensorFlow's tuning may wait."""
    from kdpkit._tuning import untuned

    return untuned(dataset)


# Slow input.


def in_memory(rows=ROWS):
    import tensorflow as tf

    return untuned(tf.data.Dataset.from_tensor_slices((X, Y)).repeat().batch(rows))


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
        return untuned(decoded.shuffle(64).batch(ROWS))

    report = diagnosed(
        pipeline(cached=False),
        model=small(),
        seconds=6,
        verdict="input-bound",
        edit="Put `.cache()` behind `map(decode)`.*",
    )
    assert report.shares["waiting"] > 0.5
    assert report.edits[0].speedup > 2
    model = small()
    # The next epoch begins within `fit`, as the cache is read from the second one on.
    before, after = (pipeline(cached=cached).repeat() for cached in (False, True))
    assert_faster((model, before, ()), (model, after, ()), times=2)


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
        read_all = files.interleave(records, cycle_length=8, **parallel).batch(ROWS)
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
    assert_faster(before, (model, pipeline().cache().repeat(), ()), times=2, steps=3 * 32)


class Slow(keras.utils.PyDataset):
    """Reads for a while, as from a disk."""

    def __len__(self):
        return STEPS + 1

    def __getitem__(self, index):
        time.sleep(0.02)
        return X[:ROWS], Y[:ROWS]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_slow_py_dataset_is_input_bound_and_workers_help():
    diagnosed(
        Slow(),
        model=small(),
        seconds=4,
        verdict="input-bound",
        edit="Give the dataset `workers=4`.",
    )
    model = small()
    assert_faster((model, Slow(), ()), (model, Slow(workers=4), ()), times=1.7)


# Heavy models.


def recurrent(**settings):
    layers = [keras.layers.LSTM(8), keras.layers.Dense(3)]
    return compiled(keras.Sequential([keras.Input((200, 16)), *layers]), **settings)


@pytest.mark.slow
@pytest.mark.tensorflow
def test_a_heavy_model_is_compute_bound_and_xla_helps_a_recurrent_one():
    import tensorflow as tf

    rows = (np.ones((ROWS, 200, 16), "float32"), Y[:ROWS])
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
    ("jit", "tried"), [(False, ["Give the loop `jit=True`."]), ("measure", [])]
)
def test_xla_is_not_tried_on_a_loop_that_tries_it_by_itself(jit, tried):
    loop = training.TrainingLoop(testing.tiny_classifier(), optimizer="adam", loss=LOSS, jit=jit)
    batch = testing.toy_classification(ROWS)
    trainer = _speed_runs.Trainer(loop, batch, None)
    assert [trial.text for trial in _speed_edits.of_computing(trainer)] == tried


# Python in the step, and around it.


@pytest.mark.slow
def test_an_eager_step_is_host_bound_and_compiling_it_helps():
    settings = {"run_eagerly": True}
    diagnosed(
        IN_MEMORY,
        model=small(**settings),
        seconds=4,
        verdict="host-bound",
        edit="Compile the model with `run_eagerly=False`.",
    )
    before, after = small(**settings), small()
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
    before, after = small(jit_compile=False), small()
    assert_faster((before, IN_MEMORY, ()), (after, IN_MEMORY, ()), times=2)


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
    assert any("Without `Quick`, `Counting`" in said for said in report.evidence)
    before = (model, IN_MEMORY, [Quick(), Counting()])
    assert_faster(before, (model, IN_MEMORY, [Quick()]), times=2)


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
        edit="Give the loop `steps_per_loop=16`.",
    )
    assert_faster((loop(1), data, ()), (loop(16), data, ()), times=1.4, steps=320)


class Asking(keras.layers.Layer):
    """Asks Python in the middle of a step."""

    def call(self, x):
        if IS_JAX:
            import jax

            kept = jax.pure_callback(ask, jax.ShapeDtypeStruct(x.shape, x.dtype), x * 0)
        else:
            import tensorflow as tf

            kept = tf.ensure_shape(tf.py_function(ask, [x * 0], x.dtype), x.shape)
        return x + keras.ops.stop_gradient(kept)

    def compute_output_shape(self, shape):
        return shape


def ask(array):
    sum(number * number for number in range(200_000))
    return np.asarray(array)


@pytest.mark.slow
@pytest.mark.tensorflow
def test_python_within_a_step_is_host_bound_and_the_function_is_named():
    layers = [Asking(), keras.layers.Dense(3)]
    model = compiled(keras.Sequential([keras.Input((FEATURES,)), *layers]), jit_compile=False)
    report = diagnosed(
        in_memory(),
        model=model,
        seconds=4,
        verdict="host-bound",
        edit="*Write ask (test_speed.py:*",
    )
    assert not report.edits[0].tried
    assert any("Python of yours runs in" in said for said in report.evidence)
    after = compiled(keras.Sequential([keras.Input((FEATURES,)), layers[1]]), jit_compile=False)
    assert_faster((model, in_memory(), ()), (after, in_memory(), ()), times=2)


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


@pytest.mark.slow
@pytest.mark.parametrize("by", ["fit", "loop"])
def test_nothing_is_trained_and_training_goes_on_as_if_nothing_had_been_measured(by):
    data = batches.ArrayBatches((X[:64], Y[:64]), global_batch_size=ROWS, seed=0)
    if by == "loop" and not IS_JAX:
        data = in_memory().take(4)
    model = compiled(randomly())
    trainer = model
    if by == "loop":
        trainer = training.TrainingLoop(model, optimizer="adam", loss=LOSS, metrics=["accuracy"])
    fit = functools.partial(loop_fit, trainer) if by == "loop" else model.fit
    fit(data, verbose=0, **({} if by == "loop" else {"shuffle": False}))
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


@pytest.mark.slow
def test_a_model_that_was_not_built_trains_afterwards_as_without():
    def build():
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)]
        return compiled(keras.Sequential(layers))

    measured, plain = build(), build()
    check_speed((X[:64], Y[:64]), model=measured, batch_size=ROWS, seconds=0.2)
    plain.build((None, FEATURES))
    plain.set_weights(measured.get_weights())
    for model in (measured, plain):
        model.fit(X[:64], Y[:64], batch_size=ROWS, shuffle=False, verbose=0)
    for one, other in zip(state_of(measured), state_of(plain), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
@pytest.mark.tensorflow
def test_the_epoch_of_a_train_pipeline_does_not_move():
    import tensorflow as tf

    from kdpkit import pipelines

    source = tf.data.Dataset.from_tensor_slices((X[:64], Y[:64]))
    train = pipelines.train_pipeline(source, global_batch_size=ROWS)
    place = train.movable.counter.place()
    check_speed(train, model=small(), seconds=0.2)
    assert train.movable.counter.place() == place


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
    assert any("Without `Noting` a step" in said for said in report.evidence)
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
        SpeedEdit("waiting", "Put `.cache()` behind `map(decode)`." * 2, 0.0094, 6.51),
        SpeedEdit("waiting", "Have others do it.", tried=False),
    )
    report = report_of(edits=edits)
    lines = str(report).splitlines()
    assert lines[0] == "Input-bound: a step takes 61.2 ms."
    assert lines[2].split() == ["waiting", "for", "input", "52.0", "ms", "85%"]
    assert max(map(len, lines)) <= 80
    assert "Measured: 9.40 ms a step, 6.5 times as fast." in " ".join(str(report).split())
    assert lines[-1] == "2. Have others do it. Not tried."
    read = json.loads(json.dumps(report.to_dict()))
    assert (read["verdict"], read["clean"]) == ("input-bound", False)
    assert read["edits"][0]["speedup"] == 6.51


def test_a_report_is_clean_where_the_time_is_computing_and_nothing_helps():
    untried = SpeedEdit("computing", "More replicas.", tried=False)
    assert report_of("compute-bound", (untried,)).clean
    assert not report_of("compute-bound", (SpeedEdit("computing", "XLA.", 0.03, 2.0),)).clean
    assert not report_of("host-bound").clean


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"model": None}, "A step's time needs a model"),
        ({"model": 3}, "`model` must be a Keras model"),
        ({"model": testing.tiny_classifier()}, "`model` is not compiled"),
        ({"dataset": (x for x in [X])}, "A generator gives each batch once"),
        ({"dataset": "rows"}, "`dataset` must be a `tf.data.Dataset`"),
        ({"dataset": (X[:0], Y[:0])}, "at least one, along the first axis"),
        ({"seconds": 0}, "`seconds` must be above 0"),
        ({"dataset": (X[:, :3], Y)}, "The training fails, so it has no speed"),
    ],
)
def test_bad_input_is_one_sentence(arguments, sentence):
    given = {"dataset": (X, Y), "model": small(), "seconds": 0.2} | arguments
    with pytest.raises(ValueError, match=sentence):
        check_speed(given.pop("dataset"), **given)
