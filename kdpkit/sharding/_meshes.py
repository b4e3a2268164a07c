"""Meshes of devices on JAX, and what JAX trains on here."""

from collections.abc import Sequence

import jax
import keras
import numpy as np
from jax.sharding import AxisType, Mesh

from kdpkit import errors
from kdpkit._internal import checks, machine, shards

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
            "On JAX a strategy is a `kdpkit.sharding.DataParallel()` or `ModelParallel`, one of "
            "Keras, or a `jax.sharding.Mesh`.",
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
