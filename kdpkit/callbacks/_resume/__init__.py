"""`Resume`: the exact continuation of a training run that was interrupted.

The states and their directory are in `kdpkit.checkpoints`.
"""

from kdpkit.callbacks._resume.callback import Resume

__all__ = ["Resume"]
