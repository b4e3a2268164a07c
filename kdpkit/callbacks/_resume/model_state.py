"""What a training state has of a model: variables of layers, optimizers, metrics and seeds."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from kdpkit import checkpoints
from kdpkit._internal import versions


class ModelState:
    """Reads the values of a model's and further metrics' variables, and assigns a state's."""

    def __init__(self, model: keras.Model, metrics: Sequence[Any] = ()) -> None:
        self._model = model
        self._metrics = metrics

    def _groups(self) -> dict[str, list[Any]]:
        """Return what is saved, but for optimizers."""
        own = [variable for metric in self._metrics for variable in metric.variables]
        held = []
        if keras.backend.backend() == "tensorflow":
            from kdpkit._internal import held_variables

            held = held_variables.of_model(self._model)
        return {
            "model": self._model.variables,
            "metrics": [*self._model.metrics_variables, *own],
            "attributes": held,
            "seeds": versions.global_seeds(),
        }

    def values(self, *, with_metrics: bool) -> dict[str, np.ndarray]:
        """Return the values of all variables; of optimizers those that are in use."""
        used = [optimizer for optimizer in optimizers(self._model) if optimizer.built]
        groups = self._groups() | {"optimizer": [v for one in used for v in one.variables]}
        if not with_metrics:
            del groups["metrics"]
        return checkpoints.values_of(groups) | versions.random_state_of_torch()

    def trained(self) -> list[list[int]]:
        """Return which of the model's variables each optimizer trains; none until it is used.

        Of those that are not the model's it is -1: only the program can build such an optimizer.
        """
        index = {id(variable): i for i, variable in enumerate(self._model.variables)}
        return [
            [index.get(id(variable), -1) for variable in versions.trained_by(optimizer)]
            for optimizer in optimizers(self._model)
        ]

    def build(self, state: checkpoints.TrainingState, batch: Callable[[], Any]) -> None:
        """Make the variables of a state that Keras makes in the first step."""
        if self._lacks_variables_of(state):
            # Only on TensorFlow without a strategy `fit` leaves this to the first step:
            # `_maybe_symbolic_build` in keras/src/backend/tensorflow/trainer.py. Not by
            # `_symbolic_build`, which knows no ragged batches, and builds an unused optimizer.
            x, y, weights = keras.utils.unpack_x_y_sample_weight(batch())
            y_pred = self._model(x)
            for compute in (self._model.compute_metrics, self._model.compute_loss):
                if self._lacks_variables_of(state):
                    compute(x, y, y_pred, weights)
        if "seeds.0" in state.arrays:
            versions.make_global_seeds(strategy_of(self._model))

    def _lacks_variables_of(self, state: checkpoints.TrainingState) -> bool:
        groups = self._groups()
        del groups["seeds"]
        return any(
            sum(name.startswith(f"{group}.") for name in state.arrays) > len(variables)
            for group, variables in groups.items()
        )

    def restore(self, state: checkpoints.TrainingState) -> None:
        """Assign the values of a state, for which `build` has made the variables.

        Those of metrics are left out at the end of an epoch: the next one resets them.

        Raises:
            ValueError: It is of another model.
        """
        groups, variables = self._groups(), self._model.variables
        scope = getattr(strategy_of(self._model), "scope", contextlib.nullcontext)
        groups["optimizer"] = []
        for optimizer, of in zip(optimizers(self._model), state.notes["trained"], strict=True):
            if of and {*of} <= {*range(len(variables))} and not optimizer.built:
                with scope():
                    optimizer.build([variables[index] for index in of])
            groups["optimizer"] += optimizer.variables if of else []
        if state.position.step == 0:
            del groups["metrics"]
        if "seeds.0" not in state.arrays:
            del groups["seeds"]
        checkpoints.assign(groups, state.arrays)
        versions.restore_random_state_of_torch(state.arrays)


def optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Return the optimizers that a model and its layers hold, in containers too, each once."""
    held = (part for layer in model._flatten_layers() for part in _parts([*vars(layer).values()]))
    found = [part for part in held if isinstance(part, keras.optimizers.Optimizer)]
    return [*{id(optimizer): optimizer for optimizer in found}.values()]


def _parts(value: Any) -> Iterator[Any]:
    """Return what is in lists, tuples and dicts, whose keys `keras.tree` may fail to sort."""
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        for part in value:
            yield from _parts(part)
    else:
        yield value


def strategy_of(model: keras.Model) -> Any:
    """Return the TensorFlow strategy that a model was built under, None if there is none."""
    return getattr(model, "distribute_strategy", None)
