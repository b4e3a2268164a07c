"""Which layers of Keras and KerasHub mix the examples of a batch: those that the page lists."""

import pathlib
import re

import pytest

from tests.training import library_layers

pytestmark = pytest.mark.tensorflow

PAGE = pathlib.Path("docs/explanation/layers_that_mix_examples.md").read_text("utf-8")
TABLE = "\n".join(line.split("|")[1] for line in PAGE.split("\n") if line.startswith("| "))
NOT_TRIED = PAGE[PAGE.index("Not tried") :]
# What a layer of a library does that is the same on all replicas (moving values, losses).
SETTLED = ("assigns variables", "adds a loss")
QUICK = ("Dense", "Dropout", "Equalization")
CASES = [
    pytest.param(
        name, settings, id=f"{name} {settings or ''}", marks=[] if name in QUICK else [marks]
    )
    for marks in [pytest.mark.exhaustive]
    for name in library_layers.classes()
    for settings in (None, *library_layers.VARIANTS.get(name, []))
]


def _names(text):
    return {name.partition("(")[0] for name in re.findall(r"`([A-Z]\w+)`", text)}


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_a_layer_that_mixes_examples_is_in_the_table_and_not_divided(name, settings):
    from kdpkit.training.tensorflow._patches import installed
    from kdpkit.training.tensorflow._per_example_law import broken_law
    from kdpkit.training.tensorflow._whose_code import is_of_a_library

    found, short = library_layers.made(name, settings), name.rpartition(".")[-1]
    if found is None or short in library_layers.SLOW:
        assert short in _names(NOT_TRIED)
        return
    layer, inputs = found
    with installed():
        reason = broken_law(layer, inputs, {"training": True})
    if (reason or "").startswith(("cannot be tried alone", "returns something without")):
        assert short in _names(NOT_TRIED), reason
    elif reason not in (None, *SETTLED):
        assert not is_of_a_library(layer), reason
        assert short in _names(TABLE), reason


@pytest.mark.parametrize("name", sorted(_names(TABLE) - {"Concatenate", "Dot"}))
def test_what_is_in_the_table_is_not_divided(name):
    from kdpkit.training.tensorflow._whose_code import is_of_a_library

    settings = {"Softmax": {"axis": 0}}.get(name)
    layer, _ = library_layers.made(name, settings)
    assert not is_of_a_library(layer)
