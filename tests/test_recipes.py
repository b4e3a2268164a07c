"""The recipes run as their users run them, on small data."""

import contextlib
import importlib
import itertools
import json
import re
import resource
import sys

import keras
import numpy as np
import pytest

from kdpkit import callbacks, experiment, schedules
from recipes import cnn_custom_loop, cnn_fit
from tests.processes import ROOT, run, run_code

NAMES = sorted(path.stem for path in (ROOT / "recipes").glob("*.py"))
ON_ONE = ("--strategy", "one", "--replicas", "1")
ON_TWO = ("--strategy", "mirrored", "--replicas", "2")
WORDS = ["replicas", "train", "exactly", "what", "one", "device", "would", "train", "on", "data"]
STEPS = 8
# The same global batch on any number of replicas; three do not divide it.
EXACT = ("--per-replica-batch-size", "4", "--global-batch-size", "8", "--epochs", "1")
EXACT += ("--steps-per-epoch", str(STEPS))
FLAGS = {
    "bert_mlm": ("--sequence-length", "16", "--jit", "off"),
    "lm": ("--vocabulary-size", "60", "--sequence-length", "16", "--layers", "1"),
    "cnn_custom_loop": ("--label-smoothing", "0.1"),
}
AS_WELL = {"lm": ("--remat",)}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    random = np.random.default_rng(0)
    sentences = (" ".join(random.choice(WORDS, 9)).capitalize() + "." for _ in itertools.count())
    lines = (" ".join(itertools.islice(sentences, 3)) for _ in range(300))
    file = tmp_path_factory.mktemp("text") / "corpus.txt"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    arrays, random = {}, np.random.default_rng(0)
    for split, count in (("train", 203), ("test", 19)):
        pictures = random.integers(0, 256, (count, 12, 12)).astype("uint8")
        labels = (pictures.mean(axis=(1, 2)) > 127).astype("uint8")
        arrays |= {f"x_{split}": pictures, f"y_{split}": labels}
    file = tmp_path_factory.mktemp("images") / "images.npz"
    np.savez(file, **arrays)
    return file


def saved_bert(directory, bias=0.0):
    """Save a BERT of one layer, with a bias for the word `known`, as a preset; return where."""
    from keras_hub import models

    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted({*WORDS}), "known"]
    backbone = models.BertBackbone(len(vocabulary), 1, 2, hidden_dim=8, intermediate_dim=8)
    tokenizer = models.BertTokenizer(vocabulary, lowercase=True)
    model = models.BertMaskedLM(backbone, models.BertMaskedLMPreprocessor(tokenizer))
    biases = next(weight for weight in model.weights if weight.shape == (len(vocabulary),))
    biases.assign([0.0] * (len(vocabulary) - 1) + [bias])
    model.save_to_preset(str(directory))
    return directory


@pytest.fixture(scope="module")
def train(text, images, tmp_path_factory):
    preset = saved_bert(tmp_path_factory.mktemp("preset") / "bert")

    def train(name, *flags):
        data = text if name in ("bert_mlm", "lm") else images
        usual = ["--data", data, *FLAGS.get(name, ())]
        usual += ["--preset", preset] if name == "bert_mlm" else []
        recipe = importlib.import_module(f"recipes.{name}")
        return recipe.main([*map(str, usual), *map(str, flags)])

    return train


@contextlib.contextmanager
def watching(callback):
    usual = callbacks.training_callbacks
    with pytest.MonkeyPatch.context() as patch:
        more = lambda *given, **settings: [*usual(*given, **settings), callback]  # noqa: E731
        patch.setattr(callbacks, "training_callbacks", more)
        yield


def losses_equal_one_devices(train, name, *more):
    def losses(*flags):
        means = [0.0]  # of the steps so far
        noting = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda _, logs=None: means.append(float(logs["loss"]))
        )
        with watching(noting):
            train(name, *EXACT, *flags)
        return np.diff(np.arange(STEPS + 1) * means)

    one = losses(*ON_ONE)
    assert len(set(one)) == STEPS
    many = ("--strategy", "mirrored", "--replicas", "3", *AS_WELL.get(name, ()), *more)
    np.testing.assert_allclose(losses(*many), one, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.tensorflow
@pytest.mark.parametrize("name", ["cnn_custom_loop", "cnn_fit", "lm"])
def test_three_replicas_have_the_losses_of_one_device(train, name):
    losses_equal_one_devices(train, name)


@pytest.mark.slow
@pytest.mark.tensorflow
def test_three_replicas_of_bert_have_the_losses_of_one_device_and_show_what_they_do(
    train, tmp_path, capfd
):
    results = tmp_path / "results.json"
    losses_equal_one_devices(train, "bert_mlm", "--log-dir", tmp_path, "--results", results)
    printed = capfd.readouterr()
    assert "kdpkit: " not in printed.err
    lines = printed.out.splitlines()
    lines = lines[lines.index("MirroredStrategy: 3 replicas on CPU:0, CPU:1, CPU:2") :]
    shown = "\n".join(lines)
    assert "The first 3 steps have the losses " in shown
    assert f"Model: {tmp_path}/model.keras; plots: tensorboard --logdir {tmp_path}" in shown
    baseline = re.search(r"test text ([\d.]+)% are right; .*\n.* gets ([\d.]+)%", shown)
    assert float(baseline[2]) > 0
    written = json.loads(results.read_text())
    assert {"val_loss", "val_accuracy", "learning_rate"} < set(written["history"])
    assert set(written["test"]) == {"loss", "accuracy"}
    assert (tmp_path / "model.keras").exists()
    assert list(tmp_path.rglob("events.out.tfevents.*"))


@pytest.mark.slow
@pytest.mark.jax
def test_on_jax_three_replicas_have_the_losses_of_one_device(train):
    """Language models: tests/test_environments.py, without TensorFlow."""
    losses_equal_one_devices(train, "cnn_jax")


@pytest.mark.slow
@pytest.mark.tensorflow
def test_a_single_worker_of_a_parameter_server_has_the_losses_of_one_device(
    train, images, tmp_path
):
    flags = (*EXACT[:4], "--epochs", "3")
    one = train("parameter_server", *ON_ONE, *flags)["history"]["loss"]
    results = tmp_path / "results.json"
    launched = ["-m", "kdpkit", "launch", "--workers", "1", "--parameter-servers", "1", "--"]
    recipe = [sys.executable, "recipes/parameter_server.py", "--data", images, *flags]
    command = [sys.executable, *launched, *recipe, "--results", results]
    run(*command, cwd=ROOT)
    assert json.loads(results.read_text())["history"]["loss"] == pytest.approx(one, rel=1e-5)


FLAGS_FIRST = """
import runpy, sys
name = sys.argv[1]
for flags in (["--help"], ["--epochz", "3"]):
    sys.argv = [name, *flags]
    try:
        runpy.run_path(name, run_name="__main__")
    except SystemExit as stop:
        print("code", stop.code)
print({"tensorflow", "jax", "keras", "keras_hub", "numpy"} & set(sys.modules))
"""


@pytest.mark.tensorflow  # once: no framework is loaded
@pytest.mark.parametrize("name", NAMES)
def test_flags_are_read_before_a_framework_is_loaded(name):
    lines = run_code(FLAGS_FIRST, f"recipes/{name}.py", cwd=ROOT).stdout.splitlines()
    assert [line for line in lines if line.startswith("code ")] == ["code 0", "code 2"]
    assert lines[-1] == "set()"


# Ends


@pytest.mark.slow
@pytest.mark.tensorflow
def test_a_full_disk_ends_in_one_sentence_and_leaves_the_results(
    train, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(sys, "argv", ["recipes/cnn_fit.py"])
    flags = [*ON_ONE, "--smoke", "--results", tmp_path / "results.json"]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))  # less than a model
    try:
        with pytest.raises(SystemExit, match="^1$"):
            experiment.run(lambda: train("cnn_fit", *flags, "--log-dir", tmp_path / "logs"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "cnn_fit.py: No space is left (" in capsys.readouterr().err
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results["history"]["loss"]) == 2
    assert results["test"]
    assert not list(tmp_path.rglob("*.keras"))


# Single recipes


@pytest.mark.slow
def test_a_saved_preset_is_what_training_begins_with(train, tmp_path):
    (tmp_path / "known.txt").write_text(("known " * 40 + "\n") * 60)
    preset = saved_bert(tmp_path / "preset", bias=50.0)
    flags = ("--base-learning-rate", "1e-9", "--data", tmp_path / "known.txt", "--preset", preset)
    assert train("bert_mlm", *ON_ONE, "--smoke", *flags)["test"]["accuracy"] == 1.0


@pytest.mark.slow
@pytest.mark.jax
def test_a_preset_is_tuned_on_pairs_where_devices_share_the_model(tmp_path):
    """As on one device, with LoRA; and what it saves is a preset, with what was learned."""
    from keras_hub import models

    from recipes import lm

    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted({*WORDS})]
    models.BertTokenizer(vocabulary, lowercase=True).save_to_preset(str(tmp_path / "preset"))
    sizes = {"num_query_heads": 4, "num_key_value_heads": 2, "intermediate_dim": 16}
    backbone = models.Llama3Backbone(len(vocabulary), 1, hidden_dim=8, **sizes)
    backbone.save_to_preset(str(tmp_path / "preset"))
    pairs = [{"prompt": " ".join(WORDS[:3]), "answer": " ".join(WORDS[n % 8 :])} for n in range(60)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    data = ("--preset", tmp_path / "preset", "--data", tmp_path / "pairs.jsonl", "--lora", "2")
    flags = (*data, "--sequence-length", "16", "--epochs", "1", "--base-learning-rate", "0.01")

    def trained(*more):
        return lm.main([*map(str, (*flags, "--global-batch-size", "8", *more))])["test"]["loss"]

    one = trained(*ON_ONE, "--per-replica-batch-size", "8")
    shared = ("--strategy", "mirrored", "--replicas", "2", "--model-parallel", "2")
    save = ("--per-replica-batch-size", "8", "--save", tmp_path / "tuned")
    assert trained(*shared, *save) == pytest.approx(one, rel=1e-5)
    tuned = models.Backbone.from_preset(str(tmp_path / "tuned"))
    kernels = [np.asarray(w) for of in (tuned, backbone) for w in of.weights if "query" in w.path]
    assert not np.allclose(*kernels)


@pytest.mark.slow
@pytest.mark.tensorflow
def test_the_cnn_learns_the_digits_on_two_replicas_at_the_rates_of_its_schedule():
    results = cnn_fit.main([*ON_TWO, "--epochs", "12"])  # after 8, one device too has 0.9296
    assert results["test"]["accuracy"] > 0.93
    schedule = schedules.warmup_cosine(3e-3 * 2**0.5, total_steps=results["steps"])
    per_epoch = results["steps"] // 12
    expected = [float(schedule(per_epoch * epoch - 1)) for epoch in range(1, 13)]
    assert results["history"]["learning_rate"] == pytest.approx(expected, rel=1e-5, abs=1e-9)


@pytest.mark.slow
def test_the_cnn_trains_from_tfrecords_written_once_and_notices_a_damaged_one(train, tmp_path):
    def losses():
        flags = (*ON_ONE, "--smoke", "--epochs", "1", "--tfrecords", tmp_path)
        return train("cnn_fit", *flags)["history"]["loss"]

    first = losses()
    written = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    assert len(written) == 4
    assert losses() == first
    assert {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()} == written
    file = sorted(written)[2]
    file.write_bytes(file.read_bytes()[:-500])
    with pytest.raises(cnn_fit.tf.errors.OpError, match="expected to contain|corrupted|truncated"):
        losses()


@pytest.mark.slow
@pytest.mark.tensorflow
def test_the_custom_loop_learns_the_digits_and_saves_and_draws(tmp_path):
    flags = ["--epochs", "5", "--label-smoothing", "0.1", "--base-learning-rate", "3e-3"]
    results = cnn_custom_loop.main([*ON_TWO, *flags, "--log-dir", str(tmp_path)])
    assert results["test"]["accuracy"] > 0.9
    assert results["steps"] == 5 * 12  # 1,442 images in batches of 128, the last one of 34
    assert results["history"]["val_loss"][-1] == pytest.approx(results["test"]["loss"])
    assert (tmp_path / "model.keras").exists()
    for name in ("samples", "curves"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
