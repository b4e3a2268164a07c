"""The strategy and the batch sizes for a recipe's flags."""

import argparse
import contextlib
import os
import re
import subprocess
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import kdpkit
from kdpkit import errors, scaling
from kdpkit._internal import checks, machine
from kdpkit.experiment import _framework_messages

if TYPE_CHECKING:
    import tensorflow as tf

    from kdpkit import sharding


class Strategy(Protocol):
    """The common interface of `tf.distribute` strategies and `kdpkit.sharding.DataParallel`."""

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of synchronous replicas."""

    def scope(self) -> AbstractContextManager:
        """Return a context manager in which to build a model for this strategy."""


def strategy_from(args: argparse.Namespace) -> Strategy:
    """Return the strategy for `--strategy` and `--replicas`: on JAX a `DataParallel`, already set.

    `--replicas N` above 1 mirrors over N devices. If there are fewer, the CPU, or on TensorFlow the
    memory of a single GPU, is first split into N logical devices, which must happen before the
    framework's runtime starts. Without `--replicas` the strategy uses the devices found by
    `kdpkit.strategies.select_strategy`, on JAX all devices. `auto` prints its choice and the
    reason.

    A recipe's flag `--communication` is passed to `select_strategy`, `--shard` to `DataParallel`.

    Raises:
        ValueError: The backend, this machine or the cluster does not support the strategy.
    """
    kind, replicas = args.strategy, args.replicas
    if kind == "one" and replicas not in (None, 1):
        checks.fail(
            "The strategy 'one' trains a single replica.",
            replicas=replicas,
            remedy="Use `--strategy mirrored`.",
        )
    shard = getattr(args, "shard", "none")
    if _backend() == "jax":
        return _data_parallel(kind, replicas, shard)
    if shard != "none":
        checks.fail(
            "Variables are cut over the devices on JAX alone; on TensorFlow replicas have all of "
            "them.",
            shard=shard,
            remedy="Run with KERAS_BACKEND=jax, or leave `--shard` out.",
        )
    _find_devices()
    return _tensorflow_strategy(kind, replicas, getattr(args, "communication", "auto"))


def plan_from(args: argparse.Namespace, strategy: Strategy) -> scaling.ScalePlan:
    """Return the flags' batch size and learning rate, scaled to the strategy's replicas.

    With `--global-batch-size` they are scaled to the replicas that this batch is for, so that a run
    can continue with fewer or more.

    Raises:
        ValueError: `--per-replica-batch-size` does not divide the global batch.
    """
    replicas = strategy.num_replicas_in_sync
    if args.global_batch_size is not None:
        replicas, rest = divmod(args.global_batch_size, args.per_replica_batch_size)
        if rest or not replicas:
            checks.fail(
                "`--global-batch-size` must be a multiple of `--per-replica-batch-size`, to which "
                "the base learning rate belongs.",
                global_batch_size=args.global_batch_size,
                per_replica_batch_size=args.per_replica_batch_size,
            )
    return scaling.ScalePlan(
        replicas=replicas,
        per_replica_batch_size=args.per_replica_batch_size,
        base_learning_rate=args.base_learning_rate,
        rule=args.rule,
    )


def describe(strategy: Strategy) -> str:
    """Describe a TensorFlow or JAX strategy in one line."""
    return kdpkit.strategies.describe(strategy) if _backend() == "tensorflow" else str(strategy)


def _backend() -> str:
    import keras

    return str(checks.one_of("KERAS_BACKEND", keras.backend.backend(), ("tensorflow", "jax")))


def _find_devices() -> None:
    """Have TensorFlow look for GPUs, which it says much about where there are none."""
    import tensorflow as tf

    with _framework_messages.hidden():
        tf.config.list_physical_devices()


def _tensorflow_strategy(
    kind: str, replicas: int | None, communication: str
) -> "tf.distribute.Strategy":
    from kdpkit import strategies

    if replicas is None:
        return strategies.select_strategy(kind, communication=communication)
    if kind == "auto":
        kind = "mirrored" if replicas > 1 else "one"
    if kind == "mirrored":
        _split_for(replicas)
    elif kind in ("multi_worker", "parameter_server", "tpu"):
        checks.fail(
            f"The strategy {kind!r} gets its replicas from the cluster.",
            replicas=replicas,
            remedy="Leave `--replicas` out.",
        )
    return strategies.select_strategy(kind, devices=replicas)


def _data_parallel(kind: str, replicas: int | None, shard: Any) -> "sharding.DataParallel":
    import jax
    import keras

    from kdpkit import sharding
    from kdpkit.cluster import _joining

    if kind not in ("auto", "one", "mirrored", "tpu"):
        checks.fail(
            f"The strategy {kind!r} is TensorFlow's; on JAX `auto` takes all GPUs or TPU cores.",
            backend="jax",
        )
    replicas = 1 if kind == "one" else replicas
    asked = re.search(r"device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    if replicas and not asked:
        with contextlib.suppress(RuntimeError):  # JAX has already started, with its devices
            jax.config.update("jax_num_cpu_devices", replicas)
    machine.reserve(int(asked[1]) if asked else jax.config.jax_num_cpu_devices)
    # Only now: it starts JAX, whose devices are fixed then.
    _joining.require_joined("Use `recipes/cnn_jax.py`, which joins them, or start one.")
    if kind == "tpu":
        sharding.tpu_devices()  # raises if there are none
    if kind == "auto" and not replicas:
        print(f"Strategy: {sharding.describe_choice()}")
    distribution = sharding.DataParallel(replicas, shard=shard)
    keras.distribution.set_distribution(distribution)
    return distribution


def _split_for(replicas: int) -> None:
    """Split the CPU or a single GPU, unless there are enough devices."""
    import tensorflow as tf

    from kdpkit import strategies

    gpus = tf.config.list_physical_devices("GPU")
    device, *others = gpus or tf.config.list_physical_devices("CPU")
    present = len(tf.config.get_logical_device_configuration(device) or [device])
    if others or replicas <= present:
        return
    memory = int(0.9 * _free_gpu_memory_mb() / replicas) if gpus else None  # the rest is for CUDA
    strategies.split_device("GPU" if gpus else "CPU", replicas, memory_limit_mb=memory)


def _free_gpu_memory_mb() -> int:
    """Ask the driver; TensorFlow only knows once its runtime runs, too late for splitting."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    query = f"nvidia-smi --id={gpu} --query-gpu=memory.free --format=csv,noheader,nounits"
    try:
        return int(subprocess.check_output(query.split(), text=True, timeout=60))  # noqa: S603 fixed
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise errors.InputError(
            f"The GPU cannot be split, as nvidia-smi does not report free memory ({error}). Call "
            "`kdpkit.strategies.split_device` with `memory_limit_mb` before the recipe's `main`, "
            "or train one replica on the GPU."
        ) from error
