"""Lines of several processes: none lost, none torn, progress bars in few lines."""

import io
import itertools

from hypothesis import given
from hypothesis import strategies as st

from kdpkit.launch import _output

texts = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=8)


def cut(data, positions):
    ends = sorted({min(position, len(data)) for position in positions} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(ends)]


def all_lines(chunks, seconds=0.0):
    lines = _output.Lines()
    given = [line for i, data in enumerate(chunks) for line in lines.feed(data, i * seconds)]
    return given + lines.close()


@given(st.lists(texts), texts, st.lists(st.integers(0, 60)))
def test_every_line_comes_complete_however_it_was_cut(lines, rest, positions):
    data = "".join(line + "\n" for line in lines) + rest
    assert all_lines(cut(data.encode(), positions)) == lines + ([rest] if rest else [])


@given(st.lists(texts.filter(str.strip), min_size=1, unique=True), st.lists(st.integers(0, 60)))
def test_a_quick_bar_is_its_last_state(states, positions):
    data = "".join(f"\r{state}" for state in states).encode() + b"\n"
    given_lines = all_lines(cut(data, positions))
    assert given_lines == [states[-1]]


def test_a_bar_gives_a_line_every_few_seconds():
    chunks = [f"{percent}%\r".encode() for percent in range(100)]
    lines = all_lines(chunks, seconds=1.0)
    assert lines[0] == "5%"
    assert 15 < len(lines) < 30
    assert lines[-1] == "99%"


def test_windows_line_ends_are_line_ends():
    assert all_lines([b"one\r\ntw", b"o\r", b"\n", b"\r\n"]) == ["one", "two", ""]


def test_bytes_that_are_no_text_and_lines_without_end_are_given():
    assert all_lines([b"\xff\n"]) == ["\ufffd"]
    endless = all_lines([b"x" * 50_000] * 4)
    assert sum(map(len, endless)) == 200_000


def test_names_are_padded_to_one_width():
    printer = _output.Printer(["a", "long"], on_gone=lambda: None, stdout=(out := io.StringIO()))
    printer.line("a", "one", "stdout")
    printer.line("long", "two", "stdout")
    assert out.getvalue() == "a    | one\nlong | two\n"


def test_what_a_terminal_cannot_show_is_replaced():
    raw = io.BytesIO()
    printer = _output.Printer(
        ["a"], on_gone=lambda: None, stdout=io.TextIOWrapper(raw, encoding="ascii")
    )
    printer.line("a", "naïve", "stdout")
    assert raw.getvalue() == b"a | na?ve\n"


def test_a_missing_reader_is_reported_once():
    class Closed(io.StringIO):
        def write(self, _):
            raise BrokenPipeError

    gone = []
    printer = _output.Printer(["a"], on_gone=lambda: gone.append(1), stdout=Closed())
    for _ in range(3):
        printer.line("a", "one", "stdout")
    assert gone == [1]
