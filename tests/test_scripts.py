"""The kit's parts in scripts of others: at most five lines change, and training is what it was.

`tests/scripts` are written in the manner of public scripts. Of kdpkit they know nothing but
comments: a line that begins with `# + ` is what its user adds to have kdpkit's callbacks, schedules
and pipelines, in place of the lines that end in `# -`.
"""

import re
from pathlib import Path

import keras
import numpy as np
import pytest

SCRIPTS = sorted(path.stem for path in (Path(__file__).parent / "scripts").glob("*.py"))
ON_JAX = ("images", "tickets", "warmup")  # the others import TensorFlow
QUICK = ("warmup", "own_loop")

# What a script then prints, logs and writes.
PROMISED = {
    "fine_tuning": (
        ["Learning rate of epoch 2: 0.01 (step 8)", "Learning rate of epoch 4: 0.001 (step 8)"],
        [],
        ["states/*.npz"],
    ),
    "gan": ([], ["steps_per_second"], ["generator-2*"]),
    "images": (
        ["Learning rate of epoch 1: 0.01 (step 3)", "Learning rate of epoch 3: 0.001 (step 9)"],
        ["learning_rate", "examples_per_second", "memory_gib"],
        ["logs/train/events*"],
    ),
    "own_loop": (
        ["Learning rate of epoch 3: 0.1 (step 15)"],
        ["learning_rate"],
        ["logs/train/events*"],
    ),
    "reviews": (["Findings: []"], [], []),
    "tickets": ([], ["examples_per_second"], ["states/*.npz"]),
    "warmup": (["Learning rate of epoch 4: 0.000465703 (step 28)"], ["learning_rate"], []),
}
MEASURED = re.compile(r".*per_second.*|cpu_utilization|memory_gib")

REPLICAS = {  # by backend: in place of a line that builds a model
    "tensorflow": r"""
from kdpkit import strategies, training

with strategies.select_strategy("mirrored", devices=2).scope():
    model = training.replica_exact(\1)
""",
    "jax": r"""
from kdpkit import sharding, training

keras.distribution.set_distribution(sharding.DataParallel(2))
model = training.replica_exact(\1)
""",
}


def source(name):
    return (Path(__file__).parent / "scripts" / f"{name}.py").read_text()


def with_the_kit(text):
    added = re.sub(r"^( *)# \+ ", r"\1", text, flags=re.MULTILINE)
    return re.sub(r"^.*  # -$", "", added, flags=re.MULTILINE)


def on_two_replicas(text):
    text, count = re.subn(
        r"^model = (build_model\(\)|[A-Z]+\(\))$",
        REPLICAS[keras.backend.backend()],
        text,
        flags=re.MULTILINE,
    )
    assert count == 1
    return text


def run(text, directory, monkeypatch):
    """Run a script in a directory; return its model's weights, and its History."""
    directory.mkdir(exist_ok=True)
    monkeypatch.chdir(directory)
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    names = {"__name__": "__main__"}
    exec(compile(text, "script", "exec"), names)
    weights = [keras.ops.convert_to_numpy(variable) for variable in names["model"].variables]
    return weights, names["history"].history


def assert_same(found, expected, tolerance):
    for one, other in zip(found[0], expected[0], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)
    for log in [log for log in expected[1] if not MEASURED.fullmatch(log)]:
        values = expected[1][log]
        last = found[1][log][-len(values) :]  # `Resume` keeps those of earlier calls of `fit`
        np.testing.assert_allclose(last, values, rtol=1e-5, atol=tolerance, err_msg=log)


def cases(names, quick=()):
    marks = [
        [pytest.mark.slow] * (name not in quick) + [pytest.mark.tensorflow] * (name not in ON_JAX)
        for name in names
    ]
    return [pytest.param(name, marks=of_name) for name, of_name in zip(names, marks, strict=True)]


def test_a_script_changes_in_at_most_five_lines():
    assert sorted(PROMISED) == SCRIPTS
    for name in SCRIPTS:
        added, removed = (re.findall(line, source(name)) for line in (r"\n *# \+ ", r"  # -\n"))
        assert 1 < len(added) <= 5
        assert len(removed) <= len(added)


@pytest.mark.parametrize("name", cases(SCRIPTS, QUICK))
def test_with_the_kits_parts_training_is_what_it_was(name, tmp_path, monkeypatch, capsys):
    stock = run(source(name), tmp_path / "stock", monkeypatch)
    capsys.readouterr()
    found = run(with_the_kit(source(name)), tmp_path / "kit", monkeypatch)
    output = capsys.readouterr().out
    assert_same(found, stock, 1e-6 if name == "warmup" else 0)  # whose schedule is of float64
    printed, logged, written = PROMISED[name]
    for line in printed:
        assert line in output
    assert {*logged} <= found[1].keys()
    for pattern in written:
        assert list((tmp_path / "kit").glob(pattern)), pattern


@pytest.mark.parametrize("name", cases(["gan", "images", "tickets"]))
def test_two_replicas_train_what_one_device_trains(name, tmp_path, monkeypatch):
    text = with_the_kit(source(name))
    one = run(text, tmp_path / "one", monkeypatch)
    try:
        two = run(on_two_replicas(text), tmp_path / "two", monkeypatch)
    finally:
        keras.distribution.set_distribution(None)
    assert_same(two, one, 1e-5)


@pytest.mark.parametrize("name", cases(["fine_tuning", "tickets"]))
def test_a_script_that_is_stopped_and_started_again_ends_as_one_that_is_not(
    name, tmp_path, monkeypatch
):
    text = with_the_kit(source(name))
    undisturbed = run(text, tmp_path / "undisturbed", monkeypatch)
    stop = (
        "keras.callbacks.LambdaCallback(on_epoch_end=lambda e, _: e == 2 and resume.request_stop())"
    )
    stopping = re.sub(r"\bresume([,\]])", rf"{stop}, resume\1", text)
    with pytest.raises(SystemExit):
        run(stopping, tmp_path / "stopped", monkeypatch)
    assert_same(run(text, tmp_path / "stopped", monkeypatch), undisturbed, 0)
