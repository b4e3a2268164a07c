"""Lines of several processes: none lost, none torn, progress bars in few lines."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kdpkit.launch import _output

texts = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=8)


def cut(data, positions):
    ends = sorted({min(position, len(data)) for position in positions} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(ends)]


def all_lines(chunks, seconds=0.0):
    lines = _output.Lines(0.0)
    return [line for i, data in enumerate([*chunks, b""]) for line in lines.feed(data, i * seconds)]


@given(st.lists(texts), texts, st.lists(st.integers(0, 60)), st.sampled_from(["\n", "\r\n"]))
def test_every_line_comes_complete_however_it_was_cut(lines, rest, positions, end):
    data = "".join(line + end for line in lines) + rest
    assert all_lines(cut(data.encode(), positions)) == lines + ([rest] if rest else [])


@given(st.lists(texts.filter(str.strip), min_size=1, unique=True), st.lists(st.integers(0, 60)))
def test_a_quick_bar_is_its_last_state(states, positions):
    data = "".join(f"\r{state}" for state in states).encode() + b"\n"
    assert all_lines(cut(data, positions)) == [states[-1]]


def test_a_bar_gives_a_line_every_few_seconds():
    lines = all_lines([f"{percent}%\r".encode() for percent in range(100)], seconds=1.0)
    assert lines[0] == "5%"
    assert 15 < len(lines) < 30
    assert lines[-1] == "99%"
