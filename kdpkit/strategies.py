"""tf.distribute strategies, chosen and checked before a model is built on them.

`tf.distribute` accepts devices that do not exist and reports it much later, or never. Here every
device is looked up first, and the way gradients are reduced fits the devices: NCCL between
physical GPUs, one device's sum where several replicas share one processor.
"""

import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kdpkit import _checks, _processes, _servers, _tpu
from kdpkit._servers import serve_if_server as serve_if_server
from kdpkit._tpu_connection import connect_tpu as connect_tpu
from kdpkit._tpu_connection import tensorflow_drives_tpus

_KINDS = ("auto", "one", "mirrored", "multi_worker", "parameter_server", "tpu")
_COMMUNICATION = ("auto", "ring", "nccl")


def select_strategy(
    kind: str = "auto",
    *,
    devices: int | Sequence[str] | None = None,
    tpu: str | None = None,
    communication: str = "auto",
    start_timeout_seconds: int = 120,
) -> Any:
    """Give the `tf.distribute` strategy of one kind, on devices that are really there.

    Call it once, outside any strategy's scope, then build and compile the model in
    `strategy.scope()`. The replica count for batch sizes is `strategy.num_replicas_in_sync`.

    Args:
        kind: `"one"` is plain Keras on one device. `"mirrored"` trains replicas on the devices of
            this machine. `"multi_worker"` and `"parameter_server"` read the cluster from the
            environment, as `kdpkit.cluster.ClusterConfig` does. With `"multi_worker"` each process
            then trains on all its GPUs, or all its logical CPUs; `"parameter_server"` is for the
            chief, see `serve_if_server`. `"tpu"` connects to a TPU. `"auto"` takes a TPU, this
            machine's or one that the environment names, else mirrors over the GPUs if there are
            several, else uses one device; it prints in one line what it takes and why.
        devices: For `"mirrored"` a count of devices or device strings such as
            `["CPU:0", "CPU:1"]`; None takes every GPU, or every logical CPU where there is no
            GPU. For `"one"` a single device string.
        tpu: The TPU's name or address; see `connect_tpu`.
        communication: How the processes of `"multi_worker"` sum their gradients: `"ring"` over the
            network, which works everywhere, `"nccl"` between GPUs, or `"auto"`.
        start_timeout_seconds: How long a process of `"multi_worker"` waits for the others to come.

    Returns:
        A `tf.distribute.Strategy`. On CPUs, and where several logical GPUs share a physical one,
        mirrored replicas sum their gradients by `tf.distribute.ReductionToOneDevice`, which is
        faster there than the collectives and lets strategies of different size share a process.

    Raises:
        ValueError: An unknown kind, a device that does not exist, more devices than there are; a
            cluster strategy where no cluster is described, or a wrong one; for `"multi_worker"` a
            process that does not come in time, a port that is taken, or TensorFlow in use already.

    >>> select_strategy("one").num_replicas_in_sync
    1
    >>> select_strategy("mirrored", devices=["CPU:0", "CPU:1"]).num_replicas_in_sync
    2
    """
    _checks.one_of("kind", kind, _KINDS)
    _checks.one_of("communication", communication, _COMMUNICATION)
    _checks.integer("start_timeout_seconds", start_timeout_seconds)
    if tf.distribute.has_strategy():
        _checks.refuse(
            "`select_strategy` was called inside another strategy's scope.",
            active=type(tf.distribute.get_strategy()).__name__,
            remedy="Choose the strategy first, then enter its scope.",
        )
    if devices is not None and kind not in ("one", "mirrored"):
        _checks.refuse(
            "`devices` goes with 'one' and 'mirrored' alone.", kind=kind, devices=devices
        )
    if tpu is not None and kind not in ("auto", "tpu"):
        _checks.refuse("`tpu` goes with 'tpu' and 'auto' alone.", kind=kind, tpu=tpu)
    if kind == "auto":
        kind, why = _best_kind(tpu)
        print(f"Strategy: {why}.", flush=True)  # noqa: T201 a choice that is made for somebody is said
    if kind == "one":
        return _one_device(devices)
    if kind == "mirrored":
        return _mirrored(devices)
    if kind == "tpu":
        return tf.distribute.TPUStrategy(connect_tpu(tpu))
    if kind == "parameter_server":
        return _servers.connect()
    from kdpkit import _multi_worker  # which works inside TensorFlow, for this strategy alone

    return _multi_worker.start(
        _multi_worker.read(),
        communication=communication,
        start_timeout_seconds=start_timeout_seconds,
    )


def is_chief() -> bool:
    """Tell whether this process is the one that writes files and speaks for all.

    It is so where a process trains alone, and for the first of several, the `chief` or worker 0.
    All of them must do what needs all, such as training, evaluating, and saving a model; only the
    chief should write results:

    >>> if is_chief():
    ...     print("Trained.")
    Trained.
    """
    return _processes.index() == 0


def split_device(kind: str, count: int, *, memory_limit_mb: int | None = None) -> list[str]:
    """Split the first CPU or GPU into logical devices, on which replicas behave as on real ones.

    It must come before TensorFlow's runtime starts, that is before the first tensor, variable or
    `list_logical_devices`. Asking again for the same split is fine.

    Args:
        kind: `"CPU"` or `"GPU"`.
        count: Number of logical devices.
        memory_limit_mb: Megabytes of GPU memory for each logical GPU; needed for `"GPU"` with
            more than one, refused for `"CPU"`.

    Returns:
        The device strings, for `select_strategy("mirrored", devices=...)`.

    Raises:
        ValueError: There is no such device, or the runtime has started with another split.

    >>> split_device("CPU", 4)
    ['CPU:0', 'CPU:1', 'CPU:2', 'CPU:3']
    """
    _checks.one_of("kind", kind, ("CPU", "GPU"))
    count = _checks.integer("count", count)
    physical = tf.config.list_physical_devices(kind)
    if not physical:
        _checks.refuse(f"This machine has no {kind} that TensorFlow can use.", kind=kind)
    wanted = _logical_configuration(kind, count, memory_limit_mb)
    names = [f"{kind}:{index}" for index in range(count)]
    try:
        tf.config.set_logical_device_configuration(physical[0], wanted)
    except RuntimeError as error:
        present = len(tf.config.list_logical_devices(kind))
        if present < count:
            raise _checks.InputError(
                f"TensorFlow's runtime has started with {present} logical {kind} device(s), and "
                f"can no longer be split. Received: count={count}. Call `split_device` (or a "
                "recipe's `main`) before the first tensor, or in a new process."
            ) from error
    return names


def describe(strategy: Any) -> str:
    """Say in one line what a strategy is: its kind, its replicas and the devices they sit on.

    Of several processes, or workers, it says how many there are.

    >>> describe(select_strategy("mirrored", devices=["CPU:0", "CPU:1"]))
    'MirroredStrategy: 2 replicas on CPU:0, CPU:1'
    """
    kind = _kind_of(strategy)
    replicas = strategy.num_replicas_in_sync
    extended = strategy.extended
    if not tf.distribute.has_strategy() and strategy is tf.distribute.get_strategy():
        return f"no strategy: 1 replica on {_default_device()}"
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        return _servers.describe(strategy)
    devices = ", ".join(_short(device) for device in extended.worker_devices)
    # All workers have as many, which TensorFlow takes for granted.
    workers = replicas // len(extended.worker_devices)
    where = f"{devices} of each of {workers} workers" if workers > 1 else devices
    return f"{kind}: {replicas} replica{'s' if replicas != 1 else ''} on {where}"


def _kind_of(strategy: Any) -> str:
    is_multi_worker = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    return "MultiWorkerMirroredStrategy" if is_multi_worker else type(strategy).__name__


def _best_kind(tpu: str | None) -> tuple[str, str]:
    """Choose what trains fastest here, and say why."""
    chips = _tpu.chips()
    if tpu or _tpu.named_by_environment():
        return "tpu", f"a TPU, which {f'{tpu!r}' if tpu else _tpu.named_by_environment()} names"
    if chips and tensorflow_drives_tpus():
        return "tpu", f"this machine's {_tpu.counted(chips)}"
    gpus = len(tf.config.list_logical_devices("GPU"))
    if gpus > 1:
        return "mirrored", f"one replica on each of {gpus} GPUs"
    lacking = "no other GPU" if gpus else "no GPU"
    why = f"there is {lacking} and no TPU"
    if chips:
        why = f"TensorFlow cannot drive this machine's {_tpu.counted(chips)}; {_tpu.THROUGH_JAX}"
    return "one", f"one replica on {_default_device()}: {why}"


def _one_device(devices: int | Sequence[str] | None) -> Any:
    if devices is None or devices == 1:
        return tf.distribute.get_strategy()
    names = [devices] if isinstance(devices, str) else devices
    if isinstance(names, int) or len(names) != 1:
        _checks.refuse(
            "The strategy 'one' trains on a single device.",
            devices=devices,
            remedy="Use 'mirrored' for several.",
        )
    return tf.distribute.OneDeviceStrategy(_existing(names)[0])


def _mirrored(devices: int | Sequence[str] | None) -> Any:
    chosen = _existing(devices)
    shares_a_processor = any("CPU" in device for device in chosen) or len(
        tf.config.list_logical_devices("GPU")
    ) > len(tf.config.list_physical_devices("GPU"))
    reduction = tf.distribute.ReductionToOneDevice() if shares_a_processor else None
    return tf.distribute.MirroredStrategy(chosen, cross_device_ops=reduction)


def _existing(devices: int | Sequence[str] | None) -> list[str]:
    """Look the wanted devices up among the logical ones (this starts TensorFlow's runtime)."""
    gpus, cpus = (
        [_short(device.name) for device in tf.config.list_logical_devices(kind)]
        for kind in ("GPU", "CPU")
    )
    if devices is None:
        return gpus or cpus
    if isinstance(devices, Sequence):
        return _named(devices, cpus + gpus)
    count = _checks.integer("devices", devices)
    available = gpus if len(gpus) >= count or len(gpus) > len(cpus) else cpus
    if count > len(available):
        kind = "GPU" if gpus else "CPU"
        _checks.refuse(
            f"More replicas were asked for than there are devices ({len(gpus)} GPU(s), "
            f"{len(cpus)} logical CPU(s)).",
            devices=count,
            remedy=f'Call `kdpkit.strategies.split_device("{kind}", {count})` first, or ask for '
            f"at most {max(len(gpus), len(cpus))}.",
        )
    return available[:count]


def _named(devices: Sequence[str], available: list[str]) -> list[str]:
    if isinstance(devices, str):
        devices = [devices]
    names = [_short(str(device)) for device in devices]
    unknown = [name for name in names if name not in available]
    if not names or unknown or len(set(names)) != len(names):
        _checks.refuse(
            "`devices` must name devices that exist, each once.",
            devices=list(devices),
            remedy=f"There are {', '.join(available)}; `kdpkit.strategies.split_device` makes "
            "more of one before TensorFlow starts.",
        )
    return names


def _logical_configuration(kind: str, count: int, memory_limit_mb: int | None) -> list[Any]:
    if kind == "CPU" and memory_limit_mb is not None:
        _checks.refuse(
            "Memory limits are for GPUs; logical CPUs share the machine's memory.",
            memory_limit_mb=memory_limit_mb,
        )
    if kind == "GPU" and count > 1 and memory_limit_mb is None:
        _checks.refuse(
            "Logical GPUs need `memory_limit_mb`, the megabytes that each may use.",
            count=count,
            memory_limit_mb=memory_limit_mb,
            remedy="Divide the GPU's free memory by `count`.",
        )
    if memory_limit_mb is not None:
        _checks.integer("memory_limit_mb", memory_limit_mb)
    return [tf.config.LogicalDeviceConfiguration(memory_limit=memory_limit_mb)] * count


def _short(device: str) -> str:
    """Shorten `/job:localhost/replica:0/task:0/device:CPU:1` to `CPU:1`."""
    found = re.search(r"([A-Za-z]+):(\d+)$", device)
    return f"{found[1].upper()}:{found[2]}" if found else device


def _default_device() -> str:
    return "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"
