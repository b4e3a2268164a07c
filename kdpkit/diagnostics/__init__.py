"""What stands in the way of training somewhere else, known before going there.

`check_tpu` checks a dataset, a model and callbacks for a TPU, on the machine at hand. `environment`
tells what this machine and this Python give a training. Each name loads the framework that it needs
on first use; `environment` loads none.
"""

from typing import TYPE_CHECKING

from kdpkit import _lazy

if TYPE_CHECKING:
    from kdpkit.diagnostics._environment import Environment, environment
    from kdpkit.diagnostics._tpu import TpuReport, check_tpu

_HOMES = {
    "Environment": "_environment",
    "TpuReport": "_tpu",
    "check_tpu": "_tpu",
    "environment": "_environment",
}

__all__ = [
    "Environment",
    "TpuReport",
    "check_tpu",
    "environment",
]

__getattr__, __dir__ = _lazy.names(__name__, _HOMES)
