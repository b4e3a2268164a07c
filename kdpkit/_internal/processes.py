"""This process among those that train together, on JAX or TensorFlow.

JAX has three ways to leave a user without an answer: it waits for ever where processes disagree
about what comes next, it waits at the exit for others that wait for it, and it aborts when the
first process is gone. Here the first is refused, the second cut short, and the third explained.
TensorFlow notices after some seconds that a process is gone, which here becomes one sentence.
"""

import atexit
import contextlib
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from kdpkit import _checks, _versions

EXIT_CODE = 43  # of a process that others left alone

# What JAX and its transport say when another process is gone.
_SIGNS = ("connection closed by peer", "connection reset", "broken pipe", "heartbeat", "gloo")
GO_ON = "Start all processes again; they go on from the last state that was saved."
# Started as a process of its own, it says the last line it was told when the one that told it ends.
_LAST_WORDS = """
import sys
said = ""
for said in sys.stdin: pass
sys.stderr.write(said and "\\n" + said)
"""


class ProcessLostError(RuntimeError):
    """Another process that this one trains with is gone."""


def count() -> int:
    """Give the number of processes; 1 unless JAX was told of others, or TensorFlow started some."""
    return _place()[1]


def index() -> int:
    """Give the number of this process; the first, which writes files, is 0."""
    return _place()[0]


def _place() -> tuple[int, int]:
    """Give the number of this process, and how many there are."""
    if keras.backend.backend() == "jax":
        import jax

        return int(jax.process_index()), int(jax.process_count())
    return _place_in_cluster() if keras.backend.backend() == "tensorflow" else (0, 1)


def _place_in_cluster() -> tuple[int, int]:
    """Ask TensorFlow's runtime, which knows of a cluster once a strategy has joined it."""
    from tensorflow.python.eager import context

    # There is no public way to ask; Keras' own callbacks do not.
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
    strategy: Any = None,
) -> None:
    """Refuse, in every process, numbers that are not the same in all.

    Every process must call it at the same place.

    Args:
        what: What the numbers are, as the sentence's subject.
        numbers: Equally many in every process.
        remedy: The way out.
        strategy: On TensorFlow, the one that spans the processes.
    """
    if count() == 1:
        return
    of_all = gathered(numbers, strategy)
    if (of_all != of_all[0]).any():
        _checks.refuse(
            f"{what} must be the same in all processes.",
            by_process=[tuple(map(int, row)) for row in of_all],
            remedy=remedy,
        )


def require_different(what: str, fingerprint: int, *, remedy: str) -> None:
    """Refuse, in every process, what is the same in two of them, by a number that tells."""
    if count() == 1:
        return
    of_all = [int(number) for number in gathered([fingerprint]).ravel()]
    same = [i for i, number in enumerate(of_all) if of_all.count(number) > 1]
    if same:
        _checks.refuse(f"{what} must differ between processes.", the_same_in=same, remedy=remedy)


def gathered(numbers: Sequence[int] | np.ndarray, strategy: Any = None) -> np.ndarray:
    """Give the numbers of all processes, a row for each; on TensorFlow through their strategy."""
    if keras.backend.backend() == "jax":
        from jax.experimental import multihost_utils

        # As halves, because JAX has no 64-bit integers unless it is told to.
        halves = np.asarray(numbers, np.int64).view(np.int32)
        return np.asarray(multihost_utils.process_allgather(halves)).view(np.int64)
    import tensorflow as tf

    rows = np.zeros((count(), len(numbers)), np.int64)
    rows[index()] = numbers
    with tf.device("CPU:0"):
        return strategy.reduce(tf.distribute.ReduceOp.SUM, tf.constant(rows), axis=None).numpy()


_questions = itertools.count(1)  # JAX counts them from a process's start to its end


def reached_preemption() -> bool:
    """Tell whether all processes of JAX are to stop now, since one got a SIGTERM.

    Every process must ask at the same places.
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
    `kdpkit.sharding.data_mesh()` spans the devices of all, and each gives its own rows of every
    batch, as `kdpkit.batches.ArrayBatches` does. When one ends with an error or is killed, the
    others end too, with a sentence that says so.

    Args:
        coordinator: `"host:port"` at which the first process can be reached, the same everywhere.
        process_count: Processes in all.
        process_index: Which one this is, from 0.
        heartbeat_timeout_seconds: After so long without a sign of life a process counts as lost,
            and the others end; JAX itself waits 100 seconds.
        start_timeout_seconds: How long to wait for the others to start.

    Raises:
        ValueError: Another backend, an address without a port, an index that is too large, a
            process that does not come, or one that has joined or computed already.
    """
    if keras.backend.backend() != "jax":
        _checks.refuse(
            "Processes join like this on JAX.",
            backend=keras.backend.backend(),
            remedy="Run with KERAS_BACKEND=jax.",
        )
    _checks.address("coordinator", coordinator)
    all_of_them = _checks.integer("process_count", process_count)
    this = _checks.integer("process_index", process_index, minimum=0)
    if this >= all_of_them:
        _checks.refuse(
            "`process_index` must be less than `process_count`; the first process is 0.",
            process_index=this,
            process_count=all_of_them,
        )
    timeouts = {
        "heartbeat_timeout_seconds": _checks.integer(
            "heartbeat_timeout_seconds", heartbeat_timeout_seconds
        ),
        "initialization_timeout": _checks.integer("start_timeout_seconds", start_timeout_seconds),
    }
    _join(coordinator, all_of_them, this, timeouts)


def _join(coordinator: str, processes: int, this: int, timeouts: dict[str, int]) -> None:
    import jax

    _versions.refuse_processes_of_old_jax()
    if jax.distributed.is_initialized():
        _checks.refuse("This process has joined others already.", coordinator=coordinator)
    last_words = _LastWords()
    last_words.become(
        f"Process {this} of {processes} waited {timeouts['initialization_timeout']} seconds for "
        f"others that did not come to {coordinator}. Check that all were started, with one "
        "address that all can reach."
    )
    try:
        jax.distributed.initialize(
            coordinator, num_processes=processes, process_id=this, **timeouts
        )
    except RuntimeError as error:
        last_words.unsay()
        raise _checks.InputError(
            f"Process {this} of {processes} could not join the others at {coordinator} "
            f"({str(error).splitlines()[0]}). Check that all were started, with one address, and "
            "that nothing computes on JAX before they join."
        ) from error
    others = ", or the first process, which all others need, is gone: its output says why"
    last_words.become(
        f"Process {this} of {processes} was ended from outside{others if this else ''}. {GO_ON}"
    )
    _Leaving(last_words)


class _LastWords:
    """What is said if this process ends in a way that lets it say nothing itself."""

    def __init__(self) -> None:
        self._watcher = subprocess.Popen(  # noqa: S603 a fixed command
            [sys.executable, "-S", "-c", _LAST_WORDS],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is not for it
        )
        self._told: Any = self._watcher.stdin

    def become(self, sentence: str) -> None:
        """Say this from now on."""
        with contextlib.suppress(BrokenPipeError):
            self._told.write(sentence.encode() + b"\n")
            self._told.flush()

    def unsay(self) -> None:
        """Say nothing: this process ends in order."""
        self._watcher.kill()
        self._watcher.communicate()


@contextlib.contextmanager
def last_words(sentence: str) -> Iterator[None]:
    """Have a sentence said if this process ends meanwhile without a chance to say it itself."""
    words = _LastWords()
    words.become(sentence)
    try:
        yield
    finally:
        words.unsay()


class _Leaving:
    """How this process ends: without a wait for others if it failed, and never without a word."""

    code: int | None = None  # of a process that failed

    def __init__(self, last_words: _LastWords) -> None:
        self._last_words = last_words
        self._hook = sys.excepthook
        sys.excepthook = self._note
        atexit.register(self._leave)  # runs before JAX's own, which waits for the others

    def _note(self, kind: Any, error: Any, trace: Any) -> None:
        leave_without_waiting(1)
        self._hook(kind, error, trace)

    def _leave(self) -> None:
        self._last_words.unsay()
        leave()


def leave_without_waiting(code: int) -> None:
    """Let this process end with an exit code and not wait for the others, which wait for it.

    The first reason counts, and it counts only where there are others.
    """
    if _Leaving.code is None:
        _Leaving.code = code


def leave() -> None:
    """End at once, if there is an exit code to end with."""
    if _Leaving.code is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_Leaving.code)


@contextlib.contextmanager
def naming_losses() -> Iterator[None]:
    """Say in one sentence that another process is gone, where a transport's error would.

    Raises:
        ProcessLostError: It is.
    """
    try:
        yield
    except Exception as error:  # of a framework that is imported in some environments alone
        if isinstance(error, ProcessLostError) or not (said := _sign_of_loss(error)):
            raise
        leave_without_waiting(EXIT_CODE)
        if keras.backend.backend() == "tensorflow":  # on JAX `join_processes` sees to it
            atexit.register(leave)
        raise ProcessLostError(
            f"Another process of this training is gone ({said}); its output says why. {GO_ON}"
        ) from error


def _sign_of_loss(error: Exception) -> str:
    """Give what an error says of another process that is gone; nothing if it says no such thing."""
    said = str(error)
    if type(error).__module__.startswith("tensorflow."):
        aborted = "Collective ops is aborted by: "
        if count() == 1 or (aborted not in said and type(error).__name__ != "UnavailableError"):
            return ""
        silent = re.findall(r"^/job:(\w+)/replica:0/task:(\d+)$", said, re.MULTILINE)
        if silent:
            return ", ".join(f"{job} {task}" for job, task in silent) + " shows no sign of life"
        return said.partition(aborted)[2].partition("\n")[0] or said.splitlines()[0]
    is_loss = isinstance(error, RuntimeError) and any(sign in said.lower() for sign in _SIGNS)
    return said.splitlines()[0] if is_loss else ""
