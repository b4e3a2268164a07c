"""Training on many devices on JAX with `jax.sharding`: meshes, sharded batches and weights.

A program under `jax.jit` sees the global batch, and XLA splits the work, so means, batch statistics
and dropout masks equal those of one device on any number of devices. Only the arrays have to be
placed: variables on every device, batches sharded along their examples. `DataParallel` does that
for Keras' `fit`, and `ModelParallel` where a model is larger than a device;
`kdpkit.training.TrainingLoop` does it itself, and `replicated` and `by_examples` are for your own
loop.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import keras
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from kdpkit import errors
from kdpkit._internal import checks, layouts, machine, shards
from kdpkit.batches import num_examples
from kdpkit.cluster._joining import join_processes

__all__ = [
    "BATCH_AXIS",
    "MODEL_AXIS",
    "DataParallel",
    "ModelParallel",
    "as_mesh",
    "by_examples",
    "data_mesh",
    "describe",
    "describe_choice",
    "gathered_on_read",
    "join_processes",
    "place_batch",
    "place_batches",
    "replicated",
    "split_examples",
    "tpu_devices",
]

BATCH_AXIS = "batch"  # as in `keras.distribution.DataParallel`
MODEL_AXIS = "model"


def data_mesh(devices: int | Sequence[jax.Device] | None = None) -> Mesh:
    """Return a mesh with one axis, `"batch"`, over which batches are sharded.

    Its axis has the type `Auto`, so XLA decides how to shard what is computed from a batch.
    `jax.make_mesh` has `Explicit` axes by default, with which Keras' Dropout raises.

    Logical CPU devices need two threads each: with fewer, XLA can hang in an all-reduce when Python
    runs ahead of the steps. `kdpkit.testing.use_logical_cpus` and the recipes' `--replicas` take
    care of that; if you set XLA_FLAGS by hand, also set the environment variable PJRT_NPROC.

    Args:
        devices: The number of devices, or the devices themselves (`jax.devices()[:4]`); None takes
            all devices of all processes.

    Raises:
        ValueError: More devices than available, none, or one twice.

    >>> mesh = data_mesh(2)
    >>> mesh.axis_names, mesh.size
    (('batch',), 2)
    """
    _platform()
    present = jax.devices()
    if devices is None:
        chosen = present
    elif isinstance(devices, list | tuple | np.ndarray):
        chosen = [*np.ravel(np.array(devices, object))]
    else:
        count = checks.integer("devices", devices)
        if count > len(present):
            checks.fail(
                f"JAX has {len(present)} {present[0].platform} device(s).",
                devices=count,
                remedy="For logical CPU devices set "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={count}, and on fewer than "
                f"{2 * count} cores PJRT_NPROC={2 * count}, before JAX starts.",
            )
        chosen = present[:count]
    if not chosen or not set(chosen) <= set(present) or len(set(chosen)) < len(chosen):
        checks.fail(
            "A mesh needs devices of `jax.devices()`, at least one, each once.", devices=devices
        )
    return Mesh(np.array(chosen), (BATCH_AXIS,), axis_types=(AxisType.Auto,))


def tpu_devices() -> list[jax.Device]:
    """Return the TPU cores of all processes that JAX trains on, for `data_mesh`.

    If the TPU is not available, JAX continues on the CPU with only a line in its log; this function
    raises with the reason instead.

    Raises:
        ValueError: There is no TPU, another process uses it, or its driver is not installed; the
            message has the reason and the fix.

    >>> tpu_devices()
    Traceback (most recent call last):
    ...
    kdpkit.errors.InputError: There is no TPU: this machine has no TPU chip. ...
    """
    if _platform() != "tpu":
        raise errors.InputError(_why_no_tpu())
    return jax.devices()


def describe_choice() -> str:
    """Describe in one line what JAX trains on here, and why if it is the CPU.

    Raises:
        ValueError: JAX cannot start the requested platform.

    >>> describe_choice()
    'the CPU, as 8 devices. There is no GPU and no TPU.'
    """
    platform = _platform()
    count = jax.device_count()
    if platform == "cpu":
        why = _why_no_tpu() if machine.chips() else "There is no GPU and no TPU."
        return f"the CPU, as {count} device{'s' if count > 1 else ''}. {why}"
    kind = "TPU core" if platform == "tpu" else platform.upper()
    return f"{count} {kind}{'s' if count > 1 else ''}."


def _platform() -> str:
    """Start JAX, and return the kind of device it trains on."""
    try:
        return str(jax.default_backend())
    except (RuntimeError, AssertionError) as error:  # the second for an unknown platform
        platforms = jax.config.jax_platforms
        if "tpu" in str(platforms).split(","):  # if libtpu finds chips, JAX only tries these
            raise errors.InputError(_why_no_tpu(checks.first_line(error))) from error
        raise errors.InputError(
            f"JAX cannot start its platform ({checks.first_line(error)}). Received: "
            f"JAX_PLATFORMS={platforms}. Leave it out, or install the JAX for it."
        ) from error


def _why_no_tpu(reason: str = "it trains on another device") -> str:
    if not machine.chips():
        return machine.NO_TPU
    return (
        f"JAX does not start this machine's {machine.chips()} TPU chip(s) ({reason}; "
        f"JAX_PLATFORMS={jax.config.jax_platforms}). They serve one process at a time: end any "
        "other, in a notebook by restarting its session. Otherwise leave JAX_PLATFORMS out, run "
        '`pip install --upgrade "jax[tpu]"`, and restart Python.'
    )


def as_mesh(where: Mesh | shards.Distribution | None) -> Mesh:
    """Return the mesh of a `Mesh` or a distribution of Keras; for None one device.

    For None, a distribution that is set in Keras takes precedence. Of a mesh with several axes
    batches are sharded over `"batch"`, or over the first one if none has this name.

    Raises:
        ValueError: It is something else, or shards batches over another axis.

    >>> as_mesh(None).size
    1
    """
    where = keras.distribution.distribution() if where is None else where
    if where is None:
        return data_mesh(1)
    mesh, axis = where, getattr(where, "batch_dim_name", None)
    if isinstance(where, shards.Distribution):
        mesh = where.device_mesh.backend_mesh
    if not isinstance(mesh, Mesh):
        checks.fail(
            "On JAX a strategy is a `jax.sharding.Mesh`, such as `kdpkit.sharding.data_mesh()` "
            "returns, or a `DataParallel` or `ModelParallel`, of kdpkit or of Keras.",
            strategy=where,
        )
    if axis not in (None, shards.batch_axis(mesh)):
        checks.fail(
            'Batches are sharded over the axis "batch" of a mesh, or over its first one.',
            batch_dim_name=axis,
            axes=mesh.axis_names,
            remedy='Name the axis "batch".',
        )
    return mesh


class DataParallel(keras.distribution.DataParallel):
    """Keras' data parallelism over the devices of `data_mesh`, with separate data per process.

    Set it before the model is built, with `keras.distribution.set_distribution` or `scope()`.

    With `shard`, each device keeps a part of every large variable. The result is that of one
    device, as without. Each weight is gathered when the model uses it, so a step of `fit` or of
    `kdpkit.training.TrainingLoop` holds a few complete ones at a time. Variables of fewer than
    4,096 numbers, and those of which the devices divide no axis, are replicated; of the latter a
    warning tells, once; `kdpkit plan --memory` works out the bytes. With several processes see
    `gathered_on_read`.

    Args:
        devices: As for `data_mesh`.
        shard: What is sharded over the devices: nothing (`"none"`), the optimizer's variables
            (`"optimizer"`; ZeRO-1, Rajbhandari et al. 2020), or the weights as well (`"weights"`;
            ZeRO-3, FSDP).

    Raises:
        ValueError: `shard` is something else; or devices as for `data_mesh`.

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
    that of one device whatever is found. What cannot be shared, such as a single key head, stays
    complete: `describe` shows it.

    A variable is never complete on one device on the way, so a model may be built that fits on no
    single one. An optimizer's variables are sharded as their weights are. With `replica_exact`
    batches of any size may be trained on, as with `kdpkit.training.TrainingLoop`.

    Args:
        devices: As for `data_mesh`.
        model: How many devices share the model; it divides their number. A batch is sharded over
            `devices / model` groups.
        layout_map: Layouts of your own, by patterns that match the complete paths of variables
            (`{"decoder/.*/kernel": (None, "model")}`); they take precedence.
        shard: What is sharded over the groups besides, as for `DataParallel`.

    Raises:
        ValueError: `model` does not divide the devices, an axis of `layout_map` is unknown, or
            `shard` is something else; or devices as for `data_mesh`. By `replica_exact` and
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
        self._layouts = layouts.Layouts(model)
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
        given = getattr(variable, "_layout", None) or self._layout_map[variable.path]
        if given is not None:
            return given
        return self._found(*layouts.layers_of(variable), variable)

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
        layouts.require_matches(model, self._layout_map)
        for variable, layout in self.layouts_of(model):
            variable._layout = layout
            if variable._value is not None:
                variable._value = jax.device_put(variable._value, layout.backend_layout)

    def layouts_of(
        self, model: keras.Model
    ) -> list[tuple[keras.Variable, keras.distribution.TensorLayout]]:
        """Return the layouts of variables that have none on these devices."""
        missing = [
            (variable, self._layout_map[variable.path] or self._found(layer, model, variable))
            for layer in model._flatten_layers()
            for variable in (*layer._trainable_variables, *layer._non_trainable_variables)
            if not self._has_layout(variable)
        ]
        if getattr(model, "optimizer", None):
            missing += [
                (variable, of_weight)
                for variable in model.optimizer.variables
                for weight, of_weight in missing
                if not self._has_layout(variable) and layouts.is_of_weight(variable, weight)
            ]
        return missing

    def _has_layout(self, variable: keras.Variable) -> bool:
        placement = getattr(variable._layout, "backend_layout", variable._layout)
        return placement is not None and placement.mesh == self.shards.mesh


def _own_layouts(
    layout_map: Mapping[str, Any], device_mesh: keras.distribution.DeviceMesh
) -> keras.distribution.LayoutMap:
    found = keras.distribution.LayoutMap(device_mesh)
    for pattern, value in layout_map.items():
        axes = tuple(getattr(value, "axes", value))
        unknown = {axis for axis in axes if axis not in (None, BATCH_AXIS, MODEL_AXIS)}
        if unknown:
            checks.fail(
                'A layout names the axes "batch" and "model" of the mesh, or None.',
                pattern=pattern,
                axes=axes,
            )
        found[pattern] = axes
    return found


def describe(model: keras.Model) -> str:
    """Describe how a model's variables, and its optimizer's, are on the devices, as a table.

    Variables of one kind are one row: of the same layer type, name, shape and layout.

    >>> with ModelParallel(4, model=2).scope():
    ...     model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128)])
    >>> print(describe(model))
    variables       count  shape      layout         MiB  on a device
    Dense kernel        1  (64, 128)  ('model', -)  0.03         0.02
    Dense bias          1  (128,)     (-)           0.00         0.00
    all weights         2                           0.03         0.02
    """
    return layouts.described(model)


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


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding that copies an array to every device."""
    return NamedSharding(mesh, PartitionSpec())


def by_examples(mesh: Mesh) -> NamedSharding:
    """Return the sharding that splits an array along its first axis, the examples.

    The parts have to be equally large. Devices that share a model have the same examples.

    >>> x = jax.device_put(np.arange(4.0), by_examples(data_mesh(2)))
    >>> [shard.data.shape for shard in x.addressable_shards]
    [(2,), (2,)]
    """
    return NamedSharding(mesh, PartitionSpec(shards.batch_axis(mesh)))


def place_batch(batch: Any, mesh: Mesh) -> Any:
    """Put a batch of any size on the devices, for a program that calls `split_examples`.

    A batch that the devices divide is sharded; any other is replicated.
    """
    return _placed(batch, mesh, examples=num_examples(batch), sharded=by_examples(mesh))


def place_batches(batches: Sequence[Any], mesh: Mesh) -> Any:
    """Stack batches of equal shapes along a new first axis, and place them as `place_batch`."""
    stacked = jax.tree.map(lambda *parts: np.stack(parts), *batches)
    sharded = NamedSharding(mesh, PartitionSpec(None, shards.batch_axis(mesh)))
    return _placed(stacked, mesh, examples=num_examples(batches[0]), sharded=sharded)


def _placed(batch: Any, mesh: Mesh, *, examples: int, sharded: NamedSharding) -> Any:
    count = shards.batch_shards(mesh)
    if jax.process_count() == 1:
        return jax.device_put(batch, replicated(mesh) if examples % count else sharded)
    own_devices, rest = divmod(count, jax.process_count())
    if rest or not own_devices:
        checks.fail(
            "With several processes each has examples of its own, and so devices that share the "
            "model must be of one process.",
            parts_of_a_batch=count,
            processes=jax.process_count(),
            remedy="Use a smaller `model`.",
        )
    if examples % own_devices:
        checks.fail(
            "With several processes each must pass a number of examples that its devices divide.",
            examples=examples,
            devices_of_this_process=own_devices,
            remedy='Drop or pad the last batch: `ArrayBatches(remainder="pad")`.',
        )
    return jax.tree.map(
        lambda part: jax.make_array_from_process_local_data(sharded, np.asarray(part)), batch
    )


def split_examples(batch: Any, mesh: Mesh) -> Any:
    """Shard the work on a batch of any size along its examples, inside `jax.jit`.

    JAX does not accept unevenly sharded arrays as inputs of a program. Inside it, XLA splits into
    shards of ceil(examples / devices), the last ones smaller or empty, and computes what one device
    would, batch statistics included. Outside `jax.jit` an uneven batch stays replicated: every
    device computes with all of it.

    Where devices share a model, an uneven batch is split over all of them.
    """
    # docs/upstream/xla_adds_up_padding.md
    each = by_examples(mesh)
    of_all = NamedSharding(mesh, PartitionSpec(mesh.axis_names))

    def split(part: Any) -> Any:
        is_even = part.shape[0] % shards.batch_shards(mesh) == 0
        return jax.lax.with_sharding_constraint(part, each if is_even else of_all)

    is_traced = any(isinstance(part, jax.core.Tracer) for part in jax.tree.leaves(batch))
    return jax.tree.map(split, batch) if is_traced else batch
