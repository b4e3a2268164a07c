"""Sums that XLA computes wrong on a mesh of two axes, whose devices share a model.

XLA adds up replicas, in the gradient of a kernel of a convolution in groups, and padding, in what
is scattered for examples that the batch axis does not divide, as in the gradient of a lookup in a
table. If the examples are sharded over all devices there are no replicas, and the sums are right.
All operations pass through JAX's lowering, however a program called or derived them.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import primitives
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from kdpkit.sharding._shards import batch_shards


def divide_sums(mesh: Mesh) -> None:
    """Have all devices divide the sums that XLA would compute wrong, if a mesh has several axes."""
    if not 1 < batch_shards(mesh) < mesh.size:
        return
    for platform, rules in [(None, mlir._lowerings), *mlir._platform_specific_lowerings.items()]:
        for primitive, axes_of in _AXES_OF.items():
            entry = rules.get(primitive)
            if entry is not None and not hasattr(entry.rule, "kdpkit_wrapper"):
                mlir.register_lowering(primitive, _dividing(entry.rule, axes_of), platform)


def _of_convolution(devices: int, settings: Any, *_: Any) -> Sequence[int]:  # noqa: ARG001
    # docs/upstream/xla_grouped_convolutions.py
    is_in_groups = settings["batch_group_count"] > 1
    return [spec[1] for spec in settings["dimension_numbers"][:2]] if is_in_groups else ()


def _of_scatter(devices: int, settings: Any, _: Any, __: Any, updates: Any) -> Sequence[int | None]:
    # docs/upstream/xla_adds_up_padding.py
    numbers = settings["dimension_numbers"]
    axes = [axis for axis in range(updates.ndim) if axis not in numbers.update_window_dims]
    if not any(updates.shape[axis] % devices for axis in axes):
        return ()
    # XLA aborts where it would divide batches unevenly, as in the gradient of a sort or a median.
    return (-1, -1, -1) if numbers.operand_batching_dims else (None, 0, axes[0])


# Functions that return the axis of each input along which to divide it; -1 copies it to all.
_SCATTERS = [each for name, each in vars(primitives).items() if name.startswith("scatter")]
_AXES_OF = {primitives.conv_general_dilated_p: _of_convolution} | dict.fromkeys(
    _SCATTERS, _of_scatter
)


def _dividing(rule: Callable, axes_of: Callable) -> Callable:
    @functools.wraps(rule)
    def lower(ctx: Any, *inputs: Any, **settings: Any) -> Any:
        # Inside of `jax.shard_map` there is no such number: nothing is divided there.
        devices = getattr(ctx.module_context.axis_context, "num_devices", 1)
        axes = axes_of(devices, settings, *ctx.avals_in) if devices > 1 else ()
        parts = itertools.zip_longest(inputs, ctx.avals_in, axes)
        return rule(ctx, *(_divided(ctx, devices, *part) for part in parts), **settings)

    lower.kdpkit_wrapper = True  # type: ignore[attr-defined]
    return lower


def _divided(ctx: Any, devices: int, array: Any, aval: Any, axis: int | None) -> Any:
    if axis is None:
        return array
    mesh = AbstractMesh((devices,), ("devices",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec() if axis < 0 else PartitionSpec(*[None] * axis, "devices")
    sharding = NamedSharding(mesh, spec)
    constrain = functools.partial(jax.lax.with_sharding_constraint, shardings=sharding)
    lower = mlir.lower_fun(constrain, multiple_results=False)
    return lower(ctx.replace(primitive=None, avals_in=[aval], avals_out=[aval]), array)[0]
