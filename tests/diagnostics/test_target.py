"""What targets name: scripts that run up to their first `fit`, and functions in modules."""

import os
import sys

import keras
import numpy as np
import pytest

from kdpkit.diagnostics import check_input
from kdpkit.diagnostics._doctor import target as _target

MODEL = """
import keras, numpy as np, sys
x, y = np.zeros((64, 8), "float32"), np.zeros(64, "int32")
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
def build():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
    model.compile("adam", loss)
    return model
"""


def asked_by(target, arguments=()):
    with _target.program_of(target, arguments) as program:
        return program


@pytest.fixture
def script(tmp_path):
    def write(text, name="train.py"):
        path = tmp_path / name
        path.write_text(MODEL + text, encoding="utf-8")
        return str(path)

    return write


@pytest.fixture(autouse=True)
def _modules_as_before():
    former, path = {*sys.modules}, sys.path[:]
    yield
    sys.path[:] = path
    for name in {*sys.modules} - former:
        if name in ("train", "data"):
            del sys.modules[name]


def test_a_script_is_run_up_to_its_first_fit_and_nothing_is_trained(script, capsys):
    path = script(
        "model = build()\n"
        "print('reads', sys.argv[1:])\n"
        "model.fit(x, y, batch_size=16, epochs=9, initial_epoch=2, validation_split=0.5)\n"
        "raise SystemExit('goes on after its fit')\n"
    )

    def replaced():
        return keras.Model.fit, sys.argv, [*sys.path]

    before = replaced()
    reached = asked_by(path, ["--data", "here"])
    assert replaced() == before
    assert int(reached.model.optimizer.iterations) == 0
    assert [len(part) for part in reached.dataset[:2]] == [64, 64]
    assert (reached.batch_size, reached.epochs) == (16, 7)
    assert (reached.validation_split, reached.shuffle) == (0.5, True)
    output = capsys.readouterr()
    assert output.out == ""
    assert "reads ['--data', 'here']" in output.err
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    assert model.fit(np.zeros((8, 8)), np.zeros((8, 3)), verbose=0).epoch == [0]


def test_modules_beside_a_script_are_found_and_fit_trains_again_while_it_is_checked(
    script, tmp_path
):
    (tmp_path / "data.py").write_text("ROWS = 3")
    with _target.program_of(script("build().fit(x, y)"), []) as program:
        from data import ROWS

        trained = program.model.fit(*program.dataset[:2], verbose=0, batch_size=32).model
    assert (ROWS, int(trained.optimizer.iterations)) == (3, 2)


@pytest.mark.tensorflow
def test_an_exact_model_of_a_script_is_checked_and_trains_afterwards(script):
    """`replica_exact` has kept the `fit` that it found in the script."""
    text = (
        "from kdpkit import strategies, training\n"
        "with strategies.select_strategy('mirrored', devices=2).scope():\n"
        "    model = training.replica_exact(keras.Sequential([keras.layers.Dense(3)]))\n"
        "    model.compile('adam', loss)\n"
        "model.fit(x, y)\n"
    )
    with _target.program_of(script(text), []) as program:
        report = check_input(program.dataset, model=program.model)
    assert (report.findings, report.checked) == ((), ("train", "step"))
    trained = program.model.fit(*program.dataset[:2], verbose=0, batch_size=32).model
    assert int(trained.optimizer.iterations) == 2


def test_the_first_fit_counts_whatever_the_script_does_then(script):
    text = (
        "try:\n    build().fit(x, y)\nexcept BaseException:\n    build().fit(x, y, batch_size=4)\n"
    )
    assert asked_by(script(text)).batch_size is None


def test_a_function_is_found_by_name_and_gets_no_arguments_of_the_command(script, monkeypatch):
    text = (
        "import argparse\nargparse.ArgumentParser().parse_args()\n"
        "def make():\n    return x\ndef both():\n    return (x, y), build()\n"
    )
    monkeypatch.setattr(sys, "argv", ["kdpkit", "doctor", "--tpu", "data.py:make"])
    path = script(text, "data.py")
    assert asked_by(f"{path}:make").dataset.shape == (64, 8)
    assert isinstance(asked_by(f"{path}:both").model, keras.Model)
    assert sys.argv == ["kdpkit", "doctor", "--tpu", "data.py:make"]
    monkeypatch.chdir(path.rpartition("/")[0])
    assert asked_by("data:make").dataset.shape == (64, 8)


@pytest.mark.parametrize("name", ["bert-1.2.py", "queue.py"])
def test_a_file_of_any_name_is_the_one_that_is_named(name, script):
    path = script("def make():\n    return x\n", name)
    assert asked_by(f"{path}:make").dataset.shape == (64, 8)


def test_a_backend_that_comes_too_late_is_one_sentence(script, monkeypatch):
    """Keras is loaded already; elsewhere a line such as the first one chooses it."""
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    line = 'os.environ["KERAS_BACKEND"] = "torch"\n'
    for text in (f"import os\n{line}build().fit(x, y)", f"import os\nif True:\n    {line}1 / 0"):
        with pytest.raises(
            ValueError, match="sets KERAS_BACKEND=torch.*`KERAS_BACKEND=torch kdpkit"
        ):
            asked_by(script(text))
    assert os.environ["KERAS_BACKEND"] == "tensorflow"


@pytest.mark.parametrize(
    ("text", "target", "arguments", "sentence"),
    [
        ("build()", "train.py", [], "ended without a `fit`.*(dataset, model)"),
        ("1 / 0", "train.py", [], "train.py` fails: ZeroDivisionError: division by zero"),
        ("sys.exit('no data')", "train.py", [], "train.py` fails: SystemExit: no data"),
        ("sys.exit(0)", "train.py:x", [], "train.py:x` exits before it has returned"),
        ("build().fit(x, y)", "train.py:make", [], "train.py` has no function `make`"),
        ("make(", "train.py:make", [], "train.py:make` fails: SyntaxError"),
        ("build().fit(x, y)", "train.py:build", [], "It calls `fit` before.*__main__"),
        ("", "train.py:x", [], "train.py` has no function `x`"),
        ("", "nowhere.py:data", [], "There is no such file: nowhere.py"),
        ("", "no_such_module:data", [], "No module named 'no_such_module'"),
        ("", "os.path:no_such_function", [], "`os.path` has no function `no_such_function`"),
        (
            "def other():\n    return build(), x",
            "train.py:other",
            [],
            r"\(dataset, model\).*'Sequential', 'ndarray'",
        ),
        ("", "kdpkit.scaling:split_batch", ["--flag"], "those of a script"),
    ],
)
def test_a_target_that_gets_nowhere_is_one_sentence(
    text, target, arguments, sentence, script, monkeypatch
):
    monkeypatch.chdir(script(text).rpartition("/")[0])
    with pytest.raises(ValueError, match=sentence):
        asked_by(target, arguments)
