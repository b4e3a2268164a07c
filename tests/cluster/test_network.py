"""Who listens, who can connect, and the addresses of all where one is known.

What a local launch opens is for this machine alone: nothing answers from another network.
"""

import concurrent.futures
import contextlib
import itertools
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid

import pytest

from kdpkit import launch
from kdpkit.cluster import _network
from kdpkit.launch import _child_processes as child_processes

ROOT = pathlib.Path(__file__).parents[2]
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the filter is Linux'")

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

JOINING = {
    "multi_worker": """
from kdpkit import strategies
strategies.select_strategy("multi_worker")
""",
    "parameter_server": """
from kdpkit import strategies
strategies.serve_if_server()
strategies.select_strategy("parameter_server")
""",
    "jax": """
from kdpkit import cluster, sharding
from jax.experimental import multihost_utils
here = cluster.ClusterConfig.from_environment()
sharding.join_processes(
    here.coordinator, process_count=here.process_count, process_index=here.process_index
)
multihost_utils.sync_global_devices("joined")
""",
}
STAYING = "import time\nprint('joined', flush=True)\ntime.sleep(300)"


def run(*command, **settings):
    return subprocess.run(command, check=True, capture_output=True, text=True, **settings).stdout


class Elsewhere:
    """Another network namespace, which reaches this machine at an address."""

    def __init__(self):
        self.name = f"kdpkit-{uuid.uuid4().hex[:8]}"
        here, there = (f"{side}{self.name[-8:]}" for side in "ht")
        self.address = f"198.18.{os.getpid() % 250}.1"  # of RFC 2544, for tests
        run("ip", "netns", "add", self.name)
        run("ip", "link", "add", here, "type", "veth", "peer", there, "netns", self.name)
        run("ip", "address", "add", f"{self.address}/24", "dev", here)
        run("ip", "link", "set", here, "up")
        inside = ["ip", "-n", self.name]
        run(*inside, "address", "add", f"{self.address[:-1]}2/24", "dev", there)
        run(*inside, "link", "set", there, "up")

    def answering(self, ports):
        """Return which ports of this machine answer there."""
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


@contextlib.contextmanager
def ordinary():
    """Return the port of a server that is open to all, as a check of the check."""
    with socket.create_server(("", 0)) as server:
        yield server.getsockname()[1]


def ports_of(mark):
    """Return the ports at which the processes with a mark listen."""
    pids = {f"pid={pid}," for pid in child_processes.marked(mark)}
    lines = run("ss", "-Htlnp").splitlines()
    return sorted(
        {
            int(line.split()[3].rpartition(":")[2])
            for line in lines
            if any(pid in line for pid in pids)
        }
    )


@contextlib.contextmanager
def launched(kind, *flags, before=()):
    """Launch two processes that join; yield when all have."""
    program = JOINING[kind] + STAYING
    words = [sys.executable, "-m", "kdpkit", "launch", "--workers", "2", *flags]
    process = subprocess.Popen(
        [*before, *words, "--", sys.executable, "-c", program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"KERAS_BACKEND": "jax" if kind == "jax" else "tensorflow"},
    )
    try:
        wanted = {"parameter_server": ["chief    | joined"]}.get(
            kind, ["worker 0 | joined", "worker 1 | joined"]
        )
        for line in process.stdout:
            wanted = [one for one in wanted if one != line.strip()]
            if not wanted:
                break
        assert not wanted
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def test_only_what_comes_from_loopback_reaches_a_port_that_is_kept_local(elsewhere):
    with ordinary() as kept, ordinary() as other:
        _network.keep_local(f"localhost:{kept}", [f"localhost:{kept}"])
        assert elsewhere.answering([kept, other]) == [other]
        for host in ("localhost", "127.0.0.5"):
            socket.create_connection((host, kept), 10).close()


@LINUX
@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_a_server_of_ipv6_answers_at_its_loopback_alone():
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        port = server.getsockname()[1]
        _network.keep_local(f"[::1]:{port}", [f"[::1]:{port}"])
        for host in ("::1", "127.0.0.1"):
            socket.create_connection((host, port), 10).close()


def test_a_cluster_with_another_address_is_open_to_it(elsewhere):
    with ordinary() as port:
        _network.keep_local(f"localhost:{port}", [f"localhost:{port}", "10.0.0.7:9876"])
        assert elsewhere.answering([port]) == [port]


def test_which_addresses_are_loopback():
    assert _network.are_loopback(["localhost:1", "127.0.0.1:2", "127.1.2.3:3", "[::1]:4"])
    for other in ("0.0.0.0:2", "[::]:1", "10.0.0.1:1", "a-name:1"):
        assert not _network.are_loopback(["localhost:1", other])


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["jax", "parameter_server", "multi_worker"])
def test_nothing_of_a_local_launch_answers_elsewhere(elsewhere, mark, tmp_path, kind):
    hosts = tmp_path / "hosts"  # a machine's name has another address, as on most
    hosts.write_text(f"127.0.0.1 localhost\n{elsewhere.address} {socket.gethostname()}\n")
    named = ["unshare", "--mount", "sh", "-c", f'mount --bind {hosts} /etc/hosts && exec "$@"', "-"]
    flags = ["--parameter-servers", "1"] if kind == "parameter_server" else []
    with launched(kind, *flags, before=named), ordinary() as other:
        ports = ports_of(mark)
        assert len(ports) >= {"multi_worker": 2, "parameter_server": 4, "jax": 3}[kind]
        assert elsewhere.answering([*ports, other]) == [other]


def test_the_addresses_of_a_launch_show_where_it_listens():
    local, everywhere = (
        launch.tasks(["echo"], workers=2, listen=one) for one in ("loopback", "all")
    )
    for task in itertools.chain(local, everywhere):
        addresses = [address for _, _, address in task.config.tasks]
        assert _network.are_loopback(addresses) is (task in local)
    with pytest.raises(ValueError, match="`listen` must be one of 'loopback', 'all'.*'public'"):
        launch.tasks(["echo"], workers=2, listen="public")


# Others that listen, at once or soon.


@pytest.fixture
def silent():
    """A socket with a port of its own, at which nothing listens yet."""
    with socket.socket() as bound:
        bound.bind(("localhost", 0))
        yield bound


def address_of(bound):
    return f"localhost:{bound.getsockname()[1]}"


def test_the_wait_ends_when_all_listen(silent):
    address = address_of(silent)
    assert _network.problem(address) == _network.NOTHING_LISTENS
    thread = threading.Timer(0.5, silent.listen)
    thread.start()
    started = time.monotonic()
    assert _network.problems([address], 100) == {}
    thread.join()
    assert time.monotonic() - started < 90  # not at the end of the time


def test_those_who_do_not_come_are_named_and_what_is_accepted_is_not(silent):
    with socket.create_server(("localhost", 0)) as listening:
        addresses = [address_of(listening), address_of(silent)]
        problems = {address_of(silent): _network.NOTHING_LISTENS}
        assert _network.problems(addresses, 0.5) == problems
        assert _network.problems(addresses, 60, accepted=[_network.NOTHING_LISTENS]) == {}
    assert _network.problem("no-such-host.invalid:1") is not None


# The addresses of all.


@pytest.fixture
def first(silent):
    """Return an address at which nothing listens."""
    silent.close()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return address_of(free)


def exchange(first, *indices, count, seconds=20.0):
    """Return what each of some processes learns, or the error that it raises."""

    def learned(index):
        try:
            return _network.exchange(first, index=index, count=count, seconds=seconds)
        except ValueError as error:
            return str(error)

    with concurrent.futures.ThreadPoolExecutor() as threads:
        return [*threads.map(learned, indices)]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 2, 0)])
def test_all_learn_the_same_addresses(order, first):
    found = exchange(first, *order, count=4)
    assert found == [found[0]] * 4
    assert found[0][0] == first
    hosts, ports = zip(*(address.rsplit(":", 1) for address in found[0]), strict=True)
    assert {*hosts[1:]} <= {"127.0.0.1", "[::1]"}
    assert len({*ports}) == 4


def test_other_programs_that_connect_take_no_part(first):
    def disturb():
        host, port = first.split(":")
        assert _network.problems([first], 20) == {}
        for sent in (b"GET / HTTP/1.1\r\n\r\n", b"[1, 3, 99]\n", b"[0, 2, 99]\n", b"[[]]\n"):
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(sent)

    with concurrent.futures.ThreadPoolExecutor() as threads:
        waiting = threads.submit(exchange, first, 0, count=2)
        threads.submit(disturb).result()
        assert exchange(first, 1, count=2) == waiting.result()


def test_those_that_do_not_come_are_named(first):
    shown, _ = exchange(first, 0, 2, count=4, seconds=0.5)
    assert "2 of 4 processes did not" in shown
    assert "missing=[1, 3]" in shown
    (shown,) = exchange(first, 1, count=2, seconds=0.2)
    assert f"The first process, {first}, did not send" in shown
    with socket.create_server(("", 0)) as used:
        (shown,) = exchange(f"localhost:{used.getsockname()[1]}", 0, count=2)
    assert "cannot connect to this one" in shown
