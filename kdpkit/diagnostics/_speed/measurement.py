"""Where the time of a training step goes, and the edit that saves most of it."""

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kdpkit import _checks, _processes
from kdpkit.diagnostics import _batch, _speed_callbacks, _speed_edits, _speed_runs, _tpu_step
from kdpkit.diagnostics._python_time import PythonWatch
from kdpkit.diagnostics._speed_edits import Trial
from kdpkit.diagnostics._speed_report import SpeedEdit, SpeedReport, milliseconds
from kdpkit.diagnostics._speed_runs import Run

_RUNS = 20  # about, into which the time is divided
_PIPELINE_RUNS = 4  # of these, for the pipeline alone
_LARGE = 0.2  # of a step: waiting and the host's part are then what is to be mended


def check_speed(
    dataset: Any,
    *,
    model: Any,
    callbacks: Any = (),
    batch_size: int | None = None,
    seconds: float = 20.0,
) -> SpeedReport:
    """Train for a moment, tell where the time of a step goes, and which edit to try first.

    Three things are measured in turns: training as it is; the same step on one batch held in
    memory, with the callbacks and without them; and that step with many steps in a call, where a
    step is short. What real training takes longer than the step on the held batch is waiting for
    input. What callbacks, single calls and Python within the step add is the host's part. The rest
    is computing: on every replica of the model's strategy, its sums over replicas included. The
    verdict is `"input-bound"` or `"host-bound"` if that part is a fifth of the step or more, the
    larger of the two, and else `"compute-bound"`.

    Edits are then tried wherever they can be made from here, and their step timed beside the step
    as it is: for input a parallel `map` or `interleave`, a `prefetch`, a cache in memory, more
    `workers` of a `PyDataset`; for the host `steps_per_execution` or `steps_per_loop`, a compiled
    step in place of an eager one, training without a callback; for computing XLA. The report names
    first what makes a step shortest (of two that are alike the one that needs no memory), and what
    it could not try last.

    Nothing is trained: weights, optimizer, metrics, random states of layers and `model.history` are
    afterwards what they were, a model or an optimizer that was not built is built, and the epoch
    of a `train_pipeline` or an `ArrayBatches` does not move. Optimizers that a model keeps beside
    `model.optimizer` must be built. As with
    `kdpkit.pipelines.measure`, `Dataset.shuffle` draws some orders, and caches are filled as
    training would fill them. Copies of the callbacks that act on batches are called as in training,
    and may write what they write there; Keras' and kdpkit's own that save or log are left out, and
    noted. A dataset that never shows its steady speed in this time (a large cache that fills, a
    large shuffle buffer) is measured as in the first part of its first epoch.

    Args:
        dataset: What `fit` trains on: as for `check_tpu`, but for generators.
        model: A compiled model, or a `kdpkit.training.TrainingLoop`; on one device or on several
            replicas, in one process.
        callbacks: Those of `fit`.
        batch_size: Rows in the batches that `fit` cuts arrays into; None takes 32, as Keras.
        seconds: About how long to measure, without compiling, and longer where some steps take
            longer.

    Returns:
        The report, with `verdict`, the parts of a step, `evidence`, `edits`, `clean`, `to_dict()`.

    Raises:
        ValueError: No model or one that is not compiled, data that give no batch or are a
            generator, several processes, parameter servers, or training that fails.

    >>> import keras
    >>> from kdpkit import testing
    >>> model = testing.tiny_classifier()
    >>> model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    >>> report = check_speed(testing.toy_classification(64), model=model, seconds=1.0)
    >>> report.verdict in ("input-bound", "compute-bound", "host-bound")
    True
    >>> round(sum(report.shares.values()), 6), int(model.optimizer.iterations)
    (1.0, 0)
    """
    seconds = _checks.number("seconds", seconds, above=0)
    _refuse_what_cannot_be_measured(dataset, model)
    first = _batch.batches_of(dataset, batch_size).first
    with contextlib.ExitStack() as undisturbed:
        undisturbed.enter_context(_batch.random_numbers_kept())
        with _failing_in_a_sentence():
            trainer = _speed_runs.Trainer(model, first, batch_size)
        undisturbed.enter_context(trainer.unchanged())
        if _batch.is_tf_dataset(dataset):
            from kdpkit.pipelines import _measure  # TensorFlow is there

            undisturbed.enter_context(_measure.undisturbed(dataset))
        return _Measurement(dataset, trainer, callbacks, seconds / _RUNS).report()


def _refuse_what_cannot_be_measured(dataset: Any, model: Any) -> None:
    if model is None:
        _checks.refuse(
            "A step's time needs a model that trains on the dataset.",
            model=model,
            remedy="Give a compiled model or a `TrainingLoop`; `kdpkit.pipelines.measure` times a "
            "`tf.data` pipeline alone.",
        )
    _tpu_step.check_model(model)
    if _batch.is_generator(dataset):
        _checks.refuse(
            "A generator gives each batch once, so it cannot be measured and then trained on.",
            dataset=type(dataset).__name__,
            remedy="Give a dataset that can be begun again, such as a `keras.utils.PyDataset` or a "
            "`tf.data.Dataset`.",
        )
    strategy = getattr(_tpu_step.model_of(model), "distribute_strategy", None)
    is_served = type(strategy).__name__.startswith("ParameterServer")
    if is_served or _processes.count() > 1:
        _checks.refuse(
            "The speed of one process is measured, on one device or several.",
            strategy=type(strategy).__name__,
            processes=_processes.count(),
            remedy="Measure one of them alone, with its share of the batch.",
        )


class _Measurement:
    """One measurement: the parts of a step first, and then the edits that bear on the largest."""

    def __init__(
        self, dataset: Any, trainer: _speed_runs.Trainer, callbacks: Any, seconds: float
    ) -> None:
        self._dataset = dataset
        self._trainer = trainer
        self._seconds = seconds  # of each run
        self._callbacks, writing = _speed_callbacks.acting_on_steps(callbacks)
        self._notes = [_speed_callbacks.left_out(writing)] if writing else []
        self._watch: PythonWatch | None = None

    def report(self) -> SpeedReport:
        """Measure."""
        base = {"real": self._real, "called": self._called, "held": self._held}
        if not self._callbacks:
            del base["called"]
        first = self._begun(base)
        self._watch = PythonWatch()  # from here on: the first steps are traced, which is Python
        host = self._working(_speed_edits.of_host(self._trainer, first["held"], self._callbacks))
        steps = _speed_runs.in_turns(base | self._runs(host))
        steps.setdefault("called", steps["held"])
        parts = self._parts(steps, host)
        verdict = _verdict(parts)
        real = steps["real"]
        found = [_edit(trial, steps, real) for trial in host]
        pipeline = self._pipeline()
        if verdict == "input-bound":
            found += self._tried(_speed_edits.of_input(self._dataset, self._real), base, real)
            found += _speed_edits.untried_of_input(self._dataset)
        elif verdict == "compute-bound":
            found += self._tried(_speed_edits.of_computing(self._trainer), base, real)
            found += _speed_edits.untried_of_computing(self._trainer)
        elif self._python(steps) >= _LARGE * real:
            found.append(_speed_edits.without_python(self._watch, self._python(steps), real))
        return SpeedReport(
            verdict,
            sum(parts.values()),
            parts["waiting"],
            parts["computing"],
            parts["host"],
            evidence=tuple(self._evidence(steps, pipeline)),
            edits=_speed_edits.ranked(found, verdict),
            notes=(*self._notes, *_speed_edits.without_gain(found)),
            pipeline=pipeline,
        )

    # The runs.

    def _real(self, data: Any = None) -> float:
        data = self._dataset if data is None else data
        return self._trainer.seconds_per_step(data, self._seconds, self._callbacks)

    def _called(self) -> float:
        return self._trainer.seconds_per_step(self._trainer.held, self._seconds, self._callbacks)

    def _held(self) -> float:
        return self._trainer.seconds_per_step(self._trainer.held, self._seconds, watch=self._watch)

    def _runs(self, trials: Iterable[Trial]) -> dict[Any, Run]:
        return {trial: functools.partial(trial.run, self._seconds) for trial in trials}

    def _begun(self, runs: Mapping[str, Run]) -> dict[str, float]:
        """Make every run once, so that all is compiled."""
        with _failing_in_a_sentence():
            return {name: run() for name, run in runs.items()}

    def _working(self, trials: Iterable[Trial]) -> list[Trial]:
        """Give the trials that can be made, each made once."""
        working = []
        for trial in trials:
            try:
                trial.run(self._seconds)
                working.append(trial)
            except Exception as error:  # an edit may not suit the model, for any reason
                self._notes.append(
                    f"This could not be tried: {trial.text} {_tpu_step.reason_of(error)}"
                )
        return working

    def _tried(
        self, trials: Iterable[Trial], base: Mapping[str, Run], real: float
    ) -> list[SpeedEdit]:
        working = self._working(trials)
        beside = {trial.beside: base[trial.beside] for trial in working}
        steps = _speed_runs.in_turns({**beside, **self._runs(working)})
        return [_edit(trial, steps, real) for trial in working]

    # What they say.

    def _python(self, steps: Mapping[Any, float]) -> float:
        """Give the time of the user's Python in a step, without callbacks."""
        return self._watch.share * steps["held"] if self._watch else 0.0

    def _parts(self, steps: Mapping[Any, float], host: list[Trial]) -> dict[str, float]:
        """Divide the time of a step."""
        real, called, held = (steps[name] for name in ("real", "called", "held"))
        saved = [held - steps[trial] for trial in host if trial.beside == "held"]
        calls = max([0.0, held - called, self._python(steps), *saved])
        of_callbacks = max(0.0, called - held)
        waiting = max(0.0, real - called)
        return {
            "waiting": waiting,
            "computing": max(0.0, held - calls),
            "host": of_callbacks + calls,
        }

    def _pipeline(self) -> Any:
        if not _batch.is_tf_dataset(self._dataset):
            return None
        from kdpkit import pipelines  # TensorFlow is there

        return pipelines.measure(self._dataset, seconds=_PIPELINE_RUNS * self._seconds)

    def _evidence(self, steps: Mapping[Any, float], pipeline: Any) -> Iterator[str]:
        real, called, held = (steps[name] for name in ("real", "called", "held"))
        yield (
            f"Real training makes {_rate(real)} steps/s; on one batch held in memory it makes "
            f"{_rate(called)}."
        )
        if self._callbacks:
            yield (
                f"Without {_speed_callbacks.names_of(self._callbacks)} a step on that batch takes "
                f"{milliseconds(held)} in place of {milliseconds(called)}."
            )
        if self._watch and self._python(steps) >= _LARGE * held:
            yield (
                f"Python of yours runs in {self._watch.share:.0%} of the step's time, most of it "
                f"in {self._watch.longest}."
            )
        if pipeline:
            slowest = f"; its slowest stage is `{pipeline.slowest}`" if pipeline.slowest else ""
            yield f"The pipeline alone gives {pipeline.batches_per_second:,.1f} batches/s{slowest}."


@contextlib.contextmanager
def _failing_in_a_sentence() -> Iterator[None]:
    """Refuse what cannot be trained at all."""
    try:
        yield
    except _checks.InputError:
        raise
    except Exception as error:  # training runs the user's code, which may raise anything
        raise _checks.InputError(
            f"The training fails, so it has no speed: {_tpu_step.reason_of(error)}"
        ) from error


def _verdict(parts: Mapping[str, float]) -> str:
    whole = sum(parts.values())
    worst = max(("waiting", "host"), key=lambda name: parts[name])
    if parts[worst] < _LARGE * whole:
        return "compute-bound"
    return {"waiting": "input-bound", "host": "host-bound"}[worst]


def _edit(trial: Trial, steps: Mapping[Any, float], real: float) -> SpeedEdit:
    """Give what a step of the real training takes with an edit, from the step it was tried beside.

    What is saved of a step on a held batch is saved of a real one too.
    """
    beside, with_it = steps[trial.beside], steps[trial]
    scaled = real * with_it / beside
    seconds = scaled if trial.beside == "real" else max(scaled, real - beside + with_it)
    return SpeedEdit(trial.part, trial.text, seconds, real / seconds, needs_memory=trial.memory)


def _rate(seconds: float) -> str:
    return f"{1 / seconds:,.1f}"
