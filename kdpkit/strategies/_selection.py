"""Chooses and checks a strategy of `tf.distribute`, and describes it."""

import os
import re
import threading
import weakref
from collections.abc import Sequence

import tensorflow as tf

from kdpkit._internal import checks, machine, processes
from kdpkit.cluster import _joining
from kdpkit.strategies import _parameter_servers
from kdpkit.strategies._tpu import connect_tpu

_KINDS = ("auto", "one", "mirrored", "multi_worker", "parameter_server", "tpu")
_COMMUNICATION = ("auto", "ring", "nccl")

# Strategies of several replicas that were made, and whether a model trains under one. Such a
# program knows scopes, and trains on one device on purpose.
_made: "weakref.WeakSet[tf.distribute.Strategy]" = weakref.WeakSet()
_is_one_used = threading.Event()


def select_strategy(
    kind: str = "auto",
    *,
    devices: int | Sequence[str] | None = None,
    communication: str = "auto",
    start_timeout_seconds: int = 120,
) -> tf.distribute.Strategy:
    """Return a `tf.distribute` strategy on devices that exist.

    Call it once, outside any strategy's scope, then build and compile the model in
    `strategy.scope()`. The replica count for batch sizes is `strategy.num_replicas_in_sync`.

    Args:
        kind: `"one"` is plain Keras on one device. `"mirrored"` trains replicas on the devices of
            this machine. `"multi_worker"` and `"parameter_server"` read the cluster from the
            environment, as `kdpkit.cluster.ClusterConfig` does. With `"multi_worker"` each process
            then trains on all its GPUs, or its CPU; `"parameter_server"` is for the chief, see
            `serve_if_server`. `"tpu"` connects to the TPU that TPU_NAME names, else to that of this
            machine (Keras' usual way to a TPU is JAX: docs/how_to/tpu_and_colab.md). `"auto"`
            mirrors over several GPUs, else uses one device; it prints its choice and the reason in
            one line.
        devices: For `"mirrored"` a count of devices or device strings such as
            `["CPU:0", "CPU:1"]`; None takes every GPU, or every logical CPU where there is no GPU.
        communication: How the processes of `"multi_worker"` sum their gradients: `"ring"` over the
            network, which works everywhere, `"nccl"` between GPUs, or `"auto"`.
        start_timeout_seconds: How long a process of `"multi_worker"` waits for the others to start.

    Returns:
        A `tf.distribute.Strategy`. Mirrored replicas that share a processor are summed by
        `tf.distribute.ReductionToOneDevice`, which is faster there than collectives.

    Raises:
        ValueError: An unknown kind, a device that does not exist, too many devices; a cluster
            strategy without a cluster, or with an invalid one; another strategy in one of several
            processes that were started to train together; for `"multi_worker"` a process that
            does not start in time, a port in use, or a TensorFlow runtime that has already started.

    >>> select_strategy("one").num_replicas_in_sync
    1
    >>> select_strategy("mirrored", devices=["CPU:0", "CPU:1"]).num_replicas_in_sync
    2
    """
    checks.backend("A strategy of `tf.distribute`", "tensorflow")
    checks.one_of("communication", communication, _COMMUNICATION)
    checks.integer("start_timeout_seconds", start_timeout_seconds)
    checks.one_of("kind", kind, _KINDS)
    if tf.distribute.has_strategy():
        checks.fail(
            "`select_strategy` was called inside another strategy's scope.",
            active=type(tf.distribute.get_strategy()).__name__,
            remedy="Choose the strategy first, then enter its scope.",
        )
    if devices is not None and kind != "mirrored" and (kind, devices) != ("one", 1):
        checks.fail("Several `devices` are only for 'mirrored'.", kind=kind, devices=devices)
    if kind not in ("multi_worker", "parameter_server"):
        _joining.require_joined("Use the strategy 'multi_worker'.")
    if kind == "auto":
        kind, why = _best_kind()
        print(f"Strategy: {why}.", flush=True)  # noqa: T201 a choice made for the user is reported
    if kind == "one":
        return tf.distribute.get_strategy()
    if kind == "tpu":
        return tf.distribute.TPUStrategy(connect_tpu(os.environ.get("TPU_NAME") or "local"))
    if kind == "parameter_server":
        return _parameter_servers.connect()
    if kind == "mirrored":
        strategy = _mirrored(devices)
    else:
        from kdpkit.cluster import _multi_worker  # uses TensorFlow's internals

        strategy = _multi_worker.start(
            communication=communication, start_timeout_seconds=start_timeout_seconds
        )
    if strategy.num_replicas_in_sync > 1:
        _made.add(strategy)
    return strategy


def is_chief() -> bool:
    """Return whether this process writes files and prints.

    True for a single process, and for the first of several (the `chief` or worker 0). All processes
    must take part in training, evaluating and saving a model; only the chief should write results:

    >>> if is_chief():
    ...     print("Trained.")
    Trained.
    """
    return processes.index() == 0


def split_device(kind: str, count: int) -> list[str]:
    """Split the first CPU into logical devices, where replicas behave as on real ones.

    Call it before TensorFlow's runtime starts, that is before the first tensor, variable, model,
    `adapt()` or `list_logical_devices`. Repeating the same split is allowed. A GPU is split by
    TensorFlow's own `tf.config.set_logical_device_configuration`, with a limit of its memory for
    each part.

    Args:
        kind: `"CPU"`.
        count: Number of logical devices.

    Returns:
        The device strings, for `select_strategy("mirrored", devices=...)`.

    Raises:
        ValueError: TensorFlow's runtime has started with fewer devices.

    >>> split_device("CPU", 4)
    ['CPU:0', 'CPU:1', 'CPU:2', 'CPU:3']
    """
    checks.one_of("kind", kind, ("CPU",))
    count = checks.integer("count", count)
    machine.split_cpu(count, "tensorflow")
    return [f"CPU:{index}" for index in range(count)]


def describe(strategy: tf.distribute.Strategy) -> str:
    """Describe a strategy in one line: its kind, number of replicas and devices.

    With several processes or workers, their number is included.

    >>> describe(select_strategy("mirrored", devices=["CPU:0", "CPU:1"]))
    'MirroredStrategy: 2 replicas on CPU:0, CPU:1'
    """
    if not tf.distribute.has_strategy() and strategy is tf.distribute.get_strategy():
        return f"no strategy: 1 replica on {_default_device()}"
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        workers, servers = (
            len(_parameter_servers.addresses(strategy, role)) for role in ("worker", "ps")
        )
        return f"ParameterServerStrategy: workers: {workers}, parameter servers: {servers}"
    is_multi_worker = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    kind = "MultiWorkerMirroredStrategy" if is_multi_worker else type(strategy).__name__
    replicas = strategy.num_replicas_in_sync
    devices = strategy.extended.worker_devices  # of this process
    where = checks.listed(map(_short, devices))
    workers = replicas // len(devices)  # TensorFlow assumes that all have as many devices.
    if workers > 1:
        where += f" of each of {workers} workers"
    return f"{kind}: {replicas} replica{'s' if replicas != 1 else ''} on {where}"


def _best_kind() -> tuple[str, str]:
    """Choose the fastest kind for this machine, and return it with the reason."""
    gpus = len(tf.config.list_logical_devices("GPU"))
    if gpus > 1:
        return "mirrored", f"one replica on each of {gpus} GPUs"
    why = f"there is {'no other GPU' if gpus else 'no GPU'} and no TPU"
    if chips := machine.chips():
        why = f"this machine's {chips} TPU chip(s) train through JAX: set KERAS_BACKEND=jax"
    return "one", f"one replica on {_default_device()}: {why}"


def _mirrored(devices: int | Sequence[str] | None) -> tf.distribute.Strategy:
    names = _existing(devices)
    logical, physical = (
        len(list_devices("GPU"))
        for list_devices in (tf.config.list_logical_devices, tf.config.list_physical_devices)
    )
    shares_a_processor = logical > physical or any("CPU" in name for name in names)
    reduction = tf.distribute.ReductionToOneDevice() if shares_a_processor else None
    return tf.distribute.MirroredStrategy(names, cross_device_ops=reduction)


def _existing(devices: int | Sequence[str] | None) -> list[str]:
    """Return the names of logical devices that exist; this starts TensorFlow's runtime."""
    gpus, cpus = (
        [_short(device.name) for device in tf.config.list_logical_devices(kind)]
        for kind in ("GPU", "CPU")
    )
    if devices is None:
        return gpus or cpus
    if isinstance(devices, Sequence):
        named = [devices] if isinstance(devices, str) else [*devices]
        names = [_short(str(device)) for device in named]
        if not names or not {*names} <= {*cpus, *gpus} or len({*names}) < len(names):
            checks.fail(
                "`devices` must name devices that exist, each once.",
                devices=named,
                remedy=f"There are {checks.listed(cpus + gpus)}; `kdpkit.strategies.split_device` "
                "makes more of one before TensorFlow starts.",
            )
        return names
    count = checks.integer("devices", devices)
    available = gpus if len(gpus) >= count or len(gpus) > len(cpus) else cpus
    if count > len(available):
        checks.fail(
            f"More replicas were asked for than there are devices ({len(gpus)} GPU(s), "
            f"{len(cpus)} logical CPU(s)).",
            devices=count,
            remedy=f'Call `kdpkit.strategies.split_device("CPU", {count})` first, or use '
            f"at most {max(len(gpus), len(cpus))}.",
        )
    return available[:count]


def _short(device: str) -> str:
    """Shorten `/job:localhost/replica:0/task:0/device:CPU:1` to `CPU:1`."""
    match = re.search(r"([A-Za-z]+):(\d+)$", device)
    return f"{match[1].upper()}:{match[2]}" if match else device


def _default_device() -> str:
    return "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"
