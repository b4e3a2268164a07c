"""KerasHub's masked language models, computed at the masked positions alone.

The one file that uses KerasHub's private parts, after it has checked that they are there.
"""

from collections.abc import Callable
from typing import Any

import keras
import keras_hub
from keras import ops

from kdpkit._internal import checks
from kdpkit.training._tensors import Tensor

# The same in KerasHub 0.26 to 0.32.
_PARTS_OF_HEAD = ("_intermediate_dense", "_intermediate_layer_norm", "_bias")
_PARTS_OF_LAYER = (
    *("_self_attention_layer", "_self_attention_layer_norm", "_self_attention_dropout"),
    *("_feedforward_layer_norm", "_feedforward_intermediate_dense"),
    *("_feedforward_output_dense", "_feedforward_dropout", "normalize_first"),
)


def head_of(model: keras.Model) -> keras_hub.layers.MaskedLMHead:
    """Return the head of a masked language model, if logits are its hidden state times embeddings.

    Raises:
        ValueError: There is no such head, or its logits go through another function.
    """
    head: Any = getattr(model, "masked_lm_head", None)
    embedding = getattr(head, "token_embedding", None)
    remedy = "Train it with `TrainingLoop`."
    if embedding is None or not _has(head, _PARTS_OF_HEAD):
        checks.fail(
            "`MaskedLMLoop` trains models with KerasHub's `MaskedLMHead` on their token embedding.",
            model=type(model).__name__,
            remedy=remedy,
        )
    if not getattr(embedding, "tie_weights", True):
        checks.fail(
            "The logits of this model are products with weights of their own, and not with its "
            "token embedding.",
            tie_weights=False,
            remedy=remedy,
        )
    soft_cap = getattr(embedding, "logit_soft_cap", None)
    if head.activation not in (None, keras.activations.linear) or soft_cap is not None:
        checks.fail(
            "The logits of this model go through a function that the loss does not know.",
            activation=head.activation,
            logit_soft_cap=soft_cap,
            remedy=remedy,
        )
    return head


def hidden_states(head: keras_hub.layers.MaskedLMHead, encoded: Tensor) -> Tensor:
    """Return what the head computes the logits of encoded positions from."""
    return head._intermediate_layer_norm(head._intermediate_dense(encoded))


def encoder_at_positions(backbone: keras_hub.models.Backbone) -> Callable[..., Tensor]:
    """Return `encode(features, positions, *, training)`, the backbone's output at some positions.

    Where the backbone ends with a `keras_hub.layers.TransformerEncoder`, what follows on that
    layer's attention is computed at these positions alone, because nothing there looks at another
    one. So outputs and gradients are those of the complete layer, to rounding; dropout draws other
    numbers. The attention itself is computed everywhere: with a dropout of a shape that no other
    layer has, XLA on CPUs would take twenty times as long.
    """
    last = _last_layer(backbone)
    if last is None:
        return lambda features, positions, *, training: _at(
            _sequence(backbone(features, training=training)), positions
        )
    before = keras.Model(backbone.input, keras.tree.flatten(last.input)[0])

    def encode(features: dict[str, Tensor], positions: Tensor, *, training: bool) -> Tensor:
        states = before(features, training=training)
        return _encoded_at(last, states, positions, features["padding_mask"], training=training)

    return encode


def _last_layer(
    backbone: keras_hub.models.Backbone,
) -> keras_hub.layers.TransformerEncoder | None:
    """Find the layer whose output is the backbone's, if it is one that is known."""
    last = [*getattr(backbone, "transformer_layers", [None])][-1]
    known = (
        type(last) is keras_hub.layers.TransformerEncoder
        and _has(last, _PARTS_OF_LAYER)
        and _sequence(backbone.output) is last.output
        and "padding_mask" in backbone.input
        and _sees_padding_alone(last, backbone.input["padding_mask"])
    )
    return last if known else None


def _sees_padding_alone(layer: keras.layers.Layer, padding_mask: keras.KerasTensor) -> bool:
    """Return whether the backbone calls a layer once, with its padding mask alone."""
    nodes = getattr(layer, "_inbound_nodes", ())
    masks = [{k: v for k, v in n.arguments.kwargs.items() if v is not None} for n in nodes]
    return [[*given] for given in masks] == [["padding_mask"]] and masks[0][
        "padding_mask"
    ] is padding_mask


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
    norm_first = layer.normalize_first
    normed = layer._self_attention_layer_norm(states) if norm_first else states
    attended = layer._self_attention_layer(
        query=normed, value=normed, attention_mask=visible, training=training
    )
    attended = layer._self_attention_dropout(_at(attended, positions), training=training)
    attended += _at(states, positions)
    if not norm_first:
        attended = layer._self_attention_layer_norm(attended)
    given = layer._feedforward_layer_norm(attended) if norm_first else attended
    given = layer._feedforward_output_dense(layer._feedforward_intermediate_dense(given))
    given = layer._feedforward_dropout(given, training=training) + attended
    return given if norm_first else layer._feedforward_layer_norm(given)


def _at(sequence: Tensor, positions: Tensor) -> Tensor:
    return ops.take_along_axis(sequence, ops.expand_dims(positions, -1), axis=1)


def _sequence(outputs: Tensor | dict[str, Tensor]) -> Tensor:
    return outputs["sequence_output"] if isinstance(outputs, dict) else outputs


def _has(owner: object, names: tuple[str, ...]) -> bool:
    return all(hasattr(owner, name) for name in names)
