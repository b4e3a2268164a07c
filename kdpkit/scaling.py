"""Batch sizes, parts of batches and learning rates for R replicas instead of one device.

Plain integers and floats, so every input pipeline and both backends follow the same rules.
"""

import dataclasses
import math

from kdpkit._internal import checks

__all__ = ["ScalePlan", "scale_learning_rate", "split_batch"]

RULES = ("linear", "sqrt", "none")


def split_batch(size: int, replicas: int) -> tuple[int, ...]:
    """Return the sizes of the shards that `tf.distribute` splits a batch into.

    The replicas take `ceil(size / replicas)` examples each, in order, until none are left. The
    last ones may get fewer, or none:

    >>> split_batch(10, 4)
    (3, 3, 3, 1)
    >>> split_batch(5, 4)
    (2, 2, 1, 0)

    A size that `replicas` divides is split evenly, the only case that plain Keras trains correctly.
    This is how `tf.distribute.Strategy.experimental_distribute_dataset` and `fit` on TensorFlow
    split. Keras on JAX raises for uneven batches, on which `kdpkit.training` trains exactly.

    Args:
        size: Examples in the global batch; 0 gives every replica none.
        replicas: Number of replicas.

    Returns:
        Examples for each replica, in replica order.

    Raises:
        ValueError: A negative size, or fewer than one replica.
    """
    size = checks.integer("size", size, minimum=0)
    replicas = checks.integer("replicas", replicas)
    shard = _ceil_divide(size, replicas)
    return tuple(min(shard, max(0, size - index * shard)) for index in range(replicas))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScalePlan:
    """The batch sizes, learning rate and step counts of a run on several replicas.

    Set the batch size and rate that suit one device, and the plan scales them:

    >>> plan = ScalePlan(replicas=4, per_replica_batch_size=32, base_learning_rate=1e-4)
    >>> plan.global_batch_size, plan.learning_rate
    (128, 0.0004)
    >>> plan.steps_per_epoch(10_000)
    78

    With `accumulation=K` (Keras' `gradient_accumulation_steps`) the optimizer averages the
    gradients of K batches into one update. Keras advances a schedule with every batch, not with
    every update, so build schedules with `total_steps`. Update u (from 0) has the rate of the
    schedule at its last batch, `u * K + K - 1`:

    >>> plan = dataclasses.replace(plan, accumulation=2)
    >>> plan.global_batch_size, plan.learning_rate
    (128, 0.0008)
    >>> plan.total_steps(10_000, epochs=3)
    234

    Args:
        replicas: Number of replicas that train synchronously.
        per_replica_batch_size: Examples that one replica takes from each batch.
        base_learning_rate: Rate that suits `per_replica_batch_size` examples per update.
        rule: How the rate grows with the batch; see `scale_learning_rate`.
        accumulation: Batches whose gradients make one update.

    Raises:
        ValueError: A count below one, a rate that is not positive, or an unknown rule.
    """

    replicas: int
    per_replica_batch_size: int
    base_learning_rate: float
    rule: str = "linear"
    accumulation: int = 1

    def __post_init__(self) -> None:
        for name in ("replicas", "per_replica_batch_size", "accumulation"):
            # A plain Python number, for JSON; the class is frozen.
            object.__setattr__(self, name, checks.integer(name, getattr(self, name)))
        rate = checks.number("base_learning_rate", self.base_learning_rate, above=0)
        object.__setattr__(self, "base_learning_rate", rate)
        checks.one_of("rule", self.rule, RULES)

    @property
    def global_batch_size(self) -> int:
        """Examples in one batch of the pipeline, over all replicas."""
        return self.replicas * self.per_replica_batch_size

    @property
    def factor(self) -> int:
        """Examples per update, relative to one device without accumulation."""
        return self.replicas * self.accumulation

    @property
    def learning_rate(self) -> float:
        """The base rate, scaled by `factor` under `rule`."""
        return scale_learning_rate(self.base_learning_rate, factor=self.factor, rule=self.rule)

    def steps_per_epoch(self, examples: int, *, drop_remainder: bool = True) -> int:
        """Return the steps of an epoch, one for each global batch.

        Args:
            examples: Number of training examples, over all replicas.
            drop_remainder: Whether the pipeline leaves out a last, smaller batch.

        Raises:
            ValueError: There are too few examples for one batch.
        """
        examples = checks.integer("examples", examples, minimum=0)
        batch = self.global_batch_size
        steps = examples // batch if drop_remainder else _ceil_divide(examples, batch)
        if steps == 0:
            checks.fail(
                "There are too few examples for one batch.",
                examples=examples,
                global_batch_size=batch,
                drop_remainder=drop_remainder,
                remedy=f"At least {batch if drop_remainder else 1} are needed; or use smaller "
                "batches.",
            )
        return steps

    def total_steps(self, examples: int, *, epochs: int, drop_remainder: bool = True) -> int:
        """Return the steps of a run as a Keras schedule counts them, one for each global batch.

        The arguments are those of `steps_per_epoch`, and the number of `epochs`.

        Raises:
            ValueError: There are too few examples for one batch.
        """
        epochs = checks.integer("epochs", epochs)
        return epochs * self.steps_per_epoch(examples, drop_remainder=drop_remainder)


def scale_learning_rate(base: float, *, factor: float, rule: str = "linear") -> float:
    """Scale a learning rate for batches that are `factor` times larger.

    >>> scale_learning_rate(0.1, factor=4), scale_learning_rate(0.1, factor=4, rule="sqrt")
    (0.4, 0.2)

    Args:
        base: Learning rate that suits the smaller batch.
        factor: Ratio of the new to the old batch size: the number of replicas, if each keeps its
            batch size. Below one for smaller batches.
        rule: `"linear"` multiplies by `factor` (Goyal et al. 2017, "Accurate, Large Minibatch
            SGD", arXiv:1706.02677), usual for SGD and with warmup. `"sqrt"` multiplies by its
            square root (Krizhevsky 2014, arXiv:1404.5997; Hoffer et al. 2017, arXiv:1705.08741),
            usual for Adam. `"none"` keeps `base`.

    Raises:
        ValueError: A rate or factor that is not positive, or an unknown rule.
    """
    base = checks.number("base", base, above=0)
    factor = checks.number("factor", factor, above=0)
    checks.one_of("rule", rule, RULES)
    return base * {"linear": factor, "sqrt": math.sqrt(factor), "none": 1.0}[rule]


def _ceil_divide(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
