"""Every layer that Keras and KerasHub export, made with few arguments, and what it is called on."""

import inspect
from collections.abc import Iterator
from typing import Any

import keras
import keras_hub
import numpy as np
import tensorflow as tf
from keras import layers, ops
from keras.src.layers.preprocessing.image_preprocessing.base_image_preprocessing_layer import (
    BaseImagePreprocessingLayer,
)

_RANDOM = np.random.default_rng(0)
_CONVOLUTION = {"filters": 2, "kernel_size": 2}

# What a layer is made with, by name, or by how its name ends; a layer in it is made by a function.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "DepthwiseConv1D": {"kernel_size": 2},
    "DepthwiseConv2D": {"kernel_size": 2},
    "Bidirectional": {"layer": lambda: layers.LSTM(2)},
    "CategoryEncoding": {"num_tokens": 9},
    "CenterCrop": {"height": 2, "width": 2},
    "Discretization": {"bin_boundaries": [0.0, 1.0]},
    "Dot": {"axes": 1},
    "EinsumDense": {"equation": "ab,bc->ac", "output_shape": 3},
    "Embedding": {"input_dim": 9, "output_dim": 3},
    "ReversibleEmbedding": {"input_dim": 9, "output_dim": 3},
    "FNetEncoder": {"intermediate_dim": 3},
    "GroupNormalization": {"groups": 1},
    "GroupedQueryAttention": {"head_dim": 2, "num_query_heads": 2, "num_key_value_heads": 1},
    "IntegerLookup": {"vocabulary": [1, 2]},
    "StringLookup": {"vocabulary": ["one", "two"]},
    "TextVectorization": {"vocabulary": ["one", "two"]},
    "Lambda": {"function": lambda: ops.negative},
    "MaskedLMHead": {"vocabulary_size": 5},
    "MaskedLMMaskGenerator": {
        "vocabulary_size": 9,
        "mask_selection_rate": 0.5,
        "mask_token_id": 1,
        "mask_selection_length": 3,
    },
    "MaxNumBoundingBoxes": {"max_number": 3},
    "MultiHeadAttention": {"num_heads": 2, "key_dim": 2},
    "CachedMultiHeadAttention": {"num_heads": 2, "key_dim": 2},
    "MultiSegmentPacker": {"sequence_length": 4, "start_value": 1, "end_value": 2},
    "Normalization": {"mean": 0.0, "variance": 1.0},
    "Permute": {"dims": (2, 1)},
    "Pipeline": {"layers": lambda: [layers.Dense(3), layers.ReLU()]},
    "PositionEmbedding": {"sequence_length": 9},
    "RandomCrop": {"height": 4, "width": 4},
    "RandomDeletion": {"rate": 0.5, "max_deletions": 2},
    "RandomErasing": {},
    "RandomSwap": {"rate": 0.5, "max_swaps": 2},
    "RandomHue": {"factor": 0.2},
    "RandomSharpness": {"factor": 0.2},
    "RandomColorDegeneration": {"factor": 0.2},
    "MelSpectrogram": {"fft_length": 64, "sequence_stride": 16},
    "RandomSaturation": {"factor": 0.2},
    "RandomBrightness": {"factor": 0.2},
    "RandomContrast": {"factor": 0.2},
    "RandomPosterization": {"factor": 4},
    "RandomRotation": {"factor": 0.2},
    "RandomShear": {"x_factor": 0.2, "y_factor": 0.2},
    "RandomTranslation": {"height_factor": 0.2, "width_factor": 0.2},
    "RandomZoom": {"height_factor": 0.2},
    "RepeatVector": {"n": 2},
    "Rescaling": {"scale": 2.0},
    "Reshape": {"target_shape": (-1, 2)},
    "Resizing": {"height": 4, "width": 4},
    "RNN": {"cell": lambda: layers.LSTMCell(2)},
    "SpectralNormalization": {"layer": lambda: layers.Dense(2)},
    "StackedRNNCells": {"cells": lambda: [layers.GRUCell(2), layers.GRUCell(2)]},
    "StartEndPacker": {"sequence_length": 4},
    "STFTSpectrogram": {"frame_length": 32, "frame_step": 8, "fft_length": 32},
    "TimeDistributed": {"layer": lambda: layers.Dense(2)},
    "TokenAndPositionEmbedding": {
        "vocabulary_size": 9,
        "sequence_length": 9,
        "embedding_dim": 3,
    },
    "TransformerDecoder": {"intermediate_dim": 4, "num_heads": 2},
    "TransformerEncoder": {"intermediate_dim": 4, "num_heads": 2},
    "ImageConverter": {"image_size": (4, 4)},
}
_BY_END: dict[str, dict[str, Any]] = {
    "Dropout": {"rate": 0.5},
    "AdaptiveAveragePooling1D": {"output_size": 2},
    "AdaptiveAveragePooling2D": {"output_size": 2},
    "AdaptiveAveragePooling3D": {"output_size": 2},
    "AdaptiveMaxPooling1D": {"output_size": 2},
    "AdaptiveMaxPooling2D": {"output_size": 2},
    "AdaptiveMaxPooling3D": {"output_size": 2},
    "GlobalAveragePooling1D": {},
    "GlobalAveragePooling2D": {},
    "GlobalAveragePooling3D": {},
    "AveragePooling1D": {"pool_size": 2},
    "AveragePooling2D": {"pool_size": 2},
    "AveragePooling3D": {"pool_size": 2},
    "Dropout1D": {"rate": 0.5},
    "Dropout2D": {"rate": 0.5},
    "Dropout3D": {"rate": 0.5},
    "GaussianNoise": {"stddev": 0.5},
    "ActivityRegularization": {},
    "Conv1D": _CONVOLUTION,
    "Conv2D": _CONVOLUTION,
    "Conv3D": _CONVOLUTION,
    "Transpose": _CONVOLUTION,
    "LSTM1D": _CONVOLUTION,
    "LSTM2D": _CONVOLUTION,
    "LSTM3D": _CONVOLUTION,
    "ImageConverter": {"image_size": (4, 4)},
    "Activation": {"activation": "relu"},
    "Hashing": {"num_bins": 3},
    "HashedCrossing": {"num_bins": 3},
    "Dense": {"units": 3},
    "RNN": {"units": 2},
    "GRU": {"units": 2},
    "LSTM": {"units": 2},
    "Cell": {"units": 2},
}
# Minutes, for large images and sounds; they pass.
SLOW = ("Gemma4AudioConverter", "Gemma4ImageConverter", "Gemma4VideoConverter")
# Further settings of layers that are divided in some and not in others.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "Softmax": [{"axis": 0}],
    "TextVectorization": [{"vocabulary": ["one", "two"], "output_sequence_length": 3}],
    "BatchNormalization": [{"renorm": True}, {"synchronized": True}],
}


def _floats(*shape: int) -> Any:
    return tf.constant(_RANDOM.normal(size=(6, *shape)), "float32")


def _inputs() -> Iterator[tuple[Any, ...]]:
    """Iterate over what a layer may be called on, what most are called on first."""
    vectors, series, images = _floats(4), _floats(5, 4), _floats(8, 8, 3)
    tokens = tf.constant(_RANDOM.integers(0, 4, (6, 5)))
    texts = tf.constant(["one", "two", "one two", "one", "two", "two one"])
    yield from ((vectors,), (series,), (images,), (_floats(6, 6, 6, 3),))
    yield from ((_floats(400),), (_floats(400, 1),))
    yield from ((tokens,), ([vectors, vectors],), ([series, series],), (series, series))
    yield from ((_floats(3, 8, 8, 3),), (_floats(3, 6, 6, 6, 3),), (texts,), ((texts, texts),))
    yield from ((vectors, [_floats(2)]), (vectors, [_floats(2), _floats(2)]), (tokens[:, 0],))
    boxes = {"boxes": _floats(3, 4), "labels": tokens[:, :3]}
    yield from (({"images": images, "bounding_boxes": boxes},), (boxes,))
    yield from ((series, tokens), (tokens, tokens), ({"images": images, "labels": vectors},))


_ABSTRACT = (
    *(layers.Layer, layers.InputLayer, layers.Wrapper),
    *(keras_hub.layers.AudioConverter, keras_hub.layers.VideoConverter),
)


def classes() -> dict[str, type]:
    """Return every layer that is exported, by its name; KerasHub's as `keras_hub.`..."""
    found = {
        prefix + name: value
        for prefix, module in (("", keras.layers), ("keras_hub.", keras_hub.layers))
        for name, value in inspect.getmembers(module, inspect.isclass)
        if issubclass(value, keras.layers.Layer) and value.__name__ == name
    }
    return {name: value for name, value in found.items() if value not in _ABSTRACT}


def made(name: str, settings: dict[str, Any] | None = None) -> tuple[Any, Any] | None:
    """Return a layer, and what it was called on; None if that takes more than few arguments."""
    of = classes()[name]
    for inputs in _inputs():
        if min(tensor.shape.rank for tensor in tf.nest.flatten(inputs)) < _rank(of):
            continue
        try:
            layer = of(**(settings or _arguments(of.__name__)))
            layer(*inputs, training=True)
        except Exception:  # of any kind: the next inputs may fit
            continue
        return layer, inputs
    return None


def _rank(of: type) -> int:
    """Return the rank below which a layer takes what it is called on for one example."""
    if issubclass(of, BaseImagePreprocessingLayer | keras_hub.layers.ImageConverter):
        return 4
    needs_series = ("Attention", "AdditiveAttention", "FNetEncoder", "PositionEmbedding")
    return 3 if of.__name__ in needs_series else 1


def _arguments(name: str) -> dict[str, Any]:
    by_end = (given for end, given in _BY_END.items() if name.endswith(end))
    arguments = _ARGUMENTS.get(name) or next(by_end, {})
    return {key: value() if callable(value) else value for key, value in arguments.items()}
