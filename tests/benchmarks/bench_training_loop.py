"""What a step of `TrainingLoop` costs next to one of stock `fit`, on a tiny model.

    python tests/benchmarks/bench_training_loop.py [--steps 400] [--replicas 1 2] [--json]

An epoch of `fit` alternates with one of every loop, so that a busy machine slows all alike. Times
are medians over the rounds; the ratio is the median of the rounds' ratios.
"""

# ruff: noqa: T201 a command-line program prints

import argparse
import json
import statistics
import time

import keras
import tensorflow as tf

from kdpkit import strategies, testing
from kdpkit.training import TrainingLoop

BATCH = 32
STEPS_PER_LOOP = (1, 8, 64)


def contestants(replicas):
    """Give by name functions that train one epoch on a dataset."""
    kind = "mirrored" if replicas > 1 else "one"
    strategy = strategies.select_strategy(kind, devices=replicas)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with strategy.scope():
        model = testing.tiny_classifier()
        model.compile("adam", loss, metrics=["accuracy"])
    found = {"fit": lambda data: model.fit(data, verbose=0, shuffle=False)}
    for steps in STEPS_PER_LOOP:
        with strategy.scope():
            model_of_loop = testing.tiny_classifier()
        loop = TrainingLoop(
            model_of_loop,
            optimizer="adam",
            loss=loss,
            metrics=["accuracy"],
            strategy=strategy,
            steps_per_loop=steps,
        )
        found[f"steps_per_loop={steps}"] = lambda data, loop=loop: loop.fit(
            data, epochs=1, verbose=0
        )
    return found


def compare(replicas, steps, rounds):
    """Give by name the median microseconds of a step, and the ratio to `fit`."""
    data = tf.data.Dataset.from_tensor_slices(testing.toy_classification(steps * BATCH))
    data = data.batch(BATCH, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
    found = contestants(replicas)
    times = {name: [] for name in found}
    for _ in range(rounds + 1):
        for name, train in found.items():
            start = time.perf_counter()
            train(data)
            times[name].append(1e6 * (time.perf_counter() - start) / steps)
    measured = {name: values[1:] for name, values in times.items()}  # the first round compiles
    return {
        name: {
            "microseconds": statistics.median(values),
            "ratio": statistics.median(
                ours / stock for ours, stock in zip(values, measured["fit"], strict=True)
            ),
        }
        for name, values in measured.items()
    }


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    testing.use_logical_cpus(max(arguments.replicas))
    results = {
        replicas: compare(replicas, arguments.steps, arguments.rounds)
        for replicas in arguments.replicas
    }
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    print("replicas  trained by           microseconds a step  ratio to fit")
    for replicas, by_name in results.items():
        for name, of in by_name.items():
            print(f"{replicas:<10}{name:21}{of['microseconds']:19.0f}{of['ratio']:14.2f}")


if __name__ == "__main__":
    main()
