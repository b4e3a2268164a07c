"""A run that was stopped and resumed ends as one that was not, on both backends."""

# ruff: noqa: ARG002 Keras calls its hooks with arguments that not every callback needs

import os
import pathlib
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest

import kdpkit
from kdpkit import checkpoints, testing
from kdpkit._internal import atomic_files
from kdpkit.batches import ArrayBatches
from kdpkit.callbacks import Resume
from kdpkit.callbacks._resume import callback_state
from kdpkit.checkpoints import _background as background
from kdpkit.training import TrainingLoop, replica_exact

ROOT = pathlib.Path(kdpkit.__file__).parent.parent
EXAMPLES, STEPS, EPOCHS = 20, 5, 3
ON_JAX = keras.backend.backend() == "jax"


def data_of(examples=EXAMPLES, **settings):
    settings = {"global_batch_size": 4} | settings
    return ArrayBatches(testing.toy_classification(examples), **settings)


def fit(model, data, *callbacks, epochs=1, **settings):
    """Train with callbacks, the last `Resume` or after it, in the order of the batches."""
    settings = {"shuffle": False, "verbose": 0, "epochs": epochs} | settings
    return model.fit(data, callbacks=[*callbacks], **settings)


class CrashError(Exception):
    """What ends a run."""


class CrashAt(keras.callbacks.Callback):
    """Ends a run before a step, counted over all epochs; comes after `Resume`."""

    def __init__(self, step):
        super().__init__()
        self.step = step
        self.seen = 0

    def on_train_batch_begin(self, batch, logs=None):
        if self.seen == self.step:
            raise CrashError
        self.seen += 1


def build():
    """A model whose steps depend on all that must be kept."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(8, activation="tanh"),
            layers.BatchNormalization(synchronized=not ON_JAX),
            layers.Dropout(0.4, seed=3),
            layers.Dense(3),
        ]
    )
    schedule = keras.optimizers.schedules.PolynomialDecay(0.02, STEPS * EPOCHS)
    model.compile(
        keras.optimizers.Adam(schedule),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def by_fit(resume, data, validation, others):
    model = replica_exact(build())
    callbacks = [*others[:-1], resume, *others[-1:]]
    history = fit(model, resume.track(data), *callbacks, epochs=EPOCHS, validation_data=validation)
    return model, history.history


def by_loop(resume, data, validation, others, **settings):
    model = build()
    settings |= {"optimizer": model.optimizer, "loss": model.loss, "metrics": ["accuracy"]}
    loop = TrainingLoop(model, **settings)
    history = loop.fit(
        resume.track(data),
        validation,
        epochs=EPOCHS,
        callbacks=[*others[:-1], resume, *others[-1:]],
        verbose=0,
    )
    return model, history.history


def by_loop_on_four_devices(*arguments):
    from kdpkit import sharding

    return by_loop(*arguments, strategy=sharding.data_mesh(4))


def by_loop_in_micro_batches(*arguments):
    return by_loop(*arguments, accumulation=2)


def on_pipelines(train):
    """Train on what `train_pipeline` gives, shuffled and augmented, instead of `ArrayBatches`."""

    def by_pipeline(resume, data, validation, *others):
        import tensorflow as tf

        held_out = tf.data.Dataset.from_tensor_slices(validation.data).batch(8)
        return train(resume, pipeline(data), held_out, *others)

    return by_pipeline


def pipeline(batches):
    import tensorflow as tf

    from kdpkit import pipelines

    def shake(batch, seed):
        x, y = batch
        return x + tf.random.stateless_normal(tf.shape(x), seed, stddev=0.1), y

    return pipelines.train_pipeline(
        tf.data.Dataset.from_tensor_slices(batches.data),
        pipelines.PipelineConfig(seed=batches.seed or 0),
        global_batch_size=batches.global_batch_size,
        augment=shake,
    )


def mirrored(train):
    def on_two_replicas(*arguments):
        from kdpkit import strategies

        with strategies.select_strategy("mirrored", devices=2).scope():
            return train(*arguments)

    return on_two_replicas


fit_on_pipelines, loop_on_pipelines = on_pipelines(by_fit), on_pipelines(by_loop)
TRAINERS = {
    "fit": by_fit,
    "loop on pipelines": loop_on_pipelines,
    "fit on pipelines": fit_on_pipelines,
    "loop in micro-batches": on_pipelines(by_loop_in_micro_batches),
} | (
    {"loop": by_loop, "loop on four devices": by_loop_on_four_devices}
    if ON_JAX
    else {
        "exact fit on two replicas": mirrored(fit_on_pipelines),
        "loop on two replicas": mirrored(loop_on_pipelines),
    }
)


def run(train, directory, *, crash_at=None, save_freq=1, learning=(), last=None):
    validation = data_of(global_batch_size=8, remainder="keep")
    resume = Resume(directory, save_freq=save_freq, callbacks=learning)
    return train(resume, data_of(seed=1), validation, [*learning, last or CrashAt(crash_at)])


def assert_same_variables(model, other, **tolerance):
    pairs = zip(
        model.variables + model.optimizer.variables,
        other.variables + other.optimizer.variables,
        strict=True,
    )
    for left, right in pairs:
        left, right = (keras.ops.convert_to_numpy(v.value) for v in (left, right))
        np.testing.assert_allclose(left, right, **{"rtol": 0, "atol": 0} | tolerance)


def assert_same_weights(ones, others):
    for one, other in zip(ones, others, strict=True):
        np.testing.assert_array_equal(one, other)


def assert_same(one, other):
    (model, history), (of_other, history_of_other) = one, other
    assert_same_variables(model, of_other)
    assert history.keys() == history_of_other.keys()
    for name, values in history.items():
        # What the replicas of TensorFlow have summed is divided among them again.
        np.testing.assert_allclose(values, history_of_other[name], rtol=1e-6)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the result of a run that nothing stopped, by the function that trains."""
    found = {}

    def of(train):
        if train not in found:
            found[train] = run(train, tmp_path_factory.mktemp("complete"))
        return found[train]

    return of


STOPS = [(name, 6) for name in TRAINERS]
MORE_STOPS = [(name, stop) for name in ("fit on pipelines", [*TRAINERS][-1]) for stop in (1, 5, 14)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "stop"),
    [
        STOPS[0],
        *(pytest.param(*stop, marks=pytest.mark.slow) for stop in STOPS[1:]),
        *(pytest.param(*stop, marks=pytest.mark.exhaustive) for stop in MORE_STOPS),
    ],
)
def test_a_run_stopped_before_any_step_ends_as_one_that_was_not(tmp_path, undisturbed, name, stop):
    train = TRAINERS[name]
    with pytest.raises(CrashError):
        run(train, tmp_path, crash_at=stop)
    assert_same(run(train, tmp_path), undisturbed(train))


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("save_freq", ["epoch", 7])
def test_what_was_not_saved_is_done_again(tmp_path, undisturbed, save_freq):
    for stop in (7, 1):  # a run that is stopped again and again
        with pytest.raises(CrashError):
            run(by_fit, tmp_path, crash_at=stop, save_freq=save_freq)
    assert_same(run(by_fit, tmp_path, save_freq=save_freq), undisturbed(by_fit))


@pytest.mark.slow
def test_several_steps_in_an_execution_may_pass_the_end_of_an_epoch(tmp_path):
    def weights(directory, crash_at=None):
        model = build()
        model.steps_per_execution = 2  # of five
        resume = Resume(directory, save_freq=2)
        fit(model, resume.track(data_of(seed=1)), resume, CrashAt(crash_at), epochs=3)
        return model.get_weights()

    for stop in (1, 3):
        with pytest.raises(CrashError):
            weights(tmp_path / "stopped", crash_at=stop)
    assert_same_weights(weights(tmp_path / "stopped"), weights(tmp_path / "complete"))


@pytest.mark.slow
def test_a_run_that_is_over_stays_so(tmp_path):
    complete = run(by_fit, tmp_path, save_freq="epoch")
    with pytest.warns(UserWarning, match="Nothing is left to train.* 3 of 3 epochs"):
        again = run(by_fit, tmp_path, save_freq="epoch")
    assert_same(again, complete)


@pytest.mark.slow
def test_callbacks_go_on_with_what_they_learned(tmp_path):
    def learning():
        return [
            keras.callbacks.EarlyStopping("loss", patience=1, min_delta=10.0),
            keras.callbacks.ModelCheckpoint(tmp_path / "best.keras", save_best_only=True),
        ]

    stopper, best = learning()
    with pytest.raises(CrashError):
        run(by_fit, tmp_path / "states", crash_at=7, learning=[stopper, best])
    resumed, other = learning()
    _, history = run(by_fit, tmp_path / "states", learning=[resumed, other])
    assert resumed.stopped_epoch == 1  # one epoch without enough progress: 0 was before the stop
    assert len(history["loss"]) == 2
    assert other.best == min(history["val_loss"])
    # A run that stopped early is over.
    with pytest.warns(UserWarning, match="Nothing is left to train"):
        assert run(by_fit, tmp_path / "states", learning=learning())[1] == history


class StopEarly(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = batch == 2


@pytest.mark.slow
def test_an_epoch_that_a_callback_cut_short_is_gone_on_with(tmp_path, undisturbed):
    resume = Resume(tmp_path)
    fit(build(), resume.track(data_of(seed=1)), StopEarly(), resume, epochs=EPOCHS)
    assert_same(run(by_fit, tmp_path), undisturbed(by_fit))


class Halving(keras.callbacks.Callback):
    """A schedule that goes on from the rate that it finds."""

    def on_epoch_begin(self, epoch, logs=None):
        rate = self.model.optimizer.learning_rate
        self.model.optimizer.learning_rate = 0.5 * float(rate)


class Subclassed(keras.Model):
    """A model that nobody has built when training begins."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = keras.layers.Dense(8), keras.layers.Dense(3)

    def call(self, x):
        return self.out(self.hidden(x))


@pytest.mark.slow
def test_a_rate_that_is_lowered_each_epoch_is_lowered_once_in_a_model_not_built(tmp_path):
    def trained(directory, crash_at=None):
        keras.utils.set_random_seed(0)
        model = Subclassed()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        resume = Resume(directory, save_freq=1)
        fit(model, resume.track(data_of(12)), Halving(), resume, CrashAt(crash_at), epochs=3)
        return model

    with pytest.raises(CrashError):
        trained(tmp_path / "stopped", crash_at=4)
    resumed, complete = trained(tmp_path / "stopped"), trained(tmp_path / "complete")
    assert float(resumed.optimizer.learning_rate) == pytest.approx(0.01 / 8)
    assert_same_weights(resumed.get_weights(), complete.get_weights())


@pytest.mark.slow
def test_the_best_weights_come_back_when_a_run_that_is_over_is_started_again(tmp_path):
    def weights():
        model = build()
        stopper = keras.callbacks.EarlyStopping(
            "loss", mode="max", patience=1, restore_best_weights=True
        )
        resume = Resume(tmp_path, callbacks=[stopper])
        fit(model, resume.track(data_of(12)), stopper, resume, epochs=5)
        return model.get_weights()

    first = weights()
    with pytest.warns(UserWarning, match="Nothing is left to train"):
        assert_same_weights(weights(), first)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"global_batch_size": 2}, "`batches in an epoch` differs, and stopped inside.*saved=5"),
        ({"seed": 2}, "`seed` differs, and stopped inside an epoch. Received: saved=1, seed=2"),
    ],
)
def test_other_data_inside_an_epoch_raise(tmp_path, changed, sentence):
    with pytest.raises(CrashError):
        run(by_fit, tmp_path, crash_at=2)
    with pytest.raises(ValueError, match=sentence):
        by_fit(Resume(tmp_path), data_of(**{"seed": 1} | changed), None, [CrashAt(None)])


def test_another_dataset_than_the_tracked_one_raises(tmp_path):
    data, resume = data_of(12), Resume(tmp_path)
    resume.track(data)
    with pytest.raises(ValueError, match=r"trains on another dataset.*`resume.track"):
        fit(build(), data, resume)


@pytest.mark.slow
def test_a_plain_rate_that_was_lowered_stays_so(tmp_path):
    def rate_after(epochs):
        model = testing.tiny_classifier()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=10.0)
        resume = Resume(tmp_path, callbacks=[plateau])
        fit(model, resume.track(data_of(8)), plateau, resume, epochs=epochs)
        return float(model.optimizer.learning_rate)

    assert rate_after(2) == pytest.approx(1e-3)
    assert rate_after(3) == pytest.approx(1e-4)


# What stands in the way.


@pytest.mark.slow
def test_a_damaged_state_costs_the_steps_since_the_one_before(tmp_path, undisturbed):
    with pytest.raises(CrashError):
        run(by_fit, tmp_path / "stopped", crash_at=7)
    background.wait(tmp_path / "stopped")
    newest = max((tmp_path / "stopped").iterdir())
    newest.write_bytes(newest.read_bytes()[:100])
    with pytest.warns(UserWarning, match="is damaged"):
        resumed = run(by_fit, tmp_path / "stopped")
    assert_same(resumed, undisturbed(by_fit))


@pytest.mark.slow
def test_a_state_that_cannot_be_written_is_reported_and_training_goes_on(tmp_path, undisturbed):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, hard))  # as good as a full disk
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")  # as outside of tests, where Python shows each once
            unsaved = run(by_fit, tmp_path / "full", save_freq=5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    failed = [str(w.message) for w in caught if "could not be saved" in str(w.message)]
    assert [text.partition(" could")[0] for text in failed] == [
        f"The training state of epoch {epoch}, step 0" for epoch in (1, 2, 3)
    ]
    assert_same(unsaved, undisturbed(by_fit))
    assert [path.name for path in (tmp_path / "full").iterdir()] == [".lock"]


def test_a_dataset_that_was_not_tracked_raises(tmp_path):
    with pytest.raises(ValueError, match=r"train on `resume.track\(dataset\)`"):
        fit(build(), data_of(8), Resume(tmp_path))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: Resume(path, save_freq=0), "`save_freq` must be a positive integer.*0"),
        (lambda path: Resume(path, save_freq="batch"), "`save_freq`.*'batch'"),
        (lambda path: Resume(path, keep=0), "`keep` must be a positive integer"),
        (lambda path: Resume(path).track(range(2)), "arrays.*tf.data.*PyDataset.*Grain.*'range'"),
        (lambda path: Resume(path).track([1, 2]), "`global_batch_size`.*'list'"),
        (lambda path: Resume(path).track(data_of(8), global_batch_size=4), "have their own.*=4"),
        (lambda path: Resume(path).track(Resume(path).track(data_of(8))), "tracked already"),
        (
            lambda path: Resume(path, callbacks=[keras.callbacks.Callback()]),
            "does not know the state of this callback.*get_state",
        ),
    ],
)
def test_bad_arguments_raise(tmp_path, make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(tmp_path)


@pytest.mark.tensorflow
def test_pipelines_are_tracked_as_they_are_and_once(tmp_path):
    train, resume = pipeline(data_of(8)), Resume(tmp_path)
    with pytest.raises(ValueError, match="as it is.*to `train_pipeline` as `prepare` or `augment`"):
        resume.track(train.map(lambda x, y: (x, y)))
    with pytest.raises(ValueError, match="tracked already; pass the dataset itself"):
        resume.track(resume.track(train))


@pytest.mark.tensorflow
def test_a_tracked_pipeline_gives_what_it_gave_and_can_begin_anywhere(tmp_path):
    def given(dataset):
        return [[x.tolist() for x, _ in dataset.as_numpy_iterator()] for _ in range(3)]

    complete = given(pipeline(data_of(8)))
    resume = Resume(tmp_path)
    tracked = resume.track(pipeline(data_of(8)))
    assert given(tracked) == complete
    assert int(tracked.map(lambda *batch: batch).cardinality()) == 2  # as `class_weight` maps
    resume._dataset.go_to(checkpoints.Position(1, 1))
    assert int(tracked.cardinality()) == 1
    assert resume._dataset.first_batch()[0].numpy().tolist() == complete[1][1]
    resume._dataset.go_to(checkpoints.Position(1, 1))
    assert given(tracked)[:2] == [complete[1][1:], complete[2]]


def test_steps_belong_to_the_dataset(tmp_path):
    resume = Resume(tmp_path)
    with pytest.raises(ValueError, match="Pass `steps_per_epoch` to the dataset"):
        fit(build(), resume.track(data_of(8)), resume, steps_per_epoch=1)


def test_a_state_of_another_model_raises(tmp_path):
    run(by_fit, tmp_path)
    other = testing.tiny_classifier()
    other.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    resume = Resume(tmp_path)
    with pytest.raises(ValueError, match="variables of the model"):
        fit(other, resume.track(data_of()), resume)


def test_batches_that_keras_shuffles_raise(tmp_path):
    resume = Resume(tmp_path)
    with pytest.raises(Exception, match="`shuffle=False`"):  # TensorFlow wraps it
        fit(build(), resume.track(data_of(400)), resume, shuffle=True)


# A state is written while training goes on.


def test_what_is_written_is_the_state_when_it_was_saved(tmp_path, undisturbed):
    go_on = threading.Event()
    threads = [f"thread {i}" for i in range(40)]  # all that there are, so that the state waits

    class Going(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if self.model.history.epoch and batch == 3:  # of the second epoch
                assert not [*tmp_path.glob("*.npz")]
                go_on.set()
                raise CrashError

    for thread in threads:
        background.start(thread, lambda: None if go_on.wait(240) else "nothing came")
    with pytest.raises(CrashError):
        run(by_fit, tmp_path, save_freq="epoch", last=Going())
    for thread in threads:
        background.wait(thread)
    state = checkpoints.CheckpointDirectory(tmp_path).latest()
    assert (state.position, state.notes["epochs"]) == (checkpoints.Position(1, 0), [0])
    assert_same(run(by_fit, tmp_path), undisturbed(by_fit))


LARGE = """
import sys
import keras
from kdpkit.callbacks import Resume
from tests.callbacks import test_resume

def fit(directory):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2_000_000)])
    model.compile("sgd", "mse")
    resume = Resume(directory, save_freq=1)
    x = test_resume.np.zeros((40, 4), "float32")
    data = test_resume.ArrayBatches((x, x[:, :1]), global_batch_size=1)
    test_resume.fit(model, resume.track(data), resume, epochs=100)

if __name__ == "__main__":
    fit(sys.argv[1])
"""


def stopped_while_it_writes(directory, number):
    """Send a signal to a program that is writing a state, not its first one."""
    process = subprocess.Popen(
        [sys.executable, "-c", LARGE, directory], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 240

    def is_writing():
        return [*directory.glob(".state-*")] and [*directory.glob("state-*")]

    try:
        while True:
            assert process.poll() is None
            assert time.monotonic() < deadline
            if is_writing():
                process.send_signal(signal.SIGSTOP)
                os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
                if is_writing():
                    break
                process.send_signal(signal.SIGCONT)
        before = max(path.name for path in directory.glob("state-*"))
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)
        _, err = process.communicate(timeout=240)
    finally:
        process.kill()
        process.communicate()
    return process.returncode, before, err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, -2), (signal.SIGTERM, 42)]
)
def test_a_signal_while_a_state_is_written_leaves_a_state(tmp_path, number, code):
    ended, before, err = stopped_while_it_writes(tmp_path, number)
    assert ended == code, err
    left = checkpoints.CheckpointDirectory(tmp_path)
    assert bool([*tmp_path.glob(".state-*")]) == (number == signal.SIGKILL)
    newest = left.paths()[0].name
    if number == signal.SIGKILL:
        assert newest == before
    else:
        assert newest > before
        assert "Its state is in" in err
    state = left.latest()  # a warning would be an error
    assert state.arrays["model.0"].shape == (4, 2_000_000)


# A directory for one run at a time.

HOLDING = """
import sys
from kdpkit.checkpoints import CheckpointDirectory
CheckpointDirectory(sys.argv[1]).acquire()
print("held", flush=True)
sys.stdin.read()
"""


def test_a_directory_that_another_run_uses_raises_until_it_ends(tmp_path):
    data = data_of()
    command = [sys.executable, "-c", HOLDING, tmp_path]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="Another run is using this directory"):
            by_fit(Resume(tmp_path), data, None, [])
        other.kill()
    by_fit(Resume(tmp_path), data, None, [])


def test_a_run_that_failed_leaves_the_directory_to_the_next_of_its_process(tmp_path):
    first, second = Resume(tmp_path), Resume(tmp_path)
    crash(first, by_fit)
    crash(second, by_fit)


# Object storage.


@pytest.mark.slow
@pytest.mark.parametrize("remote", ["memory"], indirect=True)
def test_a_run_in_object_storage_goes_on_where_it_was(remote, undisturbed):
    with pytest.raises(CrashError):
        run(by_fit, remote, crash_at=6)
    assert_same(run(by_fit, remote), undisturbed(by_fit))


def test_in_object_storage_the_run_that_began_last_has_the_directory(tmp_path):
    def another_begins(*_, **__):
        background.wait(f"file://{tmp_path}")
        with atomic_files.replacing(f"file://{tmp_path}/.lock") as mark:
            mark.write_text("0123 process 7 on another machine")

    data = data_of()
    another = keras.callbacks.LambdaCallback(on_epoch_end=another_begins)
    with pytest.raises(ValueError, match="Another run, which began later.*'process 7 on another"):
        by_fit(Resume(f"file://{tmp_path}"), data, None, [another])
    saved = [path.name for path in tmp_path.glob("state-*")]
    assert saved == ["state-000001-000000000.npz"]  # before the other one began


def test_a_bucket_that_is_not_there_is_named_before_training():
    data = data_of()
    with pytest.raises(ValueError, match="file:///sys/kernel/states/.lock"):
        by_fit(Resume("file:///sys/kernel/states"), data, None, [])


# Signals where training failed.


def crash(resume, train):
    data = data_of()
    with pytest.raises(CrashError):
        train(resume, data, data, [CrashAt(1)])


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "number", "times"),
    [
        (by_fit, signal.SIGINT, 1),
        (by_fit, signal.SIGTERM, 2),
        (loop_on_pipelines, signal.SIGINT, 2),
    ],
)
def test_after_training_has_failed_a_signal_does_what_it_always_does(
    tmp_path, train, number, times
):
    came = []
    signal.signal(number, lambda *_: came.append(number))
    former = signal.getsignal(number)
    resume = Resume(tmp_path)
    for _ in range(times):
        crash(resume, train)
    os.kill(os.getpid(), number)
    assert came == [number]
    assert signal.getsignal(number) is former


@pytest.mark.slow
def test_a_handler_that_calls_the_one_before_it_hears_of_a_signal_once(tmp_path):
    came = []
    signal.signal(signal.SIGTERM, lambda *_: came.append("first"))

    def install():
        ours = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *given: (came.append("last"), ours(*given)))

    resume = Resume(tmp_path)
    data = data_of()
    installing = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: install())
    with pytest.raises(CrashError):
        by_fit(resume, data, None, [installing, CrashAt(1)])
    os.kill(os.getpid(), signal.SIGTERM)
    assert came == ["last", "first"]


class Sending(keras.callbacks.Callback):
    def __init__(self, number):
        super().__init__()
        self.number = number

    def on_train_batch_end(self, batch, logs=None):
        os.kill(os.getpid(), self.number)


def test_a_second_sigterm_cuts_nothing_short(tmp_path):
    data = data_of()
    before = signal.getsignal(signal.SIGTERM)
    loop_or_fit = loop_on_pipelines if ON_JAX else by_fit  # `fit` on JAX calls hooks in threads
    twice = [Sending(signal.SIGTERM), Sending(signal.SIGTERM)]
    with pytest.raises(SystemExit, match="42"):
        loop_or_fit(Resume(tmp_path), data, data, [*twice, keras.callbacks.Callback()])
    assert [*tmp_path.glob("state-000000-*.npz")]
    assert before != signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_a_signal_that_no_epoch_hears_any_more_acts_after_training(tmp_path):
    came = []
    signal.signal(signal.SIGTERM, lambda *_: came.append("SIGTERM"))
    former = signal.getsignal(signal.SIGTERM)
    data = data_of()
    sending = keras.callbacks.LambdaCallback(
        on_train_end=lambda _: (os.kill(os.getpid(), signal.SIGTERM), came.append("trained"))
    )
    by_fit(Resume(tmp_path), data, data, [sending, keras.callbacks.Callback()])
    assert came == ["trained", "SIGTERM"]
    assert signal.getsignal(signal.SIGTERM) is former


def test_a_handler_that_came_after_failed_training_stays(tmp_path):
    resume = Resume(tmp_path)
    crash(resume, by_fit)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    crash(resume, by_fit)
    os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_training_that_failed_after_it_went_on_does_not_move_the_next_one(tmp_path):
    model, data, resume = build(), data_of(8), Resume(tmp_path)
    fit(model, resume.track(data), resume)
    resume = Resume(tmp_path)
    with pytest.raises(CrashError):
        fit(model, resume.track(data), resume, CrashAt(1), epochs=2)
    assert fit(model, data).epoch == [0]


# Signals while it trains.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "number", "raised"),
    [
        ("on_test_batch_end", signal.SIGTERM, SystemExit),
        ("on_train_batch_end", signal.SIGINT, KeyboardInterrupt),
    ],
)
def test_a_signal_saves_and_the_next_run_goes_on(tmp_path, undisturbed, hook, number, raised):
    train = by_loop if ON_JAX else by_fit  # `fit` on JAX calls hooks in threads
    sending = keras.callbacks.LambdaCallback(
        **{hook: lambda *_, **__: os.kill(os.getpid(), number)}
    )
    with pytest.raises(raised):
        run(train, tmp_path, last=sending)
    assert_same(run(train, tmp_path), undisturbed(train))


@pytest.mark.slow
def test_a_thread_saves_on_request_and_the_next_run_goes_on(tmp_path, undisturbed, capfd):
    train = by_loop if ON_JAX else by_fit
    resume, codes = Resume(tmp_path), []

    def request(batch, logs=None):  # noqa: ARG001 as Keras calls it
        if batch == 2:
            resume.request_stop()

    def train_in_a_thread():
        others = [keras.callbacks.LambdaCallback(on_train_batch_end=request)]
        try:
            train(resume, data_of(seed=1), data_of(global_batch_size=8, remainder="keep"), others)
        except SystemExit as error:
            codes.append(error.code)

    resume.request_stop()  # before training: no effect
    with pytest.warns(UserWarning, match=r"not the main one.*resume\.request_stop\(\)"):
        ThreadPoolExecutor(1).submit(train_in_a_thread).result()
    assert codes == [42]
    assert "Training was stopped by request_stop(). Its state is in" in capfd.readouterr().err
    assert [path.name for path in tmp_path.glob("*.npz")] == ["state-000000-000000003.npz"]
    assert_same_variables(run(train, tmp_path)[0], undisturbed(train)[0])


class StopsOnce(keras.callbacks.Callback):
    """Asks for a stop when a hook is called for the n-th time, counted from 0."""

    def __init__(self, hook, calls):
        super().__init__()
        self.resume = None
        self.calls = calls
        setattr(self, hook, self.count)

    def count(self, *_, **__):
        if self.calls == 0:
            self.resume.request_stop()
        self.calls -= 1


class OwnLogs(keras.Sequential):
    """A model whose logs are those of a step: Keras has no metrics to compute them from."""

    def train_step(self, *given):
        found = super().train_step(*given)
        logs, *state = found if ON_JAX else (found,)
        logs = {"of the step": logs["loss"]}
        return (logs, *state) if state else logs


def learned_from(train, directory, *stops):
    """Train, stopped once by each; return the result and the state of callbacks."""
    for stop in (*stops, None):
        learning = [
            keras.callbacks.EarlyStopping("val_loss", patience=9),
            keras.callbacks.ModelCheckpoint(directory / "best.keras", save_best_only=True),
        ]
        resume = Resume(directory / "states", save_freq=100, callbacks=learning)
        others = [*learning, CrashAt(None)]
        if stop is not None:
            stop.resume = resume
            others.insert(0, stop)
        held_out = data_of(global_batch_size=8, remainder="keep")
        try:
            result = train(resume, data_of(seed=1), held_out, others)
        except SystemExit:
            assert stop is not None
    return result, [callback_state.state_of(callback)[0] for callback in learning]


def by_fit_of_own_logs(resume, data, validation, others):
    keras.utils.set_random_seed(0)
    model = OwnLogs([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    data, settings = resume.track(data), {"validation_data": validation, "epochs": EPOCHS}
    history = fit(model, data, *others, resume, **settings).history
    assert "of the step" in history
    return model, history


STOPS_AFTER_TRAINING = {
    "before the first batch of a validation": [("on_test_begin", 0)],
    "at the end of the last step": [("on_train_batch_end", 2 * STEPS - 1)],
    "in a validation, twice": [("on_test_batch_end", 4), ("on_test_batch_end", 1)],
}


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("stops", [pytest.param(s, id=n) for n, s in STOPS_AFTER_TRAINING.items()])
@pytest.mark.parametrize("train", [by_fit_of_own_logs, by_fit, *[*TRAINERS.values()][1:]])
def test_an_epoch_stopped_after_its_last_step_ends_as_one_that_was_not(tmp_path, train, stops):
    found = learned_from(train, tmp_path / "stopped", *(StopsOnce(*stop) for stop in stops))
    expected = learned_from(train, tmp_path / "complete")
    assert_same(found[0], expected[0])
    for one, other in zip(found[1], expected[1], strict=True):
        assert one == pytest.approx(other, rel=1e-6)


class EndsTraining(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == STEPS - 1:
            self.model.stop_training = True


@pytest.mark.exhaustive
def test_training_that_a_callback_ends_with_an_epochs_last_step_stays_ended(tmp_path):
    def ended(directory, *others):
        resume = Resume(directory)
        for other in others:
            other.resume = resume
        model, data = build(), data_of(seed=1)
        data, settings = resume.track(data), {"validation_data": data_of(8), "epochs": EPOCHS}
        return model, fit(model, data, EndsTraining(), *others, resume, **settings).history

    with pytest.raises(SystemExit):
        ended(tmp_path / "stopped", StopsOnce("on_test_begin", 0))
    resumed = ended(tmp_path / "stopped")
    assert len(resumed[1]["val_loss"]) == 1
    assert_same(resumed, ended(tmp_path / "complete"))


class Noise(keras.layers.Layer):
    """Draws from Keras' global seeds."""

    def call(self, x, training=False):
        return x + 0.3 * keras.random.normal(keras.ops.shape(x)) if training else x


class NoisyBatches(ArrayBatches):
    """Draws from Keras' global seeds, which no step on JAX can."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 0.3 * keras.ops.convert_to_numpy(keras.random.normal(x.shape)), y


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(("by", "replicas"), [("fit", 2), ("fit", 1), ("loop", 2), ("loop", 1)])
def test_numbers_drawn_without_a_seed_go_on(tmp_path, by, replicas):
    def weights(directory, crash_at=None):
        keras.utils.set_random_seed(0)
        with scope_of(replicas):
            layers = [] if ON_JAX else [Noise()]
            model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(3)])
            compiled = {
                "optimizer": keras.optimizers.SGD(0.1),
                "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            }
            resume, crash = Resume(directory, save_freq=1), CrashAt(crash_at)
            batches = NoisyBatches if ON_JAX else ArrayBatches
            data = batches(testing.toy_classification(12), global_batch_size=4)
            if by == "fit":
                replica_exact(model).compile(**compiled)
                fit(model, resume.track(data), resume, crash, epochs=EPOCHS)
            else:
                loop = TrainingLoop(model, **compiled)
                data = resume.track(data if ON_JAX else pipeline(data))
                loop.fit(data, epochs=EPOCHS, callbacks=[resume, crash], verbose=0)
        return model.get_weights()

    with pytest.raises(CrashError):
        weights(tmp_path / "stopped", crash_at=4)
    assert_same_weights(weights(tmp_path / "stopped"), weights(tmp_path / "complete"))


def scope_of(replicas):
    if ON_JAX:
        devices = [f"cpu:{i}" for i in range(replicas)]
        return keras.distribution.DataParallel(devices=devices).scope()
    from kdpkit import strategies

    return strategies.select_strategy("mirrored", devices=replicas).scope()


PROGRAM = """
import sys, time
import keras
from tests.callbacks import test_resume

def step(*_, **__):
    print("step", flush=True)
    time.sleep(0.05)

slow = keras.callbacks.LambdaCallback(on_train_batch_end=step)
test_resume.run(test_resume.by_fit, sys.argv[1], save_freq=100, last=slow)
"""


@pytest.mark.slow
def test_after_sigterm_a_program_ends_with_42_and_the_next_goes_on(tmp_path, undisturbed):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, tmp_path],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "step\n"
        process.terminate()
        _, err = process.communicate(timeout=300)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 42, err
    assert "Training was stopped by SIGTERM. Its state is in" in err.splitlines()[-1]
    assert "Traceback" not in err
    model, _ = run(by_fit, tmp_path)
    assert_same_variables(model, undisturbed(by_fit)[0], rtol=1e-5, atol=1e-6)


# Models with several optimizers.


def gan_of_tensorflow(replicas):
    """Return a model whose optimizers are built in its own `train_step`, on replicas."""
    from kdpkit import strategies
    from tests.training.programs import generative

    with strategies.select_strategy("mirrored", devices=replicas).scope():
        return replica_exact(generative._gan(kind=generative.GANWithNoiseByExample))


class Adversaries(keras.Model):
    """Two models that JAX trains by turns; Keras keeps the state of one optimizer alone."""

    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = (
            keras.Sequential([keras.Input((n,)), keras.layers.Dense(8, "tanh"), last])
            for n, last in ((3, keras.layers.Dense(4)), (4, keras.layers.Dense(1)))
        )
        self.noise = keras.random.SeedGenerator(5)
        self.built = True
        self.compile("sgd")
        self.optimizer.build(self.generator.trainable_variables)
        self.other = keras.optimizers.Adam(0.01)
        self.other.build(self.discriminator.trainable_variables)
        self.state_of_other = self.other.variables  # Keras keeps these with its model

    def call(self, x):
        return self.discriminator(x)

    def train_step(self, state, data):
        import jax

        trainable, rest, of_optimizer, of_metrics = state
        weights = dict(zip(map(id, self.trainable_variables), trainable, strict=True))
        others = dict(zip(map(id, self.non_trainable_variables), rest, strict=True))

        def loss(values, model, compute):
            own = zip(model.trainable_variables, values, strict=True)
            now = weights | others
            mapping = [(v, now[id(v)]) for v in self.variables if id(v) in now]
            with keras.StatelessScope(state_mapping=[*mapping, *own]) as scope:
                result = compute()
            return result, {id(v): scope.get_current_value(v) for v in [self.noise.state]}

        def fake():
            return self.generator(
                keras.random.normal((keras.ops.shape(data[0])[0], 3), seed=self.noise)
            )

        def train(model, optimizer, own, compute):
            values = [weights[id(v)] for v in model.trainable_variables]
            (result, seeds), gradients = jax.value_and_grad(loss, has_aux=True)(
                values, model, compute
            )
            others.update(seeds)
            new, own = optimizer.stateless_apply(own, gradients, values)
            weights.update(zip(map(id, model.trainable_variables), new, strict=True))
            return result, own

        softplus, mean = keras.ops.softplus, keras.ops.mean
        d_loss, own = train(
            self.discriminator,
            self.other,
            [others[id(v)] for v in self.state_of_other],
            lambda: mean(
                softplus(-self.discriminator(data[0])) + softplus(self.discriminator(fake()))
            ),
        )
        others.update(zip(map(id, self.state_of_other), own, strict=True))
        _, of_optimizer = train(
            self.generator,
            self.optimizer,
            of_optimizer,
            lambda: mean(softplus(-self.discriminator(fake()))),
        )
        state = [*weights.values()], [*others.values()], of_optimizer, of_metrics
        return {"d_loss": d_loss}, state


def gan_of_jax(replicas):
    from kdpkit import sharding

    keras.distribution.set_distribution(sharding.DataParallel(replicas))
    return replica_exact(Adversaries())


def train_gan(directory, replicas, crash_at=None):
    """Train in as many replicas; return all variables and the losses."""
    keras.utils.set_random_seed(0)
    shape = (18, 4) if ON_JAX else (18, 8, 8, 1)
    before = keras.distribution.distribution()
    try:
        model = (gan_of_jax if ON_JAX else gan_of_tensorflow)(replicas)
        resume = Resume(directory, save_freq=1)
        x = np.random.default_rng(0).random(shape, "float32")
        data = resume.track((x, np.zeros(18)), global_batch_size=4)
        history = fit(model, data, resume, CrashAt(crash_at), epochs=2).history
    finally:
        keras.distribution.set_distribution(before)
    optimizers = [value for value in vars(model).values() if isinstance(value, keras.Optimizer)]
    variables = [*model.variables, *(v for o in optimizers if o.built for v in o.variables)]
    return [np.array(v) for v in variables], history


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_model_with_several_optimizers_goes_on(tmp_path, replicas):
    expected, losses = train_gan(tmp_path / "undisturbed", replicas)
    with pytest.raises(CrashError):
        train_gan(tmp_path / "stopped", replicas, crash_at=7)
    found, history = train_gan(tmp_path / "stopped", replicas)
    assert_same_weights(found, expected)
    assert history.keys() == losses.keys()
    for name, values in losses.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-6)


@pytest.mark.slow
def test_an_optimizer_that_nothing_used_stays_so(tmp_path):
    model = build()
    model.unused = keras.optimizers.Adam()
    resume = Resume(tmp_path, save_freq=2)
    with pytest.raises(CrashError):
        fit(model, resume.track(data_of()), resume, CrashAt(3))
    again = build()
    again.unused = keras.optimizers.Adam()
    resume = Resume(tmp_path)
    fit(again, resume.track(data_of()), resume)
    assert again.optimizer.built
    assert not again.unused.built
