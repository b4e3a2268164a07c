"""The recipe with a loop of one's own trains, saves, draws and goes on."""

import json

import keras
import numpy as np
import pytest

from recipes import cnn_custom_loop


def run(*flags, replicas=2):
    return cnn_custom_loop.main(
        [
            *("--strategy", "mirrored" if replicas > 1 else "one", "--replicas", str(replicas)),
            *("--per-replica-batch-size", str(32 // replicas), "--steps-per-epoch", "6"),
            *("--epochs", "2", "--rule", "none", *map(str, flags)),
        ]
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train on two replicas, with everything that the recipe writes."""
    directory = tmp_path_factory.mktemp("custom_loop")
    results = run("--log-dir", directory, "--results", directory / "results.json")
    return directory, results


def is_a_picture(path):
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_it_prints_saves_and_draws_each_epoch(trained):
    directory, results = trained
    assert {"loss", "accuracy", "val_loss", "val_accuracy"} < set(results["history"])
    assert results["history"]["val_loss"][-1] == pytest.approx(results["test"]["loss"])
    assert results["steps"] == 12
    assert results["global_batch_size"] == 32
    assert json.loads((directory / "results.json").read_text()) == results
    assert {path.name for path in directory.glob("*.keras")} == {
        "epoch-01.keras",
        "epoch-02.keras",
    }
    assert is_a_picture(directory / "samples.png")
    assert is_a_picture(directory / "curves.png")


def test_it_goes_on_from_a_checkpoint_on_another_number_of_replicas(trained):
    directory, _ = trained
    results = run("--restore", directory / "epoch-01.keras", replicas=1)
    assert results["steps"] == 6 + 12
    saved = keras.models.load_model(directory / "epoch-01.keras")
    assert type(saved) is keras.Sequential


@pytest.mark.slow
def test_it_learns_the_digits_with_every_flag():
    results = cnn_custom_loop.main(
        [
            *("--strategy", "mirrored", "--replicas", "2", "--epochs", "6", "--accumulation", "2"),
            *("--steps-per-loop", "5", "--label-smoothing", "0.1", "--base-learning-rate", "3e-3"),
        ]
    )
    assert results["test"]["accuracy"] > 0.93
    assert results["steps"] == 6 * 12  # 1,442 images in batches of 128, the last one of 34


def test_smoothing_is_that_of_keras_and_for_training_alone():
    x = np.random.default_rng(0).integers(0, 255, (5, 8, 8, 1), "uint8")
    y = np.array([0, 1, 2, 1, 0])
    model = cnn_custom_loop.build_model((8, 8, 1), 3)
    loop = cnn_custom_loop.Smoothed(
        model, optimizer="sgd", loss="sparse_categorical_crossentropy", label_smoothing=0.2
    )
    model.layers[-2].rate = 0.0
    losses, predictions = loop.per_example_loss(x, y, training=True)
    one_hot = keras.ops.one_hot(y, 3)
    expected = keras.losses.categorical_crossentropy(one_hot, predictions, label_smoothing=0.2)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    losses, predictions = loop.per_example_loss(x, y, training=False)
    expected = keras.losses.categorical_crossentropy(one_hot, predictions)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--restore", "none.keras"], "--restore.*none.keras"),
        (["--steps-per-loop", "0"], "`steps_per_loop` must be a positive integer"),
        (["--accumulation", "0"], "`accumulation` must be a positive integer"),
    ],
)
def test_bad_flags_get_one_sentence(flags, sentence):
    with pytest.raises(ValueError, match=sentence):
        run(*flags, replicas=1)
