"""What the recipes share: flags, strategies, results and exit codes."""

import argparse
import json
import math
import os
import re
import signal
import sys
import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from kdpkit import errors, experiment, pipelines, training
from kdpkit._internal import storage
from kdpkit.experiment import _program, _recorder, _strategy
from kdpkit.testing import tiny_classifier, toy_classification
from tests.processes import ROOT, run, run_code


def parser(**defaults):
    usual = {"epochs": 5, "per_replica_batch_size": 32, "base_learning_rate": 1e-4}
    return experiment.argument_parser("Trains.", **usual | defaults)


# Flags


@given(st.permutations(["--smoke", "--epochs=5", "--jit=on"]), st.integers(0, 3))
def test_smoke_sets_what_was_not_given(flags, count):
    recipe = parser(epochs=7)
    recipe.add_argument("--jit", default="auto")
    given_flags = flags[:count]
    args = recipe.parse_args(given_flags)
    smoke = "--smoke" in given_flags
    assert args.epochs == (5 if "--epochs=5" in given_flags else 2 if smoke else 7)
    assert args.steps_per_epoch == (4 if smoke else None)
    assert args.jit == ("on" if "--jit=on" in given_flags else "off" if smoke else "auto")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--epochs", "0"], "--epochs: must be a positive integer. Received: '0'"),
        (["--base-learning-rate", "nan"], "--base-learning-rate: must be a positive number"),
        (["--strategy", "foo"], "--strategy: invalid choice: 'foo'.*mirrored"),
        (["--seed", "-1"], "--seed: must be an integer from 0 .*'-1'"),
        (["--seed", str(2**32)], "--seed: .*'4294967296'"),
        (["--data", "no/such"], "--data: there is no such file or directory. Received: 'no/such'"),
        (["--data", "nothing://here"], "--data: .*nothing://"),
        (["--epoch", "3"], "unrecognized arguments: --epoch 3. The flags are listed by --help."),
    ],
)
def test_bad_flags_get_one_sentence(flags, sentence):
    with pytest.raises(errors.InputError, match=sentence):
        parser().parse_args(flags)


def test_paths_to_write_are_made_and_tried_before_the_run(tmp_path):
    flags = ["--results", str(tmp_path / "a" / "r.json"), "--log-dir", str(tmp_path / "b" / "c")]
    args = parser().parse_args(flags)
    assert args.log_dir.is_dir()
    assert not any(args.results.parent.iterdir())
    (tmp_path / "file").touch()
    for flag, path in (
        ("--results", tmp_path),
        ("--log-dir", tmp_path / "file"),
        ("--resume", "/proc"),
        ("--results", "file:///sys/kernel/x/r.json"),
    ):
        with pytest.raises(ValueError, match=f"{flag}: .*Received: "):
            parser().parse_args([flag, str(path)])


# Strategies


def strategy(kind, replicas=None):
    return experiment.strategy_from(argparse.Namespace(strategy=kind, replicas=replicas))


@pytest.mark.parametrize(
    ("kind", "replicas", "expected"),
    [
        ("auto", None, "no strategy: 1 replica on CPU:0"),
        ("auto", 2, "MirroredStrategy: 2 replicas on CPU:0, CPU:1"),
        ("mirrored", 1, "MirroredStrategy: 1 replica on CPU:0"),
    ],
)
def test_flags_name_a_strategy_which_is_printed(kind, replicas, expected, capsys):
    assert _strategy.describe(strategy(kind, replicas)) == expected
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1  # of "auto" the choice alone, with its reason
    assert expected in printed or (kind, replicas) == ("auto", None)


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 8))
def test_a_given_global_batch_is_that_of_its_replicas_whatever_number_trains(size, wanted, present):
    flags = [f"--per-replica-batch-size={size}", "--rule=linear", "--base-learning-rate=0.1"]
    args = parser().parse_args(flags)
    plan = experiment.plan_from(args, argparse.Namespace(num_replicas_in_sync=wanted))
    assert plan.global_batch_size == size * wanted
    assert plan.learning_rate == pytest.approx(0.1 * wanted)
    args = parser().parse_args([*flags, f"--global-batch-size={size * wanted}"])
    assert plan == experiment.plan_from(args, argparse.Namespace(num_replicas_in_sync=present))
    if size > 1:
        args.global_batch_size += 1
        with pytest.raises(ValueError, match=f"a multiple of .*per_replica_batch_size={size}"):
            experiment.plan_from(args, argparse.Namespace(num_replicas_in_sync=present))


# Results


def strict(content):
    def fail(constant):
        raise ValueError(f"{constant} is not JSON")

    return json.loads(content, parse_constant=fail)


def trained(flags, *, epochs=2):
    args = parser(epochs=epochs).parse_args(list(map(str, flags)))
    mirrored = strategy("mirrored", 2)
    plan = experiment.plan_from(args, mirrored)
    schedule = keras.optimizers.schedules.PolynomialDecay(0.1, 20, end_learning_rate=0.0)
    with mirrored.scope():
        model = tiny_classifier()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(schedule), loss)
    written = []

    def note(*_):
        if args.results:
            written.append(strict(args.results.read_bytes()))

    record = experiment.Recorder(args, model, mirrored, plan, tokens_per_example=5)
    record.callbacks.insert(1, keras.callbacks.LambdaCallback(on_epoch_end=note))
    examples = tf.data.Dataset.from_tensor_slices(toy_classification(80))
    data = record.resumed(pipelines.train_pipeline(examples, global_batch_size=8))
    model.fit(data, epochs=epochs, verbose=record.verbose, callbacks=record.callbacks)
    return record.results(test={"loss": np.float32(0.5), "worst": math.nan}), written


@pytest.mark.parametrize("remote", ["memory"], indirect=True)
def test_results_record_what_happened_after_each_epoch_and_in_the_end(remote):
    file = storage.path(f"{remote}/a/r.json")
    results, (first, second) = trained(["--per-replica-batch-size=4", "--results", file])
    assert len(first["history"]["loss"]) == 1
    assert second["history"]["loss"] == results["history"]["loss"]
    schedule = keras.optimizers.schedules.PolynomialDecay(0.1, 20, end_learning_rate=0.0)
    rates = [float(schedule(9)), float(schedule(19))]
    assert results["history"]["learning_rate"] == pytest.approx(rates, rel=1e-6)
    speeds = results["history"]["examples_per_second"]
    overall = 2 / (1 / speeds[0] + 1 / speeds[1])  # twice the same work takes the sum of the times
    assert results["examples_per_second"] == pytest.approx(overall)
    assert results["tokens_per_second"] == pytest.approx(5 * overall)
    expected = {
        "replicas": 2,
        "strategy": "MirroredStrategy: 2 replicas on CPU:0, CPU:1",
        "global_batch_size": 8,
        "steps": 20,
        "versions": _recorder.versions(),
    }
    assert {name: results[name] for name in expected} == expected
    assert math.isnan(results["test"].pop("worst"))
    assert strict(file.read_bytes()) == {**results, "test": {"loss": 0.5, "worst": None}}


def test_each_epoch_is_one_short_line_where_the_output_is_no_terminal(capsys):
    results, _ = trained(["--per-replica-batch-size=4"])
    first, second, test = capsys.readouterr().out.splitlines()[-3:]
    assert re.fullmatch(r"Epoch 1/2 - \d+s - loss: [\d.]+ - lr: 0.0550 - .*", first)
    history = results["history"]
    assert f" - loss: {history['loss'][1]:#.3g} - lr: " in second
    assert " - tokens/s: " in second
    assert "examples" not in second, "one speed is enough"
    assert test == "Test - loss: 0.500 - worst: nan"


def test_in_a_terminal_keras_shows_its_bar_and_nothing_else(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    trained(["--per-replica-batch-size=4"])
    printed = capsys.readouterr().out
    assert printed.count("\u2501") > 10
    assert "Epoch 1/2 - " not in printed
    assert "earning" not in printed


def test_the_first_steps_are_compared_with_one_devices_and_nothing_is_trained(capsys):
    args = parser().parse_args(["--per-replica-batch-size=3", "--strategy=mirrored"])
    mirrored = strategy("mirrored", 2)
    plan = experiment.plan_from(args, mirrored)

    def build(exact=training.replica_exact):
        layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dropout(0.5), keras.layers.Dense(3)]
        model = exact(keras.Sequential([keras.Input((4,)), *layers]))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = keras.optimizers.SGD(0.1, global_clipnorm=0.01)
        model.compile(optimizer, loss, steps_per_execution=2)
        return model

    x, y = toy_classification(40)
    train = pipelines.train_pipeline(
        tf.data.Dataset.from_tensor_slices((x, y)), global_batch_size=5, steps_per_epoch=4
    )
    orders = [next(iter(train))[1].numpy() for _ in range(2)]
    with mirrored.scope():
        model = build()
    start = model.get_weights()

    def found(build):
        record = experiment.Recorder(args, model, mirrored, plan)
        record.compare_first_steps(build, train)
        model.history = keras.callbacks.History()
        model.history.history = {}
        record.results(test={"loss": 0.5})
        sentence = " ".join(capsys.readouterr().out.split("loss: 0.500\n")[1].split())
        pattern = r"The first 3 steps have the losses (.*) on 2 replicas, and (.*) on one device; "
        pattern += r"all weights together differ by (.*) of what these steps have changed."
        many, one, off = re.fullmatch(pattern, sentence).groups()
        return many.split(", "), one.split(", "), float(off)

    many, one, off = found(build)
    assert many == one
    assert len({*many}) == 3
    assert off < 1e-5
    *_, off = found(lambda: build(exact=lambda model: model))  # as stock Keras clips
    assert off > 0.1
    for value, now in zip(start, model.get_weights(), strict=True):
        np.testing.assert_array_equal(now, value)
    np.testing.assert_array_equal(orders[0], next(iter(train))[1])


# Programs


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (errors.InputError("`x` is wrong."), 2, "`x` is wrong."),
        (KeyboardInterrupt(), 130, "Stopped by Ctrl-C."),
        (KeyboardInterrupt("Training was stopped."), 130, "Training was stopped."),
        (errors.ProcessLostError("It is gone."), 43, "It is gone."),
        (OSError(28, "No space left on device", "/logs/x"), 1, "No space is left (/logs/x: "),
    ],
)
def test_known_errors_end_a_program_with_one_sentence(error, code, sentence, capsys, monkeypatch):
    def failing():
        raise error

    monkeypatch.setattr(sys, "argv", ["recipes/cnn_fit.py"])
    with pytest.raises(SystemExit) as caught:
        experiment.run(failing)
    assert caught.value.code == code
    printed = capsys.readouterr().err
    assert printed.startswith(f"cnn_fit.py: {sentence}")
    assert printed.count("\n") == 1


def test_other_errors_keep_their_traceback():
    def failing():
        raise ValueError("not ours")

    with pytest.raises(ValueError, match="not ours"):
        experiment.run(failing)


AT_THE_START = """
import signal, sys

class AtImport:
    def find_spec(self, name, path=None, target=None):
        if name == "keras":
            {happens}

sys.meta_path.insert(0, AtImport())
"""
COMES = "signal.raise_signal(signal.SIGINT)"


@pytest.mark.parametrize("happens", [COMES, f"exec('try: {COMES}\\nexcept BaseException: pass')"])
def test_ctrl_c_ends_a_program_that_imports_also_where_it_is_caught(happens, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(AT_THE_START.format(happens=happens))
    paths = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    words = (ROOT / "recipes/cnn_fit.py", "--smoke")
    ended = run(sys.executable, *words, check=False, PYTHONPATH=paths)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


LOADS_TENSORFLOW = """
import argparse, os
from kdpkit import experiment
experiment.start(argparse.ArgumentParser(), "__main__")
os.write(2, b"an error\\n")
"""


@pytest.mark.parametrize(("level", "is_shown"), [("0", True), ("2", False)])
def test_lines_of_a_build_are_shown_where_the_log_level_asks_for_all(
    level, is_shown, monkeypatch, capfd
):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", level)
    line = "I0000 00:00:1795762955.510618   31730 port.cc:153] oneDNN custom operations are on.\n"
    with _program._without_build_messages():
        os.write(2, f"{line}mine\n".encode())
    assert capfd.readouterr().err == (line if is_shown else "") + "mine\n"
    with monkeypatch.context() as full:
        full.setattr(tempfile, "tempdir", "/nowhere")  # as where no disk has room
        with _program._without_build_messages():
            os.write(2, b"mine\n")
    assert capfd.readouterr().err == "mine\n"
    monkeypatch.setattr("sys.stderr", None)  # as of a process that was started without one
    with _program._without_build_messages():
        pass


@pytest.mark.slow
@pytest.mark.tensorflow
def test_what_tensorflow_writes_of_its_build_is_hidden_and_nothing_else(monkeypatch):
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    assert run_code(LOADS_TENSORFLOW).stderr == "an error\n"
