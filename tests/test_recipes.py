"""The recipes run as their users run them, on small data."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import warnings

import keras
import keras_hub
import numpy as np
import pytest

from kdpkit import schedules
from recipes import bert_mlm, cnn_fit

RECIPES = pathlib.Path(bert_mlm.__file__).parent
WORDS = ["replicas", "train", "exactly", "what", "one", "device", "would", "train", "on", "data"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A text file of lines long enough to train on."""
    random = np.random.default_rng(0)
    lines = (" ".join(random.choice(WORDS, 30)) for _ in range(300))
    file = tmp_path_factory.mktemp("text") / "corpus.txt"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def bert(text, tmp_path_factory):
    """Run the BERT recipe on two replicas, small; give what it returns."""
    cache = tmp_path_factory.mktemp("cache")

    def run(*flags):
        return bert_mlm.main(
            [
                *("--strategy", "mirrored", "--replicas", "2", "--data", str(text)),
                *("--per-replica-batch-size", "4", "--sequence-length", "16", "--epochs", "2"),
                *("--vocabulary-size", "60", "--cache-dir", str(cache)),
                *("--steps-per-epoch", "5", "--warmup-steps", "2", "--jit", "off"),
                *map(str, flags),
            ]
        )

    return run


@pytest.fixture(scope="module")
def trained(bert, tmp_path_factory):
    """Give a directory with all that a run writes, and what it returned."""
    directory = tmp_path_factory.mktemp("bert")
    files = ("--log-dir", directory / "logs", "--results", directory / "results.json")
    return directory, bert(*files)


def run_recipe(name, *flags, **environment):
    return subprocess.run(
        [sys.executable, RECIPES / f"{name}.py", *map(str, flags)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.mark.slow
def test_the_rates_of_bert_fall_as_the_schedule_says(trained):
    _, results = trained
    schedule = schedules.warmup_polynomial(2e-4, total_steps=10, warmup_steps=2)
    expected = [float(schedule(step)) for step in (4, 9)]
    assert results["learning_rates"] == pytest.approx(expected, rel=1e-6)
    assert results["steps"] == 10
    assert results["global_batch_size"] == 8
    assert results["replicas"] == 2


@pytest.mark.slow
def test_the_results_file_holds_what_main_returns(trained):
    directory, results = trained
    assert json.loads((directory / "results.json").read_text()) == results
    assert set(results) == {
        *("history", "test", "learning_rates", "examples_per_second", "tokens_per_second"),
        *("replicas", "strategy", "global_batch_size", "steps", "schedule", "versions"),
    }
    assert set(results["test"]) == {"loss", "masked_accuracy"}
    assert {"val_loss", "val_masked_accuracy"} < set(results["history"])


@pytest.mark.slow
def test_two_replicas_train_what_one_device_trains(bert, trained):
    _, two = trained
    alone = ("--strategy", "one", "--replicas", "1", "--per-replica-batch-size", "8")
    one = bert(*alone, "--base-learning-rate", "2e-4")
    assert two["history"]["loss"] != pytest.approx(one["history"]["loss"][::-1], rel=1e-3)
    # Dropout masks differ between replicas and one device; everything else is the same.
    assert two["history"]["loss"] == pytest.approx(one["history"]["loss"], rel=0.02)


@pytest.mark.slow
def test_training_writes_tensorboard_files_and_the_model(trained):
    directory, _ = trained
    assert list((directory / "logs").rglob("events.out.tfevents.*"))
    assert isinstance(loaded(directory / "logs" / "model.keras"), keras_hub.models.BertMaskedLM)


saves_without_tokenizer = pytest.mark.needs(
    **{"keras-hub": "0.32"}, reason="KerasHub 0.21 cannot save a model without its preprocessor"
)


def preset_that_knows(word, directory, *, with_tokenizer=False):
    """Save a preset whose model predicts `word` everywhere, before any training."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "other", word]
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=len(vocabulary), num_layers=1, num_heads=2, hidden_dim=8, intermediate_dim=8
    )
    tokenizer = keras_hub.models.BertTokenizer(vocabulary, lowercase=True)
    preprocessor = keras_hub.models.BertMaskedLMPreprocessor(tokenizer) if with_tokenizer else None
    model = keras_hub.models.BertMaskedLM(backbone, preprocessor=preprocessor)
    bias = next(weight for weight in model.weights if weight.shape == (len(vocabulary),))
    bias.assign([0.0] * (len(vocabulary) - 1) + [50.0])
    model.save_to_preset(str(directory))
    return tokenizer


@pytest.mark.slow
def test_a_saved_preset_is_what_training_begins_with(bert, tmp_path):
    preset = tmp_path / "preset"
    preset_that_knows("known", preset, with_tokenizer=True)
    text = tmp_path / "known.txt"
    text.write_text(("known " * 40 + "\n") * 300)
    results = bert("--preset", str(preset), "--data", str(text), "--base-learning-rate", "1e-9")
    assert results["test"]["masked_accuracy"] == 1.0


@saves_without_tokenizer
@pytest.mark.slow
def test_a_preset_without_a_tokenizer_takes_a_vocabulary(bert, tmp_path):
    preset, vocabulary = tmp_path / "preset", tmp_path / "vocabulary.txt"
    tokenizer = preset_that_knows("known", preset)
    with pytest.raises(ValueError, match=r"preset .* for BertTokenizer is incomplete.*own flag"):
        bert("--preset", str(preset))
    vocabulary.write_text("\n".join(tokenizer.get_vocabulary()))
    text = tmp_path / "known.txt"
    text.write_text(("known " * 40 + "\n") * 300)
    results = bert("--preset", str(preset), "--vocabulary", str(vocabulary), "--data", str(text))
    assert results["test"]["masked_accuracy"] == 1.0


@saves_without_tokenizer
@pytest.mark.slow
def test_a_vocabulary_of_another_size_than_the_presets_is_refused(bert, tmp_path):
    preset_that_knows("known", tmp_path / "preset")
    vocabulary = tmp_path / "vocabulary.txt"
    vocabulary.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n")
    with pytest.raises(ValueError, match="vocabulary.*5.*7"):
        bert("--preset", str(tmp_path / "preset"), "--vocabulary", str(vocabulary))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--preset", "bert_enormous"], "preset 'bert_enormous' .* cannot be loaded .*Unknown"),
        (["--vocabulary", "none.txt"], "There is no such file: none.txt"),
        (["--data", "nowhere"], "nowhere"),
        (["--replicas", "9"], "can no longer be split"),
        (["--replicas", "0"], "--replicas: must be a positive integer. Received: '0'"),
        (["--steps-per-epoch", "999"], "more batches than the data gives"),
        (["--per-replica-batch-size", "5000"], "too few examples for one full batch"),
        (["--sequence-length", "2"], "`length` must be an integer of at least 3"),
        (["--warmup-steps", "99"], "warmup_steps"),
    ],
)
def test_bad_flags_get_one_sentence(bert, flags, sentence):
    with pytest.raises(ValueError, match=sentence):
        bert(*flags)


@pytest.mark.slow
def test_a_corpus_of_short_lines_alone_is_refused(bert, tmp_path):
    (tmp_path / "short.txt").write_text("too short\n" * 100)
    with pytest.raises(ValueError, match="No example is left.*lines over 100 bytes"):
        bert("--data", str(tmp_path / "short.txt"))


@pytest.mark.slow
def test_a_preset_without_a_network_is_one_sentence():
    finished = run_recipe(
        "bert_mlm",
        "--preset",
        "bert_tiny_en_uncased",
        "--smoke",
        HTTPS_PROXY="http://127.0.0.1:9",
        HTTP_PROXY="http://127.0.0.1:9",
    )
    assert finished.returncode == 2
    last = finished.stderr.strip().splitlines()[-1]
    assert last.startswith("bert_mlm.py: The preset 'bert_tiny_en_uncased' for BertTokenizer")
    assert "cannot be downloaded" in last
    assert "Traceback" not in finished.stderr


def loaded(path):
    """Load a model; Keras warns that it does not take a KerasHub model's optimizer up again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return keras.models.load_model(path)


def small_cnn(*flags):
    return cnn_fit.main(
        ["--per-replica-batch-size", "16", "--epochs", "2", "--steps-per-epoch", "20", *flags]
    )


@pytest.mark.slow
def test_the_cnn_learns_the_digits_on_two_replicas(tmp_path):
    results = cnn_fit.main(
        [
            "--strategy",
            "mirrored",
            "--replicas",
            "2",
            "--epochs",
            "8",
            "--results",
            str(tmp_path / "cnn.json"),
        ]
    )
    assert results["test"]["accuracy"] > 0.93
    schedule = schedules.warmup_cosine(3e-3 * 2**0.5, total_steps=results["steps"])
    per_epoch = results["steps"] // 8
    expected = [float(schedule(per_epoch * epoch - 1)) for epoch in range(1, 9)]
    assert results["learning_rates"] == pytest.approx(expected, rel=1e-5, abs=1e-9)
    assert json.loads((tmp_path / "cnn.json").read_text()) == results


@pytest.mark.slow
def test_the_cnn_trains_from_tfrecords_written_once(tmp_path):
    flags = ["--strategy", "mirrored", "--replicas", "2", "--tfrecords", str(tmp_path)]
    first = small_cnn(*flags)
    written = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    assert len(written) == 4
    second = small_cnn(*flags)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()} == written
    assert first["history"]["loss"] == second["history"]["loss"]


@pytest.mark.slow
def test_a_damaged_tfrecord_is_named_before_training(tmp_path):
    small_cnn("--tfrecords", str(tmp_path))
    file = sorted(tmp_path.iterdir())[2]
    file.write_bytes(file.read_bytes()[:-500])
    with pytest.raises(ValueError, match=file.name):
        small_cnn("--tfrecords", str(tmp_path))


def test_images_move_within_their_frame_and_keep_their_ink():
    images = np.zeros((64, 20, 20, 1), "uint8")
    images[:, 8:12, 8:12] = 200
    moved, _ = cnn_fit.shift((images, np.arange(64)), (1, 2))
    moved = moved.numpy()
    assert moved.dtype == np.uint8
    np.testing.assert_array_equal(moved.sum(axis=(1, 2, 3)), images.sum(axis=(1, 2, 3)))
    rows = {int(np.argmax(image.any(axis=(1, 2)))) for image in moved}
    columns = {int(np.argmax(image.any(axis=(0, 2)))) for image in moved}
    assert rows == columns == {6, 7, 8, 9, 10}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["bert_mlm", "cnn_fit"])
def test_ctrl_c_saves_what_was_learned(recipe, text, tmp_path):
    flags = ["--strategy", "mirrored", "--replicas", "2", "--epochs", "500"]
    if recipe == "bert_mlm":
        flags += ["--data", text, "--vocabulary-size", "60", "--cache-dir", tmp_path / "cache"]
    program = subprocess.Popen(
        [sys.executable, "-u", RECIPES / f"{recipe}.py", *flags, "--log-dir", tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        seen = ""
        deadline = time.monotonic() + 200
        while "Epoch 2/500" not in seen and time.monotonic() < deadline:
            seen += program.stdout.readline()
        program.send_signal(signal.SIGINT)
        rest, _ = program.communicate(timeout=300)
    finally:
        program.kill()
    assert program.returncode == 130, seen + rest
    assert "Traceback" not in rest
    assert "interrupted.keras" in rest
    model = loaded(tmp_path / "interrupted.keras")
    assert any(np.asarray(weight).any() for weight in model.get_weights())
    if recipe == "cnn_fit":
        assert int(model.optimizer.iterations.numpy()) > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_after_sigterm_the_same_command_goes_on(bert, text, tmp_path):
    whole = bert("--epochs", "6", "--resume", tmp_path / "whole")
    flags = {
        "--strategy": "mirrored",
        "--replicas": 2,
        "--data": text,
        "--per-replica-batch-size": 4,
        "--sequence-length": 16,
        "--vocabulary-size": 60,
        "--epochs": 6,
        "--steps-per-epoch": 5,
        "--warmup-steps": 2,
        "--jit": "off",
        "--cache-dir": tmp_path / "cache",
        "--resume": tmp_path / "state",
        "--results": tmp_path / "results.json",
    }
    command = [sys.executable, "-u", RECIPES / "bert_mlm.py"]
    command += [str(part) for flag in flags.items() for part in flag]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, **pipes) as stopped:
        for line in stopped.stdout:
            if "Epoch 2/6" in line:
                break
        stopped.send_signal(signal.SIGTERM)
        said = stopped.communicate(timeout=300)[0]
    assert stopped.returncode == 42, said
    assert "Traceback" not in said
    resumed = subprocess.run(command, **pipes, timeout=200, check=False)
    assert resumed.returncode == 0, resumed.stdout
    assert "Epoch 1/6" not in resumed.stdout
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["steps"] == whole["steps"] == 30
    assert results["test"] == pytest.approx(whole["test"], rel=1e-5)
    for name in ("loss", "val_loss", "masked_accuracy", "learning_rate"):
        assert results["history"][name] == pytest.approx(whole["history"][name], rel=1e-5)
