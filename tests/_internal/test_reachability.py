"""Who listens: found at once, waited for, and named where nobody does."""

import socket
import threading
import time

import pytest

from kdpkit._internal import reachability


@pytest.fixture
def silent():
    """A socket with a port of its own, at which nothing listens yet."""
    with socket.socket() as bound:
        bound.bind(("localhost", 0))
        yield bound


def address_of(bound):
    return f"localhost:{bound.getsockname()[1]}"


def test_an_address_has_no_problem_once_something_listens_there(silent):
    assert reachability.problem(address_of(silent)) == reachability.NOTHING_LISTENS
    silent.listen()
    assert reachability.problem(address_of(silent)) is None
    assert reachability.listens(address_of(silent))


def test_the_wait_ends_when_all_listen(silent):
    thread = threading.Timer(0.5, silent.listen)
    thread.start()
    started = time.monotonic()
    assert reachability.problems([address_of(silent)], 100) == {}
    thread.join()
    assert time.monotonic() - started < 90  # not at the end of the time


def test_those_who_do_not_come_are_named_and_what_is_accepted_is_not(silent):
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        listening.listen()
        addresses = [address_of(listening), address_of(silent)]
        problems = {address_of(silent): reachability.NOTHING_LISTENS}
        assert reachability.problems(addresses, 0.5) == problems
        assert reachability.problems(addresses, 60, accepted=[reachability.NOTHING_LISTENS]) == {}
    assert reachability.problem("no-such-host.invalid:1") is not None
