"""What each callback costs per step, on a model so small that nothing hides it.

    python tests/benchmarks/bench_callbacks.py [--steps 500] [--rounds 9] [--json]

An epoch with the callback alternates with one without it, so that a busy machine slows both alike.
The ratio is the median over the rounds. `KERAS_BACKEND` chooses the backend.
"""

# ruff: noqa: T201 a command-line program prints

import argparse
import contextlib
import io
import json
import statistics
import tempfile
import time
import warnings

import keras

from kdpkit import callbacks, testing

BATCH = 32
SCHEDULE = keras.optimizers.schedules.PolynomialDecay(0.1, 10_000)


def cases(log_dir):
    """Give by name the learning rate, whether Keras knows the number of steps, and callbacks."""
    usual = callbacks.training_callbacks(log_dir, global_batch_size=BATCH)
    every_batch = callbacks.TensorBoard(log_dir, update_freq=1)
    return {
        "nothing": (SCHEDULE, True, []),
        "LearningRateLogger": (SCHEDULE, True, [callbacks.LearningRateLogger()]),
        "  plain rate": (0.1, True, [callbacks.LearningRateLogger()]),
        "  plain rate, steps unknown": (0.1, False, [callbacks.LearningRateLogger()]),
        '  every="batch"': (SCHEDULE, True, [callbacks.LearningRateLogger("batch")]),
        "PrintLR": (SCHEDULE, True, [callbacks.PrintLR()]),
        "Throughput": (SCHEDULE, True, [callbacks.Throughput(BATCH)]),
        "DeviceMonitor": (SCHEDULE, True, [callbacks.DeviceMonitor()]),
        "TensorBoard": (SCHEDULE, True, [callbacks.TensorBoard(log_dir)]),
        "  update_freq=1": (SCHEDULE, True, [every_batch]),
        "training_callbacks": (SCHEDULE, True, usual),
    }


def epoch(model, x, y, sized, chosen):
    """Train one epoch in silence and give the seconds it took."""
    rows = range(0, len(x), BATCH)
    data = {"x": x, "y": y, "batch_size": BATCH, "shuffle": False}
    if not sized:
        data = {"x": ((x[i : i + BATCH], y[i : i + BATCH]) for i in rows), "shuffle": False}
    with contextlib.redirect_stdout(io.StringIO()):
        start = time.perf_counter()
        model.fit(**data, verbose=0, callbacks=list(chosen))
        return time.perf_counter() - start


def compare(case, x, y, rounds):
    """Give the median microseconds of a step without and with callbacks, and their ratio."""
    rate, sized, chosen = case
    model = testing.tiny_classifier()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(rate), loss)
    pairs = [[epoch(model, x, y, sized, each) for each in ([], chosen)] for _ in range(rounds + 1)][
        1:
    ]  # the first round compiles
    without, having = (statistics.median(times) for times in zip(*pairs, strict=True))
    per_step = 1e6 * BATCH / len(x)
    return {
        "without": without * per_step,
        "with": having * per_step,
        "ratio": statistics.median(after / before for before, after in pairs),
    }


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="Your input ran out of data")
    x, y = testing.toy_classification(arguments.steps * BATCH)
    with tempfile.TemporaryDirectory() as log_dir:
        results = {
            name: compare(case, x, y, arguments.rounds) for name, case in cases(log_dir).items()
        }
    if arguments.json:
        print(json.dumps({"backend": keras.backend.backend(), "results": results}, indent=2))
        return
    print(f"{keras.backend.backend()}, microseconds a step   without     with    ratio")
    for name, result in results.items():
        print(f"{name:32}{result['without']:10.0f}{result['with']:9.0f}{result['ratio']:9.2f}")


if __name__ == "__main__":
    main()
