"""The time of a training step, how much of it waits for input, and the slowest stage."""

import contextlib
import copy
import dataclasses
import gc
import time
from collections.abc import Iterator
from typing import Any

import keras

from kdpkit import checkpoints, errors
from kdpkit._internal import checks, processes
from kdpkit._internal.check_results import Finding, are_notes, in_order, wrapped
from kdpkit.diagnostics._doctor import batches, slow_steps, training_step

_WARM_UP = 2  # executions, after which everything is compiled and buffers have begun to fill
_LEAST = 3  # executions that are timed, however long they take
_ROUNDS = 4  # of both runs; the fastest of each counts, as others were disturbed
_ENDLESS = 10**9  # epochs, or steps: a clock ends them
_LARGE = 0.2  # of a step: waiting is then what to shorten


@dataclasses.dataclass(frozen=True)
class SpeedReport:
    """What `check_speed` found.

    Attributes:
        step_seconds: What a step takes, without callbacks.
        waiting_share: How much of it waits for input, from 0 to 1.
        slowest_stage: The stage of the pipeline that takes longest, such as `"map(decode)"`; None
            if the dataset is no `tf.data.Dataset`, or no stage could be measured by itself.
        findings: `input`, where a fifth of a step or more waits for it, and what makes the step
            itself slow, as in `check_input`.
    """

    step_seconds: float
    waiting_share: float
    slowest_stage: str | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def clean(self) -> bool:
        """Whether less than a fifth of a step waits for input, and nothing makes it slow."""
        return are_notes(self.findings)

    def __str__(self) -> str:
        """Return lines of at most 80 columns."""
        text = f"A step takes {1000 * self.step_seconds:,.3g} ms, of which "
        text += f"{self.waiting_share:.0%} waits for input."
        if self.slowest_stage:
            text += f" The slowest stage of the pipeline is `{self.slowest_stage}`."
        return "\n\n".join(
            [wrapped(text), *(map(str, self.findings) if self.findings else ["Nothing found."])]
        )


def check_speed(
    dataset: Any, *, model: Any, batch_size: int | None = None, seconds: float = 20.0
) -> SpeedReport:
    """Train for a moment without callbacks, and report how long a step takes and waits for input.

    Real training is timed beside the same step on one batch held in memory; what it takes longer is
    waiting for input. A `tf.data` pipeline is also run up to each of its stages. Afterwards
    weights, optimizer, metrics, random states of layers and the epoch of a `train_pipeline` or an
    `ArrayBatches` are what they were; but the model is built, `model.history` is that of the
    measurement, `Dataset.shuffle` has drawn some orders, and caches are filled.

    Args:
        dataset: What `fit` trains on: as for `check_tpu`.
        model: A compiled model, on one device or on several replicas, in one process.
        batch_size: Examples in the batches that `fit` splits arrays into; None takes 32, as Keras.
        seconds: About how long to measure, without compiling, and longer where steps take longer.

    Raises:
        ValueError: No model or one that is not compiled, data that have no batch, several
            processes, parameter servers, or training that fails.

    >>> from kdpkit import testing
    >>> model = testing.tiny_classifier()
    >>> model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    >>> report = check_speed(testing.toy_classification(64), model=model, seconds=1.0)
    >>> report.step_seconds > 0, 0 <= report.waiting_share < 1, int(model.optimizer.iterations)
    (True, True, 0)
    """
    seconds = checks.number("seconds", seconds, above=0)
    check_trainer(model)
    dataset = batches.untracked(dataset)
    seen = batches.batches_of(dataset, batch_size)
    try:
        with contextlib.ExitStack() as undisturbed:
            training_step.build(model, seen.first)
            undisturbed.enter_context(unchanged(model))
            stage = None
            findings: list[Finding] = []
            if training_step.can_be_traced(model) and seen.are_dense:
                findings += slow_steps.of_step(model, seen.first)
            if batches.is_tf_dataset(dataset):
                from kdpkit.pipelines import _measure  # TensorFlow is there

                undisturbed.enter_context(_measure.undisturbed(dataset))
                stage = _measure.slowest_stage(dataset, seconds=seconds / 8)
            each, held = seconds / (2 * _ROUNDS), batches.repeated(seen.first)
            rounds = [
                [_seconds_per_step(model, data, batch_size, each) for data in (dataset, held)]
                for _ in range(_ROUNDS)
            ]
            real, ideal = map(min, zip(*rounds, strict=True))
    except errors.InputError:
        raise
    except Exception as error:  # training runs the user's code, which may raise anything
        raise errors.InputError(
            f"The training fails, so it has no speed: {checks.reason_of(error)}"
        ) from error
    share = max(0.0, 1 - ideal / real)
    if share >= _LARGE:
        problem = f"{share:.0%} of a step waits for input."
        remedy = (
            "Cache what stays the same, and prepare batches in parallel (docs/how_to/speed.md); of "
            "arrays train on larger batches, as Keras copies the examples of each."
        )
        findings.append(Finding("input", "slow", "train", problem, remedy))
    return SpeedReport(real, share, stage, in_order(findings))


def check_trainer(model: Any) -> None:
    """Raise where steps cannot be trained, and then undone."""
    training_step.check_model(model)
    strategy = getattr(model, "distribute_strategy", None)
    # Stock Keras on several replicas would write into the user's arrays.
    is_split = (
        not training_step.is_exact(model) and getattr(strategy, "num_replicas_in_sync", 1) > 1
    )
    if is_split or type(strategy).__name__.startswith("ParameterServer") or processes.count() > 1:
        checks.fail(
            "Steps are measured in one process, on several replicas with `kdpkit.training`.",
            strategy=type(strategy).__name__,
            processes=processes.count(),
            remedy="Use `replica_exact(model)`; of several processes measure one without the rest.",
        )


@contextlib.contextmanager
def unchanged(model: keras.Model) -> Iterator[None]:
    """Restore the model to what it was, whatever happens meanwhile."""
    optimizers = [o for o in vars(model).values() if isinstance(o, keras.optimizers.Optimizer)]
    variables = {
        "model": model.variables,
        "optimizers": [variable for each in optimizers for variable in each.variables],
        "metrics": model.metrics_variables,
    }
    values = checkpoints.values_of(variables)
    try:
        yield
    finally:
        model._jax_state = None  # of a step that failed, which Keras would assign later
        checkpoints.assign(variables, values)
        model.stop_training = False


class _Clock(keras.callbacks.Callback):
    """Times steps, and stops training when there are enough; on JAX it is called from threads."""

    async_safe = True

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self._ends: list[tuple[int, float]] = []  # steps done after each execution, and when
        self._before = 0

    def set_model(self, model: Any) -> None:
        """Keep the model; `self.model` would wait for every step of JAX."""
        self._trained = model

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        del epoch, logs
        self._before = max(self._ends, default=(0, 0.0))[0]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        del logs
        now = time.perf_counter()
        self._ends.append((self._before + batch + 1, now))
        timed = self._ends[_WARM_UP - 1 :]
        if len(timed) > _LEAST and now - timed[0][1] >= self._seconds:
            self._trained.stop_training = True

    @property
    def seconds_per_step(self) -> float:
        (first, started), *_, (last, ended) = sorted(self._ends)[_WARM_UP - 1 :]
        return (ended - started) / (last - first)


def _seconds_per_step(model: Any, data: Any, batch_size: int | None, seconds: float) -> float:
    """Train for a moment, and return the mean time of a step."""
    clock = _Clock(seconds)
    arguments: dict[str, Any] = {"epochs": _ENDLESS, "callbacks": [clock], "verbose": 0}
    if batches.is_tf_dataset(data):
        data = data.repeat()
        arguments |= {"epochs": 1, "steps_per_epoch": _ENDLESS}
    elif batches.are_arrays(data):
        names = ("x", "y", "sample_weight")
        arguments |= zip(names, keras.utils.unpack_x_y_sample_weight(data), strict=True)
        arguments["batch_size"], data = batch_size, arguments.pop("x")
    elif isinstance(data, keras.utils.PyDataset):
        data = copy.copy(data)  # a copy counts its epochs
    # Keras cannot shuffle these, and would warn.
    shuffle = {"shuffle": False} if batches.is_tf_dataset(data) else {}
    training_step.fit_of(model)(data, **arguments, **shuffle)
    # Its iterator would read on into the next run. And if a thread of tf.data collects it later,
    # it may wait there for its own end.
    del data
    gc.collect()
    return clock.seconds_per_step
