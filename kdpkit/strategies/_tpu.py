"""TensorFlow's connection to a TPU, made once, and each way in which it can fail."""

import functools
import warnings

import tensorflow as tf

from kdpkit import errors
from kdpkit._internal import checks, machine
from kdpkit.cluster import _network

_ANSWER_SECONDS = 10.0
_THROUGH_JAX = "this TPU works through JAX: set KERAS_BACKEND=jax before Keras is imported"


@functools.cache
def connect_tpu(address: str) -> tf.distribute.cluster_resolver.TPUClusterResolver:
    """Connect to a TPU, initialise it, and return the resolver that `TPUStrategy` takes.

    Initialising wipes the TPU's memory, so this does it once in a process. The address is `"local"`
    for the TPU of this machine, as on a TPU virtual machine and on Colab; else the name, or
    `"grpc://10.0.0.2:8470"`, of one on the network. Not proven on a TPU: none was available, and
    Keras 3's `fit` is reported to fail under `TPUStrategy` (keras-team/keras#19448).
    """
    if address == "local":
        if not machine.chips():
            checks.fail(machine.NO_TPU, TPU_NAME=address)
        if not tf.config.list_physical_devices("TPU_SYSTEM"):  # what drives them
            checks.fail(
                "This build of TensorFlow cannot drive this machine's "
                f"{machine.chips()} TPU chip(s); {_THROUGH_JAX}.",
                TPU_NAME=address,
                remedy="Or put `tensorflow-tpu` of the same version instead of `tensorflow`.",
            )
    elif address.startswith("grpc://"):
        problem = _network.problem(address.removeprefix("grpc://"), _ANSWER_SECONDS)
        if problem:
            checks.fail(
                f"The TPU's host does not answer ({problem}).",
                TPU_NAME=address,
                remedy="Check that the TPU runs, and its address.",
            )
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=address)
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (ValueError, OSError, RuntimeError, tf.errors.OpError) as error:
        raise errors.InputError(
            f"The TPU {address} could not be initialised ({checks.first_line(error)}). End any "
            "other process that uses it, pass its address as grpc://HOST:8470, or 'local' on a TPU "
            f"virtual machine, and check that a TPU build of TensorFlow {tf.__version__} runs "
            f"there. Or: {_THROUGH_JAX}."
        ) from error
    warnings.warn(
        f"Training on a TPU through TensorFlow is unproven with Keras 3; {_THROUGH_JAX}.",
        stacklevel=2,
    )
    return resolver
