"""Start the processes of a cluster on this machine, watch, stop and restart them together.

    kdpkit launch --workers 2 --max-restarts 3 -- python train.py

Every process runs the same command and finds its role in its environment:

    config = kdpkit.cluster.ClusterConfig.from_environment()
"""

import collections
import contextlib
import dataclasses
import itertools
import os
import queue
import random
import shlex
import shutil
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from kdpkit import cluster, errors
from kdpkit._internal import checks, child_processes, signal_handlers
from kdpkit.launch import _output

__all__ = ["Failure", "Report", "Task", "launch", "plan", "run"]

_HOSTS = {"loopback": "localhost", "all": "0.0.0.0"}  # noqa: S104 as users ask for
_LAUNCHER = "launch"  # the launcher's name in front of its own lines
_PORTS = range(15_000, 32_768)  # below Linux' ephemeral ports
_SETTLE_SECONDS = 2.0  # for the others to end on their own after the first failure
_KILL_SECONDS = 10.0  # for the kernel to end a killed process
_TICK_SECONDS = 0.2  # between checks of the time
_KEPT_LINES = 20  # the last lines of each process
_SHOWN_LINES = 8


@dataclasses.dataclass(frozen=True)
class Task:
    """One process to start: its name, role in the cluster, command and environment variables."""

    name: str
    config: cluster.ClusterConfig
    command: tuple[str, ...]
    variables: Mapping[str, str]  # in addition to the launcher's own


@dataclasses.dataclass(frozen=True)
class Failure:
    """A process that failed: its name, its exit code as a shell gives it, and its last lines."""

    name: str
    exit_code: int
    last_lines: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Report:
    """How a run ended: the exit code, the number of restarts, and what failed first."""

    exit_code: int
    restarts: int
    failures: tuple[Failure, ...]


def launch(
    command: Sequence[str],
    *,
    workers: int,
    parameter_servers: int = 0,
    max_restarts: int = 0,
    gpus_per_worker: int | None = None,
    grace_seconds: float = 30.0,
    listen: str = "loopback",
    dry_run: bool = False,
) -> int:
    """Run a command as several processes on this machine that train together.

    Each process gets TF_CONFIG and KERAS_DISTRIBUTION_* of a cluster on free ports; KERAS_BACKEND
    selects the backend. Their output is printed line by line, each with the name of its process.
    The call returns when all workers have ended. If one fails, the others are stopped, and all
    start again on other ports as long as restarts are left. No process or child process outlives
    this call, even if the launcher is killed.

    With parameter servers, a chief is started too. Workers and servers serve it until it ends. A
    lost worker is restarted individually; after a lost server or chief all processes are restarted.

    SIGTERM and Ctrl-C are forwarded, and a second Ctrl-C stops everything at once. They are only
    handled in the main thread.

    The processes are only reached from this machine: their addresses are `localhost`, where JAX
    listens alone, and on Linux kdpkit closes TensorFlow's servers to others. SECURITY.md

    Args:
        command: The command as a list, such as `["python", "train.py"]`.
        workers: Number of workers.
        parameter_servers: Number of parameter servers; if positive, a chief is started too.
        max_restarts: Number of restarts allowed in total.
        gpus_per_worker: GPUs that each worker sees, different ones for each; with None every worker
            sees all.
        grace_seconds: How long a process may take to exit after a signal before it is killed.
        listen: `"loopback"`, or `"all"` to have servers listen on all network interfaces, without
            authentication.
        dry_run: Only print the environment variables and command of each process.

    Returns:
        An exit code: 0 on success, else that of the process that failed first (not of those that
        failed as a consequence, which exit with 43), 128 plus the number of a signal, 42 if SIGTERM
        stopped programs that saved their state, 130 after Ctrl-C.

    Raises:
        ValueError: An argument is invalid, or the command does not exist.

    >>> launch(["echo", "hello"], workers=1)
    worker 0 | hello
    0
    """
    if dry_run:
        for task in plan(
            command,
            workers=workers,
            parameter_servers=parameter_servers,
            gpus_per_worker=gpus_per_worker,
            listen=listen,
        ):
            words = (f"{name}={shlex.quote(text)}" for name, text in task.variables.items())
            sys.stdout.write(f"{task.name} | {' '.join(words)} {shlex.join(task.command)}\n")
        return 0
    return run(
        command,
        workers=workers,
        parameter_servers=parameter_servers,
        max_restarts=max_restarts,
        gpus_per_worker=gpus_per_worker,
        grace_seconds=grace_seconds,
        listen=listen,
    ).exit_code


def plan(
    command: Sequence[str],
    *,
    workers: int,
    parameter_servers: int = 0,
    gpus_per_worker: int | None = None,
    listen: str = "loopback",
) -> tuple[Task, ...]:
    """Return the tasks that `launch` would start, on ports that are free now.

    >>> [task.name for task in plan(["echo"], workers=2, parameter_servers=1)]
    ['chief', 'worker 0', 'worker 1', 'ps 0']
    """
    workers = checks.integer("workers", workers)
    words = _checked(command)
    servers = checks.integer("parameter_servers", parameter_servers, minimum=0)
    gpus = _gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), workers, gpus_per_worker)
    host = _HOSTS[checks.one_of("listen", listen, _HOSTS)]
    addresses = [f"{host}:{port}" for port in _free_ports(workers + servers + bool(servers))]
    config = cluster.ClusterConfig(
        addresses[:workers],
        parameter_servers=addresses[workers : workers + servers],
        chief=addresses[-1] if servers else None,
    )
    tasks = []
    for role, index, _ in config.tasks:
        own = config.for_task(role, index)
        variables = own.to_environment()
        if gpus:
            variables["CUDA_VISIBLE_DEVICES"] = gpus[index] if role == "worker" else "-1"
        tasks.append(Task("chief" if role == "chief" else f"{role} {index}", own, words, variables))
    return tuple(tasks)


def run(
    command: Sequence[str],
    *,
    workers: int,
    parameter_servers: int = 0,
    max_restarts: int = 0,
    gpus_per_worker: int | None = None,
    grace_seconds: float = 30.0,
    listen: str = "loopback",
    stdout: TextIO | None = None,
) -> Report:
    """Do the same as `launch`, but return a detailed report.

    The stdout of the processes goes to `stdout`, or by default to that of this process.
    """
    return _Run(
        lambda: plan(
            command,
            workers=workers,
            parameter_servers=parameter_servers,
            gpus_per_worker=gpus_per_worker,
            listen=listen,
        ),
        max_restarts=checks.integer("max_restarts", max_restarts, minimum=0),
        grace_seconds=checks.number("grace_seconds", grace_seconds, minimum=0),
        stdout=stdout,
    ).run()


# The tasks.


def _checked(command: Sequence[str]) -> tuple[str, ...]:
    if os.name != "posix":
        checks.fail("Processes can only be launched on Linux and macOS.", system=os.name)
    words = checks.strings("command", command)
    if not words:
        checks.fail("`command` must not be empty.", command=command)
    if shutil.which(words[0]) is None:
        is_python = words[0].endswith(".py")
        checks.fail(
            "The program was not found.",
            command=words[0],
            remedy=f"Write `python {words[0]}`." if is_python else "Check its name and the PATH.",
        )
    return words


def _free_ports(count: int) -> list[int]:
    """Find ports that are free; all are held until the last is found."""
    ports: list[int] = []
    with contextlib.ExitStack() as held:
        for port in random.sample(_PORTS, len(_PORTS)):
            if len(ports) == count:
                break
            probe = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("", port))
                ports.append(port)
    if len(ports) < count:
        checks.fail("This machine has too few free ports.", processes=count)
    return ports


def _gpus(visible: str | None, workers: int, each: int | None) -> list[str] | None:
    """Return CUDA_VISIBLE_DEVICES of each worker."""
    if each is None:
        return None
    each = checks.integer("gpus_per_worker", each)
    wanted = workers * each
    present = len(list(Path("/dev").glob("nvidia[0-9]*")))  # none if drivers hide them
    names = list(map(str, range(present or wanted)))
    if visible is not None:
        names = [name for name in visible.split(",") if name]
    if len(names) < wanted:
        checks.fail(
            "More GPUs were asked for than this machine has.",
            workers=workers,
            gpus_per_worker=each,
            CUDA_VISIBLE_DEVICES=visible,
            remedy=f"There are {len(names)}.",
        )
    return [",".join(names[first : first + each]) for first in range(0, wanted, each)]


# The run.


class _Process:
    """A started task and its state.

    Args:
        task: The task.
        mark: Identifies the process and its children.
        show: Called in a thread with the task's name, each line of output, and the stream's name.
        on_end: Called in a thread when it has ended and all its output has been shown.
    """

    def __init__(
        self,
        task: Task,
        *,
        mark: str,
        show: Callable[[str, str, str], None],
        on_end: Callable[["_Process"], None],
    ) -> None:
        self.task = task
        self.has_ended = False
        self.is_signalled = False  # a signal to end was sent
        self._show = show
        self._lines = {name: _output.Lines() for name in ("stdout", "stderr")}
        self._last: dict[str, collections.deque[str]] = {
            name: collections.deque(maxlen=_KEPT_LINES) for name in self._lines
        }
        others = {name: text for name, text in os.environ.items() if name not in cluster.VARIABLES}
        try:
            self.child = child_processes.Child(
                task.command,
                {"PYTHONUNBUFFERED": "1"} | others | dict(task.variables),
                mark=mark,
                on_bytes=self._on_bytes,
                on_end=lambda: on_end(self),
            )
        except OSError as error:
            checks.fail(
                f"The command cannot be started ({error.strerror}).", command=list(task.command)
            )

    def _on_bytes(self, data: bytes, stream: str) -> None:
        lines = self._lines[stream]
        for line in lines.feed(data, time.monotonic()) if data else lines.close():
            self._last[stream].append(line)
            self._show(self.task.name, line, stream)

    def signal(self, number: int) -> None:
        """Send it a signal to end."""
        if not self.has_ended:
            self.is_signalled = True
            self.child.send(number)

    @property
    def exit_code(self) -> int:
        code = self.child.exit_code
        return 128 + signal.SIGKILL if code is None else code  # the kernel has not finished

    @property
    def ending(self) -> str:
        """How it failed, in words."""
        if self.exit_code - 128 in set(signal.Signals):
            return f"{self.task.name} was ended by {signal.Signals(self.exit_code - 128).name}"
        return f"{self.task.name} failed with exit code {self.exit_code}"

    def failure(self) -> Failure:
        """How it failed, with its last lines of stderr, or else of stdout."""
        lines = self._last["stderr"] or self._last["stdout"]
        return Failure(self.task.name, self.exit_code, tuple(lines))


@dataclasses.dataclass
class _Run:
    """All attempts of one run. Threads put events into a queue; one loop handles them."""

    make_tasks: Callable[[], tuple[Task, ...]]
    max_restarts: int
    grace_seconds: float
    stdout: TextIO | None
    restarts: int = 0
    stop: int | None = None  # the signal that asked to end
    is_ending: bool = False
    running: list[_Process] = dataclasses.field(default_factory=list)
    failed: list[_Process] = dataclasses.field(default_factory=list)

    def run(self) -> Report:
        """Start all processes, restart them as needed, and return how the run ended."""
        self._mark = f"{uuid.uuid4().hex}."
        self._numbers = itertools.count()
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        tasks = self.make_tasks()
        names = [task.name for task in tasks]
        self._printer = _output.Printer(
            [_LAUNCHER, *names],
            on_gone=lambda: self._note_signal(signal.SIGPIPE),
            stdout=self.stdout,
        )
        self._report(f"Starts {', '.join(names)}: {shlex.join(tasks[0].command)}")
        with (
            child_processes.Guard(self._mark, grace_seconds=self.grace_seconds) as self._guard,
            signal_handlers.handling(self._note_signal, signal.SIGINT, signal.SIGTERM),
        ):
            try:
                self._attempt(tasks)
                while self._may_restart():
                    self._attempt(self.make_tasks())
            finally:
                self._end_all()
                self._guard.all_ended()
        failures = tuple(process.failure() for process in self._by_cause())
        return Report(self._exit_code(), self.restarts, failures)

    def _attempt(self, tasks: Sequence[Task]) -> None:
        self.failed, self.running, self.is_ending = [], [], False
        for task in tasks:
            self.running.append(self._start(task))
        self._wait_for(lambda: bool(self.stop or self.failed) or _all_ended(self._heads()))
        self.is_ending = True
        if self.stop is None and self.failed:
            self._wait_for_ends(self.running, _SETTLE_SECONDS)
        if self.stop in (signal.SIGINT, signal.SIGTERM):
            self._report(f"{signal.Signals(self.stop).name} is passed on.")
            self._signal_and_wait(self._heads(), self.stop)
        self._end_all()
        if self.stop is None and self.failed:
            self._report_failure()

    def _start(self, task: Task) -> _Process:
        process = _Process(
            task,
            mark=f"{self._mark}{next(self._numbers)};",
            show=self._printer.line,
            on_end=lambda process: self._events.put(lambda: self._on_end(process)),
        )
        self._guard.watch(process.child)
        return process

    def _heads(self) -> list[_Process]:
        """Return the processes whose end is the end of the run: the chief, or else all workers."""
        chief = [process for process in self.running if process.task.config.role == "chief"]
        return chief or self.running

    def _report(self, sentence: str) -> None:
        self._printer.line(_LAUNCHER, sentence, "stderr")

    # Events.

    def _wait_for(self, done: Callable[[], bool]) -> None:
        """Handle events until `done` returns true."""
        while not done():
            with contextlib.suppress(queue.Empty):
                self._events.get(timeout=_TICK_SECONDS)()

    def _wait_for_ends(self, processes: Sequence[_Process], seconds: float | None = None) -> None:
        """Wait until all have ended, for `seconds` or the grace period; a signal may shorten it."""
        began = time.monotonic()

        def is_over() -> bool:
            limit = self.grace_seconds if seconds is None else seconds
            return _all_ended(processes) or time.monotonic() - began >= limit

        self._wait_for(is_over)

    def _on_end(self, process: _Process) -> None:
        process.has_ended = True
        self._guard.forget(process.child)
        if process.exit_code == 0 or process.is_signalled:
            return
        config = process.task.config
        serves_a_chief = config.role == "worker" and config.parameter_servers
        may_restart = self.restarts < self.max_restarts and not (self.is_ending or self.failed)
        if not (serves_a_chief and may_restart):
            self.failed.append(process)
            return
        count = self._count_restart()
        self._report(f"{process.ending}. It is started again, and the others go on ({count}).")
        child_processes.end_marked(process.child.mark, grace_seconds=0)
        # At its own address, which the chief knows.
        self.running[self.running.index(process)] = self._start(process.task)

    def _count_restart(self) -> str:
        self.restarts += 1
        return f"restart {self.restarts} of {self.max_restarts}"

    def _note_signal(self, number: int, _frame: object = None) -> None:
        self._events.put(lambda: self._on_signal(number))  # a `put` may interrupt another one

    def _on_signal(self, number: int) -> None:
        # Not for SIGTERM, which some schedulers send twice: to a process and to its group.
        if self.is_ending and number != signal.SIGTERM:
            self.grace_seconds = 0.0
        self.stop = self.stop or number

    # The end.

    def _signal_and_wait(self, processes: Sequence[_Process], number: int) -> None:
        for process in processes:
            process.signal(number)
        self._wait_for_ends(processes)

    def _end_all(self) -> None:
        """Stop what still runs, by SIGTERM first, and any child processes that are left."""
        self.is_ending = True
        rest = [process for process in self.running if not process.is_signalled]
        self._signal_and_wait(rest, signal.SIGTERM)
        for process in self.running:
            process.child.send(signal.SIGKILL)
        self._wait_for_ends(self.running, _KILL_SECONDS)
        child_processes.end_marked(
            self._mark,
            grace_seconds=self.grace_seconds,
            signalled_groups={
                process.child.group for process in self.running if process.is_signalled
            },
        )

    def _may_restart(self) -> bool:
        if (
            self.stop is not None
            or not self.failed
            or self._by_cause()[0].exit_code == errors.STOPPED
        ):
            return False
        if self.restarts >= self.max_restarts:
            return False
        self._report(f"All processes start again, on other ports ({self._count_restart()}).")
        return True

    # The result.

    def _by_cause(self) -> list[_Process]:
        """Return the failed processes, with the cause of the failure first."""
        by_end = sorted(self.failed, key=lambda process: process.child.ended_at or 0.0)
        return sorted(by_end, key=lambda process: process.exit_code == errors.LEFT_ALONE)

    def _report_failure(self) -> None:
        cause, *_ = self._by_cause()
        if cause.exit_code == errors.STOPPED:
            self._report(f"{cause.task.name} was stopped by SIGTERM and saved its state.")
            return
        sentence = cause.ending
        if cause.exit_code == errors.LEFT_ALONE:
            sentence += ", because it lost another process, and none failed on its own"
        elif len(self.running) > 1:
            sentence += ", before any other; the errors of the others follow from that"
        lines = [line for line in cause.failure().last_lines if line.strip()][-_SHOWN_LINES:]
        self._report(f"{sentence}. {'Its last lines:' if lines else 'It wrote nothing.'}")
        for line in lines:
            self._report(f"  {line}")

    def _exit_code(self) -> int:
        if self.stop == signal.SIGTERM:
            codes = [process.exit_code for process in self._heads()]
            return (
                errors.STOPPED
                if errors.STOPPED in codes
                else 128 + signal.SIGTERM
                if any(codes)
                else 0
            )
        if self.stop is not None:
            return 128 + self.stop
        return self._by_cause()[0].exit_code if self.failed else 0


def _all_ended(processes: Sequence[_Process]) -> bool:
    return all(process.has_ended for process in processes)
