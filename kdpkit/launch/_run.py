"""One run of the launcher: its processes, from their start to the end of the last restart.

Threads put functions into a queue, and one loop calls them.
"""

import contextlib
import dataclasses
import os
import queue
import shlex
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType

from kdpkit import errors
from kdpkit._internal import checks
from kdpkit.cluster._config import VARIABLES
from kdpkit.launch import _child_processes as child_processes
from kdpkit.launch import _output

_LAUNCHER = "launch"  # in front of the launcher's own lines
_SETTLE_SECONDS = 2.0  # in which the others may end by themselves after the first failure
_KILL_SECONDS = 10.0  # in which the kernel ends a killed process
_TICK_SECONDS = 0.2  # between two checks of the time


@dataclasses.dataclass(frozen=True)
class Task:
    """One process to start; one that `serves` is ended when the others have ended."""

    name: str
    command: tuple[str, ...]
    variables: Mapping[str, str]  # in addition to the launcher's own
    serves: bool


class _Process(child_processes.Child):
    """A started task, and whether it was asked to end."""

    def __init__(
        self, task: Task, mark: str, show: Callable[..., None], on_end: Callable[..., None]
    ) -> None:
        self.task = task
        self.has_ended = self.is_signalled = False
        lines = {name: _output.Lines(time.monotonic()) for name in ("stdout", "stderr")}

        def on_bytes(data: bytes, stream: str) -> None:
            for line in lines[stream].feed(data, time.monotonic()):
                show(task.name, line, stream)

        inherited = {name: text for name, text in os.environ.items() if name not in VARIABLES}
        super().__init__(
            task.command,
            {"PYTHONUNBUFFERED": "1"} | inherited | dict(task.variables),
            mark=mark,
            on_bytes=on_bytes,
            on_end=lambda: on_end(self),
        )

    def signal(self, number: int) -> None:
        if not self.has_ended:
            self.is_signalled = True
            self.send(number)

    def __str__(self) -> str:
        number = self.exit_code - 128
        if number in set(signal.Signals):
            return f"{self.task.name} was ended by {signal.Signals(number).name}"
        return f"{self.task.name} failed with exit code {self.exit_code}"


@dataclasses.dataclass
class Run:
    make_tasks: Callable[[], tuple[Task, ...]]
    max_restarts: int
    grace_seconds: float
    restarts: int = 0
    stop: int | None = None  # the signal that asked the run to end
    unwritable: OSError | None = None  # why nothing more can be printed
    is_ending: bool = False
    running: list[_Process] = dataclasses.field(default_factory=list)
    failed: list[_Process] = dataclasses.field(default_factory=list)

    def run(self) -> int:
        """Start all processes, restart them as needed, and return the exit code."""
        self._mark = f"{uuid.uuid4().hex};"
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        tasks = self.make_tasks()
        names = [task.name for task in tasks]
        self._printer = _output.Printer([_LAUNCHER, *names], on_gone=self._note_unwritable)
        self._report(f"Starts {checks.listed(names)}: {shlex.join(tasks[0].command)}")
        with (
            child_processes.Guard(self._mark, grace_seconds=self.grace_seconds) as guard,
            _handling(self._note_signal, signal.SIGINT, signal.SIGTERM),
        ):
            try:
                self._attempt(tasks)
                while self._may_restart():
                    self.restarts += 1
                    count = f"restart {self.restarts} of {self.max_restarts}"
                    self._report(f"All processes start again, on other ports ({count}).")
                    self._attempt(self.make_tasks())
            finally:
                self._end_all()
                guard.all_ended()
        if self.unwritable and not isinstance(self.unwritable, BrokenPipeError):
            raise self.unwritable
        return self._exit_code()

    def _attempt(self, tasks: Sequence[Task]) -> None:
        self.failed, self.running, self.is_ending = [], [], False
        for task in tasks:
            try:
                self.running.append(_Process(task, self._mark, self._printer.line, self._note_end))
            except (OSError, RuntimeError) as error:  # the latter if no thread can be started
                checks.fail(
                    f"{task.name} cannot be started: {checks.first_line(error)}.",
                    command=task.command,
                    remedy="Check its name and the PATH; for a script write `python train.py`.",
                )
        self._wait(lambda: bool(self.stop or self.failed) or _all_ended(self._heads()))
        self.is_ending = True
        if self.stop is None and self.failed:
            self._wait_for_ends(self.running, _SETTLE_SECONDS)
        if self.stop in (signal.SIGINT, signal.SIGTERM):
            self._report(f"{signal.Signals(self.stop).name} is passed on.")
            self._signal_and_wait(self._heads(), self.stop)
        self._end_all()
        if self.stop is None and self.failed:
            cause = self._cause()
            sentence = f"{cause.task.name} was stopped by SIGTERM and saved its state."
            if cause.exit_code != errors.STOPPED:
                follow = ", before any other; the errors of the others may follow from that"
                sentence = f"{cause}{follow if len(self.running) > 1 else ''}."
            self._report(sentence)

    def _heads(self) -> list[_Process]:
        """Return the processes whose end is the end of the run: the chief, or else all workers."""
        return [process for process in self.running if not process.task.serves]

    def _report(self, sentence: str) -> None:
        self._printer.line(_LAUNCHER, sentence, "stderr")

    def _wait(self, done: Callable[[], bool]) -> None:
        while not done():
            with contextlib.suppress(queue.Empty):
                self._events.get(timeout=_TICK_SECONDS)()

    def _wait_for_ends(self, processes: Sequence[_Process], seconds: float | None = None) -> None:
        """Wait until all have ended, for `seconds` or the grace period; a signal may shorten it."""
        began = time.monotonic()

        def is_over() -> bool:
            limit = self.grace_seconds if seconds is None else seconds
            return _all_ended(processes) or time.monotonic() - began >= limit

        self._wait(is_over)

    def _note_end(self, process: _Process) -> None:
        def on_end() -> None:
            process.has_ended = True
            if process.exit_code and not process.is_signalled:
                self.failed.append(process)

        self._events.put(on_end)

    def _may_restart(self) -> bool:
        has_failed = self.failed and self._cause().exit_code != errors.STOPPED
        return bool(has_failed and self.stop is None and self.restarts < self.max_restarts)

    def _note_signal(self, number: int, _frame: object = None) -> None:
        # A signal may interrupt another `put`, which a `SimpleQueue` allows.
        self._events.put(lambda: self._on_signal(number))

    def _note_unwritable(self, error: OSError) -> None:
        self.unwritable = error
        self._note_signal(signal.SIGPIPE)

    def _on_signal(self, number: int) -> None:
        # A second SIGTERM ends nothing early: some schedulers send it to a process and its group.
        if self.is_ending and number != signal.SIGTERM:
            self.grace_seconds = 0.0
        self.stop = self.stop or number

    def _signal_and_wait(self, processes: Sequence[_Process], number: int) -> None:
        for process in processes:
            process.signal(number)
        self._wait_for_ends(processes)

    def _end_all(self) -> None:
        """Stop the running processes, by SIGTERM first, and any child processes that are left."""
        self.is_ending = True
        unsignalled = [process for process in self.running if not process.is_signalled]
        self._signal_and_wait(unsignalled, signal.SIGTERM)
        for process in self.running:
            process.send(signal.SIGKILL)
        self._wait_for_ends(self.running, _KILL_SECONDS)
        child_processes.end_marked(self._mark, grace_seconds=self.grace_seconds)

    def _cause(self) -> _Process:
        """Return the process that failed first, and not because it lost another one."""

        def order(process: _Process) -> tuple[bool, float]:
            return process.exit_code == errors.LEFT_ALONE, process.ended_at or 0.0

        return min(self.failed, key=order)

    def _exit_code(self) -> int:
        if self.stop is None:
            return self._cause().exit_code if self.failed else 0
        codes = [process.exit_code for process in self._heads()]
        if self.stop == signal.SIGTERM and errors.STOPPED in codes:
            return errors.STOPPED
        return 0 if self.stop == signal.SIGTERM and not any(codes) else 128 + self.stop


@contextlib.contextmanager
def _handling(
    handler: Callable[[int, FrameType | None], object], *numbers: signal.Signals
) -> Iterator[None]:
    """Call a function for signals in the block; outside of the main thread do nothing.

    Signals that are ignored, or handled outside of Python, stay as they are.
    """
    is_main = threading.current_thread() is threading.main_thread()
    with contextlib.ExitStack() as restored:
        for number in numbers if is_main else ():
            former = signal.getsignal(number)
            if former not in (None, signal.SIG_IGN):
                restored.callback(signal.signal, number, former)
                signal.signal(number, handler)
        yield


def _all_ended(processes: Sequence[_Process]) -> bool:
    return all(process.has_ended for process in processes)
