"""kdpkit, the Keras data-parallel kit: R replicas train exactly what one device would train.

Every part lives at one path and loads on first use, so `import kdpkit` costs nothing:

>>> import kdpkit
>>> kdpkit.scaling.split_batch(10, 4)
(3, 3, 3, 1)
"""

import pkgutil
from typing import TYPE_CHECKING

from kdpkit._internal import lazy_names

__version__ = "0.1.0"

_SUBMODULES = [name for _, name, _ in pkgutil.iter_modules(__path__) if not name.startswith("_")]

__all__ = ["__version__", *_SUBMODULES]


if TYPE_CHECKING:  # the types of the submodules, each by its own name
    from kdpkit import batches as batches
    from kdpkit import callbacks as callbacks
    from kdpkit import checkpoints as checkpoints
    from kdpkit import cli as cli
    from kdpkit import cluster as cluster
    from kdpkit import corpora as corpora
    from kdpkit import diagnostics as diagnostics
    from kdpkit import errors as errors
    from kdpkit import experiment as experiment
    from kdpkit import launch as launch
    from kdpkit import pipelines as pipelines
    from kdpkit import scaling as scaling
    from kdpkit import schedules as schedules
    from kdpkit import sharding as sharding
    from kdpkit import strategies as strategies
    from kdpkit import testing as testing
    from kdpkit import training as training
else:
    __getattr__, _ = lazy_names(__name__, {name: name for name in _SUBMODULES})


def __dir__() -> list[str]:
    """List the submodules for completion, loaded or not."""
    return sorted(__all__)
