"""`check_parity`: whether R replicas train what one device trains, and if not, why."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdpkit import _checks, strategies
from kdpkit._private_copies import with_private_batches
from kdpkit._tuning import untuned
from kdpkit.training.parity._data import check_batches, checked_dataset, with_any_batch
from kdpkit.training.parity._report import TOLERANCE, ParityReport
from kdpkit.training.parity._runs import (
    AMPLIFIED,
    COMPARED,
    Comparison,
    Recorder,
    Run,
    refuse_nothing_trained,
    refuse_other_starts,
    refuse_what_is_not_finite,
    with_start,
)
from kdpkit.training.parity._suspects import (
    CLIPPING,
    SUSPECTS,
    Suspect,
    even,
    lent_losses,
    nudge_weights,
    record_gradients,
)

_LOOSEST = 0.05  # of the largest gradient: a model that is random in itself proves nothing
_UNEVEN_START = (
    "uneven batch: Keras cannot build a model on replicas from a first batch that they do not "
    "divide; use `replica_exact`, or batches that the replicas divide"
)


def check_parity(build: Callable[[], Any], data: Any, *, replicas: int) -> ParityReport:
    """Train a few steps on one device and on replicas, and say whether they agree.

    Both start from the same weights (the random seed is set to 0 before each `build()`) and see the
    same batches, the replicas as `fit` distributes them. Weights that agree to `1e-5` of their
    change are equal. Where they differ more, rounding is told from a true difference: the gradients
    of every batch are compared, and one device is run a second time with weights changed by as much
    as rounding does. So small learning rates, and optimizers such as Adam that enlarge the rounding
    of gradients near zero, raise no false alarm. Where the replicas do differ, one thing after
    the other is taken away until they agree, and what can be put back without a difference is no
    cause; that trains some more models.

    Args:
        build: Gives a new, compiled model; it is called in the strategy's scope. Call
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
            or of another kind; a `build` that gives no new, compiled model with the same weights
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
        _checks.refuse(
            "`check_parity` compares replicas of TensorFlow.", backend=keras.backend.backend()
        )
    replicas = _checks.integer("replicas", replicas, minimum=2)
    if isinstance(build, keras.Model) or not callable(build):
        _checks.refuse(
            "`build` must be a function that gives a new model.",
            build=build,
            remedy="Put what makes and compiles the model into a function, and pass that.",
        )
    dataset = checked_dataset(data)
    strategy = strategies.select_strategy("mirrored", devices=replicas)
    return _Trial(build, dataset, strategy).report()


class _Trial:
    """Trains the models of one `build`, on one device and on replicas, and compares them."""

    def __init__(self, build: Callable[[], Any], dataset: Any, strategy: Any) -> None:
        self._build_one = build
        self._batches = [*dataset.take(COMPARED)]
        self._strategy = strategy
        self._replicas = strategy.num_replicas_in_sync
        self._previous: Any = None
        check_batches(self._batches, dataset.element_spec)
        self._spec = tf.nest.map_structure(with_any_batch, dataset.element_spec)
        self._build()  # so that the next call shows whether every model is a new one

    def report(self) -> ParityReport:
        one = self._on_one_device(self._batches)
        refuse_what_is_not_finite(one)
        try:
            many = self._on_replicas(self._batches)
        except Exception as error:  # of any kind: one device trained, so it is what we look for
            return self._report_failure(error)
        one = with_start(one, many)
        refuse_other_starts(one, many)
        refuse_nothing_trained(one)
        found = Comparison(one, many)
        if found.first_beyond(TOLERANCE) is None:
            equal = found.logs_agree() or found.logs_agree(self._noise(one))
            return ParityReport(self._replicas, equal, max(found.batches), found.logs)
        return self._judge(found, one)

    def _judge(self, found: Comparison, one: Run) -> ParityReport:
        """Tell what optimizers make of rounding from what the replicas do differently."""
        runs = self._on_both(self._batches, record_gradients)
        gradients = Comparison(*runs)
        noise = self._noise(runs[0], record_gradients)
        tolerance = min(max(TOLERANCE, AMPLIFIED * max(noise.batches)), _LOOSEST)
        guilty = gradients.first_beyond(tolerance)
        if guilty is None:
            return self._judge_by_noise(found, one, gradients.found_gradients)
        factor, cause = self._explain(guilty, tolerance)
        return ParityReport(
            self._replicas,
            equal=False,
            weights=found.batches[guilty],
            logs=found.logs,
            batch=guilty,
            factor=factor,
            cause=cause,
            gradients=gradients.batches[guilty],
        )

    def _judge_by_noise(self, found: Comparison, one: Run, gradients_agree: bool) -> ParityReport:
        noise = self._noise(one)
        rounding = max(*noise.batches, found.rounding)
        batch = found.first_beyond(max(TOLERANCE, AMPLIFIED * rounding))
        if batch is None:
            equal = found.logs_agree(noise)
            return ParityReport(self._replicas, equal, max(found.batches), found.logs)
        return ParityReport(
            self._replicas,
            equal=False,
            weights=found.batches[batch],
            logs=found.logs,
            batch=batch,
            cause="the optimizer: it is given the same gradients" if gradients_agree else "",
        )

    def _explain(self, guilty: int, tolerance: float) -> tuple[float | None, str]:
        """Give the factor of the gradients of a batch, and the causes of their difference."""
        batch = self._batches[guilty]
        suspects = [suspect for suspect in SUSPECTS if self._is_there(suspect, batch)]

        def compare(taken_away: list[Suspect]) -> Comparison:
            changed = batch
            for suspect in taken_away:
                changed = suspect.change_batch(changed, self._replicas)
            # Gradients are those at the start, and Keras cannot begin with an uneven batch.
            batches = [*self._batches[: min(guilty, 1)], changed]
            changes = [suspect.change_model for suspect in taken_away]
            return Comparison(*self._on_both(batches, record_gradients, *changes))

        def agree(found: Comparison) -> bool:
            return found.first_beyond(tolerance) is None

        taken_away = [suspect for suspect in suspects if suspect is CLIPPING]
        found = unclipped = compare(taken_away)
        while not agree(found) and len(taken_away) < len(suspects):
            taken_away = suspects[: len(taken_away) + 1]
            found = compare(taken_away)
        if not agree(found):
            return unclipped.factor, ""
        *earlier, last = taken_away
        needed = [
            suspect
            for suspect in earlier
            if not agree(compare([other for other in taken_away if other is not suspect]))
        ]
        return unclipped.factor, "; ".join(suspect.cause for suspect in [*needed, last])

    def _is_there(self, suspect: Suspect, batch: Any) -> bool:
        """Tell whether there is such a thing to take away."""
        model = self._build()
        record_gradients(model)
        with lent_losses(model):
            changed = suspect.change_batch(batch, self._replicas)
            return changed is not batch or suspect.change_model(model)

    def _report_failure(self, error: Exception) -> ParityReport:
        first, *rest = self._batches
        start = even(first, self._replicas)
        cause = _UNEVEN_START if start is not first and self._trains([start, *rest]) else ""
        return ParityReport(
            self._replicas, equal=False, weights=np.nan, logs={}, cause=cause, error=error
        )

    def _trains(self, batches: list[Any]) -> bool:
        try:
            self._on_replicas(batches)
        except Exception:  # the first one is in the report
            return False
        return True

    def _noise(self, one: Run, *changes: Callable[[Any], Any]) -> Comparison:
        """Compare a run on one device with another from weights that rounding has changed."""
        nudge = functools.partial(nudge_weights, batch=self._batches[0])
        return Comparison(one, self._on_one_device(self._batches, *changes, nudge))

    def _on_both(self, batches: list[Any], *changes: Callable[[Any], Any]) -> tuple[Run, Run]:
        one = self._on_one_device(batches, *changes)
        many = self._on_replicas(batches, *changes)
        return with_start(one, many), many

    def _on_one_device(self, batches: list[Any], *changes: Callable[[Any], Any]) -> Run:
        return self._train(tf.distribute.get_strategy(), batches, changes)

    def _on_replicas(self, batches: list[Any], *changes: Callable[[Any], Any]) -> Run:
        return self._train(self._strategy, batches, changes)

    def _train(self, strategy: Any, batches: list[Any], changes: Any) -> Run:
        with strategy.scope():
            model = self._build()
        dataset = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=self._spec)
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(len(batches)))
        # Keras' own `fit` would write into the batches, and wait for tuning at an end.
        dataset = untuned(with_private_batches(dataset))
        recorder = Recorder()
        with lent_losses(model):
            with strategy.scope():
                for change in changes:
                    change(model)
            history = model.fit(dataset, callbacks=[recorder], shuffle=False, verbose=0).history
        return Run(recorder.start, recorder.after, history)

    def _build(self) -> Any:
        keras.utils.set_random_seed(0)
        model = self._build_one()
        if not isinstance(model, keras.Model) or not model.compiled:
            _checks.refuse("`build` must return a compiled Keras model.", build=model)
        if model is self._previous:
            _checks.refuse(
                "`build` must give a new model each time, and gave the same one twice.",
                build=self._build_one,
                remedy="Make the model inside of it.",
            )
        self._previous = model
        return model
