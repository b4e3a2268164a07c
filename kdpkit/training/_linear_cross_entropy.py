"""The loss of a large vocabulary, of which no more than a part of the logits is ever there."""

import math
from typing import Any, NamedTuple

import keras
from keras import ops

from kdpkit import _checks

_CHUNK_SIZE = 4096
_LOWEST = -3.4028235e38  # of float32


class TokenLoss(NamedTuple):
    """What `linear_cross_entropy` gives for every position."""

    losses: Any
    predictions: Any


def linear_cross_entropy(
    hidden: Any, kernel: Any, labels: Any, *, bias: Any = None, chunk_size: int = _CHUNK_SIZE
) -> TokenLoss:
    """Give the cross-entropy of `hidden @ transpose(kernel) + bias`, without those logits.

    A language model's logits are its largest tensor by far: one number for each position and each
    piece of the vocabulary. This goes over the vocabulary in chunks, forward and backward, and so
    holds `positions * chunk_size` of them at a time. Losses and gradients are those of
    `keras.losses.sparse_categorical_crossentropy(..., from_logits=True)` to rounding, in float32
    (Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models", section 4; the
    backward pass computes the logits again, a third more work in this layer alone).

    It treats every position by itself, so it is the same on one replica as on many. It runs on
    TensorFlow, also under XLA, and on JAX.

    Args:
        hidden: Floats `[..., width]`: what the logits are computed from.
        kernel: Floats `[vocabulary, width]`, such as a token embedding's.
        labels: Integers `[...]`, each at least 0 and less than `vocabulary`. Any other has a loss
            and gradients that are NaN, where the backend does not refuse it: give places that are
            not to count label 0 and weight 0, and not -1 or -100.
        bias: Floats `[vocabulary]`, or None.
        chunk_size: Pieces of the vocabulary in a chunk.

    Returns:
        `losses`, float32 `[...]`, and `predictions`, the most probable piece of each position as
        int32 `[...]`, for metrics.

    Raises:
        ValueError: Shapes that do not fit each other.

    >>> hidden, kernel = ops.ones((2, 3)), ops.eye(5, 3)
    >>> loss = linear_cross_entropy(hidden, kernel, ops.array([0, 4]), chunk_size=2)
    >>> [round(float(value), 3) for value in loss.losses]
    [1.318, 2.318]
    """
    hidden, kernel = ops.convert_to_tensor(hidden), ops.convert_to_tensor(kernel)
    labels = ops.convert_to_tensor(labels)
    size, width = _check_shapes(hidden, kernel, labels, bias)
    chunk_size = min(_checks.integer("chunk_size", chunk_size), size)
    bias = ops.zeros((size,), kernel.dtype) if bias is None else ops.convert_to_tensor(bias)
    shape = ops.shape(labels)
    rows = ops.reshape(hidden, (-1, width))
    wanted = ops.cast(ops.reshape(labels, (-1,)), "int32")
    losses, predictions = _differentiable(chunk_size)(rows, kernel, bias, wanted)
    return TokenLoss(ops.reshape(losses, shape), ops.reshape(predictions, shape))


def _check_shapes(hidden: Any, kernel: Any, labels: Any, bias: Any) -> tuple[int, int]:
    fit = (
        len(kernel.shape) == 2
        and len(hidden.shape) == len(labels.shape) + 1
        and hidden.shape[-1] == kernel.shape[1]
        and (bias is None or tuple(bias.shape) == (kernel.shape[0],))
    )
    if not fit or None in tuple(kernel.shape):
        _checks.refuse(
            "`hidden` is [..., width], `kernel` [vocabulary, width], `labels` [...] and `bias` "
            "[vocabulary].",
            hidden=tuple(hidden.shape),
            kernel=tuple(kernel.shape),
            labels=tuple(labels.shape),
            bias=None if bias is None else tuple(bias.shape),
        )
    return kernel.shape


def _over_chunks(body: Any, carry: Any, size: int, chunk_size: int) -> tuple[Any, Any]:
    """Carry `body(carry, start, length)` over the chunks in turn; give what each gave, joined.

    One after the other: side by side, they would be in memory together.

    Args:
        body: Gives the next carry, and a tuple of tensors with `length` rows.
        carry: Tensors to begin with.
        size: Pieces of the vocabulary.
        chunk_size: Pieces in a chunk at most.
    """
    over = _scanned if keras.backend.backend() == "jax" else _unrolled
    carry, parts = over(body, carry, size, math.ceil(size / math.ceil(size / chunk_size)))
    return carry, [ops.concatenate(pieces, axis=0) for pieces in zip(*parts, strict=True)]


def _scanned(body: Any, carry: Any, size: int, chunk_size: int) -> tuple[Any, list[Any]]:
    """Compile the chunks as one loop, and what is left apart."""
    import jax

    whole, rest = divmod(size, chunk_size)
    carry, parts = jax.lax.scan(
        lambda carried, index: body(carried, index * chunk_size, chunk_size),
        carry,
        jax.numpy.arange(whole),
    )
    joined = [[ops.reshape(part, (whole * chunk_size, *part.shape[2:])) for part in parts]]
    if rest:
        carry, last = body(carry, whole * chunk_size, rest)
        joined.append(last)
    return carry, joined


def _unrolled(body: Any, carry: Any, size: int, chunk_size: int) -> tuple[Any, list[Any]]:
    """Write the chunks out, each to begin when the one before is done.

    XLA computes what is inside a loop on one core of a CPU.
    """
    import tensorflow as tf

    parts = []
    for start in range(0, size, chunk_size):
        with tf.control_dependencies(tf.nest.flatten(carry)):
            carry, part = body(carry, start, min(chunk_size, size - start))
        parts.append(part)
    return carry, parts


def _logits(hidden: Any, kernel: Any, bias: Any, start: Any, length: int) -> tuple[Any, Any]:
    """Give a chunk of the kernel, and its logits in float32."""
    part = ops.slice(kernel, (start, 0), (length, kernel.shape[1]))
    shift = ops.slice(bias, (start,), (length,))
    logits = ops.matmul(hidden, ops.transpose(part))
    return part, ops.cast(logits, "float32") + ops.cast(shift, "float32")


def _first_equal(logits: Any, highest: Any) -> Any:
    """Give the place of each row's highest logit, as `argmax` does, in vectors on CPUs too."""
    places = ops.arange(logits.shape[1], dtype="int32")
    return ops.min(ops.where(logits == highest[:, None], places, logits.shape[1]), axis=1)


def _forward(hidden: Any, kernel: Any, bias: Any, labels: Any, chunk_size: int) -> Any:
    """Give the losses, the predictions, and the logarithms of the sums that softmax divides by."""

    def body(carry: Any, start: Any, length: int) -> tuple[Any, Any]:
        highest, total, best = carry
        _, logits = _logits(hidden, kernel, bias, start, length)
        here = ops.max(logits, axis=1)
        best = ops.where(here > highest, _first_equal(logits, here) + start, best)
        top = ops.maximum(highest, here)
        total = total * ops.exp(highest - top) + ops.sum(ops.exp(logits - top[:, None]), axis=1)
        return (top, total, best), ()

    like = ops.cast(hidden[:, 0], "float32") * 0.0
    # Not minus infinity: a chunk may have no other logits, and the difference would be NaN.
    start = (like + _LOWEST, like, ops.cast(like, "int32"))
    (highest, total, best), _ = _over_chunks(body, start, kernel.shape[0], chunk_size)
    is_piece = ops.logical_and(labels >= 0, labels < kernel.shape[0])
    normalizer = ops.where(is_piece, highest + ops.log(total), math.nan)
    wanted = ops.sum(
        ops.cast(hidden, "float32") * ops.cast(ops.take(kernel, labels, axis=0), "float32"), axis=1
    ) + ops.cast(ops.take(bias, labels), "float32")
    return normalizer - wanted, best, normalizer


def _backward(
    upstream: Any,
    normalizer: Any,
    hidden: Any,
    kernel: Any,
    bias: Any,
    labels: Any,
    chunk_size: int,
) -> tuple[Any, Any, Any]:
    """Give the gradients of `hidden`, `kernel` and `bias`."""

    def body(carry: Any, start: Any, length: int) -> tuple[Any, Any]:
        part, logits = _logits(hidden, kernel, bias, start, length)
        is_label = ops.arange(length, dtype="int32") + start == labels[:, None]
        softmax = ops.exp(logits - normalizer[:, None])
        change = (softmax - ops.cast(is_label, "float32")) * upstream[:, None]
        narrow = ops.cast(change, hidden.dtype)
        carry += ops.cast(ops.matmul(narrow, part), "float32")
        of_part = ops.cast(ops.matmul(ops.transpose(narrow), hidden), kernel.dtype)
        return carry, (of_part, ops.cast(ops.sum(change, axis=0), bias.dtype))

    start = ops.zeros_like(hidden, dtype="float32")
    of_hidden, (of_kernel, of_bias) = _over_chunks(body, start, kernel.shape[0], chunk_size)
    return ops.cast(of_hidden, hidden.dtype), of_kernel, of_bias


def _differentiable(chunk_size: int) -> Any:
    """Give the loss with its own gradient, as the backend wants it."""
    if keras.backend.backend() == "jax":
        return _on_jax(chunk_size)
    return _on_tensorflow(chunk_size)


def _on_tensorflow(chunk_size: int) -> Any:
    import tensorflow as tf

    def loss(hidden: Any, kernel: Any, bias: Any, labels: Any) -> Any:
        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def of(hidden: Any, kernel: Any, bias: Any) -> Any:
            losses, best, normalizer = _forward(hidden, kernel, bias, labels, chunk_size)

            def gradient(upstream: Any, _: Any) -> Any:
                return _backward(upstream, normalizer, hidden, kernel, bias, labels, chunk_size)

            return (losses, best), gradient

        return of(hidden, kernel, bias)

    return loss


def _on_jax(chunk_size: int) -> Any:
    import jax
    import numpy as np

    @jax.custom_vjp  # type: ignore[untyped-decorator]
    def loss(hidden: Any, kernel: Any, bias: Any, labels: Any) -> Any:
        return _forward(hidden, kernel, bias, labels, chunk_size)[:2]

    def forward(hidden: Any, kernel: Any, bias: Any, labels: Any) -> Any:
        losses, best, normalizer = _forward(hidden, kernel, bias, labels, chunk_size)
        return (losses, best), (normalizer, hidden, kernel, bias, labels)

    def backward(kept: Any, upstream: Any) -> Any:
        normalizer, hidden, kernel, bias, labels = kept
        no_gradient = np.zeros(labels.shape, jax.dtypes.float0)  # labels are integers
        of_all = _backward(upstream[0], normalizer, hidden, kernel, bias, labels, chunk_size)
        return *of_all, no_gradient

    loss.defvjp(forward, backward)
    return loss
