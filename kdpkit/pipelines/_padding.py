"""Batches padded to one size, with weights that exclude the padding."""

from collections.abc import Callable
from typing import Any, TypeAlias

import tensorflow as tf

from kdpkit._internal import checks
from kdpkit.pipelines._epochs import as_written

Transform: TypeAlias = Callable[[tf.data.Dataset], tf.data.Dataset]


def pad_to_global_batch(global_batch_size: int, *, mode: str = "train") -> Transform:
    """Pad smaller batches to the global size, and weight the padding 0.

    Every batch then has the same shape, as TPUs and XLA prefer, and the replicas get shards of
    equal size. Padding repeats the last real example, because zeros can become NaN (a normalized
    zero vector), and NaN times weight 0 is NaN.

    If the examples of a batch interact, as in training with BatchNormalization, padding is not
    exact: drop the remainder instead. `predict` also returns outputs for the padding:
    `model.predict(batches)[:examples]` are the real ones.

    Args:
        global_batch_size: Examples in every padded batch.
        mode: `"train"` weights the n real examples of a batch `global_batch_size / n`, so that a
            loss averaged over the padded batch is the mean over the real examples. `"eval"`, which
            reads the dataset once to count them (put it after a cache), weights those of all
            batches the same, so that weights average 1 and the loss of `evaluate` is the mean over
            all real examples. Existing weights are multiplied by these. Metrics have to be in
            `weighted_metrics`: those in `metrics` count the padding.

    Returns:
        A stage from batches `x`, `(x, y)` or `(x, y, sample_weight)`, each any nest of tensors,
        to `(x, y, sample_weight)`; `x` becomes `(x, None, sample_weight)`. Ragged and sparse
        tensors become dense, padded with zeros.

    Raises:
        ValueError: The mode is unknown, or batches to count never end. A larger batch fails when
            it arrives.

    >>> x = tf.data.Dataset.from_tensor_slices([1.0, 2.0, 3.0]).batch(2)
    >>> for x, _, weight in x.apply(pad_to_global_batch(2, mode="eval")):
    ...     print(x.numpy(), weight.numpy())
    [1. 2.] [1.3333334 1.3333334]
    [3. 3.] [1.3333334 0.       ]
    """
    size = checks.integer("global_batch_size", global_batch_size)
    checks.one_of("mode", mode, ("train", "eval"))

    @as_written
    def add(sums: tuple[tf.Tensor, tf.Tensor], *batch: Any) -> tuple[tf.Tensor, tf.Tensor]:
        return sums[0] + size, sums[1] + tf.cast(_count(batch), tf.int64)

    def pad_all(batches: tf.data.Dataset) -> tf.data.Dataset:
        if mode == "train":
            return padded(batches, size)
        if int(batches.cardinality()) == tf.data.INFINITE_CARDINALITY:
            checks.fail("Examples to evaluate must end.", remedy="Leave out `.repeat()`.")
        nothing = tf.constant(0, tf.int64)
        filled, real = batches.reduce((nothing, nothing), add)
        return padded(batches, size, tf.cast(filled / tf.maximum(real, 1), tf.float32))

    return pad_all


def padded(batches: tf.data.Dataset, size: int, weight_of_real: Any = None) -> tf.data.Dataset:
    """Pad batches to a size; real examples weigh `size / n` in a batch of n, or as given."""

    @as_written
    def pad(*batch: Any) -> tuple[Any, Any, Any]:
        x, y, weight = (*batch, None, None)[:3]
        count = _count(batch)
        check = tf.debugging.assert_less_equal(
            count, size, message="A batch has more examples than `global_batch_size`."
        )
        with tf.control_dependencies([check]):
            indices = tf.minimum(tf.range(size), count - 1)
        real = tf.cast(tf.range(size) < count, tf.float32)
        real *= size / tf.cast(count, tf.float32) if weight_of_real is None else weight_of_real
        x, y, weight = (_gather(part, indices) for part in (x, y, weight))
        return x, y, _multiply(weight, real)

    return batches.map(pad, num_parallel_calls=tf.data.AUTOTUNE)


def normalize_weights(batches: tf.data.Dataset) -> tf.data.Dataset:
    """Scale your own sample weights by one factor, so that they average 1 over the dataset.

    This is for weights that choose what counts, such as the tokens of `mask_tokens`: Keras divides
    a weighted loss by the number of elements, including those of weight 0. With this stage the loss
    of `evaluate` is the weighted mean over the dataset, on any number of replicas; weighted metrics
    are ratios and do not change. The stage reads the dataset once, so put it after a cache.

    Args:
        batches: A dataset of `(x, y, sample_weight)` to evaluate, as from `eval_pipeline`.

    Raises:
        ValueError: The elements have no sample weights, or all weights are 0.

    >>> batches = tf.data.Dataset.from_tensor_slices(([0.0] * 4, [0] * 4, [1.0, 1, 1, 0])).batch(2)
    >>> for _, _, weight in batches.apply(normalize_weights):
    ...     print(weight.numpy().round(2))
    [1.33 1.33]
    [1.33 0.  ]
    """
    spec = batches.element_spec
    if not (isinstance(spec, tuple) and len(spec) == 3 and isinstance(spec[2], tf.TensorSpec)):
        checks.fail("Weights can only be scaled in (x, y, sample_weight).", elements=spec)

    @as_written
    def add(sums: tuple[tf.Tensor, tf.Tensor], batch: Any) -> tuple[tf.Tensor, tf.Tensor]:
        total, count = sums
        weight = tf.cast(batch[2], tf.float64)
        return total + tf.reduce_sum(weight), count + tf.cast(tf.size(weight), tf.float64)

    nothing = tf.constant(0.0, tf.float64)
    total, count = batches.reduce((nothing, nothing), add)
    if float(total) == 0:
        checks.fail("Every sample weight is 0, so there is nothing to average over.")
    factor = tf.cast(count / total, tf.float32)
    return batches.map(as_written(lambda x, y, weight: (x, y, weight * factor)))


def _count(batch: Any) -> tf.Tensor:
    return tf.shape(_dense(tf.nest.flatten(batch)[0]))[0]


def _dense(part: tf.Tensor | tf.RaggedTensor | tf.SparseTensor) -> tf.Tensor:
    if isinstance(part, tf.SparseTensor):
        return tf.sparse.to_dense(part)
    return part.to_tensor() if isinstance(part, tf.RaggedTensor) else part


def _gather(nest: Any, indices: tf.Tensor) -> Any:
    if nest is None:
        return None
    return tf.nest.map_structure(lambda part: tf.gather(_dense(part), indices), nest)


def _multiply(weight: Any, real: tf.Tensor) -> Any:
    """Multiply each weight, of any rank, by its example's entry of `real`."""
    if weight is None:
        return real

    def multiply(part: tf.Tensor) -> tf.Tensor:
        shape = tf.concat([tf.shape(real), tf.ones([tf.rank(part) - 1], tf.int32)], axis=0)
        return tf.cast(part, real.dtype) * tf.reshape(real, shape)

    return tf.nest.map_structure(multiply, weight)
