"""`check_parity`: whether R replicas train what one device trains, and if not, why."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdpkit import _checks, strategies

_TOLERANCE = 1e-5  # of the largest change of any weight: float32 rounds about here


@dataclasses.dataclass(frozen=True)
class ParityReport:
    """What `check_parity` found; `str(report)` says it in sentences.

    Attributes:
        replicas: How many replicas were compared with one device.
        equal: Whether weights and logs agree to rounding.
        weights: The largest difference of any weight, over the largest change of any weight.
        logs: The largest relative difference of loss and metrics, by name.
        batch: The first batch after which the weights differ, counted from 0; None if they agree.
        factor: What the step of the replicas is one device's step times, measured with plain SGD;
            None if it is no multiple.
        cause: The likely cause, or "" where none of those known explains the difference.
    """

    replicas: int
    equal: bool
    weights: float
    logs: dict[str, float]
    batch: int | None = None
    factor: float | None = None
    cause: str = ""

    @property
    def factor_name(self) -> str:
        """The factor in terms of the replicas R: "1/R", "R", "3/R"; "" where it is none of them."""
        if self.factor is None:
            return ""
        of_replicas = self.factor * self.replicas
        count = round(of_replicas)
        if count < 1 or abs(of_replicas - count) > 1e-3 * count:
            return ""
        return {self.replicas: "1", self.replicas**2: "R"}.get(count, f"{count}/R")

    def __str__(self) -> str:
        """Say what was found, and what to do about it."""
        if self.equal:
            return (
                f"{self.replicas} replicas train what one device trains: weights differ by "
                f"{self.weights:.0e} of their change."
            )
        if self.batch is None:
            off = ", ".join(f"{name} by {by:.0e}" for name, by in self.logs.items())
            return f"{self.replicas} replicas train what one device trains, but log it off: {off}."
        parts = [
            f"{self.replicas} replicas do not train what one device trains: after batch "
            f"{self.batch} weights differ by {self.weights:.0e} of their change."
        ]
        if self.factor is not None:
            name = f" ({self.factor_name})" if self.factor_name else ""
            parts.append(f"The step is {self.factor:.4g}{name} times one device's.")
        parts.append(f"Likely cause: {self.cause or 'unknown'}.")
        return " ".join(parts)


def check_parity(build: Callable[[], Any], data: Any, *, replicas: int) -> ParityReport:
    """Train a few steps on one device and on replicas, and say whether they agree.

    Both start from the same weights (the random seed is set to 0 before each `build()`) and see the
    same batches, the replicas as `fit` distributes them. Where they disagree, one thing at a time
    is taken away until they agree, which names the cause; that trains some more models.

    Args:
        build: Gives a new, compiled model; it is called in the strategy's scope. Call
            `kdpkit.training.replica_exact` in it to check the exact training, leave it out to
            check Keras' own.
        data: A `tf.data.Dataset` of global batches, of which the first four are taken, or one
            batch as a tuple `(x, y)` or `(x, y, sample_weight)` of arrays.
        replicas: Number of replicas, on as many devices (`kdpkit.strategies.select_strategy`).

    Returns:
        A `ParityReport`: print it, or test `report.equal`.

    Raises:
        ValueError: Fewer than two replicas, or more than there are devices, or no data. What
            `build` and `fit` raise passes through.

    >>> import keras
    >>> from kdpkit import testing
    >>> def build():
    ...     model = testing.tiny_classifier()
    ...     loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    ...     model.compile(keras.optimizers.SGD(0.1, clipnorm=0.01), loss)
    ...     return model
    >>> report = check_parity(build, testing.toy_classification(8), replicas=2)
    >>> report.equal, report.cause
    (False, 'clipping before the reduction: each replica clips its own gradient')
    """
    replicas = _checks.integer("replicas", replicas, minimum=2)
    batches, spec = _first_batches(data)

    def compare(batches: list[Any], change: Callable[[Any], None] = _nothing) -> _Comparison:
        one, many = (
            _train(build, change, batches, spec, strategy)
            for strategy in (
                tf.distribute.get_strategy(),
                strategies.select_strategy("mirrored", devices=replicas),
            )
        )
        return _Comparison(one, many)

    found = compare(batches)
    report = ParityReport(replicas, found.equal, found.weights, found.logs, found.batch)
    if found.batch is None:
        return report
    *before, guilty = batches[: found.batch + 1]  # Keras cannot begin with an uneven one
    return dataclasses.replace(
        report,
        factor=compare([*before, guilty], _use_plain_sgd).factor,
        cause=next(
            (
                cause
                for cause, change_batch, change_model in _SUSPECTS
                if compare([*before, change_batch(guilty, replicas)], change_model).batch is None
            ),
            "",
        ),
    )


class _Recorder(keras.callbacks.Callback):
    """Weights at the start of training and after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.start: Any = None
        self.after: dict[int, Any] = {}

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002  # Keras' signature
        self.start = _flat_weights(self.model)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002  # Keras'
        self.after[batch] = _flat_weights(self.model)


def _flat_weights(model: Any) -> Any:
    weights = [np.ravel(weight).astype("float64") for weight in model.get_weights()]
    return np.concatenate(weights) if weights else np.zeros(0)


class _Comparison:
    """One run on one device beside one on replicas."""

    def __init__(self, one: tuple[_Recorder, Any], many: tuple[_Recorder, Any]) -> None:
        (self._one, history_one), (self._many, history_many) = one, many
        start = self._many.start  # under a strategy every model is built before training
        differences = {
            batch: _ratio(self._many.after[batch] - after, after - start)
            for batch, after in self._one.after.items()
        }
        unequal = [batch for batch, by in differences.items() if not by <= _TOLERANCE]
        self.batch = unequal[0] if unequal else None
        self.weights = differences[unequal[0]] if unequal else max(differences.values())
        self.logs = {
            name: _ratio(np.subtract(history_many[name], values), np.asarray(values))
            for name, values in history_one.items()
        }
        self.equal = self.batch is None and all(by <= 10 * _TOLERANCE for by in self.logs.values())

    @property
    def factor(self) -> float | None:
        """What the replicas' last step is one device's times, if it is a multiple."""
        *before, last = sorted(self._one.after)
        step, step_many = (
            run.after[last] - (run.after[before[-1]] if before else self._many.start)
            for run in (self._one, self._many)
        )
        factor = float(step_many @ step / (step @ step))
        is_multiple = np.isfinite(factor) and _ratio(step_many - factor * step, step_many) < 1e-3
        return factor if is_multiple else None


def _ratio(difference: Any, scale: Any) -> float:
    """Give the largest difference over the largest magnitude of what it is measured by."""
    largest, by = (float(np.max(np.abs(array), initial=0.0)) for array in (difference, scale))
    if largest == 0.0:
        return 0.0
    return largest / by if by else np.inf


def _train(
    build: Callable[[], Any],
    change: Callable[[Any], None],
    batches: list[Any],
    spec: Any,
    strategy: Any,
) -> tuple[_Recorder, Any]:
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = build()
        if not isinstance(model, keras.Model) or not model.compiled:
            _checks.refuse("`build` must return a compiled Keras model.", build=model)
        change(model)
    dataset = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(len(batches)))
    recorder = _Recorder()
    history = model.fit(dataset, callbacks=[recorder], shuffle=False, verbose=0).history
    return recorder, history


def _first_batches(data: Any) -> tuple[list[Any], Any]:
    if not isinstance(data, tf.data.Dataset):
        data = tf.data.Dataset.from_tensors(tuple(data))
    batches = [*data.take(4)]
    if not batches:
        _checks.refuse("`data` holds no batch.", data=data)
    spec = tf.nest.map_structure(_with_any_batch, data.element_spec)
    return batches, spec


def _with_any_batch(spec: Any) -> Any:
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)


# The suspects: a cause, and what to take away of the batch and of the model to be rid of it.


def _nothing(model: Any) -> None:
    """Change nothing."""


def _same_batch(batch: Any, replicas: int) -> Any:  # noqa: ARG001  # as its like
    return batch


def _even(batch: Any, replicas: int) -> Any:
    rows = int(tf.shape(tf.nest.flatten(batch)[0])[0])
    kept = max(rows // replicas, 1) * replicas
    return tf.nest.map_structure(lambda leaf: tf.gather(leaf, tf.range(kept) % rows), batch)


def _use_plain_sgd(model: Any) -> None:
    model.optimizer = keras.optimizers.SGD(0.01)


def _stop_clipping(model: Any) -> None:
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    optimizer.clipnorm = optimizer.global_clipnorm = optimizer.clipvalue = None


def _synchronize_statistics(model: Any) -> None:
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.synchronized = True


def _stop_dropping(model: Any) -> None:
    for layer in model._flatten_layers():
        if hasattr(layer, "seed_generator") and hasattr(layer, "rate"):
            layer.rate = 0.0


def _sum_losses(model: Any) -> None:
    for loss in keras.tree.flatten(model.loss):
        if isinstance(loss, keras.losses.Loss):
            loss.reduction = "sum"


_SUSPECTS: tuple[tuple[str, Callable[[Any, int], Any], Callable[[Any], None]], ...] = (
    ("uneven batch: a replica with fewer rows counts as much as the others", _even, _nothing),
    (
        "clipping before the reduction: each replica clips its own gradient",
        _same_batch,
        _stop_clipping,
    ),
    (
        "batch statistics: BatchNormalization normalizes by each replica's own rows",
        _same_batch,
        _synchronize_statistics,
    ),
    ("random layers: replicas draw other numbers than one device", _same_batch, _stop_dropping),
    (
        "the loss divides by each replica's own weights or unmasked entries",
        _same_batch,
        _sum_losses,
    ),
)
