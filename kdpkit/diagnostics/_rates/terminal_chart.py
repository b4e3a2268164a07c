"""Curves in a terminal, drawn with braille characters: 2 dots wide and 4 high each."""

import numpy as np

_DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
_BRAILLE = 0x2800
_LABEL = 9  # characters before the axis


def chart(
    steps: np.ndarray, rates: np.ndarray, *, high: float, height: int, width: int = 80
) -> str:
    """Draw rates from 0 to `high` over steps, with both axes.

    No peak is left out: where many steps share a column, all that lies between their least and
    their greatest rate is drawn.

    >>> print(chart(np.arange(5), np.arange(5.0), high=4.0, width=16, height=3))
            4 |⠀⠀⠀⣠⠞
              |⠀⢀⡼⠁
            0 |⡴⠋
               0...4

    Args:
        steps: Increasing.
        rates: One for each step.
        high: Rate of the highest line, above 0.
        height: Lines of the curve.
        width: Characters of a line.
    """
    columns = width - _LABEL - 2
    cells = _dots(steps, rates / high, (4 * height, 2 * columns))
    cells = cells.reshape(height, 4, columns, 2).transpose(0, 2, 1, 3)
    rows = _BRAILLE + (cells * _DOTS).sum(axis=(2, 3))
    curves = ["".join(map(chr, row)).rstrip(chr(_BRAILLE)) for row in rows]
    labels = [f"{high:.3g}", *[""] * (height - 2), "0"]
    lines = [f"{label:>{_LABEL}} |{curve}" for label, curve in zip(labels, curves, strict=True)]
    first, last = f"{steps[0]:,}", f"{steps[-1]:,}"
    axis = first + "." * (columns - len(first + last)) + last
    return "\n".join([*lines, " " * (_LABEL + 2) + axis])


def _dots(steps: np.ndarray, heights: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Return which dots are set, for heights from 0 to 1."""
    rows, columns = shape
    edges = np.linspace(steps[0], steps[-1], columns + 1)
    at_edges = np.interp(edges, steps, heights)
    first, last = np.searchsorted(steps, edges[:-1]), np.searchsorted(steps, edges[1:])
    dots = np.zeros(shape, bool)
    for column in range(columns):
        inside = heights[first[column] : last[column]]
        values = np.concatenate([at_edges[column : column + 2], inside])
        ends = (1 - np.array([values.max(), values.min()])) * (rows - 1)
        top, bottom = np.rint(np.clip(ends, 0, rows - 1)).astype(int)
        dots[top : bottom + 1, column] = True
    return dots
