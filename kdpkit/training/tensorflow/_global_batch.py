"""Steps on the global batch, of which every replica computes some layers for its part alone.

What a step of the user's own does with the examples of a batch (compare them, mix them, add them
up, draw for them, take the norm of their gradient) it does on all of them here, on every replica
alike, as on one device. Only calls of layers are divided: a replica takes its part of what the
layer is called on, and the outputs of all replicas are put together.

`_fit` and `_loop` enter here if some code of a step is the user's. Where all is of libraries each
replica has its examples alone: shares in `_step`, losses in `_patches`.

Parts are passed on: a divided layer, loss or metric that is called on another's output takes the
replica's part of it as it is. The tensor of all examples is there as well; in a graph TensorFlow
leaves out what nobody uses.

Gradients: a tensor of the global batch is the same on all replicas, and so is its gradient. A
replica's part of a tensor has `replicas` times its gradient, so that the mean over the replicas is
right for variables of divided layers, of which each replica has a part, and for those that the step
uses itself, which each replica computes in full. `join` and `_mean_of_parts` multiply by that
number, `_taken`, `_mean_at` and `share_of_gradient` divide by it.
"""

import contextlib
import copy
import functools
import inspect
import pathlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import keras
import tensorflow as tf

from kdpkit._internal import checks
from kdpkit.training._keras_internals import get_keras_mask, get_stateless_scope, set_keras_mask
from kdpkit.training._remat import BlockScope
from kdpkit.training.tensorflow import _keras_internals
from kdpkit.training.tensorflow._collectives import concatenated, sums
from kdpkit.training.tensorflow._keras_internals import (
    get_logits,
    global_state,
    set_logits,
    with_gradient,
)
from kdpkit.training.tensorflow._per_example_law import LEAVES, broken_law
from kdpkit.training.tensorflow._step import (
    ReplicaStep,
    TraceAgainError,
    UndividedError,
    current_step,
    dense_if_unique,
    map_values,
    of_any_length,
    running,
)
from kdpkit.training.tensorflow._whose_code import (
    has_too_few_axes,
    is_composed,
    is_of_a_library,
    is_of_layers,
    is_written_by_libraries,
)

T = TypeVar("T")


class Division:
    """Which layers are divided: those of libraries, and those that keep the law when it is tried.

    A model that is composed of layers is divided as one if each of them may be, which is known when
    they have been called in it. If one may not be, the step is traced again, and each is asked.

    Args:
        divided: Layers that the user declares as divided.
        undivided: Layers that the user declares as undivided.
    """

    def __init__(
        self,
        divided: Sequence[keras.layers.Layer] = (),
        undivided: Sequence[keras.layers.Layer] = (),
    ) -> None:
        declared = {id(layer): True for layer in divided}
        self._declared = declared | {id(layer): False for layer in undivided}
        self._tried: dict[Any, tuple[Any, str | None]] = {}
        self.mixing: list[keras.layers.Layer] = []  # models that have layers which are not divided
        self.undivided: set[str] = set()  # kinds of steps of which no layer can be divided

    def traced(self, kind: str, call: Callable[[], T], again: Callable[[], None]) -> T:
        """Call what traces a step and runs it, until it is known what of the step is divided.

        Args:
            kind: The kind of the step.
            call: Makes the call.
            again: Is called before it is made again: nothing was computed yet.
        """
        while True:
            try:
                return call()
            except UndividedError as error:
                if not isinstance(error, TraceAgainError):
                    if kind in self.undivided:
                        raise
                    self.undivided.add(kind)
            except AssertionError as error:
                _explain_other_values(error)
                raise
            again()

    def __call__(self, layer: keras.layers.Layer, args: Any, kwargs: Any) -> bool:
        """Return whether replicas compute their parts of what a layer is called on."""
        if id(layer) in self._declared:
            return self._declared[id(layer)]
        if is_of_a_library(layer):
            return not has_too_few_axes(layer, args, kwargs)
        if tf.executing_eagerly():  # its code may do something else in each step
            return False
        if is_composed(layer):
            return is_of_layers(layer) and all(layer is not of for of in self.mixing)
        return self._broken_law(layer, args, kwargs) is None

    def reject(self, layer: keras.layers.Layer, args: Any, kwargs: Any) -> bool:
        """Return whether a layer is as `__call__` asks; raise if its examples surely meet."""
        if _first_with_examples((args, kwargs)) is None or _is_asked_by_layers(layer):
            return False
        if self(layer, args, kwargs):
            return True
        is_tried = id(layer) not in self._declared and not is_of_a_library(layer)
        reason = (self._broken_law(layer, args, kwargs) if is_tried else None) or ""
        if reason.startswith(("changes", "has a gradient")):
            checks.fail(
                f"The layer {reason}, and here replicas or micro-batches have some of them alone.",
                layer=layer.name,
                remedy="Train with `jit=False` and `accumulation=1`.",
            )
        return False

    def _broken_law(self, layer: keras.layers.Layer, args: Any, kwargs: Any) -> str | None:
        kwargs = _with_mode(layer, args, kwargs)
        key = _identity(layer), _signature(layer, args, kwargs)
        if key not in self._tried:  # by the first replica, for all
            self._tried[key] = layer, broken_law(layer, args, kwargs)
        reason = self._tried[key][1]
        if reason is not None and reason.startswith(LEAVES):
            checks.fail(
                f"The layer {reason}, where each replica would find what another has left.",
                layer=layer.name,
                remedy="Return it, or keep it in an attribute of the layer.",
            )
        return reason

    def forget(self) -> None:
        """Try layers again: their attributes may have changed."""
        self._tried.clear()
        self.mixing.clear()


def _explain_other_values(error: AssertionError) -> None:
    """Raise a sentence where TensorFlow has not found the same kinds of values on all replicas."""
    *_, last = traceback.extract_tb(error.__traceback__)
    if {"kdpkit", "tensorflow"} & {*pathlib.Path(last.filename).parts}:  # no user's assertion
        checks.fail(
            "The replicas of a step have computed values of different kinds: it keeps what it "
            "computes in an object or a module, which they share.",
            remedy="Keep it in an attribute of the model or of a layer, or in a local variable.",
        )


class _AsOne(NamedTuple):
    """Looks, while a model that is composed of layers is divided, whether each may be.

    Args:
        division: Knows what may be divided.
        model: The model.
    """

    division: Division
    model: keras.layers.Layer

    def __call__(self, layer: keras.layers.Layer, args: Any, kwargs: Any) -> bool:
        """Return whether a layer may be divided; False if that is a question to its layers."""
        if _is_asked_by_layers(layer):
            return False
        has_examples = _first_with_examples((args, kwargs)) is not None or is_of_a_library(layer)
        if not has_examples or not self.division(layer, args, kwargs):
            self.trace_again()
        return True

    def trace_again(self) -> NoReturn:
        """Have the step traced with each layer divided by itself."""
        self.division.mixing.append(self.model)
        raise TraceAgainError


def _identity(layer: keras.layers.Layer) -> Any:
    """Return what stands for a layer: a library's that are configured alike do the same.

    A function of the user's is only a name there, which others may have.
    """
    if is_written_by_libraries(layer):
        with contextlib.suppress(Exception):  # those of Llama and Swin fail: each is tried then
            return type(layer), str({**layer.get_config(), "name": None})
    return id(layer)


def _is_asked_by_layers(layer: keras.layers.Layer) -> bool:
    """Return whether what may be done with a model depends on each of its layers."""
    return is_composed(layer) and not is_of_a_library(layer)


def _with_mode(layer: keras.layers.Layer, args: Any, kwargs: Any) -> dict[str, Any]:
    """Add what a layer has of the call around it, `training` say: it is tried outside of that."""
    context = global_state.get_global_attribute("current_call_ctx")
    given = inspect.signature(layer.call).bind_partial(*args).arguments
    names = [name for name in layer._call_context_args if name not in given]
    mode = {name: getattr(context, name, None) for name in names}
    return {name: value for name, value in mode.items() if value is not None} | kwargs


def _signature(layer: keras.layers.Layer, args: Any, kwargs: Any) -> str:
    """Return what a layer's code may depend on: shapes, types and other arguments.

    A library's does the same for any sizes: a head is called on many levels of a pyramid.
    """
    is_of_any_size = is_written_by_libraries(layer)

    def of(leaf: Any) -> str:
        if not tf.is_tensor(leaf):
            return str(leaf)
        known, rank = tf.get_static_value(leaf), leaf.shape.rank
        shape = f"{leaf.shape[:1]} {rank}" if is_of_any_size and rank else leaf.shape
        return f"{shape} {leaf.dtype} {get_keras_mask(leaf) is None} {known}"

    return str(tf.nest.map_structure(of, (args, kwargs)))


def step_on_global_batch(own: ReplicaStep, division: Division, kind: str) -> ReplicaStep:
    """Return the step of a replica as if it had the examples of all replicas.

    Args:
        own: The step of the replica's own examples.
        division: Knows whether the call of a layer is divided.
        kind: The kind of the step.
    """
    step = copy.copy(own)
    step.own, step.divides = own, None if kind in division.undivided else division
    sizes = iter(own.sizes)

    def joined(leaf: Any) -> Any:
        if leaf is None:
            return None
        of_replicas = next(sizes)
        if not isinstance(leaf, tf.Tensor):
            return own.merge(concatenated, leaf)
        if leaf.shape.rank == 0:
            return leaf
        return join(step, _part(own, of_replicas), leaf)

    step.data = tf.nest.map_structure(joined, own.data)
    step.num_examples, step.start = own.num_global_examples, tf.constant(0)
    # Each of the replicas has them all.
    step.num_global_examples = own.num_global_examples * own.replicas
    step.is_part = False
    return step


def own_part(step: ReplicaStep, outputs: Any) -> Any:
    """Return this replica's examples of what a step on the global batch gives."""
    if step.own is None:
        return outputs

    def part(output: Any) -> Any:
        if isinstance(output, tf.RaggedTensor | tf.SparseTensor):
            checks.fail(
                "A step of your own gives a ragged or sparse tensor, which replicas cannot divide.",
                replicas=step.replicas,
                remedy="Return a dense one: `to_tensor()`, or `tf.sparse.to_dense`.",
            )
        if not _has_examples(output):
            return output
        return _taken(step, _part_for(step, output), output, is_sure=True)

    return tf.nest.map_structure(part, outputs)


# Layers.


def call_divided(
    original: Callable, layer: keras.layers.Layer, /, *args: Any, **kwargs: Any
) -> Any:
    """Call a layer; in a step on the global batch, if it may be, on this replica's part alone."""
    step = current_step()
    if step is None:
        return original(layer, *args, **kwargs)
    if step.own is None and step.replicas > 1 and has_too_few_axes(layer, args, kwargs):
        _reject_few_axes(step, layer)
    if not layer.built and step.is_here():
        step.merge(lambda strategy: _build(strategy, layer, args, kwargs))
    if step.rejects is not None:
        inner = copy.copy(step)
        inner.rejects = None if step.rejects(layer, args, kwargs) else step.rejects
        with running(inner):
            return original(layer, *args, **kwargs)
    if step.is_divided:
        _count_call(step, layer)
    if step.divides is None or not step.is_here() or _has_weights_of_the_users():
        return original(layer, *args, **kwargs)
    first = _first_with_examples((args, kwargs))
    if first is None or not step.divides(layer, args, kwargs):
        return original(layer, *args, **kwargs)
    step.divided.update(id(variable) for variable in layer.variables)
    _count_call(step, layer)
    part = _part_for(step, first)
    if _is_asked_by_layers(layer):
        part.rejects = _AsOne(step.divides, layer)

    masked: list[tuple[Any, Any]] = []

    def cut(leaf: Any) -> Any:
        is_masked = get_keras_mask(leaf) is not None
        shard = _cut(step, part, leaf is first and not is_masked, leaf)
        if is_masked:
            masked.append((leaf, shard))
        return shard

    args, kwargs = tf.nest.map_structure(cut, (args, kwargs))
    joined = functools.partial(_joined, step, part)
    with _joining_losses(layer, joined), running(part):
        outputs = original(layer, *args, **kwargs)
    for leaf, shard in masked:
        if get_keras_mask(shard) is None:  # Keras' attention takes it off what others are given too
            set_keras_mask(leaf, None)
    return tf.nest.map_structure(joined, outputs)


def _count_call(step: ReplicaStep, layer: keras.layers.Layer) -> None:
    """Count how often replicas use a layer's own variables for their parts."""
    held = [of for of in vars(layer).values() if isinstance(of, tf.Variable)]
    own = [of for variable in layer._trainable_variables for of in (variable, variable.value)]
    step.calls.update(map(id, [*own, *held]))


def _has_weights_of_the_users() -> bool:
    """Return whether layers compute with other weights than their variables have.

    The gradients of these are taken of tensors, of which nobody knows that replicas have a part.
    """
    scope = get_stateless_scope()
    return scope is not None and not isinstance(scope, BlockScope)


@contextlib.contextmanager
def _joining_losses(layer: keras.layers.Layer, joined: Callable) -> Iterator[None]:
    """Put together what layers add to the loss here, in their lists or a stateless scope's."""
    layers = [inner for inner in layer._flatten_layers() if hasattr(inner, "_losses")]
    scope = get_stateless_scope()
    lists = [inner._losses for inner in layers] + ([scope.losses] if scope else [])
    held = [loss for losses in lists for loss in losses]  # or others may get their identities
    before = {*map(id, held)}
    yield
    for losses in lists:
        for index, loss in enumerate(losses):
            if id(loss) not in before:
                losses[index] = joined(loss)
                for inner in layers:
                    if id(loss) in inner._loss_ids:
                        inner._loss_ids.add(id(losses[index]))


def _reject_few_axes(step: ReplicaStep, layer: keras.layers.Layer) -> None:
    """Raise for a library's layer that would compute a replica's examples together."""
    if isinstance(step.rejects, _AsOne):
        step.rejects.trace_again()
    if step.is_divided:
        raise UndividedError(
            f"The layer `{layer.name}` computes the examples of a batch together. Pass the layer "
            "that calls it to `replica_exact` in `undivided=[...]`."
        )
    checks.fail(
        "A layer gets a tensor of too few axes, and takes the examples of a batch for parts of one "
        "example, so that replicas would compute something else than one device.",
        layer=layer.name,
        kind=type(layer).__name__,
        remedy="Add an axis before it (`keras.ops.expand_dims(x, 1)`), if each example is meant by "
        "itself; else pass it to `replica_exact(model, undivided=[layer])`.",
    )


def _build(strategy: Any, layer: keras.layers.Layer, args: Any, kwargs: Any) -> None:
    """Build a layer on its first call, outside of the replicas, which all call it then."""
    with tf.init_scope(), strategy.scope():
        _keras_internals.build_layer(layer, args, kwargs)


def _has_examples(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) and bool(leaf.shape.rank)


def _first_with_examples(nest: Any) -> Any:
    """Return the tensor whose examples a call divides; None if it has none, or not for sure.

    The number of examples is not known while a step is traced: a tensor beside it whose length is
    known may be a constant for all, or have an entry for each example. One of length 1 is for all.
    """
    leaves = [leaf for leaf in tf.nest.flatten(nest) if getattr(leaf, "shape", None)]
    if not all(isinstance(leaf, tf.Tensor) for leaf in leaves):  # but ragged, or a variable
        return None
    tensors = [leaf for leaf in leaves if _has_examples(leaf) and leaf.shape[0] != 1]
    are_known = {leaf.shape[0] is not None for leaf in tensors}
    return tensors[0] if len(are_known) == 1 else None


def _part_for(step: ReplicaStep, tensor: tf.Tensor) -> ReplicaStep:
    """Return the step of this replica's part of some examples, split where its examples are."""
    if (known := step.part_of(tensor)) is not None:
        return known.step
    own: Any = step.own
    num_examples, of_batch = tf.shape(tensor)[0], tf.maximum(own.num_global_examples, 1)

    def scaled(number: tf.Tensor) -> tf.Tensor:
        product = tf.cast(num_examples, tf.int64) * tf.cast(number, tf.int64)
        return tf.cast(product // tf.cast(of_batch, tf.int64), tf.int32)

    start = scaled(own.start)
    part = own.of_examples(scaled(own.start + own.num_examples) - start)
    part.start, part.num_global_examples, part.is_divided = start, num_examples, True
    part.examples = object()  # others than the batch's, perhaps
    return part


def _part(own: ReplicaStep, of_replicas: tf.Tensor) -> ReplicaStep:
    """Return the step of a replica's part of some examples, of which replicas have so many each."""
    part = own.of_examples(of_replicas[own.shard])
    part.start = tf.reduce_sum(tf.where(tf.range(own.replicas) < own.shard, of_replicas, 0))
    part.num_global_examples, part.is_divided = tf.reduce_sum(of_replicas), True
    return part


def _cut(step: ReplicaStep, part: ReplicaStep, is_sure: bool, leaf: Any) -> Any:
    """Return a replica's part of a tensor, if that has the examples that the layer is called on."""
    if not _has_examples(leaf) or leaf.shape[0] == 1:
        return leaf
    shard = _taken(step, part, leaf, is_sure=is_sure)
    if (mask := get_keras_mask(leaf)) is not None:
        set_keras_mask(shard, _taken(step, part, mask, is_sure=is_sure))
    if (logits := get_logits(leaf)) is not None:
        set_logits(shard, _taken(step, part, logits, is_sure=is_sure))
    return shard


def _taken(step: ReplicaStep, part: ReplicaStep, x: Any, *, is_sure: bool) -> Any:
    """Return this replica's part of a tensor that is the same on all replicas.

    Args:
        step: The step on the global batch.
        part: The step of the part.
        x: The tensor.
        is_sure: Whether it has the examples of the part; else all of it is returned if it has
            another number of them.
    """
    known = step.part_of(x)
    if known is not None and known.step.examples is part.examples:
        if not x.dtype.is_floating:
            return tf.identity(known.tensor)
        return with_gradient(
            known.tensor, x, lambda upstream: join(step, known.step, upstream / step.replicas)
        )
    start, stop = part.start, part.start + part.num_examples
    num_examples = part.num_global_examples
    if not is_sure:
        num_examples = tf.shape(x)[0]
        is_cut = num_examples == part.num_global_examples
        start, stop = tf.where(is_cut, start, 0), tf.where(is_cut, stop, num_examples)
    shard = x[start:stop]
    if x.dtype.is_floating:
        gradient = functools.partial(_mean_at, step, start, stop, num_examples)
        shard = with_gradient(shard, x, gradient)
    return shard


def join(step: ReplicaStep, part: ReplicaStep, shard: tf.Tensor) -> Any:
    """Return the examples of all replicas, of which this replica's part is known from now on."""
    joined = of_any_length(step.merge(concatenated, shard))
    if shard.dtype.is_floating:

        def gradient(upstream: tf.Tensor) -> Any:
            return step.replicas * _taken(step, part, upstream, is_sure=True)

        joined = with_gradient(joined, shard, gradient)
    elif tf.executing_eagerly():
        joined = tf.identity(joined)  # one for each replica
    step.know(joined, part, shard)
    return joined


def _mean_at(
    step: ReplicaStep, start: tf.Tensor, stop: tf.Tensor, num_examples: tf.Tensor, shard: tf.Tensor
) -> Any:
    """Return the mean over the replicas of what each has at some examples, and zeros elsewhere."""
    around = [[start, num_examples - stop]] + [[0, 0]] * (shard.shape.rank - 1)
    (total,) = step.merge(sums, [tf.pad(shard, around)])

    def gradient(upstream: tf.Tensor) -> Any:
        back = upstream[start:stop]
        return with_gradient(
            back, upstream, functools.partial(_mean_at, step, start, stop, num_examples)
        )

    return with_gradient(total / step.replicas, shard, gradient)


def _joined(step: ReplicaStep, part: ReplicaStep, output: tf.Tensor) -> Any:
    """Return the examples of all replicas; of a single number, the mean over the examples."""
    if not isinstance(output, tf.Tensor):
        return output
    if output.shape.rank == 0:
        return _mean_of_parts(step, part, output) if output.dtype.is_floating else output
    rows = tf.shape(output)[0]  # perhaps several for each example
    of_each = tf.where(part.num_examples > 0, rows // tf.maximum(part.num_examples, 1), 1)
    part = part.of_examples(rows)
    part.start, part.num_global_examples = part.start * of_each, part.num_global_examples * of_each
    joined = join(step, part, output)
    if (mask := get_keras_mask(output)) is not None:
        set_keras_mask(joined, join(step, part, mask))
    if (logits := get_logits(output)) is not None:
        set_logits(joined, join(step, part, logits))
    return joined


def _mean_of_parts(step: ReplicaStep, part: ReplicaStep, value: Any) -> Any:
    (total,) = step.merge(sums, [part.weigh(value)])

    def gradient(upstream: tf.Tensor) -> Any:
        step.reject_gradient_of_gradient()
        return step.replicas * part.weigh(upstream)

    return with_gradient(total, value, gradient)


# Losses and metrics.


def parts_of_known(step: ReplicaStep, nest: Any) -> tuple[ReplicaStep, Any] | None:
    """Return this replica's parts of tensors, if one of these is known to be put together.

    It is None where the step has computed all of them on the global batch, or where there may be
    other tensors than those of examples.
    """
    first = _first_with_examples(nest)
    if first is None or not step.is_here():
        return None
    known = [leaf for leaf in tf.nest.flatten(nest) if _has_examples(leaf) and step.part_of(leaf)]
    if not known:
        return None
    part = _part_for(step, known[0])
    return part, tf.nest.map_structure(functools.partial(_cut, step, part, True), nest)


def loss_of_parts(step: ReplicaStep, compute: Callable, *given: Any) -> Any:
    """Compute a library's loss on this replica's part; on the global batch if it has no part."""
    parts = parts_of_known(step, given) if step.divides is not None else None
    if parts is None:
        return compute(*given)
    part, cut = parts
    with running(part):
        value = compute(*cut)
    return _joined(step, part, value)


# Gradients of variables.


def gradients_of_variables(step: ReplicaStep, sources: list[Any], gradients: list[Any]) -> Any:
    """Return the gradients of the global batch, where a tape gave a replica's, of variables."""
    own = {
        index: dense_if_unique(gradient)
        for index, (source, gradient) in enumerate(zip(sources, gradients, strict=True))
        if gradient is not None and _may_have_parts(step, source)
    }
    if own and not step.is_here():
        step.reject_divided()
        return gradients
    given = [*gradients]
    dense = {i: of for i, of in own.items() if not isinstance(of, tf.IndexedSlices)}
    totals = step.merge(sums, [*dense.values()]) if dense else []
    for (index, gradient), total in zip(dense.items(), totals, strict=True):
        mean = with_gradient(total / step.replicas, gradient, lambda upstream: upstream)
        step.know_addend(mean, gradient)
        given[index] = mean
    for index, gradient in own.items():
        if index in dense:
            continue
        if _num_lookups(gradient.indices) > step.calls[id(sources[index])]:
            raise UndividedError(
                "A table is looked up by a layer and outside of it, and optimizers square each "
                "lookup's gradient. Pass the layer to `replica_exact` in `undivided=[...]`."
            )
        values, indices = (
            step.merge(concatenated, of) for of in (gradient.values, gradient.indices)
        )
        given[index] = tf.IndexedSlices(values / step.replicas, indices, gradient.dense_shape)
        step.know_addend((given[index].values, indices), gradient)
    return given


def _num_lookups(indices: tf.Tensor) -> int:
    """Return how many gradients of lookups a tape has put together."""
    if not tf.is_symbolic_tensor(indices) or indices.op.type != "ConcatV2":
        return 1
    return sum(map(_num_lookups, [*indices.op.inputs][:-1]))


def _may_have_parts(step: ReplicaStep, source: Any) -> bool:
    """Return whether a replica may have a part of the gradient of this: of a variable."""
    if isinstance(source, keras.Variable):
        return id(source) in step.divided
    return isinstance(source, tf.Variable)


def share_of_gradient(step: ReplicaStep, gradient: tf.Tensor | tf.IndexedSlices) -> Any:
    """Return what this replica adds to a gradient that all replicas have in full.

    One that the step has not changed is what a tape gave each replica: added up once, not twice.
    """
    is_sparse = isinstance(gradient, tf.IndexedSlices)
    own = step.addend_of((gradient.values, gradient.indices) if is_sparse else gradient)
    if own is not None or not is_sparse:
        gradient = gradient if own is None else own
        return map_values(lambda values: values / step.replicas, gradient)
    return _slices_of_first(gradient)


def addend_of_gradient(step: ReplicaStep, variable: Any, gradient: Any) -> Any:
    """Return what this replica adds to a gradient, of a loss whose parts the replicas add up."""
    is_sparse = isinstance(gradient, tf.IndexedSlices)
    if step.own is None or not is_sparse or id(variable) in step.divided:
        return step.if_examples(gradient)
    return map_values(lambda values: values * step.replicas, _slices_of_first(gradient))


def _slices_of_first(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """Leave out, on other replicas, the slices that all have: optimizers are to see them once."""
    if is_first():
        return gradient
    return tf.IndexedSlices(gradient.values[:0], gradient.indices[:0], gradient.dense_shape)


# What happens once.


def computed_once(
    step: ReplicaStep, compute: Callable, inputs: list[tf.Tensor], dtypes: Sequence[tf.DType]
) -> list[tf.Tensor]:
    """Return, on all replicas, what the first of them computes."""
    with running(None), tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(inputs)  # of which zeros have no gradient
        own = compute(input=inputs) if is_first() else [tf.zeros([], dtype) for dtype in dtypes]

    def gradient(*upstream: Any) -> Any:
        step.reject_gradient_of_gradient()
        with running(None):  # what calls Python for its gradient is called as it is
            own_gradients = tape.gradient(own, inputs, [*upstream], "zero")
        return step.merge(_of_first, own_gradients)

    return with_gradient(step.merge(_of_first, own), inputs, gradient)


def _of_first(strategy: tf.distribute.Strategy, values: list[Any]) -> list[Any]:
    return [strategy.experimental_local_results(value)[0] for value in values]


def is_first() -> bool:
    """Return, while it is traced, whether this is the first replica."""
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    return int(tf.get_static_value(replica)) == 0
