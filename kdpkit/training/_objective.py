"""Losses as sums and divisors, so that the parts of several replicas add up to one device's loss.

A Keras loss of a batch is a quotient: weighted losses, summed, over a divisor that its reduction
and masks decide. Replicas and micro-batches each sum their own examples; the divisor is always that
of the global batch. This is arithmetic on some examples, for both backends and without replicas.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn, TypeAlias

import keras
from keras import ops

from kdpkit._internal import Tensor, checks
from kdpkit.training._keras_internals import compute_output_spec, get_keras_mask, get_loss

Nest: TypeAlias = Any  # one thing, or a list, tuple or dictionary of things, by output
# Examples of the placeholders that a step is first traced with: a number unlikely to be that of
# anything else, so that losses along another axis than the examples show.
PLACEHOLDER_EXAMPLES = 13


@dataclasses.dataclass(frozen=True)
class Term:
    """The loss of one output: `total / divisor`, each summed over all examples."""

    name: str  # of the output; empty if there is only one
    total: Tensor  # the losses of these examples, weighted and summed
    per_example_count: Tensor  # losses of an example: its divisor in a plain mean
    counted: Tensor | None = None  # the divisor, where weights or masks decide it
    is_sum: bool = False  # without a divisor


class Sums(NamedTuple):
    """What some examples add to the loss and its gradients; those of more examples are added.

    Args:
        losses: Of each output, over the divisor of the global batch without weights and masks.
        real: Of each output whose divisor weights and masks decide: that divisor over the other.
            A loss is to be divided by it once all examples have been seen.
        additional: Regularizers and what `add_loss` added.
        gradients: First of all that is complete, then of each loss in `real`.
    """

    losses: dict[str, Tensor]
    real: dict[str, Tensor]
    additional: Tensor
    gradients: Any = ()


class Objective:
    """The losses of a model's outputs, as given to `compile`, one for each example.

    Args:
        loss: A Keras loss, a function or a name, or a list or dictionary of them by output.
        loss_weights: A factor, or a list or dictionary of them by output.
        output_names: The model's names of its outputs, where it has them.
        in_parts: Whether it is computed on parts of a batch: micro-batches, or those of replicas.
    """

    def __init__(
        self,
        loss: Nest,
        loss_weights: Nest,
        output_names: list[str] | None,
        *,
        in_parts: bool = False,
    ) -> None:
        self.in_parts = in_parts
        self.loss = loss
        self.loss_weights = loss_weights
        self.output_names = output_names
        self._named: list[str] = []

    def __call__(self, y: Nest, predictions: Nest) -> Nest:
        """Return the losses of the examples: a tensor, or of several outputs one for each name."""
        self._named = names = self._names(predictions)
        settings = {"loss": self.loss, "loss_weights": self.loss_weights, "labels": y}
        for setting, nest in settings.items():
            if not _fits(nest, names, may_stand_alone=setting == "loss"):
                _reject_mismatch(setting, nest, names or 1)
        if not names:
            return self._losses(_only(self.loss), _only(y), predictions)
        return {
            name: self._losses(loss, _of(name, y, names), _of(name, predictions, names))
            for name in names
            if (loss := _of(name, self.loss, names)) is not None
        }

    def _losses(self, loss: Any, y: Nest, prediction: Nest) -> Tensor:
        if loss is None or y is None:
            checks.fail(
                "The loss is computed from labels: pass a `loss` to `TrainingLoop` and a dataset "
                "of `(x, y)` or `(x, y, sample_weight)`, or override `per_example_loss`.",
                loss=loss,
                y=y,
            )
        if keras.tree.is_nested(y) or keras.tree.is_nested(prediction):
            _reject_mismatch("labels", y, keras.tree.map_structure(lambda _: "output", prediction))
        loss = get_loss(loss, y, prediction)
        y, prediction = (ops.convert_to_tensor(part, dtype=loss.dtype) for part in (y, prediction))
        # One that compares the examples of a batch has several numbers, as `Circle`, or one.
        if getattr(loss, "fn", None) is not keras.losses.circle:
            losses = loss.call(y, prediction)
            if len(losses.shape):
                return losses
        return self._loss_of_all_examples(loss, y, prediction)

    def _loss_of_all_examples(self, loss: keras.Loss, y: Tensor, prediction: Tensor) -> Tensor:
        """Compute a loss on the examples of the batch, and count it for each of these."""
        if self.in_parts:
            checks.fail(
                "This loss computes the examples of a batch together, and micro-batches, or "
                "replicas, have some of them alone.",
                loss=loss.name,
                predictions_shape=tuple(prediction.shape),
                remedy="Train with `accumulation=1` and `jit_compile=False`; if it is to be of "
                "each example, let the model return predictions of two axes, `(examples, 1)`.",
            )
        value = loss.call(y, prediction)
        if len(value.shape):
            return value
        if loss.reduction == "sum":  # over the examples that its parts are added up for
            value /= ops.cast(ops.shape(prediction)[0], value.dtype)
        return ops.broadcast_to(value, (ops.shape(prediction)[0],))

    def terms(self, losses: Nest, predictions: Nest, sample_weight: Nest) -> list[Term]:
        """Weigh and sum the losses of `per_example_loss`."""
        names = self._names(predictions)
        if not isinstance(losses, Mapping):
            losses, predictions = {"": losses}, keras.tree.flatten(predictions)[0]
        nests = (predictions, self.loss, sample_weight)
        return [
            _term(name, loss, *(_of(name, nest, names) for nest in nests))
            for name, loss in losses.items()
        ]

    def sums(self, terms: list[Term], added: list[Tensor], counts: tuple[Any, Any]) -> Sums:
        """Divide what some examples give by the divisors of the global batch.

        Args:
            terms: The losses of the examples.
            added: What their layers added.
            counts: How many they are, and how many are in the global batch.
        """
        divide, num_global_examples = ops.divide_no_nan, counts[1]
        plain = {
            term.name: 1
            if term.is_sum
            else ops.cast(num_global_examples, term.total.dtype) * term.per_example_count
            for term in terms
        }
        share = divide(*(ops.cast(count, "float32") for count in counts))
        return Sums(
            losses={term.name: divide(term.total, plain[term.name]) for term in terms},
            real={t.name: divide(t.counted, plain[t.name]) for t in terms if t.counted is not None},
            additional=ops.convert_to_tensor(additional_loss(added, share)),
        )

    def parts(self, sums: Sums) -> list[Tensor]:
        """Return what is minimised: the sum of all that is complete, then the losses in `real`."""
        weighted = {name: self.weight(name) * loss for name, loss in sums.losses.items()}
        real = [weighted.pop(name) for name in sums.real]
        return [sum(weighted.values(), sums.additional), *real]

    def weight(self, name: str) -> float:
        """Return an output's factor in the loss that is minimised."""
        weight = _of(name, self.loss_weights, self._named or self.output_names or [])
        return 1.0 if weight is None else weight

    def _names(self, outputs: Nest) -> list[str]:
        """Name several outputs, in the order in which a list has their settings."""
        if isinstance(outputs, Mapping):
            return keras.tree.flatten({name: name for name in outputs})
        if not keras.tree.is_nested(outputs):
            return []
        known = self.output_names or []
        return known if len(known) == len(outputs) else [str(i) for i in range(len(outputs))]


def _fits(nest: Nest, names: list[str], *, may_stand_alone: bool) -> bool:
    """Return whether a setting has one entry for each output, which may also be missing."""
    if nest is None:
        return True
    if not names:
        return not keras.tree.is_nested(_only(nest))
    if isinstance(nest, Mapping):
        return set(nest) <= set(names)
    return len(nest) == len(names) if isinstance(nest, list | tuple) else may_stand_alone


def _reject_mismatch(setting: str, nest: Nest, outputs: Nest) -> NoReturn:
    described = keras.tree.map_structure(
        lambda part: tuple(part.shape) if hasattr(part, "shape") else part, nest
    )
    checks.fail(
        f"`{setting}` must have one entry for each output of the model: in a list, or in a "
        "dictionary with the names of the outputs. Outputs that are nested deeper need a "
        "`per_example_loss` of your own.",
        outputs=outputs,
        **{setting: described},
    )


def _of(name: str, nest: Nest, names: list[str]) -> Any:
    """Return an output's part of a nest; what is not nested belongs to every output."""
    if not name:  # the only output
        return _only(nest)
    if isinstance(nest, Mapping):
        return nest.get(name)
    if isinstance(nest, list | tuple) and name in names and len(nest) == len(names):
        return nest[names.index(name)]
    return None if isinstance(nest, list | tuple) else nest


def trace_metrics(
    loop: Any, placeholders: Nest, trace_with: Callable = compute_output_spec
) -> list[str]:
    """Make the variables of a loop's metrics; return the names of outputs, if several have losses.

    Raises:
        ValueError: The losses lie along another axis than the examples.
    """
    names: list[str] = []

    def trace(batch: Nest) -> Nest:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        given = loop.per_example_loss(x, y, training=False)
        if not isinstance(given, tuple | list) or len(given) != 2:
            checks.fail(
                "`per_example_loss` must return `(losses, predictions)`.",
                returned=type(given).__name__,
                remedy="Return what the metrics see as the second; without metrics, the losses.",
            )
        losses, predictions = given
        terms = loop.loss.terms(losses, predictions, sample_weight)
        names.extend(term.name for term in terms if term.name)
        loop.model.compute_metrics(x, y, predictions, sample_weight)
        return losses

    losses = trace_with(trace, placeholders)
    first, *_ = (leaf for leaf in keras.tree.flatten(placeholders) if leaf is not None)
    num_examples = first.shape[0]
    for loss in keras.tree.flatten(losses):
        if num_examples is not None and loss.shape[0] not in (None, num_examples):
            checks.fail(
                "`per_example_loss` must return a loss for each example, along the first axis.",
                losses_shape=loss.shape,
                num_examples=num_examples,
            )
    return names


def additional_loss(losses: list[Tensor], share: Tensor | float) -> Tensor | float:
    """Sum regularizers and losses of `add_loss`, so that they add up over replicas; 0 for none.

    A scalar is a mean over some examples, or independent of them, so it counts with these examples'
    share of all examples. Several values are summed, as Keras does.
    """
    total = 0.0
    for loss in losses:
        value = ops.convert_to_tensor(loss)
        if not keras.backend.is_float_dtype(value.dtype):
            value = ops.cast(value, keras.config.floatx())
        if len(value.shape) == 0:  # of no examples, it is NaN
            value = ops.where(share > 0, value * ops.cast(share, value.dtype), 0)
        total += ops.cast(ops.sum(value), keras.config.floatx())
    return total


def _term(
    name: str, losses: Tensor, prediction: Tensor, loss: Any, sample_weight: Tensor | None
) -> Term:
    mask = _mask(losses, prediction)
    losses = ops.convert_to_tensor(losses)
    losses = ops.cast(losses, keras.backend.result_type(losses.dtype, "float32"))
    if len(losses.shape) == 0:
        checks.fail(
            "`per_example_loss` must return a loss for each example, and here a mean or a sum was "
            "taken already. Reduce over the last axes alone; the loop takes the mean over the "
            "examples of all replicas.",
            losses_shape=tuple(losses.shape),
        )
    reduction = getattr(loss, "reduction", None)
    weights = [_along(losses, part) for part in (mask, sample_weight) if part is not None]
    counted = None
    if reduction == "mean_with_sample_weight" and weights:
        counted = ops.sum(functools.reduce(ops.multiply, weights))
    elif mask is not None:
        entries = ops.cast(ops.maximum(ops.size(mask), 1), losses.dtype)
        losses_of_entry = ops.cast(ops.size(losses), losses.dtype) / entries
        counted = ops.sum(_along(losses, mask)) * losses_of_entry
    return Term(
        name=name,
        total=ops.sum(functools.reduce(ops.multiply, [losses, *weights])),
        per_example_count=ops.cast(ops.prod(ops.shape(losses)[1:]), losses.dtype),
        counted=counted,
        is_sum=reduction == "sum",
    )


def _mask(losses: Tensor, prediction: Tensor) -> Tensor | None:
    """Return the Keras mask of the losses; a loss that was reduced over masked entries has none."""
    masks = [get_keras_mask(part) for part in (prediction, losses)]
    fitting = [m for m in masks if m is not None and len(m.shape) <= len(losses.shape)]
    return functools.reduce(ops.logical_and, fitting) if fitting else None


def _along(losses: Tensor, weight: Tensor) -> Tensor:
    """Cast weights to the losses' type and rank: an example's weight counts for all its losses."""
    weight = ops.cast(weight, losses.dtype)
    extra = len(weight.shape) - len(losses.shape)
    if extra > 0:
        return ops.squeeze(weight, axis=tuple(range(-extra, 0)))
    return ops.expand_dims(weight, axis=tuple(range(len(weight.shape), len(losses.shape))))


def _only(nest: Nest) -> Any:
    """Take a single output's setting out of a list or dictionary of one."""
    leaves = keras.tree.flatten(nest) if keras.tree.is_nested(nest) else [nest]
    return leaves[0] if len(leaves) == 1 else nest
