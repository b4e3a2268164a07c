"""What libraries wrote, and which of it computes each example by itself."""

import sys
import types
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from kdpkit.training.tensorflow._keras_internals import BaseImagePreprocessingLayer, Functional

_LIBRARIES = ("keras", "keras_hub", "tensorflow", "kdpkit", "builtins")

# Keras' layers that compute each example by itself, unless the functions below find otherwise:
# those of Keras 3.15, as `tests/training/test_library_layers.py` tries them, and some that are not
# exported. Layers of a later version are tried when they are called.
_NAMES = """
Activation ActivityRegularization AdaptiveAveragePooling1D AdaptiveAveragePooling2D
AdaptiveAveragePooling3D AdaptiveMaxPooling1D AdaptiveMaxPooling2D AdaptiveMaxPooling3D Add
AdditiveAttention AlphaDropout Attention AutoContrast Average AveragePooling1D AveragePooling2D
AveragePooling3D BatchNormalization Bidirectional CategoryEncoding CenterCrop Concatenate
ContrastLimitedAdaptiveHistogramEqualization Conv1D Conv1DTranspose Conv2D Conv2DTranspose Conv3D
Conv3DTranspose ConvLSTM1D ConvLSTM2D ConvLSTM3D ConvLSTMCell Cropping1D Cropping2D Cropping3D
CustomScaleLayer Dense DepthwiseConv1D DepthwiseConv2D Discretization Dot Dropout ELU EinsumDense
Embedding Flatten GRU GRUCell GaussianDropout GaussianNoise GlobalAveragePooling1D
GlobalAveragePooling2D GlobalAveragePooling3D GlobalMaxPooling1D GlobalMaxPooling2D
GlobalMaxPooling3D GroupNormalization GroupedQueryAttention HashedCrossing Hashing Identity
InputLayer IntegerLookup LSTM LSTMCell LayerNormalization LayerScale LeakyReLU Masking
MaxNumBoundingBoxes MaxPooling1D MaxPooling2D MaxPooling3D Maximum Minimum MultiHeadAttention
Multiply Normalization PReLU Permute Pipeline RMSNormalization RNN RandomBrightness
RandomColorDegeneration RandomColorJitter RandomContrast RandomCrop RandomErasing RandomFlip
RandomGaussianBlur RandomGrayscale RandomHue RandomInvert RandomPerspective RandomPosterization
RandomRotation RandomSaturation RandomSharpness RandomShear RandomTranslation RandomZoom ReLU
RepeatVector Rescaling Reshape Resizing ReversibleEmbedding STFTSpectrogram SeparableConv1D
SeparableConv2D SimpleRNN SimpleRNNCell Softmax Solarization SpatialDropout1D SpatialDropout2D
SpatialDropout3D SpectralNormalization StackedRNNCells StochasticDepth StringLookup Subtract
TextVectorization TimeDistributed UnitNormalization UpSampling1D UpSampling2D UpSampling3D
ZeroPadding1D ZeroPadding2D ZeroPadding3D
"""
_TRIED_OF_KERAS = frozenset(_NAMES.split())
# Layers of one model, which nobody tried beforehand. Some compare the examples: CLIP's head does,
# and the balance of experts in Mixtral.
_OF_ONE_MODEL = "keras_hub.src.models."

# Names, because not every version of Keras has all of these layers, which compare examples.
_COMPARING = frozenset(
    {"Lambda", "CutMix", "MixUp", "RandAugment", "AugMix"}
    | {"Equalization", "MelSpectrogram", "RandomElasticTransform"}
    | {"MaskedLMMaskGenerator", "RandomDeletion", "RandomSwap"}
)
# Losses of libraries that compute with all examples together, as classes and as functions.
_COMPARING_LOSSES = ("circle", "dice", "tversky", "sigliploss")

# Layers that take the first axis of a tensor with fewer axes for something else than examples.
_LEAST_AXES = dict.fromkeys(
    ("Attention", "AdditiveAttention", "FNetEncoder", "PositionEmbedding"), 3
) | {"Activation": 2}  # It may be a softmax.
_LEAST_AXES_OF_IMAGES = 4
_NAMES_OF_AXES = ("axis", "axes", "attention_axes", "sequence_axis")

# Operations that may be a layer's activation, because they compute each number, or each last axis,
# by itself: those named as Keras' activations, and these. Others may normalize, or add up.
_ELEMENTWISE = ("abs", "cos", "erf", "exp", "hard_swish", "identity", "log", "sin", "sqrt")
_ACTIVATIONS = frozenset((*vars(keras.activations), *_ELEMENTWISE, "square", "swish"))
_COMPILED = ("loss", "optimizer")  # attributes of a model that its call does not use


def is_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES


def layers_of(layer: keras.layers.Layer) -> list[Any]:
    return [part for part in layer._flatten_layers() if isinstance(part, keras.layers.Layer)]


def is_composed(layer: keras.layers.Layer) -> bool:
    """Return whether a model has no code except for that of its layers."""
    kind = type(layer)
    return kind in (keras.Sequential, Functional) or (
        isinstance(layer, Functional)
        and is_library(kind.__module__)
        and kind.call is Functional.call
    )


def is_of_a_library(layer: keras.layers.Layer) -> bool:
    """Return whether a layer is a library's, and computes each example by itself."""
    parts = layers_of(layer)
    operations = [op for part in parts for op in getattr(part, "operations", ())]
    return (
        is_written_by_libraries(layer)
        and not any(map(_is_untried, parts))
        and not any(map(_may_compare_examples, parts))
        and all(isinstance(op, keras.layers.Layer) or _takes_from_each(op) for op in operations)
    )


def _takes_from_each(operation: Any) -> bool:
    """Return whether an operation of a model is `x[:, ...]`, as of BERT's first token."""
    keys = [node.arguments.args[1:] for node in operation._inbound_nodes]
    return type(operation).__name__ == "GetItem" and all(
        isinstance(key, tuple) and key[0] == slice(None) for (key,) in keys
    )


def is_written_by_libraries(layer: keras.layers.Layer) -> bool:
    """Return whether a layer, those in it, and functions that they call are all of libraries."""
    parts = layers_of(layer)
    return all(map(_is_written_by_libraries, [*map(type, parts), *_functions_in(parts)]))


def _is_untried(layer: keras.layers.Layer) -> bool:
    """Return whether a layer is of one model, or of a Keras that is newer than what was tried."""
    module, name = type(layer).__module__, type(layer).__name__
    is_new = module.startswith("keras.") and name not in _TRIED_OF_KERAS
    return (is_new or module.startswith(_OF_ONE_MODEL)) and not is_composed(layer)


def _may_compare_examples(layer: keras.layers.Layer) -> bool:
    """Return whether a layer of a library may compute with all examples together."""
    name = type(layer).__name__
    if name == "TextVectorization":  # which pads to the longest
        return layer._output_sequence_length is None
    regularizer = type(getattr(layer, "activity_regularizer", None)).__name__
    # The regularizer compares the outputs of the examples.
    return name in _COMPARING or regularizer == "OrthogonalRegularizer" or 0 in _axes(layer)


def has_too_few_axes(layer: keras.layers.Layer, args: Any, kwargs: Any) -> bool:
    """Return whether a library's layer computes with the examples of a tensor together."""
    least = _LEAST_AXES.get(type(layer).__name__, 0)
    if isinstance(layer, BaseImagePreprocessingLayer):
        least = _LEAST_AXES_OF_IMAGES
    if getattr(layer, "output_mode", None) in ("count", "multi_hot", "tf_idf"):
        least = 2
    negative = [axis for axis in _axes(layer) if isinstance(axis, int) and axis < 0]
    least = max(least, 1 - min(negative, default=1))
    if not least or not is_library(type(layer).__module__):
        return False
    leaves = tf.nest.flatten((args, kwargs))
    ranks = [leaf.shape.rank for leaf in leaves if isinstance(leaf, tf.Tensor) and leaf.shape.rank]
    return max(ranks, default=least) < least


def _axes(layer: keras.layers.Layer) -> list[Any]:
    return tf.nest.flatten([getattr(layer, name, None) for name in _NAMES_OF_AXES])


def _functions_in(layers: list[Any]) -> Iterator[Any]:
    """Iterate over the functions that layers call on tensors, such as activations."""
    for layer in layers:
        for name, value in vars(layer).items():
            is_other = name.endswith(("_initializer", "_constraint")) or name in _COMPILED
            is_part = isinstance(value, keras.layers.Layer | keras.Variable | tf.Variable)
            if callable(value) and not is_other and not is_part:
                yield value


def _is_written_by_libraries(code: Any) -> bool:
    """Return whether a class, a function or another callable is a library's."""
    code = getattr(code, "python_function", code)  # of a `tf.function`
    # `functools.wraps` copies names: a function of the user's may have a library's.
    scope = {} if isinstance(code, type) else getattr(code, "__globals__", {})
    written_in = scope.get("__name__", "builtins")
    if not is_library(written_in) and written_in not in sys.stdlib_module_names:
        return False
    module = str(getattr(code, "__module__", None) or type(code).__module__)
    kinds = (keras.layers.Layer, keras.Loss, keras.Metric)
    is_class = isinstance(code, type) and issubclass(code, kinds)
    if module == "builtins" and (is_class or isinstance(code, types.FunctionType)):
        return False  # It is the user's: its namespace has no name, as that of `exec`.
    if module.startswith(("tensorflow.", "keras.src.ops.")) and not isinstance(code, type):
        return getattr(code, "__name__", "") in _ACTIVATIONS
    return is_library(module)


def is_loss_of_a_library(loss: Any) -> bool:
    """Return whether a loss, as `compile` takes it, is a library's and separates the examples."""
    parts = [part for part in (loss, type(loss), getattr(loss, "fn", None)) if part is not None]
    return not _compares_examples(loss) and all(map(_is_written_by_libraries, parts))


def is_metric_of_a_library(metric: keras.metrics.Metric) -> bool:
    """Return whether a metric, and the function that it may have, are a library's."""
    function = getattr(metric, "_fn", metric)
    return (
        not _compares_examples(function)
        and _is_along_the_last_axis(metric)
        and all(map(_is_written_by_libraries, (type(metric), function)))
    )


def _compares_examples(loss: Any) -> bool:
    name = loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)
    return name.lower() in _COMPARING_LOSSES or not _is_along_the_last_axis(loss)


def _is_along_the_last_axis(function: Any) -> bool:
    """Return whether a loss or a metric does not reduce the examples, whatever its `axis` means."""
    axis = getattr(function, "_fn_kwargs", {}).get("axis", getattr(function, "axis", -1))
    return axis in (None, -1)


def metrics_of(model: keras.Model) -> list[Any]:
    """List the metrics of a model, with those that were passed to `compile`."""
    return [part for metric in model.metrics for part in getattr(metric, "metrics", [metric])]
