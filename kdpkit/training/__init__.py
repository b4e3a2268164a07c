"""Training on R replicas that equals training on one device.

`replica_exact` mends Keras' own `fit`; `global_mean_loss` is the loss of a custom loop.
"""

from kdpkit.training._exact import replica_exact
from kdpkit.training._loop import TrainingLoop
from kdpkit.training._losses import global_mean_loss
from kdpkit.training._parity import ParityReport, check_parity

__all__ = [
    "ParityReport",
    "TrainingLoop",
    "check_parity",
    "global_mean_loss",
    "replica_exact",
]
