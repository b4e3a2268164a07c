"""The law *each example is computed by itself*, tried on one layer alone.

A layer that keeps it may be divided. It is tried on four made-up examples, in a thread of its own,
as a function of these and of the variables' values: the user's step and weights are left alone.
One example is replaced, some are left out, or more come in another order, and the outputs and
gradients of the others must stay what they were, except for rounding: a few units in the last
place, or more where fewer examples may be computed by other kernels. A real dependence is larger
by far, because what replaces an example is NaN or huge.
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
    OF_CALLS_AROUND,
    cancellation,
    global_state,
    seed_generator,
)
from kdpkit.training.tensorflow._library_layers import is_library, layers_of
from kdpkit.training.tensorflow._side_effects import Memory, Scope, effect_of_operations, unseen
from kdpkit.training.tensorflow._split import Split
from kdpkit.training.tensorflow._step import Part, running


class Verdict(enum.Enum):
    """What the trial of a layer found."""

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
_LARGE = 2**14  # numbers, in outputs and weights: what has more is tried on few examples only
_SECONDS = 300.0  # for one call: a loop may never end on a huge value
_HUGE, _INFINITE = 1e30, 1e6  # what is above the latter stands for infinity, in what is masked
_OTHERS = {"NaN": math.nan, "huge": _HUGE, "another one": None, "huge and negative": -_HUGE}
_TEXTS = ("one", "two words", "and three words", "four words of text")


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def try_layer(layer: keras.layers.Layer, args: Any, kwargs: Any) -> Finding:
    """Find out whether a layer computes each example by itself.

    The layer is built, and `_patches` installed. Activity regularizers and the statistics of
    BatchNormalization are left out. Nothing of the trial is seen afterwards.

    Args:
        layer: A layer, or a model that is used as one.
        args: What its call is given. Of tensors only shapes and types are used; all of them have
            the examples along axis 0.
        kwargs: What its call is given by name.
    """
    thread, around = global_state.GLOBAL_STATE_TRACKER, OF_CALLS_AROUND
    state = {name: copy.copy(of) for name, of in vars(thread).items() if name not in around}

    def trial() -> Finding:
        vars(thread).update(state)
        try:
            with unseen(layer):
                _Trial(layer, args, kwargs).run()
        except _FoundError as found:
            return Finding(*found.args)
        except tf.errors.CancelledError:
            return Finding(
                Verdict.UNTRIED, f"computes made-up examples for more than {_SECONDS:.0f} s"
            )
        except tf.errors.OpError as error:
            return Finding(Verdict.UNTRIED, f"fails on made-up examples ({error!r:.200})")
        return Finding(Verdict.KEPT)

    with concurrent.futures.ThreadPoolExecutor(1) as own_thread:
        return own_thread.submit(trial).result()


class Calling(keras.layers.Layer):
    """A layer that calls a function of tensors, so that it can be tried.

    Args:
        function: Is called with what the layer is called with: nests of tensors, and None.
        layers: Those that the function calls.
    """

    def __init__(self, function: Callable, layers: Sequence[keras.layers.Layer] = ()) -> None:
        super().__init__(autocast=False, dtype="float32")
        self.function, self.called = function, [*layers]
        self._allow_non_tensor_positional_args = self.built = True

    def call(self, *args: Any) -> Any:
        return self.function(*args)


class _FoundError(BaseException):
    """Ends a trial, with a verdict and its reason; no other error is meant by it."""


class _Trial:
    """Calls a layer on made-up examples, and compares."""

    def __init__(self, layer: keras.layers.Layer, args: Any, kwargs: Any) -> None:
        self.layer, self.call, self.unit = layer, (args, kwargs), rounding_unit(layer)
        leaves = tf.nest.flatten(self.call)
        leaves += [mask for leaf in leaves if (mask := get_keras_mask(leaf)) is not None]
        self.given = {id(leaf): leaf for leaf in leaves if tf.is_tensor(leaf)}
        tensors = self.given.values()
        is_dense = all(isinstance(of, tf.Tensor) and of.shape.rank for of in tensors)
        is_dense &= not any(of.dtype.is_complex for of in tensors)
        if not is_dense or len({of.shape[0] for of in tensors}) != 1:
            raise _FoundError(Verdict.UNTRIED, "is called on more than dense tensors of examples")
        generators = [of for part in layers_of(layer) for of in part._seed_generators]
        generators.append(seed_generator.global_seed_generator())
        self.seeds = {id(of.state): of.state for of in generators}
        self.variables = [*({id(of): of for of in _readable(layer)} | self.seeds).values()]
        held = [getattr(of.value, "values", [of.value])[0] for of in self.variables]
        self.initial = [tf.convert_to_tensor(of) for of in held]

    def run(self) -> None:
        self.function = self.traced()
        if (effect := effect_of_operations(self.function.graph)) is not None:
            raise _FoundError(Verdict.HAS_EFFECTS, effect)
        kind = "fractions"
        with contextlib.suppress(tf.errors.OpError):  # of a label that is none, say
            kind = "normal" if self.set_baseline("normal", 0, 1.0) else kind
        trials: tuple[tuple[str, str, int, float, Callable], ...] = (
            ("", kind, 0, 1.0, self.try_all),
            (", if its weights change", kind, 1, 1.0, self.try_all),
            (", if they are negative", kind, -1, 1.0, self.try_parts),
            (", of fractions", "fractions", 0, 1e-4, self.try_parts),
        )
        for when, of_kind, sign, scale, compare in trials:
            if not self.set_baseline(of_kind, sign, scale):
                raise _FoundError(Verdict.UNTRIED, f"gives no finite numbers{when}")
            compare(when)

    def traced(self) -> Any:
        """Trace the call; once more if it keeps something in Python, which may be the same then."""
        specs = [tf.TensorSpec([None, *of.shape[1:]], of.dtype) for of in self.given.values()]
        inputs = specs, self.initial, tf.TensorSpec([None]), tf.TensorSpec([], tf.int32)
        kinds: list[str] = []
        for _ in range(2):
            memory, former = Memory(self.layer), kinds
            try:  # without AutoGraph, as Keras has steps
                traced = tf.function(self.compute, autograph=False).get_concrete_function(*inputs)
            except Exception as error:  # of any kind: it is the user's code
                reason = f"cannot be tried alone ({error!r:.200})"
                raise _FoundError(Verdict.UNTRIED, reason) from error
            kinds = [operation.type for operation in traced.graph.get_operations()]
            if (changed := memory.change()) is None and former in ([], kinds):
                return traced
        reason = f"changes what Python keeps (`{changed or 'what it computes next'}`)"
        raise _FoundError(Verdict.HAS_EFFECTS, reason)

    def compute(self, tensors: list, state: list, weights: tf.Tensor, start: tf.Tensor) -> Any:
        """Return outputs, gradients of the examples, and those of the variables."""
        made = dict(zip(self.given, tensors, strict=True))

        def exchanged(leaf: Any) -> Any:
            tensor = made.get(id(leaf), leaf)
            if (mask := get_keras_mask(leaf)) is not None:
                set_keras_mask(tensor, made[id(mask)])
            return tensor

        args, kwargs = tf.nest.map_structure(exchanged, self.call)
        scope = Scope(self.variables, state, free=self.seeds)
        part = Part(None, 0, Split(tf.constant(len(_MORE)), [start], [tf.size(weights)], []))
        own = [x for x in tensors if x.dtype.is_floating]
        trained = [x for x, of in zip(state, self.variables, strict=True) if of.trainable]
        sources = own + [x for x in trained if x.dtype.is_floating]
        with tf.GradientTape() as tape, running(None, part), scope:
            tape.watch(sources)
            outputs = [of for of in tf.nest.flatten(self.layer(*args, **kwargs)) if of is not None]
        self.draws = scope.draws
        if scope.effects:
            raise _FoundError(Verdict.HAS_EFFECTS, scope.effects[0])
        if part.drew_for_all:
            raise _FoundError(Verdict.MIXES, "draws numbers that the examples share")
        if not outputs or not all(isinstance(of, tf.Tensor) and of.shape.rank for of in outputs):
            raise _FoundError(Verdict.UNTRIED, "returns no tensors, or a single number")
        targets = [output for output in outputs if output.dtype.is_floating]
        upstream = [_upstream_of(output, weights) for output in targets]
        found = tape.gradient(targets, sources, upstream, unconnected_gradients="zero")
        outputs += [mask for output in outputs if (mask := get_keras_mask(output)) is not None]
        gradients = [tf.convert_to_tensor(gradient) for gradient in found]
        return outputs, gradients[: len(own)], gradients[len(own) :]

    def set_baseline(self, kind: str, sign: int, scale: float) -> bool:
        """Choose examples, weights and results to compare with; return whether these are finite."""
        self.values = [_made_up(of, kind) for of in self.given.values()]
        self.weights, self.state = np.multiply(scale, _WEIGHTS, dtype=np.float32), self.initial
        if sign:
            of_each = zip(self.variables, self.initial, strict=True)
            self.state = [_other_weights(*of, sign) for of in of_each]
        self.base = self.results([*range(_EXAMPLES)])
        if any(len(output) == 0 or len(output) % _EXAMPLES for output in self.base[0]):
            raise _FoundError(Verdict.UNTRIED, "returns something without examples along axis 0")
        arrays = itertools.chain(*self.base)
        return all(np.isfinite(array).all() for array in arrays if array.dtype.kind in "fc")

    def try_all(self, when: str) -> None:
        """Call the layer with one example replaced, on more of them, and on fewer."""
        for at, (name, by) in enumerate(_OTHERS.items()):
            invalid = () if by is None else (tf.errors.InvalidArgumentError,)
            with contextlib.suppress(*invalid):  # a position that is looked up, say
                self.check([*range(_EXAMPLES)], f"when one is {name}{when}", at, by)
        size = sum(of.size for of in self.base[0]) + sum(int(tf.size(of)) for of in self.state)
        times = 1 if self.draws or size > _LARGE else _TIMES
        self.check(_MORE * times, f"when there are more{when}")
        self.try_parts(when)

    def try_parts(self, when: str) -> None:
        """Call the layer on the first example, and on the rest."""
        parts = [self.check(of, f"when there are fewer{when}") for of in ([0], [1, 2, 3])]
        # Of some variables it is zero, and its rounding that of the others: attention's key bias.
        least = max(map(_largest, self.base[2]), default=0.0) / 100
        for one, other, total in zip(*parts, self.base[2], strict=True):
            if not _agree(one + other, total, max(32 * self.unit, 1e-3), least):
                reason = f"has a gradient that is no sum over the examples{when}"
                raise _FoundError(Verdict.MIXES, reason)

    def check(self, order: list[int], when: str, at: int = -1, by: Any = None) -> list[Any]:
        """Compare examples, one replaced perhaps, with the base; return variables' gradients."""
        found = self.results(order, at, by)
        same = [position for position in range(len(order)) if position != at]
        if self.draws:  # numbers that have positions
            same = [position for position in same if order[position] == order[0] + position]
        rounding = max(32 * self.unit, 1e-3)
        if len(order) == _EXAMPLES:  # which the same kernels compute
            rounding = self.unit * (2 if self.unit > 1e-4 else 16)
        for name, bases, others in zip(("outputs", "gradients"), self.base, found, strict=False):
            for base, other in zip(bases, others, strict=True):
                is_like = other.shape == (len(base) * len(order) // _EXAMPLES, *base.shape[1:])
                ours = other.reshape(len(order), -1)[same] if is_like else other
                theirs = base.reshape(_EXAMPLES, -1)[[order[position] for position in same]]
                if not is_like or not _agree(ours, theirs, rounding):
                    raise _FoundError(Verdict.MIXES, f"changes the {name} of examples {when}")
        return found[2]

    def results(self, order: list[int], at: int = -1, by: Any = None) -> list[list[Any]]:
        """Call the layer once, with the same random numbers each time; it ends, or is cancelled."""
        weights, values = self.weights[order], [value.numpy()[order] for value in self.values]
        if at >= 0:
            weights[at] = _HUGE if by is None else weights[at]
            for array, value in zip(values, self.values, strict=True):
                array[at] = _replacement(array, at, by, value.dtype)
        inputs = [*map(tf.constant, values)], self.state, *map(tf.constant, (weights, order[0]))
        manager = cancellation.CancellationManager()
        timer = threading.Timer(_SECONDS, manager.start_cancel)
        timer.start()
        try:
            found = manager.get_cancelable_function(self.function)(*inputs)
        finally:
            timer.cancel()
        halves = (tf.float16, tf.bfloat16)
        return [
            [np.asarray(tf.cast(of, tf.float32) if of.dtype in halves else of) for of in part]
            for part in found
        ]


def _made_up(of: tf.Tensor, kind: str) -> Any:
    """Return examples in place of others: normal or positive numbers, small integers, texts."""
    shape = [_EXAMPLES, *(_LENGTH if size is None else size for size in of.shape[1:])]
    draw, is_normal = np.random.default_rng(0), kind == "normal"
    if of.dtype == tf.string:
        return tf.constant(np.resize(_TEXTS, shape))
    if not of.dtype.is_floating:
        return tf.cast(draw.integers(0, 4 if is_normal else 2, shape), of.dtype)
    return tf.cast(
        draw.normal(size=shape) if is_normal else draw.uniform(0.1, 0.9, shape), of.dtype
    )


def _replacement(array: Any, at: int, by: float | None, dtype: tf.DType) -> Any:
    """Return what replaces an example: of integers and texts what others have."""
    if by is None:
        return array[at - 1]
    if dtype.is_floating:
        return np.clip(by, -float(dtype.max) / 4, float(dtype.max) / 4)
    return array.min() if by < 0 else array.max()


def _other_weights(variable: keras.Variable, value: tf.Tensor, sign: int) -> Any:
    """Return another value of a variable; all of a sign, if it has one axis, say a bias."""
    if not value.dtype.is_floating:
        return value
    draw = np.random.default_rng(1)
    drawn = draw.uniform(0.5, 1.5, value.shape)
    if value.shape.rank > 1:
        drawn = draw.standard_normal(value.shape) / math.sqrt(math.prod(value.shape[:-1]))
    return tf.cast(drawn * (sign if variable.trainable else 1), value.dtype)


def _upstream_of(output: tf.Tensor, weights: tf.Tensor) -> Any:
    """Return the gradient of a loss for an output; each example has a weight in it."""
    shape, limit = tf.shape(output), float(output.dtype.max) / 16
    examples = tf.range(shape[0]) * tf.size(weights) // tf.maximum(shape[0], 1)
    of_each = tf.clip_by_value(tf.gather(weights, examples), -limit, limit)
    of_each = tf.reshape(of_each, tf.concat([shape[:1], tf.ones_like(shape[1:])], 0))
    factors = tf.random.stateless_uniform(shape[1:], [0, 2], -1.0, 1.0)
    return tf.cast(of_each, output.dtype) * tf.cast(factors, output.dtype)


def _readable(layer: keras.layers.Layer) -> list[Any]:
    """List the variables that a layer may read: weights, and what its libraries' layers keep.

    What the user's layers keep besides, a callback may assign later.
    """
    parts = layers_of(layer)
    of_libraries = [part for part in parts if is_library(type(part).__module__)]
    weights = [weight for part in parts for weight in part._trainable_variables]
    return weights + [kept for part in of_libraries for kept in part._non_trainable_variables]


def rounding_unit(layer: keras.layers.Layer) -> float:
    """Return the unit in the last place, at 1, of the coarsest type that a layer computes in."""
    types = [tf.as_dtype(part.compute_dtype) for part in layers_of(layer)]
    units = {tf.bfloat16: 2.0**-7, tf.float16: 2.0**-10, tf.float64: 2.0**-52}
    return max(units.get(kind, 2.0**-23) for kind in types)


def _agree(one: Any, other: Any, rounding: float, least: float = 0.0) -> bool:
    if np.array_equal(one, other) or one.dtype.kind not in "fc":
        return np.array_equal(one, other)
    size = max(_largest(other), least)
    return np.allclose(one, other, rtol=rounding, atol=rounding * size, equal_nan=True)


def _largest(values: Any) -> float:
    """Return the largest magnitude, except for those that stand for infinity."""
    sizes = np.abs(values)
    return float(np.max(sizes, initial=1e-3, where=sizes < _INFINITE))
