"""The recipe with a loop of one's own trains, saves, draws and goes on."""

import json

import keras
import numpy as np
import pytest

from kdpkit import experiment
from recipes import cnn_custom_loop

ON_ONE = ("--strategy", "one", "--replicas", "1", "--smoke")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train on two replicas, with most flags and everything that the recipe writes."""
    directory = tmp_path_factory.mktemp("custom_loop")
    results = cnn_custom_loop.main(
        [
            *("--strategy", "mirrored", "--replicas", "2", "--epochs", "6", "--accumulation", "2"),
            *("--steps-per-loop", "5", "--label-smoothing", "0.1", "--base-learning-rate", "3e-3"),
            *("--log-dir", str(directory), "--results", str(directory / "results.json")),
        ]
    )
    return directory, results


def is_a_figure(path):
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


@pytest.mark.slow
def test_it_learns_the_digits_and_saves_and_draws_each_epoch(trained):
    directory, results = trained
    assert results["test"]["accuracy"] > 0.93
    assert results["steps"] == 6 * 12  # 1,442 images in batches of 128, the last one of 34
    assert {"loss", "accuracy", "val_loss", "val_accuracy"} < set(results["history"])
    assert results["history"]["val_loss"][-1] == pytest.approx(results["test"]["loss"])
    assert json.loads((directory / "results.json").read_text()) == results
    assert {path.name for path in directory.glob("*.keras")} == {
        f"epoch-0{epoch}.keras" for epoch in range(1, 7)
    }
    assert is_a_figure(directory / "samples.png")
    assert is_a_figure(directory / "curves.png")


@pytest.mark.slow
def test_it_goes_on_from_a_checkpoint_on_another_number_of_replicas(trained):
    checkpoint = trained[0] / "epoch-01.keras"
    results = cnn_custom_loop.main([*ON_ONE, "--restore", str(checkpoint)])
    assert results["steps"] == 12 + 2 * 4
    assert type(keras.models.load_model(checkpoint)) is keras.Sequential


@pytest.mark.slow
def test_without_the_remainder_it_tests_the_same_images_in_batches_of_one_size():
    kept, dropped = (
        cnn_custom_loop.main([*ON_ONE, "--epochs", "1", "--remainder", remainder])
        for remainder in ("keep", "drop")
    )
    assert kept["history"]["loss"] == dropped["history"]["loss"]  # four full batches
    assert kept["test"] == pytest.approx(dropped["test"], rel=1e-5)


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


def saved(model, path, learning_rate=1e-3):
    model.compile(keras.optimizers.Adam(learning_rate), "sparse_categorical_crossentropy")
    model.optimizer.build(model.trainable_variables)
    model.save(path)
    return path


@pytest.mark.parametrize(
    ("save", "reason"),
    [
        (lambda path: path.write_bytes(b"hello"), "Pass a complete .keras file"),
        (lambda path: path.mkdir(), "Pass a complete .keras file"),
        (lambda _: None, "File not found"),
        (
            lambda path: saved(cnn_custom_loop.build_model((4, 4, 1), 10), path),
            r"\(None, 4, 4, 1\) to .* need \(None, 8, 8, 1\)",
        ),
        (
            lambda path: saved(cnn_custom_loop.build_model((8, 8, 1), 4), path),
            r"to \(None, 4\), .* to \(None, 10\)",
        ),
        (lambda path: cnn_custom_loop.build_model((8, 8, 1), 10).save(path), "no attribute"),
        (
            lambda path: saved(
                cnn_custom_loop.build_model((8, 8, 1), 10),
                path,
                keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9),
            ),
            "LearningRateSchedule",
        ),
    ],
)
def test_what_training_cannot_go_on_from_gets_one_sentence(tmp_path, save, reason):
    path = tmp_path / "model.keras"
    save(path)
    with pytest.raises(experiment.InputError, match=rf"--restore: .*{path}.*{reason}") as raised:
        cnn_custom_loop.restore(path, (8, 8, 1), 10, 1e-3)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("value", ["1", "-0.1", "nan", "much"])
def test_label_smoothing_is_a_fraction_below_1(value):
    with pytest.raises(experiment.InputError, match=rf"--label-smoothing: .*'{value}'"):
        cnn_custom_loop.parse([f"--label-smoothing={value}"])
    assert cnn_custom_loop.parse(["--label-smoothing", "0.9"]).label_smoothing == 0.9
