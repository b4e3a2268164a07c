"""The law of `Resume`: a program that is stopped anywhere ends as one that nothing stopped.

The programs are in resume_programs.py; tests/test_elastic.py varies replicas and processes.
"""

import contextlib
import copy
import io
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest

from kdpkit.callbacks import Resume
from kdpkit.callbacks._resume import callback_state
from kdpkit.checkpoints import CheckpointDirectory
from tests.callbacks.resume_programs import (
    EPOCHS,
    LEARNING,
    LOSS,
    ON_JAX,
    PROGRAMS,
    STEPS,
    CrashError,
    batches,
    by_fit,
    compiled,
    fit,
)

SOON_STARTED = os.environ | {"KERAS_BACKEND": "numpy"}  # of Keras' backends the lightest
pytestmark = pytest.mark.filterwarnings(
    "ignore:Nothing is left to train", "ignore:This call of `fit` was completed"
)


class Stop(keras.callbacks.Callback):
    """Stops a program in a way, when a hook is called for the n-th time in it."""

    def __init__(self, way, calls, hook="on_train_batch_end", resume=None):
        super().__init__()
        self.way, self.hook, self.calls, self.resume = way, hook, calls, resume
        setattr(self, hook, self.count)

    def __repr__(self):
        return f"{self.way} at call {self.calls} of {self.hook}"

    def count(self, *_, **__):
        self.calls -= 1
        if self.calls == 0:
            WAYS[self.way](self)


def crash(_):
    raise CrashError


WAYS = {
    "error": crash,
    "request": lambda stop: stop.resume.request_stop(),
    "SIGTERM": lambda _: os.kill(os.getpid(), signal.SIGTERM),
    "Ctrl-C": lambda _: os.kill(os.getpid(), signal.SIGINT),
    "end of training": lambda stop: setattr(stop.model, "stop_training", True),
}
# How often they are called before the end of a program.
HOOKS = {
    "on_train_batch_end": STEPS * EPOCHS - 1,
    "on_test_begin": EPOCHS,
    "on_test_batch_end": 3 * EPOCHS,
    "on_epoch_end": EPOCHS - 1,
}


def lived(name, directory, stop=None, **settings):
    keras.utils.set_random_seed(0)
    directory.mkdir(exist_ok=True)
    learning = LEARNING[name](directory)
    resume = Resume(directory / "states", callbacks=learning, **settings)
    others = [stop] if stop else []
    if stop:
        stop.resume = resume
    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        model = PROGRAMS[name](resume, *others)
    except (CrashError, KeyboardInterrupt, SystemExit):
        return None
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    optimizers = [part for part in vars(model).values() if isinstance(part, keras.Optimizer)]
    variables = [*model.variables, *(v for o in optimizers if o.built for v in o.variables)]
    return {
        "variables": [keras.ops.convert_to_numpy(variable.value) for variable in variables],
        "history": model.history.history,
        "learned": [callback_state.state_of(callback)[0] for callback in learning],
    }


_undisturbed = {}


def assert_ends_as_undisturbed(name, tmp_path, *stops, **settings):
    if name not in _undisturbed:
        _undisturbed[name] = lived(name, tmp_path / "undisturbed")
    expected = _undisturbed[name]
    for stop in stops:
        lived(name, tmp_path / "stopped", stop, **settings)
    found = lived(name, tmp_path / "stopped", **settings)
    np.testing.assert_equal(found["variables"], expected["variables"])
    assert found["history"].keys() == expected["history"].keys()
    for log, values in expected["history"].items():
        # What the replicas of TensorFlow have summed is divided among them again.
        np.testing.assert_allclose(found["history"][log], values, rtol=1e-6, err_msg=log)
    for one, other in zip(found["learned"], expected["learned"], strict=True):
        assert one == pytest.approx(other)


SEVERAL_STEPS = "on_a_pipeline_by_several_steps"
QUICK = {"by_fit", "in_two_phases", SEVERAL_STEPS if ON_JAX else "on_shuffled_stages"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in PROGRAMS],
)
def test_a_program_that_was_stopped_ends_as_one_that_was_not(name, tmp_path):
    assert_ends_as_undisturbed(name, tmp_path, Stop("request", STEPS + 2))


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(4))
@pytest.mark.parametrize("name", ["by_fit", SEVERAL_STEPS])
def test_a_program_that_was_stopped_anywhere_in_any_way_ends_as_one_that_was_not(
    name, turn, tmp_path
):
    """Every hook, every way and every frequency has its turn in each program."""
    draw = random.Random(f"{name} {turn}")
    hooks, ways = [*HOOKS], [*WAYS][:4]
    shift = 2 * (name != "by_fit")
    stops = [
        Stop(ways[(number + shift) % 4], draw.randint(1, HOOKS[hooks[number]]), hooks[number])
        for number in (turn, (turn + 1) % 4)
    ]
    save_freq = [1, 2, 7, "epoch"][turn]
    print(stops, save_freq)  # noqa: T201 pytest shows it for what fails
    assert_ends_as_undisturbed(name, tmp_path, *stops, save_freq=save_freq)


@pytest.mark.slow
def test_a_program_that_is_over_trains_nothing_when_started_again(tmp_path):
    name = "in_phases_of_which_the_first_is_stopped"
    never = Stop("error", 1000)
    with pytest.warns(UserWarning, match="until the run continues the model is as") as warned:
        assert_ends_as_undisturbed(name, tmp_path, never, Stop("error", 1))
    assert sum("until the run continues" in str(one.message) for one in warned) == 2


@pytest.mark.slow
def test_an_epoch_that_a_callback_cut_short_is_continued(tmp_path):
    assert_ends_as_undisturbed("by_fit", tmp_path, Stop("end of training", 3))


# Several calls of `fit` in one program that is not started again.


def trained(directory, *others, **settings):
    resume = Resume(directory)
    for stop in others:
        stop.resume = resume
    return fit(compiled(), resume.track(batches()), *others, resume, **settings)


def test_what_is_changed_between_two_calls_of_fit_stays(tmp_path):
    resume = Resume(tmp_path)
    train, model = resume.track(batches()), compiled()
    fit(model, train, resume, epochs=1)
    model.set_weights([np.zeros_like(weight) for weight in model.get_weights()])
    model.compile(keras.optimizers.Adam(1e-9), LOSS)
    fit(model, train, resume, epochs=2)
    model.compile(keras.optimizers.SGD(1e-9), LOSS)
    fit(model, train, resume, epochs=3)
    assert model.history.epoch == [0, 1, 2]
    assert max(np.abs(weight).max() for weight in model.get_weights()) < 1e-6


def test_a_run_that_a_callback_has_ended_says_how_to_train_on(tmp_path):
    def ends_itself(epochs):
        early = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=9.0)
        resume = Resume(tmp_path, callbacks=[early])
        model, train = compiled(), resume.track(batches())
        return fit(model, train, early, resume, epochs=epochs), train, early, resume

    assert ends_itself(5)[0].history.epoch == [0, 1]
    with pytest.warns(UserWarning, match="ended after 2 of 8 epochs.*call `fit` once more"):
        model, train, early, resume = ends_itself(8)
    assert model.history.epoch == [0, 1]
    assert fit(model, train, early, resume, epochs=3).history.epoch == [0, 1, 2]


def test_training_that_failed_after_it_continued_does_not_move_the_next_one(tmp_path):
    model, data, resume = compiled(), batches(), Resume(tmp_path)
    fit(model, resume.track(data), resume, epochs=1)
    resume = Resume(tmp_path)
    with pytest.raises(CrashError):
        fit(model, resume.track(data), resume, Stop("error", 1), epochs=2)
    assert fit(model, data, epochs=1).history.epoch == [0]


def test_tracked_batches_can_be_copied_and_pickled(tmp_path):
    train = Resume(tmp_path).track(batches())
    assert len(pickle.loads(pickle.dumps(copy.deepcopy(copy.copy(train))))) == STEPS


# States that cannot be written.


@contextlib.contextmanager
def shown_together():
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        yield text


LIMITS = resource.getrlimit(resource.RLIMIT_FSIZE)


@pytest.mark.parametrize(
    ("full", "failed", "at_the_end"),
    [
        (
            [0, 1, 2],
            [(1, "there is no complete state yet.")],
            "has no complete state: the same program starts",
        ),
        (
            [1, 3, 4],
            [(2, "of the end of epoch 1."), (4, "of the end of epoch 3.")],
            "of the end of epoch 3, and",
        ),
    ],
)
def test_a_full_disk_is_reported_once_and_at_the_end_what_is_on_it(
    full, failed, at_the_end, tmp_path
):
    def fill_or_empty_the_disk(epoch, _):
        CheckpointDirectory(tmp_path).wait()
        limit = 1 << 10 if epoch in full else LIMITS[0]  # bytes that a file may have
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, LIMITS[1]))

    disk = keras.callbacks.LambdaCallback(on_epoch_begin=fill_or_empty_the_disk)
    epochs = full[-1] + 1
    with shown_together() as shown:
        try:
            model = trained(tmp_path, disk, epochs=epochs, verbose=1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, LIMITS)
    assert model.history.epoch == [*range(epochs)]
    shown_lines = [line for line in shown.getvalue().split("\n") if line]
    *lines, last = [line for line in shown_lines if "━" not in line and "Epoch" not in line]
    for line, (epoch, newest) in zip(lines, failed, strict=True):
        assert line.startswith(f"The training state of the end of epoch {epoch} could not be saved")
        assert line.endswith(newest)
    assert at_the_end in last


# A directory for one run at a time.

HOLDING = """
import sys
from kdpkit.checkpoints import CheckpointDirectory
CheckpointDirectory(sys.argv[1]).acquire()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.tensorflow  # once
def test_a_directory_that_another_run_uses_raises_until_it_ends(tmp_path):
    command = [sys.executable, "-c", HOLDING, tmp_path]
    with subprocess.Popen(
        command, env=SOON_STARTED, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="Another run is using this directory"):
            trained(tmp_path)
        other.kill()
    trained(tmp_path)


# Signals.


@pytest.mark.parametrize(("way", "error"), [("Ctrl-C", KeyboardInterrupt), ("request", SystemExit)])
def test_a_stop_ends_the_line_of_the_progress_bar(way, error, tmp_path):
    with shown_together() as shown, pytest.raises(error) as ended:
        trained(tmp_path, Stop(way, 2), verbose=1)
    sentence = f"Its state is in {tmp_path}, and the same program continues"
    *_, last, end = shown.getvalue().split("\n")
    assert end == ""
    if error is KeyboardInterrupt:
        assert sentence in str(ended.value)
    else:
        assert last.startswith("Training was stopped by request_stop()")
        assert sentence in last


def test_after_training_has_failed_a_signal_does_what_it_always_does(tmp_path):
    came = []
    signal.signal(signal.SIGINT, lambda *_: came.append("Ctrl-C"))
    former = signal.getsignal(signal.SIGINT)
    for _ in range(2):
        with pytest.raises(CrashError):
            by_fit(Resume(tmp_path), Stop("error", 1, "on_train_batch_begin"))
    os.kill(os.getpid(), signal.SIGINT)
    assert came == ["Ctrl-C"]
    assert signal.getsignal(signal.SIGINT) is former


def test_after_a_stop_sigterm_does_what_it_always_does_or_nothing_until_training(tmp_path):
    def handler(*_):
        pass

    signal.signal(signal.SIGTERM, handler)
    for way, after in (("request", handler), ("SIGTERM", signal.SIG_IGN)):
        with pytest.raises(SystemExit):
            trained(tmp_path, Stop(way, 1))
        assert signal.getsignal(signal.SIGTERM) == after
    trained(tmp_path)
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_signal_or_request_after_the_last_epoch_acts_after_training(tmp_path):
    came = []
    signal.signal(signal.SIGTERM, lambda *_: came.append("SIGTERM"))
    former = signal.getsignal(signal.SIGTERM)
    for way in ("SIGTERM", "request"):
        model = trained(tmp_path / way, Stop(way, 1, "on_train_end"), epochs=1)
        assert model.history.epoch == [0]
        assert came == ["SIGTERM"]
        assert signal.getsignal(signal.SIGTERM) is former


def test_a_thread_saves_on_request(tmp_path):
    resume = Resume(tmp_path)
    stop = Stop("request", 3, resume=resume)

    def train_in_a_thread():
        with pytest.raises(SystemExit, match="42"):
            fit(compiled(), resume.track(batches()), stop, resume)

    resume.request_stop()  # before training: no effect
    with pytest.warns(UserWarning, match=r"not the main one.*resume\.request_stop\(\)"):
        ThreadPoolExecutor(1).submit(train_in_a_thread).result()
    assert [path.name for path in tmp_path.glob("*.npz")] == ["state-000000-000000003.npz"]
