"""tf.distribute strategies that are checked before a model is built.

`tf.distribute` accepts devices that do not exist and reports it much later, or never. Here every
device is looked up first, and the gradient reduction fits the devices: NCCL between physical GPUs,
a sum on one device if the replicas share a processor.
"""

from kdpkit.strategies._parameter_servers import serve_if_server
from kdpkit.strategies._selection import _is_one_used as _is_one_used
from kdpkit.strategies._selection import _made as _made
from kdpkit.strategies._selection import describe, is_chief, select_strategy, split_device

__all__ = ["describe", "is_chief", "select_strategy", "serve_if_server", "split_device"]
