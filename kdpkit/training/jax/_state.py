"""The variables of a step, whose values a compiled function takes and returns."""

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
    """Gathers sharded weights when a layer reads them."""

    def __init__(self, pairs: list[tuple[keras.Variable, jax.Array]], shards: Shards) -> None:
        super().__init__(state_mapping=pairs, collect_losses=True)
        self._shards = shards

    def get_current_value(self, variable: keras.Variable) -> jax.Array | None:
        value = self.sharded_value(variable)
        return value if value is None else self._shards.gathered(value, variable)

    def sharded_value(self, variable: keras.Variable) -> jax.Array | None:
        return super().get_current_value(variable)


class Variables:
    """All variables of a loop, which hold the current values between the steps."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self.groups: tuple[list[keras.Variable], ...] = ([], [], [])
        self._placed: dict[int, jax.Array] = {}  # the values on the devices, by the variable's `id`
        self.seeds: set[int] = set()  # the `id` of each variable that is the state of random layers

    def choose(self, *groups: list[keras.Variable]) -> bool:
        """Set the variables of `State`; return whether they have changed."""
        former, self.groups = self.groups, groups
        return [[*map(id, group)] for group in groups] != [[*map(id, group)] for group in former]

    def read(self) -> State:
        """Return the values; those that were assigned since are put on the devices."""
        return State._make(
            [self._value(variable, placement) for variable in group]
            for group, placement in zip(self.groups, self._placements, strict=True)
        )

    def shapes(self) -> State:
        """Return the shapes, dtypes and placements of what `read` returns."""
        return State._make(
            [jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=placement(v)) for v in group]
            for group, placement in zip(self.groups, self._placements, strict=True)
        )

    @property
    def _placements(self) -> tuple[Placement, ...]:
        """The functions that place the variables of each group of `State`."""
        return self.shards.of_weight, self.shards.of_optimizer, self.shards.of_weight

    def _value(self, variable: keras.Variable, placement: Placement) -> jax.Array:
        value = variable._value
        if value is not self._placed.get(id(variable)):
            # The value is copied, as the step reuses its memory, and a callback may have it.
            is_local = jax.process_count() > 1 and value.is_fully_addressable
            copied = np.array if is_local else jnp.copy
            value = jax.device_put(copied(variable.value), placement(variable))
            self._write(variable, value)
        return value

    def write(self, state: State) -> None:
        """Put the values that a step returned into the variables."""
        for group, values in zip(self.groups, state, strict=True):
            for variable, value in zip(group, values, strict=True):
                self._write(variable, value)

    def _write(self, variable: keras.Variable, value: jax.Array) -> None:
        # Not by `assign`, whose checks take time for every variable in every step.
        variable._value = value
        self._placed[id(variable)] = value

    def run(self, state: State, function: Callable[[], T]) -> tuple[T, State]:
        """Call a function with a state of the variables; return its result and the new state.

        What it assigns to trainable weights and to the optimizer's variables is ignored.
        """
        pairs = [
            pair
            for group, values in zip(self.groups, state, strict=True)
            for pair in zip(group, values, strict=True)
        ]
        with _GatheringScope(pairs, self.shards) as scope:
            result = function()
        *_, others = self.groups
        values = zip(map(scope.sharded_value, others), state.other, strict=True)
        return result, state._replace(other=[old if new is None else new for new, old in values])

    def with_seeds_of(self, former: State, state: State) -> State:
        """Return a state with the seeds of random layers from a former one."""
        *_, others = self.groups
        pairs = zip(others, former.other, state.other, strict=True)
        return state._replace(
            other=[old if id(variable) in self.seeds else new for variable, old, new in pairs]
        )

    def constrained(self, state: State) -> State:
        """Have the program of a step return the values sharded as before."""
        if not self.shards.is_any:
            return state
        constrain = jax.lax.with_sharding_constraint
        return State._make(
            [constrain(value, placement(v)) for v, value in zip(group, values, strict=True)]
            for group, values, placement in zip(self.groups, state, self._placements, strict=True)
        )
