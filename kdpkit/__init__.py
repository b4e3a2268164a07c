"""kdpkit, the Keras data-parallel kit: R replicas train exactly what one device would train.

Every part lives at one path and loads on first use, so `import kdpkit` costs nothing:

>>> import kdpkit
>>> kdpkit.scaling.split_batch(10, 4)
(3, 3, 3, 1)
"""

import importlib
from types import ModuleType

__version__ = "0.1.0"

_SUBMODULES = (
    "batches",
    "callbacks",
    "checkpoints",
    "cli",
    "cluster",
    "corpora",
    "diagnostics",
    "errors",
    "experiment",
    "launch",
    "pipelines",
    "scaling",
    "schedules",
    "sharding",
    "strategies",
    "testing",
    "training",
)

__all__ = ["__version__", *_SUBMODULES]


def __getattr__(name: str) -> ModuleType:
    """Import a submodule the first time it is used (PEP 562)."""
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the submodules for completion, loaded or not."""
    return sorted(__all__)
