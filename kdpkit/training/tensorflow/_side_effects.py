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
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdpkit.training.tensorflow._keras_internals import op_def_registry
from kdpkit.training.tensorflow._library_layers import is_library, layers_of

_HARMLESS = re.compile(
    "Assert|Case|CheckNumerics(V2)?|CudnnRNN.*|HashTableV2|If|LookupTable(Find|Size)V2|"
    "(Stateful)?PartitionedCall|Placeholder|While"
)
_NOT_OWN = frozenset({*sys.stdlib_module_names, "numpy"})
_PLAIN = (bool, int, float, complex, str, bytes, tf.DType, tf.TensorShape)
_OF_NUMPY: Any = np.random.Generator | np.random.RandomState
_AROUND_FUNCTIONS = types.MethodType | functools.partial | property | staticmethod | classmethod


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
        self.draws, self.effects = False, list[str]()
        self._free, self._graph = free, tf.compat.v1.get_default_graph()

    def get_current_value(self, variable: keras.Variable) -> Any:
        if id(variable) not in self.state_mapping:
            self.effects.append("uses a variable that is new, or not its own")
        return super().get_current_value(variable)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        self.draws = True
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
    memory, out = Memory(layer), io.StringIO()
    quiet = warnings.catch_warnings(action="ignore")
    with quiet, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            for part in layers_of(layer):
                vars(part)["activity_regularizer"] = None
                is_batch_norm = isinstance(part, keras.layers.BatchNormalization)
                if is_batch_norm and is_library(type(part).__module__):
                    vars(part)["_trainable"] = False
            yield
        finally:
            memory.put_back()


class Memory:
    """What a layer's code reaches in Python and may change, as it is now.

    These are attributes of layers and of the user's objects and classes, what functions name in
    their modules and close over, what is in containers, and the states of random generators.
    """

    def __init__(self, layer: keras.layers.Layer) -> None:
        self._kept: list[tuple[str, Any, dict[Any, Any]]] = []
        generators: Any = {"random": random.getstate, "numpy.random": np.random.get_state}
        todo = [(name, of.__self__) for name, of in generators.items()]
        todo += [("", part) for part in layers_of(layer)]
        seen: dict[int, Any] = {}
        while todo:
            name, of = todo.pop()
            if isinstance(of, dict | list):  # which TensorFlow may have wrapped
                of = getattr(of, "_storage", getattr(of, "__wrapped__", of))
            if id(of) not in seen and not isinstance(of, _PLAIN):
                seen[id(of)], content = of, _content(of)
                self._kept.append((name, of, content))
                todo += [(name or str(key), value) for key, value in content.items()]
                todo += [("", kind) for kind in (of if isinstance(of, type) else type(of)).__mro__]

    def change(self) -> str | None:
        """Return the name of something that has changed since; None if nothing."""
        for name, of, before in self._kept:
            for key in _changed(before, _content(of)):
                return name or str(key)
        return None

    def put_back(self) -> None:
        for _, of, before in self._kept:
            if changed := _changed(before, _content(of)):
                _write(of, before, changed)


def _content(of: Any) -> dict[Any, Any]:
    """Return what something holds, by its names or positions."""
    if isinstance(of, tuple | list | set | collections.deque):
        return dict(enumerate(of))
    if isinstance(of, dict):
        return dict(of)
    if isinstance(of, random.Random):
        return {0: of.getstate()}
    if isinstance(of, _OF_NUMPY):
        return {0: of._bit_generator.state}
    if isinstance(of, _AROUND_FUNCTIONS):
        names = ("__func__", "__self__", "func", "args", "keywords", "fget")
        return {name: getattr(of, name) for name in names if hasattr(of, name)}
    if isinstance(of, types.CellType):
        with contextlib.suppress(ValueError):  # it is empty
            return {0: of.cell_contents}
    if isinstance(of, types.FunctionType):
        return _reached_by(of) if _is_own(of.__globals__.get("__name__")) else {}
    attributes = getattr(of, "__dict__", {})
    if isinstance(of, keras.layers.Layer) or _is_own(getattr(of, "__module__", "builtins")):
        return dict(attributes)
    return {name: attributes[name] for name in attributes.keys() & {"__wrapped__"}}


def _reached_by(function: types.FunctionType) -> dict[Any, Any]:
    """Return what a function, and those in it, name in their module; and what it holds."""
    codes, scope = [function.__code__], function.__globals__
    for code in codes:
        codes += [part for part in code.co_consts if isinstance(part, types.CodeType)]
    named = {name: scope[name] for code in codes for name in code.co_names if name in scope}
    return named | dict(enumerate((function.__closure__, function.__defaults__, vars(function))))


def _write(of: Any, content: dict[Any, Any], changed: set[Any]) -> None:
    """Have something hold again what it held."""
    if isinstance(of, list | set | collections.deque):
        kind: Any = next(kind for kind in (list, set, collections.deque) if isinstance(of, kind))
        kind.clear(of)  # Python's own: those of Keras' containers track
        fill: Any = set.update if kind is set else kind.extend
        fill(of, content.values())
    elif isinstance(of, random.Random):
        of.setstate(content[0])
    elif isinstance(of, _OF_NUMPY):
        of._bit_generator.state = content[0]
    elif isinstance(of, types.CellType):
        of.cell_contents = content[0]
    elif isinstance(of, type):
        for name in changed:
            setattr(of, name, content[name]) if name in content else delattr(of, name)
    else:
        is_function = isinstance(of, types.FunctionType)
        names = of.__globals__ if is_function else of if isinstance(of, dict) else vars(of)
        dict.update(names, {name: content[name] for name in changed & content.keys()})
        for name in changed - content.keys():
            dict.pop(names, name)


def _changed(before: dict[Any, Any], now: dict[Any, Any]) -> set[Any]:
    keys = before.keys() | now.keys()
    return {key for key in keys if not _is_same(before.get(key, Memory), now.get(key, Memory))}


def _is_same(one: Any, other: Any) -> bool:
    """Return whether something has not changed; a shape that is noted in each call has not."""
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, dict):
        return not _changed(one, other)
    if isinstance(one, tuple) and not isinstance(one, tf.TensorShape):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return isinstance(one, _PLAIN) and bool(one == other)


def _is_own(module: Any) -> bool:
    """Return whether a module is of the user's own."""
    return not is_library(str(module)) and str(module).partition(".")[0] not in _NOT_OWN
