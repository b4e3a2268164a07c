"""The law *each example is computed by itself*, tried on one layer alone.

A layer that keeps it may be divided over replicas, each of which computes its own examples. The
law is tried on four made-up examples of the shapes that the layer is called on, in a function that
a thread of its own traces and runs: nothing of the user's step or data is used. What the function
would do besides computing (assign, print, call Python) is looked up before it runs. Then one
example is replaced, some are left out, or they come in another order, and the outputs and
gradients of the others must stay what they were.

They may differ by rounding: a few units in the last place where the shapes are the same, more
where fewer examples may be computed by other kernels. A real dependence is larger by far, because
what replaces an example is NaN or huge.
"""

import concurrent.futures
import contextlib
import copy
import inspect
import io
import math
import random
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kdpkit.training._keras_internals import get_keras_mask, set_keras_mask
from kdpkit.training.tensorflow._keras_internals import (
    AROUND_CALLS,
    GLOBAL_SEED_GENERATOR,
    cancellation,
    config_pb2,
    context,
    global_state,
    op_def_registry,
)
from kdpkit.training.tensorflow._layer_state import noted
from kdpkit.training.tensorflow._step import ReplicaStep, current_step, running
from kdpkit.training.tensorflow._whose_code import (
    is_library,
    is_written_by_libraries,
    layers_of,
)

LEAVES = "leaves a tensor outside of itself"  # in a list of its module, or in another object

_EXAMPLES = 4
_WEIGHTS = (1.0, -0.7, 0.4, 1.3)  # of the examples, in the loss whose gradients are compared
_SECONDS = 300.0  # for one call: a loop may never end on a huge value
_HUGE = 1e30
_INFINITE = 1e6
_SMALL = 1e-4  # times these weights

# Tried in this order until the layer computes finite numbers: lengths of unknown axes, values.
_LENGTHS = (6, 32, 128)
_VALUES: dict[str, tuple[Callable, int]] = {  # floating ones, and the limit of integers
    "normal": (lambda draw, shape: draw.normal(size=shape), 4),
    "counts": (lambda draw, shape: draw.integers(0, 4, shape), 4),
    "fractions": (lambda draw, shape: draw.uniform(0.1, 0.9, shape), 2),
    "zeros and ones": (lambda draw, shape: draw.integers(0, 2, shape), 2),
}
_TEXTS = ("one", "two words", "and three words", "four words of text")

# What replaces one example: floats, what else has numbers, and texts. A function is given all
# examples and the position of the replaced one.
_REPLACEMENTS: dict[str, tuple[Any, Callable, str]] = {
    "NaN": (np.nan, lambda values, at: values[at - 1], "one"),
    "huge": (_HUGE, lambda values, _: values.max(), "a text of more words than any other has"),
    "huge and negative": (-_HUGE, lambda values, _: values.min(), "two words"),
    "zero": (0.0, lambda values, at: values[at] * 0, ""),
    "another one": (None, lambda values, at: values[at - 1], "two words"),
}
# In which order the examples come, one of them several times perhaps.
_ORDERS = (
    ([2, 0, 3, 1], "in another order"),
    ([0, 0, 0, 0], "when all are alike"),
    ([3, 3, 3, 3], "when all are alike"),
    ([*range(_EXAMPLES), 0, 1], "when there are more"),
    ([*range(_EXAMPLES)] * 3, "when there are more"),
    ([*range(_EXAMPLES)] * 3 + [3, 3, 3, 3], "when there are more"),
    ([*range(_EXAMPLES)] * 64, "when there are many"),
)
_MOST_INPUTS = 2**22  # numbers, for many examples
# Where the examples give more numbers than this, as with a vocabulary, a first step would take
# several times as long for all of it: one variant of each is tried, as of what libraries wrote.
_LARGE = 2**20
_REPLACEMENTS_BRIEFLY = ("NaN", "huge", "another one")
_VALUES_BRIEFLY = ("fractions",)
_ORDERS_BRIEFLY = _ORDERS[3:4]
_MAY_BE_INVALID = ("NaN", "huge", "huge and negative")  # for what looks positions up, say

_ASSIGNING = ("Assign", "ResourceScatter", "ResourceStridedSliceAssign", "ResourceApply")
_HARMLESS = re.compile(
    "Assert|Case|CheckNumerics(V2)?|HashTableV2|If|LookupTable(Find|Size)V2|(Stateful)?"
    "PartitionedCall|Placeholder|ReadVariableOp|ResourceGather(Nd)?|Var.*Op|VariableShape|While"
)


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def broken_law(layer: keras.layers.Layer, args: Any, kwargs: Any) -> str | None:
    """Return why a layer does not compute each example by itself; None if it does.

    The layer is built, and `_patches` installed. Its BatchNormalizations are taken to have the same
    statistics on all replicas, as `replica_exact` makes them. Nothing of the trial is seen
    afterwards.

    Args:
        layer: A layer, or a model that is used as one.
        args: What its call is given. Of tensors with examples only shapes and types are used: of
            those that have as many entries along axis 0 as the first one, or as unknown a number.
        kwargs: What its call is given by name.

    Returns:
        A predicate: "changes the outputs of other examples when one is NaN".
    """
    state = {name: copy.copy(of) for name, of in vars(_THREAD).items() if name not in AROUND_CALLS}

    def trial() -> str | None:
        vars(_THREAD).update(state)
        _call_functions_as_they_are()
        try:
            with _nothing_seen(layer):
                _Trial(layer, args, kwargs).run()
        except _BrokenError as broken:
            return str(broken)
        except tf.errors.OpError as error:
            return f"fails on some made-up examples ({_named(error)})"
        return None

    with concurrent.futures.ThreadPoolExecutor(1) as own_thread:
        return own_thread.submit(trial).result()


_THREAD = global_state.GLOBAL_STATE_TRACKER


class _BrokenError(Exception):
    """The layer breaks the law, or cannot be tried; the message is a predicate."""


class _Positions(ReplicaStep):
    """A step of some of four examples, for which random numbers are drawn by their positions."""

    def __init__(self, start: tf.Tensor, num_examples: tf.Tensor) -> None:
        self.strategy, self.replicas = tf.distribute.get_strategy(), 1
        self.num_examples, self.start = num_examples, start
        self.num_global_examples, self.is_part = tf.constant(_EXAMPLES), True
        self._graph, self.equal = None, set()


class _Results(NamedTuple):
    """What a call gave: outputs, gradients of each example, and those that examples share."""

    outputs: list[np.ndarray]
    gradients: list[np.ndarray]
    shared: list[np.ndarray]


class _Trial:
    """Calls a layer on made-up examples, and compares."""

    def __init__(self, layer: keras.layers.Layer, args: Any, kwargs: Any) -> None:
        self.layer, self.call = layer, (args, kwargs)
        leaves = tf.nest.flatten(self.call)
        self.masks = {id(mask) for leaf in leaves if (mask := _mask_of(leaf)) is not None}
        leaves += [mask for leaf in leaves if (mask := _mask_of(leaf)) is not None]
        given = {id(leaf): leaf for leaf in leaves if tf.is_tensor(leaf)}
        if not all(isinstance(tensor, tf.Tensor) for tensor in given.values()):
            raise _BrokenError("is called on ragged or sparse tensors")
        if any(tensor.shape.rank is None for tensor in given.values()):
            raise _BrokenError("is called on a tensor of unknown rank")
        sizes = [tensor.shape[0] for tensor in given.values() if tensor.shape.rank]
        if not sizes:
            raise _BrokenError("is called on no tensor with examples")
        self.given = given
        self.has_examples = [bool(t.shape.rank) and t.shape[0] == sizes[0] for t in given.values()]
        for tensor, has_examples in zip(given.values(), self.has_examples, strict=True):
            if not has_examples and tf.get_static_value(tensor) is None:
                raise _BrokenError("is called on a number that may be any, beside the examples")
        self.variables = _variables(layer)
        self.seeds = _seeds(layer)
        self.weights: Sequence[float] = _WEIGHTS

    def run(self) -> None:
        self.function = self.traced()
        self.reject_effects()
        self.values, self.base = self.made_up()
        is_large = sum(of.size for of in self.base.outputs) > _LARGE
        self.is_brief = is_large or is_written_by_libraries(self.layer)
        self.try_all("")
        self.try_other_values()
        if self.has_other_variables(1.0) or self.has_other_variables(0.1):
            when = ", if its variables have other values"
            if self.is_brief:
                self.try_parts(_EXAMPLES // 2, when)
            else:
                self.try_all(when)
        if self.has_other_variables(-1.0) or self.has_other_variables(-0.1):
            self.try_parts(_EXAMPLES // 2, ", if its weights are negative")

    def try_other_values(self) -> None:
        """Compare parts for values of other kinds: none is negative, say; and small gradients."""
        usual = self.values, self.base, self.weights
        self.weights = [_SMALL * weight for weight in _WEIGHTS]
        for kind in _VALUES_BRIEFLY if self.is_brief else _VALUES:
            self.values = self.values_of(kind, self.length)
            with contextlib.suppress(tf.errors.OpError):
                self.base = self.results(self.values, self.weights)
                if _is_finite(self.base):
                    self.try_parts(_EXAMPLES // 2, f", of {kind}")
        self.values, self.base, self.weights = usual

    def has_other_variables(self, scale: float) -> bool:
        """Give variables other values, and return whether what the layer gives is finite then."""
        draw = np.random.default_rng(1)
        for variable in self.variables:
            value = _usual_values(draw, variable.shape)
            value *= scale if variable.trainable else abs(scale)  # a variance, say
            variable.assign(tf.cast(value, variable.dtype))
        self.base = self.results(self.values)
        return bool(self.variables) and _is_finite(self.base)

    def traced(self) -> Any:
        specs = [
            tf.TensorSpec([None, *of.shape[1:]] if has_examples else of.shape, of.dtype)
            for of, has_examples in zip(self.given.values(), self.has_examples, strict=True)
        ]
        inputs = [specs, tf.TensorSpec([None]), tf.TensorSpec([], tf.int32)]
        function = tf.function(self.compute, autograph=False)  # as Keras has steps
        try:
            return function.get_concrete_function(*inputs)
        except _BrokenError:
            raise
        except Exception as error:  # of any kind: it is the user's code
            raise _BrokenError(f"cannot be tried alone ({_named(error)})") from error

    def compute(self, tensors: list[tf.Tensor], weights: tf.Tensor, start: tf.Tensor) -> Any:
        """Return outputs, gradients of the tensors with examples, and all other gradients."""
        made = dict(zip(self.given, tensors, strict=True))

        def replaced(leaf: Any) -> Any:
            tensor = made.get(id(leaf), leaf)
            if (mask := _mask_of(leaf)) is not None:
                set_keras_mask(tensor, made[id(mask)])
            return tensor

        args, kwargs = tf.nest.map_structure(replaced, self.call)
        pairs = zip(tensors, self.has_examples, strict=True)
        floats = [(x, own) for x, own in pairs if x.dtype.is_floating]
        own = [x for x, is_own in floats if is_own]
        shared = [x for x, is_own in floats if not is_own]
        with tf.GradientTape() as tape, running(_Positions(start, tf.size(weights))) as step:
            tape.watch([*own, *shared])
            outputs = self.outputs(args, kwargs)
            if step.drew_for_all:
                raise _BrokenError("draws numbers that the examples share")
        sources = [*own, *shared, *(of for of in self.variables if of.trainable)]
        targets = [output for output in outputs if output.dtype.is_floating]
        gradients = [None] * len(sources)
        if targets:
            upstream = [_upstream(output, weights) for output in targets]
            gradients = tape.gradient(targets, sources, upstream)
        dense = [
            tf.zeros_like(of) if gradient is None else tf.convert_to_tensor(gradient)
            for of, gradient in zip(sources, gradients, strict=True)
        ]
        outputs += [mask for output in outputs if (mask := _mask_of(output)) is not None]
        return _Results(outputs, dense[: len(own)], dense[len(own) :])

    def outputs(self, args: Any, kwargs: Any) -> list[Any]:
        """Call the layer, and return its tensors, if it leaves nothing behind in Python."""
        parts = layers_of(self.layer)
        held = [_tensors_held(part) for part in parts]
        outside = [_tensors_outside(part) for part in parts]
        losses = sum(len(part._losses) for part in parts)
        if (context := global_state.get_global_attribute("current_call_ctx")) is not None:
            context.entry_layer = None  # it knows whether the layer trains, and is used again
        outputs = [out for out in tf.nest.flatten(self.layer(*args, **kwargs)) if out is not None]
        if sum(len(part._losses) for part in parts) > losses:
            raise _BrokenError("adds a loss")
        for part, before in zip(parts, held, strict=True):
            for name, tensors in _tensors_held(part).items():
                if tensors - before.get(name, set()):
                    raise _BrokenError(f"keeps a tensor in an attribute, `{name}`")
        for part, known in zip(parts, outside, strict=True):
            if _tensors_outside(part) - known:
                raise _BrokenError(f"{LEAVES} (`{part.name}`)")
        if not all(isinstance(output, tf.Tensor) for output in outputs):
            raise _BrokenError("returns something other than dense tensors")
        if not outputs or any(output.shape.rank == 0 for output in outputs):
            raise _BrokenError("returns a single number" if outputs else "returns nothing")
        return outputs

    def reject_effects(self) -> None:
        """Look up what the function does besides computing, before it runs."""
        graph = self.function.graph
        names = {inner.op.name: outer for outer, inner in graph.captures}
        seeds = [part.handle for seed in self.seeds for part in _on_replicas(seed)]
        known = seeds + [part.handle for of in _statistics(self.layer) for part in _on_replicas(of)]
        assigning = [of for of in graph.get_operations() if of.type.startswith(_ASSIGNING)]
        handles = [names.get(of.inputs[0].op.name) for of in assigning]
        num_known = sum(any(handle is of for of in known) for handle in handles)
        self.draws = any(handle is seed for handle in handles for seed in seeds)
        definition = graph.as_graph_def()
        inner = [node for function in definition.library.function for node in function.node_def]
        types = [node.op for node in [*definition.node, *inner]]
        if sum(kind.startswith(_ASSIGNING) for kind in types) > num_known:
            raise _BrokenError("assigns variables")
        read = known + _handles_that_may_be_read(self.layer)
        for outer, _ in graph.captures:
            data = getattr(outer, "_handle_data", None)  # which variables have, and tables lack
            is_variable = outer.dtype == tf.resource and data is not None and data.is_set
            if is_variable and not any(outer is handle for handle in read):
                raise _BrokenError("reads a variable that something else may assign")
        for kind in types:
            operation = op_def_registry.get(kind)
            is_stateful = operation is not None and operation.is_stateful
            if is_stateful and not _HARMLESS.fullmatch(kind) and not kind.startswith(_ASSIGNING):
                raise _BrokenError(f"does more than compute each example ({kind})")

    def made_up(self) -> tuple[list[Any], _Results]:
        """Return examples that the layer can compute, and what it gives for them."""
        problem = "it gives no finite numbers"
        has_unknown = any(None in tensor.shape.as_list()[1:] for tensor in self.given.values())
        for length in _LENGTHS if has_unknown else _LENGTHS[:1]:
            for kind in _VALUES:
                values = self.values_of(kind, length)
                try:
                    base = self.results(values)
                except tf.errors.OpError as error:
                    problem = _named(error)
                    continue
                if any(len(output) == 0 or len(output) % _EXAMPLES for output in base.outputs):
                    raise _BrokenError("returns something without the examples along axis 0")
                if _is_finite(base):
                    self.length = length
                    return values, base
        raise _BrokenError(f"cannot be tried on made-up examples ({problem})")

    def values_of(self, kind: str, length: int) -> list[Any]:
        draw = np.random.default_rng(0)
        floats, limit = _VALUES[kind]

        def made_up(key: int, of: tf.Tensor, has_examples: bool) -> Any:
            if not has_examples and (known := tf.get_static_value(of)) is not None:
                return tf.constant(known, of.dtype)
            shape = [length if size is None else size for size in of.shape]
            shape[:1] = [_EXAMPLES] if has_examples else shape[:1]
            if of.dtype == tf.string:
                return tf.constant(np.resize(_TEXTS, shape))
            if key in self.masks:  # the first entries are there, in each example some more
                last = np.arange(1, _EXAMPLES + 1).reshape([-1] + [1] * (len(shape) - 1))
                return tf.constant(np.broadcast_to(np.arange(shape[-1]) <= last, shape))
            is_number = of.dtype.is_floating or of.dtype.is_complex
            drawn = floats(draw, shape) if is_number else draw.integers(0, limit, shape)
            return tf.cast(drawn, of.dtype)

        parts = zip(self.given.items(), self.has_examples, strict=True)
        return [made_up(key, of, has_examples) for (key, of), has_examples in parts]

    def results(self, values: list[Any], weights: Sequence[float] = _WEIGHTS, at: int = 0) -> Any:
        """Call the layer once, with the same random numbers and statistics each time."""
        changing = [*self.seeds, *_statistics(self.layer)]
        with _restored(changing), _ending(self.function) as function:
            found = function(values, tf.constant(weights, tf.float32), tf.constant(at))
        return _Results(*([_wide(tensor) for tensor in part] for part in found))

    def try_all(self, when: str) -> None:
        for index, kind in enumerate(_REPLACEMENTS_BRIEFLY if self.is_brief else _REPLACEMENTS):
            at, weights = index % _EXAMPLES, [*_WEIGHTS]
            weights[at] = _HUGE if kind == "another one" else weights[at]
            values = [
                _replacing(value, at, *_REPLACEMENTS[kind]) if has_examples else value
                for value, has_examples in zip(self.values, self.has_examples, strict=True)
            ]
            try:
                found = self.results(values, weights)
            except tf.errors.InvalidArgumentError:
                if kind in _MAY_BE_INVALID:
                    continue
                raise
            others = [example for example in range(_EXAMPLES) if example != at]
            self.compare(found, _EXAMPLES, others, others, f"when one is {kind}{when}")
        inputs = sum(int(tf.size(value)) for value in self.values) // _EXAMPLES
        for order, why in _ORDERS_BRIEFLY if self.is_brief else _ORDERS:
            is_drawn_elsewhere = self.draws and len(order) != _EXAMPLES  # numbers have positions
            is_too_much = len(order) > 4 * _EXAMPLES and len(order) * inputs > _MOST_INPUTS
            if is_drawn_elsewhere or is_too_much:
                continue
            same = [*range(len(order))]
            if self.draws:
                same = [position for position in same if order[position] == position]
            found, examples = self.taken(order), [order[position] for position in same]
            self.compare(found, len(order), examples, same, f"{why}{when}")
        for size in (1,) if self.is_brief else (1, 2):
            self.try_parts(size, when)

    def try_parts(self, size: int, when: str) -> None:
        """Call the layer on the first examples, and on the rest."""
        both = [*range(size)], [*range(size, _EXAMPLES)]
        parts = [self.taken(of) for of in both]
        for of, found in zip(both, parts, strict=True):
            self.compare(found, len(of), of, [*range(len(of))], f"when there are fewer{when}")
        # Of some variables it is zero, and its rounding that of the others: attention's key bias.
        largest = max((_largest(of) for of in self.base.shared), default=0.0) / 100
        for one, other, total in zip(*(of.shared for of in [*parts, self.base]), strict=True):
            if not _agree(one + other, total, self.rounding(is_same_size=False), largest):
                raise _BrokenError(f"has a gradient that is no sum over the examples{when}")

    def taken(self, order: list[int]) -> Any:
        """Call the layer on some of the examples."""
        values = [
            tf.gather(value, order) if has_examples else value
            for value, has_examples in zip(self.values, self.has_examples, strict=True)
        ]
        start = order[0] if len(order) < _EXAMPLES else 0
        return self.results(values, [self.weights[example] for example in order], start)

    def compare(
        self, found: _Results, size: int, examples: list[int], positions: list[int], when: str
    ) -> None:
        """Compare some examples, at these positions of a call on `size`, with what they were."""
        rounding = self.rounding(is_same_size=size == _EXAMPLES)
        for name in ("outputs", "gradients"):
            for base, other in zip(getattr(self.base, name), getattr(found, name), strict=True):
                is_shaped = other.shape == (len(base) * size // _EXAMPLES, *base.shape[1:])
                if is_shaped:
                    ours, theirs = other.reshape(size, -1), base.reshape(_EXAMPLES, -1)
                    pairs = zip(positions, examples, strict=True)
                    if all(np.array_equal(ours[at], theirs[of]) for at, of in pairs):
                        continue  # without copies of what may be large
                if not is_shaped or not _agree(ours[positions], theirs[examples], rounding):
                    raise _BrokenError(f"changes the {name} of examples {when}")

    def rounding(self, *, is_same_size: bool) -> float:
        """Return by how much of the largest number two results may differ."""
        unit = rounding_unit(self.layer)
        if is_same_size:
            return 2 * unit if unit > 1e-4 else 16 * unit
        return max(32 * unit, 1e-3)


def rounding_unit(layer: keras.layers.Layer) -> float:
    """Return the unit in the last place, at 1, of the coarsest type that a layer computes in."""
    types = [tf.as_dtype(part.compute_dtype) for part in layers_of(layer)]
    units = {tf.bfloat16: 2.0**-7, tf.float16: 2.0**-10, tf.float64: 2.0**-52}
    return max(units.get(kind, 2.0**-23) for kind in types)


def _agree(one: Any, other: Any, rounding: float, largest: float = 1e-3) -> bool:
    if np.array_equal(one, other):
        return True
    if one.dtype.kind not in "fc":
        return False
    usual, top = _largest(other), np.max(np.abs(other), initial=0.0)
    atol, rtol = rounding * max(usual, largest), rounding if usual < top else 0.0
    with np.errstate(invalid="ignore"):  # of two infinite ones
        is_close = np.max(np.abs(one - other), initial=0.0) <= atol  # soon found, and mostly so
    return bool(is_close) or np.allclose(one, other, rtol=rtol, atol=atol, equal_nan=True)


def _largest(values: Any) -> float:
    """Return the largest magnitude, but for those that stand for infinity in what is masked."""
    sizes = np.abs(values)
    top = np.max(sizes, initial=1e-3)
    return float(top if top < _INFINITE else np.max(sizes, initial=1e-3, where=sizes < _INFINITE))


def _is_finite(results: _Results) -> bool:
    parts = [part for of in results for part in of if part.dtype.kind in "fc"]
    return all(np.isfinite(part).all() for part in parts)


def _wide(tensor: tf.Tensor) -> Any:
    is_half = tensor.dtype.is_floating and tensor.dtype.size < tf.float32.size
    return np.asarray(tf.cast(tensor, tf.float32) if is_half else tensor)  # without a copy


def _named(error: Exception) -> str:
    """Return what an error says, without what Keras puts around it."""
    lines = re.sub(r"\x1b\[\d*m", "", str(error)).strip().split("\n")
    inner = [line for line in lines if line and not line.startswith("Exception encountered when")]
    return (inner or [type(error).__name__])[0][:200]


def _replacing(values: tf.Tensor, at: int, floats: Any, others: Callable, text: str) -> Any:
    """Return examples of which one is replaced; by another one where `floats` is None."""
    dtype, array = values.dtype, values.numpy()
    if dtype == tf.string:
        array[at] = text.encode()
    elif not dtype.is_floating and not dtype.is_complex:
        array[at] = others(array, at)
    else:
        wide = array.astype("complex128" if dtype.is_complex else "float64")
        limit = float(getattr(dtype, "max", _HUGE)) / 4 if dtype.is_floating else _HUGE
        wide[at] = wide[at - 1] if floats is None else np.clip(floats, -limit, limit)
        return tf.cast(wide, dtype)
    return tf.constant(array, dtype)


def _upstream(output: tf.Tensor, weights: tf.Tensor) -> Any:
    """Return the gradient of a loss that counts examples with these weights."""
    sizes, axes = tf.unstack(tf.shape(output)), output.shape.rank
    of_entries = tf.gather(
        weights, tf.range(sizes[0]) * tf.size(weights) // tf.maximum(sizes[0], 1)
    )
    limit = float(output.dtype.max) / 16
    gradient = tf.cast(tf.clip_by_value(of_entries, -limit, limit), output.dtype)
    gradient = tf.reshape(gradient, [-1] + [1] * (axes - 1))
    for axis, size in enumerate(sizes[1:], start=1):  # a product: what is large is computed once
        along = tf.random.stateless_uniform([size], [axis, 2], -1.0, 1.0)
        gradient *= tf.cast(tf.reshape(along, [-1] + [1] * (axes - 1 - axis)), output.dtype)
    return gradient


def _usual_values(draw: Any, shape: tf.TensorShape) -> Any:
    """Return values of a variable: for scales, biases and variances positive ones."""
    if shape.rank < 2:
        return draw.uniform(0.5, 1.5, shape)
    return draw.standard_normal([*shape], np.float32) / math.sqrt(math.prod(shape[:-1]))


def _mask_of(leaf: Any) -> Any:
    return get_keras_mask(leaf) if isinstance(leaf, tf.Tensor) else None


def _variables(layer: keras.layers.Layer) -> list[Any]:
    """List a layer's variables of floating numbers, those that Keras does not know of as well."""
    variables = [*(variable.value for variable in layer.variables), *_unknown_variables(layer)]
    found = {id(variable): variable for variable in variables}
    return [variable for variable in found.values() if variable.dtype.is_floating]


def _unknown_variables(layer: keras.layers.Layer) -> list[tf.Variable]:
    """List what a layer holds of TensorFlow's variables, of which Keras does not know."""
    held = (value for part in layers_of(layer) for value in _held(vars(part)))
    return [value for value in held if isinstance(value, tf.Variable)]


def _seeds(layer: keras.layers.Layer) -> list[Any]:
    generators = [generator for part in layers_of(layer) for generator in part._seed_generators]
    generators.append(global_state.get_global_attribute(GLOBAL_SEED_GENERATOR))
    return [generator.state.value for generator in generators]


def _handles_that_may_be_read(layer: keras.layers.Layer) -> list[Any]:
    """List the variables with whose values a layer is tried: weights, and all of its libraries'."""
    variables = [
        variable
        for part in layers_of(layer)
        for variable in (
            part._trainable_variables + part._non_trainable_variables
            if is_library(type(part).__module__)
            else part._trainable_variables
        )
    ]
    own = [variable for variable in _unknown_variables(layer) if variable.trainable]
    return [part.handle for v in [*(v.value for v in variables), *own] for part in _on_replicas(v)]


def _batch_norms(layer: keras.layers.Layer) -> list[Any]:
    return [
        of
        for of in layers_of(layer)
        if isinstance(of, keras.layers.BatchNormalization)
        and is_library(type(of).call.__module__)
        and is_library(type(of)._moments.__module__)
    ]


def _statistics(layer: keras.layers.Layer) -> list[Any]:
    """List the variables that BatchNormalizations assign, whose values the examples share."""
    return [v.value for part in _batch_norms(layer) for v in part.non_trainable_variables]


def _on_replicas(variable: Any) -> list[Any]:
    is_distributed = isinstance(variable, tf.distribute.DistributedValues)
    return [*variable.values] if is_distributed else [variable]


def _held(value: Any) -> Iterator[Any]:
    """Iterate over what is in containers, which may hold each other, and over these."""
    for part in value.values() if isinstance(value, dict) else value:
        yield part
        if isinstance(part, list | tuple | set | dict):
            yield from _held(part)


def _tensors_held(part: Any) -> dict[str, set[int]]:
    """Return which tensors a layer of the user's own holds: a library's has them for itself."""
    if is_library(type(part).__module__):
        return {}
    return {
        name: {id(tensor) for tensor in _held([value]) if tf.is_tensor(tensor)}
        for name, value in vars(part).items()
        if name != "_losses"
    }


def _tensors_outside(part: Any) -> set[int]:
    """Return which tensors are in what a layer of the user's names in its module, or has around."""
    kinds = [of for of in type(part).__mro__ if not is_library(of.__module__)]
    held = [*vars(part).values()] if kinds else []
    functions = [*held, *(of for kind in kinds for of in vars(kind).values())]
    for function in map(inspect.unwrap, filter(inspect.isfunction, functions)):
        if inspect.isfunction(function):
            names = inspect.getclosurevars(function)
            held += [*names.globals.values(), *names.nonlocals.values()]
    objects = [of for of in _held(held) if not is_library(type(of).__module__)]
    held = [vars(of) for of in objects if hasattr(of, "__dict__")] + [
        of for of in held if isinstance(of, list | dict | set)
    ]
    return {id(tensor) for tensor in _held(held) if tf.is_tensor(tensor)}


def _call_functions_as_they_are() -> None:
    """Have this thread's functions called without being optimized: they are called a few times."""
    config = config_pb2.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    options = context.FunctionCallOptions(config_proto=config)
    context.context().function_call_options = options


@contextlib.contextmanager
def _restored(variables: list[Any]) -> Iterator[None]:
    """Put back the values that variables have now, on each replica."""
    parts = [part for variable in variables for part in _on_replicas(variable)]
    values = [part.numpy() for part in parts]
    try:
        yield
    finally:
        for part, value in zip(parts, values, strict=True):
            part.assign(value)


@contextlib.contextmanager
def _ending(function: Any) -> Iterator[Any]:
    """Give a function that ends, by an error if need be."""
    manager = cancellation.CancellationManager()
    timer = threading.Timer(_SECONDS, manager.start_cancel)
    timer.start()
    try:
        yield manager.get_cancelable_function(function)
    except tf.errors.CancelledError as error:
        raise _BrokenError(f"computes made-up examples for more than {_SECONDS:.0f} s") from error
    finally:
        timer.cancel()


@contextlib.contextmanager
def _nothing_seen(layer: keras.layers.Layer) -> Iterator[None]:
    """Put back what calls of a layer change, and let them neither print nor make variables."""
    if global_state.get_global_attribute(GLOBAL_SEED_GENERATOR) is None:
        seeds = keras.random.SeedGenerator(0, name="trial")
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, seeds)
    parts = layers_of(layer)
    attributes = [(vars(part), {**vars(part)}) for part in parts]
    put_back = noted(of for _, before in attributes for of in _held(before))
    drawn = random.getstate(), np.random.get_state()  # what the user's code uses
    variables = [v.value for v in layer.variables] + _variables(layer) + _seeds(layer)
    hidden = io.StringIO()
    with _restored(variables), warnings.catch_warnings(), tf.variable_creator_scope(_make_none):
        warnings.simplefilter("ignore")
        for part in _batch_norms(layer):
            vars(part)["_moments"] = _same_moments(part)
        try:
            with contextlib.redirect_stdout(hidden), contextlib.redirect_stderr(hidden):
                yield
        finally:
            for now, before in attributes:
                now.clear()
                now.update(before)
            put_back()
            random.setstate(drawn[0])
            np.random.set_state(drawn[1])


def _make_none(*_: Any, **__: Any) -> Any:
    raise ValueError("it makes variables when it is called")


def _same_moments(layer: keras.layers.Layer) -> Callable:
    """Return statistics that all examples share, whatever they are; NaN for only some of them."""
    shape = layer.moving_mean.shape

    def moments(inputs: tf.Tensor, mask: Any) -> Any:  # noqa: ARG001  # Keras' signature
        step = current_step()
        is_of_some = tf.shape(inputs)[0] % step.num_examples != 0 if step else False
        mean = tf.where(is_of_some, tf.constant(math.nan, inputs.dtype), 0.0)
        return tf.fill(shape, mean), tf.ones(shape, inputs.dtype)

    return moments
