"""The parts of KerasHub's models that are computed at the masked positions alone."""

import keras
import keras_hub
import numpy as np
import pytest
from keras import ops

from kdpkit.training import _masked_positions

EXAMPLES, LENGTH, MASKED = 4, 9, 3
SIZES = {
    "vocabulary_size": 31,
    "num_layers": 2,
    "num_heads": 2,
    "hidden_dim": 8,
    "intermediate_dim": 16,
    "max_sequence_length": LENGTH,
}


def backbone(kind, **settings):
    keras.utils.set_random_seed(0)
    sizes = {name: size for name, size in {**SIZES, **settings}.items() if size is not None}
    made = getattr(keras_hub.models, f"{kind}Backbone")(**sizes)
    random = np.random.default_rng(1)
    for variable in made.trainable_variables:  # also biases and norms, which begin with 0 and 1
        variable.assign(random.normal(0.5, 0.5, variable.shape))
    return made


def examples(backbone):
    """Examples of different lengths, and positions that are no padding; one is there twice."""
    random = np.random.default_rng(2)
    lengths = [LENGTH, 4, 6, 3]
    mask = np.arange(LENGTH) < np.array(lengths)[:, None]
    features = {
        "token_ids": random.integers(0, 31, (EXAMPLES, LENGTH)),
        "segment_ids": random.integers(0, 2, (EXAMPLES, LENGTH)),
        "padding_mask": mask.astype("int32"),
    }
    positions = np.array([random.integers(0, length, MASKED) for length in lengths])
    positions[0] = [8, 0, 8]
    return {name: features[name] for name in backbone.input}, positions.astype("int32")


def sequence(outputs):
    return outputs["sequence_output"] if isinstance(outputs, dict) else outputs


def encoded(made, *, training=False):
    """Return the encoded positions, and the same positions of the complete output."""
    features, positions = examples(made)
    encode = _masked_positions.encoder_at_positions(made)
    complete = ops.convert_to_numpy(sequence(made(features, training=False)))
    found = ops.convert_to_numpy(encode(features, positions, training=training))
    return found, np.take_along_axis(complete, positions[..., None], axis=1)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("kind", "settings", "alone"),
    [
        ("Bert", {}, True),
        ("Bert", {"num_layers": 1}, True),
        ("Bert", {"dropout": 0.5}, True),  # which does nothing where nobody trains
        ("Roberta", {}, True),
        ("DistilBert", {}, True),
        ("FNet", {"num_heads": None}, False),
        ("Albert", {"embedding_dim": 8}, False),
    ],
)
def test_positions_are_encoded_as_in_the_complete_output(kind, settings, alone):
    made = backbone(kind, **settings)
    assert (_masked_positions._last_layer(made) is not None) == alone
    found, expected = encoded(made)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def transformer(*layers):
    """A model of these layers, as KerasHub's backbones are built."""
    inputs = {
        name: keras.Input((LENGTH,), dtype="int32", name=name)
        for name in ("token_ids", "padding_mask")
    }
    states = keras.layers.Embedding(31, 8)(inputs["token_ids"])
    for layer in layers:
        states = layer(states, padding_mask=inputs["padding_mask"])
    model = keras.Model(inputs, states)
    model.transformer_layers = [*layers]
    return model


def test_a_layer_that_normalizes_first_is_encoded_as_it_is():
    layer = keras_hub.layers.TransformerEncoder
    made = transformer(*(layer(16, 2, normalize_first=True) for _ in range(2)))
    assert _masked_positions._last_layer(made) is made.transformer_layers[-1]
    found, expected = encoded(made)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_a_layer_of_another_class_is_computed_everywhere():
    class Doubled(keras_hub.layers.TransformerEncoder):
        def call(self, inputs, **settings):
            return 2 * super().call(inputs, **settings)

    made = transformer(Doubled(16, 2))
    assert _masked_positions._last_layer(made) is None
    np.testing.assert_allclose(*encoded(made), rtol=2e-5, atol=2e-5)


def test_dropout_is_drawn_in_training_alone():
    made = backbone("Bert", dropout=0.5)
    one, expected = encoded(made, training=True)
    other, _ = encoded(made, training=True)
    assert np.abs(one - other).max() > 0.01
    assert np.abs(one - expected).max() > 0.01


class CausalBackbone(keras_hub.models.Backbone):
    """One encoder layer, in which a position sees those before it alone."""

    def __init__(self):
        tokens, visible = (
            keras.Input((None,), dtype="int32", name=name) for name in ("token_ids", "padding_mask")
        )
        pairs = ops.expand_dims(visible, 1) * ops.expand_dims(visible, 2)
        self.transformer_layers = [keras_hub.layers.TransformerEncoder(16, 2)]
        encoded = self.transformer_layers[0](
            keras.layers.Embedding(20, 8)(tokens),
            padding_mask=visible,
            attention_mask=ops.tril(ops.ones_like(pairs)),
        )
        super().__init__(inputs={"token_ids": tokens, "padding_mask": visible}, outputs=encoded)


def test_a_backbone_with_an_attention_mask_of_its_own_keeps_it():
    keras.utils.set_random_seed(0)
    backbone = CausalBackbone()
    features = {"token_ids": np.array([[3, 7, 9, 4]]), "padding_mask": np.ones((1, 4), "int32")}
    encode = _masked_positions.encoder_at_positions(backbone)
    at_positions = encode(features, np.array([[0, 2]]), training=False)
    np.testing.assert_allclose(at_positions, np.asarray(backbone(features))[:, [0, 2]], atol=1e-6)
