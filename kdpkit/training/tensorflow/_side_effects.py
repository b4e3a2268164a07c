"""What the call of a layer does besides computing: with variables, in its graph and in Python.

A step does such things once, and not once for each device: a layer with effects is not divided.
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

_HARMLESS_OPERATIONS = re.compile(
    "Assert|Case|CheckNumerics(V2)?|CudnnRNN.*|HashTableV2|If|LookupTable(Find|Size)V2|"
    "(Stateful)?PartitionedCall|Placeholder|While"
)
_MODULES_OF_OTHERS = frozenset({*sys.stdlib_module_names, "numpy"})
_IMMUTABLE = (bool, int, float, complex, str, bytes, tf.DType, tf.TensorShape)
_OF_NUMPY: Any = np.random.Generator | np.random.RandomState
_AROUND_FUNCTIONS = types.MethodType | functools.partial | property | staticmethod | classmethod


class Scope(keras.StatelessScope):
    """The state of a layer's variables, and what its call does with variables and losses.

    Only the variables in `free`, which has their ids, may be assigned.
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
        is_harmless = operation is None or _HARMLESS_OPERATIONS.fullmatch(kind)
        if not is_harmless and operation.is_stateful:
            return f"does more than compute ({kind})"
    return None


@contextlib.contextmanager
def unseen(layer: keras.layers.Layer) -> Iterator[None]:
    """Undo what calls of a layer change in Python, and let them neither print nor warn.

    Activity regularizers and the statistics of BatchNormalization, which are computed with the
    examples of all parts, are left out.
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
            memory.restore()


class Memory:
    """What a layer's code reaches in Python and may change, as it is now.

    These are attributes of layers and of the user's objects and classes, what functions name in
    their modules and close over, what is in containers, and the states of random generators.
    """

    def __init__(self, layer: keras.layers.Layer) -> None:
        self._contents: list[tuple[str, Any, dict[Any, Any]]] = []
        get_states: Any = {"random": random.getstate, "numpy.random": np.random.get_state}
        waiting = [(name, get_state.__self__) for name, get_state in get_states.items()]
        waiting += [("", part) for part in layers_of(layer)]
        seen: dict[int, Any] = {}
        while waiting:
            name, holder = waiting.pop()
            if isinstance(holder, dict | list):  # which TensorFlow may have wrapped
                holder = getattr(holder, "_storage", getattr(holder, "__wrapped__", holder))
            if id(holder) not in seen and not isinstance(holder, _IMMUTABLE):
                seen[id(holder)], content = holder, _content(holder)
                self._contents.append((name, holder, content))
                waiting += [(name or str(key), value) for key, value in content.items()]
                kind = holder if isinstance(holder, type) else type(holder)
                waiting += [("", base) for base in kind.__mro__]

    def change(self) -> str | None:
        """Return the name of something that has changed since; None if nothing."""
        for name, holder, before in self._contents:
            for key in _changed(before, _content(holder)):
                return name or str(key)
        return None

    def restore(self) -> None:
        for _, holder, before in self._contents:
            if changed := _changed(before, _content(holder)):
                _write(holder, before, changed)


def _content(holder: Any) -> dict[Any, Any]:
    """Return what an object holds, by names or positions."""
    if isinstance(holder, tuple | list | set | collections.deque):
        return dict(enumerate(holder))
    if isinstance(holder, dict):
        return dict(holder)
    if isinstance(holder, random.Random):
        return {0: holder.getstate()}
    if isinstance(holder, _OF_NUMPY):
        return {0: holder._bit_generator.state}
    if isinstance(holder, _AROUND_FUNCTIONS):
        names = ("__func__", "__self__", "func", "args", "keywords", "fget")
        return {name: getattr(holder, name) for name in names if hasattr(holder, name)}
    if isinstance(holder, types.CellType):
        with contextlib.suppress(ValueError):  # The cell may be empty.
            return {0: holder.cell_contents}
    if isinstance(holder, types.FunctionType):
        return _reached_by(holder) if _is_users(holder.__globals__.get("__name__")) else {}
    attributes = getattr(holder, "__dict__", {})
    module = getattr(holder, "__module__", "builtins")
    if isinstance(holder, keras.layers.Layer) or _is_users(module):
        return dict(attributes)
    return {name: attributes[name] for name in attributes.keys() & {"__wrapped__"}}


def _reached_by(function: types.FunctionType) -> dict[Any, Any]:
    """Return what a function, and those in it, name in their module; and what it holds."""
    codes, scope = [function.__code__], function.__globals__
    for code in codes:
        codes += [part for part in code.co_consts if isinstance(part, types.CodeType)]
    named = {name: scope[name] for code in codes for name in code.co_names if name in scope}
    return named | dict(enumerate((function.__closure__, function.__defaults__, vars(function))))


def _write(holder: Any, content: dict[Any, Any], changed: set[Any]) -> None:
    """Make an object hold again what it held."""
    if isinstance(holder, list | set | collections.deque):
        # Python's own methods, because those of Keras' containers track what is added.
        kind: Any = next(k for k in (list, set, collections.deque) if isinstance(holder, k))
        kind.clear(holder)
        fill: Any = set.update if kind is set else kind.extend
        fill(holder, content.values())
    elif isinstance(holder, random.Random):
        holder.setstate(content[0])
    elif isinstance(holder, _OF_NUMPY):
        holder._bit_generator.state = content[0]
    elif isinstance(holder, types.CellType):
        holder.cell_contents = content[0]
    elif isinstance(holder, type):
        for name in changed:
            setattr(holder, name, content[name]) if name in content else delattr(holder, name)
    else:
        is_function = isinstance(holder, types.FunctionType)
        attributes = holder.__globals__ if is_function else getattr(holder, "__dict__", None)
        namespace: Any = holder if isinstance(holder, dict) else attributes
        dict.update(namespace, {name: content[name] for name in changed & content.keys()})
        for name in changed - content.keys():
            dict.pop(namespace, name)


def _changed(before: dict[Any, Any], now: dict[Any, Any]) -> set[Any]:
    keys = before.keys() | now.keys()
    return {key for key in keys if not _is_same(before.get(key, Memory), now.get(key, Memory))}


def _is_same(before: Any, now: Any) -> bool:
    """Return whether something has not changed; a shape that each call notes again has not."""
    if before is now or type(before) is not type(now):
        return before is now
    if isinstance(before, dict):
        return not _changed(before, now)
    if isinstance(before, tuple) and not isinstance(before, tf.TensorShape):
        return len(before) == len(now) and all(map(_is_same, before, now))
    if isinstance(before, np.ndarray):
        return np.array_equal(before, now)
    return isinstance(before, _IMMUTABLE) and bool(before == now)


def _is_users(module: Any) -> bool:
    """Return whether a module is the user's."""
    return not is_library(str(module)) and str(module).partition(".")[0] not in _MODULES_OF_OTHERS
