"""KerasHub's masked language models, computed at the masked positions only.

The one file that uses KerasHub's private parts, after it has checked that they are there.
"""

from collections.abc import Callable
from typing import Any

import keras
import keras_hub
from keras import ops

from kdpkit._internal import Tensor, checks

# The same in KerasHub 0.26 to 0.32.
_PARTS_OF_HEAD = ("_intermediate_dense", "_intermediate_layer_norm", "_bias")
_PARTS_OF_LAYER = (
    *("_self_attention_layer", "_self_attention_layer_norm", "_self_attention_dropout"),
    *("_feedforward_layer_norm", "_feedforward_intermediate_dense"),
    *("_feedforward_output_dense", "_feedforward_dropout", "normalize_first"),
)


def head_of(model: keras.Model) -> keras_hub.layers.MaskedLMHead:
    """Return the head of a masked language model, if its logits are products with embeddings."""
    head: Any = getattr(model, "masked_lm_head", None)
    embedding = getattr(head, "token_embedding", None)
    if embedding is None or not _has(head, _PARTS_OF_HEAD):
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


def hidden_states(head: keras_hub.layers.MaskedLMHead, encoded: Tensor) -> Tensor:
    """Return what the head computes the logits of encoded positions from."""
    return head._intermediate_layer_norm(head._intermediate_dense(encoded))


def encoder_at_positions(backbone: keras_hub.models.Backbone) -> Callable[..., Tensor]:
    """Return `encode(features, positions, *, training)`, the backbone's output at some positions.

    Where the backbone ends with a `keras_hub.layers.TransformerEncoder`, what follows on that
    layer's attention is computed at these positions only, because nothing there looks at another
    one. So outputs and gradients are those of the complete layer, to rounding; dropout draws other
    numbers. The attention itself is computed everywhere: with a dropout of a shape that no other
    layer has, XLA on CPUs would take twenty times as long.
    """
    last = _last_layer(backbone)
    before = backbone
    if last is not None:
        before = keras.Model(backbone.input, keras.tree.flatten(last.input)[0])
    at_positions = AtPositions(last)

    def encode(features: dict[str, Tensor], positions: Tensor, *, training: bool) -> Tensor:
        states = _sequence(before(features, training=training))
        mask = features.get("padding_mask")
        return at_positions(states, positions, mask, training=training)

    return encode


class AtPositions(keras.layers.Layer):
    """What follows on an encoder's states, at some positions: a layer, which devices divide."""

    def __init__(self, last: keras_hub.layers.TransformerEncoder | None) -> None:
        super().__init__(autocast=False)
        self._last, self.built = last, True

    def call(
        self, states: Tensor, positions: Tensor, mask: Tensor | None, *, training: bool
    ) -> Tensor:
        if self._last is None:
            return _at(states, positions)
        return _encoded_at(self._last, states, positions, mask, training=training)


def _last_layer(
    backbone: keras_hub.models.Backbone,
) -> keras_hub.layers.TransformerEncoder | None:
    """Find the layer whose output is the backbone's, if it is known, and sees the padding only."""
    last = [*getattr(backbone, "transformer_layers", [None])][-1]
    known = (
        type(last) is keras_hub.layers.TransformerEncoder
        and _has(last, _PARTS_OF_LAYER)
        and not last.normalize_first
        and _sequence(backbone.output) is last.output
        and "padding_mask" in backbone.input
    )
    nodes = getattr(last, "_inbound_nodes", ()) if known else ()
    masks = [{k: v for k, v in n.arguments.kwargs.items() if v is not None} for n in nodes]
    sees_padding = [[*given] for given in masks] == [["padding_mask"]]
    is_known = sees_padding and masks[0]["padding_mask"] is backbone.input["padding_mask"]
    return last if is_known else None


def _encoded_at(
    layer: keras_hub.layers.TransformerEncoder,
    states: Tensor,
    positions: Tensor,
    padding_mask: Tensor,
    *,
    training: bool,
) -> Tensor:
    """Do what `TransformerEncoder.call` does, after the attention for some positions."""
    visible = ops.expand_dims(ops.cast(padding_mask, "bool"), 1)  # the same for every position
    attended = layer._self_attention_layer(
        query=states, value=states, attention_mask=visible, training=training
    )
    attended = layer._self_attention_dropout(_at(attended, positions), training=training)
    attended = layer._self_attention_layer_norm(attended + _at(states, positions))
    given = layer._feedforward_output_dense(layer._feedforward_intermediate_dense(attended))
    given = layer._feedforward_dropout(given, training=training) + attended
    return layer._feedforward_layer_norm(given)


def _at(sequence: Tensor, positions: Tensor) -> Tensor:
    return ops.take_along_axis(sequence, ops.expand_dims(positions, -1), axis=1)


def _sequence(outputs: Tensor | dict[str, Tensor]) -> Tensor:
    return outputs["sequence_output"] if isinstance(outputs, dict) else outputs


def _has(owner: object, names: tuple[str, ...]) -> bool:
    return all(hasattr(owner, name) for name in names)
