"""How much memory a training needs on each device, and the cheapest way to make it fit.

Which ways there are is decided here; bytes come from `kdpkit.training.jax._memory`.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from kdpkit._internal import check_results, checks
from kdpkit.diagnostics._doctor import batches, operations, slow_steps, training_step

_SHARDS = ("none", "optimizer", "weights")  # what sends least first
_PARTS = ("weights", "gradients", "optimizer", "activations", "temporaries")
_WHY_NOT_EQUAL = (
    "* does not train the same: the parts of a batch have statistics (BatchNormalization) or "
    "random numbers of their own."
)
_MOST_PARTS = 64  # more make a step of too few examples

Make = Callable[[], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class MemoryUse:
    """What each device needs for a training of these settings, in bytes."""

    model: int  # devices that share the model, as in `ModelParallel`
    shard: str  # as in `DataParallel`
    accumulation: int  # batches for an update: Keras' `gradient_accumulation_steps`
    remat: bool
    equal: bool  # whether it trains the same up to rounding as without these settings
    weights: int  # and what else the model and its metrics keep
    gradients: int
    optimizer: int
    activations: int  # what the forward pass keeps for the backward pass, and batches
    temporaries: int  # what else a step holds at its peak
    operations: float  # of floating-point numbers, for an update

    @property
    def total(self) -> int:
        return sum(getattr(self, part) for part in _PARTS)

    def __str__(self) -> str:
        """Return the settings in a few words."""
        model = f"model={self.model} " * (self.model > 1)
        accumulation = f" K={self.accumulation}" * (self.accumulation > 1)
        return f"{model}{self.shard}{accumulation}{' remat' * self.remat}"


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """The ways to train a global batch, and which fit: what `plan_memory` returns.

    Attributes:
        uses: The ways that were tried, each with its `model`, `shard`, `accumulation` and `remat`,
            and the bytes of `weights`, `gradients`, `optimizer`, `activations`, `temporaries` and
            `total` that a device needs.
        memory: Bytes that each device has.
        replicas: Devices that share a batch.
        global_batch_size: Examples of a batch.
        findings: What a step holds and need not, as in `check_input`.
    """

    uses: tuple[MemoryUse, ...]
    memory: int
    replicas: int
    global_batch_size: int
    findings: tuple[check_results.Finding, ...] = ()

    @property
    def chosen(self) -> MemoryUse | None:
        """The cheapest that fits, if possible one that trains the same; None if nothing fits."""
        fitting = (use for use in self.uses if use.total <= self.memory)
        return min(fitting, key=self._cost, default=None)

    def _cost(self, use: MemoryUse) -> tuple[Any, ...]:
        """Computation comes first, then what runs one after the other, then what is sent.

        A model that several devices share is sent most, in every layer.
        """
        shard = _SHARDS.index(use.shard)
        return not use.equal, use.remat, use.accumulation, use.model, shard

    @property
    def smallest(self) -> MemoryUse:
        return min(self.uses, key=lambda use: use.total)

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines of code to write for the one that is chosen."""
        return () if self.chosen is None else tuple(_lines(self.chosen, self.replicas))

    def __str__(self) -> str:
        """Return a table and the lines to write, in at most 100 columns."""
        head = (
            f"{self.global_batch_size:,} examples on {self.replicas:,} replica"
            f"{'s' * (self.replicas > 1)}, {_mebibytes(self.memory)} MiB on each. In MiB:"
        )
        heading = ("model, shard, K, remat", *_PARTS, "total", "fits")
        table = check_results.table([heading, *map(self._row, self.uses)])
        is_marked = not all(use.equal for use in self.uses)
        notes = [check_results.wrapped(_WHY_NOT_EQUAL)] if is_marked else []
        return "\n\n".join([head, table, *notes, self._result(), *map(str, self.findings)])

    def _row(self, use: MemoryUse) -> tuple[str, ...]:
        parts = [_mebibytes(getattr(use, part)) for part in (*_PARTS, "total")]
        fits = ("yes" if use.total <= self.memory else "no") + "*" * (not use.equal)
        return (str(use), *parts, fits)

    def _result(self) -> str:
        if self.chosen is None:
            least = self.smallest
            return check_results.wrapped(
                f"Nothing fits {_mebibytes(self.memory)} MiB on each device. The least is "
                f"{_mebibytes(least.total)} MiB, with {least}: use devices with more memory, more "
                "of them, or a smaller batch or model."
            )
        head = f"The cheapest that fits: {self.chosen}{'' if self.chosen.equal else ' (*)'}."
        head += " Fewer devices that share the model do not fit." * (self.chosen.model > 1)
        return "\n".join([head, "", *(f"    {line}" for line in self.lines)]).rstrip()


def plan_memory(make: Make, *, memory: int | str, replicas: int = 1) -> MemoryPlan:
    """Work out what a training needs on each device, and the cheapest way to make it fit.

    The global batch stays as it is. Each way to train it is compiled for as many devices, and never
    run, so that a model may be larger than this machine. The bytes of variables are exact, the sum
    of the other parts is what the compiled program asks for. Only JAX reports these bytes; on a CPU
    logical devices stand for the real ones.

    Args:
        make: Returns a dataset of global batches and a compiled model. It is traced, unless it
            looks at values.
        memory: Bytes that each device has for the training, or a text such as `"16GiB"`.
        replicas: Devices that share a global batch.

    Raises:
        ValueError: A size that cannot be read; more replicas than devices; no dataset and model;
            another backend.

    >>> from kdpkit import batches, testing
    >>> def make():
    ...     model = testing.tiny_classifier()
    ...     model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    ...     data = testing.toy_classification(64)
    ...     return batches.ArrayBatches(data, global_batch_size=32), model
    >>> import keras
    >>> if keras.backend.backend() == "jax":  # 0.10 or later
    ...     assert plan_memory(make, memory="1GiB").chosen.accumulation == 1
    """
    limit = checks.size_in_bytes("memory", memory)
    replicas = checks.integer("replicas", replicas)
    if not callable(make):
        checks.fail("`make` must be a function.", make=type(make).__name__)
    checks.backend("`plan_memory`", "jax")
    from kdpkit.training.jax._memory import StepMemory

    step = StepMemory(lambda: _made(make))
    uses = tuple(_uses(step, replicas, limit))
    findings = check_results.in_order(slow_steps.of_step(step.model, step.batch))
    return MemoryPlan(uses, limit, replicas, step.global_batch_size, findings)


def _made(make: Make) -> tuple[Any, Any]:
    """Return the first batch and the model."""
    made = make()
    if not isinstance(made, tuple) or len(made) != 2:
        checks.fail(
            "`make` must return a dataset and a compiled model.", returned=type(made).__name__
        )
    dataset, model = made
    training_step.check_model(model)
    if not training_step.can_be_traced(model):
        checks.fail("The model has a step of its own, whose memory is not known.", model=model.name)
    first = batches.as_arrays(batches.batches_of(dataset).first)
    return operations.as_fit_passes_it(model, first), model


def _uses(step: Any, replicas: int, memory: int) -> Iterator[MemoryUse]:
    """Yield what each way needs.

    What costs more is tried where nothing else fits: first that devices share the model, and then
    smaller batches, whose gradients are added up.
    """
    shards = _SHARDS if replicas > 1 else _SHARDS[:1]
    ways = [*itertools.product(shards, (False, True) if step.can_remat else (False,))]

    def use(shard: str, remat: bool, accumulation: int = 1, model: int = 1) -> MemoryUse:
        settings: dict[str, Any] = {"model": model, "shard": shard, "accumulation": accumulation}
        need = step.need(replicas, remat=remat, **settings)
        is_same = accumulation == 1 or step.accumulation_is_exact
        return MemoryUse(remat=remat, equal=is_same, **settings, **need)

    complete = [use(shard, remat) for shard, remat in ways]
    yield from complete
    if any(each.total <= memory and not each.remat for each in complete):
        return
    for model in range(2, replicas + 1):  # devices that share the model, as few as fit
        if replicas % model == 0:
            shared = [use(shard, remat=False, model=model) for shard in shards]
            yield from shared
            if any(each.total <= memory for each in shared):
                return
    counts = _parts(step.global_batch_size, replicas)
    for (shard, remat), first in zip(ways, complete, strict=True):
        if counts and first.total > memory:
            for count in counts:  # as few as fit, or the most
                tried = use(shard, remat, count)
                if tried.total <= memory:
                    break
            yield dataclasses.replace(tried, operations=first.operations)


def _parts(global_batch_size: int, replicas: int) -> list[int]:
    """Return numbers that divide a replica's examples, each at least twice the one before."""
    examples, rest = divmod(global_batch_size, replicas)
    counts = [1]
    for count in range(2, 1 if rest else min(examples, _MOST_PARTS) + 1):
        if examples % count == 0 and count >= 2 * counts[-1]:
            counts.append(count)
    return counts[1:]


def _lines(use: MemoryUse, replicas: int) -> Iterator[str]:
    if replicas > 1:
        shard = f'shard="{use.shard}"'
        strategy = f"kdpkit.sharding.DataParallel({replicas}, {shard})"
        if use.model > 1:
            more = "" if use.shard == "none" else f", {shard}"
            strategy = f"kdpkit.sharding.ModelParallel({replicas}, model={use.model}{more})"
        yield f"keras.distribution.set_distribution({strategy})"
    if use.remat:
        yield "model = kdpkit.training.remat(model)"
    if use.accumulation > 1:
        yield f"batch_size //= {use.accumulation}"
        yield f"optimizer = Adam(..., gradient_accumulation_steps={use.accumulation})"


def _mebibytes(size: int) -> str:
    number = size / 2**20
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
