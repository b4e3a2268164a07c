"""Training of KerasHub's masked language models without all their logits."""

from collections.abc import Mapping
from typing import Any

import keras
from keras import ops

from kdpkit._internal import Tensor, checks
from kdpkit.training import _masked_positions
from kdpkit.training._linear_cross_entropy import linear_cross_entropy
from kdpkit.training._loop import TrainingLoop


class MaskedLMLoop(TrainingLoop):
    """A `TrainingLoop` for `keras_hub.models.MaskedLM`, with the loss of `linear_cross_entropy`.

    The model is trained, saved and used as it is. Only a step differs: it goes over the vocabulary
    in chunks, in place of holding a logit for each masked position and token of the vocabulary, and
    of a last `keras_hub.layers.TransformerEncoder` it computes what follows on the attention at the
    masked positions only. Loss and gradients are those of
    `SparseCategoricalCrossentropy(from_logits=True)` on the complete model to rounding; under a
    mixed dtype policy logits are products of 16-bit numbers, summed and compared in float32.
    Metrics see the predicted tokens, not logits: `keras.metrics.Accuracy` is the masked accuracy.

    KerasHub does not compile a model that it loads as it was when it was saved: pass the optimizer
    again, and restore it with `tf.train.Checkpoint` or `kdpkit.callbacks.Resume`.

    Args:
        model: A KerasHub masked language model, such as `keras_hub.models.BertMaskedLM`, without
            a preprocessor: `kdpkit.pipelines.mask_tokens` makes its data.
        optimizer: As in `TrainingLoop`; so is what follows, except for `chunk_size`.
        chunk_size: Tokens of the vocabulary whose logits are held at a time.

    Raises:
        ValueError: The model has no known masked-language-model head; and as `TrainingLoop`.
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
        self._losses = MaskedLosses(_masked_positions.head_of(model), chunk_size)
        self._encode = _masked_positions.encoder_at_positions(model.backbone)
        super().__init__(model, optimizer=optimizer, loss=None, **arguments)

    def per_example_loss(
        self, x: dict[str, Tensor], y: Tensor, *, training: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and predicted token of each masked position, `[examples, positions]`."""
        self._require_masked(x, y)
        features = {name: x[name] for name in self.model.backbone.input}
        encoded = self._encode(features, x["mask_positions"], training=training)
        return self._losses(encoded, y)

    def _require_masked(self, x: object, y: Tensor | None) -> None:
        wanted = [*self.model.backbone.input, "mask_positions"]
        given = [*x] if isinstance(x, Mapping) else type(x).__name__
        if y is None or not set(wanted) <= set(given):
            checks.fail(
                "`MaskedLMLoop` trains on `(x, y)` or `(x, y, sample_weight)`, where `x` is a "
                "dictionary of the model's features, and `y` has the tokens at `mask_positions`.",
                features=given,
                wanted=wanted,
                y=None if y is None else tuple(y.shape),
                remedy="`kdpkit.pipelines.mask_tokens` makes them from examples of tokens.",
            )


class MaskedLosses(keras.layers.Layer):
    """The losses and predictions at encoded positions: a layer, which devices divide."""

    def __init__(self, head: keras.layers.Layer, chunk_size: int) -> None:
        super().__init__(autocast=False)
        self._head, self._chunk_size, self.built = head, chunk_size, True

    def call(self, encoded: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        hidden = _masked_positions.hidden_states(self._head, encoded)
        kernel = ops.convert_to_tensor(self._head.token_embedding.embeddings)
        return linear_cross_entropy(
            hidden,
            ops.cast(kernel, hidden.dtype),
            y,
            bias=self._head._bias,
            chunk_size=self._chunk_size,
        )
