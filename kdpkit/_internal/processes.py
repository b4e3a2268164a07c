"""This process among those that train together: its index, what all have in common, lost ones.

JAX hangs where processes disagree about what comes next, so that is checked. That a process is gone
becomes one sentence. How they join is in `kdpkit/cluster`.
"""

import atexit
import contextlib
import itertools
import os
import re
import sys
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import keras
import numpy as np

from kdpkit import errors
from kdpkit._internal import checks

if TYPE_CHECKING:
    import tensorflow as tf


# What JAX and its transport report when another process is gone.
_SIGNS = ("connection closed by peer", "connection reset", "broken pipe", "heartbeat", "gloo")
_DIFFERS = "is not the same on each process"  # JAX, of what it places on all devices
GO_ON = "Start all processes again; they resume from the last state that was saved."


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


def report(sentence: str) -> None:
    """Write a sentence to stderr, on a line of its own: Keras' progress bar may be open."""
    process = f"Process {index()}: " if count() > 1 else ""
    sys.stderr.write(f"\n{process}{sentence}\n")


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


# Leaving.


def explain_lost_process_at_exit() -> None:
    """Let a program that a lost process ended anywhere, not in training alone, report that."""
    hook = sys.excepthook

    def name(_: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            with explain_lost_process():
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
def explain_lost_process() -> Iterator[None]:
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
        return checks.first_line(message.partition(aborted)[2] or error)
    of_jax = message.startswith("UNKNOWN: Gloo ")  # without a status, JAX raises a ValueError
    if isinstance(error, RuntimeError) and keras.backend.backend() == "jax":
        import jax

        of_jax |= jax.distributed.is_initialized()
    is_loss = of_jax and any(sign in message.lower() for sign in _SIGNS)
    return checks.first_line(error) if is_loss else ""
