"""The training loop of the Keras guide to multi-GPU training with JAX, for comparison.

The guide's ideas in the guide's order: a jitted step that is a function of the variables, state
replicated once, batches put on the devices one by one, weights written back at the end.
"""

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class GuideLoop:
    """Trains as the guide does.

    Args:
        model: A built model.
        optimizer: Its optimizer, built.
        loss: A Keras loss.
        devices: Devices to train on.
    """

    def __init__(self, model, optimizer, loss, devices):
        self.model, self.optimizer = model, optimizer
        grid = mesh_utils.create_device_mesh((len(devices),), devices)
        everywhere = NamedSharding(Mesh(grid, ("_",)), PartitionSpec())
        self.by_examples = NamedSharding(Mesh(grid, ("batch",)), PartitionSpec("batch"))
        parts = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
        # The guide puts the variables themselves there, which fails since JAX 0.8.
        values = ([variable.value for variable in part] for part in parts)
        self.state = tuple(jax.device_put(part, everywhere) for part in values)

        def compute_loss(trainable, non_trainable, x, y):
            predictions, updated = model.stateless_call(trainable, non_trainable, x, training=True)
            return loss(y, predictions), updated

        differentiate = jax.value_and_grad(compute_loss, has_aux=True)

        @jax.jit
        def train_step(state, x, y):
            trainable, non_trainable, of_optimizer = state
            (value, non_trainable), gradients = differentiate(trainable, non_trainable, x, y)
            trainable, of_optimizer = optimizer.stateless_apply(of_optimizer, gradients, trainable)
            return value, (trainable, non_trainable, of_optimizer)

        self.train_step = train_step

    def train(self, batches):
        """Train on NumPy batches; return the last loss, when it is there."""
        value = np.nan
        for x, y in batches:
            value, self.state = self.train_step(self.state, jax.device_put(x, self.by_examples), y)
        return float(value)

    def write_back(self):
        """Give the model its weights; the guide leaves the optimizer's state behind."""
        trainable, non_trainable, _ = self.state
        for variables, values in (
            (self.model.trainable_variables, trainable),
            (self.model.non_trainable_variables, non_trainable),
        ):
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)
