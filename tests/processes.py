"""What tests that start processes need; the fixture `mark` is in conftest.py."""

import fcntl
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import kdpkit
from kdpkit.launch import _child_processes as child_processes

ROOT = pathlib.Path(kdpkit.__file__).parent.parent
SOON = 240.0  # seconds, for what takes one where nothing else runs
LIMIT = 600.0  # seconds for anything, on a machine that is slow and busy


def run(*command, check=True, cwd=None, seconds=SOON, **variables):
    ended = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=with_others(variables),
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert not check or ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-5000:]
    return ended


def with_others(variables):
    values = {**os.environ, **variables}
    return {name: str(value) for name, value in values.items() if value is not None}


def run_code(code, *words, **settings):
    return run(sys.executable, "-c", code, *words, **settings)


class Process:
    """A process whose output is read as it comes; it leads a group of its own."""

    def __init__(self, *command, **variables):
        self.lines = []
        self._process = subprocess.Popen(
            [*map(str, command)],
            cwd=ROOT,
            env=with_others({"PYTHONUNBUFFERED": "1", **variables}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        with self._process.stdout as output:
            self.lines.extend(output)

    @property
    def shown(self):
        return "".join([*self.lines])

    def count(self, text):
        return sum(text in line for line in [*self.lines])

    def wait_for(self, text, count=1, seconds=LIMIT):
        deadline = time.monotonic() + seconds
        while self.count(text) < count:
            if self._process.poll() is not None:
                self._reader.join(timeout=10)
                assert self.count(text) >= count, self.shown
                return
            assert time.monotonic() < deadline, self.shown
            time.sleep(0.02)

    def send(self, number):
        self._process.send_signal(number)

    def end(self, seconds=LIMIT):
        code = self._process.wait(timeout=seconds)
        self._reader.join(timeout=10)
        return code

    def kill(self):
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self.end()


class Together:
    """Processes that train together; none outlives the block."""

    def __init__(self, processes):
        self.running = [*processes]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.running:
            process.kill()

    def __getitem__(self, index):
        return self.running[index]

    def wait_for(self, text, count=1, seconds=LIMIT):
        for process in self.running:
            process.wait_for(text, count, seconds)

    def end(self, seconds=LIMIT):
        deadline = time.monotonic() + seconds
        return [process.end(max(0.0, deadline - time.monotonic())) for process in self.running]

    @property
    def shown(self):
        return [process.shown for process in self.running]


def with_tf_config(*command, addresses=None, only=(0, 1)):
    """Start a Python program as the two workers of a cluster, or only some of them."""
    addresses = addresses or [f"localhost:{free_port()}" for _ in range(2)]
    started = []
    for index in only:
        config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        started.append(Process(sys.executable, *command, TF_CONFIG=json.dumps(config)))
    return Together(started)


def copy_checkout(directory):
    """Copy what a build of the wheel needs, as a build leaves files behind."""
    for part in ("kdpkit", "recipes"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / part, directory / part, ignore=ignored)
    for file in ("LICENSE", "README.md", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / file, directory / file)
    return directory


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def left_of(mark):
    deadline = time.monotonic() + SOON
    while (left := child_processes.marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def wait_for_file(file):
    deadline = time.monotonic() + SOON
    while not file.exists():
        assert time.monotonic() < deadline, f"{file.name} did not come"
        time.sleep(0.05)


def once(tmp_path_factory, name, make):
    """Return what the first of pytest's own processes makes; the others wait for it."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = root / f"{name}.json"
        if not made.exists():
            made.write_text(json.dumps(make(), default=float))
        return json.loads(made.read_text())
