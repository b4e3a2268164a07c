"""What targets name: scripts that run up to their first `fit`, and datasets in modules."""

import sys

import keras
import numpy as np
import pytest

from kdpkit import training
from kdpkit.diagnostics import _target

MODEL = """
import keras, numpy as np, sys
x, y = np.zeros((64, 8), "float32"), np.zeros(64, "int32")
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
def build():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
    model.compile("adam", loss)
    return model
"""


@pytest.fixture
def script(tmp_path):
    """Write a script, and give its path."""

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
        "model.fit(x, y, batch_size=16, epochs=9, callbacks=[keras.callbacks.History()],\n"
        "          validation_data=(x, y))\n"
        "raise SystemExit('goes on after its fit')\n"
    )
    reached = _target.training_of(path, ["--data", "here"])
    assert int(reached.model.optimizer.iterations) == 0
    assert [part if part is None else part.shape for part in reached.dataset] == [
        (64, 8),
        (64,),
        None,
    ]
    assert reached.batch_size == 16
    assert len(reached.callbacks) == 1
    assert len(reached.validation_data) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "reads ['--data', 'here']" in said.err


def test_fit_is_keras_own_again_afterwards(script):
    before = keras.Model.fit, training.TrainingLoop.fit, sys.argv, sys.path[:], [*sys.meta_path]
    _target.training_of(script("build().fit(x, y)"), [])
    after = keras.Model.fit, training.TrainingLoop.fit, sys.argv, sys.path[:], [*sys.meta_path]
    assert before == after
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    assert model.fit(np.zeros((8, 8)), np.zeros((8, 3)), verbose=0).epoch == [0]


def test_the_fit_of_a_loop_ends_a_script_too(script):
    text = (
        "from kdpkit import batches, training\n"
        "loop = training.TrainingLoop(build(), optimizer='adam', loss=loss)\n"
        "try:\n"
        "    loop.fit(batches.ArrayBatches((x, y), global_batch_size=64), None, epochs=1)\n"
        "except Exception:\n"
        "    print('what a script catches')\n"
    )
    reached = _target.training_of(script(text), [])
    assert isinstance(reached.model, training.TrainingLoop)
    assert len(reached.dataset) == 1


def test_a_fit_of_a_model_of_ones_own_is_seen_where_it_calls_keras(script):
    text = (
        "class Own(keras.Sequential):\n"
        "    def fit(self, rows, **settings):\n"
        "        return super().fit(rows[0], rows[1], **settings)\n"
        "model = Own([keras.Input((8,)), keras.layers.Dense(3)])\n"
        "model.compile('adam', loss)\n"
        "model.fit((x, y), batch_size=8)\n"
    )
    assert _target.training_of(script(text), []).batch_size == 8


def test_a_dataset_or_a_function_that_gives_one_is_found_by_name(script, monkeypatch):
    text = "data = (x, y)\ndef make():\n    return x\ndef both():\n    return (x, y), build()\n"
    path = script(text, "data.py")
    assert len(_target.training_of(f"{path}:data", []).dataset) == 2
    assert _target.training_of(f"{path}:make", []).dataset.shape == (64, 8)
    assert isinstance(_target.training_of(f"{path}:both", []).model, keras.Model)
    monkeypatch.chdir(path.rpartition("/")[0])
    assert _target.training_of("data:make", []).dataset.shape == (64, 8)


@pytest.mark.parametrize(
    ("text", "arguments", "sentence"),
    [
        ("build()", [], "ended without a `fit`.*(dataset, model)"),
        ("1 / 0", [], "failed before its `fit`: ZeroDivisionError: division by zero"),
        ("sys.exit(3)", [], "ended before its `fit`: SystemExit: 3"),
        ("sys.exit('no data')", [], "ended before its `fit`: SystemExit: no data"),
        ("raise ValueError('first\\nsecond')", [], "ValueError: first$"),
        ("sys.exit()", [], "ended without a `fit`"),
        ("def (", [], "failed before its `fit`: SyntaxError"),
    ],
)
def test_a_script_that_gets_to_no_fit_is_one_sentence(text, arguments, sentence, script):
    with pytest.raises(ValueError, match=sentence):
        _target.training_of(script(text), arguments)


@pytest.mark.parametrize(
    ("target", "arguments", "sentence"),
    [
        ("nowhere.py", [], "There is no such file: nowhere.py"),
        ("nowhere.py:data", [], "There is no such file: nowhere.py"),
        ("train", [], "must be a Python script, or `module:name`"),
        ("no_such_module:data", [], "fails: ModuleNotFoundError: No module named 'no_such_module'"),
        ("kdpkit.scaling:data", [], "`kdpkit.scaling` has no `data`"),
        ("kdpkit.scaling:split_batch", [], "fails: TypeError: split_batch"),
        ("kdpkit.scaling:split_batch", ["--flag"], "those of a script"),
    ],
)
def test_a_target_that_names_nothing_is_one_sentence(target, arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        _target.training_of(target, arguments)
