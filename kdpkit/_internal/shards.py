"""Variables that are sharded over the devices that share a batch (ZeRO, FSDP).

Along which axis follows from the shape only: layouts by name go wrong in silence when a model
names its layers otherwise (keras-team/keras-hub#2806).
"""

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import keras
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kdpkit._internal import versions

Distribution: TypeAlias = keras.distribution.DataParallel | keras.distribution.ModelParallel
KINDS = ("none", "optimizer", "weights")
SMALL = 4096  # elements; a variable of fewer is replicated, which spares a collective

# What a program does with a weight before it computes with it, cheaper to do again than to keep.
_PREPARES = ("sharding_constraint", "convert_element_type", "transpose", "reshape")


class Shards(NamedTuple):
    """What is sharded over the devices that share a batch: one of `KINDS`.

    What Keras, or `kdpkit.sharding.ModelParallel`, shards over other axes of the mesh stays so.
    """

    kind: str
    mesh: Mesh

    def of_weight(self, variable: keras.Variable) -> NamedSharding:
        return self.weight(self._without_batch(variable), variable.shape)

    def of_optimizer(self, variable: keras.Variable) -> NamedSharding:
        return self.optimizer(self._without_batch(variable), variable.shape)

    def weight(self, spec: PartitionSpec, shape: Sequence[int]) -> NamedSharding:
        """Return where a weight is kept that has this layout on the other axes of the mesh."""
        return self._over_batch(spec, shape) if self.kind == "weights" else self._placed(spec)

    def optimizer(self, spec: PartitionSpec, shape: Sequence[int]) -> NamedSharding:
        return self._placed(spec) if self.kind == "none" else self._over_batch(spec, shape)

    @property
    def is_any(self) -> bool:
        """Return whether a variable may be on a device in part."""
        return self.kind != "none" or len(self.mesh.axis_names) > 1

    def gathered(self, weight: jax.Array, variable: keras.Variable) -> jax.Array:
        """Gather a sharded weight for use, in a program; otherwise XLA may gather activations.

        The transposed constraints, in the other order, shard its gradient.
        """
        sharded, used = self.of_weight(variable), self._placed(self._without_batch(variable))
        if sharded == used:
            return weight
        constrain = jax.lax.with_sharding_constraint
        return constrain(constrain(weight, sharded), used)

    def gathering_again(self, function: Callable) -> Callable:
        """Let the gradient of a function of weights gather them again, not keep them complete.

        Everything else is kept as without; layers' outputs are not computed twice.
        """
        if self.kind != "weights" or batch_shards(self.mesh) == 1:
            return function

        def is_kept(primitive: Any, *inputs: Any, **_: Any) -> bool:
            sharded = self._over_batch(PartitionSpec(), inputs[0].shape) if inputs else None
            is_weight = sharded is not None and not sharded.is_fully_replicated
            return not (is_weight and primitive.name in _PREPARES)

        return jax.checkpoint(function, policy=is_kept)

    def _without_batch(self, variable: keras.Variable) -> PartitionSpec:
        """Return how a variable is sharded over the axes of the mesh that share no batch."""
        placement = getattr(variable._layout, "backend_layout", variable._layout)
        if not isinstance(placement, NamedSharding) or placement.mesh != self.mesh:
            return PartitionSpec()
        return without_batch(placement.spec, self.mesh)

    def _over_batch(self, spec: PartitionSpec, shape: Sequence[int]) -> NamedSharding:
        """Shard the largest axis that the devices divide; replicate small variables and others."""
        count = batch_shards(self.mesh)
        axes: list[Any] = [*spec, *[None] * (len(shape) - len(spec))]
        parts = math.prod(self.mesh.shape[name] for axis in axes for name in _names(axis))
        if count == 1 or math.prod(shape) // parts < SMALL:
            return self._placed(spec)
        divided = [at for at, size in enumerate(shape) if axes[at] is None and size % count == 0]
        if not divided:
            warnings.warn(  # of this line, and so shown once
                f"A large variable stays complete on all {count} devices, as they divide none of "
                "its axes.",
                stacklevel=1,
            )
            return self._placed(spec)
        axes[max(divided, key=lambda at: shape[at])] = batch_axis(self.mesh)
        while axes[-1] is None:
            axes.pop()
        return self._placed(PartitionSpec(*axes))

    def _placed(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.mesh, spec)


def batch_axis(mesh: Mesh) -> str:
    """Return the axis over which batches are sharded: `"batch"`, or the first one."""
    return "batch" if "batch" in mesh.axis_names else str(mesh.axis_names[0])


def batch_shards(mesh: Mesh) -> int:
    """Return the number of parts in which a batch is on the devices."""
    return int(mesh.shape[batch_axis(mesh)])


def without_batch(spec: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    """Return a layout without the axis over which batches are sharded."""
    kept = [tuple(name for name in _names(axis) if name != batch_axis(mesh)) for axis in spec]
    axes = [None if not names else names[0] if len(names) == 1 else names for names in kept]
    while axes and axes[-1] is None:
        axes.pop()
    return PartitionSpec(*axes)


def _names(axis: Any) -> tuple[str, ...]:
    return () if axis is None else axis if isinstance(axis, tuple) else (axis,)


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
            given = settings.get("layout")  # of the weight
            spec = PartitionSpec() if given is None else PartitionSpec(*given.axes)
            placement = shards.optimizer(without_batch(spec, shards.mesh), shape)
            settings["layout"] = layout(distribution, placement, len(shape))
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
            trainable_variables = [
                *map(shards.gathered, trainable_variables, layer.trainable_variables)
            ]
            non_trainable_variables = [
                *map(shards.gathered, non_trainable_variables, layer.non_trainable_variables)
            ]
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
    distribution: Distribution, placement: NamedSharding, rank: int
) -> keras.distribution.TensorLayout:
    """Return a placement in the form that Keras' variables take."""
    axes = [*placement.spec, *[None] * (rank - len(placement.spec))]
    return keras.distribution.TensorLayout(axes, distribution.device_mesh)
