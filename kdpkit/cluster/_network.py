"""Sockets: who listens at an address, who can connect here, and the addresses of all processes.

JAX's coordinator listens where it is asked to. TensorFlow's servers listen on all interfaces
(docs/upstream/tensorflow_servers_listen_on_all_interfaces.py); the kernel then drops what comes to
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
import time
from collections.abc import Collection, Iterator, Sequence

from kdpkit._internal import checks

_ANSWER_SECONDS = 2.0  # the time limit of one answer
_PAUSE_SECONDS = 0.2
_LONGEST_MESSAGE = 1000  # bytes that another process may send to the first one

_SO_ATTACH_FILTER = 26  # an option of Linux for which Python has no name
_INTERFACE = 0xFFFFF008  # where a program finds the number of a packet's network interface
_LOAD_WORD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06

# A classic BPF program (Linux' Documentation/networking/filter.rst): accept what comes by the
# loopback interface, which is the first in every network namespace. The second and third number of
# an instruction are how many to skip if a comparison holds, and if not.
_FROM_LOOPBACK = [
    (_LOAD_WORD, 0, 0, _INTERFACE),
    (_IF_EQUAL, 0, 1, 1),
    (_RETURN, 0, 0, 0xFFFFFFFF),
    (_RETURN, 0, 0, 0),
]


def problem(address: str, timeout_seconds: float = _ANSWER_SECONDS) -> str | None:
    """Return why nothing answers at an address; None if something listens there."""
    try:
        socket.create_connection(checks.address("address", address), timeout_seconds).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def problems(addresses: Collection[str], timeout_seconds: float) -> dict[str, str]:
    """Wait until something listens at all addresses; return the reason for each where not."""
    reasons = {}
    deadline = time.monotonic() + timeout_seconds
    for address in addresses:
        while reason := problem(address):
            if time.monotonic() >= deadline:
                reasons[address] = reason
                break
            time.sleep(_PAUSE_SECONDS)
    return reasons


def require_port(address: str) -> None:
    """Raise if no server can listen at the address of this process.

    gRPC itself would share the port with another program that allows that.
    """
    port = checks.address("address", address)[1]
    with socket.socket() as probe:
        # The port may have been used by a process that has ended.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            checks.fail(
                f"This process cannot listen at port {port} ({error.strerror}).",
                address=address,
                remedy="Set another port for it in all processes, or stop the program that has it.",
            )


def are_loopback(addresses: Sequence[str]) -> bool:
    """Return whether all addresses, `"host:port"`, are only reached from this machine.

    Names except `localhost` are not: some machines resolve their own to 127.0.1.1, others do not.
    """
    hosts = {checks.address("address", address)[0] for address in addresses} - {"localhost"}
    try:
        return all(ipaddress.ip_address(host).is_loopback for host in hosts)
    except ValueError:
        return False


def keep_local(address: str, cluster: Sequence[str]) -> None:
    """Let only this machine connect to what this process serves, if its cluster is loopback.

    The kernel then drops what comes from elsewhere. Where it cannot, this prints a line.
    """
    if not are_loopback(cluster):
        return
    program = b"".join(struct.pack("HBBI", *instruction) for instruction in _FROM_LOOPBACK)
    buffer = ctypes.create_string_buffer(program)  # which must live until the kernel has read it
    packed = struct.pack("HL", len(_FROM_LOOPBACK), ctypes.addressof(buffer))
    try:
        if sys.platform != "linux":
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
        for server in _listening(checks.address("address", address)[1]):
            server.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, packed)
    except OSError as error:
        sys.stderr.write(
            f"{address} is open to all who can reach this machine, without authentication: "
            f"TensorFlow listens on all interfaces ({error.strerror}). See SECURITY.md.\n"
        )


def _listening(port: int) -> Iterator[socket.socket]:
    """Yield this process's sockets that listen at a port."""
    for link in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor was closed meanwhile
            if not str(link.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(link.name))) as candidate:
                is_tcp = candidate.family in (socket.AF_INET, socket.AF_INET6)
                listens = candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if is_tcp and listens and candidate.getsockname()[1] == port:
                    yield candidate


def exchange(
    address: str | None, devices: int, first: str, *, index: int, count: int, seconds: float
) -> list[tuple[str, int]]:
    """Return the address and the number of devices of every process; all of them call this.

    Each connects to the first, at whose address nothing listens yet. It waits for all, and replies
    with the complete list. A process without an address gets a free port of its machine.
    """
    deadline = time.monotonic() + seconds
    try:
        if index == 0:
            return _collected(first, devices, count, deadline)
        with _connected(first, deadline) as connection:
            connection.settimeout(max(_ANSWER_SECONDS, deadline - time.monotonic()))
            if address is None:
                host = connection.getsockname()[0]
                with socket.create_server(("", 0)) as free:
                    address = f"{f'[{host}]' if ':' in host else host}:{free.getsockname()[1]}"
            connection.sendall(json.dumps([index, count, address, devices]).encode() + b"\n")
            with connection.makefile() as reply:
                return [(other, int(number)) for other, number in json.loads(reply.readline())]
    except (OSError, ValueError) as error:
        checks.fail(
            f"The processes did not meet at the address of the first, {first}, within {seconds} "
            f"seconds ({error}).",
            process=index,
            processes=count,
            remedy="See the output of the others, and check the addresses and the network.",
        )


def _connected(first: str, deadline: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection(checks.address("first", first), _ANSWER_SECONDS)
        except OSError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_PAUSE_SECONDS)


def _collected(first: str, devices: int, count: int, deadline: float) -> list[tuple[str, int]]:
    """Collect what the others send, and reply to all."""
    received = {0: (first, devices)}
    connections = []
    host, port = checks.address("first", first)
    is_local = are_loopback([first])
    both = not is_local and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    address = (host if is_local else "", port)
    with contextlib.ExitStack() as stack:
        listener = socket.create_server(address, family=family, dualstack_ipv6=both)
        stack.enter_context(listener)
        while missing := sorted({*range(count)} - received.keys()):
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = listener.accept()
            except TimeoutError as error:
                raise TimeoutError(f"processes {missing} are missing") from error
            connections.append(stack.enter_context(connection))
            received |= _received(connection, count)
        replies = [received[number] for number in range(count)]
        for connection in connections:
            with contextlib.suppress(OSError):  # a process that is gone is noticed later
                connection.sendall(json.dumps(replies).encode() + b"\n")
    return replies


def _received(connection: socket.socket, count: int) -> dict[int, tuple[str, int]]:
    """Return what another process sent, by its index; nothing if it is none of them."""
    connection.settimeout(_ANSWER_SECONDS)
    try:
        with connection.makefile("rb") as message:
            index, processes, address, devices = json.loads(message.readline(_LONGEST_MESSAGE))
        checks.address("address", address)
        return {index: (address, int(devices))} if processes == count and 0 < index < count else {}
    except (OSError, ValueError, TypeError):
        return {}
