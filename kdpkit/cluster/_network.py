"""Sockets: who listens at an address, who can connect here, and all addresses where one is known.

JAX's coordinator listens where it is asked to. TensorFlow's servers listen on all interfaces
(docs/upstream/tensorflow_servers_listen_on_all_interfaces.md); the kernel then drops what comes to
their sockets from elsewhere.
"""

import contextlib
import ctypes
import errno
import ipaddress
import json
import os
import pathlib
import socket
import struct
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence

from kdpkit._internal import checks

NOTHING_LISTENS = "has nothing that listens at the port"  # its host answers so

_ANSWER_SECONDS = 2.0  # for one answer
_PAUSE_SECONDS = 0.2
_GREETING_SECONDS = 6.0  # for a server to answer as one of gRPC, also where the machine is busy
_LONGEST = 100  # bytes of what a process sends to the first one

# How connections of HTTP/2 begin on both sides (RFC 9113, 3.4): with a frame of settings.
_SETTINGS = 4
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0])

_SO_ATTACH_FILTER = 26  # of Linux; Python has no name for it
_NETWORK_HEADER = 0xFFF00000
_LOAD_BYTE, _LOAD_WORD, _SHIFT, _IF_EQUAL, _RETURN = 0x30, 0x20, 0x74, 0x15, 0x06

# A classic BPF program (Linux' Documentation/networking/filter.rst): accept packets whose source
# is 127.0.0.0/8 or ::1. Each instruction has how many to skip if a comparison holds, and if not.
_FROM_LOOPBACK = [
    (_LOAD_BYTE, 0, 0, _NETWORK_HEADER),
    (_SHIFT, 0, 0, 4),
    (_IF_EQUAL, 0, 2, 4),  # the version of IP
    (_LOAD_BYTE, 0, 0, _NETWORK_HEADER + 12),
    (_IF_EQUAL, 8, 9, 127),
    (_LOAD_WORD, 0, 0, _NETWORK_HEADER + 8),
    (_IF_EQUAL, 0, 7, 0),
    (_LOAD_WORD, 0, 0, _NETWORK_HEADER + 12),
    (_IF_EQUAL, 0, 5, 0),
    (_LOAD_WORD, 0, 0, _NETWORK_HEADER + 16),
    (_IF_EQUAL, 0, 3, 0),
    (_LOAD_WORD, 0, 0, _NETWORK_HEADER + 20),
    (_IF_EQUAL, 0, 1, 1),
    (_RETURN, 0, 0, 0xFFFFFFFF),
    (_RETURN, 0, 0, 0),
]


# Other processes.


def problem(address: str, timeout_seconds: float = _ANSWER_SECONDS) -> str | None:
    """What an address lacks, after "its host"; None if something listens there."""
    try:
        with socket.create_connection(checks.address("address", address), timeout_seconds):
            return None
    except ConnectionRefusedError:
        return NOTHING_LISTENS
    except socket.gaierror:
        return "has a name that does not resolve"
    except TimeoutError:
        return "does not answer"
    except OSError as error:
        return f"does not answer ({error.strerror or error})"


def problems(
    addresses: Collection[str], timeout_seconds: float, *, accepted: Collection[str] = ()
) -> dict[str, str]:
    """Wait until something listens at all addresses; return what is wrong with the others then.

    All are asked at once, in threads; one that the network holds is left alone.

    Args:
        addresses: `"host:port"` of each.
        timeout_seconds: How long to wait, for all together.
        accepted: Problems that are none for the caller, such as `NOTHING_LISTENS`.
    """
    found: dict[str, str | None] = dict.fromkeys(addresses, "does not answer")
    deadline = time.monotonic() + timeout_seconds

    def ask(address: str) -> None:
        while found[address] and (left := deadline - time.monotonic()) > 0:
            answer = problem(address, min(left, _ANSWER_SECONDS))
            found[address] = None if answer in accepted else answer
            if found[address]:
                time.sleep(min(_PAUSE_SECONDS, left))

    threads = [threading.Thread(target=ask, args=(a,), daemon=True) for a in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return {address: wrong for address, wrong in found.items() if wrong}


def is_another_program(address: str) -> bool:
    """Return whether what listens at an address is not gRPC, which TensorFlow and JAX use."""
    try:
        connection = socket.create_connection(checks.address("address", address), _ANSWER_SECONDS)
    except OSError:
        return False  # nothing listens there yet
    with connection:
        connection.settimeout(_GREETING_SECONDS)
        try:
            connection.sendall(_PREFACE)
            return connection.recv(4)[3:] != bytes([_SETTINGS])
        except TimeoutError:
            return True
        except OSError:  # it has just ended
            return False


# This one.


def port_problem(port: int) -> str | None:
    """Return why no server can listen at a port; None if one can.

    gRPC itself would share it with another program that allows that.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # its last user may have ended
        try:
            probe.bind(("", port))
        except OSError as error:
            return os.strerror(error.errno or 0).lower()
    return None


def are_loopback(addresses: Sequence[str]) -> bool:
    """Return whether all addresses, `"host:port"`, are only reached from this machine.

    Names except `localhost` are not: some machines resolve their own to 127.0.1.1, others do not.
    """
    return all(map(_is_loopback, addresses))


def _is_loopback(address: str) -> bool:
    host, _ = checks.address("address", address)
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def require_local(addresses: Sequence[str]) -> None:
    """Raise if addresses are loopback, and a server that listens there cannot be kept local."""
    if are_loopback(addresses) and sys.platform != "linux":
        checks.fail(
            "TensorFlow's servers listen on all interfaces, without authentication, and only Linux "
            "lets kdpkit keep others out.",
            addresses=list(addresses),
            remedy="Start them with `kdpkit launch --listen all`.",
        )


def keep_local(address: str | None, cluster: Sequence[str]) -> None:
    """Let only this machine connect to what this process serves, if its cluster is loopback.

    Where the system does not support that, it prints a line.
    """
    if not are_loopback(cluster):
        return
    try:
        _drop_from_elsewhere(checks.address("address", address)[1])
    except OSError as error:
        sys.stderr.write(
            f"{address} is open to all who can reach this machine, without authentication: "
            f"TensorFlow listens on all interfaces ({error.strerror}). See SECURITY.md.\n"
        )


def _drop_from_elsewhere(port: int) -> None:
    """Have the kernel drop what does not come from a loopback address."""
    if sys.platform != "linux":
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    program = b"".join(struct.pack("HBBI", *instruction) for instruction in _FROM_LOOPBACK)
    kept = ctypes.create_string_buffer(program)
    packed = struct.pack("HL", len(_FROM_LOOPBACK), ctypes.addressof(kept))
    for one in _listening(port):
        one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, packed)


def _listening(port: int) -> Iterator[socket.socket]:
    """Yield this process's sockets that listen at a port."""
    for link in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, or no socket
            if not str(link.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(link.name))) as one:
                is_of_tcp = one.family in (socket.AF_INET, socket.AF_INET6)
                listens = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if is_of_tcp and listens and one.getsockname()[1] == port:
                    yield one


# The addresses of all, where a launcher has that of the first process only.


def exchange(first: str, *, index: int, count: int, seconds: float) -> list[str]:
    """Return the address of every process; all of them call this.

    Each sends a free port to the first, which replies with the addresses of all.

    Args:
        first: Address of the first process, where nothing listens yet.
        index: Index of this process.
        count: Number of processes.
        seconds: How long to wait for the others.

    Raises:
        ValueError: A process did not come in time, or the port is in use.
    """
    deadline = time.monotonic() + seconds
    remedy = "See its output, and check the network between the machines."
    if index == 0:
        addresses = _collected(first, count, deadline)
        if missing := sorted({*range(count)} - addresses.keys()):
            checks.fail(
                f"{len(missing)} of {count} processes did not send their addresses within "
                f"{seconds} seconds.",
                missing=missing,
                remedy=remedy,
            )
        return [addresses[number] for number in range(count)]
    try:
        for wrong in problems([first], seconds).values():
            raise TimeoutError(f"its host {wrong}")
        with socket.create_connection(checks.address("first", first), seconds) as connection:
            connection.settimeout(max(_ANSWER_SECONDS, deadline - time.monotonic()))
            with socket.socket() as free:
                free.bind(("", 0))
                message = [index, count, free.getsockname()[1]]
            connection.sendall(json.dumps(message).encode() + b"\n")
            with connection.makefile() as reply:
                return list(checks.strings("addresses", json.loads(reply.readline())))
    except (OSError, ValueError) as error:
        checks.fail(
            f"The first process, {first}, did not send the addresses of all within {seconds} "
            f"seconds ({error}).",
            process=index,
            processes=count,
            remedy=remedy,
        )


def _collected(first: str, count: int, deadline: float) -> dict[int, str]:
    """Collect addresses until all are there, and then send them to all; else return some."""
    addresses = {0: first}
    connections = []
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listener(first))
        while len(addresses) < count:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, (host, *_) = listener.accept()
            except TimeoutError:
                return addresses
            connections.append(stack.enter_context(connection))
            if message := _received(connection, count):
                host = host.removeprefix("::ffff:")  # of IPv4
                host = f"[{host}]" if ":" in host else host
                addresses[message[0]] = f"{host}:{message[1]}"
        reply = json.dumps([addresses[number] for number in range(count)]).encode() + b"\n"
        for connection in connections:
            with contextlib.suppress(OSError):  # one that is gone is missed later
                connection.sendall(reply)
    return addresses


def _received(connection: socket.socket, count: int) -> tuple[int, int] | None:
    """Return the index and port that another process sent; None if it is none of them."""
    connection.settimeout(_ANSWER_SECONDS)
    try:
        with connection.makefile("rb") as message:
            index, processes, port = map(int, json.loads(message.readline(_LONGEST)))
    except (OSError, ValueError, TypeError):
        return None
    return (index, port) if processes == count and 0 < index < count else None


def _listener(first: str) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    place = ("", checks.address("first", first)[1])
    try:
        return socket.create_server(place, family=family, dualstack_ipv6=both)
    except OSError as error:
        checks.fail(
            f"The other processes cannot connect to this one ({error.strerror}).",
            address=first,
            remedy="Choose another port.",
        )
