"""Starts the processes of a synchronous TensorFlow cluster together.

TensorFlow hangs when a process is missing or has another number of devices, so all processes
exchange addresses and numbers of devices before it starts.
"""

import contextlib
import dataclasses
import os
import signal
import threading
from collections.abc import Iterator

import tensorflow as tf
from tensorflow.python.eager import context

from kdpkit import errors
from kdpkit._internal import checks, processes
from kdpkit.cluster import _joining, _network
from kdpkit.cluster._config import ClusterConfig

_started: dict[tuple[ClusterConfig, str], tf.distribute.Strategy] = {}


def start(*, communication: str, start_timeout_seconds: int) -> tf.distribute.Strategy:
    """Return the strategy of the cluster in the environment; each time the same one.

    Raises:
        ValueError: There is no cluster, or it is wrong or has parameter servers; a process did not
            come in time or has other devices; the port of this one is taken, or TensorFlow has
            computed already.
    """
    cluster = ClusterConfig.from_environment()
    if (cluster, communication) in _started:
        return _started[cluster, communication]
    if cluster.parameter_servers:
        checks.fail(
            "The strategy 'multi_worker' trains on the tasks `worker`, and a `chief` at most.",
            parameter_servers=cluster.parameter_servers,
            remedy="Parameter servers (`ps`) belong to the strategy 'parameter_server'.",
        )
    if getattr(context.context(), "_initialized", False):
        checks.fail(
            "TensorFlow has computed before the processes were connected, or with others.",
            process=cluster.process_index,
            remedy="Call `select_strategy` first, before any tensor, variable or device list.",
        )
    complete = _with_all_addresses(cluster, start_timeout_seconds)
    implementations = tf.distribute.experimental.CommunicationImplementation
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=implementations[communication.upper()]
    )
    os.environ["TF_CONFIG"] = complete.to_tf_config()  # which the strategy reads
    try:
        with _ending_after(start_timeout_seconds, complete):
            strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    except (tf.errors.OpError, ValueError) as error:
        raise errors.InputError(
            f"The processes could not be connected ({checks.first_line(error)}). {_this(complete)} "
            "Set an address of its own machine, with a free port, for every process in TF_CONFIG, "
            "and start new processes."
        ) from error
    _network.keep_local(str(complete.address), [address for _, _, address in complete.tasks])
    processes.explain_lost_process_at_exit()
    _started[complete, communication] = strategy  # TF_CONFIG now describes the complete cluster
    return strategy


def _with_all_addresses(cluster: ClusterConfig, seconds: int) -> ClusterConfig:
    """Wait for all processes, and return the cluster with the address of each.

    TensorFlow checks neither that all are there nor that they have as many devices, and would hang
    (tensorflow/tensorflow#53098).
    """
    if cluster.process_index and cluster.address:
        _network.require_port(cluster.address)
    exchanged = _network.exchange(
        cluster.address,
        _count_devices(),
        cluster.coordinator,
        index=cluster.process_index,
        count=cluster.process_count,
        seconds=seconds,
    )
    addresses, devices = zip(*exchanged, strict=True)
    if len({*devices}) > 1:
        checks.fail(
            "Every process of 'multi_worker' must have equally many devices.",
            devices_by_process=devices,
            remedy="Let each see as many GPUs (CUDA_VISIBLE_DEVICES), or split the CPUs equally.",
        )
    workers = addresses[cluster.chief is not None :]
    return dataclasses.replace(cluster, workers=workers, processes=None)


def _count_devices() -> int:
    """Count the logical GPUs, or CPUs where there is no GPU, before TensorFlow starts."""
    devices = next(filter(None, map(tf.config.list_physical_devices, ("GPU", "CPU"))))
    logical = tf.config.get_logical_device_configuration
    return sum(len(logical(device) or [device]) for device in devices)


def _this(cluster: ClusterConfig) -> str:
    return f"Received: process {cluster.process_index} of {cluster.process_count}."


@contextlib.contextmanager
def _ending_after(seconds: int, cluster: ClusterConfig) -> Iterator[None]:
    """End the program, with a sentence, if the block takes longer.

    If a process is lost now, or its port cannot be reached, the others wait inside TensorFlow,
    which runs no Python code, so that nothing can be raised.
    """
    if not hasattr(signal, "alarm") or threading.current_thread() is not threading.main_thread():
        yield
        return
    addresses = checks.listed(address for _, _, address in cluster.tasks)
    sentence = (
        f"The processes were not connected within {seconds} seconds, and this one was ended. "
        f"{_this(cluster)} See what the others print, and check that every one of {addresses} can "
        "be reached from all of them."
    )
    former = signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the default needs no Python code
    with contextlib.closing(_joining.ExitMessage(sentence)):
        signal.alarm(seconds)
        try:
            yield
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, former or signal.SIG_DFL)
