"""What the call of a layer does besides computing: with variables, in its graph and in Python.

Such things are done once in a step, and not on each device: a layer with effects is not divided.
"""

import collections
import contextlib
import functools
import io
import random
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kdpkit.training.tensorflow._keras_internals import op_def_registry
from kdpkit.training.tensorflow._libraries import is_library, layers_of

_HARMLESS = re.compile(
    "Assert|Case|CheckNumerics(V2)?|CudnnRNN.*|HashTableV2|If|LookupTable(Find|Size)V2|"
    "(Stateful)?PartitionedCall|Placeholder|While"
)
_NO_LAYERS = frozenset({*sys.stdlib_module_names, "numpy"})
_DEPTH = 2  # of objects that are attributes of each other
_PLAIN = (bool, int, float, complex, str, bytes, tf.DType, tf.TensorShape)


class Scope(keras.StatelessScope):
    """The values that a layer's variables have, and what its call does with variables and losses.

    Args:
        variables: All of the layer's.
        state: Their values.
        free: Those that may be assigned, by their identities.
    """

    def __init__(self, variables: Sequence[Any], state: Sequence[Any], free: Any) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self.state_mapping.update(zip(map(id, variables), state, strict=True))
        self.assigned: set[int] = set()
        self.effects: list[str] = []
        self._free, self._graph = free, tf.compat.v1.get_default_graph()

    def get_current_value(self, variable: keras.Variable) -> Any:
        if id(variable) not in self.state_mapping:
            is_new = variable._value is None
            self.effects.append("makes variables" if is_new else "reads a variable not its own")
        return super().get_current_value(variable)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        self.assigned.add(id(update[0]))
        if id(update[0]) not in self._free:
            self.effects.append("assigns variables")
        elif tf.compat.v1.get_default_graph() is not self._graph:
            self.effects.append("draws inside of a loop, a condition or another function")
        super().add_update(update)

    def add_loss(self, loss: Any) -> None:
        self.effects.append("adds a loss")
        super().add_loss(loss)


def effect_of_operations(graph: Any) -> str | None:
    """Return what the operations of a function do besides computing; None if nothing."""
    for outer, _ in graph.captures:
        data = getattr(outer, "_handle_data", None)  # which variables have, and tables lack
        if outer.dtype == tf.resource and data is not None and data.is_set:
            return "reads a variable that Keras does not know"
    definition = graph.as_graph_def()
    inner = [node for function in definition.library.function for node in function.node_def]
    for kind in sorted({node.op for node in [*definition.node, *inner]}):
        operation = op_def_registry.get(kind)
        if operation is not None and operation.is_stateful and not _HARMLESS.fullmatch(kind):
            return f"does more than compute ({kind})"
    return None


@contextlib.contextmanager
def unseen(layer: keras.layers.Layer) -> Iterator[None]:
    """Put back what calls of a layer change in Python, and let them neither print nor warn.

    What is computed with the examples of all parts is left out: activity regularizers, and the
    statistics of BatchNormalization.
    """
    memory, hidden = Memory(layer), io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with contextlib.redirect_stdout(hidden), contextlib.redirect_stderr(hidden):
                for part in layers_of(layer):
                    vars(part)["activity_regularizer"] = None
                    if _has_statistics(part):
                        vars(part)["_trainable"] = False
                yield
        finally:
            memory.put_back()


def _has_statistics(layer: keras.layers.Layer) -> bool:
    return isinstance(layer, keras.layers.BatchNormalization) and all(
        is_library(getattr(type(layer), name).__module__) for name in ("call", "_moments")
    )


class _Place(NamedTuple):
    """An object, how it is read and put back, its name, and whether the user's code fills it."""

    of: Any
    read: Callable[[Any], dict[Any, Any]]
    write: Callable[[Any, dict[Any, Any]], Any]
    name: str
    is_own: bool


class Memory:
    """What Python keeps in a layer and around it, as it is now.

    These are attributes, the containers and objects in them, what functions name in their modules,
    and the states of random generators.
    """

    def __init__(self, layer: keras.layers.Layer) -> None:
        self._kept = [(place, place.read(place.of)) for place in _places(layer)]

    def change(self) -> str | None:
        """Return the name of something that the user's code has changed since; None if nothing."""
        for place, before in self._kept:
            now = place.read(place.of) if place.is_own else before
            for key in _changed(before, now):
                if key not in _names_of_keras():
                    return place.name or str(key)
        return None

    def put_back(self) -> None:
        for place, before in self._kept:
            if _changed(before, place.read(place.of)):
                place.write(place.of, before)


def _changed(before: dict[Any, Any], now: dict[Any, Any]) -> list[Any]:
    pairs = ((key, before.get(key, Memory), now.get(key, Memory)) for key in {**before, **now})
    return [key for key, one, other in pairs if one is not other and not _is_same(one, other)]


def _is_same(one: Any, other: Any) -> bool:
    """Return whether something has not changed; a shape that is noted in each call has not."""
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, dict):
        return not _changed(one, other)
    if isinstance(one, list | tuple) and not isinstance(one, tf.TensorShape):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return isinstance(one, _PLAIN) and bool(one == other)


def _places(layer: keras.layers.Layer) -> Iterator[_Place]:
    """Iterate over what the code of a layer reaches."""
    generators: Any = {"random": random.getstate, "numpy.random": np.random.get_state}
    todo = [(of.__self__, name, True, 0) for name, of in generators.items()]
    for part in layers_of(layer):
        todo += [(kind, kind.__name__, True, 0) for kind in type(part).__mro__]
        todo.append((vars(part), "", _is_own(type(part)), 0))
    seen: dict[int, Any] = {}
    while todo:
        of, name, is_own, depth = todo.pop()
        of = getattr(of, "__wrapped__", getattr(of, "_storage", of))  # in Keras' containers
        is_code = isinstance(of, type | types.FunctionType)
        if id(of) in seen or (is_code and not _is_own(of)):
            continue
        seen[id(of)], is_own = of, is_own or is_code
        inner: dict[Any, Any] = {}
        for kind, (read, write) in _KINDS.items():
            if isinstance(of, kind):
                yield _Place(of, read, write, name, is_own)
                inner = read(of)
        if isinstance(of, tuple):
            inner = dict(enumerate(of))
        elif isinstance(of, types.MethodType):
            inner = {0: of.__func__, 1: of.__self__}
        elif isinstance(of, types.FunctionType):
            inner |= {id(cell): _content(cell) for cell in of.__closure__ or ()}
        elif not inner and hasattr(of, "__dict__") and _is_own(type(of)) and depth < _DEPTH:
            inner, is_own, depth = {0: vars(of)}, True, depth + 1
        for key, value in inner.items():
            if not isinstance(value, _PLAIN):
                is_filled = is_own and key not in _names_of_keras()
                todo.append((value, name or str(key), is_filled, depth))


def _is_own(code: Any) -> bool:
    """Return whether a class or a function is of the user's own."""
    module = str(code.__module__)
    return not is_library(module) and module.partition(".")[0] not in _NO_LAYERS


@functools.cache
def _names_of_keras() -> frozenset[str]:
    """Return which attributes every layer has, which Keras changes when it calls one."""
    names = vars(keras.layers.Layer(name="any"))
    return frozenset(name for name in names if name.startswith("_"))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _named_by(function: Any) -> dict[str, Any]:
    """Return what a function, and those in it, name in their module."""
    scope, codes = function.__globals__, [function.__code__]
    for code in codes:
        codes += [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return {name: scope[name] for code in codes for name in code.co_names if name in scope}


def _set_attributes(of: Any, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        if vars(of).get(name) is not value:
            setattr(of, name, value)


def _refill(kind: Any, fill: Callable) -> Callable[[Any, dict[Any, Any]], None]:
    def write(of: Any, content: dict[Any, Any]) -> None:
        kind.clear(of)  # Python's own method: that of Keras' containers tracks what is in them
        fill(of, content if kind is dict else content.values())

    return write


def _listed(values: Any) -> dict[int, Any]:
    return dict(enumerate(values))


_KINDS: dict[type, tuple[Callable, Callable]] = {
    dict: (dict, _refill(dict, dict.update)),
    list: (_listed, _refill(list, list.extend)),
    collections.deque: (_listed, _refill(collections.deque, collections.deque.extend)),
    set: (lambda of: {id(value): value for value in of}, _refill(set, set.update)),
    types.FunctionType: (_named_by, lambda of, names: of.__globals__.update(names)),
    type: (lambda of: dict(vars(of)), _set_attributes),
    random.Random: (lambda of: {0: of.getstate()}, lambda of, state: of.setstate(state[0])),
    np.random.RandomState: (
        lambda of: {0: of.get_state()},
        lambda of, state: of.set_state(state[0]),
    ),
    np.random.Generator: (
        lambda of: {0: of.bit_generator.state},
        lambda of, state: setattr(of.bit_generator, "state", state[0]),
    ),
}
