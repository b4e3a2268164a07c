"""The law of `Resume`: a program that is stopped anywhere ends as one that nothing stopped.

The programs are in resume_programs.py; tests/test_elastic.py varies replicas and processes.
"""

import os
import pathlib
import random
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
from kdpkit._internal import atomic_files
from kdpkit.callbacks import Resume
from kdpkit.callbacks._resume import callback_state
from kdpkit.checkpoints import CheckpointDirectory, Position, _background
from tests.callbacks.resume_programs import (
    LEARNING,
    LOSS,
    ON_JAX,
    PROGRAMS,
    STEPS,
    batches,
    by_a_loop,
    by_fit,
    compiled,
    fit,
)

ROOT = pathlib.Path(kdpkit.__file__).parent.parent
pytestmark = pytest.mark.filterwarnings("ignore:Nothing is left to train")


class CrashError(Exception):
    """An error in a step."""


class Stop(keras.callbacks.Callback):
    """Stops a program in a way, when a hook is called for the n-th time in it."""

    def __init__(self, way, calls, hook="on_train_batch_end"):
        super().__init__()
        self.way, self.hook, self.calls = way, hook, calls
        self.resume = None
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
HOOKS = ["on_train_batch_end"] * 3 + ["on_test_begin", "on_test_batch_end", "on_epoch_end"]


def lived(name, directory, stop=None, *, states=None, **settings):
    """Run a program from its beginning; return what it ends with, or None if it is stopped."""
    keras.utils.set_random_seed(0)
    directory.mkdir(exist_ok=True)
    learning = LEARNING[name](directory)
    resume = Resume(states or directory / "states", callbacks=learning, **settings)
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
    for one, other in zip(found["variables"], expected["variables"], strict=True):
        np.testing.assert_array_equal(one, other)
    assert found["history"].keys() == expected["history"].keys()
    for log, values in expected["history"].items():
        # What the replicas of TensorFlow have summed is divided among them again.
        np.testing.assert_allclose(found["history"][log], values, rtol=1e-6, err_msg=log)
    for one, other in zip(found["learned"], expected["learned"], strict=True):
        assert one == pytest.approx(other, rel=1e-6)


QUICK = {"by_fit", "in_two_phases", "epoch_by_epoch", "with_averages_that_are_swapped"}
KINDS_OF_DATA = {
    "on shuffled",
    "on one batch",
    "on grain, packed",
    "on grain, filtered, two replicas",
}
ALSO_ON_JAX = {"by_a_loop_on_four_devices", "with_two_optimizers", *KINDS_OF_DATA}


def cases():
    for name in PROGRAMS:
        mark = pytest.mark.slow
        if name.startswith("on ") and name not in KINDS_OF_DATA:
            mark = pytest.mark.exhaustive
        marks = [] if name in QUICK else [mark]
        yield pytest.param(
            name, marks=[*marks, pytest.mark.jax] if ON_JAX and name in ALSO_ON_JAX else marks
        )


@pytest.mark.parametrize("name", [*cases()])
def test_a_program_that_was_stopped_ends_as_one_that_was_not(name, tmp_path):
    assert_ends_as_undisturbed(name, tmp_path, Stop("request", STEPS + 2))


AT_THE_END_OF_AN_EPOCH = {
    "before the first batch of a validation": [Stop("SIGTERM", 1, "on_test_begin")],
    "with the last step": [Stop("request", 2 * STEPS)],
    "in a validation, twice": [
        Stop("request", 5, "on_test_batch_end"),
        Stop("SIGTERM", 2, "on_test_batch_end"),
    ],
    "after the first validation": [Stop("Ctrl-C", 1, "on_epoch_end")],
}


@pytest.mark.slow
@pytest.mark.parametrize("when", AT_THE_END_OF_AN_EPOCH)
@pytest.mark.parametrize(
    "name", ["by_fit", "with_logs_of_its_own", "by_a_loop", "with_validation_that_draws"]
)
def test_a_program_that_was_stopped_at_the_end_of_an_epoch_ends_as_one_that_was_not(
    name, when, tmp_path
):
    stops = [Stop(stop.way, stop.calls, stop.hook) for stop in AT_THE_END_OF_AN_EPOCH[when]]
    assert_ends_as_undisturbed(name, tmp_path, *stops)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(4 * len(PROGRAMS)))
def test_a_program_that_was_stopped_anywhere_in_any_way_ends_as_one_that_was_not(seed, tmp_path):
    draw = random.Random(seed)
    name = [*PROGRAMS][seed % len(PROGRAMS)]
    stops = [
        Stop(draw.choice([*WAYS][:4]), draw.randint(1, 2 * STEPS + 2), draw.choice(HOOKS))
        for _ in range(draw.randint(1, 2))
    ]
    save_freq = draw.choice([1, 2, 7, "epoch"])
    print(name, stops, save_freq)  # noqa: T201 pytest shows it for what fails
    assert_ends_as_undisturbed(name, tmp_path, *stops, save_freq=save_freq)


@pytest.mark.slow
def test_a_program_that_is_over_trains_nothing_when_started_again(tmp_path):
    name = "in_phases_of_which_the_first_is_stopped"
    never = Stop("error", 1000)
    assert_ends_as_undisturbed(name, tmp_path, never, Stop("error", 1))


@pytest.mark.slow
def test_an_epoch_that_a_callback_cut_short_is_continued(tmp_path):
    assert_ends_as_undisturbed("by_fit", tmp_path, Stop("end of training", 3))


@pytest.mark.slow
@pytest.mark.parametrize("remote", ["memory"], indirect=True)
def test_a_run_in_object_storage_continues(remote, tmp_path):
    assert_ends_as_undisturbed("by_fit", tmp_path, Stop("error", 7), save_freq=1, states=remote)


# Several calls of `fit` in one program that is not started again.


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
    with pytest.warns(UserWarning, match="a callback stopped after 2 epochs. To train on, call"):
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


def test_evaluate_takes_the_callback_too(tmp_path):
    resume = Resume(tmp_path)
    model, train = compiled(), resume.track(batches())
    before = model.evaluate(batches(), callbacks=[resume], verbose=0)
    fit(model, train, resume)
    assert model.evaluate(batches(), callbacks=[resume], verbose=0) < before


# States that are damaged or cannot be written, and those that are written while training goes on.


@pytest.mark.slow
def test_a_damaged_state_costs_the_steps_since_the_one_before(tmp_path):
    lived("by_fit", tmp_path / "stopped", Stop("error", 7), save_freq=1)
    _background.wait(tmp_path / "stopped/states")
    newest = max((tmp_path / "stopped/states").iterdir())
    newest.write_bytes(newest.read_bytes()[:100])
    with pytest.warns(UserWarning, match="is damaged"):
        assert_ends_as_undisturbed("by_fit", tmp_path)


def test_a_state_that_cannot_be_written_is_reported_and_training_continues(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, hard))  # as good as a full disk
    resume = Resume(tmp_path)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")  # as outside of tests, where Python shows each once
            model = fit(compiled(), resume.track(batches()), resume)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    failed = [str(w.message) for w in caught if "could not be saved" in str(w.message)]
    assert [text.partition(" could")[0] for text in failed] == [
        f"The training state of epoch {epoch}, step 0" for epoch in (1, 2, 3)
    ]
    assert model.history.epoch == [0, 1, 2]
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_what_is_written_is_the_state_when_it_was_saved(tmp_path):
    go_on = threading.Event()
    threads = [f"thread {i}" for i in range(40)]  # all that there are, so that the state waits

    class Going(Stop):
        def on_train_batch_begin(self, batch, logs=None):  # noqa: ARG002 as Keras calls it
            if self.model.history.epoch and batch == 3:  # of the second epoch
                assert not [*tmp_path.glob("stopped/states/*.npz")]
                go_on.set()
                crash(self)

    for thread in threads:
        _background.start(thread, lambda: None if go_on.wait(240) else "nothing came")
    assert lived("by_fit", tmp_path / "stopped", Going("error", 1000)) is None
    for thread in threads:
        _background.wait(thread)
    state = CheckpointDirectory(tmp_path / "stopped/states").latest()
    assert (state.position, state.notes["epochs"]) == (Position(1, 0), [0])
    assert_ends_as_undisturbed("by_fit", tmp_path)


LARGE = """
import sys
import keras
from tests.callbacks.resume_programs import Resume, batches, fit, np

keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2_000_000)])
model.compile("sgd", "mse")
resume, x = Resume(sys.argv[1], save_freq=1), np.zeros((40, 4), "float32")
fit(model, resume.track(batches((x, x[:, :1]), global_batch_size=1)), resume, epochs=100)
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
    left, is_killed = CheckpointDirectory(tmp_path), number == signal.SIGKILL
    assert bool([*tmp_path.glob(".state-*")]) == is_killed
    newest = left.paths()[0].name
    assert newest == before if is_killed else newest > before
    assert is_killed or "Its state is in" in err.splitlines()[-1]
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
    def train():
        resume = Resume(tmp_path)
        fit(compiled(), resume.track(batches()), resume)

    command = [sys.executable, "-c", HOLDING, tmp_path]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="Another run is using this directory"):
            train()
        other.kill()
    train()


def test_in_object_storage_the_run_that_began_last_has_the_directory(tmp_path):
    def another_begins(*_, **__):
        _background.wait(f"file://{tmp_path}")
        with atomic_files.replacing(f"file://{tmp_path}/.lock") as mark:
            mark.write_text("0123 process 7 on another machine")

    resume = Resume(f"file://{tmp_path}")
    another = keras.callbacks.LambdaCallback(on_epoch_end=another_begins)
    with pytest.raises(ValueError, match="Another run, which began later.*'process 7 on another"):
        fit(compiled(), resume.track(batches()), resume, another)
    saved = [path.name for path in tmp_path.glob("state-*")]
    assert saved == ["state-000001-000000000.npz"]  # before the other one began


# Signals.


def failed(resume, train=by_fit):
    """Train until an error."""
    with pytest.raises(CrashError):
        train(resume, Stop("error", 1, "on_train_batch_begin"))


@pytest.mark.parametrize(
    ("train", "number", "times"),
    [
        (by_fit, signal.SIGINT, 1),
        pytest.param(by_a_loop, signal.SIGTERM, 2, marks=pytest.mark.slow),
    ],
)
def test_after_training_has_failed_a_signal_does_what_it_always_does(
    tmp_path, train, number, times
):
    came = []
    signal.signal(number, lambda *_: came.append(number))
    former = signal.getsignal(number)
    for _ in range(times):
        failed(Resume(tmp_path), train)
    os.kill(os.getpid(), number)
    assert came == [number]
    assert signal.getsignal(number) is former


@pytest.mark.slow
def test_handlers_that_others_set_while_it_trains_stay(tmp_path):
    came = []
    signal.signal(signal.SIGTERM, lambda *_: came.append("first"))

    def install(*_, **__):
        ours = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *given: (came.append("last"), ours(*given)))

    resume = Resume(tmp_path)
    installing = keras.callbacks.LambdaCallback(on_epoch_begin=install)
    with pytest.raises(CrashError):
        by_fit(resume, installing, Stop("error", 1))
    os.kill(os.getpid(), signal.SIGTERM)
    assert came == ["last", "first"]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    failed(resume)
    os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_a_second_sigterm_cuts_nothing_short(tmp_path):
    twice = [Stop("SIGTERM", 1), Stop("SIGTERM", 1)]
    resume = Resume(tmp_path)
    with pytest.raises(SystemExit, match="42"):
        fit(compiled(), resume.track(batches()), *twice, resume)
    assert [*tmp_path.glob("state-000000-*.npz")]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_a_signal_or_request_that_no_epoch_hears_any_more_acts_after_training(tmp_path):
    came = []
    signal.signal(signal.SIGTERM, lambda *_: came.append("SIGTERM"))
    former = signal.getsignal(signal.SIGTERM)
    resume, late = Resume(tmp_path / "signal"), Stop("SIGTERM", 1, "on_train_end")
    fit(compiled(), resume.track(batches()), late, resume)
    assert came == ["SIGTERM"]
    assert signal.getsignal(signal.SIGTERM) is former
    resume, late = Resume(tmp_path / "request"), Stop("request", 1, "on_train_end")
    late.resume = resume
    assert fit(compiled(), resume.track(batches()), late, resume, epochs=1).history.epoch == [0]


@pytest.mark.parametrize("step", [2, STEPS - 1])
def test_a_request_of_who_ends_training_as_well_is_a_stop(tmp_path, capfd, step):
    resume = Resume(tmp_path)
    both = [Stop(way, step) for way in ("end of training", "request")]
    both[1].resume = resume
    with pytest.raises(SystemExit, match="42"):
        fit(compiled(), resume.track(batches()), *both, resume)
    assert "Training was stopped by request_stop(). Its state is in" in capfd.readouterr().err


def test_a_thread_saves_on_request(tmp_path):
    resume, stop = Resume(tmp_path), Stop("request", 3)
    stop.resume = resume

    def train_in_a_thread():
        with pytest.raises(SystemExit, match="42"):
            fit(compiled(), resume.track(batches()), stop, resume)

    resume.request_stop()  # before training: no effect
    with pytest.warns(UserWarning, match=r"not the main one.*resume\.request_stop\(\)"):
        ThreadPoolExecutor(1).submit(train_in_a_thread).result()
    assert [path.name for path in tmp_path.glob("*.npz")] == ["state-000000-000000003.npz"]


# With other replicas; more of these are in tests/test_elastic.py.


@pytest.mark.slow
def test_a_run_on_grain_continues_with_another_number_of_replicas(tmp_path):
    complete = lived("on grain, filtered", tmp_path / "complete")
    lived("on grain, filtered, two replicas", tmp_path / "stopped", Stop("request", 6))
    resumed = lived("on grain, filtered", tmp_path / "stopped")
    for one, other in zip(resumed["variables"], complete["variables"], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
