"""The processes of a `ParameterServerStrategy`: the servers, and the chief's connections to them.

The steps that `fit` has on them are in `kdpkit/training/tensorflow/_servers.py`.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kdpkit import cluster
from kdpkit._internal import checks
from kdpkit.cluster import _network

_START_TIMEOUT_SECONDS = 120.0  # as `sharding.join_processes` waits
_RETRY_SECONDS = 60.0  # in which a call that TensorFlow cancels is repeated
_PAUSE_SECONDS = 0.5  # between two attempts

# TensorFlow raises these, even of calls to servers that run, while it reconnects a worker.
_TEMPORARY = (tf.errors.CancelledError, tf.errors.UnavailableError, tf.errors.AbortedError)


def serve_if_server() -> None:
    """Serve a chief, if this process is a worker or a parameter server; else return.

    All processes of `ParameterServerStrategy` run one program, and call this first, after imports
    of packages with operations of their own, such as tensorflow_text. Only the chief returns, and
    calls `select_strategy("parameter_server")`; without parameter servers in TF_CONFIG all return.
    A server serves until it is ended: by `kdpkit launch` once the chief has ended, elsewhere by
    whoever started it. A worker may be killed and started again while the chief trains.

    Raises:
        ValueError: A cluster that cannot work, or an address at which nothing can be served.
    """
    if cluster.source() != "TF_CONFIG":
        return
    config = cluster.ClusterConfig.from_environment()
    if not config.parameter_servers or config.role == "chief":
        return
    resolver = _resolver(config)
    # A step occupies a thread for each worker: on few cores a worker would wait for itself.
    threads = max(os.cpu_count() or 1, len(config.workers) + 1)
    settings = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=threads)
    spec = resolver.cluster_spec()
    server = tf.distribute.Server(spec, config.role, config.index, "grpc", settings)
    _network.keep_local(str(config.address), [address for _, _, address in config.tasks])
    sys.stdout.write(f"{config.role} {config.index} serves at {config.address}.\n")
    sys.stdout.flush()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python would notice it only after `join`.
    server.join()


def connect() -> tf.distribute.ParameterServerStrategy:
    """Return the chief's `ParameterServerStrategy` once all workers and servers listen."""
    config = cluster.ClusterConfig.from_environment()
    resolver = _resolver(config)
    if config.role != "chief":
        checks.fail(
            "Only the chief has the strategy; workers and parameter servers serve it.",
            role=config.role,
            remedy="Call `kdpkit.strategies.serve_if_server()` first; it returns in the chief.",
        )
    servers = {a: f"{role} {index}" for role, index, a in config.tasks if role != "chief"}
    if problems := _network.problems([*servers], _START_TIMEOUT_SECONDS):  # TensorFlow would hang.
        checks.fail(
            f"The chief waited {_START_TIMEOUT_SECONDS:.0f} seconds for processes that did "
            "not come.",
            missing={servers[address]: address for address in problems},
            remedy="Check that all were started, with one TF_CONFIG, and that each begins "
            "with `kdpkit.strategies.serve_if_server()`.",
        )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    _network.keep_local(str(config.address), [address for _, _, address in config.tasks])
    return strategy


def addresses(strategy: tf.distribute.Strategy, role: str) -> list[str]:
    # The public `cluster_resolver` of this strategy is None in TensorFlow 2.21.
    return list(strategy._cluster_resolver.cluster_spec().job_tasks(role))


def lost_servers(strategy: tf.distribute.Strategy) -> list[str]:
    servers = enumerate(addresses(strategy, "ps"))
    return [f"ps {index}" for index, address in servers if _network.problem(address)]


def insist(strategy: tf.distribute.Strategy, call: Callable[[], Any]) -> Any:
    """Make a call of the chief, and repeat it while TensorFlow cancels it to reconnect a worker."""
    deadline = time.monotonic() + _RETRY_SECONDS
    while True:
        try:
            return call()
        except _TEMPORARY as error:
            is_over = time.monotonic() >= deadline
            if is_over or is_server_replaced(error) or lost_servers(strategy):
                raise
            time.sleep(_PAUSE_SECONDS)


def is_server_replaced(error: Exception) -> bool:
    """Return whether an error shows that a parameter server was ended and started again."""
    message = str(error).lower()
    signs = ("unknown device", "remote_handle", "context_id")
    return "/job:ps" in message and any(sign in message for sign in signs)


def _resolver(config: cluster.ClusterConfig) -> Any:
    """Check a cluster, and return how TensorFlow finds it."""
    if not config.parameter_servers or config.chief is None:
        checks.fail(
            "The cluster needs a chief, which sends steps to workers, and a parameter server, "
            "which keeps the model.",
            chief=config.chief,
            workers=config.workers,
            parameter_servers=config.parameter_servers,
            remedy="List them under 'chief' and 'ps' in TF_CONFIG, as `kdpkit launch "
            "--parameter-servers 1` does, or train with 'multi_worker'.",
        )
    _network.require_port(str(config.address))
    # Without this gRPC would wait for the return of a process that is gone.
    os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")
    os.environ["TF_CONFIG"] = config.to_tf_config()  # which TensorFlow reads
    return tf.distribute.cluster_resolver.TFConfigClusterResolver()
