"""All private parts of Keras that training uses on every backend."""

from keras.src.backend import compute_output_spec as compute_output_spec
from keras.src.backend import get_stateless_scope as get_stateless_scope
from keras.src.backend.common.masking import get_keras_mask as get_keras_mask
from keras.src.backend.common.masking import set_keras_mask as set_keras_mask
