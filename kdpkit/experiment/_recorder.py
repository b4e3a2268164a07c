"""The results file and Ctrl-C, while a recipe trains."""

# ruff: noqa: ARG002 Keras calls its hooks with arguments

import contextlib
import json
import os
import signal
import statistics
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from kdpkit import callbacks, scaling
from kdpkit._internal import atomic_files, processes, signal_handlers
from kdpkit.experiment import _files, _strategy

_SPEEDS = ("examples_per_second", "tokens_per_second")


class Recorder(keras.callbacks.Callback):
    """Writes the results of each epoch, and ends training between two steps on Ctrl-C.

    It raises the `KeyboardInterrupt` before the next training step. During validation it is at its
    end, which comes with the current batch, as on JAX an exception inside `evaluate` would destroy
    the weights. It does not set `stop_training`: Keras would then validate, and checkpointing
    callbacks would take the epoch for complete.
    """

    def __init__(self, args: Namespace, strategy: _strategy.Strategy, plan: scaling.ScalePlan):
        super().__init__()
        self.stopped = False  # at a point where the model is complete
        self._asked = self._training = False
        self._args, self._strategy, self._plan = args, strategy, plan
        self.resume = callbacks.Resume(args.resume) if args.resume else None
        self.callbacks: list[keras.callbacks.Callback] = [self]

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
            "versions": _files.versions(),
        }
        text = json.dumps(results, default=lambda value: np.asarray(value).tolist())
        if self._args.results is not None and processes.index() == 0:
            finite = json.loads(text, parse_constant=lambda _: None)
            with atomic_files.replacing(self._args.results) as temporary:
                temporary.write_text(json.dumps(finite, indent=2) + "\n", encoding="utf-8")
        return dict(json.loads(text))

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Write what there is, before other callbacks write, which may fill the disk."""
        before = self.model.history.history
        history = {name: [*before.get(name, ()), value] for name, value in (logs or {}).items()}
        self._write({**before, **history}, {})

    def handle_signal(self, *_: object) -> None:
        """Note a Ctrl-C; raise at the second one, and where there is no training."""
        if self._asked or not self._training:
            raise KeyboardInterrupt
        self._asked = True
        # Not `print`: Keras may be writing its progress to the same buffer at this moment.
        os.write(2, b"\nCtrl-C: training ends with this step. Press it again to stop at once.\n")

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Begin to hold the first Ctrl-C back."""
        self._training = True

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Stop before the next step."""
        self._stop_if_asked()

    def on_test_batch_begin(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Let validation end with this batch."""
        if self._asked:
            self.model.stop_evaluating = True

    def on_test_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Stop before anything takes the results of a part for those of the complete validation."""
        self._stop_if_asked()

    def on_train_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Stop after training, if that is when Ctrl-C came."""
        self._training = False
        self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        if self._asked and not self.stopped:
            self.stopped = True
            raise KeyboardInterrupt

    def save_interrupted(self) -> str:
        """Save the model where its state is complete; report what was saved."""
        if not self.stopped:
            return "Nothing was saved, as it was not between two steps."
        if self._args.log_dir is None:
            return "Nothing was saved; with a log directory (--log-dir) the model would have been."
        if processes.index() > 0:
            return "The first process saves the model."
        path = self._args.log_dir / "interrupted.keras"
        _files.save_model(self.model, path)
        return f"The model as trained so far is saved as {path}."


@contextlib.contextmanager
def recording(
    args: Namespace,
    model: keras.Model,
    strategy: _strategy.Strategy,
    plan: scaling.ScalePlan,
    *,
    also: Sequence[keras.callbacks.Callback] = (),
    **settings: Any,
) -> Iterator[Recorder]:
    """Watch training, keep its results in `args.results`, and end it cleanly on Ctrl-C.

    The `with` statement returns a `record` whose `callbacks` are for `fit`: its own, those of
    `kdpkit.callbacks.training_callbacks` (with `settings` such as `tokens_per_example`), those of
    `also`, and with `--resume` `kdpkit.callbacks.Resume`, for which `record.resumed(data)` returns
    the data to train on. The results are written after each epoch, before anything else is, and in
    the end; `record.results(test=...)` adds those of the test, and returns all.

    On Ctrl-C the current step or validation batch is finished on all replicas, the model is saved
    as `interrupted.keras` in `args.log_dir` (not with None), and `KeyboardInterrupt` is raised;
    `run` turns that into exit code 130. If `Resume` saves the training state instead, the message
    names its directory. A second Ctrl-C stops at once and saves nothing. This does nothing outside
    the main thread, or if Ctrl-C was already ignored.
    """
    record = Recorder(args, strategy, plan)
    record.set_model(model)
    record.callbacks += callbacks.training_callbacks(
        args.log_dir,
        global_batch_size=plan.global_batch_size,
        **settings,
    )
    record.callbacks += [*also, *([record.resume] if record.resume else [])]
    with signal_handlers.handling(record.handle_signal, signal.SIGINT):
        try:
            yield record
        except KeyboardInterrupt as interrupt:
            message = str(interrupt)  # by `Resume`, which has saved the state of training
            print(f"\n{message or f'Training was stopped by Ctrl-C. {record.save_interrupted()}'}")
            raise
    record.results()
