"""Which shuffle buffers are too small for the data, for `lint` and `kdpkit plan`."""

_SMALL_BUFFER = 1000  # examples; below it, and below this part of the data, a shuffle is local
_SMALL_PART = 0.01
_REMEDY = (
    "Use a buffer of the size of the data, or of as many examples as memory allows; or shuffle the "
    "data once beforehand."
)


def fault(
    buffer: int, *, examples: int | None, batch_size: int | None
) -> tuple[str, str, str] | None:
    """Return the level, the problem and the remedy of a small buffer; None of a large one.

    >>> fault(100, examples=60_000, batch_size=20)[0], fault(1000, examples=60_000, batch_size=20)
    ('note', None)
    >>> fault(100, examples=60_000, batch_size=128)[:2]
    ('wrong', 'The buffer holds 100 examples, fewer than a batch of 128: neighbors stay together.')

    Args:
        buffer: Examples that it holds; below 0, as `tf.data` writes it, all of the data.
        examples: Those of the data; None where it is not known, infinity as -1.
        batch_size: Examples of a global batch, where it is known.
    """
    is_complete = buffer < 0 or (examples is not None and 0 <= examples <= buffer)
    if is_complete:
        return None
    if buffer < (batch_size or 0):
        problem = f"fewer than a batch of {batch_size:,}: neighbors stay together."
        return "wrong", f"The buffer holds {buffer:,} examples, {problem}", _REMEDY
    if examples is not None and buffer < min(_SMALL_BUFFER, _SMALL_PART * examples):
        problem = (
            f"The buffer holds {buffer:,} of {examples:,} examples: if the source is in an order, "
            "such as one class after the other, it nearly stays in it."
        )
        return "note", problem, _REMEDY
    return None
