"""Which layers of Keras and KerasHub mix the examples of a batch: those that the page lists."""

import inspect
import pathlib
import re

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from keras.src.layers.preprocessing.image_preprocessing.base_image_preprocessing_layer import (
    BaseImagePreprocessingLayer,
)

pytestmark = pytest.mark.tensorflow

PAGE = pathlib.Path("docs/explanation/layers_that_mix_examples.md").read_text("utf-8")
TABLE = "\n".join(line.split("|")[1] for line in PAGE.split("\n") if line.startswith("| "))
NOT_TRIED = PAGE[PAGE.index("Not tried") :]
# What a layer of a library does that is the same on all devices: moving values, one crop for all.
SETTLED = ("assigns variables", "adds a loss", "draws numbers that the examples share")
QUICK = ("Dense", "Dropout", "Equalization")
# Minutes, for large images and sounds; they pass.
SLOW = ("Gemma4AudioConverter", "Gemma4ImageConverter", "Gemma4VideoConverter")

# What layers are made with, by the name of an argument without a default; layers by a function.
ARGUMENTS = {
    **dict.fromkeys(("output_dim", "head_dim", "embedding_dim"), 3),
    **dict.fromkeys(("units", "filters", "kernel_size", "pool_size", "output_size", "n"), 2),
    **dict.fromkeys(("num_heads", "num_query_heads", "key_dim"), 2),
    **dict.fromkeys(("input_dim", "num_tokens", "vocabulary_size", "sequence_length"), 9),
    **dict.fromkeys(("height", "width", "intermediate_dim"), 4),
    **dict.fromkeys(("factor", "x_factor", "y_factor", "height_factor", "width_factor"), 0.2),
    **dict.fromkeys(("rate", "stddev", "mask_selection_rate"), 0.5),
    **dict.fromkeys(("num_key_value_heads", "axes", "start_value", "mask_token_id"), 1),
    "end_value": 2,
    "max_number": 3,
    "num_bins": 3,
    "scale": 2.0,
    "activation": "relu",
    "equation": "ab,bc->ac",
    "output_shape": 3,
    "dims": (2, 1),
    "target_shape": (-1, 2),
    "cell": lambda: layers.LSTMCell(2),
    "cells": lambda: [layers.GRUCell(2), layers.GRUCell(2)],
    "function": lambda: ops.negative,
    "layer": lambda: layers.Dense(2),
    "layers": lambda: [layers.Dense(3), layers.ReLU()],
}
WORDS = {"vocabulary": ["one", "two"]}
# And with what else, where it does not work without.
MORE = {
    "Bidirectional": {"layer": lambda: layers.LSTM(2)},
    "CategoryEncoding": {"num_tokens": 9},
    "CenterCrop": {"height": 2, "width": 2},
    "Discretization": {"bin_boundaries": [0.0, 1.0]},
    "GroupNormalization": {"groups": 1},
    "IntegerLookup": {"vocabulary": [1, 2]},
    "MaskedLMHead": {"vocabulary_size": 5},
    "MaskedLMMaskGenerator": {"mask_selection_length": 3},
    "MelSpectrogram": {"fft_length": 64, "sequence_stride": 16},
    "MultiSegmentPacker": {"sequence_length": 4},
    "Normalization": {"mean": 0.0, "variance": 1.0},
    "RandomPosterization": {"factor": 4},
    "RandomShear": {"x_factor": 0.2, "y_factor": 0.2},
    "RandomSwap": {"rate": 0.5, "max_swaps": 2},
    "STFTSpectrogram": {"frame_length": 32, "frame_step": 8, "fft_length": 32},
    "StartEndPacker": {"sequence_length": 4},
    "StringLookup": WORDS,
    "TextVectorization": WORDS,
}
# Further settings of layers that are divided in some and not in others.
VARIANTS = {
    "Softmax": [{"axis": 0}],
    "TextVectorization": [WORDS | {"output_sequence_length": 3}],
    "BatchNormalization": [{"renorm": True}, {"synchronized": True}],
}


def classes():
    """Return every layer that is exported, by its name; KerasHub's as `keras_hub.`..."""
    abstract = (layers.Layer, layers.InputLayer, layers.Wrapper)
    converters = ("AudioConverter", "VideoConverter")  # KerasHub 0.26 has the first
    abstract += tuple(getattr(keras_hub.layers, name, None) for name in converters)
    return {
        prefix + name: value
        for prefix, module in (("", keras.layers), ("keras_hub.", keras_hub.layers))
        for name, value in inspect.getmembers(module, inspect.isclass)
        if issubclass(value, layers.Layer) and value.__name__ == name and value not in abstract
    }


def inputs_of_layers():
    """Iterate over what a layer may be called on, what most are called on first."""
    random = np.random.default_rng(0)

    def floats(*shape):
        return tf.constant(random.normal(size=(6, *shape)), "float32")

    vectors, series, images = floats(4), floats(5, 4), floats(8, 8, 3)
    tokens = tf.constant(random.integers(0, 4, (6, 5)))
    texts = tf.constant(["one", "two", "one two", "one", "two", "two one"])
    yield from ((vectors,), (series,), (images,), (floats(6, 6, 6, 3),))
    yield from ((floats(400),), (floats(400, 1),))
    yield from ((tokens,), ([vectors, vectors],), ([series, series],), (series, series))
    yield from ((floats(3, 8, 8, 3),), (floats(3, 6, 6, 6, 3),), (texts,), ((texts, texts),))
    yield from ((vectors, [floats(2)]), (vectors, [floats(2), floats(2)]), (tokens[:, 0],))
    boxes = {"boxes": floats(3, 4), "labels": tokens[:, :3]}
    yield from (({"images": images, "bounding_boxes": boxes},), (boxes,))
    yield from ((series, tokens), (tokens, tokens), ({"images": images, "labels": vectors},))


def arguments_of(layer):
    parameters = inspect.signature(layer.__init__).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty]
    arguments = {name: ARGUMENTS[name] for name in needed if name in ARGUMENTS}
    arguments |= MORE.get(layer.__name__, {})
    if layer.__name__.endswith("ImageConverter"):
        arguments["image_size"] = (4, 4)
    return {name: value() if callable(value) else value for name, value in arguments.items()}


def least_rank(layer):
    """Return the rank below which a layer takes what it is called on for one example."""
    if issubclass(layer, BaseImagePreprocessingLayer | keras_hub.layers.ImageConverter):
        return 4
    needs_series = ("Attention", "AdditiveAttention", "FNetEncoder", "PositionEmbedding")
    return 3 if layer.__name__ in needs_series else 1


def made(name, settings=None):
    """Return a layer, and what it was called on; None if that takes more than few arguments."""
    kind = classes()[name]
    for inputs in inputs_of_layers():
        if min(tensor.shape.rank for tensor in tf.nest.flatten(inputs)) < least_rank(kind):
            continue
        try:
            layer = kind(**(settings or arguments_of(kind)))
            layer(*inputs, training=True)
        except Exception:  # of any kind: the next inputs may fit
            continue
        return layer, inputs
    return None


def names_in(text):
    return {name.partition("(")[0] for name in re.findall(r"`([A-Z]\w+)`", text)}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param(
            *(name, settings),
            id=f"{name} {settings or ''}",
            marks=() if name in QUICK else pytest.mark.exhaustive,
        )
        for name in classes()
        for settings in (None, *VARIANTS.get(name, []))
    ],
)
def test_a_layer_that_mixes_examples_is_in_the_table_and_not_divided(name, settings):
    from kdpkit.training.tensorflow._layer_trial import Verdict, try_layer
    from kdpkit.training.tensorflow._library_layers import is_of_a_library
    from kdpkit.training.tensorflow._patches import installed

    short = name.rpartition(".")[-1]
    found = None if short in SLOW else made(name, settings)
    if found is None:
        assert short in names_in(NOT_TRIED)
        return
    layer, inputs = found
    with installed():
        verdict, reason = try_layer(layer, inputs, {"training": True})
    if verdict is Verdict.UNTRIED:
        assert short in names_in(NOT_TRIED + TABLE), reason
    elif verdict is not Verdict.KEPT and reason not in SETTLED:
        assert not is_of_a_library(layer), reason
        assert short in names_in(TABLE), reason
    elif name == short:  # of Keras: no layer is tried for nothing while a model trains
        assert is_of_a_library(layer) or short in names_in(TABLE)


def test_a_layer_of_a_newer_keras_is_tried():
    from kdpkit.training.tensorflow._library_layers import is_of_a_library

    unknown = type("New", (layers.Dense,), {"__module__": "keras.src.layers.core.new"})(3)
    unknown.build((None, 4))
    assert not is_of_a_library(unknown)


@pytest.mark.parametrize("name", sorted(names_in(TABLE) - {"Concatenate", "Dot"}))
def test_what_is_in_the_table_is_not_divided(name):
    from kdpkit.training.tensorflow._library_layers import is_of_a_library

    layer, _ = made(name, {"Softmax": {"axis": 0}}.get(name))
    assert not is_of_a_library(layer)
