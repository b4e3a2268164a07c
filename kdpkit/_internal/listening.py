"""Ports that servers listen at, and who can connect to them.

JAX's coordinator listens where it is asked to. TensorFlow's servers listen on all interfaces
(docs/upstream/tensorflow_servers_listen_on_all_interfaces.md); the kernel then drops what comes to
their sockets from elsewhere.
"""

import contextlib
import ctypes
import errno
import ipaddress
import os
import pathlib
import socket
import struct
import sys
from collections.abc import Iterator, Sequence

from kdpkit._internal import checks

ALL = "0.0.0.0"  # noqa: S104 what users pass to have servers listen on all interfaces

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


def are_loopback(addresses: Sequence[str]) -> bool:
    """Return whether all addresses, `"host:port"`, are only reached from this machine.

    Names but `localhost` are not: some machines resolve their own to 127.0.1.1, and others do not.
    """
    return all(map(_is_loopback, addresses))


def _is_loopback(address: str) -> bool:
    host, _ = checks.address("address", address)
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def problem(port: int) -> str | None:
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


def require_told(addresses: Sequence[str], *, remedy: str) -> None:
    """Raise if addresses are loopback, and a server that listens there cannot be kept local."""
    if are_loopback(addresses) and sys.platform != "linux":
        checks.fail(
            "TensorFlow's servers listen on all interfaces, without authentication, and only Linux "
            "lets kdpkit keep others out.",
            addresses=list(addresses),
            remedy=remedy,
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
