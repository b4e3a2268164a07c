"""Text: token sequences, packed or not, and masks for masked language models."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import tensorflow as tf

from kdpkit._internal import checks
from kdpkit.pipelines._epochs import as_written
from kdpkit.pipelines._padding import Transform

if TYPE_CHECKING:
    import keras_hub

_LINES_AT_ONCE = _DOCUMENTS_AT_ONCE = 256

Tokenizer: TypeAlias = "keras_hub.tokenizers.Tokenizer"
Masked: TypeAlias = tuple[dict[str, tf.Tensor], tf.Tensor, tf.Tensor]  # features, labels, weights


def tokenize(tokenizer: Tokenizer, *, sequence_length: int | None = None) -> Transform:
    """Convert lines to token ids, many lines at a time.

    Args:
        tokenizer: A keras_hub tokenizer, such as `keras_hub.models.BertTokenizer`.
        sequence_length: Length of the sequences of int32 ids, `[CLS] ... [SEP]` and padding; a long
            line continues in the next sequence, so no token is lost. None returns each line's ids
            without special tokens, in vectors of varying length.

    Returns:
        A stage from string scalars to int32 vectors.

    Raises:
        ValueError: The tokenizer pads or truncates sequences itself, or the dataset does not
            consist of single lines.
    """
    if sequence_length is not None:
        checks.integer("sequence_length", sequence_length, minimum=3)
    if getattr(tokenizer, "sequence_length", None) is not None:
        checks.fail(
            "The tokenizer has a `sequence_length` of its own, to which it pads lines.",
            sequence_length=tokenizer.sequence_length,
            remedy="Create it without, and pass the length to `tokenize`.",
        )

    def convert(lines: tf.Tensor) -> tf.Tensor | tf.RaggedTensor:
        tokens = tokenizer(lines)
        return tokens if sequence_length is None else _sequences(tokens, tokenizer, sequence_length)

    def apply(lines: tf.data.Dataset) -> tf.data.Dataset:
        spec = lines.element_spec
        is_string = isinstance(spec, tf.TensorSpec) and spec.dtype == tf.string
        if not is_string or spec.shape.rank not in (0, None):
            checks.fail(
                "`tokenize` takes lines of text one by one, as string scalars.",
                element_spec=spec,
                remedy="Map a dataset to its text, and `unbatch` one of batches.",
            )
        batches = lines.batch(_LINES_AT_ONCE).map(convert, num_parallel_calls=tf.data.AUTOTUNE)
        return batches.unbatch()

    return apply


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

    def closed(documents: tf.Tensor | tf.RaggedTensor) -> tuple[tf.Tensor, bool]:
        """Concatenate a batch of documents, with an `end` after each."""
        if not isinstance(documents, tf.RaggedTensor):  # all documents have one known length
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


def mask_tokens(tokenizer: Tokenizer, *, rate: float = 0.15) -> Callable[..., Masked]:
    """Return the masking of BERT (Devlin et al. 2019) as a function of tokens and a seed.

    In every sequence `ceil(rate * tokens)` ordinary tokens are to be predicted: 80 % of them are
    replaced by `[MASK]`, 10 % by a random token of the vocabulary, and 10 % are unchanged. The
    masks depend only on the seed and the sequence's position in the batch, so they are the same on
    any number of replicas.

    Args:
        tokenizer: The keras_hub tokenizer of the tokens, for its special ids.
        rate: Fraction of the ordinary tokens to predict, between 0 and 1.

    Returns:
        A function `mask(tokens, seed)` from int32 `[batch, length]` (or `[length]`) and a seed of
        two integers to `(features, labels, weights)` for `keras_hub.models.BertMaskedLM`. Weights
        sum to the number of slots in the batch, so a loss averaged over all slots is the mean over
        the masked tokens, on any number of replicas. Without a seed, for validation, masks depend
        on the sequence's own tokens, so they are the same in every epoch, and weights are 0 or 1.

    >>> import keras_hub
    >>> tokenizer = keras_hub.models.BertTokenizer(
    ...     ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]
    ... )
    >>> mask = mask_tokens(tokenizer, rate=0.5)
    >>> features, labels, weights = mask(tf.constant([[2, 5, 6, 5, 3, 0]]), seed=(0, 1))
    >>> labels.shape, float(tf.reduce_mean(weights))
    (TensorShape([1, 2]), 1.0)
    """
    rate = checks.number("rate", rate, above=0, maximum=1)

    @as_written
    def mask(tokens: tf.Tensor, seed: Sequence[int] | tf.Tensor | None = None) -> Masked:
        tokens = tokens if tf.is_tensor(tokens) else tf.convert_to_tensor(tokens)
        if not tokens.shape[-1]:
            checks.fail(
                "Sequences to mask need one static length.",
                shape=tokens.shape,
                remedy="`pack_tokens` and `tokenize(sequence_length=...)` have one, and "
                "`tf.ensure_shape(batch, [None, length])` sets it.",
            )
        if tokens.shape.rank == 1:
            masked = mask(tokens[tf.newaxis], seed)
            return tf.nest.map_structure(lambda part: part[0], masked)
        length = tokens.shape[-1]
        slots = max(math.ceil(rate * (length - 2)), 1)  # as many as a full sequence needs
        draws = _draws(tokens, length + 2 * slots, seed)
        features, labels, weights = _masked(tokens, draws, tokenizer, rate, slots)
        if seed is not None:
            all_slots = tf.cast(tf.size(weights), tf.float32)
            weights *= tf.math.divide_no_nan(all_slots, tf.reduce_sum(weights))
        return features, labels, weights

    return mask


def _draws(tokens: tf.Tensor, count: int, seed: Sequence[int] | tf.Tensor | None) -> tf.Tensor:
    """Draw `count` numbers in [0, 1) per sequence: from the seed, or from its own tokens."""
    if seed is not None:
        return tf.random.stateless_uniform([tf.shape(tokens)[0], count], seed)

    def from_tokens(sequence: tf.Tensor) -> tf.Tensor:
        text = tf.strings.reduce_join(tf.strings.as_string(sequence), separator=" ")
        seed = tf.stack([tf.strings.to_hash_bucket_fast(text, 1 << 62), 0])
        return tf.random.stateless_uniform([count], seed)

    return tf.map_fn(from_tokens, tokens, fn_output_signature=tf.float32)


def _masked(
    tokens: tf.Tensor, draws: tf.Tensor, tokenizer: Tokenizer, rate: float, slots: int
) -> Masked:
    """Mask sequences: draw which tokens, then how each is masked, then the random tokens."""
    count, length = tf.shape(tokens)[0], tokens.shape[-1]
    order, method, random_token = tf.split(draws, [length, slots, slots], axis=1)
    special = tf.constant(tokenizer.special_token_ids, tokens.dtype)
    ordinary = tf.reduce_all(tokens[:, :, tf.newaxis] != special, axis=-1)
    to_predict = tf.math.ceil(rate * tf.reduce_sum(tf.cast(ordinary, tf.float32), axis=1))
    chosen = tf.range(slots) < tf.cast(to_predict, tf.int32)[:, tf.newaxis]
    positions = tf.math.top_k(tf.where(ordinary, order, -1.0), slots).indices
    positions = tf.where(chosen, positions, 0)
    originals = tf.gather(tokens, positions, batch_dims=1)
    drawn = tf.cast(random_token * tokenizer.vocabulary_size(), tokens.dtype)
    mask_id = tf.constant(tokenizer.mask_token_id, tokens.dtype)
    replaced = tf.where(method < 0.8, mask_id, tf.where(method < 0.9, drawn, originals))
    indices = tf.stack([tf.repeat(tf.range(count), slots), tf.reshape(positions, [-1])], axis=1)
    # Changes are added, since unused slots have position 0, which may also be chosen.
    changes = tf.reshape(tf.where(chosen, replaced - originals, 0), [-1])
    features = {
        "token_ids": tf.tensor_scatter_nd_add(tokens, indices, changes),
        "segment_ids": tf.zeros_like(tokens),
        "padding_mask": tf.cast(tokens != tokenizer.pad_token_id, tf.int32),
        "mask_positions": positions,
    }
    return features, tf.where(chosen, originals, 0), tf.cast(chosen, tf.float32)


def _sequences(tokens: tf.RaggedTensor, tokenizer: Tokenizer, length: int) -> tf.Tensor:
    """Split ragged lines into sequences of `length` ids with their special tokens and padding."""
    starts = tf.ragged.range(tokens.row_starts(), tokens.row_limits(), length - 2).flat_values
    splits = tf.concat([starts, [tf.size(tokens.flat_values, tf.int64)]], axis=0)
    body = tf.RaggedTensor.from_row_splits(tokens.flat_values, splits)
    first, last = (
        tf.fill([tf.size(starts), 1], special)
        for special in (tokenizer.cls_token_id, tokenizer.sep_token_id)
    )
    sequences = tf.concat([first, body, last], axis=1)
    return sequences.to_tensor(tokenizer.pad_token_id, shape=[None, length])
