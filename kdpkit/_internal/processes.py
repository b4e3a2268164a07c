"""The processes that train together: their count, what they exchange, and lost ones.

JAX hangs where processes disagree about what comes next, so that is checked. How they join is in
`kdpkit/cluster`.
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


# JAX and its transport report these when another process is gone.
_SIGNS = ("connection closed by peer", "connection reset", "broken pipe", "heartbeat", "gloo")
_DIFFERS = "is not the same on each process"  # JAX reports it of a value for all devices.
GO_ON = "Start all processes again; they resume from the last state that was saved."


def count() -> int:
    """Number of processes; 1 unless JAX has more, or TensorFlow started some."""
    return _position()[1]


def index() -> int:
    """Return the number of this process; the first, which writes files, is 0."""
    return _position()[0]


def _position() -> tuple[int, int]:
    if keras.backend.backend() == "jax":
        import jax

        return int(jax.process_index()), int(jax.process_count())
    if keras.backend.backend() != "tensorflow":
        return 0, 1
    from tensorflow.python.eager import context

    # A strategy that joins a cluster sets this; there is no public way to read it.
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


def require_equal(
    what: str,
    numbers: Sequence[int],
    *,
    remedy: str,
    strategy: "tf.distribute.Strategy | None" = None,
) -> None:
    """Raise, in every process, for numbers, which `what` names, that are not the same in all.

    Every process must call it at the same point of the program. On TensorFlow the strategy spans
    the processes.
    """
    if count() == 1:
        return
    by_process = gathered(numbers, strategy)
    if (by_process != by_process[0]).any():
        checks.fail(
            f"{what} must be the same in all processes.",
            by_process=[tuple(map(int, row)) for row in by_process],
            remedy=remedy,
        )


def require_different(what: str, fingerprint: int, *, remedy: str) -> None:
    """Raise, in every process, for a fingerprint that two of them have in common."""
    if count() == 1:
        return
    by_process = gathered([fingerprint]).ravel().tolist()
    same = [i for i, number in enumerate(by_process) if by_process.count(number) > 1]
    if same:
        checks.fail(f"{what} must differ between processes.", the_same_in=same, remedy=remedy)


def gathered(
    numbers: Sequence[int] | np.ndarray, strategy: "tf.distribute.Strategy | None" = None
) -> np.ndarray:
    """Return the numbers of all processes, a row for each; on TensorFlow by their strategy."""
    if keras.backend.backend() == "jax" or strategy is None:
        from jax.experimental import multihost_utils

        # JAX has no 64-bit integers by default, so each is sent as two of 32 bits.
        halves = np.asarray(numbers, np.int64).view(np.int32)
        return np.asarray(multihost_utils.process_allgather(halves)).view(np.int64)
    import tensorflow as tf

    by_process = np.zeros((count(), len(numbers)), np.int64)
    by_process[index()] = numbers
    with tf.device("CPU:0"):
        total = strategy.reduce(tf.distribute.ReduceOp.SUM, tf.constant(by_process), axis=None)
    return total.numpy()


_preemption_checks = itertools.count(1)  # of the whole process, which JAX numbers


def reached_preemption() -> bool:
    """Return whether all processes of JAX must stop now, because one got a SIGTERM.

    Every process must call this at the same points of the program.
    """
    from jax.experimental import multihost_utils

    return bool(multihost_utils.reached_preemption_sync_point(next(_preemption_checks)))


def explain_lost_process_at_exit() -> None:
    """Let the program's last traceback report a lost process, also outside of training."""
    hook = sys.excepthook

    def explain(_: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            with explain_lost_process():
                raise error
        except BaseException as explained:
            hook(type(explained), explained, trace)

    sys.excepthook = explain


_exit_codes: list[int] = []  # the first one counts


def leave_without_waiting(code: int) -> None:
    """Set the exit code with which `leave` ends this process; the first one counts."""
    _exit_codes.append(code)


def leave() -> None:
    """End at once if there is an exit code, and do not wait for the other processes."""
    if _exit_codes:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_codes[0])


@contextlib.contextmanager
def explain_lost_process() -> Iterator[None]:
    """Raise one sentence in place of a transport's error, or of JAX's about different values."""
    try:
        yield
    except Exception as error:  # The frameworks' kinds cannot be imported everywhere.
        if _DIFFERS in str(error):  # Keras may have raised another error from JAX's
            raise errors.InputError(
                "A variable has not the same value in all processes: each drew other random "
                "numbers. Call `keras.utils.set_random_seed(0)` in every process before the model "
                "is built."
            ) from error
        if isinstance(error, errors.ProcessLostError) or not (sign := _sign_of_loss(error)):
            raise
        leave_without_waiting(errors.LEFT_ALONE)
        if keras.backend.backend() == "tensorflow":  # On JAX `join_processes` registers it.
            atexit.register(leave)
        raise errors.ProcessLostError(
            f"Another process of this training is gone ({sign}); its output has the reason. {GO_ON}"
        ) from error


def _sign_of_loss(error: Exception) -> str:
    """Return what an error reports of a lost process; empty if it reports something else."""
    message = str(error)
    if type(error).__module__.startswith("tensorflow."):
        aborted = "Collective ops is aborted by: "
        if count() == 1 or (aborted not in message and type(error).__name__ != "UnavailableError"):
            return ""
        silent = re.findall(r"^/job:(\w+)/replica:0/task:(\d+)$", message, re.MULTILINE)
        if silent:
            return ", ".join(f"{job} {task}" for job, task in silent) + " shows no sign of life"
        return checks.first_line(message.partition(aborted)[2] or error)
    of_jax = message.startswith("UNKNOWN: Gloo ")  # a ValueError, as it has no known status
    if isinstance(error, RuntimeError) and keras.backend.backend() == "jax":
        import jax

        of_jax |= jax.distributed.is_initialized()
    is_loss = of_jax and any(sign in message.lower() for sign in _SIGNS)
    return checks.first_line(error) if is_loss else ""
