"""What a step of `TrainingLoop` on JAX costs next to one of the loop in Keras' guide.

The guide to multi-GPU training with JAX, its ideas in its order, fixed so that it starts: a jitted
step that is a function of the variables, state replicated once, batches put on the devices one by
one. It alternates with ours on the same NumPy batches: a small MLP, where what Python does counts,
and the guide's convnet, where the devices do. Both on one device, and on all, two logical CPUs at
least.
"""

import jax
import keras
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kdpkit import sharding, testing
from kdpkit.batches import ArrayBatches
from kdpkit.training import TrainingLoop
from recipes import cnn_jax
from tests.benchmarks.paired import compared, in_turns, seconds_of

BATCH = 64


def rows(args):
    """Measure one step in a call, and 16."""
    testing.use_logical_cpus(2)
    everything = len(jax.devices())
    models = {"MLP": (mlp, (32,), 512), "convnet": (convnet, (28, 28, 1), 60)}
    return [
        row
        for name, model in models.items()
        for devices in sorted({1, everything})
        for row in rows_of(f"{name}, {devices} devices", *model, devices, args.rounds or 9)
    ]


def rows_of(what, build, shape, steps, devices, rounds):
    """Measure one model on some devices."""
    x = np.ones((steps * BATCH, *shape), "uint8" if len(shape) == 3 else "float32")
    batches = ArrayBatches((x, np.arange(len(x)) % 10), global_batch_size=BATCH)
    model, optimizer = build(), keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    guide = GuideLoop(model, optimizer, loss(), jax.devices()[:devices])
    contestants = {"guide": lambda: guide.train(batches[i] for i in range(len(batches)))}
    for count in (1, 16):
        loop = TrainingLoop(
            build(),
            optimizer="adam",
            loss=loss(),
            strategy=sharding.data_mesh(devices),
            steps_per_loop=count,
        )
        contestants[count] = lambda loop=loop: loop.fit(batches, epochs=1, verbose=0)
    figures = in_turns(
        {
            name: lambda train=train: 1e6 * seconds_of(train) / steps
            for name, train in contestants.items()
        },
        rounds,
    )
    return [
        compared(f"{what}, {count} steps a call", "us a step", figures[count], figures["guide"])
        for count in (1, 16)
    ]


def mlp():
    """Two dense layers on 32 features."""
    layers = keras.layers
    return keras.Sequential([keras.Input((32,)), layers.Dense(64, "relu"), layers.Dense(10)])


def convnet():
    """The guide's network, on images of the size of MNIST's."""
    return cnn_jax.build_model((28, 28, 1), 10)


def loss():
    """Crossentropy, as in the guide."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


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
