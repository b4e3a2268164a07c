"""The variables of a step, whose values go into a compiled function and come out of it."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import NamedSharding

from kdpkit._internal.shards import Shards

T = TypeVar("T")
Placement = Callable[[keras.Variable], NamedSharding]


class State(NamedTuple):
    """The values of all variables that a step reads."""

    trainable: list[jax.Array]
    optimizer: list[jax.Array]
    other: list[jax.Array]  # statistics, seeds, metrics and frozen weights


class _GatheringScope(keras.StatelessScope):
    """Puts sharded weights together where they are read; what calls a layer holds them sharded."""

    def __init__(self, pairs: list[tuple[keras.Variable, jax.Array]], shards: Shards) -> None:
        super().__init__(state_mapping=pairs, collect_losses=True)
        self._shards = shards

    def get_current_value(self, variable: keras.Variable) -> jax.Array | None:
        value = self.kept_value(variable)
        return value if value is None else self._shards.gathered(value, variable)

    def kept_value(self, variable: keras.Variable) -> jax.Array | None:
        return super().get_current_value(variable)


class Variables:
    """All variables of a loop; between the steps they always hold the state's arrays."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self.groups: tuple[list[keras.Variable], ...] = ([], [], [])
        self._placed: dict[int, jax.Array] = {}
        self.seeds: set[int] = set()  # the `id` of those that are states of random layers

    def choose(self, *groups: list[keras.Variable]) -> bool:
        """Set the variables of `State`; return whether they are others than before."""
        former, self.groups = self.groups, groups
        return [[*map(id, group)] for group in groups] != [[*map(id, group)] for group in former]

    def read(self) -> State:
        """Return the values; what somebody else assigned is first put on the devices."""
        return State._make(
            [self._value(variable, placement) for variable in group]
            for group, placement in zip(self.groups, self._placements, strict=True)
        )

    def shapes(self) -> State:
        """Return what `read` would, as shapes on the devices."""
        return State._make(
            [jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=placement(v)) for v in group]
            for group, placement in zip(self.groups, self._placements, strict=True)
        )

    @property
    def _placements(self) -> tuple[Placement, ...]:
        """Where the variables of each group of `State` are put."""
        return self._shards.of_weight, self._shards.of_optimizer, self._shards.of_weight

    def _value(self, variable: keras.Variable, placement: Placement) -> jax.Array:
        value = variable._value
        if value is not self._placed.get(id(variable)):
            # A copy: the step uses its buffer, which somebody may hold.
            is_of_one = jax.process_count() > 1 and value.is_fully_addressable
            copied = np.array if is_of_one else jnp.copy
            value = jax.device_put(copied(variable.value), placement(variable))
            self._write(variable, value)
        return value

    def write(self, state: State) -> None:
        """Put the values that a step returned into the variables."""
        for group, values in zip(self.groups, state, strict=True):
            for variable, value in zip(group, values, strict=True):
                self._write(variable, value)

    def _write(self, variable: keras.Variable, value: jax.Array) -> None:
        # Not `assign`, which checks and converts: this is done for every variable in every step.
        variable._value = value
        self._placed[id(variable)] = value

    def run(self, state: State, function: Callable[[], T]) -> tuple[T, State]:
        """Call a function while the variables have a state; return the state that it leaves.

        What it assigns to trainable weights and to the optimizer's variables is dropped.
        """
        pairs = [
            pair
            for group, values in zip(self.groups, state, strict=True)
            for pair in zip(group, values, strict=True)
        ]
        with _GatheringScope(pairs, self._shards) as scope:
            result = function()
        *_, others = self.groups
        kept = zip(map(scope.kept_value, others), state.other, strict=True)
        return result, state._replace(other=[old if new is None else new for new, old in kept])

    def with_seeds_of(self, former: State, state: State) -> State:
        """Return a state in which random layers draw from the seeds of a former one."""
        *_, others = self.groups
        pairs = zip(others, former.other, state.other, strict=True)
        return state._replace(
            other=[old if id(variable) in self.seeds else new for variable, old, new in pairs]
        )

    def gathering_again(self, function: Callable[..., T]) -> Callable[..., T]:
        """Let the gradient of a function that runs on a state gather sharded weights again."""
        return self._shards.gathering_again(function)

    def cut(self, state: State) -> State:
        """Leave the values of a step, in its program, sharded as they were."""
        if not self._shards.is_any:
            return state
        constrain = jax.lax.with_sharding_constraint
        return State._make(
            [constrain(value, placement(v)) for v, value in zip(group, values, strict=True)]
            for group, values, placement in zip(self.groups, state, self._placements, strict=True)
        )
