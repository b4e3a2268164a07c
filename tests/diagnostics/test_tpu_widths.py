"""Widths of layers against the tiles of a TPU, on both backends."""

import hypothesis
import keras
import pytest
from hypothesis import strategies as st

from kdpkit.diagnostics import check_tpu
from kdpkit.diagnostics._tpu_widths import fills_tiles


def dense(*widths):
    """Build a compiled model of dense layers on 64 features."""
    layers = [keras.layers.Dense(width, name=f"wide{i}") for i, width in enumerate(widths)]
    return compiled(keras.Sequential([keras.Input((64,)), *layers]))


def compiled(model):
    model.compile("sgd", "mse")
    return model


def flagged(model):
    found = check_tpu(model=model).findings
    return {finding.where.split("/")[-1] for finding in found if finding.rule == "tile-width"}


@hypothesis.given(st.integers(1, 2000))
def test_a_width_is_fine_as_a_multiple_of_8_or_a_tenth_below_one_of_128(width):
    next_multiple = next(size for size in range(128, 2200, 128) if size >= width)
    small = width in range(8, 128, 8)
    assert fills_tiles(width) == (small or width >= 0.9 * next_multiple)


@pytest.mark.parametrize("width", [100, 129, 200, 300])
def test_an_odd_width_of_a_large_layer_is_found(width):
    (where,) = flagged(dense(width, 64, 3))
    assert where.endswith("wide0")


@pytest.mark.parametrize("width", [8, 64, 120, 128, 250, 512])
def test_widths_that_fill_tiles_are_not(width):
    assert flagged(dense(width, 64, 3)) == set()


def test_the_waste_and_the_nearest_width_are_named():
    (finding,) = (f for f in check_tpu(model=dense(200, 64, 3)).findings if f.level == "slow")
    assert "22%" in finding.problem
    assert "256" in finding.remedy


def test_the_head_may_have_as_many_outputs_as_there_are_classes():
    assert flagged(dense(64, 37)) == set()


def test_small_layers_may_have_any_width():
    assert flagged(dense(512, 512, 13, 4)) == set()


def test_a_vocabulary_may_have_any_size():
    layers = [keras.Input((16,)), keras.layers.Embedding(30522, 64), keras.layers.Flatten()]
    assert flagged(compiled(keras.Sequential([*layers, keras.layers.Dense(3)]))) == set()


def test_a_depthwise_convolution_is_as_wide_as_its_channels():
    layers = [keras.Input((8, 8, 64)), keras.layers.DepthwiseConv2D(5), keras.layers.Flatten()]
    assert flagged(compiled(keras.Sequential([*layers, keras.layers.Dense(1)]))) == set()
