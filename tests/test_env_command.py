"""`kdpkit env`: what it prints, and what it must not; where a framework is missing."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from kdpkit import cli
from kdpkit.launch import _child_processes as child_processes
from tests.processes import SOON, run, wait_for_file
from tests.python_without import python_without

pytestmark = pytest.mark.timeout(600)


def env(*words, python=sys.executable, **environment):
    """Run it in a process of its own, as its user does."""
    return run(python, "-m", "kdpkit", "env", *words, check=False, **environment)


def test_it_tells_no_secret_no_home_and_no_host(tmp_path):
    """Each stands where it usually does: keys, paths in flags, clusters, Keras' directory."""
    secret = "pl4nted-s3cret"
    home = tmp_path / secret
    (home / ".keras").mkdir(parents=True)
    (home / ".keras" / "keras.json").write_text('{"backend": "jax", "floatx": "float32"}')
    output = env(
        "--quick",
        "--json",
        HOME=str(home),
        USER=secret,
        KERAS_BACKEND="",
        KERAS_HOME="",
        OPENAI_API_KEY=secret,
        XLA_FLAGS=f"--xla_dump_to={home}/x --xla_cpu_multi_thread_eigen=true {secret}",
        OMP_NUM_THREADS=secret,
        JAX_PLATFORMS=secret,
        CUDA_VISIBLE_DEVICES=f"GPU-{secret}",
        TPU_NAME=f"grpc://{secret}:8470",
        TF_CONFIG=json.dumps(
            {"cluster": {"worker": [f"{secret}:1"]}, "task": {"type": "worker", "index": 7}}
        ),
    )
    assert secret not in output.stdout + output.stderr
    assert str(tmp_path) not in output.stdout + output.stderr
    found = json.loads(output.stdout)
    assert found["backend"] == "jax (chosen by keras.json)"
    assert (output.returncode, found["findings"]) == (0, [])


def test_a_backend_that_is_none_is_a_finding_and_is_not_shown():
    output = env("--quick", "--json", KERAS_BACKEND="pl4nted")
    found = json.loads(output.stdout)
    assert found["backend"] == "unknown (chosen by KERAS_BACKEND)"
    assert [finding["rule"] for finding in found["findings"]] == ["backend"]
    assert output.returncode == 1
    assert "pl4nted" not in output.stdout


def test_a_finding_is_exit_code_1_and_none_is_0(capsys, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("PJRT_NPROC", "16")  # for the eight devices of JAX that tests have
    assert cli.main(["env", "--quick"]) == 0
    clean = capsys.readouterr().out
    monkeypatch.setenv("OMP_NUM_THREADS", "1000000")
    assert cli.main(["env", "--quick"]) == 1
    printed = capsys.readouterr().out
    assert "many-threads" in printed
    assert "many-threads" not in clean
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--timeout", "0"], "`timeout_seconds` must be above 0"),
        (["--quick", "--try"], "try_strategies=True"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(flags, sentence, capsys):
    assert cli.main(["env", *flags]) == 2
    output = capsys.readouterr()
    assert (output.out, output.err.count("\n")) == ("", 1)
    assert sentence in output.err


def test_ctrl_c_is_one_sentence_and_leaves_no_process(tmp_path, mark):
    (tmp_path / "jax.py").write_text(
        f"import pathlib, time; pathlib.Path({str(tmp_path / 'began')!r}).touch(); time.sleep(600)"
    )
    (tmp_path / "tensorflow.py").write_text("")
    paths = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    with subprocess.Popen(
        [sys.executable, "-m", "kdpkit", "env"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    ) as running:
        wait_for_file(tmp_path / "began")
        running.send_signal(signal.SIGINT)
        _, output = running.communicate(timeout=SOON)
    assert (running.returncode, output) == (130, "kdpkit: Stopped by Ctrl-C.\n")
    assert child_processes.marked(mark) == []


def test_without_tensorflow_and_jax_it_reports_what_is_missing_and_how_to_install_it(tmp_path):
    python = python_without(tmp_path / "venv", "tensorflow", "jax")
    output = env(python=python, KERAS_BACKEND="tensorflow")
    assert output.returncode == 1, output.stderr
    for framework in ("tensorflow", "jax"):
        assert re.search(f"^  {framework} +not installed. Run `", output.stdout, re.MULTILINE)
    assert "It is Keras' backend" in output.stdout
    assert "pip install" in output.stdout
    assert max(map(len, output.stdout.splitlines())) <= 80
