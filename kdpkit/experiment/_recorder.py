"""What a recipe writes: its results while it trains, with its callbacks, and its model."""

import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

import kdpkit
from kdpkit import callbacks, scaling
from kdpkit._internal import atomic_files, processes
from kdpkit.experiment import _strategy

_SPEEDS = ("examples_per_second", "tokens_per_second")


class Recorder(keras.callbacks.Callback):
    """Keeps the results of training in `args.results`, and has the callbacks for it.

    Its `callbacks` are for `fit`: itself, those of `kdpkit.callbacks.training_callbacks` (with
    `settings` such as `tokens_per_example`), and with `--resume` `kdpkit.callbacks.Resume`, for
    which `resumed(data)` returns the data to train on. The results are written after each epoch,
    before other callbacks write, which may fill the disk. `results(test=...)` adds those of the
    test, and returns all.
    """

    def __init__(
        self,
        args: Namespace,
        model: keras.Model,
        strategy: _strategy.Strategy,
        plan: scaling.ScalePlan,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.set_model(model)
        self._args, self._strategy, self._plan = args, strategy, plan
        self.resume = callbacks.Resume(args.resume) if args.resume else None
        usual = {"global_batch_size": plan.global_batch_size} | settings
        self.callbacks: list[keras.callbacks.Callback] = [
            self,
            *callbacks.training_callbacks(args.log_dir, **usual),
            *([self.resume] if self.resume else []),
        ]

    def resumed(self, train: Any) -> Any:
        """Return data for `fit` that go on where the last run stopped, with `--resume`."""
        return self.resume.track(train) if self.resume else train

    def results(self, test: Mapping[str, float] | None = None) -> dict[str, Any]:
        """Write the results to `--results` as JSON, and return them.

        They have the `history` of `fit`; `test`, the metrics of `evaluate(return_dict=True)`; with
        `Throughput` the means of `examples_per_second` and `tokens_per_second` over the epochs; and
        `replicas`, `strategy`, `global_batch_size`, `steps` (of the optimizer) and `versions`. NaN
        and infinity, which JSON does not have, are `null` in the file. Of several processes only
        the first one writes.
        """
        return self._write(self.model.history.history, test or {})

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        del epoch
        before = self.model.history.history
        history = {name: [*before.get(name, ()), value] for name, value in (logs or {}).items()}
        self._write({**before, **history}, {})

    def _write(self, history: Mapping[str, Any], test: Mapping[str, float]) -> dict[str, Any]:
        results = {
            "history": history,
            "test": test,
            # Of epochs of equal work: total work over total time.
            **{
                name: statistics.harmonic_mean(history[name]) for name in _SPEEDS if name in history
            },
            "replicas": self._strategy.num_replicas_in_sync,
            "strategy": _strategy.describe(self._strategy),
            "global_batch_size": self._plan.global_batch_size,
            "steps": keras.ops.convert_to_numpy(self.model.optimizer.iterations),
            "versions": versions(),
        }
        text = json.dumps(results, default=lambda value: np.asarray(value).tolist())
        if self._args.results is not None and processes.index() == 0:
            finite = json.loads(text, parse_constant=lambda _: None)
            with atomic_files.replacing(self._args.results) as temporary:
                temporary.write_text(json.dumps(finite, indent=2) + "\n", encoding="utf-8")
        return dict(json.loads(text))


def save_model(model: keras.Model, path: str | os.PathLike[str]) -> None:
    """Save a model atomically, for example as `model.keras` or `gs://bucket/model.keras`.

    All processes must call this, since each may hold parts of the model; the first one's file is
    kept.
    """
    with contextlib.ExitStack() as stack:
        if keras.backend.backend() == "jax":
            from kdpkit import sharding

            stack.enter_context(sharding.gathered_on_read(model))
        if processes.index() > 0:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory()), Path(path).name)
        model.save(stack.enter_context(atomic_files.replacing(path)))


def versions() -> dict[str, str]:
    """Return the versions of Python, kdpkit, Keras, the backend and the platform.

    >>> sorted(versions())
    ['backend', ...'kdpkit', 'keras', ...'numpy', 'platform', 'python'...]
    """
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
