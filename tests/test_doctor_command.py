"""`kdpkit doctor`, and what it says of the project's own recipes."""

import pathlib
import re
import sys

import pytest

from kdpkit import cli
from kdpkit.diagnostics._doctor import speed
from recipes import cnn_fit
from tests.processes import run

RECIPES = pathlib.Path(cnn_fit.__file__).parent
PRINTING = """
import atexit, os, threading, time
threading.Thread(target=time.sleep, args=(10000,)).start()  # which is not a daemon
atexit.register(print, "printed at the end")
print("printed by the script")
os.environ["KERAS_BACKEND"] = "jax"
import keras, numpy as np
x, y = np.zeros((64, 8), "float32"), np.zeros(64, "int64")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(x, y, batch_size=64)
"""


def doctor(*words, **environment):
    return run(sys.executable, "-m", "kdpkit", "doctor", *words, check=False, **environment)


@pytest.mark.slow
def test_a_script_chooses_its_backend_and_stdout_has_the_report_alone(tmp_path):
    """It also leaves a thread behind, for which the command does not wait."""
    path = tmp_path / "train.py"
    path.write_text(PRINTING)
    found = doctor("--tpu", path, KERAS_BACKEND="tensorflow")
    assert found.returncode == 1, found.stderr
    assert found.stdout.startswith("1 finding (looked at: train).\n\nslow     64-bit: train, y\n")
    assert found.stdout.count("Remedy:") == 1
    assert "printed by the script" in found.stderr


INPUT = """
import keras, tensorflow as tf
ds = tf.data.Dataset.from_tensor_slices((tf.zeros([64, 8]), tf.zeros([64], tf.int32)))
train, held_out = {train}, ds.shuffle(64).batch(16).cache()
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
if __name__ == "__main__":
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
    model.compile("adam", loss)
    {fit}
"""
FROZEN, FRESH = "ds.shuffle(64).cache().batch(16)", "ds.cache().shuffle(64).batch(16)"
THRICE = f"{FRESH}.repeat(3)"


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("train", "fit", "rules"),
    [
        (FROZEN, "model.fit(train, validation_data=held_out)", {"shuffle-before-cache"}),
        (FRESH, "model.fit(train, validation_data=held_out)", set()),
        (THRICE, "model.fit(train, epochs=5, initial_epoch=4)", set()),
        (THRICE, "model.fit(train, epochs=2)", {"repeat"}),
        (FRESH, "model.fit(train, epochs=2, steps_per_epoch=5)", {"runs-out"}),
    ],
)
def test_input_is_judged_by_what_the_script_asks_of_fit(train, fit, rules, tmp_path, capsys):
    path = tmp_path / "program.py"
    path.write_text(INPUT.format(train=train, fit=fit))
    assert cli.main(["doctor", str(path)]) == bool(rules)
    report = capsys.readouterr().out
    assert {*re.findall(r"^(?:error|wrong|slow) +([\w-]+):", report, re.MULTILINE)} == rules
    looked_at = "train, validation" if "validation" in fit else "train"
    assert f"looked at: {looked_at}{'' if rules else ', step'})." in report


@pytest.mark.slow
@pytest.mark.tensorflow
@pytest.mark.parametrize("flags", [[], ["--tpu"]])
def test_a_recipe_is_clean(flags, capfd):
    words = ["--smoke", "--strategy", "one", "--per-replica-batch-size", "64"]
    recipe = RECIPES / "cnn_fit.py"
    code = cli.main(["doctor", *flags, str(recipe), "--", *words])
    found = capfd.readouterr().out
    assert code == 0, found
    assert found.startswith("Nothing found (looked at: train")


SLOW = """
import keras, numpy as np, time
class Reading(keras.utils.PyDataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        time.sleep(0.05)
        return np.zeros((16, 8), "float32"), np.zeros(16, "int32")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
print("before the fit")
model.fit(Reading())
raise SystemExit("goes on after its fit")
"""


@pytest.mark.tensorflow
def test_a_script_is_measured_at_its_fit_and_the_report_alone_is_on_stdout(
    tmp_path, capfd, monkeypatch
):
    monkeypatch.setattr(speed, "_ROUNDS", 1)
    path = tmp_path / "train.py"
    path.write_text(SLOW)
    assert cli.main(["doctor", "--measure", str(path), "--seconds", "0.4"]) == 1
    found = capfd.readouterr()
    form = (
        r"A step takes [\d.,]+ ms, of which (\d+%)\s+waits for input\.\n\nslow     input: train\n"
    )
    form += r"    \1 of a step waits for input\.\n    Remedy: (.+\n)+"
    assert re.fullmatch(form, found.out)
    assert "before the fit" in found.err
    assert "goes on after" not in found.err
