"""Token sequences with little padding: packed documents."""

from typing import TypeAlias

import tensorflow as tf

from kdpkit._internal import checks
from kdpkit.pipelines._transforms import Transform

_DOCUMENTS_AT_ONCE = 256
_Tokens: TypeAlias = tf.Tensor | tf.RaggedTensor


def pack_tokens(length: int, *, start: int, end: int, pad: int) -> Transform:
    """Concatenate documents, and split them into full sequences.

    A sequence is `start`, then `length - 2` tokens, then `end`; documents are separated by `end`
    (FULL-SENTENCES of RoBERTa, Liu et al. 2019). Every token occurs once, in order, and only the
    last sequence has padding, after its `end`. A sequence can contain parts of several documents,
    and attention spans the complete sequence.

    Args:
        length: Tokens in a sequence, `start` and `end` included.
        start: Id before each sequence, such as BERT's `[CLS]`.
        end: Id after each sequence and between documents, such as `[SEP]`.
        pad: Id that pads the last sequence.

    Returns:
        A stage from integer vectors of any length, one per document, to int32 `[length]`.

    >>> documents = tf.data.Dataset.from_generator(
    ...     lambda: [[5, 6, 7], [8], [9, 9]], output_signature=tf.TensorSpec([None], tf.int32)
    ... )
    >>> for sequence in documents.apply(pack_tokens(6, start=2, end=3, pad=0)):
    ...     print(sequence.numpy())
    [2 5 6 7 3 3]
    [2 8 3 9 9 3]
    """
    length = checks.integer("length", length, minimum=3)
    start, end, pad = (
        checks.integer(name, value, minimum=0)
        for name, value in (("start", start), ("end", end), ("pad", pad))
    )
    room = length - 2

    def closed(documents: _Tokens) -> tuple[tf.Tensor, bool]:
        """Concatenate a batch of documents, with an `end` after each."""
        if not isinstance(documents, tf.RaggedTensor):  # all have one known length
            documents = tf.RaggedTensor.from_tensor(documents)
        ends = tf.fill([documents.nrows(), 1], tf.constant(end, tf.int32))
        return tf.concat([tf.cast(documents, tf.int32), ends], axis=1).flat_values, False

    def framed(bodies: tf.Tensor) -> tf.Tensor:
        edge = tf.ones([tf.shape(bodies)[0], 1], tf.int32)
        return tf.concat([start * edge, bodies, end * edge], axis=1)

    def last_sequence(left: tf.Tensor) -> tf.Tensor:
        """Return the rest, without the `end` of the last document, as a sequence or none."""
        body = tf.concat([[start], left[:-1], [end]], axis=0)
        sequence = tf.pad(body, [[0, length - tf.size(body)]], constant_values=pad)
        return tf.reshape(sequence, [1, length])[: tf.minimum(tf.size(left[:-1]), 1)]

    def split(left: tf.Tensor, item: tuple[tf.Tensor, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        """Split off full sequences; leave at least one token, the last document's `end`."""
        added, is_end = item
        tokens = tf.concat([left, added], axis=0)
        full = tf.maximum(tf.size(tokens) - 1, 0) // room * room
        sequences = tf.cond(
            is_end,
            lambda: last_sequence(tokens),
            lambda: framed(tf.reshape(tokens[:full], [-1, room])),
        )
        return tokens[full:], tf.ensure_shape(sequences, [None, length])

    def apply(documents: tf.data.Dataset) -> tf.data.Dataset:
        spec = documents.element_spec
        if not isinstance(spec, tf.TensorSpec | tf.RaggedTensorSpec) or (
            spec.shape.rank != 1 or not spec.dtype.is_integer
        ):
            checks.fail(
                "`pack_tokens` takes vectors of token ids.",
                element_spec=spec,
                remedy="`pipelines.tokenize(tokenizer)` makes them from lines.",
            )
        nothing = tf.zeros([0], tf.int32)
        streams = documents.ragged_batch(_DOCUMENTS_AT_ONCE).map(closed, tf.data.AUTOTUNE)
        ended = streams.concatenate(tf.data.Dataset.from_tensors((nothing, True)))
        return ended.scan(nothing, split).unbatch()

    return apply
