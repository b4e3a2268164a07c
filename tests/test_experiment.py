import argparse
import gc
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdpkit import errors, experiment
from kdpkit.experiment import _strategy
from kdpkit.testing import tiny_classifier, toy_classification


def parser(**arguments):
    defaults = {"epochs": 5, "per_replica_batch_size": 32, "base_learning_rate": 1e-4}
    return experiment.argument_parser("Trains.", **(defaults | arguments))


# Imports


@pytest.mark.slow
def test_quick_imports_collect_nothing_and_leave_the_collector_as_it_was():
    code = """
import gc
from kdpkit import experiment
try:
    with experiment.quick_imports():
        import keras_and_tensorflow
except ImportError:
    print(gc.isenabled())
with experiment.quick_imports():
    print(gc.isenabled())
    import keras
print(gc.isenabled(), gc.get_freeze_count() > 100_000)
"""
    assert in_a_new_process(code) == "True\nFalse\nTrue True\n"


def test_where_keras_is_loaded_imports_are_as_ever():
    frozen = gc.get_freeze_count()
    with experiment.quick_imports():
        assert gc.isenabled()
    assert gc.get_freeze_count() == frozen


def test_a_missing_package_is_one_sentence_with_the_command_that_installs_it():
    with (
        pytest.raises(errors.PackageInputError, match=r'`keras_hub` .* "kdpkit\[recipes\]"'),
        experiment.quick_imports(),
    ):
        raise ModuleNotFoundError("No module named 'keras_hub'", name="keras_hub")
    with (
        pytest.raises(ModuleNotFoundError, match="No module named 'not_installed'"),
        experiment.quick_imports(),
    ):
        import not_installed  # noqa: F401 a module of the program's own


# Flags


def test_without_flags_the_recipes_defaults_hold(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert vars(parser(rule="sqrt").parse_args([])) == {
        "strategy": "auto",
        "replicas": None,
        "data": "builtin",
        "epochs": 5,
        "steps_per_epoch": None,
        "per_replica_batch_size": 32,
        "global_batch_size": None,
        "base_learning_rate": 1e-4,
        "rule": "sqrt",
        "seed": 0,
        "log_dir": None,
        "resume": None,
        "results": None,
        "cache_dir": Path("/caches/kdpkit"),
        "smoke": False,
    }


@given(st.permutations(["--smoke", "--epochs=5", "--hidden=9"]), st.integers(0, 3))
def test_smoke_sets_what_was_not_given(flags, count):
    recipe = parser(smoke={"epochs": 1, "steps_per_epoch": 4, "hidden": 2})
    recipe.add_argument("--hidden", type=int, default=64)
    given_flags = flags[:count]
    args = recipe.parse_args(given_flags)
    smoke = "--smoke" in given_flags
    assert args.epochs == (1 if smoke and "--epochs=5" not in given_flags else 5)
    assert args.steps_per_epoch == (4 if smoke else None)
    default = 2 if smoke else 64
    assert args.hidden == (9 if "--hidden=9" in given_flags else default)


def test_published_settings_have_a_flag_and_smoke_comes_before_them():
    recipe = parser(smoke={"epochs": 1}, published={"epochs": 40, "rule": "none"})
    args = recipe.parse_args(["--published"])
    assert (args.epochs, args.rule) == (40, "none")
    args = recipe.parse_args(["--published", "--smoke"])
    assert (args.epochs, args.rule) == (1, "none")
    with pytest.raises(ValueError, match="--published"):
        parser(smoke={"epochs": 1}).parse_args(["--published"])


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--epochs", "0"], "--epochs: must be a positive integer. Received: '0'"),
        (["--steps-per-epoch", "1.5"], "--steps-per-epoch: must be a positive integer"),
        (["--per-replica-batch-size", "many"], "--per-replica-batch-size: must be a positive"),
        (["--base-learning-rate", "nan"], "--base-learning-rate: must be a positive number"),
        (["--seed", "-1"], "--seed: .* Received: '-1'"),
        (["--seed", "4294967296"], "--seed: .*'4294967296'"),
        (["--rule", "cubic"], "--rule: invalid choice: 'cubic'"),
        (["--epoch", "3"], "unrecognized arguments: --epoch 3. The flags are listed by --help."),
    ],
)
def test_bad_flags_get_one_sentence(flags, sentence):
    with pytest.raises(ValueError, match=sentence):
        parser().parse_args(flags)


def test_paths_to_write_are_made_and_tried_before_the_run(tmp_path):
    flags = ["--results", str(tmp_path / "a" / "r.json"), "--log-dir", str(tmp_path / "b" / "c")]
    args = parser().parse_args(flags)
    assert args.results.parent.is_dir()
    assert args.log_dir.is_dir()
    assert not any(args.results.parent.iterdir())


def test_paths_that_cannot_be_written_raise_before_the_run(tmp_path):
    (tmp_path / "file").touch()
    for flag, path in (
        ("--results", tmp_path),
        ("--results", tmp_path / "file" / "results.json"),
        ("--results", "/proc/results.json"),
        ("--log-dir", tmp_path / "file"),
        ("--resume", "/proc"),
    ):
        with pytest.raises(ValueError, match=f"{flag}: .*Received: '{path}'"):
            parser().parse_args([flag, str(path)])


def test_help_describes_the_recipe(capsys):
    with pytest.raises(SystemExit):
        parser().parse_args(["--help"])
    assert "\nTrains.\n" in capsys.readouterr().out


# Strategies


def strategy(kind, replicas=None):
    return experiment.strategy_from(argparse.Namespace(strategy=kind, replicas=replicas))


@pytest.mark.parametrize(
    ("kind", "replicas", "expected"),
    [
        ("auto", None, "no strategy: 1 replica on CPU:0"),
        ("auto", 2, "MirroredStrategy: 2 replicas on CPU:0, CPU:1"),
        ("one", 1, "no strategy: 1 replica on CPU:0"),
        ("mirrored", 1, "MirroredStrategy: 1 replica on CPU:0"),
        ("mirrored", 3, "MirroredStrategy: 3 replicas on CPU:0, CPU:1, CPU:2"),
    ],
)
def test_flags_name_a_strategy(kind, replicas, expected):
    from kdpkit import strategies

    assert strategies.describe(strategy(kind, replicas)) == expected


@pytest.mark.parametrize(
    ("kind", "replicas", "sentence"),
    [
        ("one", 2, "'one'.*replicas=2"),
        ("multi_worker", 2, "'multi_worker'.*replicas=2"),
        ("tpu", 8, "'tpu'.*replicas=8"),
        ("mirrored", 9, "runtime has started with 8 logical CPU"),
    ],
)
def test_strategies_that_cannot_be_had_get_one_sentence(kind, replicas, sentence):
    with pytest.raises(ValueError, match=sentence):
        strategy(kind, replicas)


def in_a_new_process(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    ).stdout


@pytest.mark.slow
def test_a_new_process_has_its_cpu_split_unless_it_has_devices_enough():
    code = """
from argparse import Namespace
from kdpkit import experiment, strategies
strategies.split_device("CPU", 4)
for replicas in (2, 4, 5):
    try: strategy = experiment.strategy_from(Namespace(strategy="mirrored", replicas=replicas))
    except ValueError as error: print(error)
    else: print(experiment.describe(strategy))
"""
    two, four, five = in_a_new_process(code).splitlines()
    assert two == "MirroredStrategy: 2 replicas on CPU:0, CPU:1"
    assert four == "MirroredStrategy: 4 replicas on CPU:0, CPU:1, CPU:2, CPU:3"
    assert "runtime has started with 4 logical CPU" in five


@pytest.mark.slow
def test_on_jax_the_strategy_is_a_distribution_over_as_many_devices():
    code = """
from argparse import Namespace
import keras
from kdpkit import experiment
from kdpkit.experiment import _strategy
strategy = experiment.strategy_from(Namespace(strategy="mirrored", replicas=3))
print(strategy.num_replicas_in_sync, experiment.describe(strategy))
print(keras.distribution.distribution() is strategy)
for flags in (dict(strategy="multi_worker", replicas=None), dict(strategy="one", replicas=2)):
    try: experiment.strategy_from(Namespace(**flags))
    except ValueError as error: print(error)
"""
    printed = in_a_new_process(code, KERAS_BACKEND="jax")
    assert "3 DataParallel: 3 replicas on cpu:0, cpu:1, cpu:2\nTrue" in printed
    assert "The strategy 'multi_worker' is TensorFlow's; on JAX `auto` takes" in printed
    assert "trains a single replica. Received: replicas=2" in printed


def test_the_plan_of_a_run_follows_its_flags():
    flags = ["--per-replica-batch-size", "8", "--base-learning-rate", "0.1", "--rule", "linear"]
    args = parser().parse_args(flags)
    plan = experiment.plan_from(args, argparse.Namespace(num_replicas_in_sync=3))
    assert (plan.global_batch_size, plan.learning_rate) == (24, pytest.approx(0.3))


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 8))
def test_a_given_global_batch_is_that_of_its_replicas_whatever_number_trains(size, wanted, present):
    flags = [f"--per-replica-batch-size={size}", f"--global-batch-size={size * wanted}"]
    args = parser().parse_args(flags)
    plan = experiment.plan_from(args, argparse.Namespace(num_replicas_in_sync=present))
    undisturbed = parser().parse_args(flags[:1])
    assert plan == experiment.plan_from(
        undisturbed, argparse.Namespace(num_replicas_in_sync=wanted)
    )


@pytest.mark.parametrize("size", [4, 12])
def test_a_global_batch_of_a_part_of_a_replica_is_rejected(size):
    args = parser().parse_args(["--per-replica-batch-size=8", f"--global-batch-size={size}"])
    wrong = f"a multiple of .*global_batch_size={size}, per_replica_batch_size=8"
    with pytest.raises(ValueError, match=wrong):
        experiment.plan_from(args, argparse.Namespace(num_replicas_in_sync=1))


@pytest.mark.slow
def test_other_backends_raise():
    code = """
from argparse import Namespace
from kdpkit import experiment
from kdpkit.experiment import _strategy
try: experiment.strategy_from(Namespace(strategy="mirrored", replicas=2))
except ValueError as error: print(error)
"""
    printed = in_a_new_process(code, KERAS_BACKEND="numpy")
    assert "KERAS_BACKEND='numpy'" in printed


@pytest.mark.parametrize("answer", ["81079", "[N/A]", None])
def test_the_gpu_memory_to_divide_is_the_drivers_answer(tmp_path, monkeypatch, answer):
    if answer is not None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f'#!/bin/sh\ntest "$1" = --id=3 && echo "{answer}"\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    if answer == "81079":
        assert _strategy._free_gpu_memory_mb() == 81079
    else:
        with pytest.raises(ValueError, match="cannot be split.*`memory_limit_mb` before"):
            _strategy._free_gpu_memory_mb()


# Progress


def test_progress_is_one_line_after_a_bar_on_a_terminal(capsys, monkeypatch):
    assert list(experiment.track(iter(range(1234)), "Counting")) == list(range(1234))
    printed = capsys.readouterr().out
    assert printed.startswith("Counting: 1,234 in ")
    assert printed.count("\n") == 1
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    list(experiment.track(range(10), "Counting", total=10))
    bar, line = capsys.readouterr().out.rsplit("Counting: 10 in ", 1)
    assert "100%" in bar
    assert line.count("\n") == 1


def test_progress_that_is_not_finished_claims_nothing(capsys):
    assert list(itertools.islice(experiment.track(range(10), "Counting"), 3)) == [0, 1, 2]
    assert capsys.readouterr().out == ""


# Results

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda part: st.lists(part) | st.dictionaries(st.text(), part),
    max_leaves=10,
)


def strict(text):
    def fail(constant):
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=fail)


def finite(value):
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@settings(max_examples=25)
@given(results=st.dictionaries(st.text(), json_values))
def test_results_are_strict_json_with_null_for_what_is_not_finite(tmp_path_factory, results):
    path = tmp_path_factory.getbasetemp() / "results" / "r.json"
    experiment.write_results(path, results)
    assert strict(path.read_text()) == finite(results)
    assert [file.name for file in path.parent.iterdir()] == ["r.json"]


def test_results_of_arrays_and_tensors_are_plain_numbers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "r.json"
    experiment.write_results(None, {"a": 1})
    assert not any(tmp_path.iterdir())
    experiment.write_results(
        path,
        {
            "scalar": np.float32(0.5),
            "array": np.array([[1, 2], [3, 4]]),
            "nan": np.array([1.0, math.nan, math.inf]),
            "tensor": keras.ops.ones((2,), dtype="bfloat16"),
            "variable": keras.Variable(3.0),
            "path": Path("logs"),
            "tuple": (np.bool_(True), None),
        },
    )
    assert strict(path.read_text()) == {
        "scalar": 0.5,
        "array": [[1, 2], [3, 4]],
        "nan": [1.0, None, None],
        "tensor": [1.0, 1.0],
        "variable": 3.0,
        "path": "logs",
        "tuple": [True, None],
    }


def test_results_of_a_run_record_what_happened(tmp_path):
    from kdpkit import callbacks, strategies

    mirrored = strategies.select_strategy("mirrored", devices=2)
    schedule = keras.optimizers.schedules.PolynomialDecay(0.1, 20, end_learning_rate=0.0)
    with mirrored.scope():
        model = tiny_classifier()
        model.compile(
            keras.optimizers.SGD(schedule),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    x, y = toy_classification(80)
    speed = callbacks.Throughput(8, replicas=2, tokens_per_example=5)
    history = model.fit(
        x, y, batch_size=8, epochs=2, verbose=0, callbacks=[callbacks.LearningRateLogger(), speed]
    )
    results = experiment.results_of(
        model, history, strategy=mirrored, global_batch_size=8, test={"loss": np.float32(0.5)}
    )
    np.testing.assert_allclose(results["learning_rates"], [schedule(9), schedule(19)], rtol=1e-6)
    speeds = results["history"]["examples_per_second"]
    # Twice the same work takes the sum of the times, 1/s + 1/t.
    overall = 2 / (1 / speeds[0] + 1 / speeds[1])
    assert results["examples_per_second"] == pytest.approx(overall)
    assert results["tokens_per_second"] == pytest.approx(5 * overall)
    assert len(results["history"]["loss"]) == 2
    expected = {
        "test": {"loss": 0.5},
        "replicas": 2,
        "strategy": "MirroredStrategy: 2 replicas on CPU:0, CPU:1",
        "global_batch_size": 8,
        "steps": 20,
        "versions": experiment.versions(),
    }
    assert {name: results[name] for name in expected} == expected
    experiment.write_results(tmp_path / "r.json", results)
    assert strict((tmp_path / "r.json").read_text()) == results


def test_what_was_not_measured_is_left_open():
    model = tiny_classifier()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = model.fit(*toy_classification(8), verbose=0)
    results = experiment.results_of(model, history, strategy=strategy("one"), global_batch_size=32)
    assert results["examples_per_second"] is None
    assert (results["learning_rates"], results["test"], results["steps"]) == ([], {}, 1)
    assert "tokens_per_second" not in results


# Programs


def exit_of(main):
    with pytest.raises(SystemExit) as caught:
        experiment.run(main)
    return caught.value.code


def test_bad_input_ends_a_program_with_one_sentence(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["recipes/cnn_fit.py", "--epochs", "0"])
    assert exit_of(lambda: parser().parse_args()) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("cnn_fit.py: argument --epochs: must be a positive integer.")
    assert printed.count("\n") == 1


def test_ctrl_c_ends_a_program_with_130_and_one_line(capsys, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["cnn_fit.py"])
    assert exit_of(interrupted) == 130
    assert capsys.readouterr().err.startswith("cnn_fit.py: ")


def test_other_errors_keep_their_traceback():
    def failing():
        raise ValueError("not ours")

    with pytest.raises(ValueError, match="not ours"):
        experiment.run(failing)


def test_collecting_puts_the_examples_in_order_into_one_array(capsys):
    import tensorflow as tf

    examples = tf.data.Dataset.from_tensor_slices([[1, 2], [3, 4], [5, 6]])
    np.testing.assert_array_equal(experiment.collect(examples, "Reading"), [[1, 2], [3, 4], [5, 6]])
    assert capsys.readouterr().out.startswith("Reading: 3 in ")
    with pytest.raises(ValueError, match="while_doing='Reading'"):
        experiment.collect(examples.take(0), "Reading")


def test_paths_in_object_storage_are_tried_and_written(remote):
    flags = ["--results", f"{remote}/a/r.json", "--log-dir", f"{remote}/b/c"]
    flags += ["--resume", f"{remote}/s", "--cache-dir", f"{remote}/cache"]
    args = parser().parse_args(flags)
    assert [str(path) for path in (args.results, args.log_dir, args.resume, args.cache_dir)] == [
        f"{remote}/{name}" for name in ("a/r.json", "b/c", "s", "cache")
    ]
    assert not args.results.exists()
    experiment.write_results(args.results, {"loss": 1.0})
    assert json.loads(args.results.read_text()) == {"loss": 1.0}
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    experiment.save_model(model, args.log_dir / "model.keras")
    with experiment.reading(args.log_dir / "model.keras") as file:
        loaded = keras.models.load_model(file)
    np.testing.assert_array_equal(loaded.get_weights()[0], model.get_weights()[0])
    with experiment.writing(args.log_dir / "notes.txt") as file:
        file.write_text("complete")
    assert (args.log_dir / "notes.txt").read_text() == "complete"


@pytest.mark.parametrize("flag", ["--log-dir", "--resume", "--results"])
@pytest.mark.parametrize("path", ["file:///sys/kernel/x", "nope://bucket/x"])
def test_paths_in_object_storage_that_cannot_be_written_raise(flag, path):
    with pytest.raises(ValueError, match=f"{flag}: .*Received: '{path}'"):
        parser().parse_args([flag, path])
