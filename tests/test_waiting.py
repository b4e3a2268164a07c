"""Who listens: told at once, waited for, and named where nobody does."""

import socket
import threading
import time

import pytest

from kdpkit import _waiting


@pytest.fixture
def silent():
    """A socket with a port of its own, at which nothing listens yet."""
    with socket.socket() as bound:
        bound.bind(("localhost", 0))
        yield bound


def address_of(bound):
    return f"localhost:{bound.getsockname()[1]}"


def test_an_address_has_no_problem_once_something_listens_there(silent):
    assert _waiting.problem(address_of(silent)) == _waiting.NOTHING_LISTENS
    silent.listen()
    assert _waiting.problem(address_of(silent)) is None
    assert _waiting.listens(address_of(silent))


def test_the_wait_ends_when_all_listen(silent):
    notes = []
    noted = threading.Event()

    def note(missing):
        notes.append(missing)
        noted.set()

    def listen_then():
        noted.wait(60)
        silent.listen()

    thread = threading.Thread(target=listen_then)
    thread.start()
    started = time.monotonic()
    problems = _waiting.problems([address_of(silent)], 100, note=note, note_after_seconds=0.1)
    thread.join()
    assert problems == {}
    assert notes == [[address_of(silent)]]  # once
    assert time.monotonic() - started < 90  # not at the end of the time


def test_those_who_do_not_come_are_named_and_what_is_accepted_is_not(silent):
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        listening.listen()
        addresses = [address_of(listening), address_of(silent)]
        problems = {address_of(silent): _waiting.NOTHING_LISTENS}
        assert _waiting.problems(addresses, 0.5) == problems
        assert _waiting.problems(addresses, 60, accepted=[_waiting.NOTHING_LISTENS]) == {}
    assert _waiting.problem("no-such-host.invalid:1") is not None
