"""`check_parity`: whether R replicas train what one device trains, and if not, why."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdpkit import strategies
from kdpkit._internal import checks
from kdpkit._internal.dataset_tuning import untuned
from kdpkit._internal.private_copies import with_private_batches
from kdpkit.training.parity import _runs, _suspects
from kdpkit.training.parity._data import check_batches, checked_dataset, with_any_batch
from kdpkit.training.parity._report import TOLERANCE, ParityReport
from kdpkit.training.parity._runs import AMPLIFIED, COMPARED, Comparison, Recorder, Run
from kdpkit.training.parity._suspects import CLIPPING, SUSPECTS, Suspect

Change = Callable[[keras.Model], object]

_LOOSEST = 0.05  # of the largest gradient: a model that is random in itself proves nothing
_UNEVEN_START = (
    "uneven batch: Keras cannot build a model on replicas from a first batch that they do not "
    "divide; use `replica_exact`, or batches that the replicas divide"
)


def check_parity(build: Callable[[], keras.Model], data: Any, *, replicas: int) -> ParityReport:
    """Train a few steps on one device and on replicas, and report whether they agree.

    Both start from the same weights (the random seed is set to 0 before each `build()`) and see the
    same batches, the replicas as `fit` distributes them. Weights that agree to `1e-5` of their
    change are equal. Where they differ more, rounding is ruled out first: the gradients
    of every batch are compared, and one device is run a second time with weights changed by as much
    as rounding does. So small learning rates, and optimizers such as Adam that enlarge the rounding
    of gradients near zero, raise no false alarm; nor does TensorFloat-32, which is off meanwhile.
    Where the replicas do differ, one thing after the other is taken away until they agree, and what
    can be put back without a difference is no cause; that trains some more models.

    Args:
        build: Returns a new, compiled model; it is called in the strategy's scope. Call
            `kdpkit.training.replica_exact` in it to check the exact training, leave it out to
            check Keras' own.
        data: A `tf.data.Dataset` of global batches, of which the first four are taken, or one
            batch as a tuple `(x, y)` or `(x, y, sample_weight)` of arrays.
        replicas: Number of replicas, on as many devices (`kdpkit.strategies.select_strategy`).

    Returns:
        A `ParityReport`: print it, or test `report.equal`. What training on replicas raises, where
        training on one device does not, is reported as `report.error`.

    Raises:
        ValueError: Fewer than two replicas, or more than there are devices; data without batches
            or of another kind; a `build` that returns no new, compiled model with the same weights
            each time; a model that learns nothing from the data, or NaN. What `build` and `fit`
            raise on one device passes through.

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
    if keras.backend.backend() != "tensorflow":
        checks.fail(
            "`check_parity` compares replicas of TensorFlow.", backend=keras.backend.backend()
        )
    replicas = checks.integer("replicas", replicas, minimum=2)
    if isinstance(build, keras.Model) or not callable(build):
        checks.fail(
            "`build` must be a function that returns a new model.",
            build=build,
            remedy="Put what makes and compiles the model into a function, and pass that.",
        )
    dataset = checked_dataset(data)
    strategy = strategies.select_strategy("mirrored", devices=replicas)
    in_tf32 = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)  # as float32, 5e-4, on GPUs
    try:
        return _Trial(build, dataset, strategy).report()
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(in_tf32)


class _Trial:
    """Trains the models of one `build`, on one device and on replicas, and compares them."""

    def __init__(
        self,
        build: Callable[[], keras.Model],
        dataset: tf.data.Dataset,
        strategy: tf.distribute.Strategy,
    ) -> None:
        self._build_one = build
        self._batches = [*dataset.take(COMPARED)]
        self._one_device = tf.distribute.get_strategy()
        self._strategy = strategy
        self._replicas: int = strategy.num_replicas_in_sync
        self._previous: keras.Model | None = None
        check_batches(self._batches, dataset.element_spec)
        self._spec = tf.nest.map_structure(with_any_batch, dataset.element_spec)
        self._build()  # so that the next call shows whether every model is a new one

    def report(self) -> ParityReport:
        one = self._train(self._one_device, self._batches)
        _runs.reject_what_is_not_finite(one)
        try:
            many = self._train(self._strategy, self._batches)
        except Exception as error:  # of any kind: one device trained, so it is what we look for
            return self._failure(error)
        one = _runs.with_start(one, many)
        _runs.reject_other_starts(one, many)
        _runs.reject_nothing_trained(one)
        found = Comparison(one, many)
        if found.first_beyond(TOLERANCE) is None:
            equal = found.logs_agree() or found.logs_agree(self._noise(one))
            return ParityReport(self._replicas, equal, max(found.batches), found.logs)
        return self._judge(found, one)

    def _failure(self, error: Exception) -> ParityReport:
        first, *rest = self._batches
        start = _suspects.even(first, self._replicas)
        cause = _UNEVEN_START if start is not first and self._trains([start, *rest]) else ""
        return ParityReport(self._replicas, False, np.nan, {}, cause=cause, error=error)

    def _trains(self, batches: list[Any]) -> bool:
        try:
            self._train(self._strategy, batches)
        except Exception:  # the first one is in the report
            return False
        return True

    def _judge(self, found: Comparison, one: Run) -> ParityReport:
        """Separate what optimizers make of rounding from what the replicas do differently."""
        recorded, many = self._on_both(self._batches, _suspects.record_gradients)
        gradients = Comparison(recorded, many)
        if gradients.first_beyond(TOLERANCE) is None:
            return self._judge_by_noise(found, one, gradients)
        noise = self._noise(recorded, _suspects.record_gradients)
        tolerance = min(max(TOLERANCE, AMPLIFIED * max(noise.batches)), _LOOSEST)
        batch = gradients.first_beyond(tolerance)
        if batch is None:
            return self._judge_by_noise(found, one, gradients)
        factor, cause = self._explain(batch, gradients, tolerance)
        off = found.batches[batch], found.logs, batch, factor, cause, gradients.batches[batch]
        return ParityReport(self._replicas, False, *off)

    def _judge_by_noise(self, found: Comparison, one: Run, gradients: Comparison) -> ParityReport:
        """Compare weights that equal gradients trained, beside what rounding does to them."""
        noise = self._noise(one)
        rounding = max(*noise.batches, found.rounding)
        batch = found.first_beyond(max(TOLERANCE, AMPLIFIED * rounding))
        if batch is None:
            equal = found.logs_agree(noise)
            return ParityReport(self._replicas, equal, max(found.batches), found.logs)
        cause = "the optimizer: it is given the same gradients" if gradients.has_gradients else ""
        weights = found.batches[batch]
        return ParityReport(self._replicas, False, weights, found.logs, batch, cause=cause)

    def _explain(
        self, batch: int, gradients: Comparison, tolerance: float
    ) -> tuple[float | None, str]:
        """Return the factor of the gradients of a batch, and the causes of their difference."""
        suspects = self._present_suspects(self._batches[batch])

        def compare(removed: list[Suspect]) -> Comparison:
            changed = self._batches[batch]
            for suspect in removed:
                changed = suspect.change_batch(changed, self._replicas)
            # Gradients are those at the start, and Keras cannot begin with an uneven batch.
            batches = [*self._batches[: min(batch, 1)], changed]
            changes = [suspect.change_model for suspect in removed]
            return Comparison(*self._on_both(batches, _suspects.record_gradients, *changes))

        def agree(found: Comparison) -> bool:
            return found.first_beyond(tolerance) is None

        removed: list[Suspect] = []
        factor = gradients.factor(batch)
        while removed != suspects:
            removed = suspects[: len(removed) + 1]
            found = compare(removed)
            if removed == [CLIPPING]:
                factor = found.factor(-1)
            if agree(found):
                break
        else:
            return factor, ""
        *earlier, last = removed
        needed = [
            suspect
            for suspect in earlier
            if not agree(compare([other for other in removed if other is not suspect]))
        ]
        return factor, "; ".join(suspect.cause for suspect in [*needed, last])

    def _present_suspects(self, batch: Any) -> list[Suspect]:
        """Return the suspects that there are in the model or in a batch."""
        model = self._build()
        _suspects.record_gradients(model)
        with _suspects.restored_losses(model):
            return [
                suspect
                for suspect in SUSPECTS
                if suspect.change_batch(batch, self._replicas) is not batch
                or suspect.change_model(model)
            ]

    def _noise(self, one: Run, *changes: Change) -> Comparison:
        """Compare a run on one device with another from weights that rounding has changed."""
        nudge = functools.partial(_suspects.nudge_weights, batch=self._batches[0])
        return Comparison(one, self._train(self._one_device, self._batches, *changes, nudge))

    def _on_both(self, batches: list[Any], *changes: Change) -> tuple[Run, Run]:
        one = self._train(self._one_device, batches, *changes)
        many = self._train(self._strategy, batches, *changes)
        return _runs.with_start(one, many), many

    def _train(self, strategy: tf.distribute.Strategy, batches: list[Any], *changes: Change) -> Run:
        with strategy.scope():
            model = self._build()
        dataset = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=self._spec)
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(len(batches)))
        # Keras' own `fit` would write into the batches, and wait for tuning at an end.
        dataset = untuned(with_private_batches(dataset))
        recorder = Recorder()
        with _suspects.restored_losses(model):
            with strategy.scope():
                for change in changes:
                    change(model)
            history = model.fit(dataset, callbacks=[recorder], shuffle=False, verbose=0).history
        return Run(recorder.start, recorder.after, history)

    def _build(self) -> keras.Model:
        keras.utils.set_random_seed(0)
        model = self._build_one()
        if not isinstance(model, keras.Model) or not model.compiled:
            checks.fail("`build` must return a compiled Keras model.", build=model)
        if model is self._previous:
            checks.fail(
                "`build` must return a new model each time, and returned the same one twice.",
                build=self._build_one,
                remedy="Make the model inside of it.",
            )
        self._previous = model
        return model
