"""What an error reports, as a part of a sentence."""

import re

# TensorFlow's names of nodes and operations; Keras' bold letters, and the arguments that it lists.
_ADDED = re.compile(
    r"\{\{.*?\}\}\s*|\s*\[Op:.*|\x1b\[\d*m|\(\d+\) [A-Z_]+:\s+|\nArguments received by [\s\S]*"
)
# Lines that say where something was called, before the one that says what went wrong.
_WHERE = re.compile(
    r"Graph execution error|Detected at|<stack|in user code:|\s*File \"| ?\t| {8}"
    r"|Exception encountered when calling|\d+ root error"
)


def first_line(error: object) -> str:
    r"""Return the first line that reports what went wrong, without its full stop.

    Where TensorFlow and Keras begin with where it happened, that is left out, as are the names of
    graph nodes.

    >>> first_line(ValueError("\nNo data.\nAnd more."))
    'No data'
    >>> first_line('in user code:\n\n    File "a.py", line 1, in f\n        g()\n\n    No data.')
    'No data'
    >>> first_line(KeyError())
    'KeyError'

    Args:
        error: An error, or its message, which must not be empty then.
    """
    lines = [line for line in _ADDED.sub("", str(error)).splitlines() if line.strip()]
    reports = [line for line in lines if not _WHERE.match(line)]
    text = (reports or lines or [type(error).__name__])[0]
    return text.strip().rstrip(".")
