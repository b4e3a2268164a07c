"""Random numbers by position: a device draws its examples' part of what one device would draw.

Keras' random functions on TensorFlow draw from a counter, Philox' (Salmon et al. 2011): four
numbers for each value of it, two of float64. So the numbers of examples in the middle of a batch
are drawn by starting at their position, at no additional cost. A function that rejects numbers, or
counts otherwise, draws for the global batch, and the result is sliced.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from kdpkit.training.tensorflow import _philox
from kdpkit.training.tensorflow._keras_internals import (
    KERAS_RANDOM,
    global_state,
    in_xla_context,
    seed_generator,
    with_thread_state,
)
from kdpkit.training.tensorflow._step import Part, current_random_part, graph

# What this replaces: docs/upstream/keras_draws_the_same_on_replicas.md
_PHILOX = 1
_DRAWN_GLOBALLY = ("randint", "truncated_normal", "gamma", "binomial", "beta")
_UNIFORM, _NORMAL = tf.raw_ops.StatelessRandomUniformV2, tf.raw_ops.StatelessRandomNormalV2


class Entries(NamedTuple):
    """A device's entries of a tensor along its first axis, of which one device has `total`."""

    start: tf.Tensor
    count: Any
    total: Any


def wrappers() -> dict[str, Callable]:
    """Return the replacements of Keras' random functions, by their names."""
    return {
        "uniform": functools.partial(_drawn_in_part, _UNIFORM, ("minval", "maxval")),
        "normal": functools.partial(_drawn_in_part, _NORMAL, ("mean", "stddev")),
        "dropout": _dropout,
        "categorical": _categorical,
        **dict.fromkeys(_DRAWN_GLOBALLY, _drawn_globally),
    }


def _drawn_in_part(
    op: Any, names: tuple[str, str], original: Callable, *args: Any, **kwargs: Any
) -> Any:
    """Draw uniform numbers between two limits, or normal ones of a mean and a deviation."""
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    dims, entries = _located(arguments["shape"], arguments["seed"])
    if entries is None:
        return original(*args, **kwargs)
    dtype = tf.as_dtype(arguments["dtype"] or keras.config.floatx())
    low, high = (tf.cast(arguments[name], dtype) for name in names)
    scale = high - low if op is _UNIFORM else high
    return _numbers(op, dims, entries, dtype, _cast(arguments["seed"])) * scale + low


def _dropout(
    original: Callable, inputs: Any, rate: Any, noise_shape: Any = None, seed: Any = None
) -> Any:
    if rate in (0.0, 1.0):
        return original(inputs, rate, noise_shape, seed)
    inputs = tf.convert_to_tensor(inputs)
    noise = input_dims = _dims(inputs)
    if noise_shape is not None:
        pairs = zip(noise_shape, input_dims, strict=True)
        noise = [default if size is None else size for size, default in pairs]
    dims, entries = _located(noise, seed)
    if entries is None:
        return original(inputs, rate, noise_shape, seed)
    seed = _cast(seed)

    def sample(shape: Any, dtype: tf.DType) -> Any:  # noqa: ARG001 the shape is `noise`
        return _numbers(_UNIFORM, dims, entries, dtype, seed)

    return tf.nn.experimental.general_dropout(inputs, rate, sample, noise_shape=tf.stack(noise))


def _categorical(
    original: Callable, logits: Any, num_samples: Any, dtype: tf.DType = "int64", seed: Any = None
) -> Any:
    logits = tf.convert_to_tensor(logits)
    dims, entries = _located(_dims(logits), seed)
    if entries is None:
        return original(logits, num_samples, dtype, seed)
    drawn = original(_spread(logits, dims, entries), num_samples, dtype, seed)
    return _sliced(drawn, entries)


def _drawn_globally(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Draw what one device draws, with the parameters of this device's examples, and slice it."""
    arguments = inspect.signature(original).bind(*args, **kwargs).arguments
    dims, entries = _located(arguments["shape"], arguments.get("seed"))
    if entries is None:
        return original(*args, **kwargs)
    arguments = {name: _spread(value, dims, entries) for name, value in arguments.items()}
    arguments["shape"] = tf.stack([entries.total, *dims[1:]])
    return _sliced(original(**arguments), entries)


def _located(shape: Any, seed: Any) -> tuple[list[Any], Entries | None]:
    """Return a shape's dimensions, and its entries in the batch's; None without examples."""
    part = current_random_part()
    if part is None:
        return [], None
    if seed is None:
        _make_global_seeds(part)
    dims = _dims_of_shape(shape)
    entries = _entries(part, dims[0]) if dims else None
    part.drew_for_all |= entries is None
    return dims, entries


def _entries(part: Part, count: Any) -> Entries | None:
    """Return the entries, if the first axis has one or several for each example of a part."""
    # The number of examples is not known while a step is traced, unless there is one device.
    if not tf.is_tensor(count):
        if part.num_examples is not part.num_global_examples:
            return None
    elif not _may_count_examples(count):
        return None
    count = tf.cast(count, tf.int32)
    per_example = tf.maximum(count // tf.maximum(part.num_examples, 1), 1)
    fits = (per_example * part.num_examples == count) | (part.num_examples == 0)
    return Entries(
        start=tf.where(fits, part.start * per_example, 0),
        count=count,
        total=tf.where(fits, part.num_global_examples * per_example, count),
    )


_OF_ONE_NUMBER = {
    *("Cast", "Identity", "Reshape", "Squeeze"),
    *("AddV2", "Sub", "Mul", "FloorDiv", "Maximum", "Minimum"),
}


def _may_count_examples(dimension: Any) -> bool:
    """Recognize a dimension that is the length of a tensor's axis, but not of its first."""
    op = dimension.op
    while op.type in _OF_ONE_NUMBER:  # also a sum with a constant, for example
        unknown = [number for number in op.inputs if tf.get_static_value(number) is None]
        if len(unknown) != 1:
            return True
        op = unknown[0].op
    if op.type == "StridedSlice" and op.inputs[0].op.type == "Shape":
        begin = tf.get_static_value(op.inputs[1])
        return begin is None or not any(begin)
    return True


def _numbers(op: Any, dims: list[Any], entries: Entries, dtype: tf.DType, seed: Any) -> Any:
    """Draw the numbers of some entries of the first axis, bit by bit as one device draws them."""
    shape = tf.stack(dims)
    per_entry = tf.reduce_prod(tf.cast(shape[1:], tf.int64))
    first = tf.cast(entries.start, tf.int64) * per_entry
    block = 2 if dtype == tf.float64 else 4
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    counter += tf.cast(tf.stack([first // block, 0]), tf.uint64)
    draw = functools.partial(op, key=key, counter=counter, alg=_PHILOX, dtype=dtype)
    if op is _UNIFORM and dtype == tf.float32 and _is_compiled_for_cpu():
        draw = functools.partial(_philox.uniform, key=key, counter=counter)
    # XLA draws several axes in another order, and needs a size that is known from the shape.
    count = tf.reduce_prod(tf.cast(shape, tf.int64))
    if any(isinstance(size, int) and size % block == 0 for size in dims[1:]):
        return tf.reshape(draw(shape=[count]), shape)  # Each example begins with a block.
    drawn = draw(shape=[count + block - 1])
    return tf.reshape(tf.slice(drawn, [first % block], [count]), shape)


def _is_compiled_for_cpu() -> bool:
    kinds = {device.device_type for device in tf.config.list_logical_devices()}
    return in_xla_context(graph()) and not kinds & {"GPU", "TPU"}


def _sliced(drawn: tf.Tensor, entries: Entries) -> Any:
    begin = tf.concat([[entries.start], tf.zeros(tf.rank(drawn) - 1, tf.int32)], 0)
    return tf.slice(drawn, begin, tf.concat([[entries.count], tf.shape(drawn)[1:]], 0))


def _spread(value: Any, dims: list[Any], entries: Entries) -> Any:
    """Put a parameter that has an entry for each example at the position that one device has."""
    if not tf.is_tensor(value) or value.shape.rank != len(dims) or value.shape[0] == 1:
        return value
    missing = entries.total - entries.start - entries.count
    paddings = [[entries.start, missing]] + [[0, 0]] * (len(dims) - 1)
    return tf.pad(value, paddings, constant_values=tf.ones((), value.dtype))


def _dims_of_shape(shape: Any) -> list[Any]:
    if tf.is_tensor(shape):
        if not tf.executing_eagerly() and shape.op.type == "Shape":
            return _dims(shape.op.inputs[0])
        if shape.shape.rank != 1 or shape.shape[0] is None:
            return []
        shape = tf.unstack(shape)
    return [_static(dimension) for dimension in ([shape] if isinstance(shape, int) else shape)]


def _static(dimension: Any) -> Any:
    value = tf.get_static_value(dimension) if tf.is_tensor(dimension) else dimension
    return dimension if value is None else int(value)


def _dims(tensor: tf.Tensor) -> list[Any]:
    shape = tf.shape(tensor)
    return [shape[i] if size is None else size for i, size in enumerate(tensor.shape)]


def _cast(seed: Any) -> Any:
    return KERAS_RANDOM._cast_seed(seed_generator.draw_seed(seed))


def _make_global_seeds(part: Part) -> None:
    """Make Keras' global seeds if there are none yet, as on one device, but outside of the part."""
    if global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR) is None:
        # In a stateless scope no variable can be made.
        outside = with_thread_state(stateless_scope=None)
        with outside, tf.init_scope(), part.step.mesh.strategy.scope():
            seed_generator.global_seed_generator()
