"""Checks of arguments, and the sentences of errors.

A message names the argument, shows the value received and suggests a fix. Every check returns the
value that it accepted, as a plain Python type.
"""

import contextlib
import importlib.metadata
import json
import math
import operator
import os
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, SupportsFloat, SupportsIndex, TypeVar, cast

from kdpkit import errors

_T = TypeVar("_T")

_LONGEST = 400  # characters of a value that a message shows
_MOST_LISTED = 8  # names
_LONGEST_REASON = 300  # characters

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT])(i?)B")

# What `first_line` removes: TensorFlow's names of nodes and operations, Keras' bold letters, and
# the arguments that it lists.
_DETAILS = re.compile(
    r"\{\{.*?\}\}\s*|\s*\[Op:.*|\x1b\[\d*m|\(\d+\) [A-Z_]+:\s+|\nArguments received by [\s\S]*"
)
# Lines with the place of an error, before the one that says what is wrong.
_PLACE = re.compile(
    r"Graph execution error|Detected at|<stack|in user code:|\s*File \"| ?\t| {8}"
    r"|Exception encountered when calling|\d+ root error"
)


def fail(problem: str, *, remedy: str = "", **received: object) -> NoReturn:
    """Raise an `InputError`: the problem, the values received, then the remedy.

    >>> fail("`replicas` must be positive.", replicas=0, remedy="Use at least 1.")
    Traceback (most recent call last):
    ...
    kdpkit.errors.InputError: `replicas` must be positive. Received: replicas=0. Use at least 1.
    """
    shown = ", ".join(f"{name}={_shortened(repr(value))}" for name, value in received.items())
    parts = [problem, f"Received: {shown}." if shown else "", remedy]
    raise errors.InputError(" ".join(part for part in parts if part))


def _shortened(text: str) -> str:
    text = " ".join(text.split())  # arrays have several lines
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-20:]}"


def listed(names: Iterable[object]) -> str:
    """Return names with commas between them; of many the first ones and the last.

    >>> listed(f"CPU:{index}" for index in range(1000))
    'CPU:0, CPU:1, CPU:2, CPU:3, ..., CPU:999'
    """
    words = [*map(str, names)]
    if len(words) > _MOST_LISTED:
        words[4:-1] = ["..."]
    return ", ".join(words)


def _reject(problem: str, name: str, value: Any) -> NoReturn:
    fail(problem, **{name: value})


def integer(name: str, value: object, *, minimum: int = 1) -> int:
    """Accept an integer of any integer type (not a bool) that is at least `minimum`."""
    with contextlib.suppress(TypeError):
        accepted = operator.index(cast(SupportsIndex, value))
        if accepted >= minimum and not isinstance(value, bool):
            return accepted
    kinds = {0: "a non-negative integer", 1: "a positive integer"}
    kind = kinds.get(minimum, f"an integer of at least {minimum}")
    _reject(f"`{name}` must be {kind}.", name, value)


def number(
    name: str,
    value: SupportsFloat,
    *,
    minimum: float = -math.inf,
    maximum: float = math.inf,
    above: float = -math.inf,
    below: float = math.inf,
) -> float:
    """Accept a finite real number within the limits (`above` and `below` are exclusive)."""
    try:
        real = float(value)
    except (TypeError, ValueError):
        real = math.nan
    if isinstance(value, bool | str) or not math.isfinite(real):
        _reject(f"`{name}` must be a finite number.", name, value)
    if not (minimum <= real <= maximum and above < real < below):
        limits = {"at least": minimum, "above": above, "at most": maximum, "below": below}
        texts = [f"{word} {limit:g}" for word, limit in limits.items() if math.isfinite(limit)]
        _reject(f"`{name}` must be {' and '.join(texts)}.", name, value)
    return real


def size_in_bytes(name: str, value: object) -> int:
    """Accept a number of bytes, or a text such as "16GiB"."""
    if not isinstance(value, str):
        return integer(name, value)
    match = _SIZE.fullmatch(value)
    if match is None:
        fail(f"`{name}` must be a number of bytes, or as '16GiB', '80GB'.", **{name: value})
    number, unit, is_binary = match.groups()
    base = 1024 if is_binary else 1000
    return integer(name, int(float(number) * base ** (1 + "KMGT".index(unit))))


def one_of(name: str, value: _T, choices: Iterable[_T]) -> _T:
    choices = tuple(choices)
    if value not in choices:
        _reject(f"`{name}` must be one of {', '.join(map(repr, choices))}.", name, value)
    return value


def backend(part: str, *served: str) -> str:
    """Return Keras' backend, which must be one on which a part of the kit works."""
    import keras

    current = keras.backend.backend()
    if current not in served:
        settings = " or ".join(f"KERAS_BACKEND={name}" for name in served)
        fail(f"{part} does not work on Keras' backend {current!r}.", remedy=f"Run with {settings}.")
    return current


def install_command(extra: str) -> str:
    """Return the command that installs kdpkit with an extra, from where it was installed.

    That is a checkout, or what `pip` has recorded: a file, or the address of a repository.

    >>> install_command("jax")
    'pip install ...[jax]...'
    """
    checkout = Path(__file__).parents[2]
    if (checkout / "pyproject.toml").exists():
        return f'pip install -e "{checkout}[{extra}]"'
    try:
        record = importlib.metadata.distribution("kdpkit").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        record = None
    origin = json.loads(record or "{}")
    address = origin.get("url", "")
    if repository := origin.get("vcs_info"):
        address = f"{repository['vcs']}+{address}@{repository['commit_id']}"
    return f'pip install "kdpkit[{extra}]{f" @ {address}" if address else ""}"'


def strings(name: str, values: Sequence[str]) -> tuple[str, ...]:
    """Accept a list or tuple of strings, but not a string."""
    are_several = isinstance(values, Sequence) and not isinstance(values, str)
    if not are_several or not all(isinstance(value, str) for value in values):
        _reject(f"`{name}` must be a list of strings.", name, values)
    return tuple(values)


def address(name: str, value: str | None) -> tuple[str, int]:
    """Accept `"host:port"`, with a numeric IPv6 host in brackets; return host and port.

    >>> address("coordinator", "10.0.0.1:9876")
    ('10.0.0.1', 9876)
    """
    host, _, port = str(value).rpartition(":")
    in_brackets = host.startswith("[") and host.endswith("]")
    wrong_colons = ":" in host and not in_brackets
    is_port = port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 1 << 16
    if not host or wrong_colons or set(host) & set("/, \t\n") or not is_port:
        _reject(
            f"`{name}` must be the address and port of a process, such as '10.0.0.1:9876', the "
            "port from 1 to 65535.",
            name,
            value,
        )
    return host.strip("[]"), int(port)


def global_batch(global_batch_size: object, replicas: object) -> tuple[int, int]:
    """Accept a global batch that the replicas divide evenly."""
    size = integer("global_batch_size", global_batch_size)
    count = integer("replicas", replicas)
    if size % count == 0:
        return size, count
    lower = size // count * count
    nearest = f"The nearest sizes that work are {lower} and {lower + count}."
    if not lower:
        nearest = f"The nearest size that works is {count}."
    fail(
        "`global_batch_size` must be a multiple of `replicas`, so that every replica gets the "
        "same number of examples.",
        global_batch_size=size,
        replicas=count,
        remedy=nearest,
    )


def steps_per_epoch(value: int | None, available: int) -> int:
    """Accept the number of batches of an epoch; None is all that the data have."""
    steps = available if value is None else integer("steps_per_epoch", value)
    if steps > available:
        fail(
            f"An epoch cannot have more batches than the data, which has {available}.",
            steps_per_epoch=steps,
            remedy="Train for more epochs instead.",
        )
    return steps


def fail_for_file(problem: str, path: str | os.PathLike[str], *, remedy: str = "") -> NoReturn:
    raise errors.FileInputError(f"{problem}: {os.fspath(path)}.{' ' + remedy if remedy else ''}")


def first_line(error: object) -> str:
    r"""Return the first line of an error, or of its message, without its full stop.

    The place, with which TensorFlow and Keras begin, and names of graph nodes are left out.

    >>> first_line(ValueError("\nNo data.\nAnd more."))
    'No data'
    >>> first_line('in user code:\n\n    File "a.py", line 1, in f\n        g()\n\n    No data.')
    'No data'
    >>> first_line(KeyError())
    'KeyError'
    """
    lines = [line for line in _DETAILS.sub("", str(error)).splitlines() if line.strip()]
    reports = [line for line in lines if not _PLACE.match(line)]
    text = (reports or lines or [type(error).__name__])[0]
    return text.strip().rstrip(".")


def reason_of(error: BaseException) -> str:
    r"""Return the type and the first line of an error, shortened to fit a sentence.

    >>> reason_of(ValueError("no data\nand more"))
    'ValueError: no data'
    """
    kind = type(error).__name__
    line = first_line(error).removeprefix(f"{kind}: ")
    line = textwrap.shorten(line, _LONGEST_REASON, placeholder="...")
    return kind if line == kind else f"{kind}: {line}"
