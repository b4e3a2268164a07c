"""Connecting to the addresses of processes, and waiting until something listens there."""

import socket
import threading
import time
from collections.abc import Collection

from kdpkit._internal import checks

NOTHING_LISTENS = "has nothing that listens at the port"  # its host answers so

_ANSWER_SECONDS = 2.0  # for one answer
_PAUSE_SECONDS = 0.2
_GREETING_SECONDS = 6.0  # for a server to answer as one of gRPC, also where the machine is busy

# How connections of HTTP/2 begin on both sides (RFC 9113, 3.4): with a frame of settings.
_SETTINGS = 4
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0])


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


def listens(address: str, timeout_seconds: float = _ANSWER_SECONDS) -> bool:
    """Return whether something listens at an address."""
    return problem(address, timeout_seconds) is None


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
