"""The strategy and the batch sizes for a recipe's flags."""

import argparse
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
    all devices. The first process prints the strategy, with `auto` why it was chosen.

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
    backends = {"tensorflow": _on_tensorflow, "jax": _on_jax}
    backend = checks.one_of("KERAS_BACKEND", keras.backend.backend(), backends)
    strategy = backends[backend](kind, replicas, args)
    is_printed = kind == "auto" and replicas is None  # with the reason for the choice
    if processes.index() == 0 and not is_printed:
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
        replicas, remainder = divmod(args.global_batch_size, size)
        if remainder or not replicas:
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

    if keras.backend.backend() == "jax":
        return str(strategy)
    return kdpkit.strategies.describe(strategy)


def _on_tensorflow(kind: str, replicas: int | None, args: argparse.Namespace) -> Strategy:
    import tensorflow as tf

    from kdpkit import strategies

    jax_flags = {
        "shard": getattr(args, "shard", "none"),
        "model_parallel": getattr(args, "model_parallel", 1),
    }
    if jax_flags != {"shard": "none", "model_parallel": 1}:
        remedy = "Run with KERAS_BACKEND=jax, or leave `--shard` and `--model-parallel` out."
        checks.fail("Variables are sharded on JAX only.", **jax_flags, remedy=remedy)
    if replicas is None:
        communication = getattr(args, "communication", "auto")
        return strategies.select_strategy(kind, communication=communication)
    if kind == "auto":
        kind = "mirrored" if replicas > 1 else "one"
    gpus, (cpu, *_) = map(tf.config.list_physical_devices, ("GPU", "CPU"))
    logical_cpus = tf.config.get_logical_device_configuration(cpu) or [cpu]
    if kind == "mirrored" and max(len(gpus), len(logical_cpus)) < replicas:
        machine.split_cpu(replicas, "tensorflow")
    return strategies.select_strategy(kind, devices=replicas)


def _on_jax(kind: str, replicas: int | None, args: argparse.Namespace) -> Strategy:
    import keras

    from kdpkit import sharding
    from kdpkit.cluster import _joining

    if kind not in ("auto", "one", "mirrored", "tpu"):
        problem = f"The strategy {kind!r} is TensorFlow's; on JAX `auto` takes all GPUs or TPU"
        checks.fail(f"{problem} cores.", backend="jax")
    if kind == "one":
        replicas = 1
    model = getattr(args, "model_parallel", 1)
    devices = replicas and replicas * model
    if devices:
        machine.split_cpu(devices, "jax")
    # The lines below start JAX, whose devices are fixed then.
    _joining.require_joined("Use `recipes/cnn_jax.py`, which joins them, or start one.")
    if kind == "tpu":
        sharding.tpu_devices()  # raises if there are none
    if kind == "auto" and not replicas:
        print(f"Strategy: {sharding.describe_choice()}")
    shard: Any = getattr(args, "shard", "none")
    distribution: Strategy = (
        sharding.ModelParallel(devices, model=model, shard=shard)
        if model > 1
        else sharding.DataParallel(devices, shard=shard)
    )
    keras.distribution.set_distribution(distribution)
    return distribution
