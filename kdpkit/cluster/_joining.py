"""Joins the processes of a cluster on JAX, and explains how a process was ended.

At exit JAX waits for other processes, even if they wait for this one, and it aborts when the first
process is gone. Here a process that fails does not wait, and a message explains the abort.
"""

import atexit
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from types import TracebackType

from kdpkit import errors
from kdpkit._internal import checks, processes, versions
from kdpkit.cluster import _launchers, _network
from kdpkit.cluster._config import ClusterConfig

# A program that prints the last line of its input when the process that writes it has ended.
_PRINT_LAST_LINE = """
import sys
line = ""
for line in sys.stdin: pass
sys.stderr.write(line and "\\n" + line)
"""


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
    `kdpkit.sharding.DataParallel()` spans the devices of all, and each passes its own examples of
    every batch, as `kdpkit.batches.ArrayBatches` does. When one ends with an error or is killed,
    the others end too, with an error that names the cause.

    With the coordinator at `localhost` or a loopback address, the processes only listen there, and
    no other machine can connect.

    Args:
        coordinator: `"host:port"` at which the first process can be reached, the same everywhere.
        process_count: Processes in all.
        process_index: Which one this is, from 0.
        heartbeat_timeout_seconds: Time without a heartbeat after which a process counts as lost,
            and the others end; JAX itself waits 100 seconds.
        start_timeout_seconds: How long to wait for the others to start.

    Raises:
        ValueError: Another backend, an address without a port, an index that is too large, a port
            that another program has, a process that does not come, or one that has joined or
            computed already.
    """
    checks.backend("`join_processes`", "jax")
    checks.address("coordinator", coordinator)
    config = ClusterConfig([coordinator], index=process_index, processes=process_count)
    index, count = config.index, config.process_count
    heartbeat = checks.integer("heartbeat_timeout_seconds", heartbeat_timeout_seconds)
    start_timeout = checks.integer("start_timeout_seconds", start_timeout_seconds)
    # Older ones mix up what processes send each other, or their data.
    versions.require_newer(
        "Several processes on JAX need JAX 0.10 and Keras 3.15 or later. Install these, or train "
        "in one process, which takes all devices of its machine.",
        least_keras=(3, 15),
    )
    import jax

    if jax.distributed.is_initialized():
        checks.fail("This process has joined others already.", coordinator=coordinator)
    if index == 0:
        _network.require_port(coordinator)
    is_local = _network.are_loopback([coordinator])
    if is_local:
        versions.let_gloo_listen_at("localhost")
    message = ExitMessage(
        f"Process {index} of {count} waited {start_timeout} seconds for others that did not come "
        f"to {coordinator}. Check that all were started, with one address that all can reach, and "
        "see their output."
    )
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes=count,
            process_id=index,
            heartbeat_timeout_seconds=heartbeat,
            initialization_timeout=start_timeout,
            coordinator_bind_address=coordinator if is_local else None,
        )
    except RuntimeError as error:
        message.close()
        raise errors.InputError(
            f"Process {index} of {count} could not join the others at {coordinator} "
            f"({checks.first_line(error)}). Check that all were started, with one address, and "
            "that nothing computes on JAX before they join."
        ) from error
    other = "the first process, which all others need," if index else "another process"
    message.replace(
        f"Process {index} of {count} was ended from outside, or {other} is gone: its output has "
        f"the reason. {processes.GO_ON}"
    )
    _leave_without_waiting_after_errors(message.close)


def _leave_without_waiting_after_errors(before: Callable[[], None]) -> None:
    """Let this process exit without waiting for others if it failed; call `before` at its exit."""
    hook = sys.excepthook

    def leave_and_report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        processes.leave_without_waiting(1)
        hook(kind, error, trace)

    sys.excepthook = leave_and_report
    # Exit handlers run in reverse order: `before`, ours, then JAX's, which waits for the others.
    atexit.register(processes.leave)
    atexit.register(before)
    processes.explain_lost_process_at_exit()


class ExitMessage:
    """A sentence that another process prints if this one is ended before it can print it."""

    def __init__(self, sentence: str) -> None:
        reading, self._input = os.pipe()
        self._watcher = subprocess.Popen(  # noqa: S603 a fixed command
            [sys.executable, "-S", "-c", _PRINT_LAST_LINE],
            stdin=reading,
            start_new_session=True,  # so that Ctrl-C does not end it
        )
        os.close(reading)
        self.replace(sentence)

    def replace(self, sentence: str) -> None:
        """Print this sentence instead of the one before."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._input, sentence.encode() + b"\n")

    def close(self) -> None:
        """Print nothing any more."""
        self._watcher.kill()
        self._watcher.wait()
        os.close(self._input)


def require_joined(remedy: str) -> None:
    """Raise if this process was started with others and has not joined them.

    Each would train the same model from the same data, and write to the same files.
    """
    launcher = _launchers.started_by(os.environ)
    if processes.count() > 1 or launcher is None:
        return
    config = ClusterConfig.from_environment()
    if config.process_count > 1 and not config.parameter_servers:
        checks.fail(
            f"{launcher.name} started this process with others, and each would train a copy.",
            process=config.process_index,
            processes=config.process_count,
            remedy=f"{remedy} If each is to train a model of its own, unset "
            f"{', '.join(launcher.marks)} in the environment.",
        )
