"""The results of a recipe: a dictionary of plain values, and the trained model."""

import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

import kdpkit
from kdpkit._internal import atomic_files
from kdpkit.experiment._strategy import Strategy, describe

if TYPE_CHECKING:
    import keras


def results_of(
    model: "keras.Model",
    history: "keras.callbacks.History",
    *,
    strategy: Strategy,
    global_batch_size: int,
    test: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return the results of a recipe as a dictionary of plain values.

    Args:
        model: The trained model; its optimizer has the number of `steps`.
        history: The return value of `fit`. With the callbacks `LearningRateLogger` and `Throughput`
            the results include `learning_rates`, those of each epoch's last step, and
            `examples_per_second` and `tokens_per_second`, means over the epochs.
        strategy: The strategy used for training.
        global_batch_size: Examples in one step, over all replicas.
        test: Test metrics, as from `evaluate(..., return_dict=True)`.
    """
    import keras

    epochs = _plain(history.history)
    results = {
        "history": epochs,
        "test": _plain(test or {}),
        "learning_rates": epochs.get("learning_rate", []),
        "examples_per_second": _mean_speed(epochs.get("examples_per_second")),
        "replicas": strategy.num_replicas_in_sync,
        "strategy": describe(strategy),
        "global_batch_size": global_batch_size,
        "steps": int(keras.ops.convert_to_numpy(model.optimizer.iterations)),
        "schedule": _schedule_of(model.optimizer),
        "versions": versions(),
    }
    if "tokens_per_second" in epochs:
        results["tokens_per_second"] = _mean_speed(epochs["tokens_per_second"])
    return results


def _schedule_of(optimizer: "keras.optimizers.Optimizer") -> Mapping[str, Any] | None:
    """Return the learning-rate schedule as Keras serializes it; None for a plain rate."""
    from kdpkit._internal import optimizers

    rate = optimizers.wrapped(optimizer).get_config().get("learning_rate")
    return rate if isinstance(rate, Mapping) else None


def _mean_speed(speeds: list[float] | None) -> float | None:
    """Average the speed over epochs of equal work, as total work over total time."""
    return statistics.harmonic_mean(speeds) if speeds else None


def save_model(model: "keras.Model", path: str | os.PathLike[str]) -> None:
    """Save a model atomically, for example as `model.keras` or `gs://bucket/model.keras`.

    All processes must call this, since each may hold parts of the model; the first one's file is
    kept.
    """
    with atomic_files.replacing_in_first_process(path) as temporary:
        model.save(temporary)


def versions() -> dict[str, str]:
    """Return the versions of Python, kdpkit, Keras, the backend and the platform.

    >>> sorted(versions())
    ['backend', ...'kdpkit', 'keras', ...'numpy', 'platform', 'python'...]
    """
    import keras

    backend = keras.backend.backend()
    packages = ["keras", "numpy", backend]
    packages += [name for name in ("keras_hub", "tensorflow_text") if name in sys.modules]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "kdpkit": kdpkit.__version__,
        "backend": backend,
        **{name: sys.modules[name].__version__ for name in packages},
    }


def write_results(path: str | os.PathLike[str] | None, results: Mapping[str, Any]) -> None:
    """Write the results as JSON, atomically, creating directories; None writes nothing.

    Arrays and numbers of NumPy, TensorFlow and JAX become plain values. NaN and infinity, which
    JSON does not have, become `null`. Other values are written as their `str`, because the run is
    already over. With several processes only the first one writes.

    Raises:
        OSError: The file cannot be written. A path from `--results` is tried before the run.
    """
    from kdpkit._internal import processes

    if path is None or processes.index() > 0:
        return
    finite = _plain(results, parse_constant=lambda _: None)
    text = json.dumps(finite, indent=2, allow_nan=False)
    with atomic_files.replacing(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def _plain(value: Any, **decoding: Any) -> Any:
    """Return a JSON value: arrays and numbers of any library as Python values."""
    return json.loads(json.dumps(value, default=_of_another_type), **decoding)


def _of_another_type(value: Any) -> Any:
    return np.asarray(value).tolist() if hasattr(value, "__array__") else str(value)
