"""Training of KerasHub's masked language models without all their logits."""

from typing import Any

import keras
from keras import ops

from kdpkit import _checks
from kdpkit.training._linear_cross_entropy import linear_cross_entropy
from kdpkit.training._loop import TrainingLoop

_PARTS = ("_intermediate_dense", "_intermediate_layer_norm", "_bias")  # private in KerasHub 0.32


class MaskedLMLoop(TrainingLoop):
    """A `TrainingLoop` for `keras_hub.models.MaskedLM`, with the loss of `linear_cross_entropy`.

    The model is trained, saved and used as it is. Only a step differs: it goes over the vocabulary
    in chunks, in place of holding a logit for each masked place and piece of the vocabulary. Loss
    and gradients are those of `SparseCategoricalCrossentropy(from_logits=True)` to rounding; under
    a mixed dtype policy logits are products of halved numbers, summed and compared in float32.
    Metrics see the predicted pieces, not logits: `keras.metrics.Accuracy` is the masked accuracy.

    Args:
        model: A KerasHub masked language model, such as `keras_hub.models.BertMaskedLM`, without
            a preprocessor: data come as `kdpkit.pipelines.mask_tokens` gives them.
        optimizer: As in `TrainingLoop`; so is what follows but for `chunk_size`.
        chunk_size: Pieces of the vocabulary whose logits are held at a time.

    Raises:
        ValueError: The model has no masked-language-model head that is known, and what
            `TrainingLoop` refuses.
    """

    def __init__(
        self, model: Any, *, optimizer: Any, chunk_size: int = 4096, **arguments: Any
    ) -> None:
        self._chunk_size = _checks.integer("chunk_size", chunk_size)
        self._head = _head_of(model)
        super().__init__(model, optimizer=optimizer, loss=None, **arguments)

    def per_example_loss(self, x: Any, y: Any, *, training: bool) -> tuple[Any, Any]:
        """Give the loss and the predicted piece of each masked place, `[rows, places]` both."""
        backbone = self.model.backbone
        features = {name: x[name] for name in backbone.input}
        encoded = backbone(features, training=training)["sequence_output"]
        hidden = _transformed(self._head, encoded, x["mask_positions"])
        kernel = ops.convert_to_tensor(self._head.token_embedding.embeddings)
        return linear_cross_entropy(
            hidden,
            ops.cast(kernel, hidden.dtype),
            y,
            bias=self._head._bias,
            chunk_size=self._chunk_size,
        )


def _head_of(model: Any) -> Any:
    head: Any = getattr(model, "masked_lm_head", None)
    embedding = getattr(head, "token_embedding", None)
    if embedding is None or not all(hasattr(head, part) for part in _PARTS):
        _checks.refuse(
            "`MaskedLMLoop` trains models with KerasHub's `MaskedLMHead` on their token embedding.",
            model=type(model).__name__,
            remedy="Train others with `TrainingLoop`.",
        )
    if (
        head.activation not in (None, keras.activations.linear)
        or getattr(embedding, "logit_soft_cap", None) is not None
    ):
        _checks.refuse(
            "The logits of this model go through a function that the loss does not know.",
            activation=head.activation,
            logit_soft_cap=getattr(embedding, "logit_soft_cap", None),
            remedy="Train it with `TrainingLoop`.",
        )
    return head


def _transformed(head: Any, encoded: Any, positions: Any) -> Any:
    """Give what the head computes the logits from, for the masked places alone."""
    masked = ops.take_along_axis(encoded, ops.expand_dims(positions, -1), axis=1)
    return head._intermediate_layer_norm(head._intermediate_dense(masked))
