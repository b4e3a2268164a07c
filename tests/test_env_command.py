"""`kdpkit env`: what it prints, and what it must not; where a framework is missing."""

import json
import os
import signal
import subprocess
import sys

import pytest

from kdpkit import _children, cli
from tests.processes import SOON, wait_for_file
from tests.python_without import python_without

pytestmark = pytest.mark.timeout(600)


def env(*words, python=sys.executable, **environment):
    """Run it in a process of its own, as its user does."""
    return subprocess.run(
        [python, "-m", "kdpkit", "env", *words],
        capture_output=True,
        text=True,
        timeout=SOON,
        env={**os.environ, **environment},
        check=False,
    )


def test_it_tells_no_secret_no_home_and_no_host(tmp_path):
    """Each stands where it usually does: keys, paths in flags, clusters, Keras' directory."""
    secret = "pl4nted-s3cret"
    home = tmp_path / secret
    (home / ".keras").mkdir(parents=True)
    (home / ".keras" / "keras.json").write_text('{"backend": "jax", "floatx": "float32"}')
    said = env(
        "--quick",
        "--json",
        HOME=str(home),
        USER=secret,
        KERAS_BACKEND="",
        KERAS_HOME="",
        OPENAI_API_KEY=secret,
        AWS_SECRET_ACCESS_KEY=secret,
        XLA_FLAGS=f"--xla_dump_to={home}/x --xla_cpu_multi_thread_eigen=true {secret}",
        TF_XLA_FLAGS=f"--tf_xla_auto_jit={secret}",
        OMP_NUM_THREADS=secret,
        TF_NUM_INTRAOP_THREADS=secret,
        TF_GPU_THREAD_MODE=secret,
        JAX_PLATFORMS=secret,
        CUDA_VISIBLE_DEVICES=f"GPU-{secret}",
        TPU_NAME=f"grpc://{secret}:8470",
        TF_CONFIG=json.dumps(
            {"cluster": {"worker": [f"{secret}:1"]}, "task": {"type": "worker", "index": 7}}
        ),
    )
    assert secret not in said.stdout + said.stderr
    assert str(tmp_path) not in said.stdout + said.stderr
    found = json.loads(said.stdout)
    assert (found["backend"], found["backend_source"]) == ("jax", "keras.json")
    assert found["settings"]["XLA_FLAGS"] == (
        "--xla_dump_to=(not shown) --xla_cpu_multi_thread_eigen=true (not shown)"
    )
    assert found["settings"]["OMP_NUM_THREADS"] == "set (not shown)"
    assert [finding["rule"] for finding in found["findings"]] == ["thread-mode", "thread-mode"]
    assert said.returncode == 1


@pytest.mark.parametrize(
    ("backend", "told", "code"),
    [("jax", "jax", 0), ("torch", "torch", 1), ("pl4nted", "unknown", 1)],
)
def test_the_backend_is_that_of_the_variable_and_one_that_is_none_is_a_finding(backend, told, code):
    said = env("--quick", "--json", KERAS_BACKEND=backend)
    found = json.loads(said.stdout)
    assert (found["backend"], found["backend_source"]) == (told, "KERAS_BACKEND")
    assert ([finding["rule"] for finding in found["findings"]] == ["backend"]) == bool(code)
    assert said.returncode == code
    assert "pl4nted" not in said.stdout


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


def test_a_mistake_is_one_sentence_and_exit_code_2(capsys):
    assert cli.main(["env", "--timeout", "0"]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert "`timeout_seconds` must be above 0" in said.err


def test_the_help_shows_an_example(capsys):
    with pytest.raises(SystemExit):
        cli.main(["env", "--help"])
    assert "kdpkit env --quick --json" in capsys.readouterr().out


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
        _, said = running.communicate(timeout=SOON)
    assert (running.returncode, said) == (130, "kdpkit: Stopped by Ctrl-C.\n")
    assert _children.marked(mark) == []


def test_without_tensorflow_it_tells_what_is_missing_and_how_to_mend_it(tmp_path):
    python = python_without(tmp_path / "venv", "tensorflow")
    said = env("--quick", "--json", python=python, KERAS_BACKEND="tensorflow")
    assert said.returncode == 1, said.stderr
    found = json.loads(said.stdout)
    assert (found["versions"]["tensorflow"], found["versions"]["tensorflow-text"]) == (None, None)
    assert [usable["strategy"] for usable in found["strategies"] if usable["usable"]] == ["mesh"]
    assert found["extras"]["tensorflow"] == {
        "missing": ["tensorflow>=2.19.0"],
        "command": 'python -m pip install "tensorflow>=2.19.0"',
    }
    assert found["extras"]["jax"]["missing"] == []
    (finding,) = found["findings"]
    assert (finding["rule"], finding["where"]) == ("backend", "tensorflow")
    assert finding["remedy"].startswith("Or set KERAS_BACKEND=jax. Run `python -m pip install")


def test_without_jax_too_it_tells_all_else(tmp_path):
    python = python_without(tmp_path / "venv", "tensorflow", "jax")
    said = env(python=python, KERAS_BACKEND="jax")
    assert said.returncode == 1, said.stderr
    assert "JAX is not installed" in said.stdout
    assert "TensorFlow is not installed" in said.stdout
    assert max(map(len, said.stdout.splitlines())) <= 80


@pytest.mark.slow
def test_the_frameworks_are_asked_for_their_devices():
    flags = "--xla_force_host_platform_device_count=2"
    said = env("--json", "--timeout", "200", XLA_FLAGS=flags, PJRT_NPROC="4", JAX_PLATFORMS="cpu")
    found = json.loads(said.stdout)
    devices = {framework["name"]: framework["devices"] for framework in found["frameworks"]}
    assert devices["jax"] == {"CPU": 2}
    assert devices["tensorflow"]["CPU"] == 1
    replicas = {one["strategy"]: one["replicas"] for one in found["strategies"]}
    assert replicas["mesh"] == 2
    assert replicas["mirrored"] == devices["tensorflow"].get("GPU", 1)
