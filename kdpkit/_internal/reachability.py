"""Knocking at the addresses of processes, and waiting until somebody is there."""

import socket
import threading
import time
from collections.abc import Callable, Collection

from kdpkit import _checks

NOTHING_LISTENS = "has nothing that listens at the port"  # its host answers, and says so

_KNOCK_SECONDS = 2.0  # for one answer
_PAUSE_SECONDS = 0.2


def problem(address: str, timeout_seconds: float = _KNOCK_SECONDS) -> str | None:
    """Say what an address lacks, after "its host"; None if something listens there."""
    try:
        with socket.create_connection(_checks.address("address", address), timeout_seconds):
            return None
    except ConnectionRefusedError:
        return NOTHING_LISTENS
    except socket.gaierror:
        return "has a name that does not resolve"
    except TimeoutError:
        return "does not answer"
    except OSError as error:
        return f"does not answer ({error.strerror or error})"


def listens(address: str, timeout_seconds: float = _KNOCK_SECONDS) -> bool:
    """Tell whether something listens at an address."""
    return problem(address, timeout_seconds) is None


def problems(
    addresses: Collection[str],
    timeout_seconds: float,
    *,
    accepted: Collection[str] = (),
    note: Callable[[list[str]], None] = lambda _: None,
    note_after_seconds: float | None = None,
) -> dict[str, str]:
    """Wait until something listens at all addresses; give what is wrong with the others then.

    All are asked at once, in threads; one that the network holds is left alone.

    Args:
        addresses: `"host:port"` of each.
        timeout_seconds: How long to wait, for all together.
        accepted: Problems that are none for the caller, such as `NOTHING_LISTENS`.
        note: Called once with the addresses that are waited for, after `note_after_seconds`.
        note_after_seconds: None leaves it out.
    """
    found: dict[str, str | None] = dict.fromkeys(addresses, "does not answer")
    deadline = time.monotonic() + timeout_seconds

    def knock(address: str) -> None:
        while found[address] and (left := deadline - time.monotonic()) > 0:
            answer = problem(address, min(left, _KNOCK_SECONDS))
            found[address] = None if answer in accepted else answer
            if found[address]:
                time.sleep(min(_PAUSE_SECONDS, left))

    threads = [threading.Thread(target=knock, args=(a,), daemon=True) for a in found]
    for thread in threads:
        thread.start()
    ends = [deadline]
    if note_after_seconds is not None:
        ends.insert(0, min(deadline, time.monotonic() + note_after_seconds))
    for end in ends:
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        missing = [address for address, wrong in found.items() if wrong]
        if missing and end < deadline:
            note(missing)
    return {address: wrong for address, wrong in found.items() if wrong}
