"""Logical devices, toy data and tiny models for tests.

Four logical CPUs are real replicas: what breaks on four GPUs when batches are split and gradients
are summed breaks on them too.
"""

from collections.abc import Callable

import keras
import numpy as np

from kdpkit._internal import checks, machine


def use_logical_cpus(count: int = 8) -> None:
    """Split the CPU into logical devices for the backend in use, before its runtime starts.

    On TensorFlow they are `CPU:0` to `CPU:{count - 1}`, on JAX `jax.devices()`, with enough threads
    for programs that use all of them.
    """
    if keras.backend.backend() == "jax":
        machine.split_for_jax(count)
        return
    from kdpkit.strategies import split_device

    split_device("CPU", count)


def toy_classification(
    examples: int, *, features: int = 4, classes: int = 3, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Return float32 features and integer labels that a linear model can learn.

    >>> x, y = toy_classification(10)
    >>> x.shape, y.shape
    ((10, 4), (10,))
    """
    random = np.random.default_rng(seed)
    x = random.normal(size=(examples, features)).astype("float32")
    weights = random.normal(size=(features, classes))
    return x, np.argmax(x @ weights, axis=1).astype("int32")


def tiny_classifier(*, features: int = 4, classes: int = 3, seed: int = 0) -> keras.Model:
    """Build a small dense classifier (logits) whose initial weights depend only on `seed`."""
    initializer = keras.initializers.GlorotUniform(seed=seed)
    return keras.Sequential(
        [
            keras.Input((features,)),
            keras.layers.Dense(8, activation="tanh", kernel_initializer=initializer),
            keras.layers.Dense(classes, kernel_initializer=initializer),
        ]
    )


def assert_per_example(layer: keras.layers.Layer, *inputs: object, training: bool = True) -> None:
    """Fail a test unless a layer computes each example by itself.

    A layer of your own that does is divided over replicas by `kdpkit.training.replica_exact`. It is
    tried on made-up examples of the shapes of `inputs`, with gradients: one of them is replaced by
    NaN, by huge numbers, by another one, or examples are left out or come in another order, and the
    others' outputs and gradients must stay what they were. The layer is left as it was.

    Args:
        layer: A layer, or a model that is used as one; it is built if it is not yet.
        inputs: What it is called on: arrays with the examples along axis 0, or nests of them.
        training: Whether it is called as in training.

    Raises:
        AssertionError: It does not; the message names what breaks the law.
        ValueError: Keras' backend is not TensorFlow.

    >>> assert_per_example(keras.layers.LayerNormalization(), np.ones((2, 3)))
    >>> assert_per_example(keras.layers.Softmax(axis=0), np.ones((2, 3)))
    Traceback (most recent call last):
    AssertionError: The layer `softmax` changes the outputs of examples when one is NaN...
    """
    if keras.backend.backend() != "tensorflow":
        checks.fail(
            "`assert_per_example` tries layers of TensorFlow; on JAX `replica_exact` divides none.",
            backend=keras.backend.backend(),
        )
    from kdpkit.training.tensorflow._patches import installed
    from kdpkit.training.tensorflow._per_example_law import broken_law

    tensors = keras.tree.map_structure(keras.ops.convert_to_tensor, inputs)
    if not layer.built:
        layer(*tensors)
    with installed():
        reason = broken_law(layer, tensors, {"training": training})
    if reason is not None:
        raise AssertionError(
            f"The layer `{layer.name}` {reason}, so replicas that divide it over their examples "
            "would not compute what one device does."
        )


def assert_parity(build: Callable[[], keras.Model], data: object, *, replicas: int) -> None:
    """Fail a test unless R replicas train what one device trains.

    Args:
        build: Returns a new, compiled model; see `kdpkit.training.check_parity`.
        data: A dataset of global batches, or one batch as a tuple of arrays.
        replicas: Number of replicas, each on its own device.

    Raises:
        AssertionError: They do not; the message is the report, with the variable that differs most.
            If training on replicas raised an error, it is the `__cause__`.
        ValueError: Nothing can be compared; see `kdpkit.training.check_parity`.

    >>> from kdpkit.training import replica_exact
    >>> def build():
    ...     model = replica_exact(tiny_classifier())
    ...     model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    ...     return model
    >>> assert_parity(build, toy_classification(7), replicas=2)
    """
    from kdpkit.training import check_parity

    report = check_parity(build, data, replicas=replicas)
    if not report.equal:
        raise AssertionError(str(report)) from report.error
