"""Meshes of devices on JAX, and the devices of this machine."""

import gc
import threading
import weakref
from collections.abc import Sequence

import jax
import keras
import numpy as np
from jax.sharding import AxisType, Mesh

from kdpkit import errors
from kdpkit._internal import checks, machine
from kdpkit.sharding import _shards as shards

BATCH_AXIS = "batch"  # as in `keras.distribution.DataParallel`
MODEL_AXIS = "model"

# Distributions over several devices that were made, and whether `replica_exact` has used one. Such
# a program knows that they must be set, and trains on one device on purpose.
made: "weakref.WeakSet[shards.Distribution]" = weakref.WeakSet()
is_one_used = threading.Event()


def data_mesh(devices: int | Sequence[jax.Device] | None = None) -> Mesh:
    """Return a mesh of devices that share each batch, with one axis, `"batch"`.

    The axis has the type `Auto`: XLA decides how the devices divide what a program computes.
    `jax.make_mesh` makes `Explicit` axes by default, with which Keras' Dropout raises. The devices
    are as for `DataParallel`.
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
                remedy=f"Split the CPU first: `kdpkit.testing.use_logical_cpus({count})`.",
            )
        chosen = present[:count]
    if not chosen or not set(chosen) <= set(present) or len(set(chosen)) < len(chosen):
        checks.fail(
            "A mesh needs devices of `jax.devices()`, at least one, each once.", devices=devices
        )
    return Mesh(np.array(chosen), (BATCH_AXIS,), axis_types=(AxisType.Auto,))


def tpu_devices() -> list[jax.Device]:
    """Return the TPU cores of all processes that JAX trains on, for `DataParallel`.

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
    """Describe in one line the devices that JAX trains on, and why if it is the CPU.

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
    """Start JAX, and return the kind of device that it trains on."""
    try:
        return str(jax.default_backend())
    except (RuntimeError, AssertionError) as error:  # An unknown platform raises the second.
        platforms = jax.config.jax_platforms
        if "tpu" in str(platforms).split(","):  # JAX tries only these chips if libtpu finds any.
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


def as_mesh(strategy: Mesh | shards.Distribution | None) -> Mesh:
    """Return the mesh of a distribution of Keras, or a mesh as it is.

    None is the distribution that is set in Keras, or one device. Batches are shared along the axis
    `"batch"`, or along the first axis if none has this name.

    >>> as_mesh(None).size
    1
    """
    strategy = keras.distribution.distribution() if strategy is None else strategy
    if strategy is None and jax.process_count() > 1:
        checks.fail(
            "No distribution is set, so each process would train a model of its own.",
            processes=jax.process_count(),
            remedy="Set one before the model is built; `keras.utils.clear_session` drops it.",
        )
    if strategy is None:
        return data_mesh(1)
    mesh, axis = strategy, getattr(strategy, "batch_dim_name", None)
    if isinstance(strategy, shards.Distribution):
        mesh = strategy.device_mesh.backend_mesh
    if not isinstance(mesh, Mesh):
        checks.fail(
            "On JAX a strategy is a `kdpkit.sharding.DataParallel()` or `ModelParallel`, one of "
            "Keras, or a `jax.sharding.Mesh`.",
            strategy=strategy,
        )
    if axis not in (None, shards.batch_axis(mesh)):
        checks.fail(
            'Batches are sharded over the axis "batch" of a mesh, or over its first one.',
            batch_dim_name=axis,
            axes=mesh.axis_names,
            remedy='Name the axis "batch".',
        )
    _check_processes(mesh)
    if mesh.size > 1:
        is_one_used.set()
    return mesh


def require_none_forgotten(owner: str, name: str) -> None:
    """Raise where a "model" or a "step" of no distribution trains, and one was made for it."""
    if is_one_used.is_set() or not made:
        return
    gc.collect()  # A distribution that is gone may be in a circular reference.
    for distribution in made:
        checks.fail(
            f"A distribution was made but is not set, so the {owner} would train on one device.",
            **{owner: name},
            distribution=str(distribution),
            remedy="Pass it to `keras.distribution.set_distribution` before the model is built; "
            "for one device leave out `replica_exact`.",
        )


def _check_processes(mesh: Mesh) -> None:
    """Raise if processes, each of which passes its own examples, would share a part of a batch."""
    axis = mesh.axis_names.index(shards.batch_axis(mesh))
    groups = np.moveaxis(mesh.devices, axis, 0).reshape(mesh.devices.shape[axis], -1)
    owners = sorted(sorted({device.process_index for device in group}) for group in groups)
    count = jax.process_count()
    if count > 1 and owners != [[i] for i in range(count) for _ in range(len(groups) // count)]:
        checks.fail(
            "Each process has examples of its own. So all need equally many devices that share "
            "batches, and devices that share the model must be of one process.",
            processes_of_each_group=owners,
            remedy="Use all devices, and a smaller `model`.",
        )
