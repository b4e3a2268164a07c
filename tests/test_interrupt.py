"""Ctrl-C is sent for real, by a callback, at a moment that each test chooses."""

import argparse
import os
import pathlib
import signal
import subprocess
import sys
import threading

import keras
import numpy as np
import pytest

from kdpkit import batches, experiment, scaling
from kdpkit.testing import tiny_classifier, toy_classification

X, Y = toy_classification(40)


class PressCtrlC(keras.callbacks.Callback):
    """Sends SIGINT when the named hook is called with the given batch, and counts steps."""

    def __init__(self, hook=None, batch=None, times=1):
        super().__init__()
        self.steps = 0
        self.hooks = []
        for name in ("on_test_batch_end", "on_test_end", "on_epoch_end"):
            setattr(self, name, self._pressing(name, hook, batch, times))
        self._press = self._pressing("on_train_batch_end", hook, batch, times)

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        self._press(batch, logs)

    def _pressing(self, name, hook, batch, times):
        def called(index=None, *_, **__):
            self.hooks.append(name)
            if name == hook and batch in (None, index):
                for _ in range(times):
                    os.kill(os.getpid(), signal.SIGINT)

        return called


def compiled(build=tiny_classifier):
    model = build()
    model.compile(
        keras.optimizers.SGD(0.1),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def mirrored():
    from kdpkit import strategies

    with strategies.select_strategy("mirrored", devices=2).scope():
        return compiled()


def recording(model, log_dir, *also, resume=None):
    args = argparse.Namespace(log_dir=log_dir, results=None, resume=resume, epochs=2)
    plan = scaling.ScalePlan(replicas=1, per_replica_batch_size=4, base_learning_rate=0.1)
    if keras.backend.backend() == "jax":
        from kdpkit import sharding

        one = sharding.DataParallel(1)
    else:
        from kdpkit import strategies

        one = strategies.select_strategy("one")
    return experiment.recording(args, model, one, plan, also=also)


def fit(model, log_dir, press, **arguments):
    if log_dir:  # the usual callbacks write there, too
        log_dir = log_dir / "logs"
    with recording(model, log_dir, press) as record:
        settings = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0, **arguments}
        model.fit(X, Y, callbacks=[*record.callbacks], **settings)


def weights_after(steps):
    """Train an undisturbed model for so many steps on one device."""
    model = compiled()
    for step in range(steps):
        batch = slice(4 * step % 40, 4 * step % 40 + 4)
        model.train_on_batch(X[batch], Y[batch])
    return model.get_weights()


# When Ctrl-C comes, the steps that were made then, and how many epochs have ended.
MOMENTS = [
    ("on_train_batch_end", 2, 3, 0),
    ("on_test_batch_end", 2, 10, 0),  # nobody takes the validation for complete
    ("on_train_batch_end", 9, 10, 1),  # the last step of an epoch
    ("on_epoch_end", 1, 20, 2),
]


@pytest.mark.parametrize(
    ("build", "hook", "batch", "steps", "epochs"),
    [
        *((compiled, *moment) for moment in MOMENTS),
        *(pytest.param(mirrored, *moment, marks=pytest.mark.tensorflow) for moment in MOMENTS[:2]),
    ],
)
def test_training_ends_with_the_current_step_and_is_saved(
    tmp_path, capfd, build, hook, batch, steps, epochs
):
    press, validation = PressCtrlC(hook, batch), {}
    if hook == "on_test_batch_end":
        validation = {"validation_data": (X, Y), "validation_batch_size": 4}
    with pytest.raises(KeyboardInterrupt):
        fit(build(), tmp_path, press, **validation)
    assert press.steps == steps
    assert press.hooks.count("on_epoch_end") == epochs
    assert press.hooks.count("on_test_batch_end") < len(X) / 4
    printed, saved = capfd.readouterr(), tmp_path / "logs" / "interrupted.keras"
    assert "Ctrl-C: training ends with this step. Press it again to stop at once." in printed.err
    assert f"stopped by Ctrl-C. The model as trained so far is saved as {saved}." in printed.out
    loaded = keras.saving.load_model(saved)
    assert int(loaded.optimizer.iterations) == steps
    for left, right in zip(loaded.get_weights(), weights_after(steps), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-6)


@pytest.mark.slow
def test_where_resume_keeps_the_state_the_sentence_names_it(tmp_path, capfd):
    def train(*others):
        model = compiled()
        with recording(model, None, *others, resume=tmp_path / "state") as record:
            data = record.resumed(batches.ArrayBatches((X, Y), global_batch_size=4))
            model.fit(data, epochs=2, shuffle=False, verbose=0, callbacks=record.callbacks)
        return model

    with pytest.raises(KeyboardInterrupt):
        train(PressCtrlC("on_train_batch_end", 1))
    assert f"Its state is in {tmp_path / 'state'}, and the same" in capfd.readouterr().out
    for left, right in zip(train().get_weights(), weights_after(20), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-6)


@pytest.mark.tensorflow  # once
def test_without_a_log_directory_it_reports_that_nothing_was_saved(capfd):
    with pytest.raises(KeyboardInterrupt):
        fit(compiled(), None, PressCtrlC("on_train_batch_end", 2))
    assert "Nothing was saved; with a log directory (--log-dir)" in capfd.readouterr().out


@pytest.mark.tensorflow  # once
def test_the_second_ctrl_c_stops_at_once_and_saves_nothing(tmp_path, capfd):
    press = PressCtrlC("on_train_batch_end", 2, times=2)
    with pytest.raises(KeyboardInterrupt):
        fit(compiled(), tmp_path, press)
    assert "Nothing was saved, as it was not between two steps." in capfd.readouterr().out
    assert not list(tmp_path.rglob("*.keras"))


@pytest.mark.tensorflow  # once
def test_ctrl_c_before_training_stops_at_once(tmp_path):
    def interrupted():
        with recording(compiled(), tmp_path):
            os.kill(os.getpid(), signal.SIGINT)
            pytest.fail("the block went on")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not list(tmp_path.rglob("*.keras"))


@pytest.mark.parametrize("hook", [None, "on_train_batch_end"])
def test_the_former_handler_is_back_afterwards(tmp_path, hook):
    former = signal.getsignal(signal.SIGINT)
    try:
        fit(compiled(), tmp_path, PressCtrlC(hook))
    except KeyboardInterrupt:
        assert hook
    assert signal.getsignal(signal.SIGINT) is former


@pytest.mark.tensorflow  # once
def test_training_in_another_thread_is_undisturbed(tmp_path):
    press = PressCtrlC()
    thread = threading.Thread(target=fit, args=(compiled(), tmp_path, press))
    thread.start()
    thread.join(timeout=300)
    assert press.steps == 20


@pytest.mark.tensorflow  # once
def test_other_errors_pass_and_save_nothing(tmp_path):
    def failing(*_):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fit(compiled(), tmp_path, keras.callbacks.LambdaCallback(on_epoch_end=failing))
    assert not list(tmp_path.rglob("*.keras"))


@pytest.mark.slow
@pytest.mark.tensorflow
def test_ctrl_c_ends_a_program_with_130_and_a_model_that_has_learned(tmp_path):
    program = pathlib.Path(__file__).parents[1] / "recipes" / "multi_worker.py"
    flags = ["--strategy", "mirrored", "--replicas", "2", "--log-dir", tmp_path / "logs"]
    process = subprocess.Popen(
        [sys.executable, program, *flags, "--smoke", "--epochs", "1000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    try:
        while not process.stdout.readline().startswith("Learning rate of epoch 1"):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "multi_worker.py: Stopped by Ctrl-C." in errors
    assert "Traceback" not in errors
    assert "Training was stopped by Ctrl-C. The model as trained" in output.splitlines()[-1]
    saved = keras.saving.load_model(tmp_path / "logs" / "interrupted.keras")
    assert int(saved.optimizer.iterations) >= 4
