"""What a step of `TrainingLoop` on JAX costs next to one of the loop in Keras' guide.

    KERAS_BACKEND=jax python tests/benchmarks/bench_jax_guide.py [--devices 1] [--json]

The guide's loop, fixed so that it starts, alternates with ours, epoch by epoch, on the same NumPy
batches: a small MLP, where what Python does counts, and the guide's convnet, where the devices do.
Times are medians over the rounds; the ratio is the median of the rounds' ratios. On GPUs pass
`--devices` as many as there are.
"""

# ruff: noqa: T201 a command-line program prints

import argparse
import json
import os
import statistics
import time

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np

from kdpkit import sharding, testing
from kdpkit.batches import ArrayBatches
from kdpkit.training import TrainingLoop
from recipes import cnn_jax
from tests.benchmarks.jax_guide import GuideLoop

BATCH = 64
STEPS_PER_LOOP = (1, 16)


def mlp():
    """Two dense layers on 32 features, and data for it."""
    layers = keras.layers
    model = keras.Sequential([keras.Input((32,)), layers.Dense(64, "relu"), layers.Dense(10)])
    return model, np.random.default_rng(0).normal(size=(1, 32)).astype("float32")


def convnet():
    """The guide's network, on images of the size of MNIST's."""
    return cnn_jax.build_model((28, 28, 1), 10), np.ones((1, 28, 28, 1), "uint8")


def loss():
    """Crossentropy, as in the guide."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def contestants(build, data, devices):
    """Return by name functions that train one epoch."""
    model, _ = build()
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    guide = GuideLoop(model, optimizer, loss(), jax.devices()[:devices])
    batches = ArrayBatches(data, global_batch_size=BATCH)
    found = {"guide": lambda: guide.train(batches[i] for i in range(len(batches)))}
    for steps in STEPS_PER_LOOP:
        loop = TrainingLoop(
            build()[0],
            optimizer="adam",
            loss=loss(),
            strategy=sharding.data_mesh(devices),
            steps_per_loop=steps,
        )
        found[f"steps_per_loop={steps}"] = lambda loop=loop: loop.fit(batches, epochs=1, verbose=0)
    return found


def compare(build, steps, rounds, devices):
    """Return by name the median microseconds of a step, and the ratio to the guide's."""
    _, row = build()
    x = np.repeat(row, steps * BATCH, axis=0)
    found = contestants(build, (x, np.arange(len(x)) % 10), devices)
    times = {name: [] for name in found}
    for number in range(rounds + 1):
        order = [*found.items()]
        for name, train in order if number % 2 else reversed(order):  # nobody always comes first
            start = time.perf_counter()
            train()
            times[name].append(1e6 * (time.perf_counter() - start) / steps)
    measured = {name: values[1:] for name, values in times.items()}  # the first round compiles
    return {
        name: {
            "microseconds": statistics.median(values),
            "ratio": statistics.median(
                ours / theirs for ours, theirs in zip(values, measured["guide"], strict=True)
            ),
        }
        for name, values in measured.items()
    }


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    testing.use_logical_cpus(arguments.devices)
    keras.utils.set_random_seed(0)
    results = {
        "MLP": compare(mlp, 512, arguments.rounds, arguments.devices),
        "convnet": compare(convnet, 60, arguments.rounds, arguments.devices),
    }
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    print(f"{jax.devices()[0].device_kind}, {arguments.devices} device(s)")
    print("model     trained by           microseconds a step  ratio to the guide")
    for model, by_name in results.items():
        for name, of in by_name.items():
            print(f"{model:<10}{name:21}{of['microseconds']:19.0f}{of['ratio']:20.2f}")


if __name__ == "__main__":
    main()
