"""What a training state has of a model: variables of layers, optimizers, metrics and seeds."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from kdpkit import checkpoints
from kdpkit._internal import checks, versions


class ModelState:
    """Reads the values of a model's variables, and assigns those of a state.

    Args:
        model: The model.
        metrics: Metrics besides those of the model.
    """

    def __init__(self, model: keras.Model, metrics: Sequence[Any] = ()) -> None:
        self._model = model
        self._metrics = metrics

    def values(self) -> dict[str, np.ndarray]:
        """Return the values of all variables but those of metrics."""
        return checkpoints.values_of(self._variables())

    def metric_values(self) -> dict[str, np.ndarray]:
        """Return the values of the metrics' variables."""
        return checkpoints.values_of({"metrics": self._metric_variables()})

    def values_that_validation_changes(self) -> dict[str, np.ndarray]:
        """Return the values of metrics, of seeds, and of what layers hold as attributes."""
        seeds = {
            index: variable
            for index, variable in enumerate(self._model.variables)
            if variable.name == "seed_generator_state"
        }
        of_layers = checkpoints.values_of({"model": [*seeds.values()]}).values()
        variables = {
            "metrics": self._metric_variables(),
            "attributes": self._variables_in_attributes(),
            "seeds": versions.global_seeds(),
        }
        named = {f"model.{index}": value for index, value in zip(seeds, of_layers, strict=True)}
        return checkpoints.values_of(variables) | named

    def seeds(self) -> list[list[int]]:
        """Return the state of `keras.random` without a seed; none if nothing has drawn there."""
        values = checkpoints.values_of({"seeds": versions.global_seeds()}).values()
        return [value.tolist() for value in values]

    def trained(self) -> list[list[int]]:
        """Return which of the model's variables each optimizer trains; none until it is used.

        Of those that are not the model's it is -1: only the program can build such an optimizer.
        """
        index = {id(variable): i for i, variable in enumerate(self._model.variables)}
        return [
            [index.get(id(variable), -1) for variable in versions.trained_by(optimizer)]
            for optimizer in optimizers(self._model)
        ]

    def trainable(self) -> list[bool]:
        """Return whether each of the model's variables is trainable."""
        return [bool(variable.trainable) for variable in self._model.variables]

    def has_variables_of(self, state: checkpoints.TrainingState) -> bool:
        """Return whether the model has as many variables, of the same shapes."""
        shapes = [tuple(variable.shape) for variable in self._model.variables]
        saved = {n: a.shape for n, a in state.arrays.items() if n.startswith("model.")}
        return saved == {f"model.{index}": shape for index, shape in enumerate(shapes)}

    def require_trainable(self, saved: list[bool]) -> None:
        """Raise if other variables are trainable than when a state was saved."""
        for variable, was, now in zip(self._model.variables, saved, self.trainable(), strict=True):
            if was != now:
                checks.fail(
                    "The saved state is of a run in which other variables were trainable.",
                    variable=variable.path,
                    saved=was,
                    trainable=now,
                    remedy="A callback that changes `trainable` in an epoch has to do so in all "
                    "epochs from that one on, before `Resume` is called.",
                )

    def lacks_variables(self, state: checkpoints.TrainingState) -> bool:
        """Return whether variables of a state are missing that Keras makes in the first step."""
        present = self._variables() | {"metrics": self._metric_variables()}
        # Not strict, as here and in `_variables` a later phase may have more optimizers or fewer.
        pairs = zip(optimizers(self._model), self._trained_in(state), strict=False)
        return any(-1 in trained and not optimizer.built for optimizer, trained in pairs) or any(
            sum(name.startswith(f"{group}.") for name in state.arrays) > len(present[group])
            for group in ("model", "attributes", "metrics")
        )

    def restore(self, state: checkpoints.TrainingState, *, is_trained_on: bool = True) -> None:
        """Assign the values of a state but those of metrics, to optimizers built for it.

        Args:
            state: The state.
            is_trained_on: Whether training continues from it. Otherwise other optimizers, as those
                of an earlier phase of a program, stay as they are.

        Raises:
            ValueError: It is of another model.
        """
        if _has_seeds(state):
            versions.make_global_seeds(strategy_of(self._model))
        has_optimizers = is_trained_on or self._has_optimizers_of(state)
        if has_optimizers:
            self._build_optimizers(state)
        variables = self._variables_in(state)
        if not has_optimizers:
            variables.pop("optimizer")
        checkpoints.assign(variables, state.arrays)

    def _has_optimizers_of(self, state: checkpoints.TrainingState) -> bool:
        present = optimizers(self._model)
        return state.notes["setup"]["optimizers"] == names_of(present) and all(
            saved == trained or not optimizer.built
            for optimizer, trained, saved in zip(
                present, self.trained(), self._trained_in(state), strict=True
            )
        )

    def restore_with_metrics(self, state: checkpoints.TrainingState) -> None:
        """Assign all values of a state that was saved inside an epoch."""
        variables = self._variables_in(state) | {"metrics": self._metric_variables()}
        checkpoints.assign(variables, state.arrays)

    def _build_optimizers(self, state: checkpoints.TrainingState) -> None:
        """Build those that were in use, for the variables that they train."""
        scope = getattr(strategy_of(self._model), "scope", contextlib.nullcontext)
        variables = self._model.variables
        pairs = zip(optimizers(self._model), self._trained_in(state), strict=True)
        for optimizer, trained in pairs:
            are_here = {*trained} <= {*range(len(variables))}  # else `assign` raises
            if trained and are_here and not optimizer.built:
                with scope():
                    optimizer.build([variables[index] for index in trained])

    def _trained_in(self, state: checkpoints.TrainingState) -> list[list[int]]:
        """Return what `trained` returned when a state was saved."""
        if "trained" in state.notes:
            return state.notes["trained"]
        index = {id(variable): i for i, variable in enumerate(self._model.variables)}
        of_all = [index[id(variable)] for variable in self._model.trainable_variables]
        return [of_all] * len(optimizers(self._model))  # states of kdpkit 0.1

    def _variables(self, used: Iterable[object] | None = None) -> dict[str, list[Any]]:
        """Return what is saved and restored: of optimizers, the variables of those in use."""
        present = optimizers(self._model)
        used = [optimizer.built for optimizer in present] if used is None else used
        pairs = zip(present, used, strict=False)
        return {
            "model": self._model.variables,
            "optimizer": [variable for o, is_used in pairs if is_used for variable in o.variables],
            "attributes": self._variables_in_attributes(),
            "seeds": versions.global_seeds(),
        }

    def _variables_in(self, state: checkpoints.TrainingState) -> dict[str, list[Any]]:
        """Return the variables whose values a state has: seeds only if anything had drawn."""
        variables = self._variables(self._trained_in(state))
        return variables if _has_seeds(state) else variables | {"seeds": []}

    def _variables_in_attributes(self) -> list[Any]:
        if keras.backend.backend() != "tensorflow":
            return []
        from kdpkit._internal import held_variables

        return held_variables.of_model(self._model)

    def _metric_variables(self) -> list[Any]:
        own = [variable for metric in self._metrics for variable in metric.variables]
        return [*self._model.metrics_variables, *own]


def optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Return the optimizers that a model and its layers hold, in containers too, each once."""
    held = (part for layer in model._flatten_layers() for part in _parts([*vars(layer).values()]))
    found = [part for part in held if isinstance(part, keras.optimizers.Optimizer)]
    return [*{id(optimizer): optimizer for optimizer in found}.values()]


def _parts(value: Any) -> Iterator[Any]:
    """Return what is in lists, tuples and dicts, and in those in them."""
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        for part in value:
            yield from _parts(part)
    else:
        yield value


def with_seeds(
    state: checkpoints.TrainingState, seeds: Sequence[Sequence[int]]
) -> checkpoints.TrainingState:
    """Return a state with other `ModelState.seeds`."""
    others = {name: a for name, a in state.arrays.items() if not name.startswith("seeds.")}
    own = {f"seeds.{index}": np.array(seed, "uint32") for index, seed in enumerate(seeds)}
    return dataclasses.replace(state, arrays=others | own)


def names_of(optimizers: Iterable[keras.optimizers.Optimizer]) -> list[str]:
    """Return the names of optimizers' classes."""
    return [type(optimizer).__name__ for optimizer in optimizers]


def strategy_of(model: keras.Model) -> Any:
    """Return the TensorFlow strategy that a model was built under, None if there is none."""
    return getattr(model, "distribute_strategy", None)


def _has_seeds(state: checkpoints.TrainingState) -> bool:
    return "seeds.0" in state.arrays
