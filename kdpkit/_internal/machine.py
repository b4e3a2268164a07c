"""The cores and TPU chips of this machine, without loading a framework.

Loading libtpu on a machine that has no TPU waits minutes for the cloud's metadata, or ends the
process; so the chips are looked up first, as JAX does, among the devices on the PCI bus.
"""

import os
from pathlib import Path

from kdpkit import errors

_PCI_DEVICES = Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"  # also the vendor of the network cards of Google's virtual machines
# From jax/_src/hardware_utils.py of JAX 0.10: v3, (unnamed), v4, v5p, v5e, v6e, 7x.
_TPU_CHIPS = {"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"}
NO_TPU = (
    "There is no TPU: this machine has no TPU chip. Run on a TPU virtual machine, or choose a "
    "runtime that has one (in Colab: Runtime > Change runtime type)."
)


def split_cpu(devices: int, backend: str) -> None:
    """Split the CPU into logical devices, before the backend's runtime starts.

    TensorFlow raises where it has started with fewer; JAX then keeps what it has, and the number in
    XLA_FLAGS counts that was added last.
    """
    if backend == "jax":
        flag = f"--xla_force_host_platform_device_count={devices}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
        # XLA runs the programs of all CPU devices, and launches the next ones, on one pool of as
        # many threads as there are cores. Once a device has 32 programs waiting, a launch blocks
        # its thread. If the other threads are in an all-reduce, one of its devices then lacks a
        # thread, and XLA ends the process after 40 seconds ("only 1 of 2 threads arrived"). With
        # two threads each, a device can launch one program and run another.
        if cores() < 2 * devices:
            os.environ.setdefault("PJRT_NPROC", str(2 * devices))
        return
    import tensorflow as tf

    cpu, *_ = tf.config.list_physical_devices("CPU")
    try:
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * devices
        )
    except RuntimeError:
        present = len(tf.config.list_logical_devices("CPU"))
        if present < devices:
            raise errors.InputError(
                f"TensorFlow has already started, with {present} logical CPU device(s), and cannot "
                f"split them any more. Received: count={devices}. Split the CPU first: before any "
                "tensor, variable, model or `adapt()`."
            ) from None


def cores() -> int:
    """Count the cores that this process may use, whatever a container's CPU quota is."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS and Windows


def chips(pci_devices: Path = _PCI_DEVICES) -> int:
    def is_tpu(device: Path) -> bool:
        vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "device"))
        return vendor == _GOOGLE and kind in _TPU_CHIPS

    return sum(is_tpu(device.parent) for device in pci_devices.glob("*/vendor"))
