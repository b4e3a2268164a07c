"""Joining the processes of a cluster, and what is printed where a process cannot print itself.

JAX waits at the exit for others that wait for it, and aborts when the first process is gone. Here
the first is cut short, and the second explained.
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

# Runs as a process of its own, and prints the last line of its input when the writer has ended.
_LAST_WORDS = """
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
    checks.backend("`join_processes`", "jax")
    checks.address("coordinator", coordinator)
    here = ClusterConfig([coordinator], index=process_index, processes=process_count)
    heartbeat = checks.integer("heartbeat_timeout_seconds", heartbeat_timeout_seconds)
    start_timeout = checks.integer("start_timeout_seconds", start_timeout_seconds)
    versions.check_processes_are_supported()
    _join(coordinator, here.process_count, here.index, heartbeat, start_timeout)


def _join(coordinator: str, count: int, this: int, heartbeat: int, start_timeout: int) -> None:
    import jax

    if jax.distributed.is_initialized():
        checks.fail("This process has joined others already.", coordinator=coordinator)
    if this == 0:
        _network.require_port(coordinator)
    is_local = _network.are_loopback([coordinator])
    if is_local:
        versions.let_gloo_listen_at("localhost")
    last_words = LastWords(
        f"Process {this} of {count} waited {start_timeout} seconds for others that did not come to "
        f"{coordinator}. Check that all were started, with one address that all can reach, and see "
        "their output."
    )
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes=count,
            process_id=this,
            heartbeat_timeout_seconds=heartbeat,
            initialization_timeout=start_timeout,
            coordinator_bind_address=coordinator if is_local else None,
        )
    except RuntimeError as error:
        last_words.close()
        raise errors.InputError(
            f"Process {this} of {count} could not join the others at {coordinator} "
            f"({checks.first_line(error)}). Check that all were started, with one address, and "
            "that nothing computes on JAX before they join."
        ) from error
    other = "the first process, which all others need," if this else "another process"
    last_words.become(
        f"Process {this} of {count} was ended from outside, or {other} is gone: its output has the "
        f"reason. {processes.GO_ON}"
    )
    _leave_without_waiting_after_errors(last_words.close)


def _leave_without_waiting_after_errors(before: Callable[[], None]) -> None:
    """Let this process end without a wait for others if it failed, and never without a word."""
    hook = sys.excepthook

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        processes.leave_without_waiting(1)
        hook(kind, error, trace)

    sys.excepthook = note
    atexit.register(processes.leave)  # runs before JAX's own, which waits for the others
    atexit.register(before)  # and this before both
    processes.explain_lost_process_at_exit()


class LastWords:
    """A sentence that is printed if this process ends in a way that lets it print nothing."""

    def __init__(self, sentence: str) -> None:
        reading, self._input = os.pipe()
        self._watcher = subprocess.Popen(  # noqa: S603 a fixed command
            [sys.executable, "-S", "-c", _LAST_WORDS],
            stdin=reading,
            start_new_session=True,  # Ctrl-C is not for it
        )
        os.close(reading)
        self.become(sentence)

    def become(self, sentence: str) -> None:
        """Print this from now on."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._input, sentence.encode() + b"\n")

    def close(self) -> None:
        """Print nothing: this process ends in order."""
        self._watcher.kill()
        self._watcher.wait()
        os.close(self._input)


def require_joined(remedy: str) -> None:
    """Raise if this process was started with others and has not joined them.

    Each would train the same model from the same data, and write to the same files.
    """
    launcher = _launchers.of(os.environ)
    if processes.count() > 1 or launcher is None:
        return
    here = ClusterConfig.from_environment()
    if here.process_count > 1 and not here.parameter_servers:
        checks.fail(
            f"{launcher.name} started this process with others, and each would train a copy.",
            process=here.process_index,
            processes=here.process_count,
            remedy=f"{remedy} If each is to train a model of its own, unset "
            f"{', '.join(launcher.marks)} in the environment.",
        )
