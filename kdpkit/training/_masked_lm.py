"""Training of KerasHub's masked language models without all their logits."""

from collections.abc import Mapping
from typing import Any

from keras import ops

from kdpkit import _checks
from kdpkit.training import _masked_places
from kdpkit.training._linear_cross_entropy import linear_cross_entropy
from kdpkit.training._loop import TrainingLoop


class MaskedLMLoop(TrainingLoop):
    """A `TrainingLoop` for `keras_hub.models.MaskedLM`, with the loss of `linear_cross_entropy`.

    The model is trained, saved and used as it is. Only a step differs: it goes over the vocabulary
    in chunks, in place of holding a logit for each masked place and piece of the vocabulary, and
    of a last `keras_hub.layers.TransformerEncoder` it computes what follows on the attention at the
    masked places alone. Loss and gradients are those of
    `SparseCategoricalCrossentropy(from_logits=True)` on the whole model to rounding; under a mixed
    dtype policy logits are products of halved numbers, summed and compared in float32. Metrics see
    the predicted pieces, not logits: `keras.metrics.Accuracy` is the masked accuracy.

    KerasHub's models are not compiled when they are loaded as they were when they were saved: the
    optimizer of a loaded one is KerasHub's. To go on where training stopped give the optimizer
    anew, and restore it with `tf.train.Checkpoint` or `kdpkit.callbacks.Resume`.

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
        self._head = _masked_places.head_of(model)
        self._encode = _masked_places.encoder_at_places(model.backbone)
        super().__init__(model, optimizer=optimizer, loss=None, **arguments)

    def per_example_loss(self, x: Any, y: Any, *, training: bool) -> tuple[Any, Any]:
        """Give the loss and the predicted piece of each masked place, `[rows, places]` both."""
        self._require_masked(x, y)
        features = {name: x[name] for name in self.model.backbone.input}
        encoded = self._encode(features, x["mask_positions"], training=training)
        hidden = _masked_places.hidden_states(self._head, encoded)
        kernel = ops.convert_to_tensor(self._head.token_embedding.embeddings)
        return linear_cross_entropy(
            hidden,
            ops.cast(kernel, hidden.dtype),
            y,
            bias=self._head._bias,
            chunk_size=self._chunk_size,
        )

    def _require_masked(self, x: Any, y: Any) -> None:
        wanted = [*self.model.backbone.input, "mask_positions"]
        given = [*x] if isinstance(x, Mapping) else type(x).__name__
        if y is None or not set(wanted) <= set(given):
            _checks.refuse(
                "`MaskedLMLoop` trains on `(x, y)` or `(x, y, sample_weight)`, where `x` is a "
                "dictionary of the model's features, and `y` has the pieces at `mask_positions`.",
                features=given,
                wanted=wanted,
                y=None if y is None else tuple(y.shape),
                remedy="`kdpkit.pipelines.mask_tokens` makes them from rows of tokens.",
            )
