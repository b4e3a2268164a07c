import contextlib
import functools
import json
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf

from kdpkit import strategies, testing
from kdpkit.training import replica_exact
from tests.training import exactness

SETTINGS = {setting.name: setting for setting in exactness.SETTINGS}
QUICK = [
    "last batch of one example: replicas without examples",
    "synchronized BatchNormalization, replicas without examples",
    "gradient_accumulation_steps with a schedule and clipping",
    "bool and string features",
]
OTHERS = [name for name in SETTINGS if name not in QUICK]


def mirrored(replicas):
    return strategies.select_strategy("mirrored", devices=replicas)


def cross_entropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compiled_on(strategy, make=testing.tiny_classifier, **arguments):
    with strategy.scope():
        model = make()
        model.compile("sgd", cross_entropy(), **arguments)
    return model


@functools.cache
def data():
    return testing.toy_classification(9)


@pytest.mark.parametrize("name", QUICK)
def test_replicas_train_what_one_device_trains(name):
    outcome = exactness.measure(SETTINGS[name], "replica_exact", 2, rows=exactness.UNEVEN)
    assert outcome.verdict == "equal", outcome


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    ("name", "column"),
    [
        *exactness.cells(OTHERS, ["replica_exact"]),
        *exactness.cells(QUICK, ["TrainingLoop"]),
        *exactness.cells(QUICK, ["replica_exact"], pytest.mark.exhaustive),
        *exactness.cells(OTHERS, ["TrainingLoop"], pytest.mark.exhaustive),
    ],
)
def test_every_setting_keeps_its_promise(name, column, replicas):
    outcome = exactness.measure(SETTINGS[name], column, replicas, rows=exactness.UNEVEN)
    assert outcome.verdict == SETTINGS[name].promise_in(column), outcome


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("verdict", "names"),
    [
        ("wrong", ["uneven last batch", "global_clipnorm", "reduction='mean_with_sample_weight'"]),
        (
            "crash",
            [
                "first batch no multiple of the replicas",
                "gradient_accumulation_steps",
                "steps_per_execution=2",
                "bool and string features",
                "train_step: adversaries with two optimizers",
            ],
        ),
    ],
)
def test_keras_alone_fails_where_replica_exact_does_not(verdict, names):
    outcomes = exactness.measure_apart("stock Keras", 2, names)
    assert {name: outcome.verdict for name, outcome in outcomes.items()} == dict.fromkeys(
        names, verdict
    )


def test_class_config_and_saved_file_stay_the_users(tmp_path):
    plain = compiled_on(mirrored(2))
    keras.utils.clear_session(free_memory=False)  # names start anew
    exact = replica_exact(compiled_on(mirrored(2)))
    assert type(exact) is type(plain)

    def saved_config(model, name):
        model.save(tmp_path / name)
        with zipfile.ZipFile(tmp_path / name) as archive:
            config = json.loads(archive.read("config.json"))
        return config["module"], config["class_name"], config["compile_config"]

    assert saved_config(exact, "exact.keras") == saved_config(plain, "plain.keras")
    loaded = keras.models.load_model(tmp_path / "exact.keras")
    np.testing.assert_array_equal(loaded(data()[0]), exact(data()[0]))
    assert "train_step" not in vars(loaded)


def test_a_model_for_one_device_stays_untouched():
    model = testing.tiny_classifier()
    before = set(vars(model))
    assert replica_exact(model) is model
    assert set(vars(model)) == before


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(keras.optimizers, "ScheduleFreeAdamW"), reason="this Keras does not have it"
)
def test_schedule_free_averages_start_from_the_weights_on_replicas_or_when_built_before():
    """For one device Keras compiles a start from zeros, which it does not make step by step."""

    def trained(*, replicas=None, built=False, **settings):
        keras.utils.set_random_seed(0)
        with mirrored(replicas).scope() if replicas else contextlib.nullcontext():
            model = replica_exact(testing.tiny_classifier())
            optimizer = keras.optimizers.ScheduleFreeAdamW(0.01)
            model.compile(optimizer, cross_entropy(), **settings)
        if built:
            optimizer.build(model.trainable_variables)
        model.fit(*data(), batch_size=4, epochs=2, shuffle=False, verbose=0)
        return np.concatenate([weight.ravel() for weight in model.get_weights()])

    by_steps = trained(run_eagerly=True)
    assert abs(trained() - by_steps).max() > 0.1
    for settings in ({"built": True}, {"replicas": 2}):
        np.testing.assert_allclose(trained(**settings), by_steps, atol=1e-5)


def test_calling_it_twice_changes_nothing_more():
    model = replica_exact(compiled_on(mirrored(2)))
    step = model.train_step
    assert replica_exact(model) is model
    assert model.train_step == step


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("in_scope", [False, True])
@pytest.mark.parametrize("compile_first", [False, True])
def test_it_may_be_called_anywhere_and_the_model_compiled_anywhere(in_scope, compile_first):
    def weights(replicas):
        keras.utils.set_random_seed(0)
        strategy = mirrored(replicas) if replicas > 1 else strategies.select_strategy("one")
        with strategy.scope():
            model = testing.tiny_classifier()
        optimizer = keras.optimizers.Adam(0.01)

        def compile_it():
            model.compile(optimizer, cross_entropy(), metrics=["accuracy"])

        steps = [compile_it, lambda: replica_exact(model)]
        for step in steps if compile_first else reversed(steps):
            if in_scope:
                with strategy.scope():
                    step()
            else:
                step()
        model.fit(*data(), batch_size=5, shuffle=False, verbose=0)
        return model.get_weights()

    for one, two in zip(weights(1), weights(2), strict=True):
        np.testing.assert_allclose(two, one, atol=1e-6)


@pytest.mark.slow
def test_a_model_compiled_anew_stays_exact():
    strategy = mirrored(2)
    model = replica_exact(compiled_on(strategy))
    model.fit(*data(), batch_size=5, verbose=0)
    with strategy.scope():
        model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), cross_entropy())
    model.fit(*data(), batch_size=5, verbose=0)
    assert int(model.optimizer.iterations) == 1


@pytest.mark.slow
def test_building_takes_no_batch_from_the_data():
    taken = []

    def batches():
        x, y = data()
        for start in range(0, 9, 3):
            taken.append(start)
            yield x[start : start + 3], y[start : start + 3]

    spec = tf.TensorSpec((None, 4), tf.float32), tf.TensorSpec((None,), tf.int32)
    dataset = tf.data.Dataset.from_generator(batches, output_signature=spec)
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(3))
    replica_exact(compiled_on(mirrored(2))).fit(dataset, epochs=2, verbose=0)
    assert taken == [0, 3, 6, 0, 3, 6]


def with_batch_norm():
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.BatchNormalization(name="norm"), keras.layers.Dense(3)]
    )


@pytest.mark.slow
def test_local_batch_statistics_are_warned_about_and_never_nan(tmp_path):
    model = compiled_on(mirrored(4), with_batch_norm, metrics=["accuracy"])
    model = replica_exact(model, batch_norm="replica")
    x, y = data()
    with pytest.warns(
        UserWarning, match=r"^[^\n]*\(norm\)[^\n]*batch_norm=\"global[^\n]*$"
    ) as seen:
        model.fit(x, y, batch_size=8, epochs=2, verbose=0)  # the last batch leaves three without
    assert len(seen) == 1
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    means = model.get_layer("norm").moving_mean.value
    for mean in means._values:
        np.testing.assert_allclose(mean, means._values[0], rtol=1e-6)
    model.save(tmp_path / "model.keras")
    alone = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(
        model.evaluate(x, y, verbose=0), alone.evaluate(x, y, verbose=0), rtol=1e-5
    )


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 1, 4])
def test_training_saved_on_four_replicas_goes_on_at_any_count(replicas, tmp_path):
    def make():
        with_norm = with_batch_norm()
        with_norm.layers[0].synchronized = True
        return with_norm

    def further(strategy):
        with strategy.scope():
            model = keras.models.load_model(tmp_path / "saved.keras")
        model = replica_exact(model)
        model.fit(*data(), batch_size=5, shuffle=False, verbose=0)
        return model.get_weights()

    with mirrored(4).scope():
        model = make()
        model.compile(keras.optimizers.Adam(0.01, clipnorm=0.1), cross_entropy())
    replica_exact(model).fit(*data(), batch_size=5, shuffle=False, verbose=0)
    model.save(tmp_path / "saved.keras")
    strategy = mirrored(replicas) if replicas > 1 else strategies.select_strategy("one")
    expected = further(strategies.select_strategy("one"))
    for weight, wanted in zip(further(strategy), expected, strict=True):
        np.testing.assert_allclose(weight, wanted, atol=1e-6)


# Steps that do more themselves than Keras does.


class Step(keras.Model):
    """A model whose `train_step` leaves the update to its subclasses."""

    def __init__(self):
        super().__init__()
        self.inner = testing.tiny_classifier()

    def call(self, inputs):
        return self.inner(inputs)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x))
        weights = self.trainable_weights
        self.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


class ByHand(Step):
    def apply(self, gradients, weights):
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(0.1 * gradient)


class ByHiddenOptimizer(Step):
    def __init__(self):
        super().__init__()
        hidden = keras.optimizers.SGD(0.1)
        self.get_optimizer = lambda: hidden

    def apply(self, gradients, weights):
        self.get_optimizer().apply(gradients, weights)


class InACondition(Step):
    def apply(self, gradients, weights):
        def apply():
            self.optimizer.apply(gradients, weights)
            return 0

        tf.cond(tf.reduce_sum(gradients[0]) > 0, apply, lambda: 0)


class WithItsOwnLoss(Step):
    def compute_loss(self, x, y, y_pred, sample_weight=None):  # noqa: ARG002  # Keras' signature
        return tf.reduce_sum(y_pred)

    def apply(self, gradients, weights):
        self.optimizer.apply(gradients, weights)


@pytest.mark.parametrize("make", [ByHand, ByHiddenOptimizer, WithItsOwnLoss])
def test_a_step_that_does_all_itself_trains_as_on_one_device(make):
    def weights(strategy):
        keras.utils.set_random_seed(0)
        model = replica_exact(compiled_on(strategy, make))
        model.fit(*data(), batch_size=5, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    expected = weights(strategies.select_strategy("one"))
    for weight, wanted in zip(weights(mirrored(2)), expected, strict=True):
        np.testing.assert_allclose(weight, wanted, atol=1e-6)


def test_a_step_that_applies_gradients_in_a_condition_trains_nothing():
    model = replica_exact(compiled_on(mirrored(2), InACondition))
    with pytest.raises(
        ValueError, match="inside a condition.*gradient_accumulation_steps.*Received: inside="
    ):
        model.fit(*data(), verbose=0)


def test_an_unbatched_dataset_raises():
    model = replica_exact(compiled_on(mirrored(2)))
    with pytest.raises(ValueError, match=r"single examples; batch it.*Received: element_spec="):
        model.fit(tf.data.Dataset.from_tensor_slices(data()))


def test_numbers_that_are_one_for_a_batch_get_a_sentence():
    numbered = tf.data.Dataset.from_tensor_slices(data()).batch(4).enumerate()
    model = replica_exact(compiled_on(mirrored(2)))
    with pytest.raises(ValueError, match="single numbers beside batches.*Received: element_spec="):
        model.fit(numbered)


def test_a_model_that_compiles_its_own_steps_raises():
    class Own(keras.Model):
        def make_train_function(self, force=False):
            raise NotImplementedError

    with mirrored(2).scope(), pytest.raises(ValueError, match="make_train_function.*train_step"):
        replica_exact(Own())


def test_a_model_built_outside_the_scope_raises():
    model, layer = testing.tiny_classifier(), keras.layers.Dense(2)
    layer.build((None, 4))
    with mirrored(2).scope():
        with pytest.raises(ValueError, match=r"outside the strategy's scope.*Received: strategy="):
            replica_exact(model)
        mixed = keras.Sequential([keras.Input((4,)), layer])
        with pytest.raises(ValueError, match=r"outside the strategy's scope.*variable='dense"):
            replica_exact(mixed)


def test_what_is_no_model_raises():
    with pytest.raises(ValueError, match="must be a Keras model. Received: model=3"):
        replica_exact(3)


class Lookahead(keras.optimizers.SGD):
    """Goes back half of the way to slow weights at every third step (Zhang et al. 2019)."""

    def build(self, variables):
        super().build(variables)
        self.slow = [self.add_variable_from_reference(v, "slow") for v in variables]
        for slow, fast in zip(self.slow, variables, strict=True):
            slow.assign(fast)

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate)
        slow = self.slow[self._get_variable_index(variable)]
        is_third = keras.ops.equal((self.iterations + 1) % 3, 0)
        between = slow + 0.5 * (variable - slow)
        slow.assign(keras.ops.where(is_third, between, slow))
        variable.assign(keras.ops.where(is_third, between, variable))


@pytest.mark.tensorflow
def test_an_optimizer_that_assigns_in_build_is_built_before_training():
    def trained(strategy, *, built=True):
        with strategy.scope():
            keras.utils.set_random_seed(0)
            model = replica_exact(testing.tiny_classifier())
            model.compile(Lookahead(0.1), cross_entropy())
            if built:
                model.optimizer.build(model.trainable_variables)
        model.fit(*data(), batch_size=4, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    with pytest.raises(ValueError, match=r"assigns variables in `build`.*slow.*optimizer\.build"):
        trained(mirrored(2), built=False)
    expected = trained(strategies.select_strategy("one"))
    for one, other in zip(expected, trained(mirrored(2)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
