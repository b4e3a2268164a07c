"""`replica_exact`: `fit`, and steps of one's own, that train on several devices as on one."""

import functools
import importlib
from collections.abc import Callable
from typing import Any, TypeVar, overload

import keras

from kdpkit._internal import checks

Trained = TypeVar("Trained", bound=Callable[..., Any])  # a model, or a function


@overload
def replica_exact(model_or_function: Trained, *, strategy: Any = ...) -> Trained: ...


@overload
def replica_exact(*, strategy: Any = ...) -> Callable[[Trained], Trained]: ...


def replica_exact(model_or_function: Any = None, *, strategy: Any = None) -> Any:
    """Make `fit`, or a step of your own, do on several devices what it does on one device.

    Call it once, before or after `compile`, on a model that was built for several devices: on
    TensorFlow inside `with strategy.scope():`, on JAX after
    `keras.distribution.set_distribution(DataParallel())`. Then train as always, by `fit`,
    `evaluate` and `predict`. Each batch is shared by the devices, and weights, losses and metrics
    equal those of one device, except for rounding: for batches of any size, and for a `train_step`
    of your own, written as for one device. The model is saved and loaded as before.

    A loop of your own stays as it is, with a decorator on what it calls for each batch: a function
    of global batches, with its tapes, optimizers and metrics, and without `strategy.run`. Other
    arguments, and what it returns, are as on one device. On TensorFlow it is compiled as
    `tf.function` does, with AutoGraph, on whichever side of the two `@tf.function` stands. Its
    strategy is the one in whose scope it is decorated or first called, or whose variables it uses.

    On JAX it is a function of state and batch, which is compiled as `jax.jit` does, with the
    settings of a `@jax.jit` below it. A batch is an argument whose arrays have one length and are
    on no device yet, or on one; it is divided along its first axis. All else, and the first of
    several arguments, is state: it is put on all devices, or stays as it is sharded there. With
    several processes batches are NumPy arrays, of the examples that each process has.

    On TensorFlow a step is traced once, and its operations on examples are divided, whatever layer,
    loss or step they belong to: docs/explanation/one_graph.md. With `run_eagerly=True` the first
    device computes everything.

    Under `ParameterServerStrategy` workers train on a batch each, asynchronously:
    docs/how_to/parameter_servers.md.

    Random numbers, XLA, limits: docs/explanation/what_stays_exact.md.
    Several processes: docs/how_to/several_processes.md.

    Args:
        model_or_function: A Keras model: Sequential, functional, subclassed, or a KerasHub task. Or
            a function, also a method or a `tf.function`. Left out, the result is a decorator.
        strategy: The strategy of a function that is decorated outside its scope. On JAX a
            distribution, or a `jax.sharding.Mesh`.

    Returns:
        The same model, or a function that is called as the one given. What was made outside any
        strategy trains as before; it raises if `kdpkit.strategies` or `kdpkit.sharding` has made
        one of several devices, and none has been used.

    Raises:
        ValueError: It is neither a Keras model nor a function, or its strategy is one that is not
            supported. On TensorFlow `fit` raises for a dataset that is empty, endless without
            `steps_per_epoch`, or not batched.

    >>> from kdpkit import strategies, testing
    >>> x, y = testing.toy_classification(10)
    >>> with strategies.select_strategy("mirrored", devices=4).scope():
    ...     model = replica_exact(testing.tiny_classifier())
    ...     model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    >>> history = model.fit(x, y, batch_size=5, verbose=0)  # shards of 2, 2, 1 and 0 examples
    """
    if model_or_function is None:
        return functools.partial(replica_exact, strategy=strategy)
    backend = checks.backend("`replica_exact`", "tensorflow", "jax")
    part = f"kdpkit.training.{backend}."
    if isinstance(model_or_function, keras.Model):
        if strategy is not None:
            problem = "The strategy of a model is the one in whose scope it is made."
            checks.fail(problem, strategy=strategy)
        importlib.import_module(f"{part}_fit").attach(model_or_function)
        return model_or_function
    if not callable(model_or_function) or isinstance(model_or_function, type | keras.layers.Layer):
        checks.fail(
            "`replica_exact` takes a Keras model, or a function of a global batch.",
            model_or_function=model_or_function,
        )
    exact_step = importlib.import_module(f"{part}_own_steps").exact_step
    return exact_step(model_or_function, strategy=strategy)
