"""Training states on disk: written atomically, named by epoch and step.

`kdpkit.callbacks.Resume` saves and restores them. A state is one `.npz` file with arrays, including
all variables that training changes, and its position and notes as JSON.
"""

from kdpkit.checkpoints._directory import CheckpointDirectory, Position, TrainingState
from kdpkit.checkpoints._variables import assign, values_of

__all__ = ["CheckpointDirectory", "Position", "TrainingState", "assign", "values_of"]
