"""Data-parallel training on JAX with `jax.sharding`: meshes, sharded batches, training state.

A program under `jax.jit` sees the whole batch, and XLA cuts the work: so a mean, a batch statistic
or a dropout mask is that of one device, on any number of devices. What is left to do is to place
the arrays: variables on every device, batches cut along their rows.

    mesh = sharding.data_mesh()
    state = sharding.TrainState.replicated(model, optimizer, mesh)
    step = sharding.make_train_step(model, optimizer, loss)
    for batch in batches:
        state, logs = step(state, sharding.shard_batch(batch, mesh))
    state.write_back(model, optimizer)

`kdpkit.training.TrainingLoop` does this and the rest: epochs, callbacks, evaluation.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import keras
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from kdpkit import _checks, _tpu
from kdpkit._processes import ProcessLostError, join_processes
from kdpkit.batches import pad_batch, rows_of

__all__ = [
    "BATCH_AXIS",
    "DataParallel",
    "ProcessLostError",
    "TrainState",
    "as_mesh",
    "by_rows",
    "data_mesh",
    "describe",
    "describe_choice",
    "describe_placement",
    "join_processes",
    "make_train_step",
    "place_batch",
    "place_batches",
    "replicated",
    "shard_batch",
    "split_rows",
    "tpu_devices",
]

BATCH_AXIS = "batch"  # as in `keras.distribution.DataParallel`


def data_mesh(devices: Any = None) -> Mesh:
    """Give a mesh of one axis, `"batch"`, over which batches are cut.

    Its axis is of the type `Auto`, so that XLA decides how to cut what is computed from a batch.
    `jax.make_mesh` has `Explicit` axes by default, under which Keras' Dropout raises.

    Logical CPU devices need two threads each: with fewer, and steps that Python runs ahead of,
    XLA can wait for ever in an all-reduce. `kdpkit.testing.use_logical_cpus` sees to that, as the
    recipes' `--replicas` does; with XLA_FLAGS set by hand, set the environment variable PJRT_NPROC.

    Args:
        devices: The number of devices, or the devices themselves (`jax.devices()[:4]`); None takes
            all, of all processes.

    Raises:
        ValueError: More devices than there are, none, or one twice.

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
        count = _checks.integer("devices", devices)
        if count > len(present):
            _checks.refuse(
                f"JAX has {len(present)} {present[0].platform} device(s).",
                devices=count,
                remedy=_way_to_more(present[0].platform, count),
            )
        chosen = present[:count]
    if not chosen or not set(chosen) <= set(present) or len(set(chosen)) < len(chosen):
        _checks.refuse(
            "A mesh needs devices of `jax.devices()`, at least one and none twice.", devices=devices
        )
    return Mesh(np.array(chosen), (BATCH_AXIS,), axis_types=(AxisType.Auto,))


def _way_to_more(platform: str, count: int) -> str:
    if platform != "cpu":
        return "Ask for no more, or for None, which takes all."
    return (
        f"For logical CPU devices set XLA_FLAGS=--xla_force_host_platform_device_count={count}, "
        f"and on fewer than {2 * count} cores PJRT_NPROC={2 * count}, before JAX starts."
    )


def tpu_devices() -> list[jax.Device]:
    """Give the TPU cores that JAX trains on, of all processes, for `data_mesh` and `DataParallel`.

    JAX goes on with the CPU where it cannot have the TPU, and says so in its log alone; this
    tells why instead.

    Raises:
        ValueError: There is no TPU, another process has it, or what drives it is not installed;
            the sentence says which, and the way out.

    >>> tpu_devices()
    Traceback (most recent call last):
    ...
    kdpkit._checks.InputError: There is no TPU: this machine has no TPU chip, ...
    """
    if _platform() != "tpu":
        raise _checks.InputError(_why_no_tpu())
    return jax.devices()


def describe_choice() -> str:
    """Say in one line what JAX trains on here, and, where that is the CPU, why.

    Raises:
        ValueError: JAX cannot start what it was told to use.

    >>> describe_choice()
    'the CPU, as 8 devices. There is no GPU and no TPU.'
    """
    platform = _platform()
    count = jax.device_count()
    if platform == "cpu":
        why = _why_no_tpu() if _tpu.chips() else "There is no GPU and no TPU."
        return f"the CPU, as {count} device{'s' if count > 1 else ''}. {why}"
    kind = "TPU core" if platform == "tpu" else platform.upper()
    return f"{count} {kind}{'s' if count > 1 else ''}."


def _platform() -> str:
    """Start JAX, and give the kind of device that it trains on."""
    try:
        return str(jax.default_backend())
    except (RuntimeError, AssertionError) as error:  # the second where it was told of one unknown
        raise _checks.InputError(_why_not_started(error)) from error


def _why_not_started(error: Exception) -> str:
    """Say why JAX found nothing; where libtpu finds chips, JAX wants these and nothing else."""
    if "tpu" in str(jax.config.jax_platforms).split(","):
        return _why_no_tpu(error)
    return (
        f"JAX cannot start what it was told to use ({_tpu.first_line(error) or 'unknown'}). "
        f"Received: JAX_PLATFORMS={jax.config.jax_platforms}. Leave the environment variable out, "
        "or install the JAX for it."
    )


def _why_no_tpu(error: Exception | None = None) -> str:
    """Say why there is no TPU, or from the error that JAX gave why it could not be had."""
    if not _tpu.chips():
        return _tpu.nowhere()
    told = jax.config.jax_platforms
    if told and "tpu" not in told.split(","):
        return f"JAX was told to use other devices (JAX_PLATFORMS={told}). Leave that out."
    try:
        if error is None:
            jax.devices("tpu")
    except RuntimeError as raised:
        error = raised
    assert error is not None, "with a TPU that starts, JAX trains on it"
    return (
        _tpu.in_use(error)
        or _tpu.without_libtpu()
        or f"JAX could not start this machine's {_tpu.counted(_tpu.chips())} "
        f"({_tpu.first_line(error)}). Restart Python, in a notebook the runtime; if that does "
        'not help, `pip install --upgrade "jax[tpu]"`.'
    )


def as_mesh(where: Any) -> Mesh:
    """Give the mesh of a `Mesh` or of a `keras.distribution.DataParallel`; of one device for None.

    None takes the distribution that is set in Keras, if one is.

    Raises:
        ValueError: It is something else, or a mesh of several axes.

    >>> as_mesh(None).size
    1
    """
    where = keras.distribution.distribution() if where is None else where
    if where is None:
        return data_mesh(1)
    if isinstance(where, keras.distribution.DataParallel):
        where = where.device_mesh.backend_mesh
    if not isinstance(where, Mesh) or len(where.axis_names) != 1:
        _checks.refuse(
            "On JAX a strategy is a `jax.sharding.Mesh` of one axis, such as "
            "`kdpkit.sharding.data_mesh()` gives, or a `keras.distribution.DataParallel`.",
            strategy=where,
        )
    return where


class DataParallel(keras.distribution.DataParallel):
    """Keras' data parallelism over the devices of `data_mesh`, every process with its own data.

    Set it before the model is built, with `keras.distribution.set_distribution` or `scope()`.

    Args:
        devices: As for `data_mesh`.

    >>> with DataParallel(2).scope():
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    >>> len(model.weights[0].value.sharding.device_set)
    2
    """

    def __init__(self, devices: Any = None) -> None:
        names = [f"{d.platform}:{d.id}" for d in data_mesh(devices).devices.flat]
        super().__init__(
            device_mesh=keras.distribution.DeviceMesh((len(names),), [BATCH_AXIS], names),
            auto_shard_dataset=False,
        )

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of devices, under the name that it has in `tf.distribute`."""
        return int(self.device_mesh.devices.size)


def describe(distribution: keras.distribution.DataParallel) -> str:
    """Say in one line over which devices a distribution cuts its batches.

    >>> describe(DataParallel(2))
    'DataParallel: 2 replicas on cpu:0, cpu:1'
    """
    devices = [*distribution.device_mesh.devices.flat]
    plural = "s" if len(devices) > 1 else ""
    return f"DataParallel: {len(devices)} replica{plural} on {', '.join(map(str, devices))}"


def replicated(mesh: Mesh) -> NamedSharding:
    """Give the sharding that puts a whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def by_rows(mesh: Mesh) -> NamedSharding:
    """Give the sharding that cuts an array along its first axis."""
    return NamedSharding(mesh, PartitionSpec(*mesh.axis_names))


def shard_batch(
    batch: Any, mesh: Mesh, *, pad: str | None = None, global_batch_size: int | None = None
) -> Any:
    """Put a batch on the devices of a mesh, cut along its rows.

    Args:
        batch: A nest of arrays of equally many rows: inputs `x`, `(x, y)`, or
            `(x, y, sample_weight)`.
        mesh: As `data_mesh` gives.
        pad: None refuses rows that the devices do not divide. `"train"` and `"eval"` repeat the
            last row until they do, and weight the filling 0, by the rule of
            `kdpkit.scaling.padded_rows`; then `(x, y, sample_weight)` comes back. Filling is not
            exact where rows of a batch interact, as in training with BatchNormalization.
        global_batch_size: The rows to fill up to, so that every batch has the same shape; None
            fills up to the next multiple of the devices.

    Returns:
        The same nest, of `jax.Array`.

    Raises:
        ValueError: The devices do not divide the rows (or `global_batch_size`), parts of the batch
            differ in rows, or one has none.

    >>> import numpy as np
    >>> x, y, weight = shard_batch((np.arange(3.0), np.arange(3)), data_mesh(2), pad="eval")
    >>> x.shape, [shard.data.shape for shard in x.addressable_shards], weight.tolist()
    ((4,), [(2,), (2,)], [1.0, 1.0, 1.0, 0.0])
    """
    rows = rows_of(batch)
    if pad is not None:
        size = global_batch_size
        if size is None:
            size = -(-rows // mesh.size) * mesh.size
        batch = pad_batch(batch, size, mode=pad)
        rows = size
    _checks.global_batch(rows, mesh.size)
    return jax.device_put(batch, by_rows(mesh))


def place_batch(batch: Any, mesh: Mesh) -> Any:
    """Put a batch of any number of rows on the devices, for a program that calls `split_rows`.

    Rows that the devices divide are cut; others go to every device whole.
    """
    even = rows_of(batch) % mesh.size == 0
    if jax.process_count() == 1:
        return jax.device_put(batch, by_rows(mesh) if even else replicated(mesh))
    return _place_own_rows(batch, mesh, by_rows(mesh))


def place_batches(batches: Sequence[Any], mesh: Mesh) -> Any:
    """Stack batches of equal shapes along a new first axis, and place them as `place_batch`."""
    even = rows_of(batches[0]) % mesh.size == 0
    cut = NamedSharding(mesh, PartitionSpec(None, *mesh.axis_names))
    stacked = jax.tree.map(lambda *parts: np.stack(parts), *batches)
    if jax.process_count() > 1:
        return _place_own_rows(stacked, mesh, cut)
    return jax.device_put(stacked, cut if even else replicated(mesh))


def _place_own_rows(batch: Any, mesh: Mesh, cut: NamedSharding) -> Any:
    """Put this process's rows on its devices, as its part of a batch that spans all processes."""
    own = mesh.size // jax.process_count()
    axis = cut.spec.index(mesh.axis_names[0])
    rows = np.shape(jax.tree.leaves(batch)[0])[axis]
    if rows % own:
        _checks.refuse(
            "With several processes each must give rows that its devices divide.",
            rows=rows,
            devices_of_this_process=own,
            remedy='Drop or pad the last batch: `ArrayBatches(remainder="pad")`.',
        )
    return jax.tree.map(
        lambda part: jax.make_array_from_process_local_data(cut, np.asarray(part)), batch
    )


def split_rows(batch: Any, mesh: Mesh) -> Any:
    """Inside `jax.jit`: cut the work on a batch along its rows, however many they are.

    JAX refuses an uneven array at the border of a program. Within it XLA cuts into pieces of
    ceil(rows / devices), the last ones shorter or empty, and computes what one device would, batch
    statistics included. Outside of `jax.jit` an uneven batch stays as `place_batch` has put it:
    every device computes with the whole.
    """
    is_traced = any(isinstance(part, jax.core.Tracer) for part in jax.tree.leaves(batch))
    return jax.lax.with_sharding_constraint(batch, by_rows(mesh)) if is_traced else batch


def describe_placement(batch: Any) -> str:
    """Say how a batch lies on the devices: a line for each array, with the rows of each device.

    Args:
        batch: A nest of `jax.Array`, such as `shard_batch` gives.

    >>> import numpy as np
    >>> print(describe_placement({"image": shard_batch(np.zeros((4, 8, 8)), data_mesh(2))}))
    ['image'] float32 (4, 8, 8): cpu:0 rows 0-1, cpu:1 rows 2-3
    """
    leaves, _ = jax.tree.flatten_with_path(batch)
    return "\n".join(_placement(jax.tree_util.keystr(path), array) for path, array in leaves)


def _placement(name: str, array: Any) -> str:
    if not isinstance(array, jax.Array):
        _checks.refuse("An array that is on no device has no placement.", array=type(array))
    shards = sorted(array.addressable_shards, key=lambda shard: shard.device.id)
    rows = [(shard.device, shard.index[0] if shard.index else slice(None)) for shard in shards]
    places = ", ".join(
        f"{device.platform}:{device.id} rows {part.start or 0}-{(part.stop or len(array)) - 1}"
        if array.ndim
        else f"{device.platform}:{device.id}"
        for device, part in rows
    )
    return f"{name} {array.dtype} {array.shape}: {places}".lstrip()


class TrainState(NamedTuple):
    """All that a step of training reads and changes, as arrays: a pytree.

    Attributes:
        trainable_variables: Of the model; so with the next.
        non_trainable_variables: Batch statistics and the states of random generators, too.
        optimizer_variables: The count of steps among them.
        metrics_variables: Of the metrics.
    """

    trainable_variables: list[Any]
    non_trainable_variables: list[Any]
    optimizer_variables: list[Any]
    metrics_variables: list[Any]

    @classmethod
    def replicated(
        cls, model: Any, optimizer: Any, mesh: Mesh, *, metrics: Iterable[Any] = ()
    ) -> "TrainState":
        """Copy the variables to every device of a mesh.

        Args:
            model: A Keras model that is built.
            optimizer: A Keras optimizer; it is built for the model if it is not yet.
            mesh: As `data_mesh` gives.
            metrics: Keras metrics.

        Raises:
            ValueError: The model is not built.
        """
        if not model.built:
            _checks.refuse(
                "The model has no variables yet; build it, or call it on a batch.", model=model.name
            )
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        values = [[v.value for v in part] for part in _variables(model, optimizer, metrics)]
        # A copy: a step gives the buffers of its state away, and the model's would be gone.
        copies = jax.tree.map(lambda value: np.array(value), values)
        return cls(*jax.device_put(copies, replicated(mesh)))

    def write_back(self, model: Any, optimizer: Any, *, metrics: Iterable[Any] = ()) -> None:
        """Assign the values to the variables of the model, the optimizer and the metrics."""
        for variables, values in zip(_variables(model, optimizer, metrics), self, strict=True):
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)


def _variables(model: Any, optimizer: Any, metrics: Iterable[Any]) -> list[list[Any]]:
    return [
        model.trainable_variables,
        model.non_trainable_variables,
        optimizer.variables,
        [variable for metric in metrics for variable in metric.variables],
    ]


def make_train_step(
    model: Any, optimizer: Any, loss: Any, *, metrics: Iterable[Any] = ()
) -> Callable[[TrainState, Any], tuple[TrainState, dict[str, Any]]]:
    """Compile a training step over the devices on which state and batch lie.

    What the model adds to the loss (regularizers, `add_loss`) counts, and the loss is scaled as the
    optimizer asks.

    Args:
        model: A built Keras model.
        optimizer: A Keras optimizer, built for it.
        loss: A Keras loss, its name, or a function of labels and predictions.
        metrics: Keras metrics, the same as the state's.

    Returns:
        A function of a `TrainState` and a batch `(x, y)` or `(x, y, sample_weight)` that gives the
        next state, and the loss of the batch and the metrics so far, by name. It uses the buffers
        of the state that it got: go on with the new one alone.

    >>> import keras
    >>> from kdpkit import testing
    >>> model, optimizer = testing.tiny_classifier(), keras.optimizers.Adam()
    >>> loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    >>> mesh = data_mesh(2)
    >>> state = TrainState.replicated(model, optimizer, mesh)
    >>> step = make_train_step(model, optimizer, loss)
    >>> state, logs = step(state, shard_batch(testing.toy_classification(8), mesh))
    >>> state.write_back(model, optimizer)
    >>> int(optimizer.iterations.value), [*logs]
    (1, ['loss'])
    """
    metrics = [*metrics]
    loss_of = _as_loss(loss)

    def compute_loss(trainable: Any, state: TrainState, batch: Any) -> Any:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        predictions, non_trainable, added = model.stateless_call(
            trainable, state.non_trainable_variables, x, training=True, return_losses=True
        )
        value = sum(added, loss_of(y, predictions, sample_weight))
        mapping = [*zip(optimizer.variables, state.optimizer_variables, strict=True)]
        with keras.StatelessScope(state_mapping=mapping):
            scaled = optimizer.scale_loss(value)
        return scaled, (value, predictions, non_trainable)

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        (_, (value, predictions, non_trainable)), gradients = jax.value_and_grad(
            compute_loss, has_aux=True
        )(state.trainable_variables, state, batch)
        trainable, of_optimizer = optimizer.stateless_apply(
            state.optimizer_variables, gradients, state.trainable_variables
        )
        _, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        of_metrics, logs = _updated(metrics, state.metrics_variables, y, predictions, sample_weight)
        return TrainState(trainable, non_trainable, of_optimizer, of_metrics), {
            "loss": value,
            **logs,
        }

    return jax.jit(train_step, donate_argnums=0)


def _as_loss(loss: Any) -> Any:
    loss = keras.losses.get(loss)
    if isinstance(loss, keras.losses.Loss):
        return loss
    wrapped: Any = keras.losses.Loss()
    wrapped.call = loss
    return wrapped


def _updated(metrics: list[Any], values: list[Any], *arguments: Any) -> tuple[list[Any], dict]:
    """Update metrics from their variables' values; give the new values, and the results."""
    values, updated, logs = [*values], [], {}
    for metric in metrics:
        own = [values.pop(0) for _ in metric.variables]
        own = metric.stateless_update_state(own, *arguments)
        logs[metric.name] = metric.stateless_result(own)
        updated += own
    return updated, logs
