"""Real processes: started, watched, ended and restarted together, with none left behind.

Programs are a few lines of Python without a framework. Limits in seconds are generous; they only
keep a test from hanging.
"""

import contextlib
import pathlib
import signal
import subprocess
import sys

import pytest

from kdpkit import launch
from kdpkit.cluster._config import VARIABLES
from kdpkit.launch import _child_processes as child_processes
from tests.processes import SOON, Process, left_of, wait_for_file

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("mark")]

# What every program begins with.
BEGIN = """
import json, os, pathlib, signal, socket, subprocess, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
name = f"{task['type']} {task['index']}"
here = pathlib.Path(sys.argv[1])
def wait_for(file):
    while not (here / file).exists():
        time.sleep(0.02)
def ready():
    (here / f"{name} is ready").touch()
    time.sleep(600)
"""


def launching(directory, program, *flags, workers=2):
    script = directory / "program.py"
    script.write_text(BEGIN + program)
    words = [sys.executable, "-m", "kdpkit", "launch", "--workers", str(workers)]
    words += ["--grace-seconds", "30", *flags, "--", sys.executable, str(script), str(directory)]
    return words


@pytest.fixture
def start(tmp_path):
    with contextlib.ExitStack() as stack:

        def start_one(program, *flags, **settings):
            launcher = Process(*launching(tmp_path, program, *flags, **settings))
            stack.callback(launcher.kill)
            return launcher

        yield start_one


def ended(launcher, code=0):
    assert launcher.end(SOON) == code, launcher.shown
    return launcher.shown


def wait_for(directory, *files):
    for file in files:
        wait_for_file(directory / file)


ALL_READY = ("worker 0 is ready", "worker 1 is ready")


# Output.


def test_lines_bear_the_name_of_their_process(start):
    program = "print('hello\\nfrom', name); print('trouble', file=sys.stderr); print(end='end')"
    shown = ended(start(program))
    for name in ("worker 0", "worker 1"):
        lines = [line for line in shown.splitlines() if line.startswith(name)]
        expected = ("hello", f"from {name}", "trouble", "end")
        assert sorted(lines) == sorted(f"{name} | {line}" for line in expected)


def test_all_ends_when_nobody_reads(tmp_path):
    words = launching(tmp_path, "while True: print('again'); time.sleep(0.01)")
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(SOON) == 128 + signal.SIGPIPE


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_ends_all_and_is_named_as_the_cause(tmp_path):
    words = launching(tmp_path, "while True: print('again'); time.sleep(0.01)")
    with pathlib.Path("/dev/full").open("w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=SOON)
    *_, sentence = done.stderr.splitlines()
    assert done.returncode == 1
    assert sentence.startswith("kdpkit: The output cannot be written (No space left on device).")
    assert "Traceback" not in done.stderr
    assert "was ended by" not in done.stderr


# What each process gets.


def test_every_process_finds_its_role_and_gpus_and_nothing_of_an_outer_cluster(start, monkeypatch):
    for name in VARIABLES:
        monkeypatch.setenv(name, "left from outside")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    program = """
from kdpkit.cluster import ClusterConfig
config = ClusterConfig.from_environment()
count, gpus = map(os.environ.get, ("KERAS_DISTRIBUTION_NUM_PROCESSES", "CUDA_VISIBLE_DEVICES"))
print(config.role, config.index, count, gpus, config.address, *config.workers)
"""
    shown = ended(start(program, "--gpus-per-worker", "2"))
    lines = sorted(line for line in shown.splitlines() if line.startswith("worker"))
    first, second = (line.split(" | ")[1].split() for line in lines)
    assert (first[:4], second[:4]) == (["worker", "0", "2", "4,5"], ["worker", "1", "2", "6,7"])
    assert [first[4], second[4]] == first[5:] == second[5:]
    with pytest.raises(ValueError, match="More GPUs were asked for.*workers=3.*'4,5,6,7'"):
        launch.launch(["echo"], workers=3, gpus_per_worker=2)


# Failures.


def test_a_worker_that_fails_ends_all_and_those_that_it_left_are_not_blamed(start):
    program = """
if name == "worker 0":
    wait_for("worker 1 fails")
    sys.exit(43)
(here / "worker 1 fails").touch()
sys.exit("the disk is full")
"""
    shown = ended(start(program), 1)
    assert "worker 1 | the disk is full" in shown
    assert "launch   | worker 1 failed with exit code 1, before any other; " in shown


def test_a_killed_worker_ends_all_and_who_ignores_sigterm_is_killed(start):
    program = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
wait_for("worker 0 is ready") if task["index"] else ready()
os.kill(os.getpid(), signal.SIGKILL)
"""
    shown = ended(start(program, "--grace-seconds", "0.5"), 128 + signal.SIGKILL)
    assert "worker 1 was ended by SIGKILL" in shown


def test_all_start_again_on_other_ports_and_go_on(start):
    program = """
print("port", json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"][task["index"]])
if not (here / "failed").exists() and name == "worker 1":
    (here / "failed").touch()
    sys.exit(1)
wait_for("failed")
"""
    shown = ended(start(program, "--max-restarts", "2"))
    assert "All processes start again, on other ports (restart 1 of 2)." in shown
    assert "restart 2" not in shown
    first, second = [line for line in shown.splitlines() if line.startswith("worker 1 | port")]
    assert first != second


@pytest.mark.parametrize(
    ("code", "restarts", "sentence"),
    [(9, 2, "failed with exit code 9"), (42, 0, "was stopped by SIGTERM and saved its state")],
)
def test_restarts_come_to_an_end_and_what_saved_its_state_has_none(start, code, restarts, sentence):
    shown = ended(start(f"sys.exit({code})", "--max-restarts", "2", workers=1), code)
    assert shown.count("start again") == restarts
    assert f"worker 0 {sentence}.\n" in shown


# Signals.

SAVES = """
def save(*_):
    (here / f"{name} saved").touch()
    sys.exit(42)
signal.signal(signal.SIGTERM, save)
ready()
"""


def test_sigterm_lets_all_save_and_exit_with_42_also_when_it_comes_twice(start, tmp_path):
    program = """
def save(*_):
    (here / f"{name} begins to save").touch()
    wait_for("go on")
    sys.exit(42)
signal.signal(signal.SIGTERM, save)
ready()
"""
    launcher = start(program, "--max-restarts", "3")
    wait_for(tmp_path, *ALL_READY)
    launcher.send(signal.SIGTERM)
    wait_for(tmp_path, "worker 0 begins to save", "worker 1 begins to save")
    launcher.send(signal.SIGTERM)
    (tmp_path / "go on").touch()
    assert "SIGTERM is passed on" in ended(launcher, 42)


def test_ctrl_c_reaches_every_process_once_and_the_second_ends_all_at_once(start, tmp_path):
    program = """
def hear(*_):
    with open(here / f"{name} heard", "a") as file:
        file.write("Ctrl-C ")
signal.signal(signal.SIGINT, hear)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(here / f"{name} is ready").touch()
while True: time.sleep(1)
"""
    heard = ("worker 0 heard", "worker 1 heard")
    launcher = start(program, "--grace-seconds", "600", "--max-restarts", "3")
    wait_for(tmp_path, *ALL_READY)
    launcher.send(signal.SIGINT)
    wait_for(tmp_path, *heard)
    launcher.send(signal.SIGINT)
    ended(launcher, 130)
    assert [(tmp_path / file).read_text() for file in heard] == ["Ctrl-C "] * 2


# Nothing is left.

HAS_CHILDREN = """
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
subprocess.Popen(sleep)
subprocess.Popen(sleep, start_new_session=True)  # leaves the group
if os.fork() == 0 and os.fork() == 0:  # and its parent
    os.setsid()
    time.sleep(600)
"""


@pytest.mark.parametrize("is_killed", [True, False])
def test_nothing_outlives_the_launcher_and_a_killed_one_lets_programs_save(
    start, tmp_path, mark, is_killed
):
    launcher = start(HAS_CHILDREN + (SAVES if is_killed else "os._exit(0)"))
    if is_killed:
        wait_for(tmp_path, *ALL_READY)
        assert len(child_processes.marked(mark)) > 8
        launcher.send(signal.SIGKILL)
    ended(launcher, -signal.SIGKILL if is_killed else 0)
    assert left_of(mark) == []
    saved = [(tmp_path / f"worker {i} saved").exists() for i in range(2)]
    assert saved == [is_killed] * 2


# Parameter servers.


def test_a_lost_server_starts_all_again(start):
    program = """
seen = here / f"{name} was here"
first = not seen.exists()
seen.touch()
if name == "ps 0" and first:
    for other in ("worker 0", "chief 0"): wait_for(f"{other} was here")
    sys.exit(6)
if not first: print(name, "again")
if first or name != "chief 0": ready()
for other in ("worker 0", "worker 1", "ps 0"): wait_for(f"{other} is ready")
"""
    servers = ("--parameter-servers", "1", "--max-restarts", "1")
    shown = ended(start(program, *servers))
    assert "Starts chief, worker 0, worker 1, ps 0: " in shown
    assert "chief    | chief 0 again" in shown
    assert shown.count("failed") == 1  # those that serve are ended when the chief is done
    assert "ps 0 failed with exit code 6" in shown


# Called from Python.


def test_a_program_that_is_not_there_raises():
    with pytest.raises(ValueError, match="No such file.*'no-such-program'.*PATH.*python train.py"):
        launch.launch(["no-such-program"], workers=1)
