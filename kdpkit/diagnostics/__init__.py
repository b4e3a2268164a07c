"""What stands in the way of training somewhere else, known before going there.

`check_tpu` checks a dataset, a model and callbacks for a TPU, on the machine at hand. Each name
loads the framework that it needs on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kdpkit.diagnostics._tpu import TpuReport, check_tpu

_HOMES = {"TpuReport": "_tpu", "check_tpu": "_tpu"}

__all__ = ["TpuReport", "check_tpu"]


def __getattr__(name: str) -> Any:
    """Import a name's module the first time it is used (PEP 562)."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the names for completion, loaded or not."""
    return sorted(__all__)
