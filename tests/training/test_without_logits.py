"""`without_logits` against Keras' `fit` with all logits; test_environments.py runs it on JAX."""

import keras
import keras_hub
import numpy as np
import pytest

from kdpkit import training
from kdpkit.training import _without_logits
from tests.training.exactness import ON_JAX, cross_entropy, scopes

VOCABULARY, LENGTH, MASKED, EXAMPLES = 53, 12, 3, 10
SIZES = {"num_layers": 1, "num_heads": 2, "hidden_dim": 8, "intermediate_dim": 16, "dropout": 0.0}
SIZES |= {"vocabulary_size": VOCABULARY, "max_sequence_length": LENGTH}
METRICS = {"weighted_metrics": ["accuracy"]}
random = np.random.default_rng(0)
TOKENS = random.integers(0, VOCABULARY, (EXAMPLES, LENGTH)).astype("int32")
POSITIONS = np.argsort(random.random((EXAMPLES, LENGTH)))[:, :MASKED].astype("int32")
WEIGHTS = random.choice([0.0, 1.0, 2.0], (EXAMPLES, LENGTH)).astype("float32")


def masked():
    """BERT, and its data: the last example predicts one token, the others three."""
    backbone = keras_hub.models.BertBackbone(**SIZES)
    backbone.get_layer("pooled_dense").trainable = False
    x = {"token_ids": TOKENS, "segment_ids": 0 * TOKENS, "padding_mask": TOKENS > 3}
    labels = np.take_along_axis(TOKENS, POSITIONS, axis=1)
    weights = np.ones((EXAMPLES, MASKED), "float32")
    weights[-1, 1:] = 0
    data = x | {"mask_positions": POSITIONS}, labels, weights
    return keras_hub.models.BertMaskedLM(backbone), data


def causal():
    backbone = keras_hub.models.GPT2Backbone(**SIZES)
    x = {"token_ids": TOKENS, "padding_mask": np.ones_like(TOKENS)}
    return keras_hub.models.GPT2CausalLM(backbone), (x, np.roll(TOKENS, -1, 1), WEIGHTS)


def untied():
    """A model of one's own, flat, with a mask, a regularizer and an embedding that is not tied."""
    table = keras_hub.layers.ReversibleEmbedding(VOCABULARY, 8, tie_weights=False)
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Dense(8, "tanh", kernel_regularizer="l2")(table(inputs))
    return keras.Model(inputs, table(x, reverse=True)), (TOKENS, np.roll(TOKENS, 1, 1), WEIGHTS)


def dense():
    layers = [keras.layers.Embedding(VOCABULARY, 8, mask_zero=not ON_JAX), keras.layers.Dense(53)]
    return keras.Sequential([keras.Input((LENGTH,), dtype="int32"), *layers]), (TOKENS, TOKENS)


def trained(count, build, *, chunk_size=None, **settings):
    """Train a model on devices, exact and without logits if `chunk_size` is passed."""
    keras.utils.set_random_seed(0)
    building, training_scope = scopes(count if chunk_size else None)
    with building:
        model, (x, y, *weights) = build()
        model.compile(keras.optimizers.SGD(0.5), cross_entropy(), **METRICS | settings)
    with training_scope:
        if chunk_size:
            training.replica_exact(training.without_logits(model, chunk_size=chunk_size))
        history = model.fit(
            *(x, y),
            sample_weight=weights[0] if weights else None,
            validation_data=(x, y, *weights),
            batch_size=4,
            epochs=2,
            shuffle=False,
            verbose=0,
        ).history
        return model, history, model.predict(x, verbose=0)


def assert_same(ours, theirs, rtol=1e-5, atol=2e-6):
    for one, other in zip(ours[0].get_weights(), theirs[0].get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=atol)
    assert ours[1].keys() == theirs[1].keys()
    for name, values in theirs[1].items():
        assert ours[1][name] == pytest.approx(values, rel=rtol)
    np.testing.assert_allclose(ours[2], theirs[2], atol=10 * atol)


@pytest.mark.slow
@pytest.mark.parametrize(("build", "count"), [(masked, 3), (causal, 3), (untied, 1), (dense, 3)])
def test_fit_trains_what_it_trains_with_all_logits(build, count, capfd):
    ours = trained(count, build, chunk_size=10)
    assert "kdpkit: " not in capfd.readouterr().err
    assert_same(ours, trained(1, build))


def test_the_model_is_saved_as_it_is_and_may_be_prepared_twice(tmp_path):
    model, (x, *_) = masked()
    training.without_logits(training.without_logits(model), chunk_size=7)
    logits = model.predict({name: part[:2] for name, part in x.items()}, verbose=0)
    assert logits.shape == (2, MASKED, VOCABULARY)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras", compile=False)
    assert type(loaded) is type(model)
    assert "call" not in vars(loaded.masked_lm_head)
    for one, other in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_states_at_positions_are_those_that_a_gather_takes():
    numbers = np.random.default_rng(0).normal(size=(3, 7, 4))
    states = keras.ops.cast(keras.ops.array(numbers, "float32"), "bfloat16")
    positions = keras.ops.array([[0, 6], [2, 2], [5, 1]], "int32")
    taken = keras.ops.take_along_axis(states, positions[..., None], axis=1)
    found = _without_logits._at_positions
    if not ON_JAX:  # where lengths may not be known beforehand
        import tensorflow as tf

        specs = tf.TensorSpec([None, None, 4], "bfloat16"), tf.TensorSpec([None, None], "int32")
        found = tf.function(found, input_signature=specs)
    found = found(states, positions)
    np.testing.assert_array_equal(*(keras.ops.cast(of, "float32") for of in (found, taken)))


def test_models_whose_logits_it_does_not_know_raise():
    with pytest.raises(ValueError, match="needs a model whose last layer.*last_layer='NoneType'"):
        training.without_logits(keras.Sequential())
    softmax = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, "softmax")])
    with pytest.raises(ValueError, match="not only products.*Dense.*softmax"):
        training.without_logits(softmax)
    capped = keras_hub.layers.ReversibleEmbedding(9, 8, logit_soft_cap=3.0)
    inputs = keras.Input((4,), dtype="int32")
    with pytest.raises(ValueError, match=r"not only products.*logit_soft_cap=3\.0"):
        training.without_logits(keras.Model(inputs, capped(capped(inputs), reverse=True)))
    with pytest.raises(ValueError, match="`chunk_size` must be.*chunk_size=0"):
        training.without_logits(softmax, chunk_size=0)


@pytest.mark.parametrize(
    ("loss", "metrics", "labels", "message"),
    [
        (cross_entropy(), ["accuracy"], None, "computed from labels"),
        ("mse", [], TOKENS, "cross-entropy.*loss='mse'"),
        (cross_entropy(ignore_class=0), [], TOKENS, "sample weights of 0"),
        (cross_entropy(), ["sparse_top_k_categorical_accuracy"], TOKENS, "no logits for this"),
    ],
)
def test_steps_that_need_something_else_get_one_sentence(loss, metrics, labels, message):
    model, _ = dense()
    training.without_logits(model).compile("sgd", loss, metrics=metrics)
    with pytest.raises(ValueError, match=message):
        model.evaluate(TOKENS, labels, verbose=0)


@pytest.mark.slow
def test_other_settings_of_compile():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        settings = {"jit_compile": True, "steps_per_execution": 2}
        ours, theirs = (trained(1, dense, chunk_size=size, **settings) for size in (8, None))
    finally:
        keras.config.set_dtype_policy("float32")
    assert_same(ours, theirs, rtol=2e-2, atol=2e-2)


def test_an_eager_step_with_a_bias_is_that_of_all_logits():
    def losses(prepare):
        keras.utils.set_random_seed(0)
        model = prepare(keras.Sequential([keras.Input((4,)), keras.layers.Dense(50)]))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, run_eagerly=True)
        x = np.random.default_rng(0).normal(size=(16, 4))
        return model.fit(x, np.arange(16), batch_size=8, shuffle=False, verbose=0).history["loss"]

    assert losses(training.without_logits) == pytest.approx(losses(lambda model: model), rel=1e-6)
