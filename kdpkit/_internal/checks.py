"""The one home of argument checks and the sentences they raise.

A message names the argument, shows the value received and says the way out. Every check returns
the value it accepted, in the plain Python type that the caller goes on with.
"""

import math
import operator
import os
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn


class InputError(ValueError):
    """What the caller passed cannot work; the message says what, the value, and the way out."""


class FileInputError(InputError, OSError):
    """A file that the caller named is missing, unreadable or damaged."""

    def __str__(self) -> str:
        """Give the sentence alone, without the `[Errno ...]` of an `OSError`."""
        return str(self.args[0]) if self.args else ""


class PackageInputError(InputError, ImportError):
    """What the caller asked for needs a package that is not installed."""


def refuse(problem: str, *, remedy: str = "", **received: Any) -> NoReturn:
    """Raise an `InputError`: the problem, the values received, then the remedy.

    >>> refuse("`replicas` must be positive.", replicas=0, remedy="Use at least 1.")
    Traceback (most recent call last):
    ...
    kdpkit._checks.InputError: `replicas` must be positive. Received: replicas=0. Use at least 1.
    """
    raise InputError(sentence(problem, received, remedy))


def sentence(problem: str, received: dict[str, Any], remedy: str) -> str:
    """Put a problem, the values received and the remedy into one message."""
    shown = ", ".join(f"{name}={value!r}" for name, value in received.items())
    parts = [problem, f"Received: {shown}." if shown else "", remedy]
    return " ".join(part for part in parts if part)


def integer(name: str, value: Any, *, minimum: int = 1) -> int:
    """Accept an integer of any integer type (not a bool) that is at least `minimum`."""
    kind = {0: "a non-negative integer", 1: "a positive integer"}.get(
        minimum, f"an integer of at least {minimum}"
    )
    if not isinstance(value, bool):
        try:
            number = operator.index(value)
        except TypeError:
            pass
        else:
            if number >= minimum:
                return number
    refuse(f"`{name}` must be {kind}.", **{name: value})


def number(
    name: str,
    value: Any,
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
    if isinstance(value, (bool, str)) or not math.isfinite(real):
        refuse(f"`{name}` must be a finite number.", **{name: value})
    if not (minimum <= real <= maximum and above < real < below):
        limits = [
            text
            for limit, text in (
                (minimum, f"at least {minimum:g}"),
                (above, f"above {above:g}"),
                (maximum, f"at most {maximum:g}"),
                (below, f"below {below:g}"),
            )
            if math.isfinite(limit)
        ]
        refuse(f"`{name}` must be {' and '.join(limits)}.", **{name: value})
    return real


def one_of(name: str, value: Any, choices: Iterable[Any]) -> Any:
    """Accept one of `choices`."""
    choices = tuple(choices)
    if value not in choices:
        refuse(f"`{name}` must be one of {', '.join(map(repr, choices))}.", **{name: value})
    return value


def strings(name: str, values: Any) -> tuple[str, ...]:
    """Accept several strings, and not one."""
    given: Any = values
    if isinstance(given, str) or not isinstance(given, Sequence):
        given = [None]
    if not all(isinstance(value, str) for value in given):
        refuse(f"`{name}` must be a list of strings.", **{name: values})
    return tuple(given)


def address(name: str, value: Any) -> tuple[str, int]:
    """Accept `"host:port"`, with a numeric IPv6 host in brackets; give host and port.

    >>> address("coordinator", "10.0.0.1:9876")
    ('10.0.0.1', 9876)
    """
    host, _, port = str(value).rpartition(":")
    in_brackets = host.startswith("[") and host.endswith("]")
    wrong_colons = ":" in host and not in_brackets
    if not host or wrong_colons or set(host) & set("/, \t\n") or not _is_port(port):
        refuse(
            f"`{name}` must be the address and port of a process, such as '10.0.0.1:9876', the "
            "port from 1 to 65535.",
            **{name: value},
        )
    return host.strip("[]"), int(port)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and 0 < int(text[:6]) < 1 << 16


def global_batch(global_batch_size: Any, replicas: Any) -> tuple[int, int]:
    """Accept a global batch that the replicas divide evenly; else name the nearest that work."""
    size = integer("global_batch_size", global_batch_size)
    count = integer("replicas", replicas)
    if size % count == 0:
        return size, count
    lower, upper = size // count * count, -(-size // count) * count
    nearest = (
        f"The nearest sizes that work are {lower} and {upper}."
        if lower
        else f"The nearest size that works is {upper}."
    )
    refuse(
        "`global_batch_size` must be a multiple of `replicas`, so that every replica gets the "
        "same number of examples.",
        global_batch_size=size,
        replicas=count,
        remedy=nearest,
    )


def refuse_file(problem: str, path: str | os.PathLike[str], *, remedy: str = "") -> NoReturn:
    """Raise a `FileInputError` about the file at `path`."""
    raise FileInputError(f"{problem}: {os.fspath(path)}.{' ' + remedy if remedy else ''}")
