"""Curves in a terminal, drawn with braille characters: 2 dots wide and 4 high each."""

import math
from typing import TextIO

import numpy as np

_DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
_BRAILLE = 0x2800
_LABEL = 9  # characters before the axis
_BETWEEN_TICKS = 12  # characters at least
_ASCII = dict.fromkeys(range(_BRAILLE + 1, _BRAILLE + 256), "*") | {_BRAILLE: " "}
_ASCII |= {ord(line): plain for line, plain in zip("│┤└─┬", "||+-+", strict=True)}


def chart(
    steps: np.ndarray,
    rates: np.ndarray,
    *,
    low: float,
    high: float,
    width: int = 80,
    height: int = 13,
) -> list[str]:
    """Draw rates over steps, with both axes.

    Between steps the curve is a line, and no rate is left out: where many steps share a place all
    that lies between their least and their greatest rate is drawn.

    >>> for line in chart(np.arange(5), np.arange(5.0), low=0, high=4, width=16, height=3):
    ...     print(line)
            4 ┤⠀⠀⠀⣠⠞
            2 ┤⠀⢀⡼⠁
            0 ┤⡴⠋
              └┬────
               0

    Args:
        steps: Increasing.
        rates: One for each step, finite.
        low: Rate of the lowest line.
        high: Rate of the highest line, above `low`.
        width: Characters of a whole line.
        height: Lines of the curve, an odd number, as the one in the middle is labelled.

    Returns:
        The lines from top to bottom.
    """
    columns = width - _LABEL - 2
    dots = _dots(steps, rates, low, high, shape=(4 * height, 2 * columns))
    cells = dots.reshape(height, 4, columns, 2).transpose(0, 2, 1, 3)
    characters = _BRAILLE + (cells * _DOTS).sum(axis=(2, 3))
    labels = {0: high, height // 2: (low + high) / 2, height - 1: low}
    lines = [
        f"{_rate(labels[row]):>{_LABEL}} ┤" if row in labels else f"{'':{_LABEL}} │"
        for row in range(height)
    ]
    drawn = ["".join(map(chr, row)).rstrip(chr(_BRAILLE)) for row in characters]
    return [line + curve for line, curve in zip(lines, drawn, strict=True)] + _step_axis(
        int(steps[0]), int(steps[-1]), columns
    )


def printable(text: str, stream: TextIO) -> str:
    """Give a text as it is, or in ASCII if a stream has no characters for its lines."""
    try:
        text.encode(stream.encoding or "utf-8")
    except UnicodeEncodeError:
        return in_ascii(text)
    return text


def in_ascii(text: str) -> str:
    """Give a chart in characters that every terminal has."""
    return text.translate(_ASCII)


def _dots(
    steps: np.ndarray, rates: np.ndarray, low: float, high: float, *, shape: tuple[int, int]
) -> np.ndarray:
    rows, columns = shape
    edges = np.linspace(steps[0], steps[-1], columns + 1)
    at_edges = np.interp(edges, steps, rates)
    first, last = np.searchsorted(steps, edges[:-1]), np.searchsorted(steps, edges[1:])
    dots = np.zeros(shape, bool)
    for column in range(columns):
        ends = at_edges[column : column + 2]
        values = np.concatenate([ends, rates[first[column] : last[column]]])
        heights = np.array([values.max(), values.min()])
        top, bottom = np.rint((high - heights) / (high - low) * (rows - 1)).astype(int)
        dots[top : bottom + 1, column] = True
    return dots


def _rate(rate: float) -> str:
    return f"{rate:.3g}"


def _step_axis(first: int, last: int, columns: int) -> list[str]:
    ticks = [*range(first, last + 1, _tick_distance(last - first, columns))]
    axis, labels = ["─"] * columns, [" "] * (columns + 1)
    for tick in ticks:
        place = round((tick - first) / max(last - first, 1) * (columns - 1))
        axis[place] = "┬"
        text = f"{tick:,}"
        start = min(max(place - len(text) // 2, 0), columns + 1 - len(text))
        labels[start : start + len(text)] = text
    indent = " " * (_LABEL + 1)
    return [f"{indent}└{''.join(axis)}", f"{indent} {''.join(labels)}".rstrip()]


def _tick_distance(length: int, columns: int) -> int:
    """Give the least 1, 2 or 5 times a power of ten that keeps labels apart."""
    least = max(length * _BETWEEN_TICKS / columns, 1)
    power = 10 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
