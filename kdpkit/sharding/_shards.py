"""Variables that are sharded over the devices that share a batch (ZeRO, FSDP).

The axis follows from the shape only: layouts by name silently shard nothing when a model names its
layers otherwise (keras-team/keras-hub#2806).
"""

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import keras
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kdpkit._internal import versions

Distribution: TypeAlias = keras.distribution.DataParallel | keras.distribution.ModelParallel
KINDS = ("none", "optimizer", "weights")
SMALL = 4096  # elements; a variable of fewer is replicated, which saves a collective

# A program prepares a weight by these operations. Repeating them is cheaper than keeping results.
_PREPARES = ("sharding_constraint", "convert_element_type", "transpose", "reshape")


class Shards(NamedTuple):
    """Shards variables over the devices that share a batch, by one of `KINDS`.

    The layout over the other axes of the mesh, by Keras or `kdpkit.sharding.ModelParallel`, stays.
    """

    kind: str
    mesh: Mesh

    def of_weight(self, variable: keras.Variable) -> NamedSharding:
        return self.weight(self._without_batch(variable), variable.shape)

    def of_optimizer(self, variable: keras.Variable) -> NamedSharding:
        return self.optimizer(self._without_batch(variable), variable.shape)

    def weight(self, spec: PartitionSpec, shape: Sequence[int]) -> NamedSharding:
        """Return the placement of a weight that has this layout on the other axes of the mesh."""
        return self._over_batch(spec, shape) if self.kind == "weights" else self._placed(spec)

    def optimizer(self, spec: PartitionSpec, shape: Sequence[int]) -> NamedSharding:
        return self._placed(spec) if self.kind == "none" else self._over_batch(spec, shape)

    def gathered(self, weight: jax.Array, variable: keras.Variable) -> jax.Array:
        """Gather a sharded weight in a program; without this XLA may gather activations instead.

        In the backward pass the constraints come in the other order, and shard its gradient.
        """
        sharded, used = self.of_weight(variable), self._placed(self._without_batch(variable))
        if sharded == used:
            return weight
        constrain = jax.lax.with_sharding_constraint
        return constrain(constrain(weight, sharded), used)

    def gathering_again(self, function: Callable) -> Callable:
        """Let the gradient of a function gather the weights again, not keep them complete.

        Layers' outputs are kept as usual, and not computed twice.
        """
        if self.kind != "weights" or batch_shards(self.mesh) == 1:
            return function

        def is_kept(primitive: Any, *inputs: Any, **_: Any) -> bool:
            sharded = self._over_batch(PartitionSpec(), inputs[0].shape) if inputs else None
            is_weight = sharded is not None and not sharded.is_fully_replicated
            return not (is_weight and primitive.name in _PREPARES)

        return jax.checkpoint(function, policy=is_kept)

    def _without_batch(self, variable: keras.Variable) -> PartitionSpec:
        """Return a variable's layout over the axes of the mesh that share no batch."""
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
        divisible = [i for i, size in enumerate(shape) if axes[i] is None and size % count == 0]
        if not divisible:
            # `stacklevel=1` makes this line its origin, so that Python shows one for all variables.
            warnings.warn(
                f"A large variable stays complete on all {count} devices, as they divide none of "
                "its axes.",
                stacklevel=1,
            )
            return self._placed(spec)
        axes[max(divisible, key=lambda i: shape[i])] = batch_axis(self.mesh)
        return self._placed(_partition_spec(axes))

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
    others = [tuple(name for name in _names(axis) if name != batch_axis(mesh)) for axis in spec]
    return _partition_spec([names if len(names) > 1 else (*names, None)[0] for names in others])


def _partition_spec(axes: list[Any]) -> PartitionSpec:
    """Return the shortest of the equal layouts; `None` at the end says nothing."""
    while axes and axes[-1] is None:
        axes.pop()
    return PartitionSpec(*axes)


def _names(axis: Any) -> tuple[str, ...]:
    return () if axis is None else axis if isinstance(axis, tuple) else (axis,)


def patch(table: Iterable[tuple]) -> None:
    """Replace parts of Keras, each once and for good: models are trained and saved in any scope.

    A row has an owner, a name, what is called with the original and its arguments, and the names of
    arguments that the original must have.
    """
    for owner, name, wrapper, *arguments in table:
        original = getattr(owner, name, None)
        if hasattr(original, "kdpkit_wrapper"):
            continue
        if original is None or not {*arguments} <= {*inspect.signature(original).parameters}:
            versions.reject_unknown(f"{owner.__name__}.{name}", jax=jax.__version__)
        setattr(owner, name, _wrapped(original, wrapper))


def _wrapped(original: Callable, wrapper: Callable) -> Callable:
    @functools.wraps(original)
    def wrapped(*args: Any, **settings: Any) -> Any:
        return wrapper(original, *args, **settings)

    wrapped.kdpkit_wrapper = True  # type: ignore[attr-defined]
    return wrapped


def _add_variable(
    original: Callable, optimizer: Any, shape: Any, *args: Any, **settings: Any
) -> Any:
    distribution = keras.distribution.distribution()
    if shards := _shards_of(distribution):
        weight_layout = settings.get("layout")
        spec = PartitionSpec(*([] if weight_layout is None else weight_layout.axes))
        placement = shards.optimizer(without_batch(spec, shards.mesh), shape)
        settings["layout"] = layout(distribution, placement, len(shape))
    return original(optimizer, shape, *args, **settings)


def _call_with_gathered(
    original: Callable,
    layer: Any,
    trainable_variables: Any,  # names as Keras has them: users pass these by keyword
    non_trainable_variables: Any,
    *args: Any,
    **settings: Any,
) -> Any:
    weights, others = trainable_variables, non_trainable_variables
    if shards := _shards_of(keras.distribution.distribution()):
        weights = [*map(shards.gathered, weights, layer.trainable_variables)]
        others = [*map(shards.gathered, others, layer.non_trainable_variables)]
    return original(layer, weights, others, *args, **settings)


def _compute_gathering_again(
    original: Callable, model: Any, trainable_variables: Any, *args: Any, **settings: Any
) -> Any:
    def loss(weights: Any) -> Any:
        return original(model, weights, *args, **settings)

    shards = _shards_of(keras.distribution.distribution())
    return (shards.gathering_again(loss) if shards else loss)(trainable_variables)


# Keras 3.13 to 3.16 have no setting for it: an optimizer's variable takes the layout of its weight,
# and XLA chooses what it gathers and keeps. Under other distributions they do what they did.
SHARDING = (
    (keras.optimizers.Optimizer, "add_variable", _add_variable, "layout"),
    (keras.Layer, "stateless_call", _call_with_gathered, "non_trainable_variables"),
    (keras.Model, "compute_loss_and_updates", _compute_gathering_again, "optimizer_variables"),
)


def _shards_of(distribution: object) -> Shards | None:
    """Return the shards of `kdpkit.sharding.DataParallel`; None of another distribution."""
    shards = getattr(distribution, "shards", None)
    return shards if isinstance(shards, Shards) else None


def gather_to_host(value: jax.Array) -> np.ndarray:
    """Return the value of an array of which other processes may hold parts.

    Every process must call this at the same point of the program.
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
    """Return the shards of a strategy; none if it is a mesh or a distribution of Keras."""
    strategy = keras.distribution.distribution() if strategy is None else strategy
    return _shards_of(strategy) or Shards("none", mesh)


def layout(
    distribution: Distribution, placement: NamedSharding, rank: int
) -> keras.distribution.TensorLayout:
    """Return a placement in the form that Keras' variables take."""
    axes = [*placement.spec, *[None] * (rank - len(placement.spec))]
    return keras.distribution.TensorLayout(axes, distribution.device_mesh)
