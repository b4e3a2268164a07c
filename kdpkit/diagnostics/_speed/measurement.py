"""Where the time of a training step goes, and the edit that saves most of it."""

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kdpkit import errors
from kdpkit._internal import checks, processes
from kdpkit.diagnostics import _batch, _text, _training_step
from kdpkit.diagnostics._speed import speed_edits, step_callbacks, trial_runs
from kdpkit.diagnostics._speed.speed_edits import Trial
from kdpkit.diagnostics._speed.speed_report import SpeedEdit, SpeedReport, milliseconds

if TYPE_CHECKING:
    from kdpkit.pipelines._measure import PipelineReport

_RUNS = 20  # about, into which the time is divided
_PIPELINE_RUNS = 4  # of these, for the pipeline alone
_LARGE = 0.2  # of a step: waiting and the host's part are then what to shorten

Steps = Mapping[str | Trial, float]  # seconds of a step in each run


def check_speed(
    dataset: Any,
    *,
    model: Any,
    callbacks: Any = (),
    batch_size: int | None = None,
    seconds: float = 20.0,
) -> SpeedReport:
    """Train for a moment, and report where the time of a step goes and which edit to try first.

    Real training is timed beside the same step on one batch held in memory, with the callbacks and
    without them. What real training takes longer is waiting for input; what callbacks and single
    calls add is the host's part; the rest is computing. The verdict is `"input-bound"` or
    `"host-bound"` if that part is a fifth of the step or more, the larger of the two, and else
    `"compute-bound"`. Edits that may shorten that part are then tried where possible, and timed.

    Nothing is trained: weights, optimizer, metrics, random states of layers and `model.history` are
    afterwards what they were, and the epoch of a `train_pipeline` or an `ArrayBatches` does not
    move; but a model or an optimizer that was not built is built, `Dataset.shuffle` draws some
    orders, and caches are filled. Copies of the callbacks that act on batches are called as in
    training; Keras' and kdpkit's own that save or log are left out, and noted.

    Args:
        dataset: What `fit` trains on: as for `check_tpu`, except generators.
        model: A compiled model, or a `kdpkit.training.TrainingLoop`; on one device or on several
            replicas, in one process.
        callbacks: Those of `fit`.
        batch_size: Examples in the batches that `fit` cuts arrays into; None takes 32, as Keras.
        seconds: About how long to measure, without compiling, and longer where some steps take
            longer.

    Raises:
        ValueError: No model or one that is not compiled, data that have no batch or are a
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
    seconds = checks.number("seconds", seconds, above=0)
    _check(dataset, model)
    first = _batch.batches_of(dataset, batch_size).first
    with contextlib.ExitStack() as undisturbed:
        undisturbed.enter_context(_batch.random_numbers_kept())
        with _failing_in_a_sentence():
            trainer = trial_runs.Trainer(model, first, batch_size)
        undisturbed.enter_context(trainer.unchanged())
        if _batch.is_tf_dataset(dataset):
            from kdpkit.pipelines import _measure  # TensorFlow is there

            undisturbed.enter_context(_measure.undisturbed(dataset))
        return _Measurement(dataset, trainer, callbacks, seconds / _RUNS).report()


def _check(dataset: Any, model: Any) -> None:
    if model is None:
        checks.fail(
            "A step's time needs a model that trains on the dataset.",
            model=model,
            remedy="Pass a compiled model or a `TrainingLoop`; `kdpkit.pipelines.measure` times a "
            "`tf.data` pipeline alone.",
        )
    _training_step.check_model(model)
    if _batch.is_generator(dataset):
        checks.fail(
            "A generator yields each batch once, so it cannot be measured and then trained on.",
            dataset=type(dataset).__name__,
            remedy="Use a dataset that can be iterated again: a `keras.utils.PyDataset` or "
            "a `tf.data.Dataset`.",
        )
    strategy = getattr(_training_step.model_of(model), "distribute_strategy", None)
    is_served = type(strategy).__name__.startswith("ParameterServer")
    if is_served or processes.count() > 1:
        checks.fail(
            "The speed of one process is measured, on one device or several.",
            strategy=type(strategy).__name__,
            processes=processes.count(),
            remedy="Measure one of them alone, with its part of the batch.",
        )


class _Measurement:
    """One measurement: the parts of a step first, then the edits that shorten the largest."""

    def __init__(
        self, dataset: Any, trainer: trial_runs.Trainer, callbacks: Any, seconds: float
    ) -> None:
        self._dataset = dataset
        self._trainer = trainer
        self._seconds = seconds  # of each run
        self._callbacks, writing = step_callbacks.acting_on_steps(callbacks)
        self._notes = []
        if writing:
            names = step_callbacks.names_of(writing)
            self._notes.append(f"{names} may save or log at steps, and was left out.")
        held = functools.partial(trainer.seconds_per_step, trainer.held, seconds)
        self._base: dict[str, trial_runs.Run] = {
            "real": functools.partial(self._real, dataset),
            "called": functools.partial(held, self._callbacks),
            "held": held,
        }
        if not self._callbacks:
            del self._base["called"]

    def report(self) -> SpeedReport:
        """Measure the parts of a step, try edits that shorten the largest, and report both."""
        with _failing_in_a_sentence():  # once, so that all is compiled
            first = {name: run() for name, run in self._base.items()}
        host = speed_edits.of_host(self._trainer, first["held"], self._callbacks)
        steps = self._timed(host, self._base)
        steps.setdefault("called", steps["held"])
        parts = _parts(steps)
        verdict = _verdict(parts)
        edits = _edits(steps, steps["real"])
        if verdict == "input-bound":
            edits += self._tried(speed_edits.of_input(self._dataset, self._real), steps["real"])
        elif verdict == "compute-bound":
            edits += self._tried(speed_edits.of_computing(self._trainer), steps["real"])
            self._notes += speed_edits.untried(self._trainer)
        pipeline = self._pipeline()
        return SpeedReport(
            verdict,
            sum(parts.values()),
            parts["waiting"],
            parts["computing"],
            parts["host"],
            evidence=tuple(self._evidence(steps, pipeline)),
            edits=speed_edits.ranked(edits),
            notes=(*self._notes, *speed_edits.without_gain(edits)),
            pipeline=pipeline,
        )

    def _real(self, data: Any) -> float:
        return self._trainer.seconds_per_step(data, self._seconds, self._callbacks)

    def _tried(self, trials: Iterable[Trial], real: float) -> list[SpeedEdit]:
        trials = [*trials]
        beside = {trial.beside: self._base[trial.beside] for trial in trials}
        return _edits(self._timed(trials, beside), real)

    def _timed(
        self, trials: Iterable[Trial], base: Mapping[str, trial_runs.Run]
    ) -> dict[str | Trial, float]:
        """Time the trials that can be made, each made once before, alternating with other runs."""
        runs: dict[str | Trial, trial_runs.Run] = dict(base.items())
        for trial in trials:
            try:
                trial.run(self._seconds)
                runs[trial] = functools.partial(trial.run, self._seconds)
            except Exception as error:  # an edit may not suit the model, for any reason
                reason = _text.reason_of(error)
                self._notes.append(f"This could not be tried: {trial.text} {reason}")
        return trial_runs.alternating(runs)

    def _pipeline(self) -> "PipelineReport | None":
        if not _batch.is_tf_dataset(self._dataset):
            return None
        from kdpkit import pipelines  # TensorFlow is there

        return pipelines.measure(self._dataset, seconds=_PIPELINE_RUNS * self._seconds)

    def _evidence(self, steps: Steps, pipeline: "PipelineReport | None") -> Iterator[str]:
        real, called, held = (steps[name] for name in ("real", "called", "held"))
        yield (
            f"Real training makes {1 / real:,.1f} steps/s; on one batch held in memory it makes "
            f"{1 / called:,.1f}."
        )
        if self._callbacks:
            yield (
                f"Without {step_callbacks.names_of(self._callbacks)} a step on that batch takes "
                f"{milliseconds(held)} instead of {milliseconds(called)}."
            )
        if pipeline:
            slowest = f"; its slowest stage is `{pipeline.slowest}`" if pipeline.slowest else ""
            yield f"The pipeline alone makes {pipeline.batches_per_second:,.1f} batches/s{slowest}."


def _parts(steps: Steps) -> dict[str, float]:
    """Divide the time of a step."""
    real, called, held = (steps[name] for name in ("real", "called", "held"))
    fewer_calls = [
        seconds
        for trial, seconds in steps.items()
        if isinstance(trial, Trial) and trial.beside == "held"
    ]
    calls = max(0.0, *(held - seconds for seconds in [called, *fewer_calls]))
    return {
        "waiting": max(0.0, real - called),
        "computing": max(0.0, held - calls),
        "host": max(0.0, called - held) + calls,
    }


def _verdict(parts: Mapping[str, float]) -> str:
    worst = max(("waiting", "host"), key=lambda name: parts[name])
    if parts[worst] < _LARGE * sum(parts.values()):
        return "compute-bound"
    return {"waiting": "input-bound", "host": "host-bound"}[worst]


def _edits(steps: Steps, real: float) -> list[SpeedEdit]:
    """Return what a step of real training takes with each edit, from the steps it was tried beside.

    What is saved of a step on a held batch is saved of a real one too.
    """
    edits = []
    for trial, with_it in steps.items():
        if isinstance(trial, Trial):
            beside = steps[trial.beside]
            scaled = real * with_it / beside
            seconds = scaled if trial.beside == "real" else max(scaled, real - beside + with_it)
            edits.append(SpeedEdit(trial.part, trial.text, seconds, real / seconds, trial.memory))
    return edits


@contextlib.contextmanager
def _failing_in_a_sentence() -> Iterator[None]:
    """Turn an error of the training into an `InputError`."""
    try:
        yield
    except errors.InputError:
        raise
    except Exception as error:  # training runs the user's code, which may raise anything
        raise errors.InputError(
            f"The training fails, so it has no speed: {_text.reason_of(error)}"
        ) from error
