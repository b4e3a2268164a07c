"""Which devices TensorFlow or JAX finds on this machine, in a process of its own.

python -m kdpkit.diagnostics._env.framework_child tensorflow
"""

import os
import sys
from typing import Any

from kdpkit.diagnostics import _child_program


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
    os._exit(_child_program.report(_jax if sys.argv[1] == "jax" else _tensorflow))
