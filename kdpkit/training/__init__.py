"""Training on R replicas that equals training on one device.

`replica_exact` mends Keras' own `fit`; `TrainingLoop` is a loop whose step is yours to change;
`global_mean_loss` is the loss of a loop that you write yourself, `linear_cross_entropy` that of a
large vocabulary; `check_parity` tells whether replicas train what one device trains. Each loads the
framework that it needs on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kdpkit.training._exact import replica_exact
    from kdpkit.training._linear_cross_entropy import linear_cross_entropy
    from kdpkit.training._loop import TrainingLoop
    from kdpkit.training._losses import global_mean_loss
    from kdpkit.training._masked_lm import MaskedLMLoop
    from kdpkit.training._parity import ParityReport, check_parity

_HOMES = {
    "MaskedLMLoop": "_masked_lm",
    "ParityReport": "_parity",
    "TrainingLoop": "_loop",
    "check_parity": "_parity",
    "global_mean_loss": "_losses",
    "linear_cross_entropy": "_linear_cross_entropy",
    "replica_exact": "_exact",
}

__all__ = [
    "MaskedLMLoop",
    "ParityReport",
    "TrainingLoop",
    "check_parity",
    "global_mean_loss",
    "linear_cross_entropy",
    "replica_exact",
]


def __getattr__(name: str) -> Any:
    """Import a name's module the first time it is used (PEP 562)."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the names for completion, loaded or not."""
    return sorted(__all__)
