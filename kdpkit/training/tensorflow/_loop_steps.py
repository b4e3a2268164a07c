"""Which steps a `TrainingLoop` runs under a strategy of TensorFlow."""

from typing import Any

import tensorflow as tf

from kdpkit.training._steps import Steps
from kdpkit.training.tensorflow._loop import TensorFlowSteps


def steps_of(loop: Any, strategy: tf.distribute.Strategy, jit: Any) -> Steps:
    """Return what runs the steps of a loop, synchronously or through parameter servers."""
    of_model = loop.model.distribute_strategy if strategy is None else strategy
    if isinstance(of_model, tf.distribute.ParameterServerStrategy):
        from kdpkit.training.tensorflow._parameter_server import ParameterServerSteps

        return ParameterServerSteps(loop, strategy, jit)
    return TensorFlowSteps(loop, strategy, jit)
