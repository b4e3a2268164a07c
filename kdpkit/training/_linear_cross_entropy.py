"""The loss of a large vocabulary, which holds only a part of the logits at a time."""

import contextlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from kdpkit._internal import Tensor, checks

_ALIGNED = 8  # which divides the tokens of a chunk, so that rows begin where GPUs read fastest
# The body of a loop over chunks of the vocabulary, as of `jax.lax.scan`: `(carry, start, length)`
# to the next carry, and tensors whose first axis is the `length` tokens of the chunk.
Body = Callable[[Any, Tensor | int, int], tuple[Any, Any]]


class Inputs(NamedTuple):
    """The arguments of the loss, with positions in one dimension."""

    hidden: Tensor
    kernel: Tensor
    bias: Tensor
    labels: Tensor

    def logits(self, start: Tensor | int, length: int) -> tuple[Tensor, Tensor]:
        """Return a chunk of the kernel, and its logits in float32."""
        kernel = ops.slice(self.kernel, (start, 0), (length, self.kernel.shape[1]))
        bias = ops.slice(self.bias, (start,), (length,))
        logits = ops.matmul(self.hidden, ops.transpose(kernel))
        return kernel, ops.cast(logits, "float32") + ops.cast(bias, "float32")


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
    """Compute the cross-entropy of the logits `hidden @ transpose(kernel) + bias` in chunks.

    Logits are the largest tensor of a language model: one number for each position and each token
    of the vocabulary. This function holds only `positions * chunk_size` of them at a time, also in
    the backward pass, which computes them again. Losses and gradients equal those of
    `keras.losses.sparse_categorical_crossentropy(..., from_logits=True)` in float32, to rounding
    (Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models", section 4).

    It runs on TensorFlow, also under XLA, and on JAX. Positions do not depend on each other, so on
    several devices the result is the same.

    Args:
        hidden: Floats `[..., width]`, the last hidden states of a model.
        kernel: Floats `[vocabulary, width]`, such as the weights of a token embedding.
        labels: Integers `[...]`, at least 0 and less than `vocabulary`. With any other the loss and
            its gradients are NaN, or the backend raises. Ignore a position by a sample weight of 0
            and label 0, not by the label -1 or -100.
        bias: Floats `[vocabulary]`, or None.
        chunk_size: Tokens of the vocabulary in a chunk.

    Returns:
        `losses`, float32 `[...]`, and `predictions`, the most probable token at each position as
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
    # Not variables, which TensorFlow's custom gradients treat apart when they run eagerly.
    kernel, bias = (ops.reshape(part, part.shape) for part in (kernel, bias))
    losses, predictions = loss(ops.reshape(hidden, (-1, width)), kernel, bias, flat_labels)
    shape = _shape(labels)
    return TokenLoss(ops.reshape(losses, shape), ops.reshape(predictions, shape))


def _shape(x: Tensor) -> Any:
    """Return a shape; on TensorFlow as one tensor, so that the engine sees that examples stay."""
    if keras.backend.backend() == "jax":
        return x.shape
    import tensorflow as tf

    return tf.shape(x)


def _check_shapes(
    hidden: Tensor, kernel: Tensor, labels: Tensor, bias: Tensor | None
) -> tuple[int, int]:
    is_valid = (
        len(kernel.shape) == 2
        and len(hidden.shape) == len(labels.shape) + 1
        and hidden.shape[-1] == kernel.shape[1]
        and (bias is None or tuple(bias.shape) == (kernel.shape[0],))
    )
    if not is_valid or None in tuple(kernel.shape):
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
    """Run `body` on each chunk of a vocabulary; return the last carry, and the joined tensors.

    Chunks are computed one after the other, so that only one is in memory: on JAX those of full
    size in a loop. On TensorFlow their operations are repeated, because XLA computes what is in a
    loop on one core of a CPU.
    """
    chunk_size = _chunk_length(size, chunk_size)
    parts, start = [], 0
    if keras.backend.backend() == "jax":
        import jax

        num_full, after = size // chunk_size, contextlib.nullcontext
        carry, stacked = jax.lax.scan(
            lambda carry, index: body(carry, index * chunk_size, chunk_size),
            carry,
            jax.numpy.arange(num_full),
        )
        start = num_full * chunk_size
        parts = [[ops.reshape(part, (start, *part.shape[2:])) for part in stacked]]
    else:
        import tensorflow as tf

        after = tf.control_dependencies
    for first in range(start, size, chunk_size):
        with after(keras.tree.flatten(carry)):
            carry, part = body(carry, first, min(chunk_size, size - first))
        parts.append(part)
    return carry, [ops.concatenate(tensors, axis=0) for tensors in zip(*parts, strict=True)]


def _chunk_length(size: int, chunk_size: int) -> int:
    """Return the tokens of each chunk but the last, with which all have about as many."""
    equal = math.ceil(size / math.ceil(size / chunk_size))
    aligned = math.ceil(equal / _ALIGNED) * _ALIGNED
    return aligned if aligned <= chunk_size else equal


def _first_equal(logits: Tensor, highest: Tensor) -> Tensor:
    """Return what `argmax` would, by operations that CPUs compute on vectors."""
    indices = ops.arange(logits.shape[1], dtype="int32")
    return ops.min(ops.where(logits == highest[:, None], indices, logits.shape[1]), axis=1)


def _forward(inputs: Inputs, chunk_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses, predictions, and the logarithm of the divisor of each softmax."""
    hidden, kernel, bias, labels = inputs

    def body(carry: Any, start: Tensor | int, length: int) -> tuple[Any, Any]:
        highest, total, best = carry
        _, logits = inputs.logits(start, length)
        chunk_highest = ops.max(logits, axis=1)
        chunk_best = _first_equal(logits, chunk_highest) + start
        best = ops.where(chunk_highest > highest, chunk_best, best)
        new_highest = ops.maximum(highest, chunk_highest)
        total *= ops.exp(highest - new_highest)
        total += ops.sum(ops.exp(logits - new_highest[:, None]), axis=1)
        return (new_highest, total, best), ()

    zeros = ops.cast(hidden[:, 0], "float32") * 0.0
    # Not minus infinity: if all logits of a chunk were that, the difference would be NaN.
    carry = (zeros + np.finfo(np.float32).min, zeros, ops.cast(zeros, "int32"))
    (highest, total, best), _ = _over_chunks(body, carry, kernel.shape[0], chunk_size)
    is_token = ops.logical_and(labels >= 0, labels < kernel.shape[0])
    normalizer = ops.where(is_token, highest + ops.log(total), math.nan)
    label_logits = ops.sum(
        ops.cast(hidden, "float32") * ops.cast(ops.take(kernel, labels, axis=0), "float32"), axis=1
    ) + ops.cast(ops.take(bias, labels), "float32")
    return normalizer - label_logits, best, normalizer


def _backward(
    upstream: Tensor, normalizer: Tensor, inputs: Inputs, chunk_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `hidden`, `kernel` and `bias`."""
    hidden, kernel, bias, labels = inputs

    def body(carry: Any, start: Tensor | int, length: int) -> tuple[Any, Any]:
        kernel_chunk, logits = inputs.logits(start, length)
        is_label = ops.arange(length, dtype="int32") + start == labels[:, None]
        softmax = ops.exp(logits - normalizer[:, None])
        gradient = (softmax - ops.cast(is_label, "float32")) * upstream[:, None]
        bias_gradient = ops.cast(ops.sum(gradient, axis=0), bias.dtype)
        gradient = ops.cast(gradient, hidden.dtype)
        kernel_gradient = ops.cast(ops.matmul(ops.transpose(gradient), hidden), kernel.dtype)
        carry += ops.cast(ops.matmul(gradient, kernel_chunk), "float32")
        return carry, (kernel_gradient, bias_gradient)

    carry = ops.zeros_like(hidden, dtype="float32")
    hidden_gradient, gradients = _over_chunks(body, carry, kernel.shape[0], chunk_size)
    return ops.cast(hidden_gradient, hidden.dtype), *gradients


def _on_tensorflow(chunk_size: int) -> Any:
    """Return the loss with its own gradient."""
    import tensorflow as tf

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def loss(*inputs: Tensor) -> Any:
        losses, predictions, normalizer = _forward(Inputs(*inputs), chunk_size)

        def gradient(upstream: Tensor, _: Tensor) -> Any:
            return *_backward(upstream, normalizer, Inputs(*inputs), chunk_size), None

        return (losses, predictions), gradient

    return loss


def _on_jax(chunk_size: int) -> Any:
    """Return the loss with its own gradient, which `jax.checkpoint` supports too."""
    import jax

    # Not `keras.ops.custom_gradient`, which needs a gradient of every argument: labels have none.
    @jax.custom_vjp  # type: ignore[untyped-decorator]
    def loss(*inputs: Tensor) -> Any:
        return _forward(Inputs(*inputs), chunk_size)[:2]

    def forward(*inputs: Tensor) -> Any:
        losses, predictions, normalizer = _forward(Inputs(*inputs), chunk_size)
        return (losses, predictions), (normalizer, Inputs(*inputs))

    def backward(residuals: tuple[Tensor, Inputs], upstream: tuple[Tensor, Tensor]) -> Any:
        no_gradient = np.zeros(residuals[1].labels.shape, jax.dtypes.float0)
        return *_backward(upstream[0], *residuals, chunk_size), no_gradient

    loss.defvjp(forward, backward)
    return loss
