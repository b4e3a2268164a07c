"""What a local launch opens is for this machine alone: nothing answers from another network."""

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
import uuid

import pytest

from kdpkit import launch
from kdpkit._internal import child_processes, listening

ROOT = pathlib.Path(__file__).parents[1]
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
        listening.keep_local(f"localhost:{kept}", [f"localhost:{kept}"])
        assert elsewhere.answering([kept, other]) == [other]
        for host in ("localhost", "127.0.0.5"):
            socket.create_connection((host, kept), 10).close()


@LINUX
@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_a_server_of_ipv6_answers_at_its_loopback_alone():
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        port = server.getsockname()[1]
        listening.keep_local(f"[::1]:{port}", [f"[::1]:{port}"])
        for host in ("::1", "127.0.0.1"):
            socket.create_connection((host, port), 10).close()


def test_a_cluster_with_another_address_is_open_to_it(elsewhere):
    with ordinary() as port:
        listening.keep_local(f"localhost:{port}", [f"localhost:{port}", "10.0.0.7:9876"])
        assert elsewhere.answering([port]) == [port]


@pytest.mark.parametrize(
    ("addresses", "are"),
    [
        (["localhost:1", "127.0.0.1:2", "127.1.2.3:3", "[::1]:4"], True),
        (["localhost:1", "0.0.0.0:2"], False),
        (["[::]:1"], False),
        (["10.0.0.1:1"], False),
        ([f"{socket.gethostname()}:1"], socket.gethostname() == "localhost"),
    ],
)
def test_which_addresses_are_loopback(addresses, are):
    assert listening.are_loopback(addresses) is are


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
        launch.plan(["echo"], workers=2, listen=one) for one in ("loopback", "all")
    )
    for task in itertools.chain(local, everywhere):
        addresses = [address for _, _, address in task.config.tasks]
        assert listening.are_loopback(addresses) is (task in local)
    with pytest.raises(ValueError, match="`listen` must be one of 'loopback', 'all'.*'public'"):
        launch.plan(["echo"], workers=2, listen="public")
