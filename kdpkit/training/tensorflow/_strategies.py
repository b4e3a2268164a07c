"""Which class runs the steps of a `TrainingLoop` under a strategy."""

from typing import Any

import tensorflow as tf

from kdpkit.training.tensorflow._loop import TensorFlowSteps
from kdpkit.training.tensorflow._parameter_server import ParameterServerSteps
from kdpkit.training.tensorflow._tpu import TpuSteps


def steps_of(loop: Any, strategy: tf.distribute.Strategy | None, jit: Any) -> TensorFlowSteps:
    strategy_of_model = loop.model.distribute_strategy if strategy is None else strategy
    if isinstance(strategy_of_model, tf.distribute.ParameterServerStrategy):
        return ParameterServerSteps(loop, strategy, jit)
    is_tpu = isinstance(strategy_of_model, tf.distribute.TPUStrategy)
    return (TpuSteps if is_tpu else TensorFlowSteps)(loop, strategy, jit)
