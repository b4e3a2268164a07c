"""Token ids in NumPy: `kdpkit.pipelines.pack_tokens` without TensorFlow."""

import math
from collections.abc import Sequence

import numpy as np

from kdpkit._internal import checks


def pack_tokens(
    documents: Sequence[Sequence[int]], length: int, *, start: int, end: int, pad: int
) -> np.ndarray:
    """Concatenate documents, and split them into full sequences.

    A sequence is `start`, then `length - 2` tokens, then `end`; documents are separated by `end`.
    Every token occurs once, in order, and only the last sequence has padding, after its `end`.

    Args:
        documents: Token ids, one sequence for each document.
        length: Tokens in a sequence, `start` and `end` included.
        start: Id before each sequence, such as BERT's `[CLS]`.
        end: Id after each sequence and between documents, such as `[SEP]`.
        pad: Id that pads the last sequence.

    Returns:
        An array of int32 `[sequences, length]`.

    >>> pack_tokens([[5, 6, 7], [8], [9, 9]], 6, start=2, end=3, pad=0)
    array([[2, 5, 6, 7, 3, 3],
           [2, 8, 3, 9, 9, 3]], dtype=int32)
    """
    room = checks.integer("length", length, minimum=3) - 2
    stream = [token for document in documents for token in (*document, end)][:-1]
    packed = np.full((math.ceil(len(stream) / room), length), pad, np.int32)
    for index, sequence in enumerate(packed):
        body = stream[index * room : (index + 1) * room]
        sequence[: len(body) + 2] = start, *body, end
    return packed
