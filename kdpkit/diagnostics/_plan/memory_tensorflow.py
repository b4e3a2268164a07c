"""What a training step needs on TensorFlow, as far as shapes show it."""

import functools
import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend import compute_output_spec

from kdpkit.batches import rows_of
from kdpkit.diagnostics import _batch

# Their outputs are what other operations made, or constants.
_WITHOUT_MEMORY = ("Const", "Identity", "Placeholder", "ReadVariableOp", "Reshape", "StopGradient")


class StepMemory:
    """The step of a loop; a replica has all variables.

    Args:
        make: Returns a dataset and a `TrainingLoop`.
    """

    can_shard = can_remat = False
    estimates = ("activations", "temporaries")

    def __init__(self, make: Callable[[], tuple[Any, Any]]) -> None:
        dataset, self._loop = make()
        self._batch = _batch.batches_of(dataset).first
        self.global_batch_size = rows_of(self._batch)
        model = self._loop.model
        if not model.built:
            x, _, _ = keras.utils.unpack_x_y_sample_weight(self._specs(self.global_batch_size))
            compute_output_spec(functools.partial(model, training=False), x)
        model.optimizer.build(model.trainable_variables)

    @property
    def micro_batches_are_exact(self) -> bool:
        """Whether no layer looks at several examples; random numbers are those of one batch."""
        layers = self._loop.model._flatten_layers()
        return not any(isinstance(layer, keras.layers.BatchNormalization) for layer in layers)

    def need(self, replicas: int, *, shard: str, accumulation: int, remat: bool) -> dict[str, Any]:
        """Return bytes on one replica."""
        del shard
        model = self._loop.model
        gradients = _bytes(model.trainable_variables)
        return {
            "weights": _bytes(model.variables),
            "gradients": gradients,
            "optimizer": _bytes(model.optimizer.variables),
            "activations": self.kept(accumulation, remat=remat) // replicas,
            "temporaries": gradients if accumulation > 1 else 0,  # of a micro-batch
            "operations": None,
        }

    def _specs(self, examples: int) -> Any:
        return keras.tree.map_structure(
            lambda part: tf.TensorSpec((examples, *part.shape[1:]), part.dtype), self._batch
        )

    def kept(self, accumulation: int, *, remat: bool) -> int:
        """Return the bytes of all that a forward pass computes, as if nothing were freed."""
        del remat
        self._loop.loss.in_micro_batches = accumulation > 1
        examples = math.ceil(self.global_batch_size / accumulation)
        x, y, _ = keras.utils.unpack_x_y_sample_weight(self._specs(examples))
        forward = tf.function(
            functools.partial(self._loop.per_example_loss, training=True), autograph=False
        )
        computed = (
            tensor
            for operation in forward.get_concrete_function(x, y).graph.get_operations()
            if operation.type not in _WITHOUT_MEMORY
            for tensor in operation.outputs
        )
        return sum((t.shape.num_elements() or 0) * t.dtype.size for t in computed)


def _bytes(variables: list[keras.Variable]) -> int:
    return sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in variables)
