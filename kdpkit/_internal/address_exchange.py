"""The addresses of all processes, where a launcher has that of the first one only.

Each sends a free port to the first, which replies with the addresses of all.
"""

import contextlib
import json
import socket
import time
from collections.abc import Sequence
from typing import NoReturn

from kdpkit._internal import checks, reachability

_SILENT_SECONDS = 2.0  # after which a connection is not one of the processes
_LONGEST = 100  # bytes of what a process sends


def exchanged(first: str, *, index: int, count: int, seconds: float) -> list[str]:
    """Return the address of every process; all of them call this.

    Args:
        first: Address of the first process, where nothing listens yet.
        index: Index of this process.
        count: Number of processes.
        seconds: How long to wait for the others.

    Raises:
        ValueError: A process did not come in time, or the port is in use.
    """
    if index == 0:
        return _collected(first, count, seconds)
    try:
        return _sent(first, index, count, seconds)
    except (OSError, ValueError) as error:
        checks.fail(
            f"The first process, {first}, did not send the addresses of all within {seconds} "
            f"seconds ({error}).",
            process=index,
            processes=count,
            remedy="See its output, and check the network between the machines.",
        )


def _sent(first: str, index: int, count: int, seconds: float) -> list[str]:
    deadline = time.monotonic() + seconds
    for problem in reachability.problems([first], seconds).values():
        raise TimeoutError(f"its host {problem}")
    with socket.create_connection(checks.address("first", first), seconds) as connection:
        connection.settimeout(max(_SILENT_SECONDS, deadline - time.monotonic()))
        connection.sendall(json.dumps([index, count, _free_port()]).encode() + b"\n")
        with connection.makefile() as reply:
            return list(checks.strings("addresses", json.loads(reply.readline())))


def _collected(first: str, count: int, seconds: float) -> list[str]:
    deadline = time.monotonic() + seconds
    addresses = {0: first}
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listener(first))
        connections = []
        while len(addresses) < count:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, (host, *_) = listener.accept()
            except TimeoutError:
                _fail_for_missing(sorted({*range(count)} - addresses.keys()), count, seconds)
            connections.append(stack.enter_context(connection))
            if message := _received(connection, count):
                index, port = message
                host = host.removeprefix("::ffff:")  # of IPv4
                addresses[index] = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        of_all = [addresses[index] for index in range(count)]
        for connection in connections:
            with contextlib.suppress(OSError):  # one that is gone is missed later
                connection.sendall(json.dumps(of_all).encode() + b"\n")
    return of_all


def _received(connection: socket.socket, count: int) -> tuple[int, int] | None:
    """Return the index and port that another process sent; None if it is none of them."""
    connection.settimeout(_SILENT_SECONDS)
    try:
        with connection.makefile("rb") as message:
            index, processes, port = map(int, json.loads(message.readline(_LONGEST)))
    except (OSError, ValueError, TypeError):
        return None
    return (index, port) if processes == count and 0 < index < count else None


def _listener(first: str) -> socket.socket:
    _, port = checks.address("first", first)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=both)
    except OSError as error:
        checks.fail(
            f"The other processes cannot connect to this one ({error.strerror}).",
            address=first,
            remedy="Choose another port.",
        )


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


def _fail_for_missing(missing: Sequence[int], count: int, seconds: float) -> NoReturn:
    checks.fail(
        f"{len(missing)} of {count} processes did not send their addresses within {seconds} "
        "seconds.",
        missing=missing,
        remedy="See their output, and check the network between the machines.",
    )
