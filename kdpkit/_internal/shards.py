"""Variables that are sharded over the devices of a mesh (ZeRO, FSDP).

Along which axis follows from the shape only: layouts by name go wrong in silence when a model
names its layers otherwise (keras-team/keras-hub#2806).
"""

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import keras
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kdpkit._internal import versions

KINDS = ("none", "optimizer", "weights")
SMALL = 4096  # elements; a variable of fewer is replicated, which spares a collective

# What a program does with a weight before it computes with it, cheaper to do again than to keep.
_PREPARES = ("sharding_constraint", "convert_element_type", "transpose", "reshape")


class Shards(NamedTuple):
    """What is sharded over the devices of a mesh: one of `KINDS`."""

    kind: str
    mesh: Mesh

    def of_weight(self, shape: Sequence[int]) -> NamedSharding:
        return self._sharded(shape) if self.kind == "weights" else _everywhere(self.mesh)

    def of_optimizer(self, shape: Sequence[int]) -> NamedSharding:
        return _everywhere(self.mesh) if self.kind == "none" else self._sharded(shape)

    def gathered(self, weight: jax.Array) -> jax.Array:
        """Gather a sharded weight for use, in a program; otherwise XLA may gather activations.

        The transposed constraints, in the other order, shard its gradient.
        """
        sharded = self.of_weight(weight.shape)
        if sharded.is_fully_replicated:
            return weight
        constrain = jax.lax.with_sharding_constraint
        return constrain(constrain(weight, sharded), _everywhere(self.mesh))

    def gathering_again(self, function: Callable) -> Callable:
        """Let the gradient of a function of weights gather them again, not keep them complete.

        Everything else is kept as without; layers' outputs are not computed twice.
        """
        if self.kind != "weights" or self.mesh.size == 1:
            return function

        def is_kept(primitive: Any, *inputs: Any, **_: Any) -> bool:
            is_weight = inputs and not self.of_weight(inputs[0].shape).is_fully_replicated
            return not (is_weight and primitive.name in _PREPARES)

        return jax.checkpoint(function, policy=is_kept)

    def _sharded(self, shape: Sequence[int]) -> NamedSharding:
        """Shard the largest axis that the devices divide; replicate small variables and others."""
        if self.mesh.size == 1 or math.prod(shape) < SMALL:
            return _everywhere(self.mesh)
        axes = [axis for axis, size in enumerate(shape) if size % self.mesh.size == 0]
        if not axes:
            warnings.warn(  # of this line, and so shown once
                f"A large variable stays complete on all {self.mesh.size} devices, as they divide "
                "none of its axes.",
                stacklevel=1,
            )
            return _everywhere(self.mesh)
        largest = max(axes, key=lambda axis: shape[axis])
        return NamedSharding(self.mesh, PartitionSpec(*[None] * largest, *self.mesh.axis_names))


def _everywhere(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def let_keras_shard() -> None:
    """Let Keras' optimizers make sharded variables, and its models use sharded weights.

    Keras has no other place for it: an optimizer's variable takes the layout of its weight, and XLA
    chooses what it gathers and keeps. The methods stay as they are under any other distribution.
    """
    _wrap(keras.optimizers.Optimizer, "add_variable", "layout", _adding_sharded)
    _wrap(keras.Layer, "stateless_call", "non_trainable_variables", _gathering_weights)
    _wrap(keras.Model, "compute_loss_and_updates", "optimizer_variables", _gathering_again)


def _wrap(of: type, name: str, argument: str, wrapper: Callable) -> None:
    original = getattr(of, name)
    if hasattr(original, "kdpkit_wrapper"):
        return
    if argument not in inspect.signature(original).parameters:
        versions.reject_unknown(f"{of.__name__}.{name}")
    wrapped = functools.wraps(original)(wrapper(original))
    wrapped.kdpkit_wrapper = True  # type: ignore[attr-defined]
    setattr(of, name, wrapped)


def _adding_sharded(add_variable: Callable) -> Callable:
    def add(optimizer: keras.optimizers.Optimizer, shape: Any, *args: Any, **settings: Any) -> Any:
        distribution = keras.distribution.distribution()
        if shards := _of(distribution):
            settings["layout"] = layout(distribution, shards.of_optimizer(shape))
        return add_variable(optimizer, shape, *args, **settings)

    return add


def _gathering_weights(stateless_call: Callable) -> Callable:
    def call(
        layer: keras.Layer,
        trainable_variables: Any,
        non_trainable_variables: Any,
        *args: Any,
        **settings: Any,
    ) -> Any:
        if shards := _of(keras.distribution.distribution()):
            trainable_variables = [*map(shards.gathered, trainable_variables)]
            non_trainable_variables = [*map(shards.gathered, non_trainable_variables)]
        return stateless_call(
            layer, trainable_variables, non_trainable_variables, *args, **settings
        )

    return call


def _gathering_again(compute_loss_and_updates: Callable) -> Callable:
    def compute(model: keras.Model, trainable_variables: Any, *args: Any, **settings: Any) -> Any:
        def loss_of(trainable_variables: Any) -> Any:
            return compute_loss_and_updates(model, trainable_variables, *args, **settings)

        shards = _of(keras.distribution.distribution())
        compute = shards.gathering_again(loss_of) if shards else loss_of
        return compute(trainable_variables)

    return compute


def _of(distribution: object) -> Shards | None:
    """Return the shards of `kdpkit.sharding.DataParallel`; None of another distribution."""
    shards = getattr(distribution, "shards", None)
    return shards if isinstance(shards, Shards) else None


def gather_to_host(value: jax.Array) -> np.ndarray:
    """Return the value of an array of which other processes may hold parts.

    Then every process must ask for it, at the same point of the program.
    """
    if value.is_fully_addressable or value.is_fully_replicated:
        return np.asarray(value)
    return np.asarray(multihost_utils.process_allgather(value, tiled=True))


class Gathered:
    """The value of a variable while a model is saved: gathered when it is read."""

    def __init__(self, value: jax.Array) -> None:
        self._value = value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._value, name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(gather_to_host(self._value), dtype, copy=copy)


def of(strategy: Any, mesh: Mesh) -> Shards:
    """Return what a strategy shards; nothing if it is a mesh or a distribution of Keras."""
    strategy = keras.distribution.distribution() if strategy is None else strategy
    return _of(strategy) or Shards("none", mesh)


def layout(
    distribution: keras.distribution.DataParallel, placement: NamedSharding
) -> keras.distribution.TensorLayout:
    """Return a placement in the form that Keras' variables take."""
    return keras.distribution.TensorLayout([*placement.spec], distribution.device_mesh)
