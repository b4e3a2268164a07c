"""Who listens, who can connect, and what processes exchange before they are connected.

What a local launch opens is for this machine alone: nothing answers from another network.
"""

import concurrent.futures
import contextlib
import functools
import ipaddress
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import uuid

import pytest

from kdpkit.cluster import _network
from kdpkit.launch import _child_processes as child_processes
from tests.processes import SOON, Process, Together, free_port

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(400)]

# Prints which of the ports on its input answer at an address.
ANSWERING = """
import concurrent.futures, json, socket, sys
def answers(port):
    try:
        socket.create_connection((sys.argv[1], port), 1.5).close()
        return True
    except OSError:
        return False
ports = json.load(sys.stdin)
with concurrent.futures.ThreadPoolExecutor(64) as pool:
    print(json.dumps([p for p, found in zip(ports, pool.map(answers, ports)) if found]))
"""

# Both kinds of TensorFlow's servers, one after the other, and JAX's.
ON_TENSORFLOW = """
from kdpkit import strategies
strategies.serve_if_server()
strategies.select_strategy("parameter_server")
"""
ON_JAX = """
from kdpkit import cluster, sharding
from jax.experimental import multihost_utils
here = cluster.ClusterConfig.from_environment()
sharding.join_processes(
    here.coordinator, process_count=here.process_count, process_index=here.process_index
)
multihost_utils.sync_global_devices("joined")
"""
STAYING = "import time\nprint('joined', flush=True)\ntime.sleep(300)"


def run(*command, **settings):
    return subprocess.run(command, check=True, capture_output=True, text=True, **settings).stdout


class Elsewhere:
    """Another network namespace, which reaches this machine at an address."""

    def __init__(self):
        chosen = uuid.uuid4()
        self.name = f"kdpkit-{chosen.hex[:8]}"
        here, there = (f"{side}{self.name[-8:]}" for side in "ht")
        number = chosen.int % 2**15  # other tests may run on this machine
        of_rfc_2544 = ipaddress.ip_address("198.18.0.0")  # for tests
        self.address, inner = (str(of_rfc_2544 + 4 * number + host) for host in (1, 2))
        run("ip", "netns", "add", self.name)
        run("ip", "link", "add", here, "type", "veth", "peer", there, "netns", self.name)
        run("ip", "address", "add", f"{self.address}/30", "dev", here)
        run("ip", "link", "set", here, "up")
        inside = ["ip", "-n", self.name]
        run(*inside, "address", "add", f"{inner}/30", "dev", there)
        run(*inside, "link", "set", there, "up")

    def answering(self, ports):
        program = [sys.executable, "-S", "-c", ANSWERING, self.address]
        found = run("ip", "netns", "exec", self.name, *program, input=json.dumps(ports))
        return json.loads(found)


@pytest.fixture(scope="module")
def elsewhere():
    if sys.platform != "linux" or os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need Linux, root and iproute2")
    try:
        place = Elsewhere()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespace can be made here: {error.stderr.strip()}")
    yield place
    run("ip", "netns", "delete", place.name)


ordinary = functools.partial(socket.create_server, ("", 0))  # open to all: a check of the check


def port_of(one):
    return one.getsockname()[1]


def ports_of(mark):
    pids = {f"pid={pid}," for pid in child_processes.marked(mark)}
    lines = [line for line in run("ss", "-Htlnp").splitlines() if any(p in line for p in pids)]
    return sorted({int(line.split()[3].rpartition(":")[2]) for line in lines})


@pytest.mark.parametrize("other", [[], ["10.0.0.7:9876"]])
def test_only_this_machine_reaches_a_port_whose_cluster_is_local(elsewhere, other):
    with ordinary() as kept, ordinary() as open_to_all:
        ports = [port_of(kept), port_of(open_to_all)]
        _network.keep_local(f"localhost:{ports[0]}", [f"localhost:{ports[0]}", *other])
        assert elsewhere.answering(ports) == (ports if other else ports[1:])
        for host in ("localhost", "127.0.0.5"):
            socket.create_connection((host, ports[0]), 10).close()


def test_a_server_that_is_kept_local_answers_at_every_loopback_address():
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=both) as server:
        _network.keep_local(f"localhost:{port_of(server)}", [f"[::1]:{port_of(server)}"])
        for host in ("::1", "127.0.0.1") if both else ("127.0.0.1",):
            socket.create_connection((host, port_of(server)), 10).close()


@pytest.mark.slow
def test_nothing_of_a_local_launch_answers_elsewhere(elsewhere, mark, tmp_path):
    """Parameter servers, and JAX's coordinator with what sums, at the same time."""
    hosts = tmp_path / "hosts"  # a machine's name has another address, as on most
    hosts.write_text(f"127.0.0.1 localhost\n{elsewhere.address} {socket.gethostname()}\n")
    named = ["unshare", "--mount", "sh", "-c", f'mount --bind {hosts} /etc/hosts && exec "$@"', "-"]
    launch = [*named, sys.executable, "-m", "kdpkit", "launch", "--workers"]
    program = ["--", sys.executable, "-c"]
    servers = [*launch, "1", "--parameter-servers", "1", *program, ON_TENSORFLOW + STAYING]
    on_jax = Process(*launch, "2", *program, ON_JAX + STAYING, KERAS_BACKEND="jax")
    with Together([on_jax, Process(*servers)]) as started, ordinary() as other:
        started[0].wait_for("| joined", count=2)
        started[1].wait_for("| joined")
        ports = ports_of(mark)
        assert len(ports) >= 3 + 3
        assert elsewhere.answering([*ports, port_of(other)]) == [port_of(other)]
        for launcher in started.running:
            launcher.send(signal.SIGTERM)
        started.end()


# Others that listen, at once or soon.


def test_the_wait_ends_when_all_listen_and_who_does_not_come_is_named():
    with socket.create_server(("localhost", 0)) as listening, socket.socket() as silent:
        silent.bind(("localhost", 0))  # and listens later
        address = f"localhost:{port_of(silent)}"
        addresses = [f"localhost:{port_of(listening)}", address]
        assert [*_network.problems(addresses, 0.3)] == [address]
        thread = threading.Timer(0.5, silent.listen)
        thread.start()
        assert _network.problems(addresses, 10_000) == {}  # which is no test's limit
        thread.join()


# What all exchange.


def exchange(first, *indices, count, known=()):
    def learned(index):
        address = dict(known).get(index)
        settings = {"index": index, "count": count, "seconds": SOON}
        return _network.exchange(address, 1 + index, first, **settings)

    with concurrent.futures.ThreadPoolExecutor() as threads:
        return [*threads.map(learned, indices)]


def test_all_learn_the_same_and_an_address_that_is_known_stays():
    first = f"localhost:{free_port()}"
    found = exchange(first, 3, 1, 2, 0, count=4, known={2: "gpu2:9876"}.items())
    assert found == [found[0]] * 4
    addresses, devices = zip(*found[0], strict=True)
    assert (addresses[0], addresses[2], devices) == (first, "gpu2:9876", (1, 2, 3, 4))
    hosts, ports = zip(*(address.rsplit(":", 1) for address in addresses), strict=True)
    assert {hosts[1], hosts[3]} == {"127.0.0.1"}
    assert len({*ports}) == 4


def test_other_programs_that_connect_take_no_part():
    first = f"localhost:{free_port()}"
    with concurrent.futures.ThreadPoolExecutor() as threads:
        waiting = threads.submit(exchange, first, 0, count=2)
        assert _network.problems([first], SOON) == {}
        messages = (
            b"GET / HTTP/1.1\r\n\r\n",
            b'[1, 3, "a:9", 1]\n',
            b'[0, 2, "a:9", 1]\n',
            b"[]\n",
        )
        for sent in messages:
            with contextlib.closing(_network._connected(first, 0.0)) as connection:
                connection.sendall(sent)
        assert exchange(first, 1, count=2) == waiting.result()
