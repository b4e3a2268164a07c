"""Training of KerasHub's masked language models without all their logits."""

from collections.abc import Mapping
from typing import Any

import keras
from keras import ops

from kdpkit._internal import Tensor, checks
from kdpkit.training._linear_cross_entropy import linear_cross_entropy
from kdpkit.training._loop import TrainingLoop

# The weights of a `MaskedLMHead`, in all versions of KerasHub from 0.26 to 0.32.
_HEAD_WEIGHTS = ["beta", "bias", "gamma", "kernel", "output_bias"]


class MaskedLMLoop(TrainingLoop):
    """A `TrainingLoop` for `keras_hub.models.MaskedLM` that never holds all logits.

    The model is trained, saved and used as it is. Only the loss is computed differently: at the
    masked positions, and by `linear_cross_entropy`, which goes over the vocabulary in chunks. Loss
    and gradients equal those of `SparseCategoricalCrossentropy(from_logits=True)` to rounding;
    under a mixed dtype policy logits are products of 16-bit numbers, summed and compared in
    float32. Metrics see the predicted tokens, not logits: `keras.metrics.Accuracy` is the accuracy
    at the masked positions.

    KerasHub does not compile a model that it loads as it was when it was saved: pass the optimizer
    again, and restore it with `tf.train.Checkpoint` or `kdpkit.callbacks.Resume`.

    Args:
        model: A KerasHub masked language model, such as `keras_hub.models.BertMaskedLM`, without
            a preprocessor: `kdpkit.pipelines.mask_tokens` makes its data.
        optimizer: As in `TrainingLoop`, like all other arguments except `chunk_size`.
        chunk_size: Tokens of the vocabulary whose logits are held at a time.

    Raises:
        ValueError: The model does not end with a `MaskedLMHead` whose logits are products with the
            token embedding; and as `TrainingLoop`.
    """

    def __init__(
        self,
        model: keras.Model,
        *,
        optimizer: str | keras.optimizers.Optimizer,
        chunk_size: int = 4096,
        **arguments: Any,
    ) -> None:
        chunk_size = checks.integer("chunk_size", chunk_size)
        self._losses = MaskedLosses(_head_of(model), chunk_size)
        super().__init__(model, optimizer=optimizer, loss=None, **arguments)

    def per_example_loss(
        self, x: dict[str, Tensor], y: Tensor, *, training: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and predicted token of each masked position, `[examples, positions]`."""
        backbone = self.model.backbone
        _check_batch([*backbone.input, "mask_positions"], x, y)
        outputs = backbone({name: x[name] for name in backbone.input}, training=training)
        sequence = outputs["sequence_output"] if isinstance(outputs, Mapping) else outputs
        return self._losses(sequence, x["mask_positions"], y)


class MaskedLosses(keras.layers.Layer):
    """The losses and predictions at masked positions, as a layer that devices can divide."""

    def __init__(self, head: Any, chunk_size: int) -> None:
        super().__init__(autocast=False)
        self.head, self.chunk_size, self.built = head, chunk_size, True

    def call(self, sequence: Tensor, positions: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        head, dtype = self.head, self.head.compute_dtype
        weights = {variable.name: ops.convert_to_tensor(variable) for variable in _weights_of(head)}
        output_bias = weights.pop("output_bias")
        encoded = _at_positions(sequence, positions)
        # This is what the head computes before its product with the token embedding.
        kernel, bias, gamma, beta = (
            ops.cast(weights[name], dtype) for name in ("kernel", "bias", "gamma", "beta")
        )
        hidden = head.intermediate_activation(ops.matmul(ops.cast(encoded, dtype), kernel) + bias)
        hidden = ops.layer_normalization(hidden, gamma, beta, epsilon=head.layer_norm_epsilon)
        embeddings = ops.cast(ops.convert_to_tensor(head.token_embedding.embeddings), dtype)
        return linear_cross_entropy(
            ops.cast(hidden, dtype), embeddings, y, bias=output_bias, chunk_size=self.chunk_size
        )


def _at_positions(sequence: Tensor, positions: Tensor) -> Tensor:
    """Return the entries of sequences at some positions."""
    if keras.backend.standardize_dtype(sequence.dtype) not in ("float16", "bfloat16"):
        return ops.take_along_axis(sequence, ops.expand_dims(positions, -1), axis=1)
    # The same numbers by a product. The gradient of a gather has axes in another order, in which
    # XLA then computes, and transposes, what is before it.
    is_there = ops.expand_dims(positions, -1) == ops.arange(ops.shape(sequence)[1], dtype="int32")
    return ops.matmul(ops.cast(is_there, sequence.dtype), sequence)


def _head_of(model: keras.Model) -> Any:
    """Return the head of a masked language model, if its logits are products with embeddings."""
    head: Any = getattr(model, "masked_lm_head", None)
    embedding = getattr(head, "token_embedding", None)
    names = [] if embedding is None else sorted(weight.name for weight in _weights_of(head))
    if names != _HEAD_WEIGHTS:
        checks.fail(
            "`MaskedLMLoop` trains models with KerasHub's `MaskedLMHead` on their token embedding.",
            model=type(model).__name__,
            remedy="Train it with `TrainingLoop`.",
        )
    tie_weights = getattr(embedding, "tie_weights", True)
    soft_cap = getattr(embedding, "logit_soft_cap", None)
    is_linear = head.activation in (None, keras.activations.linear)
    if not (tie_weights and is_linear and soft_cap is None):
        checks.fail(
            "The logits of this model are not only products with its token embedding.",
            tie_weights=tie_weights,
            activation=head.activation,
            logit_soft_cap=soft_cap,
            remedy="Train it with `TrainingLoop`.",
        )
    return head


def _weights_of(head: Any) -> list[keras.Variable]:
    """Return the weights of a head, except for those of the token embedding."""
    embedding_weights = {id(weight) for weight in head.token_embedding.weights}
    return [weight for weight in head.weights if id(weight) not in embedding_weights]


def _check_batch(features: list[str], x: object, y: Tensor | None) -> None:
    received = [*x] if isinstance(x, Mapping) else type(x).__name__
    if y is None or not set(features) <= set(received):
        checks.fail(
            "`MaskedLMLoop` trains on `(x, y)` or `(x, y, sample_weight)`, where `x` is a "
            "dictionary of the model's features, and `y` has the tokens at `mask_positions`.",
            features=received,
            expected=features,
            y=None if y is None else tuple(y.shape),
            remedy="`kdpkit.pipelines.mask_tokens` makes them from examples of tokens.",
        )
