"""The recipe with a loop of one's own trains, saves, draws and goes on."""

import json
import pathlib
import signal
import subprocess
import sys
import time

import hypothesis
import keras
import numpy as np
import pytest
from hypothesis import strategies as st

from kdpkit import experiment
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_it_goes_on_from_a_checkpoint_on_another_number_of_replicas(trained):
    directory, _ = trained
    results = run("--restore", directory / "epoch-01.keras", replicas=1)
    assert results["steps"] == 6 + 12
    saved = keras.models.load_model(directory / "epoch-01.keras")
    assert type(saved) is keras.Sequential


@pytest.mark.slow
def test_a_run_that_is_over_stays_so(tmp_path):
    first = run("--resume", tmp_path)
    with pytest.warns(UserWarning, match="Nothing is left to train"):
        second = run("--resume", tmp_path)
    assert second["history"] == first["history"]
    assert second["test"] == pytest.approx(first["test"])


@pytest.mark.slow
def test_killed_in_training_it_leaves_checkpoints_from_which_it_goes_on(tmp_path):
    recipe = [sys.executable, cnn_custom_loop.__file__, "--steps-per-epoch", "2"]
    with (tmp_path / "printed").open("w") as printed:
        running = subprocess.Popen(
            [*recipe, "--epochs", "10000", "--log-dir", tmp_path], stdout=printed, stderr=printed
        )
    try:
        wait_until(lambda: (tmp_path / "epoch-03.keras").exists() or running.poll() is not None)
    finally:
        running.kill()
    assert running.wait() == -signal.SIGKILL, (tmp_path / "printed").read_text()
    saved = sorted(tmp_path.glob("epoch-*.keras"))
    steps = [keras.models.load_model(path).optimizer.iterations for path in saved]
    assert [int(step) for step in steps] == [2 * n for n in range(1, len(saved) + 1)]
    assert run("--restore", saved[-1], replicas=1)["steps"] == 2 * len(saved) + 12


def wait_until(true, seconds=120):
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.01)


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


@pytest.mark.slow
def test_without_the_remainder_it_tests_the_same_images_in_batches_of_one_size():
    flags = ("--strategy", "mirrored", "--replicas", "2", "--smoke", "--epochs", "1")
    kept, dropped = (
        cnn_custom_loop.main([*flags, "--remainder", remainder]) for remainder in ("keep", "drop")
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


def saved_bytes(model):
    file = pathlib.Path("model.keras")
    model.save(file)
    return file.read_bytes()


def flipped(whole):
    middle = len(whole) // 2
    return whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]


def compiled(model, learning_rate=1e-3):
    model.compile(keras.optimizers.Adam(learning_rate), "sparse_categorical_crossentropy")
    model.optimizer.build(model.trainable_variables)
    return model


def other_shape(_):
    return saved_bytes(compiled(cnn_custom_loop.build_model((4, 4, 1), 10)))


def four_classes(_):
    return saved_bytes(compiled(cnn_custom_loop.build_model((8, 8, 1), 4)))


def two_inputs(_):
    inputs = [keras.Input((3,)), keras.Input((3,))]
    return saved_bytes(compiled(keras.Model(inputs, keras.layers.Add()(inputs))))


def uncompiled(_):
    return saved_bytes(cnn_custom_loop.build_model((8, 8, 1), 10))


def scheduled(_):
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    return saved_bytes(compiled(cnn_custom_loop.build_model((8, 8, 1), 10), rate))


says_what_is_damaged = pytest.mark.needs(
    keras="3.15", reason="Keras 3.10 says only that an object could not be loaded"
)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("cut.keras", lambda whole: whole[: len(whole) // 2], "File is not a zip file"),
        ("empty.keras", lambda _: b"", "File is not a zip file"),
        ("text.keras", lambda _: b"hello", "File is not a zip file"),
        pytest.param("flipped.keras", flipped, "Bad CRC-32", marks=says_what_is_damaged),
        ("text.h5", lambda _: b"hello", "file signature not found"),
        ("whole.zip", lambda whole: whole, "File format not supported"),
        ("shape.keras", other_shape, r"\(None, 4, 4, 1\) to .* need \(None, 8, 8, 1\)"),
        ("classes.keras", four_classes, r"to \(None, 4\), .* to \(None, 10\)"),
        ("inputs.keras", two_inputs, r"\[\(None, 3\), \(None, 3\)\]"),
        ("uncompiled.keras", uncompiled, "no optimizer whose learning rate can be set"),
        ("scheduled.keras", scheduled, "no optimizer whose learning rate can be set"),
    ],
)
def test_a_file_that_training_cannot_go_on_from_gets_one_sentence(
    trained, tmp_path, monkeypatch, name, content, reason
):
    monkeypatch.chdir(tmp_path)
    pathlib.Path(name).write_bytes(content((trained[0] / "epoch-01.keras").read_bytes()))
    with pytest.raises(experiment.InputError, match=rf"--restore: .*{name}.*{reason}") as refused:
        run("--restore", tmp_path / name, replicas=1)
    assert "\n" not in str(refused.value)


def test_a_directory_is_no_checkpoint(tmp_path):
    with pytest.raises(experiment.InputError, match="--restore: .*Is a directory"):
        run("--restore", tmp_path, replicas=1)


@hypothesis.settings(max_examples=25)
@hypothesis.given(data=st.data(), cut=st.booleans())
def test_a_damaged_checkpoint_is_refused_or_holds_what_was_saved(small_checkpoint, data, cut):
    path, whole, weights = small_checkpoint
    place = data.draw(st.integers(0, len(whole) - 1))
    bit = 1 << data.draw(st.integers(0, 7))
    rest = b"" if cut else bytes([whole[place] ^ bit]) + whole[place + 1 :]
    path.write_bytes(whole[:place] + rest)
    try:
        model = cnn_custom_loop.load_checkpoint(path)
    except experiment.InputError:
        return
    for found, saved in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(found, saved)


@pytest.fixture(scope="module")
def small_checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("small") / "model.keras"
    model = compiled(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
    model.save(path)
    return path, path.read_bytes(), model.get_weights()


@pytest.mark.parametrize("value", ["2", "1", "-1", "-0.1", "nan", "inf", "much"])
def test_label_smoothing_is_a_share_below_1(value):
    sentence = rf"--label-smoothing: must be .* at least 0 and below 1. Received: '{value}'"
    with pytest.raises(experiment.InputError, match=sentence):
        cnn_custom_loop.parse([f"--label-smoothing={value}"])
    assert cnn_custom_loop.parse(["--label-smoothing", "0.9"]).label_smoothing == 0.9


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
