"""The processes of a `ParameterServerStrategy`: servers that serve a chief, and its way to them.

The steps of `TrainingLoop` on them are in `kdpkit/training/tensorflow/_parameter_server.py`.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn, TypeVar

import tensorflow as tf

from kdpkit import cluster, errors
from kdpkit._internal import checks
from kdpkit.cluster import _network

_START_TIMEOUT_SECONDS = 120.0  # as `sharding.join_processes` waits
_SILENT_SECONDS = 10.0  # in which processes start, usually
_PATIENCE_SECONDS = 60.0  # with calls that TensorFlow cancels
_PAUSE_SECONDS = 0.5  # between two of them

# What TensorFlow reports of calls that it cancels, also of those to servers that are well, while it
# reconnects a worker.
_PASSING = (tf.errors.CancelledError, tf.errors.UnavailableError, tf.errors.AbortedError)
_T = TypeVar("_T")


def serve_if_server(config: cluster.ClusterConfig | None = None) -> None:
    """Serve a chief, if this process is a worker or a parameter server; else return.

    All processes of `ParameterServerStrategy` run one program, and call this before anything else:

        strategies.serve_if_server()  # workers and parameter servers stay here
        strategy = strategies.select_strategy("parameter_server")  # only the chief comes here

    A server runs what the chief sends it, and needs none of the program's objects; operations of
    another package (such as tensorflow_text) are there if the package is imported before. It
    serves until it is ended: by `kdpkit launch` once the chief has ended, elsewhere by whoever
    started it. It may be killed and started again at its address while the chief trains.

    In a cluster without parameter servers, and without a cluster, it returns in every process.

    Args:
        config: The cluster and this process's role in it. None takes it from TF_CONFIG, which alone
            names parameter servers. For SLURM, say, pass
            `ClusterConfig.from_environment(parameter_servers=1)`, from which TF_CONFIG is set.

    Raises:
        ValueError: A cluster that cannot work, or an address at which nothing can be served.
    """
    if config is None:
        if cluster.source() != "TF_CONFIG":
            return
        config = cluster.ClusterConfig.from_environment()
    if not config.parameter_servers:
        return
    os.environ["TF_CONFIG"] = config.to_tf_config()  # where `connect` looks
    if config.role == "chief":
        return
    resolver = _checked(config)
    if config.role == "evaluator":
        checks.fail(
            "With parameter servers the chief evaluates.",
            role=config.role,
            remedy="Leave evaluators out of the cluster.",
        )
    settings = tf.compat.v1.ConfigProto()
    # Else a worker on few cores waits for itself: a step occupies a thread for each worker.
    threads = max(os.cpu_count() or 1, len(config.workers) + 1)
    settings.inter_op_parallelism_threads = threads
    try:
        server = tf.distribute.Server(
            resolver.cluster_spec(),
            job_name=config.role,
            task_index=config.index,
            protocol="grpc",
            config=settings,
        )
    except tf.errors.OpError as error:
        _raise_address(config, error)
    _network.keep_local(config.address, [address for _, _, address in config.tasks])
    sys.stdout.write(f"{config.role} {config.index} serves at {config.address}.\n")
    sys.stdout.flush()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python would notice it only after `join`
    server.join()


def connect() -> tf.distribute.ParameterServerStrategy:
    """Return the chief's `ParameterServerStrategy` once all workers and servers listen.

    Raises:
        ValueError: This process is no chief, or the cluster lacks one, or a worker, or a parameter
            server, or one of them does not come.
    """
    config = cluster.ClusterConfig.from_environment()
    resolver = _checked(config)
    if config.role != "chief":
        checks.fail(
            "Only the chief has the strategy; workers and parameter servers serve it.",
            role=config.role,
            index=config.index,
            remedy="Call `kdpkit.strategies.serve_if_server()` first; it returns in the chief.",
        )
    _wait_for_servers(config)
    try:
        strategy = tf.distribute.ParameterServerStrategy(resolver)
    except tf.errors.UnknownError as error:
        _raise_address(config, error)
    _network.keep_local(config.address, [address for _, _, address in config.tasks])
    return strategy


def describe(strategy: tf.distribute.Strategy) -> str:
    """Describe in one line what serves a chief."""
    workers, servers = (len(addresses(strategy, role)) for role in ("worker", "ps"))
    return (
        f"ParameterServerStrategy: {workers} worker{'s' if workers != 1 else ''}, "
        f"{servers} parameter server{'s' if servers != 1 else ''}"
    )


def addresses(strategy: tf.distribute.Strategy, role: str) -> list[str]:
    """Return the addresses of the processes of a role."""
    # In TensorFlow 2.21 the public `cluster_resolver` of this strategy is None.
    return list(strategy._cluster_resolver.cluster_spec().job_tasks(role))


def lost_servers(strategy: tf.distribute.Strategy) -> list[str]:
    """Name the parameter servers at whose addresses nothing listens."""
    known = enumerate(addresses(strategy, "ps"))
    return [f"ps {index}" for index, address in known if _network.problem(address)]


def insist(strategy: tf.distribute.Strategy, call: Callable[[], _T]) -> _T:
    """Make a call of the chief, and again while TensorFlow cancels it.

    When a worker returns, TensorFlow changes its connections, and may cancel what goes on on others
    at that moment. The call must be one that may be made twice. Where a parameter server is gone
    it is not made again.
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return call()
        except _PASSING as error:
            is_over = time.monotonic() >= deadline or is_of_a_new_server(error)
            if is_over or lost_servers(strategy):
                raise
            time.sleep(_PAUSE_SECONDS)


def is_of_a_new_server(error: Exception) -> bool:
    """Return whether an error shows that another parameter server is where the former one was."""
    message = str(error).lower()
    signs = ("unknown device", "remote_handle", "context_id")
    return "/job:ps" in message and any(sign in message for sign in signs)


def _checked(
    config: cluster.ClusterConfig,
) -> tf.distribute.cluster_resolver.TFConfigClusterResolver:
    """Check a cluster, and return how TensorFlow finds it."""
    if not config.parameter_servers:
        checks.fail(
            "The cluster has no parameter server to keep the model.",
            workers=list(config.workers),
            remedy="List some under 'ps' in TF_CONFIG, as `kdpkit launch --parameter-servers 1` "
            "does; elsewhere pass a cluster with some to `serve_if_server`. Or train with "
            "'multi_worker'.",
        )
    if config.chief is None:
        checks.fail(
            "The cluster has no chief to send the steps to its workers.",
            workers=list(config.workers),
            parameter_servers=list(config.parameter_servers),
            remedy="List one under 'chief' in TF_CONFIG; it is a process of its own.",
        )
    config.validate()
    _network.require_local([address for _, _, address in config.tasks])
    # Calls to a process that is gone then fail, where gRPC would wait for its return.
    os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")
    os.environ["TF_CONFIG"] = config.to_tf_config()  # where TensorFlow looks
    return tf.distribute.cluster_resolver.TFConfigClusterResolver()


def _raise_address(config: cluster.ClusterConfig, error: Exception) -> NoReturn:
    port = checks.address("address", config.address)[1]
    reason = _network.port_problem(port) or checks.first_line(error)
    raise errors.InputError(
        f"{config.role} {config.index} cannot serve at {config.address} ({reason}). Set another "
        "port, or stop the program that has this one."
    ) from error


def _wait_for_servers(config: cluster.ClusterConfig) -> None:
    """Wait until all listen, and print for whom; TensorFlow would hang silently."""
    others = {a: f"{role} {i}" for role, i, a in config.tasks if role in ("worker", "ps")}
    problems = _network.problems([*others], _SILENT_SECONDS)
    if problems:
        names = ", ".join(others[address] for address in problems)
        sys.stderr.write(f"The chief waits for {names}.\n")
        problems = _network.problems([*problems], _START_TIMEOUT_SECONDS - _SILENT_SECONDS)
    if problems:
        checks.fail(
            f"The chief waited {_START_TIMEOUT_SECONDS:.0f} seconds for processes that did "
            "not come.",
            missing={others[address]: address for address in problems},
            remedy="Check that all were started, with one TF_CONFIG, and that each begins "
            "with `kdpkit.strategies.serve_if_server()`.",
        )
