"""The numbers that a model computes with: chosen by what the devices are fast at."""

from typing import Any, TypeAlias

from kdpkit._internal import checks

Capability: TypeAlias = tuple[int, ...] | None  # that CUDA reports of a GPU, None for TPUs

PRECISIONS = ("auto", "float32", "mixed_bfloat16", "mixed_float16")


def set_precision(wanted: str = "auto") -> str:
    """Set Keras' dtype policy for the models built from now on, and return its name.

    Variables stay float32 in all of them, and so do sums of gradients over replicas. `"auto"` takes
    mixed_bfloat16 on TPUs and on NVIDIA GPUs from Ampere on, mixed_float16 on those from Volta on,
    which needs the loss scaling that Keras puts around the optimizer. It prints in one line what it
    chose. Elsewhere, and where a program has set a policy already, it changes nothing.

    Args:
        wanted: "auto", "float32", "mixed_bfloat16" or "mixed_float16".

    >>> set_precision("float32")
    'float32'
    """
    import keras

    checks.one_of("precision", wanted, PRECISIONS)
    current = str(keras.config.dtype_policy().name)
    if wanted == "auto":
        if current != "float32":
            return current
        wanted, device = fastest(_accelerators())
        if wanted != current:
            print(f"Precision: {wanted}, in which {device} computes fastest.")
    keras.config.set_dtype_policy(wanted)
    return wanted


def fastest(accelerators: list[tuple[str, Capability]]) -> tuple[str, str]:
    """Choose for all devices together: the policy, and the device that decides.

    Args:
        accelerators: The name of each, and a GPU's compute capability, None for TPUs.

    >>> fastest([("GPU:0", (9, 0)), ("GPU:1", (7, 5))])
    ('mixed_float16', 'GPU:1')
    """
    if not accelerators:
        return "float32", ""
    device, capability = min(accelerators, key=lambda pair: pair[1] or (99, 0))
    if capability is None or capability >= (8, 0):
        return "mixed_bfloat16", device
    return ("mixed_float16" if capability >= (7, 0) else "float32"), device


def _accelerators() -> list[tuple[str, Capability]]:
    """List the devices that are no CPU; those whose capability is unknown count as oldest."""
    import keras

    if keras.backend.backend() == "jax":
        import jax

        devices = [device for device in jax.devices() if device.platform != "cpu"]
        return [(f"{each.platform.upper()}:{each.id}", _capability(each)) for each in devices]
    import tensorflow as tf

    details = map(tf.config.experimental.get_device_details, tf.config.list_physical_devices("GPU"))
    gpus = [(f"GPU:{i}", of.get("compute_capability", (0, 0))) for i, of in enumerate(details)]
    return gpus or [(f"TPU:{i}", None) for i, _ in enumerate(tf.config.list_logical_devices("TPU"))]


def _capability(device: Any) -> Capability:
    if device.platform == "tpu":
        return None
    try:
        return tuple(int(part) for part in str(device.compute_capability).split("."))
    except (AttributeError, ValueError):  # AMD's are called otherwise
        return (0, 0)
