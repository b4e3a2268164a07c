"""Losses as sums and divisors, so that those of micro-batches add up to the loss of the batch.

A Keras loss of a batch is a quotient: the sum of the weighted losses over a divisor that depends on
its reduction, weights and masks. Each micro-batch, and on a TPU each replica, sums the losses of
its examples; the divisor is always that of the global batch.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn, TypeAlias

import keras
from keras import ops

from kdpkit._internal import Tensor, checks
from kdpkit.training._keras_internals import compute_output_spec, get_keras_mask, get_loss

Nest: TypeAlias = Any  # a value, or a list, tuple or dictionary of values by output
# A step is first traced with a batch of this many examples. No other axis is likely to have this
# size, so losses that do not lie along the examples are found.
PLACEHOLDER_EXAMPLES = 13


@dataclasses.dataclass(frozen=True)
class Term:
    """The loss of one output: `total / divisor`, each summed over all examples.

    Args:
        name: The name of the output; empty if there is only one.
        total: The weighted losses of these examples, summed.
        losses_per_example: The number of losses of an example, which a plain mean divides by.
        divisor: The sum to divide by, if it depends on weights or masks.
        is_sum: Whether the reduction is a sum, which is not divided.
    """

    name: str
    total: Tensor
    losses_per_example: Tensor
    divisor: Tensor | None = None
    is_sum: bool = False


class Sums(NamedTuple):
    """What some examples add to the loss of the global batch, and to its gradients.

    Args:
        losses: The loss of each output, divided as a plain mean over the global batch.
        real: For each output whose divisor depends on weights or masks, this divisor over that of
            the plain mean: the loss must be divided by it when all examples have been added.
        additional: Regularizers, and losses that `add_loss` added.
        gradients: First those of everything without an entry in `real`, then of each loss in it.
    """

    losses: dict[str, Tensor]
    real: dict[str, Tensor]
    additional: Tensor
    gradients: Any = ()


class Objective:
    """The losses of a model's outputs, as passed to `compile`, one for each example.

    Args:
        loss: A Keras loss, a function or a name, or a list or dictionary of them by output.
        loss_weights: A factor, or a list or dictionary of them by output.
        output_names: The model's names of its outputs, if it has them.
        in_parts: Whether it is computed on parts of a batch, such as micro-batches.
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
        self._last_names: list[str] = []  # of the outputs that the losses were last computed for

    def __call__(self, y: Nest, predictions: Nest) -> Nest:
        """Return the losses of the examples; for several outputs a dictionary of them by name."""
        self._last_names = names = self._names(predictions)
        settings = {"loss": self.loss, "loss_weights": self.loss_weights, "labels": y}
        for setting, nest in settings.items():
            if not _fits(nest, names, may_stand_alone=setting == "loss"):
                _reject_mismatch(setting, nest, names or 1)
        if not names:
            return self._losses(_single(self.loss), _single(y), predictions)
        return {
            name: self._losses(loss, _entry(y, name, names), _entry(predictions, name, names))
            for name in names
            if (loss := _entry(self.loss, name, names)) is not None
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
        losses = loss.call(y, prediction)
        # `Circle` compares the examples of a batch, although it returns a loss for each.
        is_of_batch = len(losses.shape) == 0 or getattr(loss, "fn", 0) is keras.losses.circle
        if is_of_batch and self.in_parts:
            checks.fail(
                "This loss computes the examples of a batch together, of which a micro-batch, or a "
                "replica, has only some.",
                loss=loss.name,
                predictions_shape=tuple(prediction.shape),
                remedy="Train with `accumulation=1` and `jit_compile=False`; if it is to be of "
                "each example, let the model return predictions of two axes, `(examples, 1)`.",
            )
        if len(losses.shape):
            return losses
        num_examples = ops.shape(prediction)[0]
        if loss.reduction == "sum":  # The loss is repeated, and summed again later.
            losses /= ops.cast(num_examples, losses.dtype)
        return ops.broadcast_to(losses, (num_examples,))

    def terms(self, losses: Nest, predictions: Nest, sample_weight: Nest) -> list[Term]:
        """Weigh and sum the losses of `per_example_loss`."""
        names = self._names(predictions)
        if not isinstance(losses, Mapping):
            losses, predictions = {"": losses}, keras.tree.flatten(predictions)[0]
        nests = (predictions, self.loss, sample_weight)
        return [
            _term(name, loss, *(_entry(nest, name, names) for nest in nests))
            for name, loss in losses.items()
        ]

    def sums(self, terms: list[Term], added: list[Tensor], counts: tuple[Any, Any]) -> Sums:
        """Divide the losses of some examples by the divisors of the global batch.

        `added` are the losses of layers; the counts are of these examples, and of all.
        """
        divide, (_, num_global_examples) = ops.divide_no_nan, counts
        losses, real = {}, {}
        for term in terms:
            plain = ops.cast(num_global_examples, term.total.dtype) * term.losses_per_example
            losses[term.name] = term.total if term.is_sum else divide(term.total, plain)
            if term.divisor is not None:
                real[term.name] = term.divisor if term.is_sum else divide(term.divisor, plain)
        fraction = divide(*(ops.cast(count, "float32") for count in counts))
        return Sums(losses, real, ops.convert_to_tensor(_additional_loss(added, fraction)))

    def parts(self, sums: Sums) -> list[Tensor]:
        """Return what is minimized: the sum of all without an entry in `real`, then the others."""
        weighted = {name: self.weight(name) * loss for name, loss in sums.losses.items()}
        real = [weighted.pop(name) for name in sums.real]
        return [sum(weighted.values(), sums.additional), *real]

    def weight(self, name: str) -> float:
        """Return an output's factor in the loss that is minimized."""
        weight = _entry(self.loss_weights, name, self._last_names or self.output_names or [])
        return 1.0 if weight is None else weight

    def _names(self, outputs: Nest) -> list[str]:
        """Return the names of several outputs, in the order of a list of settings."""
        if isinstance(outputs, Mapping):
            return keras.tree.flatten({name: name for name in outputs})
        if not keras.tree.is_nested(outputs):
            return []
        names = self.output_names or []
        return names if len(names) == len(outputs) else [*map(str, range(len(outputs)))]


def _fits(nest: Nest, names: list[str], *, may_stand_alone: bool) -> bool:
    """Return whether a setting has one entry for each output, which may also be missing."""
    if nest is None:
        return True
    if not names:
        return not keras.tree.is_nested(_single(nest))
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


def _entry(nest: Nest, name: str, names: list[str]) -> Any:
    """Return an output's entry of a nest; a value that is not nested holds for every output."""
    if not name:  # There is only one output.
        return _single(nest)
    if isinstance(nest, Mapping):
        return nest.get(name)
    if isinstance(nest, list | tuple) and name in names and len(nest) == len(names):
        return nest[names.index(name)]
    return None if isinstance(nest, list | tuple) else nest


def trace_metrics(
    loop: Any, placeholders: Nest, trace_with: Callable = compute_output_spec
) -> list[str]:
    """Make the variables of a loop's metrics; return the names of outputs, if several have losses.

    It raises if the losses lie along another axis than the examples.
    """
    names: list[str] = []

    def trace(batch: Nest) -> Nest:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        result = loop.per_example_loss(x, y, training=False)
        if not isinstance(result, tuple | list) or len(result) != 2:
            checks.fail(
                "`per_example_loss` must return `(losses, predictions)`.",
                returned=type(result).__name__,
                remedy="Return what the metrics see as the second; without metrics, the losses.",
            )
        losses, predictions = result
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


def _additional_loss(losses: list[Tensor], fraction: Tensor | float) -> Tensor | float:
    """Sum regularizers and losses of `add_loss`, so that those of all examples add up; 0 for none.

    A scalar is a mean over the examples, or independent of them, so it is multiplied by the
    fraction of all examples that these are. Several values are summed, as Keras does.
    """
    total = 0.0
    for loss in losses:
        value = ops.convert_to_tensor(loss)
        if not keras.backend.is_float_dtype(value.dtype):
            value = ops.cast(value, keras.config.floatx())
        if len(value.shape) == 0:  # Without examples a mean is NaN.
            value = ops.where(fraction > 0, value * ops.cast(fraction, value.dtype), 0)
        total += ops.cast(ops.sum(value), keras.config.floatx())
    return total


def _term(
    name: str, losses: Tensor, prediction: Tensor, loss: Any, sample_weight: Tensor | None
) -> Term:
    masks = [get_keras_mask(part) for part in (prediction, losses)]
    # A loss that was reduced over masked entries has none.
    masks = [m for m in masks if m is not None and len(m.shape) <= len(losses.shape)]
    mask = functools.reduce(ops.logical_and, masks) if masks else None
    losses = ops.convert_to_tensor(losses)
    losses = ops.cast(losses, keras.backend.result_type(losses.dtype, "float32"))
    if len(losses.shape) == 0:
        checks.fail(
            "`per_example_loss` must return a loss for each example, and here a mean or a sum was "
            "taken already. Reduce over the last axes only; the loop takes the mean over the "
            "examples.",
            losses_shape=tuple(losses.shape),
        )
    reduction = getattr(loss, "reduction", None)
    weights = [_along(losses, part) for part in (mask, sample_weight) if part is not None]
    divisor = None
    if reduction == "mean_with_sample_weight" and weights:
        divisor = ops.sum(functools.reduce(ops.multiply, weights))
    elif mask is not None:
        mask_size = ops.cast(ops.maximum(ops.size(mask), 1), losses.dtype)
        losses_per_entry = ops.cast(ops.size(losses), losses.dtype) / mask_size
        divisor = ops.sum(_along(losses, mask)) * losses_per_entry
    return Term(
        name=name,
        total=ops.sum(functools.reduce(ops.multiply, [losses, *weights])),
        losses_per_example=ops.cast(ops.prod(ops.shape(losses)[1:]), losses.dtype),
        divisor=divisor,
        is_sum=reduction == "sum",
    )


def _along(losses: Tensor, weight: Tensor) -> Tensor:
    """Cast weights to the losses' type and rank: an example's weight counts for all its losses."""
    weight = ops.cast(weight, losses.dtype)
    extra = len(weight.shape) - len(losses.shape)
    if extra > 0:
        return ops.squeeze(weight, axis=tuple(range(-extra, 0)))
    return ops.expand_dims(weight, axis=tuple(range(len(weight.shape), len(losses.shape))))


def _single(nest: Nest) -> Any:
    """Return the entry of a list or dictionary with one entry, and anything else as it is."""
    leaves = keras.tree.flatten(nest) if keras.tree.is_nested(nest) else [nest]
    return leaves[0] if len(leaves) == 1 else nest
