"""What stands in the way of training somewhere else, known before going there.

`check_tpu` checks a dataset, a model and callbacks for a TPU, on the machine at hand. `environment`
tells what this machine and this Python give a training; `probe` trains two steps in every way there
is. Each name loads the framework that it needs on first use; these two load none.
"""

from typing import TYPE_CHECKING

from kdpkit import _lazy

if TYPE_CHECKING:
    from kdpkit.diagnostics._environment import Environment, environment
    from kdpkit.diagnostics._probe import ProbeReport, ProbeResult, probe
    from kdpkit.diagnostics._tpu import TpuReport, check_tpu

_HOMES = {
    "Environment": "_environment",
    "ProbeReport": "_probe",
    "ProbeResult": "_probe",
    "TpuReport": "_tpu",
    "check_tpu": "_tpu",
    "environment": "_environment",
    "probe": "_probe",
}

__all__ = [
    "Environment",
    "ProbeReport",
    "ProbeResult",
    "TpuReport",
    "check_tpu",
    "environment",
    "probe",
]

__getattr__, __dir__ = _lazy.names(__name__, _HOMES)
