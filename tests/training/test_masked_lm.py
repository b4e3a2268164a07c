import functools

import keras
import keras_hub
import numpy as np
import pytest

from kdpkit import batches, training

VOCABULARY, LENGTH, MASKED, EXAMPLES = 53, 12, 3, 10


def small_bert(kind="Bert", **head):
    keras.utils.set_random_seed(0)
    backbone = getattr(keras_hub.models, f"{kind}Backbone")(
        vocabulary_size=VOCABULARY,
        num_layers=2,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        max_sequence_length=LENGTH,
        dropout=0.0,
    )
    model = getattr(keras_hub.models, f"{kind}MaskedLM")(backbone)
    if kind == "Bert":
        model.backbone.get_layer("pooled_dense").trainable = False
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


def data(of="Bert"):
    features, *others = masked_examples()
    if of != "Bert":
        del features["segment_ids"]
    parts = (features, *others)
    if keras.backend.backend() == "jax":
        return batches.ArrayBatches(parts, global_batch_size=4, remainder="keep")
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(parts).batch(4)


def trained(count, kind=training.MaskedLMLoop, of="Bert", **arguments):
    strategy = devices(count)
    with strategy.scope():
        model = small_bert(of)
        loop = kind(model, optimizer=keras.optimizers.SGD(0.5), strategy=strategy, **arguments)
    history = loop.fit(data(of), data(of), epochs=2, verbose=0).history
    return model.get_weights(), history


def with_all_logits(of="Bert"):
    return _with_all_logits(of, keras.config.dtype_policy().name)


@functools.cache
def _with_all_logits(of, policy):  # noqa: ARG001 the same model computes otherwise under another
    return trained(
        1,
        training.TrainingLoop,
        of=of,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy(name="masked_accuracy")],
    )


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "jit", "chunk_size"),
    [
        (3, None, 10),
        (1, True, 53),
        pytest.param(1, None, 10, marks=pytest.mark.exhaustive),
    ],
)
def test_it_trains_what_a_loop_over_all_logits_trains(replicas, jit, chunk_size, capfd):
    expected, history = with_all_logits()
    weights, ours = trained(
        replicas,
        jit=jit,
        chunk_size=chunk_size,
        weighted_metrics=[keras.metrics.Accuracy(name="masked_accuracy")],
    )
    assert "kdpkit: " not in capfd.readouterr().err
    for one, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)
    assert ours.keys() == history.keys()
    for name, values in history.items():
        assert ours[name] == pytest.approx(values, rel=1e-5)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("of", ["Roberta", "DistilBert"])
def test_other_masked_language_models_train_as_over_all_logits(of):
    expected, history = with_all_logits(of)
    weights, ours = trained(
        2, of=of, weighted_metrics=[keras.metrics.Accuracy(name="masked_accuracy")]
    )
    for one, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)
    for name, values in history.items():
        assert ours[name] == pytest.approx(values, rel=1e-5)


@pytest.fixture
def halved(request):
    """Compute in 16 bits, as on GPUs."""
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy("float32")


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.usefixtures("halved")
@pytest.mark.parametrize(
    "halved",
    [
        "mixed_bfloat16",
        pytest.param("mixed_float16", marks=pytest.mark.tensorflow),  # JAX has none on CPUs
    ],
    indirect=True,
)
def test_in_mixed_precision_too():
    expected, history = with_all_logits()
    weights, ours = trained(
        1, weighted_metrics=[keras.metrics.Accuracy(name="masked_accuracy")], chunk_size=10
    )
    assert all(weight.dtype == "float32" for weight in weights)
    for one, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=0.03)
    assert ours["val_loss"] == pytest.approx(history["val_loss"], rel=0.01)
    assert ours["val_loss"][1] < ours["val_loss"][0]


def test_models_whose_logits_it_does_not_know_raise():
    plain = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="MaskedLMHead.*model='Sequential'"):
        training.MaskedLMLoop(plain, optimizer="sgd")
    squashed = small_bert(activation=keras.activations.softmax)
    with pytest.raises(ValueError, match="a function that the loss does not know"):
        training.MaskedLMLoop(squashed, optimizer="sgd")
    untied = small_bert()
    untied.masked_lm_head.token_embedding.tie_weights = False
    with pytest.raises(ValueError, match="weights of their own.*tie_weights=False"):
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
    with pytest.raises(ValueError, match="trains on `.x, y.`.*wanted=.*`kdpkit.pipelines.mask_tok"):
        loop.fit(tf.data.Dataset.from_tensor_slices(parts[of]).batch(4), epochs=1, verbose=0)
