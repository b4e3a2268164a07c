"""What TensorFlow or JAX finds on this machine, told by a process of its own.

    python -m kdpkit.diagnostics._framework_child tensorflow

The last line is JSON.
"""

import json
import sys
from typing import Any

SIGN = "kdpkit-framework "  # begins the line that says what was found


def ask(framework: str) -> dict[str, Any]:
    """Give the devices by kind and how the framework was built, or why it does not start."""
    try:
        return (_jax if framework == "jax" else _tensorflow)()
    except Exception as error:  # of any kind: a broken installation raises what it likes
        first = str(error).strip().partition("\n")[0]
        return {"problem": f"{type(error).__name__}: {first}"}


def _tensorflow() -> dict[str, Any]:
    import tensorflow as tf

    kinds = [device.device_type for device in tf.config.list_physical_devices()]
    return {
        "devices": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        "is_built_with_cuda": tf.test.is_built_with_cuda(),
    }


def _jax() -> dict[str, Any]:
    import jax

    return {"devices": {jax.default_backend().upper(): jax.device_count()}}


if __name__ == "__main__":
    sys.stdout.write(f"{SIGN}{json.dumps(ask(sys.argv[1]))}\n")
