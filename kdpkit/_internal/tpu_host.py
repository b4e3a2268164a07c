"""Where a TPU is, without loading a framework, and what stands in the way of one.

Loading libtpu on a machine that has no TPU waits minutes for the cloud's metadata, or ends the
process; so the chips are looked up first, as JAX does, among the devices on the PCI bus.
"""

import importlib.util
import os
import re
from pathlib import Path

THROUGH_JAX = "this TPU works through JAX: set KERAS_BACKEND=jax before Keras is imported"

_PCI_DEVICES = Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"  # whose network cards, on every virtual machine of theirs, are no TPUs
# From jax/_src/hardware_utils.py of JAX 0.10: v3, (unnamed), v4, v5p, v5e, v6e, 7x.
_TPU_CHIPS = {"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"}
_NAMING = ("TPU_NAME", "COLAB_TPU_ADDR")  # the second is an address without "grpc://"
_IN_USE = re.compile(r"already in use\b(?:.*?\bpid (\d+))?", re.IGNORECASE | re.DOTALL)


def chips(pci_devices: Path = _PCI_DEVICES) -> int:
    """Count the TPU chips of this machine."""

    def is_tpu(device: Path) -> bool:
        vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "device"))
        return vendor == _GOOGLE and kind in _TPU_CHIPS

    return sum(is_tpu(device.parent) for device in pci_devices.glob("*/vendor"))


def counted(number: int) -> str:
    """How many chips there are, in words.

    >>> counted(1), counted(8)
    ('1 TPU chip', '8 TPU chips')
    """
    return f"{number} TPU chip{'' if number == 1 else 's'}"


def named_by_environment() -> str | None:
    """Return the variable that names a TPU on the network."""
    return next((name for name in _NAMING if os.environ.get(name)), None)


def address(name: str | None) -> str | None:
    """Return the name or address of the TPU that is meant: given, in the environment, or local."""
    if name:
        return name
    variable = named_by_environment()
    if variable:
        value = os.environ[variable].removeprefix("grpc://")
        is_address = variable == "COLAB_TPU_ADDR" or value != os.environ[variable]
        return f"grpc://{value}" if is_address else value
    return "local" if chips() else None


def nowhere() -> str:
    """Why a machine without a TPU has none, and how to get one."""
    if os.environ.get("COLAB_RELEASE_TAG"):
        return (
            "This Colab runtime has no TPU. Choose one under Runtime > Change runtime type, then "
            "run the notebook from its top."
        )
    return (
        "There is no TPU: this machine has no TPU chip, and neither TPU_NAME nor an argument names "
        "one on the network. Run on a TPU virtual machine, or pass the TPU's name or address."
    )


def in_use(error: Exception) -> str | None:
    """Report that another process holds the TPU, if an error shows it; else None."""
    found = _IN_USE.search(str(error))
    if not found:
        return None
    holder = f"process {found[1]}" if found[1] else "another process"
    return (
        f"The TPU is taken by {holder}, and serves one at a time. End that process, in a notebook "
        "by restarting the other session, then start this one again."
    )


def without_libtpu() -> str | None:
    """Report that the library that drives TPUs is missing, if it is; else None."""
    if importlib.util.find_spec("libtpu") or os.environ.get("TPU_LIBRARY_PATH"):
        return None
    return (
        f"This machine has {counted(chips())}, but the library that drives them is not installed. "
        'Run `pip install "jax[tpu]"`, then start Python again.'
    )
