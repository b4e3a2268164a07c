"""Several processes of `jax.distributed` on one machine: equal to one, and never without an answer.

Each is a real process, and every test has a time limit of its own.
"""

import functools
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdpkit
from kdpkit import _processes

ROOT = pathlib.Path(kdpkit.__file__).parent.parent
UNEVEN = [{}, {"rows": 48}]  # what differs between two processes
ALIKE = [{"same_data": True}] * 2
SOON = 240  # seconds in which every process has ended, on a busy machine too; 2 to 3 on an idle one

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.needs(jax="0.10", keras="3.15", reason="several processes are refused"),
    pytest.mark.skipif(
        keras.backend.backend() != "tensorflow", reason="starts processes on JAX; once is enough"
    ),
]


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


class Processes:
    """Starts processes, and leaves none behind."""

    def __init__(self, count, *, own=(), **settings):
        shared = {"processes": count, "port": free_port(), "epochs": 3, "by": "loop"} | settings
        own = [*own, *[{}] * count][:count]
        self.running = [self._start(shared | {"index": i} | own[i]) for i in range(count)]
        self.output = [""] * count

    def _start(self, settings):
        return subprocess.Popen(
            [sys.executable, "-m", "tests.jax_process", json.dumps(settings)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"KERAS_BACKEND": "jax"},
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.running:
            process.kill()
            process.communicate()

    def wait_for(self, text, index=0):
        """Read a process's output up to a line."""
        for line in self.running[index].stdout:
            self.output[index] += line
            if line.strip() == text:
                return
        raise AssertionError(self.output[index])

    def end(self, seconds=200):
        """Wait for all; give exit codes, outputs, and how long it took."""
        started = time.monotonic()
        for index, process in enumerate(self.running):
            rest, _ = process.communicate(timeout=seconds - (time.monotonic() - started))
            self.output[index] += rest
        return [p.returncode for p in self.running], self.output, time.monotonic() - started


def results(**settings):
    with Processes(settings.pop("count", 1), **settings) as processes:
        codes, outputs, _ = processes.end()
    assert set(codes) == {0}, outputs
    return [json.loads(output.splitlines()[-1]) for output in outputs]


@functools.cache
def alone(**settings):
    """What one process gives."""
    (result,) = results(**settings)
    return result


def assert_close(one, other, tolerance=1e-5):
    assert one.keys() == other.keys()
    for name in one:
        for left, right in zip(*map(keras.tree.flatten, (one[name], other[name])), strict=True):
            np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance, err_msg=name)


# Equal to one process.


@pytest.mark.slow
@pytest.mark.parametrize("by", ["loop", "fit"])
def test_two_processes_train_evaluate_and_predict_as_one(by):
    first, second = results(count=2, by=by)
    assert_close(first, second, tolerance=0)
    assert_close(first, alone(by=by))


@pytest.mark.slow
def test_so_they_do_with_many_steps_in_a_call():
    first, _ = results(count=2, steps_per_loop=3)
    assert_close(first, alone(by="loop"))


@pytest.mark.slow
def test_so_they_do_in_micro_batches_and_estimate_the_same_noise_scale():
    settings = {"loop": {"accumulation": 2, "noise_scale": True}}
    first, second = results(count=2, **settings)
    (expected,) = results(**settings)
    assert first == second
    scales = [result["history"].pop("noise_scale") for result in (first, expected)]
    np.testing.assert_allclose(*scales, rtol=1e-3)
    assert_close(first, expected)


@pytest.mark.slow
def test_the_first_of_two_processes_logs_its_devices():
    first, second = (result["history"] for result in results(count=2, monitors=True))
    assert first["memory_gib"][0] > 0.05
    assert len(first["cpu_utilization"]) == len(first["loss"])
    assert {"loss"} <= second.keys()
    assert not {"memory_gib", "cpu_utilization"} & second.keys()


@pytest.mark.slow
def test_the_recipe_trains_in_two_processes(tmp_path):
    results_file = tmp_path / "results.json"
    together = ["--smoke", "--results", str(results_file), "--processes", "2"]
    together += ["--coordinator", f"localhost:{free_port()}", "--process"]
    running = [
        subprocess.Popen(
            [sys.executable, "recipes/cnn_jax.py", *together, str(index)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"KERAS_BACKEND": "jax"},
        )
        for index in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.communicate()
    assert [process.returncode for process in running] == [0, 0], outputs
    assert "Test:" in outputs[0]
    assert "Test:" not in outputs[1]
    found = json.loads(results_file.read_text())
    assert (found["replicas"], found["global_batch_size"], found["steps"]) == (2, 16, 8)


# What JAX would wait for, for ever, or not notice.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("by", "own", "sentence"),
    [
        ("loop", UNEVEN, "The number of batches of `train`, and their shapes, must be the same"),
        ("fit", UNEVEN, "The number of batches of `x`, and their shapes, must be the same"),
        ("loop", ALIKE, "The first batch of `train` must differ between processes"),
        ("fit", ALIKE, "The first batch of `x` must differ between processes"),
    ],
)
def test_processes_that_disagree_are_told(by, own, sentence):
    with Processes(2, own=own, by=by) as processes:
        codes, outputs, _ = processes.end()
    assert codes == [2, 2], outputs
    for output in outputs:
        assert sentence in output
        assert "Traceback" not in output
        assert "as `kdpkit.batches.ArrayBatches` does" in output


@pytest.mark.slow
def test_an_end_that_only_one_process_sees_is_told():
    with Processes(2, own=UNEVEN, unknown_length=True) as processes:
        codes, outputs, _ = processes.end()
    assert codes == [2, 2], outputs
    for output in outputs:
        assert "The number of batches of `train` must be the same in all processes" in output


# Ends.


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_killed_process_ends_all_soon_and_the_run_goes_on(tmp_path, victim):
    settings = {"epochs": 4, "directory": str(tmp_path)}
    with Processes(2, seconds_a_step=0.2, **settings) as processes:
        processes.wait_for("step 3")
        processes.wait_for("step 2")
        processes.running[victim].send_signal(signal.SIGKILL)
        codes, outputs, seconds = processes.end()
    assert seconds < SOON
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] not in (0, 1)
    said = outputs[1 - victim].splitlines()[-1]
    assert "gone" in said
    assert "its output says why. Start all processes again" in said
    resumed, _ = results(count=2, **settings)
    assert_close(resumed, alone(by="loop", epochs=4))


@pytest.mark.slow
@pytest.mark.parametrize("by", ["loop", pytest.param("fit", marks=pytest.mark.exhaustive)])
def test_sigterm_to_one_saves_and_ends_all_at_one_step(tmp_path, by):
    settings = {"epochs": 4, "directory": str(tmp_path), "by": by}
    with Processes(2, seconds_a_step=0.2, **settings) as processes:
        processes.wait_for("step 1")
        processes.running[1].send_signal(signal.SIGTERM)
        codes, outputs, seconds = processes.end()
    assert seconds < SOON
    assert codes == [42, 42], outputs
    for output in outputs:
        assert "Training was stopped by SIGTERM. Its state is in" in output
        assert "Traceback" not in output
    resumed, _ = results(count=2, **settings)
    assert_close(resumed, alone(by=by, epochs=4))


@pytest.mark.slow
def test_an_error_of_one_process_does_not_leave_the_other_waiting():
    with Processes(2, own=[{}, {"fails_at": 2}]) as processes:
        codes, outputs, _ = processes.end()
    assert codes == [43, 1], outputs
    assert "Another process of this training is gone" in outputs[0]
    assert "a mistake of this process alone" in outputs[1]


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_a_process_that_does_not_come_is_not_waited_for_for_ever(index):
    settings = {"processes": 2, "joining": {"start_timeout_seconds": 5}}
    with Processes(1, own=[{"index": index}], **settings) as processes:
        codes, (output,), _ = processes.end(seconds=60)
    assert codes != [0]
    said = output.splitlines()[-1]
    assert f"{index} of 2" in said
    assert "Check that all were started, with one address" in said


def test_processes_join_on_jax_alone():
    with pytest.raises(ValueError, match="Processes join like this on JAX.*'tensorflow'"):
        _processes.join_processes("localhost:9876", process_count=2, process_index=0)


def test_what_a_process_alone_cannot_reach_is_no_other_process():
    error = tf.errors.UnavailableError(None, None, "Collective ops is aborted by: a server")
    with pytest.raises(tf.errors.UnavailableError), _processes.naming_losses():
        raise error


def test_what_went_wrong_here_is_not_blamed_on_others():
    with pytest.raises(RuntimeError, match="^out of memory$"), _processes.naming_losses():
        raise RuntimeError("out of memory")
