"""The strategy and the batch sizes for a recipe's flags."""

import argparse
import contextlib
import os
import re
from typing import Any, TypeAlias

import kdpkit
from kdpkit import scaling
from kdpkit._internal import checks, machine

Strategy: TypeAlias = Any  # one of `tf.distribute`, or `kdpkit.sharding.DataParallel`


def strategy_from(args: argparse.Namespace) -> Strategy:
    """Return the strategy for `--strategy` and `--replicas`: on JAX a `DataParallel`, already set.

    `--replicas N` above 1 mirrors over N devices. Where there are fewer GPUs, the CPU is first
    split into N logical devices, which must happen before the framework's runtime starts. Without
    `--replicas` the strategy uses the devices found by `kdpkit.strategies.select_strategy`, on JAX
    all devices. The first process prints the strategy, with `auto` also why it was chosen.

    A recipe's flag `--communication` is passed to `select_strategy`, `--shard` to `DataParallel`.
    With `--model-parallel N` it is a `ModelParallel`, of `--replicas` groups of N devices each.

    Raises:
        ValueError: The backend, this machine or the cluster does not support the strategy.
    """
    import keras

    from kdpkit._internal import processes

    kind, replicas = args.strategy, args.replicas
    if kind == "one" and replicas not in (None, 1):
        remedy = "Use `--strategy mirrored`."
        checks.fail("The strategy 'one' trains one replica.", replicas=replicas, remedy=remedy)
    backends = {"tensorflow": _tensorflow_strategy, "jax": _data_parallel}
    backend = checks.one_of("KERAS_BACKEND", keras.backend.backend(), backends)
    strategy = backends[backend](kind, replicas, args)
    if processes.index() == 0:
        print(describe(strategy))
    return strategy


def plan_from(args: argparse.Namespace, strategy: Strategy) -> scaling.ScalePlan:
    """Return the flags' batch size and learning rate, scaled to the strategy's replicas.

    With `--global-batch-size` they are scaled to the replicas that this batch is for, so that a run
    can continue with fewer or more.

    Raises:
        ValueError: `--per-replica-batch-size` does not divide the global batch.
    """
    replicas, size = strategy.num_replicas_in_sync, args.per_replica_batch_size
    if args.global_batch_size is not None:
        replicas, rest = divmod(args.global_batch_size, size)
        if rest or not replicas:
            checks.fail(
                "`--global-batch-size` must be a multiple of `--per-replica-batch-size`, to which "
                "the base learning rate belongs.",
                global_batch_size=args.global_batch_size,
                per_replica_batch_size=size,
            )
    return scaling.ScalePlan(
        replicas=replicas,
        per_replica_batch_size=size,
        base_learning_rate=args.base_learning_rate,
        rule=args.rule,
    )


def describe(strategy: Strategy) -> str:
    """Describe a TensorFlow or JAX strategy in one line."""
    import keras

    on_jax = keras.backend.backend() == "jax"
    return str(strategy) if on_jax else kdpkit.strategies.describe(strategy)


def _tensorflow_strategy(kind: str, replicas: int | None, args: argparse.Namespace) -> Strategy:
    from kdpkit import strategies

    shard, model = getattr(args, "shard", "none"), getattr(args, "model_parallel", 1)
    if shard != "none" or model > 1:
        remedy = "Run with KERAS_BACKEND=jax, or leave `--shard` and `--model-parallel` out."
        given = {"shard": shard, "model_parallel": model}
        checks.fail("Variables are sharded on JAX alone.", **given, remedy=remedy)
    if replicas is None:
        communication = getattr(args, "communication", "auto")
        return strategies.select_strategy(kind, communication=communication)
    if kind == "auto":
        kind = "mirrored" if replicas > 1 else "one"
    import tensorflow as tf

    gpus, (cpu, *_) = map(tf.config.list_physical_devices, ("GPU", "CPU"))
    present = len(tf.config.get_logical_device_configuration(cpu) or [cpu])
    if kind == "mirrored" and max(len(gpus), present) < replicas:
        strategies.split_device("CPU", replicas)
    return strategies.select_strategy(kind, devices=replicas)


def _data_parallel(kind: str, replicas: int | None, args: argparse.Namespace) -> Strategy:
    import jax
    import keras

    from kdpkit import sharding
    from kdpkit.cluster import _joining

    if kind not in ("auto", "one", "mirrored", "tpu"):
        problem = (
            f"The strategy {kind!r} is TensorFlow's; on JAX `auto` takes all GPUs or TPU cores."
        )
        checks.fail(problem, backend="jax")
    replicas = 1 if kind == "one" else replicas
    asked = re.search(r"device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    model = getattr(args, "model_parallel", 1)
    devices = replicas and replicas * model
    if devices and not asked:
        with contextlib.suppress(RuntimeError):  # JAX has already started, with its devices
            jax.config.update("jax_num_cpu_devices", devices)
    machine.reserve(int(asked[1]) if asked else jax.config.jax_num_cpu_devices)
    # Only now: it starts JAX, whose devices are fixed then.
    _joining.require_joined("Use `recipes/cnn_jax.py`, which joins them, or start one.")
    if kind == "tpu":
        sharding.tpu_devices()  # raises if there are none
    if kind == "auto" and not replicas:
        print(f"Strategy: {sharding.describe_choice()}")
    shard: Any = getattr(args, "shard", "none")
    distribution: Strategy = sharding.DataParallel(devices, shard=shard)
    if model > 1:
        distribution = sharding.ModelParallel(devices, model=model, shard=shard)
    keras.distribution.set_distribution(distribution)
    return distribution
