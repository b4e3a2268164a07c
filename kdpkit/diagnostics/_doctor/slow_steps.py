"""What makes a step slow or large, by its operations: attention, logits, float32, small batches."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras

from kdpkit._internal import checks
from kdpkit._internal.check_results import Finding
from kdpkit.batches._array_batches import num_examples
from kdpkit.diagnostics._doctor import operations, outputs, training_step
from kdpkit.diagnostics._doctor.operations import Operation
from kdpkit.training._remat import is_rematerialized

_LONG = 512  # positions, from which on attention that computes no scores is faster
_LARGE_VOCABULARY = 8192
_LARGE = 32 * 2**20  # bytes that are worth a finding
_MANY_WEIGHTS = 64 * 2**20  # bytes; an update of fewer takes no time
_MOST_LARGER = 64  # times the examples, than which no batch is proposed
_MANY_FLOPS = 1e11  # a step of fewer is not limited by them
_BYTES = {"float16": 2, "bfloat16": 2, "float64": 8}  # of a number; others have 4
_MIXED = 'Call `keras.config.set_dtype_policy("mixed_bfloat16")` before the model is built.'
_OF_JAX_NN = "BTNH,BSNH->BNTS"  # in the names of products that a kernel could take over


class Device(NamedTuple):
    """What a step runs on."""

    platform: str  # "gpu", "tpu" or "cpu"
    has_bfloat16: bool  # units for products of it
    # Floating-point operations in the time of moving one byte: by the data sheets in bfloat16 150
    # (A100) to 560 (TPU v6e); of two cores of a CPU 7 were measured.
    balance: float


class Scores(NamedTuple):
    """An attention that computes all its scores."""

    product: Operation  # of queries and keys
    shape: tuple[int, ...]  # (..., queries, keys)
    has_dropout: bool

    @property
    def kept_bytes(self) -> int:
        """What the backward pass needs at least: probabilities, a mask and what that leaves."""
        number = _BYTES.get(self.product.dtype, 4)
        kept = number + (number + 1) * self.has_dropout
        return self.product.times * math.prod(self.shape) * kept


def this_device() -> Device:
    """Return the kind of device that Keras computes on."""
    if keras.backend.backend() == "jax":
        import jax

        device = jax.devices()[0]
        platform, capability = device.platform, getattr(device, "compute_capability", "0")
    else:
        import tensorflow as tf

        gpus = tf.config.list_physical_devices("GPU")
        details = tf.config.experimental.get_device_details(gpus[0]) if gpus else {}
        platform = "gpu" if gpus else "cpu"
        capability = ".".join(map(str, details.get("compute_capability", "0")))
    has_bfloat16 = platform == "tpu" or int(capability.partition(".")[0]) >= 8
    return Device(platform, has_bfloat16, 10.0 if platform == "cpu" else 150.0)


def findings(model: Any, batch: Any) -> list[Finding]:
    """Return what makes the steps of a model slow, or that they raise."""
    try:
        if not model.built:
            training_step.build(model, batch)
        return [*outputs.findings(model, batch), *of_step(model, batch)]
    except Exception as error:  # tracing runs the user's code, which may raise anything
        problem = f"The training fails: {checks.reason_of(error)}"
        return [Finding("step", "error", "train", problem, "Fix what one batch raises.")]


def of_step(model: Any, batch: Any, device: Device | None = None) -> Iterator[Finding]:
    """Yield what makes the steps of a model slow, which is built and can be traced."""
    device, traced = device or this_device(), operations.traced(model, batch)
    yield from _of_attention(traced, device, model.name, remat=is_rematerialized(model))
    yield from _of_logits(traced, model.name)
    yield from _of_precision(traced, device, model.name)
    yield from _of_batch(traced, device, model, num_examples(batch))
    if training_step.is_exact(model) and keras.backend.backend() == "tensorflow":
        yield from _of_division(model, batch)


def _of_division(model: Any, batch: Any) -> Iterator[Finding]:
    from kdpkit.training.tensorflow import _fit  # which loads TensorFlow

    parts = keras.utils.unpack_x_y_sample_weight(batch)
    if problem := _fit.whole_of(model, keras.utils.pack_x_y_sample_weight(*parts)):  # as in `fit`
        remedy = "Write it with operations that compute each example by itself, or leave it so."
        yield Finding("division", "slow", model.name, problem, remedy)


def scores_of(traced: Sequence[Operation]) -> list[Scores]:
    """Return the attentions: softmaxes of products whose both matrices belong to an example."""
    products: dict[int, Operation] = {}  # the last of each size
    found: list[Scores] = []
    is_open = False  # whether the product of the last scores and the values is still to come
    for each in traced:
        size = math.prod(each.shape)
        if each.kind == "product" and each.is_batched:
            products[size], is_open = each, False
        elif each.kind == "softmax" and len(each.shape) > 1 and size in products:
            found.append(Scores(products[size], each.shape, has_dropout=False))
            is_open = True
        elif each.kind == "random" and is_open and each.shape == found[-1].shape:
            found[-1] = found[-1]._replace(has_dropout=True)
    return found


def attention_of(model: Any, batch: Any) -> str:
    """Return in one line how a model computes attention, and why not by a fused kernel."""
    device, traced = this_device(), operations.traced(model, batch)
    fused = sum(each.times for each in traced if each.kind == "fused")
    parts = [f"fused in {_layers(fused)}"] if fused else []
    for why, group in _by_reason(scores_of(traced), device).items():
        reason = "a CPU has no kernel for it." if device.platform == "cpu" else ". ".join(why)
        parts.append(f"all scores, {[*group[0].shape]}, in {_layers(_count(group))}: {reason}")
    return f"Attention: {'; '.join(dict.fromkeys(parts)) or 'none'}"


def _by_reason(attentions: list[Scores], device: Device) -> dict[tuple[str, str], list[Scores]]:
    """Return attentions by what makes them compute scores, and its remedy."""
    groups: dict[tuple[str, str], list[Scores]] = {}
    for scores in attentions:
        groups.setdefault(_why(scores, device), []).append(scores)
    return groups


def _count(group: list[Scores]) -> int:
    return sum(scores.product.times for scores in group)


def _layers(count: int) -> str:
    return f"{count} layer{'s' * (count > 1)}"


def _of_attention(
    traced: Sequence[Operation], device: Device, name: str, *, remat: bool
) -> Iterator[Finding]:
    """Yield attentions that keep scores, with `remat` those of one layer."""
    long = [scores for scores in scores_of(traced) if min(scores.shape[-2:]) >= _LONG]
    for (reason, remedy), group in _by_reason(long, device).items():
        size = sum(scores.kept_bytes for scores in group[: 1 if remat else None])
        if size < _LARGE or not remedy:
            continue
        problem = (
            f"All scores of an attention are computed, {[*group[0].shape]}, and {_amount(size)} of "
            f"a batch kept for the backward pass, where a fused kernel keeps none: {reason}."
        )
        where, others = group[0].product.layers or name, _count(group) - 1
        level = "note" if device.platform == "cpu" else "slow"
        where += f" and {others} more" * (others > 0)
        yield Finding("attention", level, where, problem, remedy)


def _why(scores: Scores, device: Device) -> tuple[str, str]:
    """Return why no fused kernel computes an attention, and the remedy; none for a CPU."""
    product = scores.product
    if keras.backend.backend() == "tensorflow":
        return "Keras has no fused attention on TensorFlow", "Train with KERAS_BACKEND=jax."
    if scores.has_dropout:
        return (
            "some of them are dropped",
            "Build the attention with `dropout=0.0`, which trains less regularized.",
        )
    if keras.config.is_flash_attention_enabled() is False:
        return "fused attention is disabled", "Call `keras.config.enable_flash_attention()`."
    if _OF_JAX_NN not in product.place:
        return (
            "the layer computes them itself",
            "Compute it by `keras.ops.dot_product_attention(query, key, value)`, with the heads as "
            "third axis, in a decoder with `is_causal=True`; KerasHub's Gemma does so on a GPU.",
        )
    if device.platform != "tpu" and product.dtype not in ("float16", "bfloat16"):
        return f"the kernels of GPUs do not take {product.dtype}", _MIXED
    if product.inner % 8 or product.inner > 256:
        return (
            f"heads have {product.inner} numbers, and the kernels take multiples of 8 up to 256",
            "Choose a number of heads with which each has 64 or 128.",
        )
    if any(size % 2 for size in scores.shape[-2:]):
        return "the kernels take no mask of odd length", "Use sequences of even length."
    if device.platform == "tpu":
        return (
            "the kernel of TPUs takes no mask that depends on the data",
            "Pack the sequences, and call `MultiHeadAttention` with `use_causal_mask=True` alone.",
        )
    if device.platform == "gpu":
        return (
            "this device or its cuDNN has no kernel for it",
            "`keras.ops.dot_product_attention(..., flash_attention=True)` raises the reason.",
        )
    return "", ""


def _of_logits(traced: Sequence[Operation], name: str) -> Iterator[Finding]:
    products = {
        each.shape[-1]: each
        for each in traced
        if each.kind == "product" and not each.is_batched and each.shape
    }
    for each in traced:
        *positions, tokens = each.shape or (0,)
        product = products.get(tokens)
        if each.kind == "softmax" and tokens >= _LARGE_VOCABULARY and product is not None:
            count = math.prod(positions) * each.times
            size = tokens * count * (4 + _BYTES.get(product.dtype, 4))
            problem = (
                f"The logits of all {tokens:,} tokens are held at {count:,} "
                f"positions at once, and their probabilities: {_amount(size)}."
            )
            remedy = (
                "Compute the loss in chunks, by `kdpkit.training.without_logits(model)` "
                "(docs/how_to/large_vocabularies.md)."
            )
            if size >= _LARGE:
                yield Finding("logits", "slow", product.layers or name, problem, remedy)


def _of_precision(traced: Sequence[Operation], device: Device, name: str) -> Iterator[Finding]:
    total = _flops(traced)
    share = _flops(each for each in traced if each.dtype == "float32") / (total or 1.0)
    if device.has_bfloat16 and share > 0.5 and total > _MANY_FLOPS:
        problem = (
            f"{share:.0%} of the products are of float32 numbers, and this device multiplies "
            "bfloat16 at least twice as fast, in half the memory."
        )
        yield Finding("float32", "slow", name, problem, _MIXED)


def _of_batch(
    traced: Sequence[Operation], device: Device, model: keras.Model, examples: int
) -> Iterator[Finding]:
    if any(each.kind == "function" for each in traced) or (
        model.optimizer and model.optimizer.gradient_accumulation_steps
    ):
        return
    weights = _size_of(model.trainable_variables)
    states = _size_of(model.optimizer.variables) if model.optimizer else 0
    moved = 5 * weights + 2 * states  # read twice, gradients written and read, then an update
    flops = 3 * _flops(traced)  # with those of the backward pass
    least = device.balance * moved * training_step.num_devices(model)
    # With more the weights are tables, most of which a batch does not look up.
    if weights >= _MANY_WEIGHTS and least / _MOST_LARGER < flops < least:
        problem = (
            f"Each step moves {_amount(moved)} to update the weights, which takes longer than the "
            f"products of {examples:,} examples."
        )
        enough = 2 ** math.ceil(math.log2(examples * least / flops))
        remedy = (
            f"Use batches of {enough:,} examples, or as many as fit, and a learning rate for these "
            "(`kdpkit.scaling`)."
        )
        yield Finding("small-batch", "slow", model.name, problem, remedy)


def _flops(traced: Iterable[Operation]) -> float:
    """Return the floating-point operations of the products."""
    return sum(
        2.0 * each.times * math.prod(each.shape) * each.inner
        for each in traced
        if each.kind == "product"
    )


def _size_of(variables: Iterable[keras.Variable]) -> int:
    return sum(math.prod(each.shape) * _BYTES.get(each.dtype, 4) for each in variables)


def _amount(size: int) -> str:
    """Return bytes in words.

    >>> _amount(3 * 2**30), _amount(48 * 2**20)
    ('3 GiB', '48 MiB')
    """
    return f"{size / 2**30:.3g} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
