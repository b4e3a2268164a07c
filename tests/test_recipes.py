"""The recipes run as their users run them, on small data."""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import keras
import keras_hub
import numpy as np
import pytest

from kdpkit import callbacks, schedules
from recipes import bert_mlm, cnn_fit, multi_worker

ROOT = Path(bert_mlm.__file__).parents[1]
ON_ONE = ("--strategy", "one", "--replicas", "1")
AS_ONE = (*ON_ONE, "--per-replica-batch-size", "8", "--base-learning-rate", "2e-4")
ON_TWO = ("--strategy", "mirrored", "--replicas", "2")
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
    """Run the BERT recipe on two replicas, small; return what it returns."""
    cache = tmp_path_factory.mktemp("cache")

    def run(*flags):
        return bert_mlm.main(
            [
                *(*ON_TWO, "--data", str(text)),
                *("--per-replica-batch-size", "4", "--sequence-length", "16", "--epochs", "2"),
                *("--vocabulary-size", "60", "--cache-dir", str(cache)),
                *("--steps-per-epoch", "5", "--warmup-steps", "2", "--jit", "off"),
                *("--base-learning-rate", "1e-4", "--rule", "linear"),
                *map(str, flags),
            ]
        )

    return run


@pytest.fixture(scope="module")
def trained(bert, tmp_path_factory):
    """Return a directory with all that a run writes, and what it returned."""
    directory = tmp_path_factory.mktemp("bert")
    files = ("--log-dir", directory / "logs", "--results", directory / "results.json")
    return directory, bert(*files)


@pytest.mark.slow
def test_the_rates_of_bert_fall_as_the_schedule_sets(trained):
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


@pytest.fixture(scope="module")
def on_one_device(bert):
    """Return what the same training on one device returned."""
    return bert(*AS_ONE)


@pytest.mark.slow
def test_two_replicas_train_what_one_device_trains(trained, on_one_device):
    (_, two), one = trained, on_one_device
    assert two["history"]["loss"] != pytest.approx(one["history"]["loss"][::-1], rel=1e-3)
    assert two["history"]["loss"] == pytest.approx(one["history"]["loss"], rel=1e-5)


@pytest.mark.slow
def test_a_run_shows_what_it_does_and_nothing_else(text, tmp_path):
    program = [sys.executable, bert_mlm.__file__, *ON_TWO, "--smoke", "--vocabulary-size", "60"]
    flags = ["--data", text, "--sequence-length", "16", "--cache-dir", tmp_path, "--epochs", "1"]
    done = subprocess.run(
        [*program, *flags],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": str(ROOT)},
    )
    lines = done.stdout.splitlines()
    assert lines[0].startswith("MirroredStrategy: 2 replicas")
    training = lines[lines.index(next(line for line in lines if "Compiling" in line)) :]
    assert max(map(len, training)) <= 100
    assert training[-1].endswith(tuple(f"it was: {word}" for word in WORDS))
    assert "kdpkit: " not in done.stderr
    assert not re.search(r"oneDNN custom|cudart|cuInit|absl::Init", done.stderr)


def test_the_published_hyperparameters_have_a_flag():
    args = bert_mlm.parse(["--published", "--epochs", "4"])
    assert (args.vocabulary_size, args.sequence_length, args.warmup_steps) == (8000, 128, 0)
    assert (args.per_replica_batch_size, args.base_learning_rate, args.rule) == (32, 1e-4, "linear")
    assert args.clip_norm is None
    assert args.epochs == 4


@pytest.mark.slow
def test_training_writes_tensorboard_files_and_the_model(trained):
    directory, _ = trained
    assert list((directory / "logs").rglob("events.out.tfevents.*"))
    assert isinstance(loaded(directory / "logs" / "model.keras"), keras_hub.models.BertMaskedLM)


saves_without_tokenizer = pytest.mark.needs(
    **{"keras-hub": "0.32"}, reason="KerasHub saves no model without its preprocessor"
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


@pytest.fixture
def on_a_preset(bert, tmp_path):
    """Run the BERT recipe for a step on one device, on text of the one word that presets know."""
    text = tmp_path / "known.txt"
    text.write_text(("known " * 40 + "\n") * 60)

    def run(*flags):
        one_step = ("--epochs", "1", "--steps-per-epoch", "1", "--warmup-steps", "0")
        preset = ("--preset", tmp_path / "preset")
        return bert(
            *ON_ONE, "--data", text, "--base-learning-rate", "1e-9", *one_step, *preset, *flags
        )

    return run


@pytest.mark.slow
def test_a_saved_preset_is_what_training_begins_with(on_a_preset, tmp_path):
    preset_that_knows("known", tmp_path / "preset", with_tokenizer=True)
    assert on_a_preset()["test"]["masked_accuracy"] == 1.0


@saves_without_tokenizer
@pytest.mark.slow
def test_a_preset_without_a_tokenizer_takes_a_vocabulary_of_its_size(on_a_preset, tmp_path):
    vocabulary = tmp_path / "vocabulary.txt"
    tokenizer = preset_that_knows("known", tmp_path / "preset")
    with pytest.raises(ValueError, match=r"preset .* for BertTokenizer is incomplete.*own flag"):
        on_a_preset()
    vocabulary.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n")
    with pytest.raises(ValueError, match="vocabulary.*5.*7"):
        on_a_preset("--vocabulary", vocabulary)
    vocabulary.write_text("\n".join(tokenizer.get_vocabulary()))
    assert on_a_preset("--vocabulary", vocabulary)["test"]["masked_accuracy"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--preset", "bert_enormous"], "preset 'bert_enormous' .* cannot be loaded .*Unknown"),
        (["--vocabulary", "none.txt"], "There is no such file: none.txt"),
        (["--data", "nowhere"], "nowhere"),
        (["--steps-per-epoch", "999"], "more batches than the data"),
        (["--sequence-length", "2"], "`length` must be an integer of at least 3"),
        (["--warmup-steps", "99"], "warmup_steps"),
    ],
)
def test_bad_flags_get_one_sentence(bert, flags, sentence):
    with pytest.raises(ValueError, match=sentence):
        bert(*flags)


@pytest.mark.slow
def test_a_corpus_of_short_lines_alone_raises(bert, tmp_path):
    (tmp_path / "short.txt").write_text("too short\n" * 100)
    with pytest.raises(ValueError, match="No example is left.*lines over 100 bytes"):
        bert("--data", str(tmp_path / "short.txt"))


@pytest.mark.slow
def test_a_preset_without_a_network_is_one_sentence(bert, monkeypatch):
    for variable in ("HTTPS_PROXY", "HTTP_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    with pytest.raises(ValueError, match="'bert_tiny_en_uncased' for BertTok.* be downloaded"):
        bert("--preset", "bert_tiny_en_uncased")


def loaded(path):
    """Load a model; Keras warns that it does not restore a KerasHub model's optimizer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return keras.models.load_model(path)


@pytest.mark.slow
def test_the_cnn_learns_the_digits_on_two_replicas(tmp_path):
    results = cnn_fit.main([*ON_TWO, "--epochs", "8", "--results", str(tmp_path / "cnn.json")])
    assert results["test"]["accuracy"] > 0.93
    schedule = schedules.warmup_cosine(3e-3 * 2**0.5, total_steps=results["steps"])
    per_epoch = results["steps"] // 8
    expected = [float(schedule(per_epoch * epoch - 1)) for epoch in range(1, 9)]
    assert results["learning_rates"] == pytest.approx(expected, rel=1e-5, abs=1e-9)
    assert json.loads((tmp_path / "cnn.json").read_text()) == results


@pytest.mark.slow
def test_the_cnn_trains_from_tfrecords_written_once_and_names_a_damaged_one(tmp_path):
    def losses():
        flags = (*ON_ONE, "--smoke", "--epochs", "1", "--tfrecords", str(tmp_path))
        return cnn_fit.main(flags)["history"]["loss"]

    first = losses()
    written = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    assert len(written) == 4
    assert losses() == first
    assert {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()} == written
    file = sorted(written)[2]
    file.write_bytes(file.read_bytes()[:-500])
    with pytest.raises(ValueError, match=file.name):
        losses()


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


@pytest.fixture
def sent_in_training(monkeypatch):
    """Return a context in which this process gets a signal after some steps of a recipe."""
    usual = callbacks.training_callbacks

    @contextlib.contextmanager
    def sent(number, step):
        steps = itertools.count(1)
        sending = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda *_, **__: next(steps) == step and signal.raise_signal(number)
        )
        with monkeypatch.context() as patch:
            patch.setattr(
                callbacks,
                "training_callbacks",
                lambda *given, **settings: [*usual(*given, **settings), sending],
            )
            yield

    return sent


@pytest.mark.slow
def test_ctrl_c_saves_what_was_learned(sent_in_training, tmp_path, capsys):
    with sent_in_training(signal.SIGINT, 3), pytest.raises(KeyboardInterrupt):
        cnn_fit.main([*ON_TWO, "--smoke", "--log-dir", str(tmp_path)])
    assert "interrupted.keras" in capsys.readouterr().out
    model = keras.models.load_model(tmp_path / "interrupted.keras")
    assert int(model.optimizer.iterations) == 3


@pytest.mark.slow
def test_after_sigterm_one_device_goes_on_for_two(sent_in_training, tmp_path):
    flags = ("--smoke", "--epochs", "2", "--global-batch-size", "16", "--resume")
    undisturbed = multi_worker.main([*ON_TWO, *flags, str(tmp_path / "undisturbed")])
    with sent_in_training(signal.SIGTERM, 5), pytest.raises(SystemExit, match="42"):
        multi_worker.main([*ON_TWO, *flags, str(tmp_path / "stopped")])
    resumed = multi_worker.main([*ON_ONE, *flags, str(tmp_path / "stopped")])
    assert (resumed["replicas"], resumed["global_batch_size"]) == (1, 16)
    for name in ("loss", "learning_rate"):
        assert resumed["history"][name] == pytest.approx(undisturbed["history"][name], rel=1e-4)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_after_sigterm_the_same_command_goes_on(bert, on_one_device, sent_in_training, tmp_path):
    with sent_in_training(signal.SIGTERM, 7), pytest.raises(SystemExit, match="42"):
        bert(*AS_ONE, "--resume", tmp_path)
    resumed = bert(*AS_ONE, "--resume", tmp_path)
    assert resumed["steps"] == on_one_device["steps"] == 10
    assert resumed["test"] == pytest.approx(on_one_device["test"], rel=1e-5)
    for name in ("loss", "val_loss", "masked_accuracy", "learning_rate"):
        assert resumed["history"][name] == pytest.approx(on_one_device["history"][name], rel=1e-5)
