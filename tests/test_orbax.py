"""Checkpoints of Keras' callback for Orbax, between the kit, stock Keras and plain Orbax."""

import gc
import shutil

import keras
import numpy as np
import orbax.checkpoint as ocp
import pytest

from kdpkit import checkpoints, training

ON_JAX = keras.backend.backend() == "jax"
SHARDED = pytest.mark.parametrize(
    "shard",
    ["none", "optimizer", "weights"] if ON_JAX else [pytest.param("none", marks=pytest.mark.slow)],
)
X = np.random.default_rng(0).normal(size=(22, 64)).astype("float32")

pytestmark = [
    pytest.mark.needs(keras="3.14", reason="there is no `keras.callbacks.OrbaxCheckpoint`"),
    pytest.mark.filterwarnings(
        # Orbax's own: what it reads by itself, and how it ends.
        "ignore:Sharding info not provided when restoring:UserWarning",
        "ignore::DeprecationWarning:orbax",
        "ignore::DeprecationWarning:keras",
    ),
]


def several(shard="none"):
    """Return a strategy of four devices."""
    if ON_JAX:
        from kdpkit import sharding

        return sharding.DataParallel(4, shard=shard)
    from kdpkit import strategies

    return strategies.select_strategy("mirrored", devices=strategies.split_device("CPU", 4))


def compiled(first="first", width=128):
    """Return a functional model: Keras loses the names of others (keras-team/keras#23251)."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    inputs = keras.Input((64,))
    x = layers.Dense(width, "relu", name=first)(inputs)
    x = layers.BatchNormalization(name="norm")(layers.Dropout(0.2)(x))
    model = keras.Model(inputs, layers.Dense(64, name="last")(x))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def saved(directory, model):
    """Train two epochs with Keras' callback, and return the values that it saved."""
    saving = keras.callbacks.OrbaxCheckpoint(str(directory))
    model.fit(X, X, batch_size=8, epochs=2, callbacks=[saving], verbose=0)
    return values_of(model)


def values_of(model):
    groups = {"model": model.variables, "optimizer": model.optimizer.variables}
    return {name: np.array(array) for name, array in checkpoints.values_of(groups).items()}


def assert_equal(model, expected):
    found = values_of(model)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@SHARDED
def test_several_devices_save_and_one_device_reads_with_keras_and_with_orbax(tmp_path, shard):
    strategy = several(shard)
    with strategy.scope():
        model = training.replica_exact(compiled())
        expected = saved(tmp_path, model)
    one = compiled()
    checkpoints.load_orbax(one, tmp_path)
    assert_equal(one, expected)
    stock = keras.models.load_model(tmp_path)
    for left, right in zip(stock.get_weights(), one.get_weights(), strict=True):
        if left.dtype != "uint32":  # Keras numbers seeds in each process, and loads them by name
            np.testing.assert_array_equal(left, right)
    with ocp.StandardCheckpointer() as plain:
        tree = plain.restore(tmp_path / "1" / "pytree")
    kernel = one.get_layer("first").kernel
    np.testing.assert_array_equal(tree["trainable_variables"]["first"]["kernel"], kernel)


@SHARDED
def test_one_device_saves_with_stock_keras_and_several_train_on_as_it_does(tmp_path, shard):
    stock = compiled()
    expected = saved(tmp_path, stock)
    strategy = several(shard)
    with strategy.scope():
        model = training.replica_exact(compiled())
        checkpoints.load_orbax(model, tmp_path)
        assert_equal(model, expected)
        if shard == "weights":
            assert not model.get_layer("first").kernel.value.sharding.is_fully_replicated
        model.fit(X, X, batch_size=8, shuffle=False, verbose=0)
    training.replica_exact(stock).fit(X, X, batch_size=8, shuffle=False, verbose=0)
    for name, array in values_of(stock).items():
        np.testing.assert_allclose(values_of(model)[name], array, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("orbax")
    saved(directory, compiled())
    return directory


def test_a_checkpoint_of_another_model_is_one_sentence(checkpoint):
    model = compiled(width=64)
    before = model.get_weights()
    sentence = r"of another model.*first/kernel', shape=\(64, 64\), saved_shape=\(64, 12"
    with pytest.raises(ValueError, match=sentence):
        checkpoints.load_orbax(model, checkpoint)
    for left, right in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(left, right)
    with pytest.raises(ValueError, match="first_that_differs='trainable_variables/other/"):
        checkpoints.load_orbax(compiled(first="other"), checkpoint)


def cut_arrays(directory):
    for path in directory.glob("1/pytree/**/d/*"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.filterwarnings(
    "ignore:coroutine .* was never awaited:RuntimeWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",  # Orbax leaves what it was reading
)
@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (cut_arrays, "is damaged or cannot be read"),
        (
            lambda directory: (directory / "1").rename(directory / "1.orbax-tmp"),
            "no complete Orbax",
        ),
    ],
)
def test_a_damaged_or_empty_directory_is_one_sentence(checkpoint, tmp_path, damage, sentence):
    directory = tmp_path / "copy"
    shutil.copytree(checkpoint, directory)
    damage(directory)
    with pytest.raises(ValueError, match=sentence) as raised:
        checkpoints.load_orbax(compiled(), directory)
    assert "\n" not in str(raised.value)
    del raised
    gc.collect()
