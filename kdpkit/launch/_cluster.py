"""The processes of a local cluster: their ports, roles and GPUs."""

import contextlib
import dataclasses
import os
import random
import socket
from collections.abc import Sequence

from kdpkit import cluster
from kdpkit._internal import checks
from kdpkit.launch._run import Run, Task

_PORTS = range(15_000, 32_768)  # below Linux' ephemeral ports


def launch(
    command: Sequence[str],
    *,
    workers: int,
    parameter_servers: int = 0,
    max_restarts: int = 0,
    gpus_per_worker: int | None = None,
    grace_seconds: float = 30.0,
) -> int:
    """Run a command as several processes on this machine that train together.

    Each process gets TF_CONFIG and KERAS_DISTRIBUTION_* of a cluster on free ports; KERAS_BACKEND
    selects the backend. Their output is printed line by line, each with the name of its process.
    The call returns when all workers have ended, or with parameter servers the chief, which workers
    and servers serve. If one fails, the others are stopped, and all start again on other ports as
    long as restarts are left. No process or child process outlives this call, even if the launcher
    is killed. SIGTERM and Ctrl-C are forwarded, and a second Ctrl-C stops everything at once; they
    are only handled in the main thread.

    Only this machine can connect to the processes: see SECURITY.md.

    Args:
        command: The command as a list, such as `["python", "train.py"]`.
        workers: Number of workers.
        parameter_servers: Number of parameter servers; if positive, a chief is started too.
        max_restarts: Number of restarts allowed in total.
        gpus_per_worker: GPUs that each worker sees, different ones for each; with None every worker
            sees all.
        grace_seconds: How long a process may take to exit after a signal before it is killed.

    Returns:
        The exit code: 0 on success, else that of the process that failed first (not of those that
        failed as a consequence, which exit with 43), 128 plus the number of a signal, 42 if SIGTERM
        stopped programs that saved their state, 130 after Ctrl-C.

    Raises:
        ValueError: An argument is invalid, or the command does not exist.

    >>> launch(["echo", "hello"], workers=1)
    worker 0 | hello
    0
    """
    workers = checks.integer("workers", workers)
    servers = checks.integer("parameter_servers", parameter_servers, minimum=0)
    words = checks.strings("command", command)
    if not words:
        checks.fail("`command` must be the words of a command.", command=words)
    gpus = _gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), workers, gpus_per_worker)
    return Run(
        lambda: _tasks(words, workers, servers, gpus),
        max_restarts=checks.integer("max_restarts", max_restarts, minimum=0),
        grace_seconds=checks.number("grace_seconds", grace_seconds, minimum=0),
    ).run()


def _tasks(words: tuple[str, ...], workers: int, servers: int, gpus: list[str]) -> tuple[Task, ...]:
    """Return the processes to start, on ports that are free now."""
    addresses = [f"localhost:{port}" for port in _free_ports(workers + servers + bool(servers))]
    config = cluster.ClusterConfig(
        addresses[:workers],
        parameter_servers=addresses[workers : workers + servers],
        chief=addresses[-1] if servers else None,
    )
    tasks = []
    for role, index, _ in config.tasks:
        variables = dataclasses.replace(config, role=role, index=index).to_environment()
        if gpus:
            variables["CUDA_VISIBLE_DEVICES"] = gpus[index] if role == "worker" else "-1"
        name = "chief" if role == "chief" else f"{role} {index}"
        tasks.append(Task(name, words, variables, serves=bool(servers) and role != "chief"))
    return tuple(tasks)


def _free_ports(count: int) -> list[int]:
    """Find free ports; the sockets stay open until the last is found."""
    ports: list[int] = []
    with contextlib.ExitStack() as sockets:
        for port in random.sample(_PORTS, len(_PORTS)):
            probe = sockets.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("", port))
                ports.append(port)
            if len(ports) == count:
                break
    return ports


def _gpus(visible: str | None, workers: int, gpus_per_worker: int | None) -> list[str]:
    """Return CUDA_VISIBLE_DEVICES of each worker; an empty list if every worker sees all."""
    if gpus_per_worker is None:
        return []
    size = checks.integer("gpus_per_worker", gpus_per_worker)
    total = workers * size
    names = list(map(str, range(total)))
    if visible is not None:
        names = [name for name in visible.split(",") if name]
    if len(names) < total:
        checks.fail(
            "More GPUs were asked for than CUDA_VISIBLE_DEVICES has.",
            workers=workers,
            gpus_per_worker=size,
            CUDA_VISIBLE_DEVICES=visible,
        )
    return [",".join(names[first : first + size]) for first in range(0, total, size)]
