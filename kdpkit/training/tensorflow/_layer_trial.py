"""Whether a layer computes each example by itself, tried on one layer without its model.

A layer that does may be divided. It is tried on four made-up examples, in a thread of its own, as a
function of these and of the variables' values: the user's step and weights do not change. One
example is replaced, some are left out, or more come in another order, and the outputs and gradients
of the others must stay what they were, except for rounding: a few units in the last place, or more
where other kernels may compute fewer examples. A real dependence is far larger, because NaN or a
huge number replaces an example.
"""

import concurrent.futures
import contextlib
import copy
import enum
import itertools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kdpkit.training._keras_internals import get_keras_mask, set_keras_mask
from kdpkit.training.tensorflow._keras_internals import (
    STATE_OF_LAYER_CALLS,
    cancellation,
    global_state,
    seed_generator,
)
from kdpkit.training.tensorflow._library_layers import is_library, layers_of
from kdpkit.training.tensorflow._side_effects import Memory, Scope, effect_of_operations, unseen
from kdpkit.training.tensorflow._split import Split
from kdpkit.training.tensorflow._step import Part, running


class Verdict(enum.Enum):
    """What the trial of a layer showed."""

    KEPT = "each example is computed by itself"
    MIXES = "an output or a gradient depends on other examples, or a gradient is no sum over them"
    HAS_EFFECTS = "it does more than compute: it assigns, adds a loss or keeps a tensor, say"
    UNTRIED = "it cannot be tried on made-up examples"


class Finding(NamedTuple):
    """A verdict, and why: a predicate as "changes the outputs of examples when one is NaN"."""

    verdict: Verdict
    reason: str = ""


_EXAMPLES, _LENGTH = 4, 32  # made-up ones, and the length of their axes that are unknown
_WEIGHTS = (1.0, -0.7, 0.4, 1.3)  # of the examples, in the loss whose gradients are compared
_MORE, _TIMES = [0, 1, 2, 3, 1, 0], 64  # examples, and how often these are repeated
_LARGE = 2**14  # numbers in outputs and weights: layers with more are tried on few examples only
_SECONDS = 300.0  # for one call, because a loop may never end on a huge value
_HUGE, _INFINITE = 1e30, 1e6  # a number above the latter stands for infinity, in a mask
_REPLACEMENTS = {"NaN": math.nan, "huge": _HUGE, "another one": None, "huge and negative": -_HUGE}
_TEXTS = ("one", "two words", "and three words", "four words of text")


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def try_layer(layer: keras.layers.Layer, args: Any, kwargs: Any) -> Finding:
    """Return whether a layer computes each example by itself.

    The layer is built, and `_patches` installed. Of the call's tensors only shapes and types are
    used; all of them have the examples along axis 0. Activity regularizers and the statistics of
    BatchNormalization are left out. Afterwards nothing has changed.
    """
    thread = vars(global_state.GLOBAL_STATE_TRACKER)
    state = {
        name: copy.copy(value) for name, value in thread.items() if name not in STATE_OF_LAYER_CALLS
    }

    def trial() -> Finding:
        vars(global_state.GLOBAL_STATE_TRACKER).update(state)  # of the trial's thread
        try:
            with unseen(layer):
                _Trial(layer, args, kwargs).run()
        except _Ended as ended:
            return Finding(*ended.args)
        except tf.errors.CancelledError:
            reason = f"computes made-up examples for more than {_SECONDS:.0f} s"
            return Finding(Verdict.UNTRIED, reason)
        except tf.errors.OpError as error:
            return Finding(Verdict.UNTRIED, f"fails on made-up examples ({error!r:.200})")
        return Finding(Verdict.KEPT)

    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(trial).result()


class Calling(keras.layers.Layer):
    """A layer that calls a function of tensors, with the layers that the function calls."""

    def __init__(self, function: Callable, layers: Sequence[keras.layers.Layer] = ()) -> None:
        super().__init__(autocast=False, dtype="float32")
        self.function, self.called = function, [*layers]
        self._allow_non_tensor_positional_args = self.built = True

    def call(self, *args: Any) -> Any:
        return self.function(*args)


class _Ended(BaseException):
    """Ends a trial, with a verdict and its reason."""


class _Trial:
    """Calls a layer on made-up examples, and compares."""

    def __init__(self, layer: keras.layers.Layer, args: Any, kwargs: Any) -> None:
        self.layer, self.arguments, self.unit = layer, (args, kwargs), rounding_unit(layer)
        leaves = tf.nest.flatten(self.arguments)
        leaves += [mask for leaf in leaves if (mask := get_keras_mask(leaf)) is not None]
        self.inputs = {id(leaf): leaf for leaf in leaves if tf.is_tensor(leaf)}
        tensors = self.inputs.values()
        is_dense = all(isinstance(x, tf.Tensor) and x.shape.rank for x in tensors)
        is_dense &= not any(x.dtype.is_complex for x in tensors)
        if not is_dense or len({x.shape[0] for x in tensors}) != 1:
            raise _Ended(Verdict.UNTRIED, "is called on more than dense tensors of examples")
        generators = [seed for part in layers_of(layer) for seed in part._seed_generators]
        generators.append(seed_generator.global_seed_generator())
        self.seeds = {id(generator.state): generator.state for generator in generators}
        readable = {id(variable): variable for variable in _readable(layer)}
        self.variables = [*(readable | self.seeds).values()]
        copies = [getattr(v.value, "values", [v.value])[0] for v in self.variables]
        self.initial = [tf.convert_to_tensor(value) for value in copies]

    def run(self) -> None:
        self.function = self.traced()
        if (effect := effect_of_operations(self.function.graph)) is not None:
            raise _Ended(Verdict.HAS_EFFECTS, effect)
        kind = "fractions"
        with contextlib.suppress(tf.errors.OpError):  # of a label that does not exist, for example
            kind = "normal" if self.set_baseline("normal", 0, 1.0) else kind
        trials: tuple[tuple[str, str, int, float, Callable], ...] = (
            ("", kind, 0, 1.0, self.try_all),
            (", if its weights change", kind, 1, 1.0, self.try_all),
            (", if they are negative", kind, -1, 1.0, self.try_parts),
            (", of fractions", "fractions", 0, 1e-4, self.try_parts),
        )
        for when, kind_of_trial, sign, scale, compare in trials:
            if not self.set_baseline(kind_of_trial, sign, scale):
                raise _Ended(Verdict.UNTRIED, f"gives no finite numbers{when}")
            compare(when)

    def traced(self) -> Any:
        """Trace the call twice if the first time changed something in Python, then perhaps not."""
        specs = [tf.TensorSpec([None, *x.shape[1:]], x.dtype) for x in self.inputs.values()]
        signature = specs, self.initial, tf.TensorSpec([None]), tf.TensorSpec([], tf.int32)
        types: list[str] = []
        for _ in range(2):
            memory, former_types = Memory(self.layer), types
            try:  # without AutoGraph, as Keras traces steps
                function = tf.function(self.compute, autograph=False)
                traced = function.get_concrete_function(*signature)
            except Exception as error:  # of any kind, because it is the user's code
                reason = f"cannot be tried alone ({error!r:.200})"
                raise _Ended(Verdict.UNTRIED, reason) from error
            types = [operation.type for operation in traced.graph.get_operations()]
            if (changed := memory.change()) is None and former_types in ([], types):
                return traced
        reason = f"changes what Python keeps (`{changed or 'what it computes next'}`)"
        raise _Ended(Verdict.HAS_EFFECTS, reason)

    def compute(self, tensors: list, state: list, weights: tf.Tensor, start: tf.Tensor) -> Any:
        """Return outputs, gradients of the examples, and those of the variables."""
        made_up = dict(zip(self.inputs, tensors, strict=True))

        def replacement(leaf: Any) -> Any:
            tensor = made_up.get(id(leaf), leaf)
            if (mask := get_keras_mask(leaf)) is not None:
                set_keras_mask(tensor, made_up[id(mask)])
            return tensor

        args, kwargs = tf.nest.map_structure(replacement, self.arguments)
        scope = Scope(self.variables, state, free=self.seeds)
        part = Part(None, 0, Split(tf.constant(len(_MORE)), [start], [tf.size(weights)], []))
        features = [x for x in tensors if x.dtype.is_floating]
        trainable = [x for x, v in zip(state, self.variables, strict=True) if v.trainable]
        sources = features + [x for x in trainable if x.dtype.is_floating]
        with tf.GradientTape() as tape, running(None, part), scope:
            tape.watch(sources)
            outputs = tf.nest.flatten(self.layer(*args, **kwargs))
            outputs = [output for output in outputs if output is not None]
        self.draws = scope.draws
        if scope.effects:
            raise _Ended(Verdict.HAS_EFFECTS, scope.effects[0])
        if part.drew_for_all:
            raise _Ended(Verdict.MIXES, "draws numbers that the examples share")
        if not outputs or not all(isinstance(x, tf.Tensor) and x.shape.rank for x in outputs):
            raise _Ended(Verdict.UNTRIED, "returns no tensors, or a single number")
        targets = [output for output in outputs if output.dtype.is_floating]
        upstream = [_upstream_of(output, weights) for output in targets]
        gradients = tape.gradient(targets, sources, upstream, unconnected_gradients="zero")
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        outputs += [mask for output in outputs if (mask := get_keras_mask(output)) is not None]
        return outputs, gradients[: len(features)], gradients[len(features) :]

    def set_baseline(self, kind: str, sign: int, scale: float) -> bool:
        """Choose examples, weights and results to compare with; return whether these are finite."""
        self.examples = [_made_up(x, kind).numpy() for x in self.inputs.values()]
        self.weights, self.state = np.multiply(scale, _WEIGHTS, dtype=np.float32), self.initial
        if sign:
            pairs = zip(self.variables, self.initial, strict=True)
            self.state = [_other_weights(variable, value, sign) for variable, value in pairs]
        self.baseline = self.results([*range(_EXAMPLES)])
        if any(len(output) == 0 or len(output) % _EXAMPLES for output in self.baseline[0]):
            raise _Ended(Verdict.UNTRIED, "returns something without examples along axis 0")
        arrays = itertools.chain(*self.baseline)
        return all(np.isfinite(array).all() for array in arrays if array.dtype.kind in "fc")

    def try_all(self, when: str) -> None:
        """Call the layer with one example replaced, on more of them, and on fewer."""
        for at, (name, value) in enumerate(_REPLACEMENTS.items()):
            # A huge position cannot be looked up, for example.
            invalid = () if value is None else (tf.errors.InvalidArgumentError,)
            with contextlib.suppress(*invalid):
                self.check([*range(_EXAMPLES)], f"when one is {name}{when}", at, value)
        size = sum(x.size for x in self.baseline[0]) + sum(int(tf.size(x)) for x in self.state)
        times = 1 if self.draws or size > _LARGE else _TIMES
        self.check(_MORE * times, f"when there are more{when}")
        self.try_parts(when)

    def try_parts(self, when: str) -> None:
        """Call the layer on the first example, and on the rest."""
        parts = [self.check(order, f"when there are fewer{when}") for order in ([0], [1, 2, 3])]
        # Some gradients are zero except for rounding, as large as that of the others: for example
        # that of the bias of attention's keys.
        least = max(map(_largest, self.baseline[2]), default=0.0) / 100
        for first, rest, total in zip(*parts, self.baseline[2], strict=True):
            if not _agree(first + rest, total, max(32 * self.unit, 1e-3), least):
                reason = f"has a gradient that is no sum over the examples{when}"
                raise _Ended(Verdict.MIXES, reason)

    def check(self, order: list[int], when: str, at: int = -1, value: Any = None) -> list[Any]:
        """Compare examples with the baseline, except for one at `at`; return weights' gradients."""
        results = self.results(order, at, value)
        same = [position for position in range(len(order)) if position != at]
        if self.draws:  # Random numbers depend on the position in the batch.
            same = [position for position in same if order[position] == order[0] + position]
        rounding = max(32 * self.unit, 1e-3)
        if len(order) == _EXAMPLES:  # which the same kernels compute
            rounding = self.unit * (2 if self.unit > 1e-4 else 16)
        for name, expected, arrays in zip(
            ("outputs", "gradients"), self.baseline, results, strict=False
        ):
            for base, array in zip(expected, arrays, strict=True):
                is_like = array.shape == (len(base) * len(order) // _EXAMPLES, *base.shape[1:])
                ours = array.reshape(len(order), -1)[same] if is_like else array
                theirs = base.reshape(_EXAMPLES, -1)[[order[position] for position in same]]
                if not is_like or not _agree(ours, theirs, rounding):
                    raise _Ended(Verdict.MIXES, f"changes the {name} of examples {when}")
        return results[2]

    def results(self, order: list[int], at: int = -1, value: Any = None) -> list[list[Any]]:
        """Call the layer once, with the same random numbers each time; it ends, or is cancelled."""
        weights, arrays = self.weights[order], [array[order] for array in self.examples]
        if at >= 0:
            weights[at] = _HUGE if value is None else weights[at]
            for array, x in zip(arrays, self.inputs.values(), strict=True):
                array[at] = _replacement(array, at, value, x.dtype)
        inputs = [*map(tf.constant, arrays)], self.state, *map(tf.constant, (weights, order[0]))
        manager = cancellation.CancellationManager()
        timer = threading.Timer(_SECONDS, manager.start_cancel)
        timer.start()
        try:
            results = manager.get_cancelable_function(self.function)(*inputs)
        finally:
            timer.cancel()
        halves = (tf.float16, tf.bfloat16)
        return [
            [np.asarray(tf.cast(x, tf.float32) if x.dtype in halves else x) for x in tensors]
            for tensors in results
        ]


def _made_up(tensor: tf.Tensor, kind: str) -> Any:
    """Return made-up examples: normal or positive numbers, small integers, or texts."""
    shape = [_EXAMPLES, *(_LENGTH if size is None else size for size in tensor.shape[1:])]
    generator, is_normal = np.random.default_rng(0), kind == "normal"
    numbers: Any
    if tensor.dtype == tf.string:
        return tf.constant(np.resize(_TEXTS, shape))
    if not tensor.dtype.is_floating:
        numbers = generator.integers(0, 4 if is_normal else 2, shape)
    elif is_normal:
        numbers = generator.normal(size=shape)
    else:
        numbers = generator.uniform(0.1, 0.9, shape)
    return tf.cast(numbers, tensor.dtype)


def _replacement(array: Any, at: int, value: float | None, dtype: tf.DType) -> Any:
    """Return what replaces an example: integers and texts that other examples have."""
    if value is None:
        return array[at - 1]
    if dtype.is_floating:
        return np.clip(value, -float(dtype.max) / 4, float(dtype.max) / 4)
    return array.min() if value < 0 else array.max()


def _other_weights(variable: keras.Variable, value: tf.Tensor, sign: int) -> Any:
    """Return another value of a variable; of one sign, if it has one axis, as a bias."""
    if not value.dtype.is_floating:
        return value
    generator = np.random.default_rng(1)
    numbers = generator.uniform(0.5, 1.5, value.shape)
    if value.shape.rank > 1:
        fan_in = math.prod(value.shape[:-1])
        numbers = generator.standard_normal(value.shape) / math.sqrt(fan_in)
    return tf.cast(numbers * (sign if variable.trainable else 1), value.dtype)


def _upstream_of(output: tf.Tensor, weights: tf.Tensor) -> Any:
    """Return the gradient of a loss for an output; each example has a weight in it."""
    shape, limit = tf.shape(output), float(output.dtype.max) / 16
    examples = tf.range(shape[0]) * tf.size(weights) // tf.maximum(shape[0], 1)
    weights = tf.clip_by_value(tf.gather(weights, examples), -limit, limit)
    weights = tf.reshape(weights, tf.concat([shape[:1], tf.ones_like(shape[1:])], 0))
    factors = tf.random.stateless_uniform(shape[1:], [0, 2], -1.0, 1.0)
    return tf.cast(weights, output.dtype) * tf.cast(factors, output.dtype)


def _readable(layer: keras.layers.Layer) -> list[Any]:
    """List the variables that a layer may read: weights, and the state of libraries' layers.

    The state of a user's layers may be assigned by a callback later.
    """
    parts = layers_of(layer)
    weights = [weight for part in parts for weight in part._trainable_variables]
    of_libraries = [part for part in parts if is_library(type(part).__module__)]
    return weights + [state for part in of_libraries for state in part._non_trainable_variables]


def rounding_unit(layer: keras.layers.Layer) -> float:
    """Return the unit in the last place, at 1, of the coarsest type that a layer computes in."""
    types = [tf.as_dtype(part.compute_dtype) for part in layers_of(layer)]
    units = {tf.bfloat16: 2.0**-7, tf.float16: 2.0**-10, tf.float64: 2.0**-52}
    return max(units.get(dtype, 2.0**-23) for dtype in types)


def _agree(actual: Any, expected: Any, rounding: float, least: float = 0.0) -> bool:
    if np.array_equal(actual, expected) or actual.dtype.kind not in "fc":
        return np.array_equal(actual, expected)
    size = max(_largest(expected), least)
    return np.allclose(actual, expected, rtol=rounding, atol=rounding * size, equal_nan=True)


def _largest(values: Any) -> float:
    """Return the largest magnitude, except for those that stand for infinity."""
    sizes = np.abs(values)
    return float(np.max(sizes, initial=1e-3, where=sizes < _INFINITE))
