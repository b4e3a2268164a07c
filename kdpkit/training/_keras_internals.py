"""What is private in Keras on every backend and used here, in one file."""

from keras.src.backend import compute_output_spec, get_stateless_scope
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.trainers.compile_utils import get_loss  # what `compile` makes of names and functions
from keras.src.trainers.data_adapters import get_data_adapter  # what `fit` reads its data with

__all__ = [
    "compute_output_spec",
    "get_data_adapter",
    "get_keras_mask",
    "get_loss",
    "get_stateless_scope",
    "set_keras_mask",
]
