"""What stands in the way of training somewhere else, known before going there.

`check_tpu` checks a dataset, a model and callbacks for a TPU, on the machine at hand; `check_input`
the `tf.data` pipelines of a training. Each name loads the framework that it needs on first use.
"""

from typing import TYPE_CHECKING

from kdpkit import _lazy

if TYPE_CHECKING:
    from kdpkit.diagnostics._input import InputReport, check_input
    from kdpkit.diagnostics._tpu import TpuReport, check_tpu

_HOMES = {
    "InputReport": "_input",
    "TpuReport": "_tpu",
    "check_input": "_input",
    "check_tpu": "_tpu",
}

__all__ = ["InputReport", "TpuReport", "check_input", "check_tpu"]

__getattr__, __dir__ = _lazy.names(__name__, _HOMES)
