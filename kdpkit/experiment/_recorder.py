"""What a recipe writes: a line for each epoch, its results, and its model."""

import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from kdpkit import callbacks, scaling
from kdpkit._internal import processes, storage
from kdpkit.experiment import _first_steps, _strategy

# What callbacks add, as the line of an epoch has it, in which one speed is enough.
_SPEEDS = {"tokens_per_second": "tokens/s", "examples_per_second": "examples/s"}
_SHORT = {"learning_rate": "lr"} | _SPEEDS


class Recorder(keras.callbacks.Callback):
    """Keeps the results of training in `args.results`, and has the callbacks for it.

    Its `callbacks` are for `fit`: itself, those of `kdpkit.callbacks.training_callbacks`, and with
    `--resume` `kdpkit.callbacks.Resume`, for which `resumed(data)` returns the data to train on.
    The results are written after each epoch, before other callbacks write, which may fill the disk.
    `results(test=...)` adds those of the test, saves the model in `args.log_dir`, and returns all.
    It also prints what `compare_first_steps` has found.

    Its `verbose` is for `fit` too: 1 in a terminal and in a notebook, where Keras shows a bar.
    Elsewhere, as in the log of a batch job, it is 0, and the first process prints one line for each
    epoch, with its time, metrics and speed.

    Args:
        args: The recipe's flags.
        model: The model that is trained.
        strategy: What `strategy_from` returned.
        plan: What `plan_from` returned.
        tokens_per_example: As for `training_callbacks`.
        accumulation: Batches of an update, if the optimizer accumulates gradients: each has a part
            of the plan's examples.
    """

    def __init__(
        self,
        args: Namespace,
        model: keras.Model,
        strategy: _strategy.Strategy,
        plan: scaling.ScalePlan,
        *,
        tokens_per_example: float | None = None,
        accumulation: int = 1,
    ) -> None:
        super().__init__()
        self.set_model(model)
        self._args, self._strategy, self._plan = args, strategy, plan
        self._metrics: dict[str, float] = {}  # of the epoch, without what callbacks add
        self._epoch_began = 0.0
        self._first_steps = ""
        self.verbose = int(sys.stdout.isatty() or "ipykernel" in sys.modules)
        self.resume = callbacks.Resume(args.resume, verbose=1) if args.resume else None
        self.callbacks: list[keras.callbacks.Callback] = [
            self,
            *callbacks.training_callbacks(
                args.log_dir,
                global_batch_size=plan.global_batch_size // accumulation,
                tokens_per_example=tokens_per_example,
                verbose=0,
            ),
            *([self.resume] if self.resume else []),
        ]
        if not self.verbose and processes.index() == 0:
            self.callbacks += [keras.callbacks.LambdaCallback(on_epoch_end=self._print_epoch)]

    def compare_first_steps(self, build: Callable[[], keras.Model], train: Any) -> None:
        """Train copies of the model for three steps, on one device and on all; `results` compares.

        The copies begin with the model's weights, and are dropped. Nothing is trained if there is
        one replica, or if there are several processes.

        Args:
            build: Returns a compiled model like this one, with its variables.
            train: The batches to train on, of which the first three are used.
        """
        if self._strategy.num_replicas_in_sync > 1 and processes.count() == 1:
            self._first_steps = _first_steps.compared(self.model, build, train, self._strategy)

    def resumed(self, train: Any) -> Any:
        """Return data for `fit` that go on where the last run stopped, with `--resume`."""
        return self.resume.track(train) if self.resume else train

    def results(self, test: Mapping[str, float] | None = None) -> dict[str, Any]:
        """Print the metrics of the test, write the results to `--results` as JSON, return them.

        They have the `history` of `fit`; `test`, the metrics of `evaluate(return_dict=True)`; with
        `Throughput` the means of `examples_per_second` and `tokens_per_second` over the epochs; and
        `replicas`, `strategy`, `global_batch_size`, `steps` (of the optimizer) and `versions`. NaN
        and infinity, which JSON does not have, are `null` in the file. Of several processes only
        the first one writes, but all must call this, since each may hold parts of the model.

        With `--log-dir` the model is then saved there, as `model.keras`, complete or not at all.
        """
        results = self._write(self.model.history.history, test or {})
        is_first = processes.index() == 0
        if test and is_first:
            print(_line("Test", test))
        directory = self._args.log_dir
        if directory is not None:
            _save(self.model, directory / "model.keras")
        if directory is not None and is_first:
            print(f"Model: {directory}/model.keras; plots: tensorboard --logdir {directory}")
        if self._first_steps:
            print(self._first_steps)
        return results

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        del epoch, logs
        self._epoch_began = time.monotonic()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        del epoch
        self._metrics = dict(logs or {})
        before = self.model.history.history
        history = {name: [*before.get(name, ()), value] for name, value in self._metrics.items()}
        self._write({**before, **history}, {})

    def _print_epoch(self, epoch: int, logs: Mapping[str, float]) -> None:
        seconds = time.monotonic() - self._epoch_began
        speeds = [name for name in _SPEEDS if name in logs][:1]
        shown = [name for name in ("learning_rate", *speeds) if name in logs]
        added = {_SHORT[name]: logs[name] for name in shown}
        title = f"Epoch {epoch + 1}/{self.params['epochs']} - {seconds:.0f}s"
        print(_line(title, self._metrics | added), flush=True)

    def _write(self, history: Mapping[str, Any], test: Mapping[str, float]) -> dict[str, Any]:
        results = {
            "history": history,
            "test": test,
            # Epochs do equal work, so that the mean speed is the total work over the total time.
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
            with storage.replacing(self._args.results) as temporary:
                temporary.write_text(json.dumps(finite, indent=2) + "\n", encoding="utf-8")
        return dict(json.loads(text))


def _line(title: str, numbers: Mapping[str, float]) -> str:
    """Format numbers nearly as Keras' progress line has them, with the loss first."""
    texts = {name: _short(number) for name, number in numbers.items()}
    for name in [name for name in texts if f"val_{name}" in texts]:
        texts[name] += f" (val {texts.pop(f'val_{name}')})"
    names = sorted(texts, key=lambda name: name != "loss")  # Keras sorts by the alphabet
    return " - ".join([title, *(f"{name}: {texts[name]}" for name in names)])


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:#.3g}".removesuffix(".")


def _save(model: keras.Model, path: os.PathLike[str]) -> None:
    """Save a model atomically; of several processes the first one's file is kept."""
    with contextlib.ExitStack() as stack:
        if keras.backend.backend() == "jax":
            from kdpkit import sharding

            stack.enter_context(sharding.gathered_on_read(model))
        if processes.index() > 0:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory()), Path(path).name)
        model.save(stack.enter_context(storage.replacing(path)))


def versions() -> dict[str, str]:
    backend = keras.backend.backend()
    packages = ("kdpkit", "keras", "numpy", backend, "keras_hub", "tensorflow_text")
    loaded = [name for name in packages if name in sys.modules]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "backend": backend,
        **{name: sys.modules[name].__version__ for name in loaded},
    }
