import keras
import keras_hub
import numpy as np
import pytest

from kdpkit import batches, training
from kdpkit.training import _masked_lm

VOCABULARY, LENGTH, MASKED, EXAMPLES = 53, 12, 3, 10


def small_bert(**head):
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=VOCABULARY,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        max_sequence_length=LENGTH,
        dropout=0.0,
    )
    model = keras_hub.models.BertMaskedLM(backbone)
    backbone.get_layer("pooled_dense").trainable = False
    for name, value in head.items():
        setattr(model.masked_lm_head, name, value)
    return model


def masked_examples():
    """Features, labels and weights: the last example predicts one token, the others three."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, VOCABULARY, (EXAMPLES, LENGTH)).astype("int32")
    positions = np.argsort(random.random((EXAMPLES, LENGTH)))[:, :MASKED].astype("int32")
    weights = np.ones((EXAMPLES, MASKED), "float32")
    weights[-1, 1:] = 0
    features = {
        "token_ids": tokens,
        "segment_ids": np.zeros_like(tokens),
        "padding_mask": np.ones_like(tokens),
        "mask_positions": positions,
    }
    return features, np.take_along_axis(tokens, positions, axis=1), weights


def devices(count):
    if keras.backend.backend() == "jax":
        from kdpkit import sharding

        return sharding.DataParallel(count)
    from kdpkit import strategies

    return strategies.select_strategy("mirrored", devices=count)


def data():
    parts = masked_examples()
    if keras.backend.backend() == "jax":
        return batches.ArrayBatches(parts, global_batch_size=4, remainder="keep")
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(parts).batch(4)


def trained(count, kind=training.MaskedLMLoop, **arguments):
    strategy = devices(count)
    with strategy.scope():
        model = small_bert()
        loop = kind(model, optimizer=keras.optimizers.SGD(0.5), strategy=strategy, **arguments)
    history = loop.fit(data(), data(), epochs=2, verbose=0).history
    return model.get_weights(), history


def with_all_logits():
    return trained(
        1,
        training.TrainingLoop,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy(name="masked_accuracy")],
    )


@pytest.mark.slow
def test_it_trains_what_a_loop_over_all_logits_trains(capfd):
    expected, history = with_all_logits()
    weights, ours = trained(
        3,
        chunk_size=10,
        weighted_metrics=[keras.metrics.Accuracy(name="masked_accuracy")],
    )
    assert "kdpkit: " not in capfd.readouterr().err
    for one, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)
    assert ours.keys() == history.keys()
    for name, values in history.items():
        assert ours[name] == pytest.approx(values, rel=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_states_at_positions_are_those_that_a_gather_takes(dtype):
    numbers = np.random.default_rng(0).normal(size=(3, 7, 4))
    states = keras.ops.cast(keras.ops.array(numbers, "float32"), dtype)
    positions = keras.ops.array([[0, 6], [2, 2], [5, 1]], "int32")
    taken = keras.ops.take_along_axis(states, positions[..., None], axis=1)
    found = _masked_lm._at_positions
    if keras.backend.backend() == "tensorflow":  # where lengths may not be known beforehand
        import tensorflow as tf

        specs = tf.TensorSpec([None, None, 4], dtype), tf.TensorSpec([None, None], "int32")
        found = tf.function(found, input_signature=specs)
    found = found(states, positions)
    np.testing.assert_array_equal(*(keras.ops.cast(of, "float32") for of in (found, taken)))


def test_models_whose_logits_it_does_not_know_raise():
    plain = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="MaskedLMHead.*model='Sequential'"):
        training.MaskedLMLoop(plain, optimizer="sgd")
    squashed = small_bert(activation=keras.activations.softmax)
    with pytest.raises(ValueError, match="not only products.*softmax"):
        training.MaskedLMLoop(squashed, optimizer="sgd")
    untied = small_bert()
    untied.masked_lm_head.token_embedding.tie_weights = False
    with pytest.raises(ValueError, match="not only products.*tie_weights=False"):
        training.MaskedLMLoop(untied, optimizer="sgd")
    with pytest.raises(ValueError, match="`chunk_size` must be.*chunk_size=0"):
        training.MaskedLMLoop(small_bert(), optimizer="sgd", chunk_size=0)


@pytest.mark.parametrize("of", ["no labels", "no positions", "tokens alone"])
def test_data_that_are_not_masked_get_one_sentence(of):
    tf = pytest.importorskip("tensorflow")
    x, y, _ = masked_examples()
    parts = {
        "no labels": (x,),
        "no positions": ({name: x[name] for name in x if name != "mask_positions"}, y),
        "tokens alone": (x["token_ids"], y),
    }
    loop = training.MaskedLMLoop(small_bert(), optimizer="sgd")
    with pytest.raises(ValueError, match="trains on `.x, y.`.*expected=.*pipelines.mask_tokens"):
        loop.fit(tf.data.Dataset.from_tensor_slices(parts[of]).batch(4), epochs=1, verbose=0)
