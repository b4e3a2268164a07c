"""What a training state has of a model: variables of layers, optimizers, metrics and seeds."""

import collections
import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np

from kdpkit import checkpoints
from kdpkit._internal import optimizers, versions
from kdpkit.callbacks._resume import settings

# The settings of optimizers that training changes, by the variable that has the present value.
_SETTINGS = {"learning_rate": "learning_rate", "dynamic_scale": "initial_scale"}


class ModelState:
    """Reads the variables of a model and of further metrics, and assigns those of a state."""

    def __init__(self, model: keras.Model, metrics: Sequence[Any] = ()) -> None:
        self._model = model
        self._metrics = metrics

    def _groups(self) -> dict[str, list[Any]]:
        """Return the variables of a state by group, except for those of optimizers."""
        unlisted = []
        if keras.backend.backend() == "tensorflow":
            from kdpkit._internal import held_variables

            unlisted = held_variables.unlisted_variables(self._model)
        metrics = [*self._model.metrics_variables]
        metrics += [variable for metric in self._metrics for variable in metric.variables]
        return {
            "model": self._model.variables,
            "metrics": metrics,
            "attributes": unlisted,
            "seeds": versions.global_seeds(),
        }

    def values(self, *, with_metrics: bool) -> dict[str, np.ndarray]:
        """Return the values of all variables, except for those of optimizers not yet used."""
        groups = self._groups()
        for index, optimizer in enumerate(optimizers.all_of(self._model)):
            groups |= _groups_of(optimizer, index) if optimizer.built else {}
        if not with_metrics:
            del groups["metrics"]
        return checkpoints.values_of(groups)

    def trained(self) -> list[list[int]]:
        """Return, for each optimizer, the indices of the model's variables that it trains.

        The list is empty until the optimizer is used. A variable that is not the model's has the
        index -1: only the program can build its optimizer.
        """
        indices = {id(variable): index for index, variable in enumerate(self._model.variables)}
        return [
            [indices.get(id(variable), -1) for variable in versions.trained_by(optimizer)]
            for optimizer in optimizers.all_of(self._model)
        ]

    def build(self, state: checkpoints.TrainingState, first_batch: Callable[[], Any]) -> None:
        """Create those variables of a state that Keras would create in the first step."""
        if self._lacks_variables(state):
            # `fit` builds the model and its metrics before training, except on TensorFlow without
            # a strategy (`_maybe_symbolic_build` in keras/src/backend/tensorflow/trainer.py). Its
            # `_symbolic_build` does not take ragged batches, and builds unused optimizers.
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(first_batch())
            y_pred = self._model(x)
            computations = [self._model.compute_metrics]
            if self._model.loss is not None or self._model.losses:  # else Keras raises
                computations.append(self._model.compute_loss)
            for compute in computations:
                if self._lacks_variables(state):
                    compute(x, y, y_pred, sample_weight)
        if "seeds" in _saved_groups(state):
            versions.make_global_seeds(strategy_of(self._model))

    def _lacks_variables(self, state: checkpoints.TrainingState) -> bool:
        groups = self._groups()
        del groups["seeds"]
        return any(
            sum(name.startswith(f"{group}.") for name in state.arrays) > len(variables)
            for group, variables in groups.items()
        )

    def restore(self, state: checkpoints.TrainingState, changed: Iterable[str]) -> None:
        """Assign the values of a state, whose variables `build` has created.

        At the end of an epoch metrics are left out, because the next epoch resets them, and so are
        settings that the program has `changed`.
        """
        groups, variables = self._groups(), self._model.variables
        scope = getattr(strategy_of(self._model), "scope", contextlib.nullcontext)
        found = zip(optimizers.all_of(self._model), state.notes["trained"], strict=True)
        for number, (optimizer, indices) in enumerate(found):
            are_of_model = indices and 0 <= min(indices) <= max(indices) < len(variables)
            if are_of_model and not optimizer.built:
                with scope():
                    optimizer.build([variables[index] for index in indices])
            groups |= _groups_of(optimizer, number) if indices else {}
        if state.position.step == 0:
            del groups["metrics"]
        if "seeds" not in _saved_groups(state):
            del groups["seeds"]
        for name in changed:
            groups.pop(name, None)
        checkpoints.assign(groups, state.arrays)


def _groups_of(optimizer: keras.Optimizer, index: int) -> dict[str, list[Any]]:
    """Return the variables of an optimizer, those of each setting in a group of its name."""
    groups = collections.defaultdict(list)
    for variable in optimizer.variables:
        name = _SETTINGS.get(variable.name, "optimizer")
        groups[settings.numbered(name, index)].append(variable)
    return groups


def _saved_groups(state: checkpoints.TrainingState) -> set[str]:
    return {name.partition(".")[0] for name in state.arrays}


def strategy_of(model: keras.Model) -> Any:
    """Return the TensorFlow strategy that a model was built under, None if there is none."""
    return getattr(model, "distribute_strategy", None)
