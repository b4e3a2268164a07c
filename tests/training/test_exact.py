"""`replica_exact` beside stock Keras on one device.

On both backends: tests/test_environments.py runs this file again on JAX.
"""

import functools
import itertools
import json
import zipfile

import jax
import keras
import numpy as np
import pytest
import tensorflow as tf

from kdpkit import strategies, testing
from kdpkit.training import replica_exact
from tests.training import exactness
from tests.training.exactness import ON_JAX, assert_close, assert_same_weights, cross_entropy

SETTINGS = {setting.name: setting for setting in exactness.SETTINGS}
NO_EXAMPLES = "last batch of one example: replicas without examples"
ACCUMULATION = "gradient_accumulation_steps with a schedule and clipping"
WEIGHTED = "reduction='mean_with_sample_weight'"
MASKED = "Embedding(mask_zero=True) and LSTM, a loss for every token"
ON_BATCHES = "train_on_batch, test_on_batch, predict_on_batch"
QUICK = [
    NO_EXAMPLES,
    "synchronized BatchNormalization, replicas without examples",
    ACCUMULATION,
]
BY_OWN_STEP = [*QUICK, "reduction='sum'", ON_BATCHES, "run_eagerly=True"]
OTHERS = [name for name, s in SETTINGS.items() if not s.repeats and name not in QUICK]
# What the backends do differently; `python -m tools.exactness` measures all.
ON_JAX_BY_COLUMN = {
    "replica_exact on JAX": [
        *(NO_EXAMPLES, ACCUMULATION, WEIGHTED, "Dropout", "sparse features"),
        "first batch no multiple of the replicas",
        "several outputs with loss_weights",
        "validation, evaluate and predict, uneven",
        "BatchNormalization, replicas without examples",
        "steps_per_execution=2",
    ],
    exactness.OWN_STEP_ON_JAX: [NO_EXAMPLES, ACCUMULATION, ON_BATCHES, "use_ema"],
    exactness.SHARED: [NO_EXAMPLES, "sparse features", MASKED, ACCUMULATION],
}
X, Y = testing.toy_classification(9)


def mirrored(replicas):
    return strategies.select_strategy("mirrored", devices=replicas)


def compiled_on(strategy, make=testing.tiny_classifier, optimizer="sgd", **arguments):
    with strategy.scope():
        model = make()
        model.compile(optimizer, cross_entropy(), **arguments)
    return model


# The table of exactness.


def cells():
    slow = pytest.mark.slow
    if ON_JAX:
        columns = ON_JAX_BY_COLUMN.items()
        by_column = [exactness.cells(names, [c], slow, pytest.mark.jax) for c, names in columns]
        return [*itertools.chain(*by_column)]
    return [
        *exactness.cells(QUICK, ["replica_exact"]),
        *exactness.cells(OTHERS, ["replica_exact"], slow),
        *exactness.cells(BY_OWN_STEP, [exactness.OWN_STEP], slow),
    ]


@pytest.mark.parametrize(("name", "column"), cells())
def test_every_setting_keeps_its_promise(name, column):
    replicas = 4 if column == exactness.SHARED else 2
    outcome = exactness.measure(SETTINGS[name], column, replicas, rows=exactness.UNEVEN)
    assert outcome.verdict == SETTINGS[name].promise_in(column), outcome


@pytest.mark.slow
@pytest.mark.tensorflow
def test_stock_keras_is_found_to_train_something_else():
    outcome = exactness.measure(SETTINGS["uneven last batch"], "stock Keras", 2)
    assert outcome.verdict == "wrong"


# The model, and when it is called.


@pytest.mark.tensorflow
def test_class_config_and_saved_file_stay_the_users(tmp_path):
    plain = compiled_on(mirrored(2))
    keras.utils.clear_session(free_memory=False)  # names start again
    exact = replica_exact(compiled_on(mirrored(2)))
    assert type(exact) is type(plain)

    def saved_config(model, name):
        model.save(tmp_path / name)
        with zipfile.ZipFile(tmp_path / name) as archive:
            config = json.loads(archive.read("config.json"))
        return config["module"], config["class_name"], config["compile_config"]

    assert saved_config(exact, "exact.keras") == saved_config(plain, "plain.keras")
    loaded = keras.models.load_model(tmp_path / "exact.keras")
    np.testing.assert_array_equal(loaded(X), exact(X))
    assert "train_step" not in vars(loaded)


@pytest.mark.tensorflow
def test_a_model_for_one_device_stays_untouched():
    model = testing.tiny_classifier()
    before = set(vars(model))
    assert replica_exact(model) is model
    # These only raise, where a strategy was forgotten: test_forgotten_scope.py
    added = {f"make_{kind}_function" for kind in ("train", "test", "predict")}
    assert set(vars(model)) == before | added


def test_calling_it_twice_changes_nothing_more():
    building, training = exactness.scopes(2)
    with training:
        with building:
            model = testing.tiny_classifier()
        step = replica_exact(model).train_step
        assert replica_exact(model) is model
        assert model.train_step == step


@pytest.mark.slow
@pytest.mark.tensorflow
def test_the_model_may_be_compiled_after_it_and_outside_the_scope_and_again():
    def trained(strategy):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = testing.tiny_classifier()
        replica_exact(model)
        optimizers = ["adam", keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)]
        if hasattr(keras.optimizers, "MultiOptimizer"):  # since Keras 3.15
            of_biases = {".*bias": keras.optimizers.Adam(clipnorm=0.1, use_ema=True)}
            of_all = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1), of_biases)
            optimizers.insert(1, keras.optimizers.MultiOptimizer(of_all))
        for optimizer in optimizers:
            model.compile(optimizer, cross_entropy(), metrics=["accuracy"])
            model.fit(X, Y, batch_size=5, shuffle=False, verbose=0)
        return model

    one, two = trained(strategies.select_strategy("one")), trained(mirrored(2))
    assert_same_weights(two, one)
    assert int(two.optimizer.iterations) == 1


@pytest.mark.slow
@pytest.mark.tensorflow
def test_building_takes_no_batch_from_the_data():
    taken = []

    def of_three():
        for start in range(0, 9, 3):
            taken.append(start)
            yield X[start : start + 3], Y[start : start + 3]

    spec = tf.TensorSpec((None, 4), tf.float32), tf.TensorSpec((None,), tf.int32)
    dataset = tf.data.Dataset.from_generator(of_three, output_signature=spec)
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(3))
    replica_exact(compiled_on(mirrored(2))).fit(dataset, epochs=2, verbose=0)
    assert taken == [0, 3, 6, 0, 3, 6]


@pytest.mark.slow
@pytest.mark.tensorflow
def test_training_saved_on_four_replicas_goes_on_at_any_count(tmp_path):
    def further(strategy):
        with strategy.scope():
            model = replica_exact(keras.models.load_model(tmp_path / "saved.keras"))
        model.fit(X, Y, batch_size=5, shuffle=False, verbose=0)
        return model

    def make():
        norm = keras.layers.BatchNormalization(synchronized=True)
        return keras.Sequential([keras.Input((4,)), norm, keras.layers.Dense(3)])

    model = compiled_on(mirrored(4), make, keras.optimizers.Adam(0.01, clipnorm=0.1))
    replica_exact(model).fit(X, Y, batch_size=5, shuffle=False, verbose=0)
    model.save(tmp_path / "saved.keras")
    assert_same_weights(further(mirrored(2)), further(strategies.select_strategy("one")))


class Lookahead(keras.optimizers.SGD):
    """Goes back a part of the way to slow weights at every step (Zhang et al. 2019)."""

    def build(self, variables):
        super().build(variables)
        self.slow = [self.add_variable_from_reference(v, "slow") for v in variables]
        for slow, fast in zip(self.slow, variables, strict=True):
            slow.assign(fast)

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate)
        slow = self.slow[self._get_variable_index(variable)]
        slow.assign(0.9 * slow + 0.1 * variable)
        variable.assign(0.5 * (slow + variable))


@pytest.mark.slow
@pytest.mark.tensorflow
@pytest.mark.parametrize("are_known", [True, False], ids=["known lengths", "unknown lengths"])
def test_parts_of_other_lengths_are_the_same_on_replicas(are_known):
    def towers():
        one, other = keras.Input((4,)), keras.Input((4,))
        dense = keras.layers.Dense
        return keras.Model([one, other], [dense(1, name="p")(one), dense(1, name="q")(other)])

    parts = (X[:3], X), (Y[:3], Y)
    spec = tf.nest.map_structure(
        lambda array: tf.TensorSpec(
            [len(array) if are_known else None, *array.shape[1:]], array.dtype
        ),
        parts,
    )
    data = tf.data.Dataset.from_generator(lambda: iter([parts]), output_signature=spec)
    data = data.apply(tf.data.experimental.assert_cardinality(1))
    found = []
    for replicas in (1, 3):
        keras.utils.set_random_seed(0)
        with mirrored(replicas).scope():
            model = replica_exact(towers())
            model.compile("sgd", ["mse", "mse"])
        history = model.fit(data, verbose=0).history
        loss, *_ = model.train_on_batch(*map(list, parts))  # Keras 3.13 weighs those of outputs
        found.append((history, loss, model.get_weights()))
    assert_close(*map(tf.nest.flatten, found), atol=0)


@pytest.mark.tensorflow
def test_texts_that_are_objects_are_split_by_the_methods_of_one_batch():
    texts, found = np.array([*"abcab"], object), []
    for replicas in (1, 2):
        keras.utils.set_random_seed(0)
        with mirrored(replicas).scope():
            words = keras.Input((), dtype="string")
            table = keras.layers.StringLookup(vocabulary=["a", "b", "c"])
            outputs = keras.layers.Dense(1)(keras.layers.Embedding(5, 4)(table(words)))
            model = replica_exact(keras.Model(words, outputs))
            model.compile("sgd", "mse")
        losses = [model.train_on_batch(texts, np.arange(5.0)) for _ in range(2)]
        found.append((losses, model.predict_on_batch(texts)))
    assert_close(*found, atol=0)


@pytest.mark.tensorflow
def test_a_step_that_is_set_on_the_model_afterwards_sees_the_global_batch():
    model = replica_exact(compiled_on(mirrored(2)))
    model.train_step = lambda data: {"examples": tf.shape(data[0])[0]}
    logs = model.fit(X, Y, batch_size=9, verbose=0).history
    assert logs == {"examples": [9]}


@pytest.mark.tensorflow
def test_a_loss_that_is_no_number_on_one_replica_ends_training():
    x = X.copy()
    x[5] = np.nan  # in the second batch, of the second replica
    model = replica_exact(compiled_on(mirrored(2)))
    terminate = keras.callbacks.TerminateOnNaN()
    model.fit(x, Y, batch_size=3, shuffle=False, epochs=2, callbacks=[terminate], verbose=0)
    assert (len(model.history.epoch), int(model.optimizer.iterations)) == (1, 2)


@pytest.mark.tensorflow
def test_an_optimizer_that_assigns_in_build_is_built_before_training():
    def trained(strategy, *, built=True):
        with strategy.scope():
            keras.utils.set_random_seed(0)
            model = replica_exact(testing.tiny_classifier())
            model.compile(Lookahead(0.1), cross_entropy())
            if built:
                model.optimizer.build(model.trainable_variables)
        model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        return model

    with pytest.raises(ValueError, match=r"assigns variables in `build`.*slow.*optimizer\.build"):
        trained(mirrored(2), built=False)
    assert_same_weights(trained(mirrored(2)), trained(strategies.select_strategy("one")))


# On JAX: what it takes, and what stays when something fails.

SIZE, DEVICES = 4, 4  # 11 examples: a last batch of 3, which 4 devices do not divide
MORE_X, MORE_Y = testing.toy_classification(11)


def net():
    keras.utils.set_random_seed(0)
    layers = keras.layers
    inner = [layers.Dense(8, "tanh"), layers.BatchNormalization(), layers.Dropout(0.3)]
    model = keras.Sequential([keras.Input((4,)), *inner, layers.Dense(3)])
    model.compile("sgd", cross_entropy())
    return model


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return MORE_X[index * SIZE :][:SIZE], MORE_Y[index * SIZE :][:SIZE]


def generator():
    for index in itertools.count():
        yield Batches()[index % 3]


def grain_map():
    grain = pytest.importorskip("grain")
    return grain.MapDataset.source([*zip(MORE_X, MORE_Y, strict=True)]).batch(SIZE)


def grain_iterator():
    return grain_map().to_iter_dataset()


def tf_data():
    return tf.data.Dataset.from_tensor_slices((MORE_X, MORE_Y)).batch(SIZE)


@functools.cache
def on_one_device():
    model = net()
    model.fit(MORE_X, MORE_Y, batch_size=SIZE, epochs=2, shuffle=False, verbose=0)
    return model


def by_fit(data):
    with exactness.scopes(DEVICES)[1]:
        model = replica_exact(net())
        steps = 3 if data is generator else None
        model.fit(data(), epochs=2, steps_per_epoch=steps, shuffle=False, verbose=0)
        return model, model.predict(Batches(), verbose=0)


@pytest.mark.jax
@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # Keras of Grain's
@pytest.mark.parametrize("data", [generator, grain_iterator, grain_map, tf_data])
def test_every_kind_of_input_trains_as_arrays_on_one_device(data):
    model, predictions = by_fit(data)
    assert_same_weights(model, on_one_device())
    expected = on_one_device().predict(MORE_X, batch_size=SIZE, verbose=0)
    np.testing.assert_allclose(predictions, expected, atol=1e-5)


@pytest.mark.jax
@pytest.mark.parametrize("exact", [True, False], ids=["replica_exact", "Keras alone"])
def test_weights_stay_when_evaluation_fails(exact):
    wrong = np.ones((4, 7), "float32")
    with exactness.scopes(2)[1]:
        model = replica_exact(net()) if exact else net()
        model.fit(X[:4], Y[:4], verbose=0)
        before = model.get_weights()
        for failing in (model.evaluate, model.predict) if exact else (model.predict,):
            with pytest.raises(ValueError, match="incompatible"):
                failing(wrong, verbose=0)
        if exact:
            np.testing.assert_equal(model.get_weights(), before)
            model.fit(X[:4], Y[:4], verbose=0)
        else:
            assert model.weights[0]._value is None  # the reason for all this


@pytest.mark.jax
def test_a_model_with_averaged_weights_goes_on_after_fit():
    """Stock Keras cannot: by hand its weights and averages get arrays of their own."""

    def trained(devices):
        keras.utils.set_random_seed(0)
        with exactness.scopes(devices)[1]:
            model = replica_exact(net()) if devices else net()
            model.compile(keras.optimizers.Adam(0.1, use_ema=True), cross_entropy())
            for _ in range(2):
                model.fit(X, Y, batch_size=9, shuffle=False, verbose=0)
                for variable in () if devices else model.optimizer.variables:
                    variable.assign(jax.numpy.copy(variable.value))
            model.train_on_batch(X, Y)
            return *model.get_weights(), model.predict(X, verbose=0)

    assert_close(trained(2), trained(None))


class Failing(Batches):
    def __getitem__(self, index):
        if index == 2:
            raise OSError("the disk is gone")
        return X[:4], Y[:4]


@pytest.mark.jax
def test_an_error_in_the_data_leaves_what_was_learned():
    with exactness.scopes(2)[1]:
        model, expected = replica_exact(net()), replica_exact(net())
        for _ in range(2):
            expected.train_on_batch(X[:4], Y[:4])
        with pytest.raises(OSError, match="the disk is gone"):
            model.fit(Failing(), shuffle=False, verbose=0)
        assert_same_weights(model, expected)


@pytest.mark.jax
def test_callbacks_read_and_change_what_the_next_step_goes_on_from():
    seen = []

    class Doubling(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):  # noqa: ARG002 a method's arguments
            model = self.model  # which has Keras put the values of the step into the variables
            seen.append(float(np.sum(model.weights[0])))
            model.weights[0].assign(2 * model.weights[0])
            model.optimizer.learning_rate = 0.0

    with exactness.scopes(2)[1]:
        model = replica_exact(net())
        start = float(np.sum(model.weights[0]))
        model.fit(Batches(), callbacks=[Doubling()], shuffle=False, verbose=0)
    assert seen[0] != start
    assert seen[1:] == pytest.approx([2 * seen[0], 4 * seen[0]])
    for variable in model.variables[1:]:
        assert variable.value.sharding.device_set == set(jax.devices()[:2])
        assert variable.value.sharding.is_fully_replicated


@pytest.mark.jax
def test_predictions_for_a_graph_have_other_first_axes_than_its_edges():
    class Graph(keras.Model):
        def call(self, inputs):
            nodes, edges = inputs
            sent = keras.ops.take(nodes, edges[:, 0], axis=0)
            return nodes + keras.ops.segment_sum(sent, edges[:, 1], num_segments=7)

    class Graphs(Batches):
        def __getitem__(self, index):
            edges = np.stack([np.arange(4 + index), np.arange(4 + index)[::-1]], axis=1)
            return ((np.full((7, 2), index, "float32"), edges.astype("int32")),)

    expected = Graph().predict(Graphs(), verbose=0)
    with exactness.scopes(2)[1]:
        np.testing.assert_array_equal(replica_exact(Graph()).predict(Graphs()), expected)


@pytest.mark.slow
@pytest.mark.tensorflow
def test_endless_data_are_asked_for_their_steps_by_the_name_that_the_method_has():
    with strategies.select_strategy("mirrored", devices=2).scope():
        model = replica_exact(net())
        model.compile("sgd", model.loss)
    endless = tf.data.Dataset.from_tensors((X[:4], Y[:4])).repeat()
    with pytest.raises(ValueError, match="`x` never ends; say with `steps` how much"):
        model.evaluate(endless)
    with pytest.raises(ValueError, match="say with `steps_per_epoch`"):
        model.fit(endless)
    assert np.isfinite(model.evaluate(endless, None, None, 0, None, 3))


@pytest.mark.jax
def test_what_is_made_outside_of_the_scope_is_put_on_its_devices():
    one, many = net(), net()
    with exactness.scopes(2)[1]:
        replica_exact(many)
    for model in (one, many):
        model.compile(keras.optimizers.Adam(0.01), model.loss, metrics=["accuracy"])
        model.optimizer.build(model.trainable_variables)
        model.fit(Batches(), shuffle=False, verbose=0)
    assert_same_weights(many, one)
    for variable in [*many.variables, *many.optimizer.variables]:
        assert variable.value.sharding.device_set == {*jax.devices()[:2]}


@pytest.mark.tensorflow
def test_a_schedule_is_asked_once_a_step():
    """Keras asks it for each variable; tests/training/test_own_steps.py has steps of one's own."""

    class Counted(keras.optimizers.schedules.LearningRateSchedule):
        calls = 0

        def __call__(self, step):
            Counted.calls += 1
            return 0.1 / (1.0 + keras.ops.cast(step, "float32"))

    one = net()
    one.compile(keras.optimizers.AdamW(Counted()), one.loss)
    one.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    Counted.calls = 0
    with mirrored(2).scope():
        many = replica_exact(net())
        many.compile(keras.optimizers.AdamW(Counted()), many.loss)
    many.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    assert Counted.calls == 1  # for three steps of four weights each, that are traced once
    assert_same_weights(many, one)


# Bad input.


@pytest.mark.tensorflow
def test_a_dataset_without_batches_raises():
    model = replica_exact(compiled_on(mirrored(2)))
    data = tf.data.Dataset.from_tensor_slices((X, Y))
    with pytest.raises(ValueError, match=r"single examples; batch it.*Received: element_spec="):
        model.fit(data)
    with pytest.raises(ValueError, match=r"single numbers beside batches.*element_spec="):
        model.fit(data.batch(4).enumerate())


@pytest.mark.tensorflow
def test_a_model_that_compiles_its_own_steps_raises():
    class Own(keras.Model):
        def make_train_function(self, force=False):
            raise NotImplementedError

    with mirrored(2).scope(), pytest.raises(ValueError, match="make_train_function.*train_step"):
        replica_exact(Own())


@pytest.mark.tensorflow
def test_a_model_built_outside_the_scope_raises():
    model, layer = testing.tiny_classifier(), keras.layers.Dense(2)
    layer.build((None, 4))
    with mirrored(2).scope():
        with pytest.raises(ValueError, match=r"outside the strategy's scope.*Received: strategy="):
            replica_exact(model)
        mixed = keras.Sequential([keras.Input((4,)), layer])
        with pytest.raises(ValueError, match=r"outside the strategy's scope.*variable='dense"):
            replica_exact(mixed)
