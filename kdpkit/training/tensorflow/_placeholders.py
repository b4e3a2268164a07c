"""Placeholders for an element of a dataset, with which a model is first traced."""

from typing import Any

import keras
import tensorflow as tf

from kdpkit.training._keras_internals import compute_output_spec
from kdpkit.training.tensorflow import _global_batches


def placeholders(spec: Any) -> Any:
    """Return Keras' placeholders; for ragged tensors, of which Keras has none, what was given."""

    def placeholder(spec: tf.TypeSpec) -> Any:
        spec = getattr(spec, "_value_specs", (spec,))[0]
        if not hasattr(spec, "shape") or isinstance(spec, tf.OptionalSpec):
            return None
        if is_ragged(spec):
            return spec
        is_sparse = isinstance(spec, tf.SparseTensorSpec)
        return keras.KerasTensor(spec.shape, spec.dtype.name, sparse=is_sparse)

    batch = spec.batch if isinstance(spec, _global_batches.FingerprintedBatch) else spec
    return tf.nest.map_structure(placeholder, batch)


def build_for_ragged(model: keras.Model, x: Any, y: Any, sample_weight: Any) -> None:
    """Build model, metrics and loss, as Keras does for examples that are not ragged."""

    def call(x: Any, y: Any, sample_weight: Any) -> None:
        x, y, sample_weight = keras.tree.map_structure(_ragged_tensor, (x, y, sample_weight))
        outputs = model(x, training=False)
        model.compute_metrics(x, y, outputs, sample_weight=sample_weight)
        model._compute_loss(x, y, outputs, sample_weight=sample_weight, training=False)

    compute_output_spec(call, x, y, sample_weight)


def is_ragged(spec: Any) -> bool:
    return isinstance(spec, tf.RaggedTensorSpec)


def _ragged_tensor(leaf: Any) -> Any:
    if not is_ragged(leaf):
        return leaf
    rank = leaf.ragged_rank
    return tf.compat.v1.ragged.placeholder(leaf.dtype, rank, leaf.shape[rank + 1 :])
