"""Facts of `docs/development/facts.md` that no other test holds, and whether the page is true."""

import re
from pathlib import Path

import keras
import numpy as np
import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("page", ["development/facts.md", "upstream/README.md"])
def test_a_page_names_files_and_tests_that_exist(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    folders = [ROOT / "tests", ROOT / "kdpkit", ROOT / "kdpkit" / "training" / "tensorflow", ROOT]
    named = re.findall(r"`((?:\w+/)*\w+\.py)(?:::(\w+))?`", text)
    assert named
    for file, test in named:
        found = [folder / file for folder in folders if (folder / file).exists()]
        assert found, file
        assert not test or f"def {test}(" in found[0].read_text(encoding="utf-8"), test
    for name in re.findall(r"upstream/(\w+\.md)", text):
        assert (ROOT / "docs" / "upstream" / name).exists()


@pytest.mark.parametrize(
    "callback",
    [
        keras.callbacks.LearningRateScheduler(lambda epoch: 0.1),  # noqa: ARG005
        keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=0, min_delta=1e9),
    ],
    ids=lambda callback: type(callback).__name__,
)
def test_callbacks_that_set_the_rate_fail_on_a_schedule(callback):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.9)
    model.compile(keras.optimizers.SGD(rate), "mse")
    with pytest.raises(TypeError, match="not settable"):
        model.fit(np.ones((2, 1)), np.ones((2, 1)), epochs=3, callbacks=[callback], verbose=0)
