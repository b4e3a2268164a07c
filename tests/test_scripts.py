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

SCRIPTS = Path(__file__).parent / "scripts"
TENSORFLOW, SLOW = pytest.mark.tensorflow, pytest.mark.slow
MEASURED = re.compile(r".*per_second.*|cpu_utilization|memory_gib")


def with_the_kit(text):
    added = re.sub(r"^( *)# \+ ", r"\1", text, flags=re.MULTILINE)
    return re.sub(r"^.*  # -$", "", added, flags=re.MULTILINE)


def run(text, directory, monkeypatch):
    """Run a script in a directory; return its model's weights, and its logs."""
    directory.mkdir()
    monkeypatch.chdir(directory)
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    names = {"__name__": "__main__"}
    exec(compile(text, "script", "exec"), names)
    weights = [keras.ops.convert_to_numpy(variable) for variable in names["model"].variables]
    return weights, names["history"].history


@pytest.mark.parametrize(
    ("name", "printed", "logged", "written"),
    [
        pytest.param(
            "images",
            ["Learning rate of epoch 1: 0.01 (step 3)", "Learning rate of epoch 3: 0.001 (step 9)"],
            {"learning_rate", "examples_per_second", "memory_gib"},
            "logs/train/events*",
            marks=SLOW,
        ),
        pytest.param(
            "own_loop",
            ["Learning rate of epoch 3: 0.1 (step 15)"],
            {"learning_rate"},
            "logs/train/events*",
            marks=TENSORFLOW,
        ),
    ],
)
def test_with_the_kits_parts_training_is_what_it_was(
    name, printed, logged, written, tmp_path, monkeypatch, capsys
):
    text = (SCRIPTS / f"{name}.py").read_text()
    added, removed = (re.findall(line, text) for line in (r"\n *# \+ ", r"  # -\n"))
    assert len(removed) <= len(added) <= 5
    weights, logs = run(text, tmp_path / "stock", monkeypatch)
    capsys.readouterr()
    found, found_logs = run(with_the_kit(text), tmp_path / "kit", monkeypatch)
    output = capsys.readouterr().out
    for one, other in zip(found, weights, strict=True):
        np.testing.assert_array_equal(one, other)
    for log in [log for log in logs if not MEASURED.fullmatch(log)]:
        np.testing.assert_allclose(found_logs[log], logs[log], rtol=1e-5, err_msg=log)
    assert all(line in output for line in printed)
    assert logged <= found_logs.keys()
    assert [*(tmp_path / "kit").glob(written)]
