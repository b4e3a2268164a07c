"""Two hosts, as network namespaces, and a cable between them that is cut."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys

import keras
import pytest

from tests.processes import Process, Together

ADDRESSES = ["10.77.0.1", "10.77.0.2"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(
        keras.backend.backend() != "tensorflow", reason="starts both backends; once is enough"
    ),
]


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True)


@contextlib.contextmanager
def hosts():
    """Return the names of two hosts on one cable."""
    names = [f"kdpkit-{os.getpid()}-{index}" for index in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ends = [["name", f"cable{i}", "netns", name] for i, name in enumerate(names)]
        ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for index, (name, address) in enumerate(zip(names, ADDRESSES, strict=True)):
            ip("-n", name, "address", "add", f"{address}/24", "dev", f"cable{index}")
            for link in ("lo", f"cable{index}"):
                ip("-n", name, "link", "set", link, "up")
        yield names
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', error)}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def start(names, backend):
    """Start a process on each host, whose name is its address, which JAX looks up."""
    cluster = {"worker": [f"{address}:9876" for address in ADDRESSES]}
    for index, (name, address) in enumerate(zip(names, ADDRESSES, strict=True)):
        config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
        enter = ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c"]
        enter += [f'hostname {address}; exec "$@"', "host"]
        program = [sys.executable, "-m", "tests.cluster.host_process"]
        yield Process(*enter, *program, TF_CONFIG=config, KERAS_BACKEND=backend)


@pytest.mark.exhaustive
@pytest.mark.skipif(not shutil.which("ip"), reason="the command `ip` is not there")
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_when_the_network_is_cut_both_hosts_report_it_and_end(backend):
    with hosts() as names, Together(start(names, backend)) as started:
        started.wait_for("step 3")
        ip("-n", names[0], "link", "set", "cable0", "down")
        codes = started.end()
    for code, output in zip(codes, started.shown, strict=True):
        assert code in (43, -signal.SIGABRT), output
        assert "Start all processes again" in output
