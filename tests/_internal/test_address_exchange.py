"""Processes that know the first one's address learn those of all."""

import concurrent.futures
import socket
import time

import pytest

from kdpkit._internal import address_exchange


@pytest.fixture
def first():
    """Return an address at which nothing listens."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


@pytest.fixture
def threads():
    with concurrent.futures.ThreadPoolExecutor() as executor:
        yield executor


def exchange(threads, first, *indices, count, seconds=20.0):
    return [
        threads.submit(address_exchange.exchanged, first, index=index, count=count, seconds=seconds)
        for index in indices
    ]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 2, 0)])
def test_all_learn_the_same_addresses(order, first, threads):
    found = [each.result() for each in exchange(threads, first, *order, count=4)]
    assert found == [found[0]] * 4
    assert found[0][0] == first
    hosts, ports = zip(*(address.rsplit(":", 1) for address in found[0]), strict=True)
    assert {*hosts[1:]} <= {"127.0.0.1", "[::1]"}
    assert len({*ports}) == 4


def test_other_programs_that_connect_take_no_part(first, threads):
    (waiting,) = exchange(threads, first, 0, count=2)
    for sent in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"[1, 3, 99]\n",
        b"[0, 2, 99]\n",
        b"[[]]\n",
        b"x" * 999,
    ):
        connection = connect(first)
        connection.sendall(sent)
        connection.close()
    (other,) = exchange(threads, first, 1, count=2)
    assert waiting.result() == other.result()


def connect(address):
    host, port = address.split(":")
    deadline = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection((host, int(port)))
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_the_first_names_those_that_do_not_come(first, threads):
    waiting, _ = exchange(threads, first, 0, 2, count=4, seconds=0.5)
    with pytest.raises(ValueError, match=r"2 of 4 processes.*missing=\[1, 3\]"):
        waiting.result()


def test_the_others_name_the_first_if_it_does_not_come(first, threads):
    (waiting,) = exchange(threads, first, 1, count=2, seconds=0.2)
    with pytest.raises(ValueError, match=f"The first process, {first}, did not send.*process=1"):
        waiting.result()


def test_a_port_in_use_is_named(threads):
    with socket.create_server(("", 0)) as used:
        first = f"localhost:{used.getsockname()[1]}"
        (waiting,) = exchange(threads, first, 0, count=2)
        with pytest.raises(ValueError, match=first):
            waiting.result()
