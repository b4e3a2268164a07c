"""`Resume`: the exact continuation of a training run that was interrupted.

- `callback`: when a state is saved and restored
- `model`, `callback_state`: what of the model and of other callbacks is in a state
- `data`: datasets that can start at any batch
- `stopping`: SIGTERM, Ctrl-C and requests, in one process or several

The states and their directory are in `kdpkit.checkpoints`.
"""

from kdpkit.callbacks._resume.callback import Resume

__all__ = ["Resume"]
