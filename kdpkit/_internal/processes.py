"""This process among those that train together, on JAX or TensorFlow.

JAX has three ways to leave a user without an answer: it hangs where processes disagree about what
comes next, it waits at the exit for others that wait for it, and it aborts when the first process
is gone. Here the first is checked, the second cut short, and the third explained. TensorFlow
notices after some seconds that a process is gone, which here becomes one sentence.
"""

import atexit
import contextlib
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import IO, TYPE_CHECKING, cast

import keras
import numpy as np

from kdpkit import errors
from kdpkit._internal import checks, error_text, listening, reachability, versions

if TYPE_CHECKING:
    import tensorflow as tf


# What JAX and its transport report when another process is gone.
_SIGNS = ("connection closed by peer", "connection reset", "broken pipe", "heartbeat", "gloo")
_DIFFERS = "is not the same on each process"  # JAX, of what it places on all devices
GO_ON = "Start all processes again; they go on from the last state that was saved."
# Runs as a process of its own, and prints the last line of its input when the writer has ended.
_LAST_WORDS = """
import sys
line = ""
for line in sys.stdin: pass
sys.stderr.write(line and "\\n" + line)
"""


def count() -> int:
    """Number of processes; 1 unless JAX has more, or TensorFlow started some."""
    return _position()[1]


def index() -> int:
    """Return the number of this process; the first, which writes files, is 0."""
    return _position()[0]


def _position() -> tuple[int, int]:
    """Return the number of this process, and how many there are."""
    if keras.backend.backend() == "jax":
        import jax

        return int(jax.process_index()), int(jax.process_count())
    if keras.backend.backend() != "tensorflow":
        return 0, 1
    from tensorflow.python.eager import context

    # The runtime knows of a cluster once a strategy has joined it. There is no public way to ask;
    # Keras' own callbacks do not.
    server = getattr(context.context(), "_collective_ops_server_def", None)
    if server is None:
        return 0, 1
    sizes = {job.name: len(job.tasks) for job in server.cluster.job}
    chiefs = sizes.get("chief", 0)
    before = chiefs if server.job_name == "worker" else 0
    return before + server.task_index, chiefs + sizes.get("worker", 0)


# Agreement.


def require_equal(
    what: str,
    numbers: Sequence[int],
    *,
    remedy: str,
    strategy: "tf.distribute.Strategy | None" = None,
) -> None:
    """Raise, in every process, for numbers that are not the same in all.

    Every process must call it at the same point of the program.

    Args:
        what: What the numbers are, as the sentence's subject.
        numbers: Equally many in every process.
        remedy: The fix.
        strategy: On TensorFlow, the one that spans the processes.
    """
    if count() == 1:
        return
    of_all = gathered(numbers, strategy)
    if (of_all != of_all[0]).any():
        checks.fail(
            f"{what} must be the same in all processes.",
            by_process=[tuple(map(int, numbers)) for numbers in of_all],
            remedy=remedy,
        )


def require_different(what: str, fingerprint: int, *, remedy: str) -> None:
    """Raise, in every process, for a fingerprint that two of them have in common."""
    if count() == 1:
        return
    of_all = [int(number) for number in gathered([fingerprint]).ravel()]
    same = [i for i, number in enumerate(of_all) if of_all.count(number) > 1]
    if same:
        checks.fail(f"{what} must differ between processes.", the_same_in=same, remedy=remedy)


def gathered(
    numbers: Sequence[int] | np.ndarray, strategy: "tf.distribute.Strategy | None" = None
) -> np.ndarray:
    """Numbers of all processes, one process after the other; on TensorFlow by their strategy."""
    if keras.backend.backend() == "jax" or strategy is None:
        from jax.experimental import multihost_utils

        # As halves, because JAX has no 64-bit integers unless it is configured to.
        halves = np.asarray(numbers, np.int64).view(np.int32)
        return np.asarray(multihost_utils.process_allgather(halves)).view(np.int64)
    import tensorflow as tf

    of_all = np.zeros((count(), len(numbers)), np.int64)
    of_all[index()] = numbers
    with tf.device("CPU:0"):
        return strategy.reduce(tf.distribute.ReduceOp.SUM, tf.constant(of_all), axis=None).numpy()


_questions = itertools.count(1)  # JAX counts them from a process's start to its end


def reached_preemption() -> bool:
    """Return whether all processes of JAX are to stop now, since one got a SIGTERM.

    Every process must ask at the same points of the program.
    """
    from jax.experimental import multihost_utils

    return bool(multihost_utils.reached_preemption_sync_point(next(_questions)))


# Joining and leaving.


def join_processes(
    coordinator: str,
    *,
    process_count: int,
    process_index: int,
    heartbeat_timeout_seconds: int = 10,
    start_timeout_seconds: int = 120,
) -> None:
    """Make this process one of several that train together, on one machine or many.

    Every process runs the same program and calls this first, before anything computes on JAX. Then
    `kdpkit.sharding.data_mesh()` spans the devices of all, and each gives its own examples of every
    batch, as `kdpkit.batches.ArrayBatches` does. When one ends with an error or is killed, the
    others end too, with an error that names the cause.

    With the coordinator at `localhost` or a loopback address, the processes listen there alone, and
    no other machine can connect.

    Args:
        coordinator: `"host:port"` at which the first process can be reached, the same everywhere.
        process_count: Processes in all.
        process_index: Which one this is, from 0.
        heartbeat_timeout_seconds: After so long without a sign of life a process counts as lost,
            and the others end; JAX itself waits 100 seconds.
        start_timeout_seconds: How long to wait for the others to start.

    Raises:
        ValueError: Another backend, an address without a port, an index that is too large, a port
            that another program has, a process that does not come, or one that has joined or
            computed already.
    """
    if keras.backend.backend() != "jax":
        checks.fail(
            "Processes join like this on JAX.",
            backend=keras.backend.backend(),
            remedy="Run with KERAS_BACKEND=jax.",
        )
    checks.address("coordinator", coordinator)
    processes = checks.integer("process_count", process_count)
    this = checks.integer("process_index", process_index, minimum=0)
    if this >= processes:
        checks.fail(
            "`process_index` must be less than `process_count`; the first process is 0.",
            process_index=this,
            process_count=processes,
        )
    heartbeat = checks.integer("heartbeat_timeout_seconds", heartbeat_timeout_seconds)
    start_timeout = checks.integer("start_timeout_seconds", start_timeout_seconds)
    versions.check_processes_are_supported()
    _join(coordinator, processes, this, heartbeat, start_timeout)


def _join(coordinator: str, processes: int, this: int, heartbeat: int, start_timeout: int) -> None:
    import jax

    if jax.distributed.is_initialized():
        checks.fail("This process has joined others already.", coordinator=coordinator)
    check_port(coordinator, is_own=this == 0)
    is_local = listening.are_loopback([coordinator])
    if is_local:
        versions.let_gloo_listen_at("localhost")
    last_words = _LastWords()
    last_words.become(
        f"Process {this} of {processes} waited {start_timeout} seconds for others that did "
        f"not come to {coordinator}. Check that all were started, with one address that all can "
        "reach."
    )
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes=processes,
            process_id=this,
            heartbeat_timeout_seconds=heartbeat,
            initialization_timeout=start_timeout,
            coordinator_bind_address=coordinator if is_local else None,
        )
    except RuntimeError as error:
        last_words.cancel()
        raise errors.InputError(
            f"Process {this} of {processes} could not join the others at {coordinator} "
            f"({error_text.first_line(error)}). Check that all were started, with one address, and "
            "that nothing computes on JAX before they join."
        ) from error
    other = "the first process, which all others need," if this else "another process"
    last_words.become(
        f"Process {this} of {processes} was ended from outside, or {other} is gone: its output has "
        f"the reason. {GO_ON}"
    )
    _leave_without_waiting_after_errors(last_words)


def check_port(first: str, *, is_own: bool) -> None:
    """Raise if another program has the port of the first process, in this process or another."""
    port = checks.address("address", first)[1]
    reason = listening.problem(port) if is_own else None
    if reason or (not is_own and reachability.is_another_program(first)):
        checks.fail(
            f"The first process cannot listen at port {port}"
            + (f" ({reason})." if reason else ", where another program does."),
            address=first,
            remedy="Set another port for all processes, or stop the program that has this one.",
        )


class _LastWords:
    """What is printed if this process ends in a way that lets it print nothing itself."""

    def __init__(self) -> None:
        self._watcher = subprocess.Popen(  # noqa: S603 a fixed command
            [sys.executable, "-S", "-c", _LAST_WORDS],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is not for it
        )
        self._input = cast(IO[bytes], self._watcher.stdin)

    def become(self, sentence: str) -> None:
        """Print this from now on."""
        with contextlib.suppress(BrokenPipeError):
            self._input.write(sentence.encode() + b"\n")
            self._input.flush()

    def cancel(self) -> None:
        """Print nothing: this process ends in order."""
        self._watcher.kill()
        self._watcher.communicate()


@contextlib.contextmanager
def last_words(sentence: str) -> Iterator[None]:
    """Have a sentence printed if this process ends meanwhile with no chance to print it itself."""
    words = _LastWords()
    words.become(sentence)
    try:
        yield
    finally:
        words.cancel()


def _leave_without_waiting_after_errors(last_words: _LastWords) -> None:
    """Let this process end without a wait for others if it failed, and never without a word."""
    hook = sys.excepthook

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        leave_without_waiting(1)
        hook(kind, error, trace)

    def at_exit() -> None:
        last_words.cancel()
        leave()

    sys.excepthook = note
    atexit.register(at_exit)  # runs before JAX's own, which waits for the others
    name_losses_at_exit()


def name_losses_at_exit() -> None:
    """Let a program that a lost process ended anywhere, not in training alone, report that."""
    hook = sys.excepthook

    def name(_: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            with naming_losses():
                raise error
        except BaseException as named:
            hook(type(named), named, trace)

    sys.excepthook = name


_exit_codes: list[int] = []  # of a process that failed; the first reason counts


def leave_without_waiting(code: int) -> None:
    """Let this process end with an exit code and not wait for the others, which wait for it.

    The first reason counts, and it counts only where there are others.
    """
    _exit_codes.append(code)


def leave() -> None:
    """End at once, if there is an exit code to end with."""
    if _exit_codes:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_codes[0])


@contextlib.contextmanager
def naming_losses() -> Iterator[None]:
    """Report in one sentence that another process is gone, in place of a transport's error.

    So it reports values of JAX that differ between the processes.

    Raises:
        errors.ProcessLostError: One is gone.
        errors.InputError: A value differs.
    """
    try:
        yield
    except Exception as error:  # of a framework that is imported in some environments alone
        if _DIFFERS in str(error):  # Keras may have raised another error from JAX's
            raise errors.InputError(
                "A variable has not the same value in all processes: each drew other random "
                "numbers. Call `keras.utils.set_random_seed(0)` in every process before the model "
                "is built."
            ) from error
        if isinstance(error, errors.ProcessLostError) or not (sign := _sign_of_loss(error)):
            raise
        leave_without_waiting(errors.LEFT_ALONE)
        if keras.backend.backend() == "tensorflow":  # on JAX `join_processes` sees to it
            atexit.register(leave)
        raise errors.ProcessLostError(
            f"Another process of this training is gone ({sign}); its output has the reason. {GO_ON}"
        ) from error


def _sign_of_loss(error: Exception) -> str:
    """What an error reports of another process that is gone; empty if it is of another kind."""
    message = str(error)
    if type(error).__module__.startswith("tensorflow."):
        aborted = "Collective ops is aborted by: "
        if count() == 1 or (aborted not in message and type(error).__name__ != "UnavailableError"):
            return ""
        silent = re.findall(r"^/job:(\w+)/replica:0/task:(\d+)$", message, re.MULTILINE)
        if silent:
            return ", ".join(f"{job} {task}" for job, task in silent) + " shows no sign of life"
        return error_text.first_line(message.partition(aborted)[2] or error)
    is_of_gloo = message.startswith("UNKNOWN: Gloo ")  # without a status, JAX raises a ValueError
    of_jax = is_of_gloo or (isinstance(error, RuntimeError) and _has_joined())
    is_loss = of_jax and any(sign in message.lower() for sign in _SIGNS)
    return error_text.first_line(error) if is_loss else ""


def _has_joined() -> bool:
    if keras.backend.backend() != "jax":
        return False
    import jax

    return bool(jax.distributed.is_initialized())
