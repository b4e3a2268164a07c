"""Distributions for Keras on JAX: of batches, of large variables, and of the layers' work."""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import keras
from jax.sharding import PartitionSpec

from kdpkit._internal import checks, shards
from kdpkit.sharding import _layouts
from kdpkit.sharding._meshes import BATCH_AXIS, MODEL_AXIS, data_mesh


class DataParallel(keras.distribution.DataParallel):
    """Keras' data parallelism over JAX's devices, with separate data per process.

    Set it before the model is built, with `keras.distribution.set_distribution` or `scope()`.

    With `shard`, each device keeps a part of every large variable. The result is that of one
    device, as without. Each weight is gathered when the model uses it, so a step of `fit` or of
    `kdpkit.training.TrainingLoop` holds a few complete ones at a time. Variables of fewer than
    4,096 numbers, and those of which the devices divide no axis, are replicated; of the latter a
    warning tells, once; `kdpkit plan --memory` works out the bytes. With several processes see
    `gathered_on_read`.

    Args:
        devices: The number of devices, or the devices themselves (`jax.devices()[:4]`); None takes
            all devices of all processes.
        shard: What is sharded over the devices: nothing (`"none"`), the optimizer's variables
            (`"optimizer"`; ZeRO-1, Rajbhandari et al. 2020), or the weights as well (`"weights"`;
            ZeRO-3, FSDP).

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
        checks.one_of("shard", shard, shards.KINDS)
        mesh = data_mesh(devices)
        names = [f"{d.platform}:{d.id}" for d in mesh.devices.flat]
        super().__init__(
            device_mesh=keras.distribution.DeviceMesh((len(names),), [BATCH_AXIS], names),
            auto_shard_dataset=False,
        )
        self.shards = shards.Shards(shard, mesh)
        if shard != "none":
            shards.let_keras_shard()

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of devices, named as in `tf.distribute`."""
        return int(self.device_mesh.devices.size)

    def __str__(self) -> str:
        """Describe in one line the devices over which it shards batches.

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
    """Tensor parallelism for any Keras model: groups of devices that share its weights.

    Set it before the model is built, with `keras.distribution.set_distribution` or `scope()`. The
    devices are a mesh of two axes, `"batch"` and `"model"`: batches are sharded over the first, and
    every large weight over the second, as in Megatron (Shoeybi et al. 2019). Along which axis is
    found when a variable is made, from its shape and its layer, and needs no names; the result is
    that of one device. What cannot be shared, such as a single key head, stays complete: `describe`
    shows it.

    Keras makes large variables in parts, each on its device, so a model may be built that fits on
    no single one. An optimizer's variables are sharded as their weights are. With `replica_exact`
    batches of any size may be trained on, as with `kdpkit.training.TrainingLoop`.

    Args:
        devices: As for `DataParallel`.
        model: How many devices share the model; it divides their number. A batch is sharded over
            `devices / model` groups.
        layout_map: Layouts of your own, by patterns that match the complete paths of variables
            (`{"decoder/.*/kernel": (None, "model")}`); they take precedence.
        shard: What is sharded over the groups besides, as for `DataParallel`.

    Raises:
        ValueError: `model` does not divide the devices, an axis of `layout_map` is unknown, or
            `shard` is something else; or devices as for `DataParallel`. By `replica_exact` and
            `TrainingLoop`, if a pattern of `layout_map` matches nothing.

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
        checks.one_of("shard", shard, shards.KINDS)
        chosen = [*data_mesh(devices).devices.flat]
        if len(chosen) % checks.integer("model", model):
            checks.fail(
                "`model` must divide the devices: each group of so many shares the model.",
                model=model,
                devices=len(chosen),
            )
        device_mesh = keras.distribution.DeviceMesh(
            (len(chosen) // model, model),
            [BATCH_AXIS, MODEL_AXIS],
            [f"{d.platform}:{d.id}" for d in chosen],
        )
        super().__init__(
            layout_map=_own_layouts(layout_map or {}, device_mesh),
            batch_dim_name=BATCH_AXIS,
            auto_shard_dataset=False,
        )
        self.shards = shards.Shards(shard, device_mesh.backend_mesh)
        self._layouts = _layouts.Layouts(model)
        if shard != "none":
            shards.let_keras_shard()

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of groups that have examples of their own, named as in `tf.distribute`."""
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
        """Return how Keras places a new variable: as you say, or as is found."""
        given = getattr(variable, "_layout", None) or self._given(variable)
        if given is not None:
            return given
        return self._found(*_layouts.layers_of(variable), variable)

    def _given(self, variable: keras.Variable) -> keras.distribution.TensorLayout | None:
        """Return a layout of the user's."""
        layout = self._layout_map[variable.path]
        if layout is not None and len(layout.axes) != len(variable.shape):
            checks.fail(
                "A layout of `layout_map` has another number of axes than a variable it is for.",
                layout=tuple(layout.axes),
                variable=variable.path,
                shape=tuple(variable.shape),
            )
        return layout

    def _found(
        self, layer: Any, parent: Any, variable: keras.Variable
    ) -> keras.distribution.TensorLayout:
        axis = self._layouts.axis(layer, variable.name, variable.shape, parent)
        spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, MODEL_AXIS)
        placement = self.shards.weight(spec, variable.shape)
        return shards.layout(self, placement, len(variable.shape))

    def lay_out(self, model: keras.Model) -> None:
        """Shard what a model and its optimizer have that was built before; check `layout_map`.

        `replica_exact` and `TrainingLoop` call it.
        """
        _layouts.require_matches(model, self._layout_map)
        for variable, layout in self.layouts_of(model):
            variable._layout = layout
            if variable._value is not None:
                variable._value = jax.device_put(variable._value, layout.backend_layout)

    def layouts_of(
        self, model: keras.Model
    ) -> list[tuple[keras.Variable, keras.distribution.TensorLayout]]:
        """Return the layouts of variables that have none on these devices."""
        missing = [
            (variable, self._given(variable) or self._found(layer, model, variable))
            for layer in model._flatten_layers()
            for variable in (*layer._trainable_variables, *layer._non_trainable_variables)
            if not self._has_layout(variable)
        ]
        if getattr(model, "optimizer", None):
            missing += [
                (variable, of_weight)
                for variable in model.optimizer.variables
                for weight, of_weight in missing
                if not self._has_layout(variable) and _layouts.is_of_weight(variable, weight)
            ]
        return missing

    def _has_layout(self, variable: keras.Variable) -> bool:
        placement = getattr(variable._layout, "backend_layout", variable._layout)
        return placement is not None and placement.mesh == self.shards.mesh


def _own_layouts(
    layout_map: Mapping[str, Any], device_mesh: keras.distribution.DeviceMesh
) -> keras.distribution.LayoutMap:
    if not isinstance(layout_map, Mapping):
        checks.fail("`layout_map` maps patterns of paths to axes.", layout_map=layout_map)
    found = keras.distribution.LayoutMap(device_mesh)
    for pattern, value in layout_map.items():
        axes: Any = getattr(value, "axes", value)
        _check_layout(pattern, axes)
        found[pattern] = (*axes,)
    return found


def _check_layout(pattern: Any, axes: Any) -> None:
    """Raise for what is no layout: a pattern, and an axis of the mesh or None for each axis."""
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        checks.fail(f"A pattern of `layout_map` cannot be read: {error}.", pattern=pattern)
    is_tuple = isinstance(axes, tuple | list)
    named = [axis for axis in axes if axis is not None] if is_tuple else []
    is_known = is_tuple and set(named) <= {BATCH_AXIS, MODEL_AXIS}
    if not is_known or len(named) != len(set(named)):
        checks.fail(
            'A layout is a tuple with "model", "batch" or None for each axis of the variable, and '
            "names each once.",
            pattern=pattern,
            layout=axes,
        )


def describe(model: keras.Model) -> str:
    """Describe how a model's variables, and its optimizer's, are on the devices, as a table.

    Variables of one kind are one row: of the same layer type, name, shape and layout.

    >>> with ModelParallel(4, model=2).scope():
    ...     model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128)])
    >>> print(describe(model))
    variables     count      shape        layout   MiB  on a device
    Dense kernel      1  (64, 128)  ('model', -)  0.03         0.02
    Dense bias        1     (128,)           (-)  0.00         0.00
    all weights       2                           0.03         0.02
    """
    return _layouts.described(model)


@contextlib.contextmanager
def gathered_on_read(model: keras.Model) -> Iterator[None]:
    """Let a model be saved whose variables are sharded over the devices of several processes.

    A process cannot read what is on another's devices. Inside this scope a variable that is read,
    as `model.save` and `get_weights` do, is gathered from all devices, one at a time. So every
    process must read the same variables in the same order: all save, to files of their own.
    `kdpkit.callbacks.Resume` does so by itself.

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
