"""Start the processes of a cluster on this machine, watch, stop and restart them together.

    kdpkit launch --workers 2 --max-restarts 3 -- python train.py

Every process runs the same command and finds its role in its environment:

    config = kdpkit.cluster.ClusterConfig.from_environment()
"""

import contextlib
import os
import random
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from kdpkit import cluster
from kdpkit._internal import checks
from kdpkit.launch._run import Failure, Report, Run, Task

__all__ = ["Failure", "Report", "Task", "launch", "tasks"]

_HOSTS = {"loopback": "localhost", "all": "0.0.0.0"}  # noqa: S104 as users ask for
_PORTS = range(15_000, 32_768)  # below Linux' ephemeral ports


def launch(
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

    The processes are only reached from this machine: their addresses are `localhost`, the only one
    where JAX listens, and on Linux kdpkit closes TensorFlow's servers to others. SECURITY.md

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
        stdout: Where the stdout of the processes goes; None is that of this process.

    Returns:
        How it ended. Its `exit_code` is 0 on success, else that of the process that failed first
        (not of those that failed as a consequence, which exit with 43), 128 plus the number of a
        signal, 42 if SIGTERM stopped programs that saved their state, 130 after Ctrl-C.

    Raises:
        ValueError: An argument is invalid, or the command does not exist.

    >>> launch(["echo", "hello"], workers=1).exit_code
    worker 0 | hello
    0
    """
    return Run(
        lambda: tasks(
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


def tasks(
    command: Sequence[str],
    *,
    workers: int,
    parameter_servers: int = 0,
    gpus_per_worker: int | None = None,
    listen: str = "loopback",
) -> tuple[Task, ...]:
    """Return the tasks that `launch` would start, on ports that are free now.

    >>> [task.name for task in tasks(["echo"], workers=2, parameter_servers=1)]
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
    made = []
    for role, index, _ in config.tasks:
        own = config.for_task(role, index)
        variables = own.to_environment()
        if gpus:
            variables["CUDA_VISIBLE_DEVICES"] = gpus[index] if role == "worker" else "-1"
        made.append(Task("chief" if role == "chief" else f"{role} {index}", own, words, variables))
    return tuple(made)


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
            probe = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("", port))
                ports.append(port)
            if len(ports) == count:
                break
        else:
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
