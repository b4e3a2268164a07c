"""What targets name: scripts that run up to their first `fit`, and datasets in modules."""

import sys

import keras
import numpy as np
import pytest

from kdpkit import training
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
    """Return what a target asks `fit` for."""
    return _target.checked(target, arguments, lambda program: program)


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
    reached = asked_by(path, ["--data", "here"])
    assert int(reached.model.optimizer.iterations) == 0
    assert [part if part is None else part.shape for part in reached.dataset] == [
        (64, 8),
        (64,),
        None,
    ]
    assert reached.batch_size == 16
    assert len(reached.callbacks) == 1
    assert len(reached.validation_data) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "reads ['--data', 'here']" in output.err


def test_fit_is_keras_own_again_afterwards(script):
    before = keras.Model.fit, training.TrainingLoop.fit, sys.argv, sys.path[:], [*sys.meta_path]
    asked_by(script("build().fit(x, y)"), [])
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
    reached = asked_by(script(text), [])
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
    assert asked_by(script(text), []).batch_size == 8


def test_the_check_is_made_while_the_script_has_its_files_and_modules(script, tmp_path):
    path = script(
        "import pathlib, tempfile\n"
        "with tempfile.TemporaryDirectory() as directory:\n"
        "    directory = pathlib.Path(directory)\n"
        "    (directory / 'rows').touch()\n"
        "    build().fit(x, y, callbacks=[directory])\n"
    )
    (tmp_path / "beside_the_script.py").write_text("ROWS = 'rows'")

    def check(training):
        from beside_the_script import ROWS

        (directory,) = training.callbacks
        return directory, [path.name for path in directory.iterdir()] == [ROWS]

    directory, was_open = _target.checked(path, [], check)
    assert was_open
    assert not directory.exists()


@pytest.mark.parametrize(
    "ending",
    [
        "try:\n    build().fit(x, y)\nexcept BaseException:\n    pass\n",
        "try:\n    build().fit(x, y)\nfinally:\n    raise SystemExit(1)\n",
        "try:\n    build().fit(x, y)\nexcept BaseException:\n    build().fit(x, y, batch_size=4)\n",
    ],
    ids=["caught", "another error", "fitted again"],
)
def test_what_the_check_found_is_kept_whatever_the_script_does_then(ending, script):
    checks = []
    _target.checked(script(ending), [], checks.append)
    assert [training.batch_size for training in checks] == [None]


def test_what_the_check_raises_is_raised(script):
    def check(_):
        raise ValueError("what is checked is wrong")

    for target in (script("build().fit(x, y)"), script("", "data.py") + ":x"):
        with pytest.raises(ValueError, match=r"^what is checked is wrong$"):
            _target.checked(target, [], check)


def test_the_check_can_use_fit_itself(script):
    path = script("build().fit(x, y, batch_size=32)")
    model = _target.checked(
        path, [], lambda program: program.model.fit(*program.dataset[:2], verbose=0).model
    )
    assert int(model.optimizer.iterations) == 2


def test_fit_is_asked_as_keras_would_cut_its_arrays(script):
    reached = asked_by(script("build().fit(x, y, validation_split=0.25, validation_batch_size=8)"))
    assert [len(part) for part in reached.dataset[:2]] == [48, 48]
    assert [len(part) for part in reached.validation_data[:2]] == [16, 16]
    assert (reached.batch_size, reached.validation_batch_size) == (None, 8)
    given = "build().fit(x, y, steps_per_epoch=3, validation_split=0.5, validation_data=(x, y))"
    reached = asked_by(script(given))
    assert (len(reached.dataset[0]), reached.batch_size) == (64, 22)


def test_a_dataset_or_a_function_that_gives_one_is_found_by_name(script, monkeypatch):
    text = "data = (x, y)\ndef make():\n    return x\ndef both():\n    return (x, y), build()\n"
    path = script(text, "data.py")
    assert len(asked_by(f"{path}:data", []).dataset) == 2
    assert asked_by(f"{path}:make", []).dataset.shape == (64, 8)
    assert isinstance(asked_by(f"{path}:both", []).model, keras.Model)
    monkeypatch.chdir(path.rpartition("/")[0])
    assert asked_by("data:make", []).dataset.shape == (64, 8)


@pytest.mark.parametrize(
    "text",
    [
        "build().fit(x, y)\ndata = x\n",
        "def data():\n    build().fit(x, y)\n",
        "try:\n    build().fit(x, y)\nexcept BaseException:\n    data = x\n",
    ],
    ids=["at its top", "in the function", "caught"],
)
def test_a_module_that_trains_raises_and_trains_nothing(text, script):
    path = script("model = build()\n" + text.replace("build()", "model"), "data.py")
    with pytest.raises(ValueError, match="calls `fit` before it defines `data`.*__main__"):
        asked_by(f"{path}:data")
    assert int(sys.modules["data"].model.optimizer.iterations) == 0


def test_a_module_gets_no_arguments_of_the_command(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["kdpkit", "doctor", "--tpu", "data.py:x"])
    path = script("import argparse\nargparse.ArgumentParser().parse_args()\n", "data.py")
    assert asked_by(f"{path}:x").dataset.shape == (64, 8)
    assert sys.argv == ["kdpkit", "doctor", "--tpu", "data.py:x"]


@pytest.mark.parametrize(
    ("text", "target", "arguments", "sentence"),
    [
        ("build()", "train.py", [], "ended without a `fit`.*(dataset, model)"),
        ("1 / 0", "train.py", [], "failed before its `fit`: ZeroDivisionError: division by zero"),
        ("sys.exit('no data')", "train.py", [], "ended before its `fit`: SystemExit: no data"),
        ("raise ValueError('first\\nsecond')", "train.py", [], "ValueError: first$"),
        ("sys.exit()", "train.py", [], "ended without a `fit`"),
        ("sys.exit(0)", "train.py:x", [], "train.py:x` fails: SystemExit: 0"),
        ("", "nowhere.py:data", [], "There is no such file: nowhere.py"),
        ("", "train", [], "must be a Python script, or `module:name`"),
        ("", "no_such_module:data", [], "fails: ModuleNotFoundError"),
        ("", "kdpkit.scaling:data", [], "`kdpkit.scaling` has no `data`"),
        ("", "kdpkit.scaling:split_batch", ["--flag"], "those of a script"),
    ],
)
def test_a_target_that_gets_nowhere_is_one_sentence(
    text, target, arguments, sentence, script, monkeypatch
):
    monkeypatch.chdir(script(text).rpartition("/")[0])
    with pytest.raises(ValueError, match=sentence):
        asked_by(target, arguments)
