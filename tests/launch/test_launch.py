"""Real processes: started, watched, ended and restarted together, with none left behind.

Programs are a few lines of Python without a framework. Limits in seconds are generous; they only
keep a test from hanging.
"""

import json
import signal
import subprocess
import sys
import time

import pytest

from kdpkit import cli, cluster, launch
from kdpkit.launch import _child_processes as child_processes
from tests.processes import SOON, left_of

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


class Launcher:
    """`kdpkit launch` as a process, running one program."""

    def __init__(self, directory, program, *flags, workers=2):
        script = directory / "program.py"
        script.write_text(BEGIN + program)
        words = ["launch", "--workers", str(workers), "--grace-seconds", "30", *flags, "--"]
        self.directory = directory
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kdpkit", *words, sys.executable, str(script), str(directory)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, *files):
        """Wait for files that the program makes."""
        deadline = time.monotonic() + SOON
        while not all((self.directory / file).exists() for file in files):
            assert time.monotonic() < deadline, files
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)

    def end(self, number=None):
        """Send a signal; return exit code, stdout and stderr."""
        if number is not None:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=SOON)
        return self.process.returncode, out, err


@pytest.fixture
def start(tmp_path):
    """Start launchers that do not outlive the test."""
    started = []

    def start_one(program, *flags, **settings):
        started.append(Launcher(tmp_path, program, *flags, **settings))
        return started[-1]

    yield start_one
    for launcher in started:
        if launcher.process.poll() is None:
            launcher.process.kill()
            launcher.process.communicate()


ALL_READY = ("worker 0 is ready", "worker 1 is ready")


# Output.


def test_lines_bear_the_name_of_their_process(start):
    code, out, err = start(
        "print('hello\\nfrom', name); print('trouble', file=sys.stderr); sys.stdout.write('end')"
    ).end()
    assert code == 0
    for name in ("worker 0", "worker 1"):
        lines = [line for line in out.splitlines() if line.startswith(name)]
        assert lines == [f"{name} | hello", f"{name} | from {name}", f"{name} | end"]
        assert f"{name} | trouble\n" in err
    assert len(out.splitlines()) == 6


def test_a_process_that_was_stopped_is_ended_without_a_wait_for_it(start):
    launcher = start(
        """
if name == "worker 1":
    (here / "stops").touch()
    os.kill(os.getpid(), signal.SIGSTOP)
wait_for("stops")
sys.exit(3)
""",
        "--grace-seconds",
        "3600",
    )
    assert launcher.end()[0] == 3


def test_all_ends_when_nobody_reads(start):
    launcher = start("while True: print('again'); time.sleep(0.01)")
    assert launcher.process.stdout.readline()
    launcher.process.stdout.close()
    launcher.process.stdout = None
    assert launcher.end()[0] == 128 + signal.SIGPIPE


# What each process gets.


def test_every_process_finds_its_role_and_nothing_of_an_outer_cluster(start, monkeypatch):
    for name in cluster.VARIABLES:
        monkeypatch.setenv(name, "left from outside")
    program = """
from kdpkit.cluster import ClusterConfig
config = ClusterConfig.from_environment()
count = os.environ.get("KERAS_DISTRIBUTION_NUM_PROCESSES")
print(config.role, config.index, count, config.address, *config.workers)
"""
    code, out, err = start(program, workers=3).end()
    assert code == 0, err
    positions = [line.split(" | ")[1].split() for line in sorted(out.splitlines())]
    assert [position[:3] for position in positions] == [["worker", n, "3"] for n in "012"]
    assert [position[3] for position in positions] == positions[0][4:]
    code, out, err = start(program, "--parameter-servers", "1", workers=1).end()
    assert code == 0, err
    assert "chief    | chief 0 None" in out


def test_a_dry_run_prints_what_each_process_would_get(capsys):
    words = ["launch", "--workers", "2", "--dry-run", "--", "echo", "it is"]
    assert cli.main(words) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("worker 0 | TF_CONFIG='{")
    assert "KERAS_DISTRIBUTION_PROCESS_ID=1 echo 'it is'" in second
    assert cli.main(["launch", "--json", *words[1:]]) == 0
    tasks = json.loads(capsys.readouterr().out)
    configs = [cluster.ClusterConfig.from_environment(task["variables"]) for task in tasks]
    assert [task["name"] for task in tasks] == ["worker 0", "worker 1"]
    assert [config.index for config in configs] == [0, 1]
    assert configs[0].workers == configs[1].workers


def test_every_worker_sees_gpus_of_its_own(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    tasks = launch.tasks(["echo"], workers=2, parameter_servers=1, gpus_per_worker=2)
    seen = {task.name: task.variables["CUDA_VISIBLE_DEVICES"] for task in tasks}
    assert seen == {"chief": "-1", "worker 0": "4,5", "worker 1": "6,7", "ps 0": "-1"}
    with pytest.raises(ValueError, match="More GPUs were asked for.*workers=3.*There are 4"):
        launch.tasks(["echo"], workers=3, gpus_per_worker=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ValueError, match="More GPUs were asked for.*There are 0"):
        launch.tasks(["echo"], workers=1, gpus_per_worker=1)


# Failures.


def test_a_worker_that_fails_ends_all_and_those_that_it_left_are_not_blamed(start):
    program = """
if name == "worker 0":
    wait_for("worker 1 fails")
    sys.exit(43)
(here / "worker 1 fails").touch()
sys.exit("the disk is full")
"""
    code, _, err = start(program).end()
    assert code == 1
    assert "worker 1 | the disk is full" in err
    assert "launch   | worker 1 failed with exit code 1, before any other; " in err
    assert "launch   |   the disk is full" in err


def test_a_killed_worker_ends_all_and_who_ignores_sigterm_is_killed(start):
    program = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
wait_for("worker 0 is ready") if task["index"] else ready()
os.kill(os.getpid(), signal.SIGKILL)
"""
    code, _, err = start(program, "--grace-seconds", "0.5").end()
    assert code == 128 + signal.SIGKILL
    assert "worker 1 was ended by SIGKILL" in err


# Restarts.

FAILS_ONCE = """
seen = here / f"{name} was here"
first = not seen.exists()
seen.touch()
print("port", json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"][task["index"]])
"""


def test_all_start_again_on_other_ports_and_go_on(start):
    program = FAILS_ONCE + 'if first: wait_for("worker 1 was here"); sys.exit(task["index"])'
    code, out, err = start(program, "--max-restarts", "2").end()
    assert code == 0, err
    assert "All processes start again, on other ports (restart 1 of 2)." in err
    assert "restart 2" not in err
    ports = [line for line in out.splitlines() if line.startswith("worker 1 | port")]
    assert len(ports) == 2
    assert ports[0] != ports[1]


def test_restarts_come_to_an_end(start):
    launcher = start("sys.exit(9)", "--max-restarts", "2", "--json", workers=1)
    code, out, err = launcher.end()
    assert code == 9
    assert "restart 2 of 2" in err
    report = json.loads(out)
    assert (report["exit_code"], report["restarts"]) == (9, 2)
    assert report["failures"] == [{"name": "worker 0", "exit_code": 9, "last_lines": []}]


def test_what_was_stopped_and_saved_its_state_is_not_restarted(start):
    code, _, err = start("sys.exit(42)", "--max-restarts", "2", workers=1).end()
    assert code == 42
    assert "worker 0 was stopped by SIGTERM and saved its state" in err


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
    launcher.wait_for(*ALL_READY)
    launcher.process.send_signal(signal.SIGTERM)
    launcher.wait_for("worker 0 begins to save", "worker 1 begins to save")
    launcher.process.send_signal(signal.SIGTERM)
    (tmp_path / "go on").touch()
    code, _, err = launcher.end()
    assert code == 42
    assert "SIGTERM is passed on" in err


def test_a_script_may_save_after_its_shell_has_ended(tmp_path, start):
    inner = tmp_path / "inner.py"
    inner.write_text(BEGIN + SAVES)
    program = f"""
inner = subprocess.Popen([sys.executable, {str(inner)!r}, str(here)])
inner.wait()
"""
    launcher = start(program, workers=1)
    launcher.wait_for("worker 0 is ready")
    launcher.end(signal.SIGTERM)
    assert (tmp_path / "worker 0 saved").exists()


def test_ctrl_c_reaches_every_process_once(start, tmp_path):
    program = """
try:
    ready()
except KeyboardInterrupt:
    with open(here / name, "a") as file:
        file.write("Ctrl-C ")
    sys.exit(1)
"""
    launcher = start(program, "--max-restarts", "3")
    launcher.wait_for(*ALL_READY)
    assert launcher.end(signal.SIGINT)[0] == 130
    assert [(tmp_path / f"worker {i}").read_text() for i in range(2)] == ["Ctrl-C "] * 2


def test_the_second_ctrl_c_ends_all_at_once(start):
    program = """
signal.signal(signal.SIGINT, lambda *_: (here / f"{name} heard").touch())
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(here / f"{name} is ready").touch()
while True: time.sleep(1)
"""
    launcher = start(program, "--grace-seconds", "600")
    launcher.wait_for(*ALL_READY)
    launcher.process.send_signal(signal.SIGINT)
    launcher.wait_for("worker 0 heard", "worker 1 heard")
    assert launcher.end(signal.SIGINT)[0] == 130


# Nothing is left.

HAS_CHILDREN = """
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
subprocess.Popen(sleep)
subprocess.Popen(sleep, start_new_session=True)  # leaves the group
if os.fork() == 0 and os.fork() == 0:  # and its parent
    os.setsid()
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.skipif(not child_processes.marked(""), reason="finds strays in /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, None])
def test_nothing_outlives_the_launcher(start, mark, number):
    """A signal ends the launcher, or the programs end themselves."""
    launcher = start(
        HAS_CHILDREN + ("ready()" if number else "os._exit(0)"), "--grace-seconds", "5"
    )
    if number:
        launcher.wait_for(*ALL_READY)
        assert len(child_processes.marked(mark)) > 8
    launcher.end(number)
    assert left_of(mark) == []


def test_a_killed_launcher_lets_programs_save(start, tmp_path, mark):
    launcher = start(SAVES)
    launcher.wait_for(*ALL_READY)
    launcher.end(signal.SIGKILL)
    assert left_of(mark) == []
    assert all((tmp_path / f"worker {i} saved").exists() for i in range(2))


# Parameter servers.

SERVES = """
if task["type"] != "chief":
    print("serves at", json.loads(os.environ["TF_CONFIG"])["cluster"][task["type"]][task["index"]])
"""
WITH_SERVER = ("--parameter-servers", "1")


def test_workers_and_servers_are_ended_when_the_chief_is_done(start):
    program = SERVES + (
        """
if name != "chief 0": ready()
for other in ("worker 0", "worker 1", "ps 0"): wait_for(f"{other} is ready")
print("done")
"""
    )
    code, out, err = start(program, *WITH_SERVER).end()
    assert code == 0, err
    assert "chief    | done" in out
    assert "failed" not in err
    assert "Starts chief, worker 0, worker 1, ps 0: " in err


def test_a_lost_worker_is_started_again_alone(start):
    program = SERVES + (
        """
count = here / f"{name} count"
count.write_text(count.read_text() + "x" if count.exists() else "x")
if name == "chief 0":
    while not (here / "worker 1 count").exists() or (here / "worker 1 count").read_text() != "xx":
        time.sleep(0.02)
elif name == "worker 1" and count.read_text() == "x":
    os.kill(os.getpid(), signal.SIGKILL)
else:
    ready()
"""
    )
    launcher = start(program, *WITH_SERVER, "--max-restarts", "1")
    code, out, err = launcher.end()
    assert code == 0, err
    assert "worker 1 was ended by SIGKILL. It is started again, and the others go on" in err
    assert (launcher.directory / "chief 0 count").read_text() == "x"
    addresses = [line for line in out.splitlines() if line.startswith("worker 1")]
    assert len(addresses) == 2
    assert len(set(addresses)) == 1


@pytest.mark.slow
def test_a_lost_server_starts_all_again(start):
    program = """
seen = here / f"{name} was here"
first = not seen.exists()
seen.touch()
if name == "ps 0" and first:
    wait_for("worker 0 was here")
    wait_for("worker 1 was here")
    wait_for("chief 0 was here")
    sys.exit(6)
if not first: print(name, "again")
if first or name != "chief 0": ready()
for other in ("worker 0", "worker 1", "ps 0"): wait_for(f"{other} is ready")
"""
    code, out, err = start(program, *WITH_SERVER, "--max-restarts", "1").end()
    assert code == 0, err
    assert "chief 0 again" in out
    assert "ps 0 failed with exit code 6" in err


def test_sigterm_lets_the_chief_save_and_then_ends_the_servers(start, tmp_path):
    launcher = start(SAVES, *WITH_SERVER)
    launcher.wait_for("chief 0 is ready", "ps 0 is ready", *ALL_READY)
    assert launcher.end(signal.SIGTERM)[0] == 42
    assert (tmp_path / "chief 0 saved").exists()


# Called from Python.


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"workers": 0}, "`workers` must be a positive integer. Received: workers=0"),
        ({"grace_seconds": -1}, "`grace_seconds` must be at least 0"),
        ({"command": "echo hello"}, "`command` must be a list of strings"),
        ({"command": ["no-such-program"]}, "The program was not found.*'no-such-program'.*PATH"),
        ({"command": ["train.py"]}, "The program was not found.*Write `python train.py`"),
    ],
)
def test_bad_arguments_raise(settings, sentence):
    settings = {"command": ["echo"], "workers": 1} | settings
    with pytest.raises(ValueError, match=sentence):
        launch.launch(settings.pop("command"), **settings)


# The command line.


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["lunch"], "invalid choice: 'lunch'"),
        (["launch", "--", "echo"], "the following arguments are required: --workers"),
        (["launch", "--workers", "2"], "The command to run comes after `--`"),
        (["launch", "--workers", "0", "--", "echo"], "`workers` must be a positive integer"),
        (["launch", "--workers", "2", "--max", "3", "--", "echo"], "unrecognized arguments"),
    ],
)
def test_a_mistake_in_the_flags_is_one_sentence(words, sentence, capsys):
    assert cli.main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert sentence in printed.err
    assert printed.err.count("\n") == 1
