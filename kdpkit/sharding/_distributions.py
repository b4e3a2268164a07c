"""Distributions for Keras on JAX, of batches and of large variables."""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import keras
from jax.sharding import Mesh, PartitionSpec

from kdpkit._internal import checks
from kdpkit.sharding import _layouts
from kdpkit.sharding import _shards as shards
from kdpkit.sharding._layouts import describe as describe
from kdpkit.sharding._meshes import BATCH_AXIS, MODEL_AXIS, data_mesh, made


class DataParallel(keras.distribution.DataParallel):
    """Keras' `DataParallel` on JAX: the devices share each batch, and on request the variables.

    Set it before the model is built, with `keras.distribution.set_distribution` or `scope()`. With
    several processes each one passes its own examples.

    With `shard`, each device keeps only a part of every large variable, to save memory; training
    gives the same result. A weight is gathered from all devices when the model uses it, so a step
    holds a few complete weights at a time. Variables of fewer than 4,096 numbers stay complete, and
    so do those without an axis that the devices divide, for which there is one warning. `kdpkit
    plan --memory` computes the bytes. To save such a model in several processes see
    `gathered_on_read`.

    Args:
        devices: The number of devices, or the devices themselves (`jax.devices()[:4]`); None takes
            all devices of all processes.
        shard: What the devices share: `"none"`, the variables of the optimizer (`"optimizer"`;
            ZeRO-1, Rajbhandari et al. 2020), or the weights too (`"weights"`; ZeRO-3, FSDP).

    Raises:
        ValueError: `shard` is something else; more devices than available, none, or one twice.

    >>> with DataParallel(2, shard="weights").scope():
    ...     model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128)])
    >>> [shard.data.shape for shard in model.weights[0].value.addressable_shards]
    [(64, 64), (64, 64)]
    """

    def __init__(
        self,
        devices: int | Sequence[jax.Device] | None = None,
        *,
        shard: Literal["none", "optimizer", "weights"] = "none",
    ) -> None:
        checks.backend("`DataParallel`", "jax")
        mesh = data_mesh(devices)
        super().__init__(
            device_mesh=_device_mesh([*mesh.devices.flat], {BATCH_AXIS: mesh.size}),
            auto_shard_dataset=False,
        )
        self.shards = _shards(shard, mesh)
        if mesh.size > 1:
            made.add(self)

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of devices, named as in `tf.distribute`."""
        return int(self.device_mesh.devices.size)

    def __str__(self) -> str:
        """Describe in one line the devices that share a batch.

        >>> print(DataParallel(2))
        DataParallel: 2 replicas on cpu:0, cpu:1
        """
        devices = [*self.device_mesh.devices.flat]
        plural = "s" if len(devices) > 1 else ""
        return f"DataParallel: {len(devices)} replica{plural} on {checks.listed(devices)}"

    def get_variable_layout(self, variable: keras.Variable) -> keras.distribution.TensorLayout:
        """Return how Keras places a new variable: replicated or sharded."""
        if self.shards.kind != "weights" or getattr(variable, "_layout", None) is not None:
            return super().get_variable_layout(variable)
        placement = self.shards.weight(PartitionSpec(), variable.shape)
        return shards.layout(self, placement, len(variable.shape))


class ModelParallel(keras.distribution.ModelParallel):
    """Train a model that is too large for one device: groups of devices share its weights.

    Set it before the model is built, with `keras.distribution.set_distribution` or `scope()`. It
    works for any Keras model, and training gives the result of one device. The devices form a mesh
    of two axes: the groups along `"batch"` share each batch, and the devices of a group, along
    `"model"`, share every large weight (tensor parallelism as in Megatron, Shoeybi et al. 2019).
    The axis of a weight to share follows from its shape and its layer. A weight that cannot be
    shared stays complete on each device; `describe` shows which.

    Variables are created in parts, each on its device, so a model may be built that no single
    device could hold. The variables of the optimizer are shared as their weights are. Batches may
    have any size with `replica_exact`.

    Args:
        devices: As for `DataParallel`.
        model: How many devices share the model; it divides their number. A batch is shared by
            `devices / model` groups.
        layout_map: Layouts of your own, by patterns that match the complete path of a variable
            (`{"decoder/.*/kernel": (None, "model")}`); they take precedence.
        shard: What the groups share too, as for `DataParallel`.

    Raises:
        ValueError: `model` does not divide the devices, an axis of `layout_map` is unknown, or
            `shard` is something else; or devices as for `DataParallel`. `replica_exact`
            raises if a pattern of `layout_map` matches nothing.

    >>> with ModelParallel(4, model=2).scope():
    ...     model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128)])
    >>> [shard.data.shape for shard in model.weights[0].value.addressable_shards]
    [(32, 128), (32, 128), (32, 128), (32, 128)]
    """

    def __init__(
        self,
        devices: int | Sequence[jax.Device] | None = None,
        *,
        model: int,
        layout_map: Mapping[str, Any] | None = None,
        shard: Literal["none", "optimizer", "weights"] = "none",
    ) -> None:
        checks.backend("`ModelParallel`", "jax")
        chosen = [*data_mesh(devices).devices.flat]
        if len(chosen) % checks.integer("model", model):
            checks.fail(
                "`model` must divide the devices: each group of so many shares the model.",
                model=model,
                devices=len(chosen),
            )
        axes = {BATCH_AXIS: len(chosen) // model, MODEL_AXIS: model}
        device_mesh = _device_mesh(chosen, axes)
        super().__init__(
            layout_map=_checked_layouts(layout_map or {}, device_mesh),
            batch_dim_name=BATCH_AXIS,
            auto_shard_dataset=False,
        )
        self.shards = _shards(shard, device_mesh.backend_mesh)
        self._layouts = _layouts.Layouts(model)
        if len(chosen) > 1:
            made.add(self)

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of groups that share a batch, named as in `tf.distribute`."""
        return int(self.device_mesh.shape[0])

    def __str__(self) -> str:
        """Describe in one line the groups of devices.

        >>> print(ModelParallel(4, model=2))
        ModelParallel: 2 replicas of 2 devices each, on cpu:0, cpu:1, cpu:2, cpu:3
        """
        count, size = self.device_mesh.shape
        devices = checks.listed(self.device_mesh.devices.flat)
        plural = ("s" if count > 1 else "", "s" if size > 1 else "")
        return (
            f"ModelParallel: {count} replica{plural[0]} of {size} device{plural[1]} each, on "
            f"{devices}"
        )

    def get_variable_layout(self, variable: keras.Variable) -> keras.distribution.TensorLayout:
        """Return how Keras places a new variable: by `layout_map`, or by its shape and layer."""
        if getattr(variable, "_layout", None) is not None:
            return variable._layout
        found = self._layout_from_shape(*_layouts.layers_of(variable), variable)
        return self._layout_from_map(variable) or found  # One for the next is found by all before.

    def _layout_from_map(self, variable: keras.Variable) -> keras.distribution.TensorLayout | None:
        layout = self._layout_map[variable.path]
        if layout is None:
            return None
        sizes = [self.shards.mesh.shape.get(name, 1) for name in layout.axes]
        if len(sizes) != len(variable.shape) or any(
            size % parts for size, parts in zip(variable.shape, sizes, strict=True)
        ):
            checks.fail(
                "A layout of `layout_map` has another number of axes than a variable it is for, or "
                "shards an axis that the devices do not divide.",
                variable=variable.path,
                shape=tuple(variable.shape),
                layout=tuple(layout.axes),
                devices=dict(self.shards.mesh.shape),
                remedy="Name an axis that they divide, or None for each axis.",
            )
        return layout

    def _layout_from_shape(
        self, layer: Any, parent: Any, variable: keras.Variable
    ) -> keras.distribution.TensorLayout:
        axis = self._layouts.axis(layer, variable.name, variable.shape, parent)
        spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, MODEL_AXIS)
        placement = self.shards.weight(spec, variable.shape)
        return shards.layout(self, placement, len(variable.shape))

    def lay_out(self, model: keras.Model) -> None:
        """Check `layout_map`, and shard variables that were created before it was set.

        `replica_exact` calls it.
        """
        _layouts.require_matches(model, self._layout_map)
        for variable, layout in self.layouts_of(model):
            variable._layout = layout
            if variable._value is not None:
                variable._value = jax.device_put(variable._value, layout.backend_layout)

    def layouts_of(
        self, model: keras.Model
    ) -> list[tuple[keras.Variable, keras.distribution.TensorLayout]]:
        """Return layouts for the variables that have none on these devices."""
        layouts = [
            (
                variable,
                self._layout_from_map(variable) or self._layout_from_shape(layer, model, variable),
            )
            for layer in model._flatten_layers()
            for variable in (*layer._trainable_variables, *layer._non_trainable_variables)
            if not self._has_layout(variable)
        ]
        if getattr(model, "optimizer", None):
            layouts += [
                (variable, layout)
                for variable in model.optimizer.variables
                for weight, layout in layouts
                if not self._has_layout(variable) and _layouts.is_for_weight(variable, weight)
            ]
        return layouts

    def _has_layout(self, variable: keras.Variable) -> bool:
        placement = getattr(variable._layout, "backend_layout", variable._layout)
        return placement is not None and placement.mesh == self.shards.mesh


def _device_mesh(devices: Sequence[jax.Device], axes: dict[str, int]) -> Any:
    names = [f"{device.platform}:{device.id}" for device in devices]
    return keras.distribution.DeviceMesh((*axes.values(),), [*axes], names)


def _shards(shard: str, mesh: Mesh) -> shards.Shards:
    checks.one_of("shard", shard, shards.KINDS)
    if shard != "none":
        shards.patch(shards.SHARDING)
    return shards.Shards(shard, mesh)


def _checked_layouts(
    layout_map: Mapping[str, Any], device_mesh: keras.distribution.DeviceMesh
) -> keras.distribution.LayoutMap:
    if not isinstance(layout_map, Mapping):
        checks.fail("`layout_map` maps patterns of paths to axes.", layout_map=layout_map)
    layouts = keras.distribution.LayoutMap(device_mesh)
    for pattern, value in layout_map.items():
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            checks.fail(f"A pattern of `layout_map` cannot be read: {error}.", pattern=pattern)
        axes: Any = getattr(value, "axes", value)
        is_tuple = isinstance(axes, tuple | list)
        names = [axis for axis in axes if axis is not None] if is_tuple else []
        is_known = is_tuple and set(names) <= {BATCH_AXIS, MODEL_AXIS}
        if not is_known or len(names) != len(set(names)):
            checks.fail(
                'A layout is a tuple with "model", "batch" or None for each axis of the variable, '
                "and names each once.",
                pattern=pattern,
                layout=axes,
            )
        layouts[pattern] = (*axes,)
    return layouts


@contextlib.contextmanager
def gathered_on_read(model: keras.Model) -> Iterator[None]:
    """Allow `model.save` and `get_weights` if several processes share the variables of a model.

    A process cannot read the devices of another one. In this scope a variable that is read is first
    gathered from all devices, one variable at a time. All processes must therefore read the same
    variables in the same order: each of them saves the model, to a file of its own.
    `kdpkit.callbacks.Resume` does not need this.

    >>> import tempfile
    >>> with DataParallel(2, shard="weights").scope():
    ...     model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128)])
    >>> with gathered_on_read(model):
    ...     model.save_weights(f"{tempfile.mkdtemp()}/of-process-{jax.process_index()}.weights.h5")
    """
    optimizer = getattr(model, "optimizer", None)
    variables = [*model.variables, *(optimizer.variables if optimizer else [])]
    before = [(v, v._value) for v in {id(v): v for v in variables}.values()]
    try:
        for variable, value in before:
            if not (value.is_fully_addressable or value.is_fully_replicated):
                variable._value = shards.Gathered(value)
        yield
    finally:
        for variable, value in before:
            variable._value = value
