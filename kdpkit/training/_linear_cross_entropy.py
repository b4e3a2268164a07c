"""The loss of a large vocabulary, of which no more than a part of the logits is ever there."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from kdpkit._internal import Tensor, checks

# Goes on from a carry over a chunk: `(carry, start, length)` to the next carry, and tensors with
# `length` tokens of the vocabulary along their first axis.
Body = Callable[[Any, Tensor | int, int], tuple[Any, Any]]


class Inputs(NamedTuple):
    """The arguments of the loss, with positions in one dimension."""

    hidden: Tensor
    kernel: Tensor
    bias: Tensor
    labels: Tensor

    def logits(self, start: Tensor | int, length: int) -> tuple[Tensor, Tensor]:
        """Return a chunk of the kernel, and its logits in float32."""
        part = ops.slice(self.kernel, (start, 0), (length, self.kernel.shape[1]))
        shift = ops.slice(self.bias, (start,), (length,))
        logits = ops.matmul(self.hidden, ops.transpose(part))
        return part, ops.cast(logits, "float32") + ops.cast(shift, "float32")


class TokenLoss(NamedTuple):
    """The result of `linear_cross_entropy` for every position."""

    losses: Tensor
    predictions: Tensor


def linear_cross_entropy(
    hidden: Tensor,
    kernel: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    chunk_size: int = 4096,
) -> TokenLoss:
    """Return the cross-entropy of `hidden @ transpose(kernel) + bias`, without those logits.

    A language model's logits are its largest tensor by far: one number for each position and each
    token of the vocabulary. This goes over the vocabulary in chunks, forward and backward, and so
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
            and gradients that are NaN, where the backend raises no error: positions that are not
            to count need label 0 and weight 0, and not -1 or -100.
        bias: Floats `[vocabulary]`, or None.
        chunk_size: Tokens of the vocabulary in a chunk.

    Returns:
        `losses`, float32 `[...]`, and `predictions`, the most probable token of each position as
        int32 `[...]`, for metrics.

    Raises:
        ValueError: Shapes that do not fit each other.

    >>> hidden, kernel = ops.ones((2, 3)), ops.eye(5, 3)
    >>> loss = linear_cross_entropy(hidden, kernel, ops.array([0, 4]), chunk_size=2)
    >>> [round(float(value), 3) for value in loss.losses]
    [1.318, 2.318]
    """
    backend = checks.backend("`linear_cross_entropy`", "tensorflow", "jax")
    hidden, kernel = ops.convert_to_tensor(hidden), ops.convert_to_tensor(kernel)
    labels = ops.convert_to_tensor(labels)
    size, width = _check_shapes(hidden, kernel, labels, bias)
    chunk_size = min(checks.integer("chunk_size", chunk_size), size)
    bias = ops.zeros((size,), kernel.dtype) if bias is None else ops.convert_to_tensor(bias)
    flat_labels = ops.cast(ops.reshape(labels, (-1,)), "int32")
    differentiable = _on_jax if backend == "jax" else _on_tensorflow
    loss = differentiable(chunk_size)
    losses, predictions = loss(ops.reshape(hidden, (-1, width)), kernel, bias, flat_labels)
    shape = _shape(labels)
    return TokenLoss(ops.reshape(losses, shape), ops.reshape(predictions, shape))


def _shape(x: Tensor) -> Any:
    """Return a shape, on TensorFlow in one tensor: its readers see that rows stay together."""
    if keras.backend.backend() == "jax":
        return x.shape
    import tensorflow as tf

    return tf.shape(x)


def _check_shapes(
    hidden: Tensor, kernel: Tensor, labels: Tensor, bias: Tensor | None
) -> tuple[int, int]:
    fit = (
        len(kernel.shape) == 2
        and len(hidden.shape) == len(labels.shape) + 1
        and hidden.shape[-1] == kernel.shape[1]
        and (bias is None or tuple(bias.shape) == (kernel.shape[0],))
    )
    if not fit or None in tuple(kernel.shape):
        checks.fail(
            "`hidden` is [..., width], `kernel` [vocabulary, width], `labels` [...] and `bias` "
            "[vocabulary].",
            hidden=tuple(hidden.shape),
            kernel=tuple(kernel.shape),
            labels=tuple(labels.shape),
            bias=None if bias is None else tuple(bias.shape),
        )
    return kernel.shape


def _over_chunks(body: Body, carry: Any, size: int, chunk_size: int) -> tuple[Any, list[Tensor]]:
    """Carry `body` over the chunks of a vocabulary; return the last carry, and the joined tensors.

    One chunk after the other: side by side, they would be in memory together.
    """
    over = _scanned if keras.backend.backend() == "jax" else _unrolled
    carry, parts = over(body, carry, size, math.ceil(size / math.ceil(size / chunk_size)))
    return carry, [ops.concatenate(tensors, axis=0) for tensors in zip(*parts, strict=True)]


def _scanned(body: Body, carry: Any, size: int, chunk_size: int) -> tuple[Any, list[Any]]:
    """Compile the complete chunks as one loop, and the rest apart."""
    import jax

    complete, rest = divmod(size, chunk_size)
    carry, parts = jax.lax.scan(
        lambda carried, index: body(carried, index * chunk_size, chunk_size),
        carry,
        jax.numpy.arange(complete),
    )
    joined = [[ops.reshape(part, (complete * chunk_size, *part.shape[2:])) for part in parts]]
    if rest:
        carry, last = body(carry, complete * chunk_size, rest)
        joined.append(last)
    return carry, joined


def _unrolled(body: Body, carry: Any, size: int, chunk_size: int) -> tuple[Any, list[Any]]:
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


def _first_equal(logits: Tensor, highest: Tensor) -> Tensor:
    """Return the index of each position's highest logit, as `argmax`, in vectors on CPUs too."""
    indices = ops.arange(logits.shape[1], dtype="int32")
    return ops.min(ops.where(logits == highest[:, None], indices, logits.shape[1]), axis=1)


def _forward(inputs: Inputs, chunk_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses, predictions, and the logarithms of the sums that softmax divides by."""
    hidden, kernel, bias, labels = inputs

    def body(carry: Any, start: Tensor | int, length: int) -> tuple[Any, Any]:
        highest, total, best = carry
        _, logits = inputs.logits(start, length)
        here = ops.max(logits, axis=1)
        best = ops.where(here > highest, _first_equal(logits, here) + start, best)
        top = ops.maximum(highest, here)
        total = total * ops.exp(highest - top) + ops.sum(ops.exp(logits - top[:, None]), axis=1)
        return (top, total, best), ()

    like = ops.cast(hidden[:, 0], "float32") * 0.0
    # Not minus infinity: a chunk may have no other logits, and the difference would be NaN.
    start = (like + np.finfo(np.float32).min, like, ops.cast(like, "int32"))
    (highest, total, best), _ = _over_chunks(body, start, kernel.shape[0], chunk_size)
    is_token = ops.logical_and(labels >= 0, labels < kernel.shape[0])
    normalizer = ops.where(is_token, highest + ops.log(total), math.nan)
    wanted = ops.sum(
        ops.cast(hidden, "float32") * ops.cast(ops.take(kernel, labels, axis=0), "float32"), axis=1
    ) + ops.cast(ops.take(bias, labels), "float32")
    return normalizer - wanted, best, normalizer


def _backward(
    upstream: Tensor, normalizer: Tensor, inputs: Inputs, chunk_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `hidden`, `kernel` and `bias`."""
    hidden, kernel, bias, labels = inputs

    def body(carry: Any, start: Tensor | int, length: int) -> tuple[Any, Any]:
        part, logits = inputs.logits(start, length)
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


def _on_tensorflow(chunk_size: int) -> Any:
    """Return the loss with its own gradient. Labels are integers, and have none."""
    import tensorflow as tf

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def loss(*inputs: Tensor) -> Any:
        losses, predictions, normalizer = _forward(Inputs(*inputs), chunk_size)

        def gradient(upstream: Tensor, _: Tensor) -> Any:
            return *_backward(upstream, normalizer, Inputs(*inputs), chunk_size), None

        return (losses, predictions), gradient

    return loss


def _on_jax(chunk_size: int) -> Any:
    """Return the loss with its own gradient, in a way that `jax.checkpoint` takes too."""
    import jax

    # Not `keras.ops.custom_gradient`, which has no way to have no gradient of an argument.
    @jax.custom_vjp  # type: ignore[untyped-decorator]
    def loss(*inputs: Tensor) -> Any:
        return _forward(Inputs(*inputs), chunk_size)[:2]

    def forward(*inputs: Tensor) -> Any:
        losses, predictions, normalizer = _forward(Inputs(*inputs), chunk_size)
        return (losses, predictions), (normalizer, Inputs(*inputs))

    def backward(kept: tuple[Tensor, Inputs], upstream: tuple[Tensor, Tensor]) -> Any:
        no_gradient = np.zeros(kept[1].labels.shape, jax.dtypes.float0)
        return *_backward(upstream[0], *kept, chunk_size), no_gradient

    loss.defvjp(forward, backward)
    return loss
