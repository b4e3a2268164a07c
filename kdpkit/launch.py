"""Start the processes of a cluster on this machine, watch them, end and restart them together.

    kdpkit launch --workers 2 --max-restarts 3 -- python train.py

Every process runs the same command and finds its place in its environment:

    config = kdpkit.cluster.ClusterConfig.from_environment()
"""

import collections
import contextlib
import dataclasses
import math
import os
import queue
import random
import re
import shlex
import shutil
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from kdpkit import _checks, _children, _output, _waiting, cluster

__all__ = ["Failure", "Report", "Task", "launch", "plan", "run"]

STOPPED = 42  # exit code of a program that saved its state on SIGTERM, as `callbacks.Resume` does
LEFT_ALONE = 43  # of one that lost another process, as after `sharding.join_processes`

_LAUNCHER = "launch"  # its own name among those of the processes
_PORTS = range(15_000, 32_768)  # below those that Linux gives to connections
_PORT_RETRIES = 3  # restarts for ports that another program took, which are not counted
_SETTLE_SECONDS = 2.0  # in which the others may end by themselves after the first that fails
_SILENT_SECONDS = 60.0  # without a sign of life, after which it is told
_KEPT_LINES = 20  # of what each process wrote last
_SHOWN_LINES = 8
_TAKEN = re.compile(r"address (is )?already in use|errno[: ]*98|EADDRINUSE", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Task:
    """What one process is to be: its name, its place in the cluster, its command and variables."""

    name: str
    config: cluster.ClusterConfig
    command: tuple[str, ...]
    variables: Mapping[str, str]  # beside those that the launcher has itself


@dataclasses.dataclass(frozen=True)
class Failure:
    """A process that failed: its name, its exit code as a shell gives it, and its last lines."""

    name: str
    exit_code: int
    last_lines: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Report:
    """How a run ended: the exit code, how often processes were restarted, and what failed first."""

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
    start_timeout_seconds: float | None = None,
    dry_run: bool = False,
) -> int:
    """Run a command as several processes of this machine that train together.

    Each gets TF_CONFIG and KERAS_DISTRIBUTION_* of a cluster on free ports; the backend is what
    KERAS_BACKEND says. What they print comes line by line, each under its process's name. It ends
    when all workers have ended. When one fails, the others are ended, and all start again with
    other ports as long as restarts are left: a command that uses `kdpkit.callbacks.Resume` goes on
    from its last state. No process outlives this call, nor does one that a process started, also
    when the launcher is killed.

    With parameter servers, a chief is started too. Workers and servers serve it until it ends; a
    lost worker is started again alone, a lost server or chief means that all are.

    SIGTERM is passed on: programs that save their state exit with 42, and so does this. Ctrl-C is
    passed on too, and the second one ends all at once. They are handled in the main thread alone.

    Args:
        command: Its words, such as `["python", "train.py"]`.
        workers: How many.
        parameter_servers: How many; each cluster with some has a chief beside its workers.
        max_restarts: How often processes may be started again, in all. One more, up to three
            times, is free where another program took a port in the meantime.
        gpus_per_worker: GPUs that each worker sees, others than the next; None lets all see all.
        grace_seconds: How long a process may take to end after a signal before it is killed.
        start_timeout_seconds: How long a process may take to a first sign of life, which is
            output or something that listens at its address; None waits for ever, and says so
            after a minute.
        dry_run: Print what each process would get, and start none.

    Returns:
        An exit code: 0 if all ended well, else that of the process that failed first (not of those
        that failed because of it, which say so with 43), 128 and its number for a signal, 42 when
        SIGTERM stopped programs that saved their state, 130 after Ctrl-C.

    Raises:
        ValueError: Bad arguments, or a command that there is not.

    >>> launch(["echo", "hello"], workers=1)
    worker 0 | hello
    0
    """
    settings: dict[str, Any] = {
        "workers": workers,
        "parameter_servers": parameter_servers,
        "gpus_per_worker": gpus_per_worker,
    }
    if dry_run:
        for task in plan(command, **settings):
            words = (f"{name}={shlex.quote(text)}" for name, text in task.variables.items())
            sys.stdout.write(f"{task.name} | {' '.join(words)} {shlex.join(task.command)}\n")
        return 0
    return run(
        command,
        **settings,
        max_restarts=max_restarts,
        grace_seconds=grace_seconds,
        start_timeout_seconds=start_timeout_seconds,
    ).exit_code


def plan(
    command: Sequence[str],
    *,
    workers: int,
    parameter_servers: int = 0,
    gpus_per_worker: int | None = None,
) -> tuple[Task, ...]:
    """Give what each process would get from `launch`, on ports that are free now.

    >>> [task.name for task in plan(["echo"], workers=2, parameter_servers=1)]
    ['chief', 'worker 0', 'worker 1', 'ps 0']
    """
    words = _command(command)
    config = _cluster_here(workers, parameter_servers)
    gpus = _gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), workers, gpus_per_worker)
    return tuple(
        _task(config.for_task(role, index), words, gpus) for role, index, _ in config.tasks
    )


def run(
    command: Sequence[str],
    *,
    workers: int,
    parameter_servers: int = 0,
    max_restarts: int = 0,
    gpus_per_worker: int | None = None,
    grace_seconds: float = 30.0,
    start_timeout_seconds: float | None = None,
    stdout: TextIO | None = None,
) -> Report:
    """Do what `launch` does, with its arguments, and tell more of how it ended.

    What processes write to their stdout goes to `stdout`, or else to that of this process.
    """
    return _Run(
        lambda: plan(
            command,
            workers=workers,
            parameter_servers=parameter_servers,
            gpus_per_worker=gpus_per_worker,
        ),
        max_restarts=_checks.integer("max_restarts", max_restarts, minimum=0),
        grace_seconds=_checks.number("grace_seconds", grace_seconds, minimum=0),
        start_timeout_seconds=None
        if start_timeout_seconds is None
        else _checks.number("start_timeout_seconds", start_timeout_seconds, above=0),
        stdout=stdout,
    ).run()


# What each process gets.


def _command(command: Sequence[str]) -> tuple[str, ...]:
    if os.name != "posix":
        _checks.refuse("Processes are launched on Linux and macOS alone.", system=os.name)
    words = _checks.strings("command", command)
    if not words:
        _checks.refuse("`command` must have a word, such as 'python'.", command=command)
    if shutil.which(words[0]) is None:
        is_python = words[0].endswith(".py")
        _checks.refuse(
            "There is no such program.",
            command=words[0],
            remedy=f"Write `python {words[0]}`." if is_python else "Check its name and the PATH.",
        )
    return words


def _cluster_here(workers: int, parameter_servers: int) -> cluster.ClusterConfig:
    workers = _checks.integer("workers", workers)
    servers = _checks.integer("parameter_servers", parameter_servers, minimum=0)
    addresses = [f"localhost:{port}" for port in _free_ports(workers + servers + bool(servers))]
    return cluster.ClusterConfig(
        addresses[:workers],
        parameter_servers=addresses[workers : workers + servers],
        chief=addresses[-1] if servers else None,
    )


def _free_ports(count: int) -> list[int]:
    """Find ports at which nothing listens; all are held until the last is found."""
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
        _checks.refuse("This machine has no such number of free ports.", processes=count)
    return ports


def _gpus(visible: str | None, workers: int, each: int | None) -> list[str] | None:
    """Give what each worker sees as CUDA_VISIBLE_DEVICES."""
    if each is None:
        return None
    each = _checks.integer("gpus_per_worker", each)
    wanted = workers * each
    present = len(list(Path("/dev").glob("nvidia[0-9]*")))  # none where drivers hide them
    names = list(map(str, range(present or wanted)))
    if visible is not None:
        names = [name for name in visible.split(",") if name]
    if len(names) < wanted:
        _checks.refuse(
            "More GPUs are asked for than there are.",
            workers=workers,
            gpus_per_worker=each,
            CUDA_VISIBLE_DEVICES=visible,
            remedy=f"There are {len(names)}.",
        )
    return [",".join(names[first : first + each]) for first in range(0, wanted, each)]


def _task(config: cluster.ClusterConfig, command: tuple[str, ...], gpus: list[str] | None) -> Task:
    variables = config.to_environment()
    if gpus:
        variables["CUDA_VISIBLE_DEVICES"] = gpus[config.index] if config.role == "worker" else "-1"
    name = "chief" if config.role == "chief" else f"{config.role} {config.index}"
    return Task(name, config, command, variables)


def _environment(task: Task) -> dict[str, str]:
    """Give all variables of a process, without those of another cluster."""
    kept = {name: text for name, text in os.environ.items() if name not in cluster.VARIABLES}
    return {"PYTHONUNBUFFERED": "1"} | kept | dict(task.variables)


# The run.


class _Process:
    """A task that was started, and what is known of it."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.lines = {name: _output.Lines() for name in ("stdout", "stderr")}
        self.last: dict[str, collections.deque[str]] = {
            name: collections.deque(maxlen=_KEPT_LINES) for name in self.lines
        }
        self.has_ended = False  # and all that it wrote is printed
        self.is_told = False  # to end
        self.is_alive = False  # it gave a sign
        self.is_noted = False  # that it gave none
        self.child: _children.Child

    @property
    def exit_code(self) -> int:
        code = self.child.exit_code
        return 128 + signal.SIGKILL if code is None else code  # the kernel is still at it

    def failure(self) -> Failure:
        """Give how it failed, with what it wrote to stderr, or else to stdout."""
        lines = self.last["stderr"] or self.last["stdout"]
        return Failure(self.task.name, self.exit_code, tuple(lines))

    def listens(self) -> bool:
        """Tell whether something listens at its address."""
        address = self.task.config.address
        return address is not None and _waiting.listens(address)


class _Run:
    """All attempts at one run. Threads put what happens into a queue; one loop acts on it."""

    def __init__(
        self,
        make_tasks: Callable[[], tuple[Task, ...]],
        *,
        max_restarts: int,
        grace_seconds: float,
        start_timeout_seconds: float | None,
        stdout: TextIO | None,
    ) -> None:
        self._make_tasks = make_tasks
        self._restarts_left = max_restarts
        self._max_restarts = max_restarts
        self._port_retries_left = _PORT_RETRIES
        self._grace_seconds = grace_seconds
        self._start_timeout_seconds = start_timeout_seconds
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stop: int | None = None  # the signal that asked to end
        self._at_once = False
        self._is_ending = False
        self._failed: list[_Process] = []
        self._running: list[_Process] = []
        self._mark = f"{uuid.uuid4().hex}."
        self._started = 0
        self._tasks = make_tasks()
        self._printer = _output.Printer(
            [_LAUNCHER, *(task.name for task in self._tasks)],
            on_gone=lambda: self._events.put(lambda: self._on_signal(signal.SIGPIPE)),
            stdout=stdout,
        )

    def run(self) -> Report:
        """Start all, again and again if need be, and give how it ended."""
        self._say(f"Starts {self._described()}: {shlex.join(self._tasks[0].command)}")
        with (
            _children.Guard(self._mark, grace_seconds=self._grace_seconds) as self._guard,
            self._handling_signals(),
        ):
            try:
                self._attempt()
                while self._may_restart():
                    self._tasks = self._make_tasks()
                    self._attempt()
            finally:
                self._end_all()
                self._guard.all_ended()
        restarts = self._max_restarts - self._restarts_left
        return Report(self._exit_code(), restarts, self._failures())

    def _attempt(self) -> None:
        self._failed, self._is_ending = [], False
        self._running = []
        for task in self._tasks:
            self._running.append(self._start(task))
        self._wait_for(lambda: bool(self._stop or self._failed) or self._all_ended(self._heads()))
        self._is_ending = True
        if self._stop is None and self._failed:
            self._wait_for(lambda: self._all_ended(self._running), _SETTLE_SECONDS)
        if self._stop is not None:
            self._pass_on(self._stop)
        self._end_all()
        if self._stop is None and self._failed:
            self._say_what_failed()

    def _start(self, task: Task) -> _Process:
        process = _Process(task)
        self._started += 1
        try:
            process.child = _children.Child(
                task.command,
                _environment(task),
                mark=f"{self._mark}{self._started};",
                on_bytes=lambda data, stream: self._print(process, data, stream),
                on_end=lambda: self._events.put(lambda: self._on_end(process)),
            )
        except OSError as error:
            _checks.refuse(
                f"The command cannot be started ({error.strerror}).", command=list(task.command)
            )
        self._guard.watch(process.child)
        return process

    def _print(self, process: _Process, data: bytes, stream: str) -> None:
        process.is_alive = process.is_alive or bool(data)
        lines = process.lines[stream]
        for line in lines.feed(data, time.monotonic()) if data else lines.close():
            process.last[stream].append(line)
            self._printer.line(process.task.name, line, to=stream)

    def _say(self, sentence: str) -> None:
        self._printer.line(_LAUNCHER, sentence, to="stderr")

    def _described(self) -> str:
        config = self._tasks[0].config
        counts = {
            "worker": len(config.workers),
            "parameter server": len(config.parameter_servers),
            "chief": int(config.chief is not None),
        }
        said = [f"{n} {name}{'s' if n > 1 else ''}" for name, n in counts.items() if n]
        return ", ".join(said)

    # Events.

    def _wait_for(self, done: Callable[[], bool], seconds: float = math.inf) -> None:
        """Act on what happens until something is so, the time is over, or all is to end at once."""
        deadline = time.monotonic() + seconds
        while not done() and not self._at_once:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            try:
                self._events.get(timeout=min(left, 1.0))()
            except queue.Empty:
                self._look_for_signs_of_life()

    def _on_end(self, process: _Process) -> None:
        process.has_ended = True
        self._guard.forget(process.child)
        if process.exit_code == 0 or process.is_told:
            return
        if self._is_replaceable(process):
            self._replace(process)
        else:
            self._failed.append(process)

    def _on_signal(self, number: int) -> None:
        # Not for SIGTERM, which some send twice: to a process, and to its group.
        self._at_once = self._at_once or (self._is_ending and number != signal.SIGTERM)
        self._stop = self._stop or number

    def _look_for_signs_of_life(self) -> None:
        waits = min(self._start_timeout_seconds or math.inf, _SILENT_SECONDS)
        for process in self._running:
            silent = time.monotonic() - process.child.started_at
            if silent >= waits and not (process.has_ended or process.is_alive or self._is_ending):
                process.is_alive = process.listens()
                if not process.is_alive:
                    self._on_silence(process, silent)

    def _on_silence(self, process: _Process, seconds: float) -> None:
        sentence = (
            f"{process.task.name} has given no sign of life for {seconds:.0f} s: no output, and "
            f"nothing listens at {process.task.config.address}."
        )
        if self._start_timeout_seconds and seconds >= self._start_timeout_seconds:
            self._say(f"{sentence} It is killed.")
            process.child.send(signal.SIGKILL)
        elif not process.is_noted and seconds >= _SILENT_SECONDS:
            process.is_noted = True
            self._say(f"{sentence} It is waited for.")

    @contextlib.contextmanager
    def _handling_signals(self) -> Iterator[None]:
        """Put SIGINT and SIGTERM among the events, unless they are ignored."""
        former = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                handler = signal.getsignal(number)
                if handler not in (None, signal.SIG_IGN):
                    former[number] = handler
                    signal.signal(number, self._note_signal)
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _note_signal(self, number: int, _frame: Any) -> None:
        self._events.put(lambda: self._on_signal(number))  # a `put` may interrupt another

    # Who must run, and who has ended.

    def _heads(self) -> list[_Process]:
        """Give those whose end is the run's: the chief, or without one all workers."""
        chief = [process for process in self._running if process.task.config.role == "chief"]
        return chief or self._running

    @staticmethod
    def _all_ended(processes: Sequence[_Process]) -> bool:
        return all(process.has_ended for process in processes)

    def _is_replaceable(self, process: _Process) -> bool:
        config = process.task.config
        of_a_chief = config.role == "worker" and bool(config.parameter_servers)
        return of_a_chief and self._restarts_left > 0 and not self._is_ending and not self._failed

    def _replace(self, process: _Process) -> None:
        """Start a lost worker again, at its own address, which the chief knows."""
        self._restarts_left -= 1
        self._say(
            f"{_lost(process)}. It is started again, and the others go on "
            f"({self._restart_count()})."
        )
        _children.end_marked(process.child.mark, grace_seconds=0)
        self._running[self._running.index(process)] = self._start(process.task)

    # The end.

    def _pass_on(self, number: int) -> None:
        """Pass a signal on to those whose end is the run's, and let them end."""
        heads = self._heads()
        if number in (signal.SIGINT, signal.SIGTERM):
            self._say(f"{signal.Signals(number).name} is passed on.")
            self._tell(heads, number)
            self._wait_for(lambda: self._all_ended(heads), self._grace_seconds)

    def _end_all(self) -> None:
        """End what still runs, by SIGTERM first where it was not told yet, and what they left."""
        self._is_ending = True
        rest = [process for process in self._running if not process.is_told]
        self._tell(rest, signal.SIGTERM)
        self._wait_for(lambda: self._all_ended(rest), self._grace_seconds)
        for process in self._running:
            process.child.send(signal.SIGKILL)
        at_once, self._at_once = self._at_once, False
        self._wait_for(lambda: self._all_ended(self._running), 10.0)
        self._at_once = at_once
        _children.end_marked(
            self._mark,
            grace_seconds=0 if at_once else self._grace_seconds,
            told_groups={process.child.group for process in self._running if process.is_told},
        )

    def _tell(self, processes: Sequence[_Process], number: int) -> None:
        for process in processes:
            if not process.has_ended:
                process.is_told = True
                process.child.send(number)

    # What it came to.

    def _cause(self) -> _Process:
        """Give the process that failed first and not because others had."""
        by_end = sorted(self._failed, key=lambda process: process.child.ended_at or 0.0)
        return next((p for p in by_end if p.exit_code != LEFT_ALONE), by_end[0])

    def _failures(self) -> tuple[Failure, ...]:
        if not self._failed:
            return ()
        cause = self._cause()
        return tuple(p.failure() for p in [cause, *(p for p in self._failed if p is not cause)])

    def _say_what_failed(self) -> None:
        cause = self._cause()
        if cause.exit_code == STOPPED:
            self._say(f"{cause.task.name} was stopped by SIGTERM and saved its state.")
            return
        sentence = _lost(cause)
        if cause.exit_code == LEFT_ALONE:
            sentence += ", because it lost another, and none failed by itself"
        elif len(self._running) > 1:
            sentence += ", before any other; what others say of it comes of that"
        lines = [line for line in cause.failure().last_lines if line.strip()][-_SHOWN_LINES:]
        self._say(f"{sentence}. {'Its last lines:' if lines else 'It wrote nothing.'}")
        for line in lines:
            self._say(f"  {line}")

    def _may_restart(self) -> bool:
        if self._stop is not None or not self._failed or self._cause().exit_code == STOPPED:
            return False
        if self._port_retries_left and self._lost_a_port():
            self._port_retries_left -= 1
            self._say("Another program took its port. All start again, on other ports.")
            return True
        if not self._restarts_left:
            return False
        self._restarts_left -= 1
        self._say(f"All start again, on other ports ({self._restart_count()}).")
        return True

    def _restart_count(self) -> str:
        return f"restart {self._max_restarts - self._restarts_left} of {self._max_restarts}"

    def _lost_a_port(self) -> bool:
        """Tell whether a process says that a port which was chosen here is taken."""
        said = "\n".join(line for process in self._failed for line in process.failure().last_lines)
        ports = (address.rpartition(":")[2] for _, _, address in self._tasks[0].config.tasks)
        return bool(_TAKEN.search(said)) and any(re.search(rf"\b{p}\b", said) for p in ports)

    def _exit_code(self) -> int:
        if self._stop == signal.SIGTERM:
            codes = [process.exit_code for process in self._heads()]
            return STOPPED if STOPPED in codes else 128 + signal.SIGTERM if any(codes) else 0
        if self._stop is not None:
            return 128 + self._stop
        return self._cause().exit_code if self._failed else 0


def _lost(process: _Process) -> str:
    code = process.exit_code
    if code > 128:
        with contextlib.suppress(ValueError):
            return f"{process.task.name} was ended by {signal.Signals(code - 128).name}"
    return f"{process.task.name} failed with exit code {code}"
