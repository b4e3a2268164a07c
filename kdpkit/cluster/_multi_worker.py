"""How a process of a TensorFlow cluster finds its role, and starts together with the others.

TensorFlow takes `TF_CONFIG` as it is, hangs when a process does not come, and reports of a port
that is taken no more than that no server could be started.
"""

import contextlib
import dataclasses
import inspect
import os
import signal
import threading
from collections.abc import Iterator, Mapping

import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended
from tensorflow.python.eager import context

from kdpkit import errors
from kdpkit._internal import checks, processes
from kdpkit.cluster import _joining, _network
from kdpkit.cluster._config import ClusterConfig

_MORE_SECONDS = 15  # for TensorFlow to end a start that takes too long itself, which it may not
_started: dict[tuple[ClusterConfig, str], tf.distribute.Strategy] = {}


def read(environ: Mapping[str, str] | None = None) -> ClusterConfig:
    """Read the cluster from the environment, and raise for one that does not train in step.

    Raises:
        ValueError: There is none, it is wrong, or it has other tasks than workers and a chief.
    """
    cluster = ClusterConfig.from_environment(environ)
    others = [role for role, _, _ in cluster.tasks if role not in ("chief", "worker")]
    if others or cluster.role == "evaluator":
        checks.fail(
            "The strategy 'multi_worker' trains on the tasks `worker`, and a `chief` at most.",
            others=others or [cluster.role],
            remedy="Parameter servers (`ps`) belong to the strategy 'parameter_server'; an "
            "`evaluator` is a program of its own.",
        )
    return cluster


def start(
    cluster: ClusterConfig, *, communication: str, start_timeout_seconds: int
) -> tf.distribute.Strategy:
    """Return the strategy of the cluster, once its processes are there; each time the same one.

    Raises:
        ValueError: A process did not come in time, the port of this one is taken, or TensorFlow
            has computed already.
    """
    if (cluster, communication) in _started:
        return _started[cluster, communication]
    if getattr(context.context(), "_initialized", False):
        checks.fail(
            "TensorFlow has computed before the processes were connected, or with others.",
            process=cluster.process_index,
            remedy="Call `select_strategy` first, before any tensor, variable or device list.",
        )
    complete, seconds = cluster, start_timeout_seconds
    if cluster.processes is not None:
        addresses = _network.exchange(
            cluster.coordinator, index=cluster.index, count=cluster.processes, seconds=seconds
        )
        complete = dataclasses.replace(cluster, workers=addresses, processes=None)
    strategy = _joined(complete, communication, seconds)
    _started[cluster, communication] = strategy
    return strategy


def _joined(cluster: ClusterConfig, communication: str, seconds: int) -> tf.distribute.Strategy:
    implementations = tf.distribute.experimental.CommunicationImplementation
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=implementations[communication.upper()]
    )
    os.environ["TF_CONFIG"] = cluster.to_tf_config()  # where TensorFlow looks
    _limit_waiting(cluster, seconds)
    if reason := _network.port_problem(checks.address("address", cluster.address)[1]):
        raise errors.InputError(_no_server(cluster, reason))
    _wait_for_others(cluster, seconds)
    try:
        with _every_logical_cpu(), _ending_after(seconds + _MORE_SECONDS, cluster):
            strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
            _compare_devices(cluster, len(strategy.extended.worker_devices), seconds)
    except errors.InputError:
        raise
    except (tf.errors.OpError, ValueError) as error:
        raise errors.InputError(_why_not(error, cluster, seconds)) from error
    _network.keep_local(cluster.address, [address for _, _, address in cluster.tasks])
    processes.explain_lost_process_at_exit()
    return strategy


def _compare_devices(cluster: ClusterConfig, own: int, seconds: int) -> None:
    """Raise, in all processes, unless each has as many devices as the others.

    TensorFlow does not check it, and would hang. It cannot be asked by a sum, which waits in the
    same way, so each process leaves its number with the first one.
    """
    exchange = context.context()
    exchange.set_config_key_value(f"kdpkit/devices/{cluster.process_index}", str(own))
    of_all = [
        int(exchange.get_config_key_value(f"kdpkit/devices/{index}", 1000 * seconds))
        for index in range(cluster.process_count)
    ]
    if len({*of_all}) > 1:
        checks.fail(
            "Every process of 'multi_worker' must have equally many devices.",
            devices_by_process=of_all,
            remedy="Let each see as many GPUs (CUDA_VISIBLE_DEVICES), or split CPUs alike.",
        )


def _limit_waiting(cluster: ClusterConfig, seconds: int) -> None:
    """Set how long TensorFlow waits for the first process, which is an hour otherwise."""
    # tensorflow/tensorflow#53098 has a wait without an end
    tasks = {"chief": int(cluster.chief is not None), "worker": len(cluster.workers)}
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


def _wait_for_others(cluster: ClusterConfig, seconds: int) -> None:
    """In the first process, wait until every other one has its port open.

    It must ask before TensorFlow starts: there it would wait without a limit, and without letting
    any other Python code run. So it would for a server that is not TensorFlow's.
    """
    others = [address for _, _, address in cluster.tasks[1:]]
    if cluster.process_index > 0:
        others = [cluster.coordinator]
    elif missing := [*_network.problems(others, seconds)]:
        checks.fail(
            f"{len(missing)} of {cluster.process_count} processes did not connect within "
            f"{seconds} seconds.",
            missing=missing,
            remedy="See their output, and check that TF_CONFIG has the same addresses in all.",
        )
    for address in filter(_network.is_another_program, others):
        checks.fail(
            "Another program listens at an address of the cluster.",
            address=address,
            remedy="Set an address with a free port in TF_CONFIG, or stop the program that has it.",
        )


def _why_not(error: Exception, cluster: ClusterConfig, seconds: int) -> str:
    message = str(error).strip().partition("\n")[0]
    this = f"Received: process {cluster.process_index} of {cluster.process_count}."
    if "Could not start gRPC server" in message:
        return _no_server(cluster, "it is another machine's address, or its port is taken")
    if "already configured" in message:
        return f"This process has tried to join others before. {this} Start a new process."
    return (
        f"The first process, {cluster.coordinator}, could not be joined within {seconds} seconds "
        f"({message}). {this} See its output, and check that TF_CONFIG is the same in all."
    )


def _no_server(cluster: ClusterConfig, reason: str) -> str:
    return (
        f"No server can be started at {cluster.address} ({reason}). Received: process "
        f"{cluster.process_index} of {cluster.process_count}. Set an address of its own machine, "
        "with a free port, for every process in TF_CONFIG."
    )


@contextlib.contextmanager
def _ending_after(seconds: int, cluster: ClusterConfig) -> Iterator[None]:
    """End the program, with a sentence, if what follows takes longer.

    Where a port is open but nobody joins, as when another program has taken it, the first process
    waits in TensorFlow, which lets no Python code run, so that nothing can be raised.
    """
    if not hasattr(signal, "alarm") or threading.current_thread() is not threading.main_thread():
        yield
        return
    others = ", ".join(a for _, _, a in cluster.tasks if a != cluster.address)
    sentence = (
        f"The processes did not come together within {seconds} seconds, and this one, "
        f"{cluster.process_index} of {cluster.process_count}, was ended. See what the others "
        f"({others}) print, and check that no other program has taken their ports."
    )
    former = signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it needs no Python to act
    with _joining.last_words(sentence):
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
    physical = tf.config.list_physical_devices("CPU")[:1]
    split = sum(len(tf.config.get_logical_device_configuration(one) or ()) for one in physical)
    expected = ["self", "cluster_resolver", "worker_device"]
    if split < 2 or original is None or [*inspect.signature(original).parameters] != expected:
        yield
        return

    def local_devices(
        extended: CollectiveAllReduceExtended,
        resolver: tf.distribute.cluster_resolver.ClusterResolver,
        worker: str,
    ) -> tuple[tuple[str, ...], str]:
        devices, kind = original(extended, resolver, worker)
        if kind == "CPU":
            devices = tuple(f"{worker}/device:CPU:{index}" for index in range(split))
        return devices, kind

    setattr(CollectiveAllReduceExtended, name, local_devices)
    try:
        yield
    finally:
        setattr(CollectiveAllReduceExtended, name, original)
