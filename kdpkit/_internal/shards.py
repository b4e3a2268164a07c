"""Variables that are cut over the devices of a mesh, each of which holds a part (ZeRO, FSDP).

Where a variable is cut follows from its shape alone: layouts by name go wrong in silence when a
model names its layers otherwise (keras-team/keras-hub#2806).
"""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import keras
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kdpkit._internal import versions

KINDS = ("none", "optimizer", "weights")
SMALL = 4096  # elements; a variable of fewer stays whole, which spares a collective


class Shards(NamedTuple):
    """What is cut over the devices of a mesh: one of `KINDS`."""

    kind: str
    mesh: Mesh

    def of_weight(self, shape: Sequence[int]) -> NamedSharding:
        return self._cut(shape) if self.kind == "weights" else _everywhere(self.mesh)

    def of_optimizer(self, shape: Sequence[int]) -> NamedSharding:
        return _everywhere(self.mesh) if self.kind == "none" else self._cut(shape)

    def whole(self, weights: Sequence[jax.Array]) -> list[jax.Array]:
        """Put cut weights together for use, in a program; their gradients are cut as they are.

        Left alone, XLA may gather activations instead.
        """
        placements = [self.of_weight(weight.shape) for weight in weights]
        return [
            weight if placement.is_fully_replicated else _whole(weight, placement)
            for weight, placement in zip(weights, placements, strict=True)
        ]

    def _cut(self, shape: Sequence[int]) -> NamedSharding:
        """Cut the largest axis that the devices divide; small variables and others stay whole."""
        axes = [axis for axis, size in enumerate(shape) if size and size % self.mesh.size == 0]
        if not axes or self.mesh.size == 1 or math.prod(shape) < SMALL:
            return _everywhere(self.mesh)
        largest = max(axes, key=lambda axis: shape[axis])
        return NamedSharding(self.mesh, PartitionSpec(*[None] * largest, *self.mesh.axis_names))


def _everywhere(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _whole(weight: jax.Array, placement: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(weight, _everywhere(placement.mesh))


def _whole_forward(weight: jax.Array, placement: NamedSharding) -> tuple[jax.Array, None]:
    return _whole(weight, placement), None


def _whole_backward(placement: NamedSharding, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.with_sharding_constraint(gradient, placement),)


_whole.defvjp(_whole_forward, _whole_backward)


def let_keras_cut() -> None:
    """Let Keras' optimizers make cut variables, and its models use cut weights, if asked for.

    Keras has no other place for either: an optimizer's variable takes the layout of its weight,
    and XLA chooses what it gathers. Both methods stay as they are under any other distribution.
    """
    _wrap(keras.optimizers.Optimizer, "add_variable", "layout", _adding_cut)
    _wrap(keras.Layer, "stateless_call", "non_trainable_variables", _putting_together)


def _wrap(of: type, name: str, argument: str, wrapper: Callable) -> None:
    original = getattr(of, name)
    if hasattr(original, "kdpkit_wrapper"):
        return
    if argument not in inspect.signature(original).parameters:
        versions.reject_unknown(f"{of.__name__}.{name}")
    wrapped = functools.wraps(original)(wrapper(original))
    wrapped.kdpkit_wrapper = True  # type: ignore[attr-defined]
    setattr(of, name, wrapped)


def _adding_cut(add_variable: Callable) -> Callable:
    def add(optimizer: keras.optimizers.Optimizer, shape: Any, *args: Any, **settings: Any) -> Any:
        distribution = keras.distribution.distribution()
        if shards := _of(distribution):
            settings["layout"] = layout(distribution, shards.of_optimizer(shape))
        return add_variable(optimizer, shape, *args, **settings)

    return add


def _putting_together(stateless_call: Callable) -> Callable:
    def call(
        layer: keras.Layer,
        trainable_variables: Any,
        non_trainable_variables: Any,
        *args: Any,
        **settings: Any,
    ) -> Any:
        if shards := _of(keras.distribution.distribution()):
            trainable_variables = shards.whole(trainable_variables)
            non_trainable_variables = shards.whole(non_trainable_variables)
        return stateless_call(
            layer, trainable_variables, non_trainable_variables, *args, **settings
        )

    return call


def _of(distribution: object) -> Shards | None:
    """Return the shards of `kdpkit.sharding.DataParallel`; None of another distribution."""
    shards = getattr(distribution, "shards", None)
    return shards if isinstance(shards, Shards) else None


def of(strategy: Any, mesh: Mesh) -> Shards:
    """Return what a strategy cuts; nothing if it is a mesh or a distribution of Keras."""
    strategy = keras.distribution.distribution() if strategy is None else strategy
    return _of(strategy) or Shards("none", mesh)


def layout(
    distribution: keras.distribution.DataParallel, placement: NamedSharding
) -> keras.distribution.TensorLayout:
    """Return a placement in the form that Keras' variables take."""
    return keras.distribution.TensorLayout([*placement.spec], distribution.device_mesh)
