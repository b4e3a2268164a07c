"""How a process of a TensorFlow cluster finds its place, and starts together with the others.

TensorFlow takes `TF_CONFIG` as it is, waits for ever for a process that does not come, and says of
a port that is taken no more than that no server could be started.
"""

import contextlib
import inspect
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended
from tensorflow.python.eager import context

from kdpkit import _checks, _processes

_JOBS = ("chief", "worker")  # in the order in which TensorFlow numbers their tasks
_MORE_SECONDS = 15  # for TensorFlow to end a start that takes too long itself, which it may not
_started: dict[Any, Any] = {}
_EXAMPLE = (
    'For the first of two processes it is {"cluster": {"worker": ["10.0.0.1:9876", '
    '"10.0.0.2:9876"]}, "task": {"type": "worker", "index": 0}}.'
)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The processes that train together, by their addresses, and which of them this is.

    Args:
        chief: The address of a process with that name, or none.
        workers: The addresses of the others, or of all.
        index: The place of this process; that of the chief, or of worker 0, is 0.
    """

    chief: tuple[str, ...]
    workers: tuple[str, ...]
    index: int

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of all processes; that of the one which writes files is the first."""
        return self.chief + self.workers


def read_tf_config(text: str) -> Cluster:
    """Read and check what `TF_CONFIG` says.

    Raises:
        ValueError: It is no JSON, has no cluster or no task, describes parameter servers, or gives
            this process a place that the cluster does not have.
    """
    try:
        config = json.loads(text)
    except ValueError as error:
        raise _checks.InputError(
            f"TF_CONFIG is no JSON ({error}). Received: {_shortened(text)!r}. {_EXAMPLE}"
        ) from error
    cluster = config.get("cluster") if isinstance(config, dict) else None
    if not isinstance(cluster, dict) or not cluster:
        _refuse("TF_CONFIG has no `cluster`, the addresses of all processes.", TF_CONFIG=config)
    jobs = {job: addresses for job, addresses in cluster.items() if addresses}
    if jobs.keys() - {*_JOBS}:
        _checks.refuse(
            "The strategy 'multi_worker' trains on the tasks `worker`, and a `chief` at most.",
            tasks=sorted(jobs),
            remedy="Parameter servers (`ps`) belong to the strategy 'parameter_server'; an "
            "`evaluator` is a program of its own.",
        )
    _check_addresses(jobs)
    return _with_place(jobs, config.get("task"))


def _check_addresses(jobs: dict[str, Any]) -> None:
    all_of_them = [address for job in _JOBS for address in jobs.get(job, [])]
    for address in all_of_them:
        host, _, port = str(address).rpartition(":")
        if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            _refuse("Every address in TF_CONFIG must be a host and a port.", address=address)
    if len(set(all_of_them)) < len(all_of_them):
        _refuse("Every process in TF_CONFIG needs an address of its own.", addresses=all_of_them)
    if len(jobs.get("chief", [])) > 1:
        _refuse("There can be one `chief`.", chief=jobs["chief"])


def _with_place(jobs: dict[str, list[str]], task: Any) -> Cluster:
    task = task if isinstance(task, dict) else {}
    job, index = task.get("type"), task.get("index")
    if job is None or index is None:
        _refuse("TF_CONFIG has no `task` that says which process this is.", task=task or None)
    if job not in jobs:
        _refuse("The `task` in TF_CONFIG is of a type that its cluster has not.", type=job)
    number = _checks.integer("index", index, minimum=0)
    if number >= len(jobs[job]):
        _refuse(
            f"The `task` in TF_CONFIG is out of place: its cluster has {len(jobs[job])} tasks of "
            f"the type {job!r}, numbered from 0.",
            index=number,
        )
    chief, workers = (tuple(jobs.get(name, ())) for name in _JOBS)
    return Cluster(
        chief=chief, workers=workers, index=number + (len(chief) if job == "worker" else 0)
    )


def _refuse(problem: str, **received: Any) -> NoReturn:
    _checks.refuse(problem, **received, remedy=_EXAMPLE)


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


def start(cluster: Cluster, *, communication: str, start_timeout_seconds: int) -> Any:
    """Give the strategy of the cluster, once its processes are there.

    Asked again, as by a recipe that a notebook runs twice, it gives the same one.

    Raises:
        ValueError: A process did not come in time, the port of this one is taken, or TensorFlow
            has computed already.
    """
    if (cluster, communication) in _started:
        return _started[cluster, communication]
    if getattr(context.context(), "_initialized", False):
        _checks.refuse(
            "TensorFlow has computed before the processes were connected, or with others.",
            process=cluster.index,
            remedy="Call `select_strategy` first, before any tensor, variable or device list.",
        )
    strategy = _joined(cluster, communication, start_timeout_seconds)
    _started[cluster, communication] = strategy
    return strategy


def _joined(cluster: Cluster, communication: str, start_timeout_seconds: int) -> Any:
    wanted = communication.upper()
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation[wanted]
    )
    _limit_waiting(cluster, start_timeout_seconds)
    if cluster.index == 0:
        _wait_for_others(cluster, start_timeout_seconds)
    try:
        with _every_logical_cpu(), _ending_after(start_timeout_seconds + _MORE_SECONDS, cluster):
            return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    except (tf.errors.OpError, ValueError) as error:
        raise _checks.InputError(_why_not(error, cluster, start_timeout_seconds)) from error


def _limit_waiting(cluster: Cluster, seconds: int) -> None:
    """Set how long TensorFlow waits for the first process, which is an hour otherwise."""
    tasks = {"chief": len(cluster.chief), "worker": len(cluster.workers)}
    jobs = [
        coordination_config_pb2.CoordinatedJob(name=job, num_tasks=count)
        for job, count in tasks.items()
        if count
    ]
    context.context().configure_coordination_service(
        "standalone",
        service_leader=f"/job:{jobs[0].name}/replica:0/task:0",
        cluster_register_timeout_in_ms=1000 * seconds,
        coordinated_jobs=jobs,
    )


def _wait_for_others(cluster: Cluster, seconds: int) -> None:
    """Wait until every other process has its port open.

    The first process must ask before TensorFlow starts: there it would wait without a limit, and
    without letting any other Python code run.
    """
    end = time.monotonic() + seconds
    missing = list(cluster.addresses[1:])
    while missing := [address for address in missing if not _is_open(address)]:
        if time.monotonic() > end:
            _checks.refuse(
                f"{len(missing)} of {len(cluster.addresses)} processes did not come within "
                f"{seconds} seconds.",
                missing=missing,
                remedy="See what they say, and that TF_CONFIG has the same addresses in all.",
            )
        time.sleep(0.1)


def _is_open(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=2):
        return True
    return False


def _why_not(error: Exception, cluster: Cluster, seconds: int) -> str:
    said = str(error).strip().partition("\n")[0]
    this = f"Received: process {cluster.index} of {len(cluster.addresses)}."
    address = cluster.addresses[cluster.index]
    if "Could not start gRPC server" in said:
        return (
            f"No server can be started at {address} (the port is taken, or the address is another "
            f"machine's). {this} Give every process in TF_CONFIG a free port of its own machine."
        )
    if "already configured" in said:
        return f"This process has tried to join others before. {this} Start a new process."
    return (
        f"The first process, {cluster.addresses[0]}, could not be joined within {seconds} seconds "
        f"({said}). {this} See what it says, and that TF_CONFIG has the same addresses in all."
    )


@contextlib.contextmanager
def _ending_after(seconds: int, cluster: Cluster) -> Iterator[None]:
    """End the program, with a sentence, if what follows takes longer.

    Where a port is open but nobody joins, as when another program has taken it, the first process
    waits in TensorFlow, which lets no Python code run, so that nothing can be raised.
    """
    if not hasattr(signal, "alarm") or threading.current_thread() is not threading.main_thread():
        yield
        return
    others = ", ".join(a for a in cluster.addresses if a != cluster.addresses[cluster.index])
    sentence = (
        f"\nThe processes did not come together within {seconds} seconds, and this one, "
        f"{cluster.index} of {len(cluster.addresses)}, was ended. See what the others ({others}) "
        "say, and that no other program has taken their ports.\n"
    )
    former = signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it needs no Python to act
    with _processes.last_words(sentence):
        signal.alarm(seconds)
        try:
            yield
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, former or signal.SIG_DFL)


@contextlib.contextmanager
def _every_logical_cpu() -> Iterator[None]:
    """Put a replica on every logical CPU, where TensorFlow takes the first one alone.

    As a mirrored strategy does: so several devices in each process can be tried without GPUs.
    """
    name = "_initialize_local_devices"
    original = getattr(CollectiveAllReduceExtended, name, None)
    split = _logical_cpus()
    expected = ["self", "cluster_resolver", "worker_device"]
    if split < 2 or original is None or [*inspect.signature(original).parameters] != expected:
        yield
        return

    def local_devices(extended: Any, resolver: Any, worker: str) -> tuple[tuple[str, ...], str]:
        devices, kind = original(extended, resolver, worker)
        if kind == "CPU":
            devices = tuple(f"{worker}/device:CPU:{index}" for index in range(split))
        return devices, kind

    setattr(CollectiveAllReduceExtended, name, local_devices)
    try:
        yield
    finally:
        setattr(CollectiveAllReduceExtended, name, original)


def _logical_cpus() -> int:
    physical = tf.config.list_physical_devices("CPU")
    return len(tf.config.get_logical_device_configuration(physical[0]) or [0]) if physical else 0
