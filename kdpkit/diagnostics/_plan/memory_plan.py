"""How much memory a training needs on each device, and the cheapest way to make it fit.

Which ways there are is decided here; bytes come from the backend.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src.backend import compute_output_spec

from kdpkit import errors
from kdpkit._internal import check_results, checks, versions
from kdpkit.batches import num_examples
from kdpkit.diagnostics import _text
from kdpkit.diagnostics._doctor import batches
from kdpkit.diagnostics._doctor.training_step import check_model, is_loop
from kdpkit.training import TrainingLoop

_SHARDS = ("none", "optimizer", "weights")  # what sends least first
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT])(i?)B")
_PARTS = ("weights", "gradients", "optimizer", "activations", "temporaries")
_COLUMNS = 100
_WHY_NOT_EQUAL = (
    "micro-batches have statistics (BatchNormalization) or random numbers of their own."
)
_MOST_MICRO_BATCHES = 64  # each makes the program longer
# Their outputs are what other operations made, or constants.
_WITHOUT_MEMORY = ("Const", "Identity", "Placeholder", "ReadVariableOp", "Reshape", "StopGradient")

Make = Callable[[], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class MemoryUse:
    """What each device needs for a training of these settings, in bytes.

    Attributes:
        shard: As in `kdpkit.sharding.DataParallel`.
        accumulation: Micro-batches, as in `kdpkit.training.TrainingLoop`.
        remat: As in `kdpkit.training.TrainingLoop`.
        equal: Whether it trains the same up to rounding as without any of these settings.
        weights: Weights, and what else the model and its metrics keep.
        gradients: Those of the weights, by their shapes.
        optimizer: The optimizer's variables.
        activations: What the forward pass keeps for the backward pass, and the batches that the
            loop has on the devices.
        temporaries: What else a step holds at its peak.
        operations: Floating-point operations of a step on each device, without accumulation; None
            on TensorFlow, where nobody counts them.
    """

    shard: str
    accumulation: int
    remat: bool
    equal: bool
    weights: int
    gradients: int
    optimizer: int
    activations: int
    temporaries: int
    operations: float | None

    @property
    def total(self) -> int:
        """Bytes on each device."""
        return sum(getattr(self, part) for part in _PARTS)

    def __str__(self) -> str:
        """Return the settings in a few words."""
        words = [self.shard, *([f"K={self.accumulation}"] if self.accumulation > 1 else [])]
        words += ["remat"] if self.remat else []
        return " ".join(words)


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """The ways to train a global batch, and which fit: what `plan_memory` returns.

    Attributes:
        uses: See `MemoryUse`. Where none fits without `remat` and `accumulation`, also those with
            as few micro-batches as fit, or the most.
        memory: Bytes that each device has.
        replicas: Devices that share a batch.
        global_batch_size: Examples of a batch.
        estimates: Parts that are not known on this backend, but estimated.
    """

    uses: tuple[MemoryUse, ...]
    memory: int
    replicas: int
    global_batch_size: int
    estimates: tuple[str, ...]

    @property
    def chosen(self) -> MemoryUse | None:
        """The cheapest that fits, if possible one that trains the same; None if nothing fits."""
        fitting = (use for use in self.uses if use.total <= self.memory)
        return min(fitting, key=self._cost, default=None)

    def extra_computation(self, use: MemoryUse) -> float | None:
        """Return how much more one computes than the same without `remat`, as a fraction."""
        alike = (each for each in self.uses if each.shard == use.shard and not each.remat)
        plain = next(alike).operations
        return use.operations / plain - 1 if use.operations and plain else None

    def _cost(self, use: MemoryUse) -> tuple[Any, ...]:
        """Computation comes first, then what runs one after the other, then what is sent."""
        extra = round(self.extra_computation(use) or 0, 1)  # less is no difference
        return not use.equal, extra, use.remat, use.accumulation, _SHARDS.index(use.shard)

    @property
    def smallest(self) -> MemoryUse:
        """The one that needs least."""
        return min(self.uses, key=lambda use: use.total)

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines of code to write for the one that is chosen."""
        return () if self.chosen is None else tuple(_lines(self.chosen, self.replicas))

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values, for JSON."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        chosen = self.chosen
        uses = [
            dataclasses.asdict(use)
            | {"total": use.total, "extra_computation": self.extra_computation(use)}
            for use in self.uses
        ]
        return fields | {
            "uses": uses,
            "chosen": None if chosen is None else self.uses.index(chosen),
            "lines": self.lines,
        }

    def __str__(self) -> str:
        """Return a table and the lines to write, in at most 100 columns."""
        head = (
            f"{self.global_batch_size:,} examples on {self.replicas:,} replica"
            f"{'s' * (self.replicas > 1)}, {_mebibytes(self.memory)} MiB on each. In MiB:"
        )
        names = [f"{part}{' ~' * (part in self.estimates)}" for part in _PARTS]
        heading = ("shard, K, remat", *names, "total", "fits", "extra")
        table = _text.table([heading, *map(self._row, self.uses)], columns=_COLUMNS)
        notes = ["~ is estimated from shapes."] if self.estimates else []
        if not all(use.equal for use in self.uses):
            notes.append("* does not train the same: " + _WHY_NOT_EQUAL)
        return "\n\n".join([head, table, *map(check_results.wrapped, notes), self._result()])

    def _row(self, use: MemoryUse) -> tuple[str, ...]:
        parts = [_mebibytes(getattr(use, part)) for part in (*_PARTS, "total")]
        more = self.extra_computation(use)
        fits = ("yes" if use.total <= self.memory else "no") + "*" * (not use.equal)
        return (str(use), *parts, fits, "-" if more is None else f"{more:+.0%}")

    def _result(self) -> str:
        if self.chosen is None:
            least = self.smallest
            return check_results.wrapped(
                f"Nothing fits {_mebibytes(self.memory)} MiB on each device. The least is "
                f"{_mebibytes(least.total)} MiB, with {least}: use devices with more memory, more "
                "of them, or a smaller batch or model."
            )
        head = f"The cheapest that fits: {self.chosen}{'' if self.chosen.equal else ' (*)'}."
        return "\n".join([head, "", *(f"    {line}" for line in self.lines)]).rstrip()


def plan_memory(make: Make, *, memory: int | str, replicas: int = 1) -> MemoryPlan:
    """Work out what a training needs on each device, and the cheapest way to make it fit.

    The global batch stays as it is. On JAX each way to train it is compiled, for as many devices as
    asked for, and never run: variables are shapes, so that a model may be larger than this machine.
    The bytes of variables are exact, the sum of the other parts is what the compiled program asks
    for. On a CPU, logical devices stand for the real ones. On TensorFlow activations are estimated
    from the shapes of all that a forward pass computes; what XLA and cuDNN use besides is unknown.

    Args:
        make: Returns a dataset of global batches and a compiled model or a `TrainingLoop`. On JAX
            it is traced, unless it looks at values.
        memory: Bytes that each device has for the training, or a text such as `"16GiB"`.
        replicas: Devices that share a global batch.

    Raises:
        ValueError: A size that cannot be read; more replicas than devices; no dataset and model.

    >>> from kdpkit import batches, testing
    >>> def make():
    ...     model = testing.tiny_classifier()
    ...     model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    ...     data = testing.toy_classification(64)
    ...     return batches.ArrayBatches(data, global_batch_size=32), model
    >>> plan_memory(make, memory="1GiB").chosen.accumulation
    1
    """
    limit = _bytes_of(memory)
    replicas = checks.integer("replicas", replicas)
    if not callable(make):
        checks.fail("`make` must be a function.", make=type(make).__name__)
    step = _step_of(make)
    uses = tuple(_uses(step, replicas, limit))
    return MemoryPlan(uses, limit, replicas, step.global_batch_size, tuple(step.estimates))


def _step_of(make: Make) -> Any:
    def made() -> tuple[Any, TrainingLoop]:
        given = make()
        if not isinstance(given, tuple) or len(given) != 2:
            checks.fail(
                "`make` must return a dataset and a compiled model or a `TrainingLoop`.",
                returned=type(given).__name__,
            )
        dataset, trainer = given
        check_model(trainer)
        if not is_loop(trainer):
            trainer = TrainingLoop(trainer, **versions.compile_settings(trainer))
        return dataset, trainer

    if keras.backend.backend() == "jax":
        from kdpkit.training.jax import _memory

        return _memory.StepMemory(made)
    return _StepOnTensorFlow(made)


def _uses(step: Any, replicas: int, memory: int) -> Iterator[MemoryUse]:
    """Yield what each way needs; with micro-batches only if it takes them or `remat` to fit."""
    shards = _SHARDS if replicas > 1 and step.can_shard else _SHARDS[:1]
    ways = [*itertools.product(shards, (False, True) if step.can_remat else (False,))]

    def use(shard: str, remat: bool, accumulation: int = 1) -> MemoryUse:
        need = step.need(replicas, shard=shard, accumulation=accumulation, remat=remat)
        is_same = accumulation == 1 or step.micro_batches_are_exact
        return MemoryUse(shard, accumulation, remat, equal=is_same, **need)

    uncut = [use(shard, remat) for shard, remat in ways]
    yield from uncut
    if any(one.total <= memory and not one.remat for one in uncut):
        return
    counts = _micro_batches(step, replicas)
    for (shard, remat), first in zip(ways, uncut, strict=True):
        if counts and first.total > memory:
            tried = (use(shard, remat, count) for count in counts)  # as few as fit, or the most
            last = next(
                one for one in tried if one.total <= memory or one.accumulation == counts[-1]
            )
            yield dataclasses.replace(last, operations=first.operations)  # XLA counts a loop once


def _micro_batches(step: Any, replicas: int) -> list[int]:
    """Return numbers that cut a replica's examples evenly, each at least twice the one before."""
    examples, rest = divmod(step.global_batch_size, replicas)
    counts = [1]
    for count in range(2, 1 if rest else min(examples, _MOST_MICRO_BATCHES) + 1):
        if examples % count == 0 and count >= 2 * counts[-1]:
            counts.append(count)
    try:
        step.kept(counts[-1], remat=False)
    except errors.InputError:
        return []  # the loss compares examples, and no batch of it is cut
    return counts[1:]


def _lines(use: MemoryUse, replicas: int) -> Iterator[str]:
    if replicas > 1 and keras.backend.backend() == "jax":
        strategy = f'kdpkit.sharding.DataParallel({replicas}, shard="{use.shard}")'
        yield f"keras.distribution.set_distribution({strategy})"
    settings = [f"accumulation={use.accumulation}"] if use.accumulation > 1 else []
    settings += ["remat=True"] if use.remat else []
    if settings:
        yield f"loop = kdpkit.training.TrainingLoop(model, ..., {', '.join(settings)})"


def _bytes_of(memory: int | str) -> int:
    if not isinstance(memory, str):
        return checks.integer("memory", memory)
    match = _SIZE.fullmatch(memory)
    if match is None:
        checks.fail(
            "`memory` must be the bytes of a device.",
            memory=memory,
            remedy="Write it as '16GiB', '80GB' or '512MiB'.",
        )
    number, unit, is_binary = match.groups()
    base = 1024 if is_binary else 1000
    return checks.integer("memory", int(float(number) * base ** (1 + "KMGT".index(unit))))


def _mebibytes(size: int) -> str:
    number = size / 2**20
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


class _StepOnTensorFlow:
    """What a step needs on TensorFlow, as far as shapes show it; a replica has all variables.

    Args:
        make: Returns a dataset and a `TrainingLoop`.
    """

    can_shard = can_remat = False
    estimates = ("activations", "temporaries")

    def __init__(self, make: Callable[[], tuple[Any, Any]]) -> None:
        dataset, self._loop = make()
        self._batch = batches.batches_of(dataset).first
        self.global_batch_size = num_examples(self._batch)
        model = self._loop.model
        if not model.built:
            x, _, _ = keras.utils.unpack_x_y_sample_weight(self._specs(self.global_batch_size))
            compute_output_spec(functools.partial(model, training=False), x)
        model.optimizer.build(model.trainable_variables)

    @property
    def micro_batches_are_exact(self) -> bool:
        """Whether no layer looks at several examples; random numbers are those of one batch."""
        layers = self._loop.model._flatten_layers()
        return not any(isinstance(layer, keras.layers.BatchNormalization) for layer in layers)

    def need(self, replicas: int, *, shard: str, accumulation: int, remat: bool) -> dict[str, Any]:
        """Return bytes on one replica."""
        del shard
        model = self._loop.model
        gradients = _bytes_held(model.trainable_variables)
        return {
            "weights": _bytes_held(model.variables),
            "gradients": gradients,
            "optimizer": _bytes_held(model.optimizer.variables),
            "activations": self.kept(accumulation, remat=remat) // replicas,
            "temporaries": gradients if accumulation > 1 else 0,  # of a micro-batch
            "operations": None,
        }

    def _specs(self, examples: int) -> Any:
        import tensorflow as tf

        return keras.tree.map_structure(
            lambda part: tf.TensorSpec((examples, *part.shape[1:]), part.dtype), self._batch
        )

    def kept(self, accumulation: int, *, remat: bool) -> int:
        """Return the bytes of all that a forward pass computes, as if nothing were freed."""
        import tensorflow as tf

        del remat
        self._loop.loss.in_micro_batches = accumulation > 1
        examples = math.ceil(self.global_batch_size / accumulation)
        x, y, _ = keras.utils.unpack_x_y_sample_weight(self._specs(examples))
        forward = tf.function(
            functools.partial(self._loop.per_example_loss, training=True), autograph=False
        )
        computed = (
            tensor
            for operation in forward.get_concrete_function(x, y).graph.get_operations()
            if operation.type not in _WITHOUT_MEMORY
            for tensor in operation.outputs
        )
        return sum((t.shape.num_elements() or 0) * t.dtype.size for t in computed)


def _bytes_held(variables: list[keras.Variable]) -> int:
    import tensorflow as tf

    return sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in variables)
