"""Training on several devices that equals training on one device.

`replica_exact` makes Keras' own `fit` exact, and a step of your own. `without_logits` keeps the
logits of a language model out of memory, `remat` the activations of blocks; `linear_cross_entropy`
is the loss of a large vocabulary. `check_parity` reports whether several devices train what one
device trains. Each loads its framework on first use.
"""

from typing import TYPE_CHECKING

from kdpkit._internal import lazy_names

if TYPE_CHECKING:
    from kdpkit.training._exact import replica_exact
    from kdpkit.training._linear_cross_entropy import linear_cross_entropy
    from kdpkit.training._parity import check_parity
    from kdpkit.training._remat import remat
    from kdpkit.training._without_logits import without_logits

_HOMES = {
    "check_parity": "_parity",
    "linear_cross_entropy": "_linear_cross_entropy",
    "remat": "_remat",
    "replica_exact": "_exact",
    "without_logits": "_without_logits",
}

__all__ = ["check_parity", "linear_cross_entropy", "remat", "replica_exact", "without_logits"]

if not TYPE_CHECKING:  # a checker then reports names that there are not
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)
