"""The law *each example is computed by itself*, tried on one layer alone.

A layer that keeps it may be divided. It is tried on four made-up examples of the shapes that it is
called on, in a thread of its own, as a function of these and of the variables' values: the user's
step and weights are left alone. One example is replaced, some are left out, or they come in another
order, and the outputs and gradients of the others must stay what they were. They may differ by
rounding: by a few units in the last place, or more where fewer examples may be computed by other
kernels. A real dependence is larger by far, because what replaces an example is NaN or huge.
"""

import concurrent.futures
import contextlib
import copy
import enum
import itertools
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kdpkit.training._keras_internals import get_keras_mask, set_keras_mask
from kdpkit.training.tensorflow import _made_up
from kdpkit.training.tensorflow._effects import Memory, Scope, effect_of_operations, unseen
from kdpkit.training.tensorflow._keras_internals import (
    AROUND_CALLS,
    GLOBAL_SEED_GENERATOR,
    cancellation,
    config_pb2,
    context,
    global_state,
)
from kdpkit.training.tensorflow._libraries import is_library, layers_of
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


_EXAMPLES = _made_up.EXAMPLES
_WEIGHTS = (1.0, -0.7, 0.4, 1.3)  # of the examples, in the loss whose gradients are compared
_SMALL = 1e-4  # times the weights, for gradients with a least size
_SECONDS = 300.0  # for one call: a loop may never end on a huge value
_INFINITE = 1e6  # what is larger stands for infinity, in what is masked
_MORE, _MANY = [0, 1, 2, 3, 1, 0], [0, 1, 2, 3] * 64  # examples, some of them several times
_LARGE = 2**20  # numbers, in outputs and weights: what has more is tried in fewer ways
_THREAD = global_state.GLOBAL_STATE_TRACKER


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def try_layer(layer: keras.layers.Layer, args: Any, kwargs: Any) -> Finding:
    """Find out whether a layer computes each example by itself.

    The layer is built, and `_patches` installed. Activity regularizers and the statistics of
    BatchNormalization are left out. Nothing of the trial is seen afterwards.

    Args:
        layer: A layer, or a model that is used as one.
        args: What its call is given. Of tensors with examples only shapes and types are used: of
            those that have as many entries along axis 0 as the first one, or as unknown a number.
        kwargs: What its call is given by name.
    """
    around = (*AROUND_CALLS, "current_call_ctx")
    state = {name: copy.copy(of) for name, of in vars(_THREAD).items() if name not in around}

    def trial() -> Finding:
        vars(_THREAD).update(state)
        if global_state.get_global_attribute(GLOBAL_SEED_GENERATOR) is None:
            seeds = keras.random.SeedGenerator(0, name="trial")
            global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, seeds)
        config = config_pb2.ConfigProto()  # not optimized: functions are called a few times
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        options = context.FunctionCallOptions(config_proto=config)
        context.context().function_call_options = options
        try:
            with unseen(layer):
                _Trial(layer, args, kwargs).run()
        except _FoundError as found:
            return Finding(*found.args)
        except tf.errors.OpError as error:
            return Finding(Verdict.UNTRIED, f"fails on some made-up examples ({_named(error)})")
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


class _Results(NamedTuple):
    """What a call gave: outputs, gradients of each example, and those that examples share."""

    outputs: list[np.ndarray]
    gradients: list[np.ndarray]
    shared: list[np.ndarray]


class _Trial:
    """Calls a layer on made-up examples, and compares."""

    def __init__(self, layer: keras.layers.Layer, args: Any, kwargs: Any) -> None:
        self.layer, self.call, self.scale = layer, (args, kwargs), 1.0
        self.unit = rounding_unit(layer)
        self.rounding = max(32 * self.unit, 1e-3)
        leaves = tf.nest.flatten(self.call)
        leaves += [mask for leaf in leaves if (mask := get_keras_mask(leaf)) is not None]
        self.given = {id(leaf): leaf for leaf in leaves if tf.is_tensor(leaf)}
        tensors = self.given.values()
        is_dense = all(isinstance(of, tf.Tensor) and of.shape.rank is not None for of in tensors)
        sizes = [of.shape[0] for of in tensors if of.shape.rank] if is_dense else []
        if not sizes:
            raise _FoundError(Verdict.UNTRIED, "is called on no examples, or not on dense tensors")
        self.has_examples = [bool(of.shape.rank) and of.shape[0] == sizes[0] for of in tensors]
        shared = [of for of, has in zip(tensors, self.has_examples, strict=True) if not has]
        if any(tf.get_static_value(of) is None for of in shared):
            raise _FoundError(Verdict.UNTRIED, "is called on a number beside the examples")
        generators = [of for part in layers_of(layer) for of in part._seed_generators]
        generators.append(global_state.get_global_attribute(GLOBAL_SEED_GENERATOR))
        self.seeds = {id(of.state): of.state for of in generators}
        self.variables = [*({id(of): of for of in _readable(layer)} | self.seeds).values()]
        held = [getattr(of.value, "values", [of.value])[0] for of in self.variables]
        self.state = [tf.convert_to_tensor(of) for of in held]
        self.base, self.problem = _Results([], [], []), ""

    def run(self) -> None:
        self.function = self.traced()
        if (effect := effect_of_operations(self.function.graph)) is not None:
            raise _FoundError(Verdict.HAS_EFFECTS, effect)
        self.find_examples()
        counted, state = [*self.base.outputs, *self.state], self.state
        self.size = sum(int(tf.size(of)) for of in counted)
        self.try_all("")
        for factor, when in ((1.0, ", if its weights change"), (-1.0, ", if they are negative")):
            self.state = _made_up.other_weights(self.variables, state, factor)
            if self.is_finite():
                self.try_parts(when) if factor < 0 or self.size > _LARGE else self.try_all(when)
        self.values = self.made_up("fractions")
        self.state, self.scale = state, _SMALL
        if self.is_finite():
            self.try_parts(", of fractions")

    def traced(self) -> Any:
        """Trace the call; once more if it keeps something in Python, which may be the same then."""
        specs = [
            tf.TensorSpec([None, *of.shape[1:]] if has_examples else of.shape, of.dtype)
            for of, has_examples in zip(self.given.values(), self.has_examples, strict=True)
        ]
        inputs = specs, self.state, tf.TensorSpec([None]), tf.TensorSpec([], tf.int32)
        kinds: list[str] = []
        for _ in range(2):
            memory, former = Memory(self.layer), kinds
            try:  # without AutoGraph, as Keras has steps
                traced = tf.function(self.compute, autograph=False).get_concrete_function(*inputs)
            except Exception as error:  # of any kind: it is the user's code
                reason = f"cannot be tried alone ({_named(error)})"
                raise _FoundError(Verdict.UNTRIED, reason) from error
            kinds = [operation.type for operation in traced.graph.get_operations()]
            if (changed := memory.change()) is None and former in ([], kinds):
                return traced
        reason = f"changes what Python keeps (`{changed or 'what it computes next'}`)"
        raise _FoundError(Verdict.HAS_EFFECTS, reason)

    def compute(self, tensors: list, state: list, weights: tf.Tensor, start: tf.Tensor) -> _Results:
        """Return outputs, gradients of the tensors with examples, and all other gradients."""
        made = dict(zip(self.given, tensors, strict=True))

        def exchanged(leaf: Any) -> Any:
            tensor = made.get(id(leaf), leaf)
            if (mask := get_keras_mask(leaf)) is not None:
                set_keras_mask(tensor, made[id(mask)])
            return tensor

        args, kwargs = tf.nest.map_structure(exchanged, self.call)
        scope = Scope(self.variables, state, free=self.seeds)
        part = Part(None, 0, Split(tf.constant(len(_MORE)), [start], [tf.size(weights)], []))
        own = [x for x in itertools.compress(tensors, self.has_examples) if x.dtype.is_floating]
        trained = [x for x, of in zip(state, self.variables, strict=True) if of.trainable]
        sources = own + [x for x in trained if x.dtype.is_floating]
        with tf.GradientTape() as tape, running(None, part), scope:
            tape.watch(sources)
            outputs = [of for of in tf.nest.flatten(self.layer(*args, **kwargs)) if of is not None]
        self.draws = bool(scope.assigned & self.seeds.keys())
        if scope.effects:
            raise _FoundError(Verdict.HAS_EFFECTS, scope.effects[0])
        if part.drew_for_all:
            raise _FoundError(Verdict.MIXES, "draws numbers that the examples share")
        if not outputs or not all(isinstance(of, tf.Tensor) and of.shape.rank for of in outputs):
            raise _FoundError(Verdict.UNTRIED, "returns no tensors, or a single number")
        targets = [output for output in outputs if output.dtype.is_floating]
        upstream = [_made_up.upstream_of(output, weights) for output in targets]
        found = tape.gradient(targets, sources, upstream, unconnected_gradients="zero")
        outputs += [mask for output in outputs if (mask := get_keras_mask(output)) is not None]
        gradients = [tf.convert_to_tensor(gradient) for gradient in found]
        return _Results(outputs, gradients[: len(own)], gradients[len(own) :])

    def find_examples(self) -> None:
        """Find examples that the layer can compute."""
        is_known = all(None not in of.shape.as_list()[1:] for of in self.given.values())
        lengths = _made_up.LENGTHS[: 1 if is_known else None]
        for self.length, kind in itertools.product(lengths, _made_up.VALUES):
            self.values = self.made_up(kind)
            if self.is_finite():
                return
        raise _FoundError(Verdict.UNTRIED, f"cannot be tried on made-up examples ({self.problem})")

    def made_up(self, kind: str) -> list[Any]:
        return _made_up.made_up(self.given.values(), self.has_examples, kind, self.length)

    def is_finite(self) -> bool:
        """Call the layer on the examples, and return whether all that it gives is finite."""
        try:
            self.base = self.results(self.values, [self.scale * weight for weight in _WEIGHTS], 0)
        except tf.errors.OpError as error:
            self.problem = _named(error)
            return False
        if any(len(output) == 0 or len(output) % _EXAMPLES for output in self.base.outputs):
            raise _FoundError(Verdict.UNTRIED, "returns something without examples along axis 0")
        self.problem = "it gives no finite numbers"
        arrays = itertools.chain(*self.base)
        return all(np.isfinite(array).all() for array in arrays if array.dtype.kind in "fc")

    def results(self, values: list[Any], weights: list[float], start: int) -> _Results:
        """Call the layer once, with the same random numbers each time; it ends, or is cancelled."""
        manager = cancellation.CancellationManager()
        timer = threading.Timer(_SECONDS, manager.start_cancel)
        timer.start()
        try:
            call = manager.get_cancelable_function(self.function)
            found = call(values, self.state, tf.constant(weights), tf.constant(start))
        except tf.errors.CancelledError as error:
            reason = f"computes made-up examples for more than {_SECONDS:.0f} s"
            raise _FoundError(Verdict.UNTRIED, reason) from error
        finally:
            timer.cancel()
        return _Results(*([_array(tensor) for tensor in part] for part in found))

    def try_all(self, when: str) -> None:
        for at, kind in enumerate([*_made_up.REPLACEMENTS][: 3 if self.size > _LARGE else 4]):
            invalid = [tf.errors.InvalidArgumentError] if kind != _made_up.ANOTHER else []
            with contextlib.suppress(*invalid):  # a position that is looked up, say
                self.check([*range(_EXAMPLES)], f"when one is {kind}{when}", at, kind)
        self.check(_MORE, f"when there are more{when}")
        if not self.draws and self.size * len(_MANY) <= _EXAMPLES * _LARGE:
            self.check(_MANY, f"when there are many{when}")
        self.try_parts(when)

    def try_parts(self, when: str) -> None:
        """Call the layer on the first example, and on the rest."""
        parts = [self.check(of, f"when there are fewer{when}").shared for of in ([0], [1, 2, 3])]
        # Of some variables it is zero, and its rounding that of the others: attention's key bias.
        least = max((_largest(of) for of in self.base.shared), default=0.0) / 100
        for one, other, total in zip(*parts, self.base.shared, strict=True):
            if not _agree(one + other, total, self.rounding, least):
                reason = f"has a gradient that is no sum over the examples{when}"
                raise _FoundError(Verdict.MIXES, reason)

    def check(self, order: list[int], when: str, at: int = -1, kind: str = "") -> _Results:
        """Call the layer on examples in an order, one replaced perhaps, and compare the others."""
        start = order[0] if len(order) < _EXAMPLES else 0
        weights = [self.scale * _WEIGHTS[example] for example in order]
        if kind == _made_up.ANOTHER:
            weights[at] = _made_up.HUGE
        values = [
            _made_up.taken(value, order, at, kind) if has_examples else value
            for value, has_examples in zip(self.values, self.has_examples, strict=True)
        ]
        found = self.results(values, weights, start)
        same = [position for position in range(len(order)) if position != at]
        if self.draws:  # numbers that have positions
            same = [position for position in same if order[position] == start + position]
        rounding = self.rounding
        if len(order) == _EXAMPLES:  # which the same kernels compute
            rounding = self.unit * (2 if self.unit > 1e-4 else 16)
        for name in ("outputs", "gradients"):
            for base, other in zip(getattr(self.base, name), getattr(found, name), strict=True):
                is_same = other.shape == (len(base) * len(order) // _EXAMPLES, *base.shape[1:])
                ours = other.reshape(len(order), -1)[same] if is_same else other
                theirs = base.reshape(_EXAMPLES, -1)[[order[position] for position in same]]
                if not is_same or not _agree(ours, theirs, rounding):
                    raise _FoundError(Verdict.MIXES, f"changes the {name} of examples {when}")
        return found


def _readable(layer: keras.layers.Layer) -> list[Any]:
    """List the variables that a layer may read: weights, and what its libraries' layers keep.

    What the user's layers keep besides, a callback may assign later.
    """
    return [
        variable
        for part in layers_of(layer)
        for variable in (
            part._trainable_variables + part._non_trainable_variables
            if is_library(type(part).__module__)
            else part._trainable_variables
        )
    ]


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


def _array(tensor: tf.Tensor) -> Any:
    is_half = tensor.dtype.is_floating and tensor.dtype.size < tf.float32.size
    return np.asarray(tf.cast(tensor, tf.float32) if is_half else tensor)  # without a copy


def _named(error: Exception) -> str:
    """Return what an error says, without what Keras puts around it."""
    lines = re.sub(r"\x1b\[\d*m", "", str(error)).strip().split("\n")
    inner = [line for line in lines if line and not line.startswith("Exception encountered when")]
    return (inner or [type(error).__name__])[0][:200]
