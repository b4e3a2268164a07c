"""What the device trains, against stock Keras on the CPU, both in float32 at the highest precision.

python -m tools.accelerator.correct stock cpu.npz    # in a process with JAX_PLATFORMS=cpu
python -m tools.accelerator.correct ours device.npz
"""

import contextlib
import functools
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

from tools.accelerator import bert
from tools.accelerator.results import Results
from tools.benchmarks.paired import Row, Spread

STEPS, BATCH, EPOCHS = 4, 12, 2
EQUAL = 1e-4  # of the largest change of a weight; devices add up in other orders
BERT = bert.Size(1, 32, 2, 500, 16, 3, batch=BATCH, steps=STEPS)


def measure(results: Results, *, rehearse: bool) -> None:  # noqa: ARG001  # it is small enough
    """Train all models by all ways in both processes, and compare."""
    with tempfile.TemporaryDirectory() as directory:
        files = {whose: pathlib.Path(directory, f"{whose}.npz") for whose in ("stock", "ours")}
        command = [sys.executable, "-m", "tools.accelerator.correct"]
        # "cuda,cpu" would do for both, but then the CPU's XLA is told to be the second.
        on_cpu = {**os.environ, "JAX_PLATFORMS": "cpu"}
        stock = subprocess.Popen([*command, "stock", str(files["stock"])], env=on_cpu)
        try:
            ours = subprocess.run([*command, "ours", str(files["ours"])], check=False)
            codes = ours.returncode, stock.wait()
        finally:
            stock.kill()
            stock.wait()
        if any(codes):
            results.miss(f"correct: a process ended with {codes}; see its output.")
        weights = {whose: _read(file) for whose, file in files.items() if file.exists()}
    for name, trained in weights.get("ours", {}).items():
        model, _, way = name.partition(", ")
        if model in weights.get("stock", {}):
            what = f"{model}: {way} on the device, stock fit on the CPU"
            results.add(_row(what, trained, weights["stock"][model]))
    undisturbed, resumed = (f"convnet, {way}" for way in ("fit", "stopped and resumed"))
    if {undisturbed, resumed} <= weights.get("ours", {}).keys():
        what = "convnet: stopped and resumed, undisturbed, both on the device"
        results.add(_row(what, weights["ours"][resumed], weights["ours"][undisturbed]))


def _row(what: str, trained: np.ndarray, oracle: np.ndarray) -> Row:
    """Return the largest difference of a weight, over the largest change of any."""
    (before, after), (_, there) = oracle, trained
    difference = float(np.abs(there - after).max() / np.abs(after - before).max())
    unit = "largest difference over largest change"
    return Row(what, unit, Spread.of([difference]), goal=("<=", EQUAL))


def _read(file: pathlib.Path) -> dict[str, np.ndarray]:
    with np.load(file) as found:
        return {name: found[name] for name in found.files}


# What follows runs in one of the two processes.


def convnet() -> Any:
    """Convolutions, statistics of the batch, and random numbers."""
    import keras

    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(8, 3, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Dropout(0.3),
            layers.Conv2D(16, 3, strides=2),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3),
        ]
    )


def _data() -> Any:
    """Return batches of which the last is smaller."""
    from kdpkit.batches import ArrayBatches

    random = np.random.default_rng(0)
    examples = STEPS * BATCH - 5
    data = random.normal(size=(examples, 8, 8, 3)).astype("float32"), np.arange(examples) % 3
    return ArrayBatches(data, global_batch_size=BATCH, remainder="keep", seed=0)


def _sgd() -> Any:
    import keras

    return keras.optimizers.SGD(0.1, momentum=0.9)


def _loss() -> Any:
    return bert.compiled_parts()[1]


def _fit(model: Any, data: Any, **settings: Any) -> list:
    model.compile(_sgd(), _loss(), jit_compile=True, **settings)
    before = _weights(model)
    model.fit(data, epochs=EPOCHS, shuffle=False, verbose=0)
    return [before, _weights(model)]


def _masked_lm(*, remat: bool = False) -> list:
    from kdpkit import training

    model = bert.plain_model_of(BERT, policy="float32", dropout=0.0)
    model = training.without_logits(training.remat(model) if remat else model, chunk_size=150)
    return _fit(training.replica_exact(model), _bert_data())


def _bert_data() -> Any:
    from tools.accelerator.jax_training import Repeated

    return Repeated(bert.batch_of(BERT), STEPS)


def _resume() -> list:
    """Stop in the second epoch, and go on with another model."""
    import keras

    from kdpkit.callbacks import Resume
    from kdpkit.training import replica_exact

    class Stopped(Exception):  # noqa: N818  # it is no error
        pass

    steps = iter(range(STEPS + 1))

    def stop(batch: int, logs: Any) -> None:  # noqa: ARG001  # Keras' arguments
        if next(steps, None) is None:
            raise Stopped

    with tempfile.TemporaryDirectory() as directory:
        for ends in (False, True):
            model = replica_exact(convnet())
            model.compile(_sgd(), _loss(), jit_compile=True)
            before = _weights(model)
            resume = Resume(directory, save_freq=1)
            stopping = [] if ends else [keras.callbacks.LambdaCallback(on_train_batch_end=stop)]
            settings = {"epochs": EPOCHS, "shuffle": False, "verbose": 0}
            with contextlib.suppress(Stopped):
                model.fit(resume.track(_data()), callbacks=[resume, *stopping], **settings)
    return [before, _weights(model)]


def _weights(model: Any) -> np.ndarray:
    return np.concatenate([np.ravel(weight) for weight in model.get_weights()]).astype("float64")


def _ours() -> dict[str, Callable[[], list]]:
    from kdpkit.training import replica_exact

    return {
        "convnet, fit": lambda: _fit(replica_exact(convnet()), _data()),
        "convnet, stopped and resumed": _resume,
        "convnet, three steps a call": lambda: _fit(
            replica_exact(convnet()), _data(), steps_per_execution=3
        ),
        "BERT, without logits": _masked_lm,
        "BERT, without logits, with remat": functools.partial(_masked_lm, remat=True),
    }


def _stock() -> dict[str, Callable[[], list]]:
    settings = {"policy": "float32", "dropout": 0.0}
    return {
        "convnet": lambda: _fit(convnet(), _data()),
        "BERT": lambda: _fit(bert.plain_model_of(BERT, **settings), _bert_data()),
    }


def main(whose: str, file: str) -> None:
    """Train, and write the weights before and after; where one way fails, the others go on."""
    import traceback

    import jax

    jax.config.update("jax_default_matmul_precision", "highest")
    weights, failed = {}, 0
    for name, train in (_stock() if whose == "stock" else _ours()).items():
        try:
            weights[name] = np.stack(train())
        except Exception:  # the next one may work, and the device is there for minutes
            traceback.print_exc()
            failed = 1
        np.savez(file, **weights)
    sys.exit(failed)


if __name__ == "__main__":
    main(*sys.argv[1:])
