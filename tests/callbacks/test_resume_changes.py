"""A program that is changed before it is started again trains with its own settings, or raises."""

import contextlib
import re
import shutil
import warnings

import keras
import numpy as np
import pytest
from keras import layers
from keras.callbacks import EarlyStopping, LambdaCallback, LearningRateScheduler, ReduceLROnPlateau
from keras.optimizers import SGD, Adagrad, Adam, Lion, LossScaleOptimizer, schedules

from kdpkit import checkpoints
from kdpkit.batches import ArrayBatches, Source
from kdpkit.callbacks import Resume

STEPS = 3
X = np.random.default_rng(0).random((27, 4)).astype("float32")


class OwnSchedule(schedules.LearningRateSchedule):
    """A schedule without `get_config`, whose setting has no public name."""

    def __init__(self, peak):
        self._peak = peak

    def __call__(self, step):
        return self._peak + 0.0 * keras.ops.cast(step, "float32")


class OddSchedule(schedules.LearningRateSchedule):
    """A schedule that holds what differs in each process, and changes when it is called."""

    def __init__(self):
        self.names, self.shape = {str, "a", "b"}, lambda step: 0.0 * step

    def __call__(self, step):
        self.last = 0.1 + self.shape(keras.ops.cast(step, "float32"))
        return self.last

    def get_config(self):
        return {"names": self.missing}


class OldOptimizer(SGD):
    """An optimizer with the `get_config` of Keras 2."""

    def get_config(self):
        return {"learning_rate": self._serialize_hyperparameter("learning_rate")}


class OddCallback(keras.callbacks.Callback):
    monitor, mode = ("loss", "mae"), np.less

    def get_state(self):
        return {}

    def set_state(self, values):
        pass


class OddBatches(keras.utils.PyDataset):
    global_batch_size, num_batches = np.int64(8), STEPS

    def __init__(self):
        super().__init__()
        self.seed = np.random.SeedSequence(0)

    def __getitem__(self, index):
        return X[:8], X[:8, :1]


def build(first="left", second="right", *, width=4, rates=(0.2,)):
    hidden = [layers.Dense(width, name=name) for name in (first, second)]
    x = inputs = keras.Input((4,))
    for layer in [*hidden, *map(layers.Dropout, rates), layers.Dense(1, name="head")]:
        x = layer(x)
    return keras.Model(inputs, x)


def build_unnamed(*, swap=False, before=0):
    for _ in range(before):
        layers.Dense(1)
    hidden = [layers.Dense(4), layers.Dense(4)]
    x = inputs = keras.Input((4,))
    for layer in [*(reversed(hidden) if swap else hidden), layers.Dense(1)]:
        x = layer(x)
    return keras.Model(inputs, x)


def batches(examples=27, size=8, seed=1):
    return ArrayBatches((X[:examples], X[:examples, :1]), global_batch_size=size, seed=seed)


def source(examples=27):
    data = Source(examples, lambda indices: (X[indices], X[indices, :1]))
    return ArrayBatches(data, global_batch_size=8, seed=1)


def pipeline(examples=27):
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices((X[:examples], X[:examples, :1]))
    return data.shuffle(27, seed=3).map(lambda *x: x).batch(8, drop_remainder=True)


def train_pipeline(examples=27):
    import tensorflow as tf

    from kdpkit import pipelines

    data = tf.data.Dataset.from_tensor_slices((X[:examples], X[:examples, :1]))
    config = pipelines.PipelineConfig(seed=1)
    return pipelines.train_pipeline(data, config, global_batch_size=8)


def run(
    directory,
    *,
    model=build,
    optimizer=lambda: Adam(0.01),
    data=batches,
    callbacks=list,
    policy="float32",
    stop=None,
    fit=None,
    **settings,
):
    keras.backend.clear_session()  # Names of layers count from 0, as in a new process.
    keras.config.set_dtype_policy(policy)
    compiled = {"loss": "mse", "metrics": ["mae"], "run_eagerly": True} | settings
    try:
        trained = model()
        trained.compile(optimizer(), **compiled)
        watching, steps = callbacks(), iter(range(1, 100))
        learning = [x for x in watching if not isinstance(x, LearningRateScheduler)]
        resume = Resume(directory, callbacks=learning)
        stopping = LambdaCallback(
            on_train_batch_end=lambda *_, **__: next(steps) == stop and resume.request_stop()
        )
        fitted = {"epochs": 3, "shuffle": False, "verbose": 0} | (fit or {})
        train = resume.track(data())
        with contextlib.suppress(SystemExit):
            trained.fit(train, callbacks=[stopping, *watching, resume], **fitted)
    finally:
        keras.config.set_dtype_policy("float32")
    used = getattr(trained.optimizer, "inner_optimizer", trained.optimizer)
    used = getattr(used, "optimizers", [used])[0]
    return trained, float(keras.ops.convert_to_numpy(used.learning_rate))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directories = {}

    def of(name, settings):
        if name not in directories:
            directories[name] = tmp_path_factory.mktemp("saved")
            run(directories[name], **settings)
        return directories[name]

    return of


def constant(rate, **settings):
    return {"optimizer": lambda: Adam(rate, **settings)}


def cosine(steps):
    return {"optimizer": lambda: Adam(schedules.CosineDecay(0.1, steps))}


def several(rate):
    by_path = keras.optimizers.OptimizerMap(SGD(0.1), {".*kernel": Adam(rate)})
    return keras.optimizers.MultiOptimizer(by_path)


def reducing(**settings):
    plateau = {"factor": 0.5, "patience": 1, "min_delta": 9.0} | settings
    return {"callbacks": lambda: [ReduceLROnPlateau("loss", **plateau)]}


def until(monitor):
    return {"callbacks": lambda: [EarlyStopping(monitor, patience=9)]}


def scaled(optimizer, **settings):
    return {"optimizer": lambda: LossScaleOptimizer(optimizer(0.01), **settings)}


def built(**settings):
    return {"model": lambda: build(**settings)}


def of(data, *settings, **others):
    return {"data": lambda: data(*settings, **others)}


FIRST = {"at the end of an epoch": {"fit": {"epochs": 2}}, "inside an epoch": {"stop": STEPS + 2}}
END, INSIDE = FIRST
UNNAMED = {"model": build_unnamed}
DOES_NOT_FIT = "does not fit the {}, which.*variable=.'{}.*saved=.'{}"
# What was changed: where the state is, the settings before, those that are changed, the sentence.
# Without a sentence the program's setting is used, as the page says.
USED = {
    "rate": (END, {}, constant(0.001), r"learning_rate=0.001 \(saved: 0.01\)"),
    "rate inside": (INSIDE, {}, constant(0.001), r"learning_rate=0.001 \(saved: 0.01\)"),
    "rate of scaled": (
        *(END, scaled(Adam)),
        {"optimizer": lambda: LossScaleOptimizer(Adam(0.001))},
        r"learning_rate=0.001 \(saved: 0.01\)",
    ),
    "rate to schedule": (END, {}, cosine(30), r"learning_rate=.CosineDecay.*\(saved: 0.01\)"),
    "schedule to rate": (END, cosine(30), constant(0.001), r"rate=0.001 \(saved: .CosineDecay"),
    "schedule": (END, cosine(30), cosine(60), r"steps=60.*saved:.*steps=30"),
    "own schedule": (
        END,
        constant(OwnSchedule(0.1)),
        constant(OwnSchedule(0.2)),
        "0.2.*saved:.*0.1",
    ),
    "constant": (END, {}, constant(0.01, beta_1=0.8), r"beta_1=0.8 \(saved: 0.9\)"),
    "clipping": (INSIDE, {}, constant(0.01, clipnorm=1.0), r"clipnorm=1.0 \(saved: None\)"),
    "loss scale": (
        *(END, scaled(Adam), scaled(Adam, initial_scale=8.0)),
        r"initial_scale=8.0 \(saved: 32768.0\)",
    ),
    "examples": (END, {}, of(batches, 24), r"number_of_examples=24 \(saved: 27\)"),
    "batch": (END, {}, of(batches, size=9), r"global_batch_size=9 \(saved: 8\)"),
    "order": (END, {}, of(batches, seed=2), r"seed=2 \(saved: 1\)"),
    # Not compared, and documented.
    "names that Keras counts": (END, UNNAMED, {"model": lambda: build_unnamed(before=3)}, None),
    "numbers": (END, {}, {"policy": "mixed_bfloat16"}, None),
    "dropout": (INSIDE, {}, built(rates=[0.1]), None),
    "plateau": (END, reducing(), reducing(cooldown=2), None),
    "execution": (INSIDE, {}, {"steps_per_execution": 2}, None),
}
RAISES = {
    "optimizer": (END, {}, {"optimizer": lambda: SGD(0.01)}, r"\['Adam'\].*\['SGD'\]"),
    "inner optimizer": (END, scaled(Adagrad), scaled(Lion), "'Adagrad'.*'Lion'"),
    "numbers": (END, {}, {"policy": "mixed_float16"}, r"\['Adam'\].*LossScaleOptimizer"),
    "average": (
        *(END, {}, constant(0.01, use_ema=True)),
        DOES_NOT_FIT.format("optimizer", "adam/left_kernel_average", "adam/left_kernel_momentum"),
    ),
    "order of layers": (
        *(END, {}, built(first="right", second="left")),
        DOES_NOT_FIT.format("model", "right/kernel', .4, 4", "left/kernel', .4, 4"),
    ),
    "order of layers without names": (
        *(END, UNNAMED, {"model": lambda: build_unnamed(swap=True)}),
        DOES_NOT_FIT.format("model", "dense_1/kernel", "dense/kernel"),
    ),
    "width": (
        *(END, {}, built(width=5)),
        DOES_NOT_FIT.format("model", "left/kernel', .4, 5", "left/kernel', .4, 4"),
    ),
    "layers": (
        *(END, {}, built(rates=[0.2, 0.2])),
        DOES_NOT_FIT.format("model", "seed_generator_1/", "head/kernel"),
    ),
    "examples": (INSIDE, {}, of(batches, 24), "saved=27, number_of_examples=24"),
    "examples of a source": (INSIDE, of(source), of(source, 24), "=27, number_of_examples=24"),
    "batch": (INSIDE, {}, of(batches, size=9), "saved=8, global_batch_size=9"),
    "order": (INSIDE, {}, of(batches, seed=2), "saved=1, seed=2"),
    "metrics": (
        *(INSIDE, {"metrics": ["mae", "mse"]}, {"metrics": ["mse", "mae"]}),
        DOES_NOT_FIT.format("metrics", "mean_squared_error", "mean_absolute_error"),
    ),
    "monitor": (END, until("loss"), until("mae"), "'loss'.*'mae'"),
    "callbacks": (END, {}, until("loss"), "saved=.., callbacks=..'EarlyStopping'"),
}


def started_again(table, change, saved, directory):
    where, before, changed, sentence = table[change]
    of_case = saved((where, table is USED, change) if before else where, before | FIRST[where])
    shutil.copytree(of_case, directory / "run")
    return (*run(directory / "run", **before | changed), sentence)


QUICK = {"rate inside", "rate to schedule", "examples", "order of layers", "monitor"}


def mostly_slow(table):
    return [pytest.param(x, marks=[] if x in QUICK else pytest.mark.slow) for x in table]


@pytest.mark.parametrize("change", mostly_slow(USED))
def test_a_changed_setting_is_used_and_reported(change, saved, tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, last_rate, sentence = started_again(USED, change, saved, tmp_path)
    reports = [str(one.message) for one in caught if "other settings" in str(one.message)]
    assert len(reports) == (sentence is not None)
    assert re.search(sentence or "", "".join(reports))
    assert model.history.epoch == [0, 1, 2]
    if "learning_rate=0.001" in (sentence or ""):
        assert last_rate == pytest.approx(0.001)


UNCHANGED = {
    "schedule": {"optimizer": lambda: SGD(OddSchedule()), "data": OddBatches},
    "optimizer": {
        "optimizer": lambda: OldOptimizer(0.1, clipnorm=np.float32(0.1)),
        "callbacks": lambda: [OddCallback()],
    },
    "several": {"optimizer": lambda: several(lambda: 0.1)},
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_an_unchanged_program_continues_without_a_sentence(name, tmp_path):
    run(tmp_path, **UNCHANGED[name], stop=STEPS + 2)
    model, _ = run(tmp_path, **UNCHANGED[name])  # Warnings are errors.
    assert model.history.epoch == [0, 1, 2]


@pytest.mark.parametrize("change", mostly_slow(RAISES))
def test_a_change_that_a_state_does_not_fit_raises(change, saved, tmp_path):
    with pytest.raises(ValueError, match=RAISES[change][-1]):
        started_again(RAISES, change, saved, tmp_path)


@pytest.mark.tensorflow
@pytest.mark.parametrize("data", [pipeline, train_pipeline])
def test_a_pipeline_of_other_examples_raises_inside_an_epoch(data, tmp_path):
    run(tmp_path, data=data, stop=STEPS + 2)
    with pytest.raises(ValueError, match="saved=27, number_of_examples=24"):
        run(tmp_path, data=lambda: data(24))


@pytest.mark.parametrize(
    ("initial", "expected"), [(0.01, 0.01 / 8), (0.001, 0.001 / 2)], ids=["unchanged", "lowered"]
)
def test_a_rate_that_training_reduced_is_restored_unless_the_program_changes_it(
    initial, expected, tmp_path
):
    run(tmp_path, **reducing(), fit={"epochs": 3})  # reduced after epochs 2 and 3
    other = contextlib.nullcontext() if initial == 0.01 else pytest.warns(match="learning_rate")
    with other:
        _, rate = run(tmp_path, **reducing(), **constant(initial), fit={"epochs": 4})
    assert rate == pytest.approx(expected)
    _, rate = run(tmp_path, **reducing(), **constant(initial), fit={"epochs": 5})  # no sentence
    assert rate == pytest.approx(expected / 2)


@pytest.mark.parametrize(("is_relative", "is_lowered"), [(False, False), (True, True)])
def test_a_rate_set_between_two_calls_of_fit_is_the_programs(is_relative, is_lowered, tmp_path):
    def program(rate, epochs):
        keras.backend.clear_session()
        model, resume, plateau = build(), Resume(tmp_path), reducing()["callbacks"]()[0]
        model.compile(SGD(0.1), "mse", run_eagerly=True)
        train = resume.track(batches())
        for first, last in ((0, 2), (2, epochs)):
            settings = {"initial_epoch": first, "epochs": last, "shuffle": False, "verbose": 0}
            model.fit(train, callbacks=[plateau, resume], **settings)
            if first == 0:  # The first call reduced the rate to 0.05.
                reached = keras.ops.convert_to_numpy(model.optimizer.learning_rate)
                model.optimizer.learning_rate = reached * rate / 0.05 if is_relative else rate
        return float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))

    assert program(0.04, 4) == pytest.approx(0.02)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rate = program(0.01 if is_lowered else 0.04, 6)
    assert rate == pytest.approx(0.005 if is_lowered else 0.01)
    reports = [str(one.message) for one in caught if "other settings" in str(one.message)]
    assert len(reports) == is_lowered


def test_a_call_that_failed_and_is_repeated_has_the_rate_of_the_state(tmp_path):
    model, resume = build(), Resume(tmp_path)
    model.compile(SGD(0.1), "mse", run_eagerly=True)
    train, failures = resume.track(batches()), iter([False] * (STEPS + 1) + [True] + [False] * 99)
    scheduler = LearningRateScheduler(lambda _, rate: rate / 2)
    failing = LambdaCallback(on_train_batch_end=lambda *_, **__: 1 // (not next(failures)))
    for expected in (pytest.raises(ZeroDivisionError), contextlib.nullcontext()):
        with expected:
            callbacks = [scheduler, failing, resume]
            model.fit(train, epochs=3, shuffle=False, verbose=0, callbacks=callbacks)
    rate = float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))
    assert rate == pytest.approx(0.1 / 8)


def test_a_callback_that_sets_the_rate_still_does(tmp_path):
    schedule = {"callbacks": lambda: [LearningRateScheduler(lambda epoch: 0.1 / 2**epoch)]}
    run(tmp_path, **schedule, stop=STEPS + 2)
    _, rate = run(tmp_path, **schedule)
    assert rate == pytest.approx(0.025)


@pytest.mark.parametrize("version", [1, 99])
def test_a_state_of_another_format_raises(version, tmp_path, monkeypatch):
    monkeypatch.setattr("kdpkit.checkpoints._directory._FORMAT", version)
    run(tmp_path, fit={"epochs": 1})
    monkeypatch.undo()
    with pytest.raises(ValueError, match=f"of format 2 only.*format={version}.*version that wrote"):
        run(tmp_path)


def test_a_state_of_a_loop_of_ones_own_raises(tmp_path):
    position = checkpoints.Position(1, 0)
    state = checkpoints.TrainingState(position=position, arrays={})
    checkpoints.CheckpointDirectory(tmp_path).save(state)
    with pytest.raises(ValueError, match="none of `Resume`.*directory="):
        run(tmp_path)
