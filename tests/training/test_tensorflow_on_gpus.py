"""What differs on a GPU, as far as a CPU can show it: docs/explanation/tensorflow_on_gpus.md.

TensorFlow's wheel for Linux registers the kernels of GPUs on machines without one, too.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from tensorflow.python.framework import config, kernels

from kdpkit import strategies
from kdpkit.training import check_parity, replica_exact

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.skipif(not tf.test.is_built_with_cuda(), reason="TensorFlow without CUDA"),
]

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def without_gpu_kernel(graph):
    """List the operations of a graph, and of what it calls, that no kernel for GPUs fits."""
    definition = graph.as_graph_def()
    functions = [node for function in definition.library.function for node in function.node_def]
    nodes = [*definition.node, *functions]
    assert len(nodes) > 3
    return {node.op for node in nodes if not has_gpu_kernel(node)}


def has_gpu_kernel(node):
    def fits(kernel):
        return kernel.device_type in ("GPU", "DEFAULT") and all(
            node.attr[constraint.name].type in constraint.allowed_values.list.type
            for constraint in kernel.constraint
            if node.attr[constraint.name].type and constraint.allowed_values.list.type
        )

    return any(map(fits, kernels_of(node.op)))


@functools.cache
def kernels_of(operation):
    return kernels.get_registered_kernels_for_op(operation).kernel


def model():
    """Return a model of what is different on GPUs, with a seed."""
    keras.utils.set_random_seed(0)
    tokens, features = keras.Input((None,), dtype="int32"), keras.Input((4,))
    recurrent = layers.LSTM(6, dropout=0.3)(layers.Embedding(20, 8, mask_zero=True)(tokens))
    x = layers.Concatenate()([recurrent, layers.BatchNormalization()(features)])
    x = layers.GaussianNoise(0.1)(layers.Dropout(0.2)(layers.Dense(8, activation="relu")(x)))
    model = keras.Model([tokens, features], layers.Dense(3)(x))
    model.compile(keras.optimizers.Adam(1e-2, clipnorm=1.0), LOSS, metrics=["accuracy"])
    return model


def data():
    numbers = np.random.default_rng(0)
    x = numbers.integers(1, 20, (10, 5)), numbers.normal(size=(10, 4)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, numbers.integers(0, 3, 10))).batch(5)


@pytest.mark.slow
def test_every_operation_of_an_exact_step_has_a_kernel_for_gpus():
    strategy = strategies.select_strategy("mirrored", devices=2)
    with strategy.scope():
        trained = replica_exact(model())
    trained.fit(data(), epochs=1, verbose=0)
    step = tf.function(trained.train_step)
    graph = step.get_concrete_function(next(iter(data()))).graph
    assert without_gpu_kernel(graph) == set()
    operations = {operation.type for operation in graph.get_operations()}
    assert {"StatelessRandomUniformV2", "StatelessRandomNormalV2", "MatMul"} <= operations


class _SeenError(Exception):
    """Ends `check_parity` where the model is built."""


def test_parity_is_checked_without_tensor_float_32():
    def build():
        raise _SeenError(tf.config.experimental.tensor_float_32_execution_enabled())

    assert tf.config.experimental.tensor_float_32_execution_enabled()
    with pytest.raises(_SeenError, match="False"):
        check_parity(build, (np.zeros((4, 2), "float32"), np.zeros(4)), replicas=2)
    assert tf.config.experimental.tensor_float_32_execution_enabled()


@pytest.mark.slow
def test_with_deterministic_operations_replicas_train_the_same_bits_again():
    def trained():
        with strategies.select_strategy("mirrored", devices=2).scope():
            exact = replica_exact(model())
        exact.fit(data(), epochs=2, verbose=0)
        return np.concatenate([weight.ravel() for weight in exact.get_weights()])

    tf.config.experimental.enable_op_determinism()
    try:
        np.testing.assert_array_equal(trained(), trained())
    finally:
        config.disable_op_determinism()
