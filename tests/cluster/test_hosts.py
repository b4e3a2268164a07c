"""Two hosts, as network namespaces, and a cable between them that is cut."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import keras
import pytest

import kdpkit

ROOT = pathlib.Path(kdpkit.__file__).parent.parent
ADDRESSES = ["10.77.0.1", "10.77.0.2"]
LIMIT = 600  # seconds for anything, on a machine that is busy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(
        keras.backend.backend() != "tensorflow", reason="starts both backends; once is enough"
    ),
]


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True)


class Hosts:
    """Two hosts on one cable, with a process on each."""

    def __init__(self, directory):
        self.names = [f"kdpkit-{os.getpid()}-{index}" for index in range(2)]
        self.outputs = [directory / f"output-{index}" for index in range(2)]
        self.running = []

    def __enter__(self):
        try:
            for name in self.names:
                ip("netns", "add", name)
            ends = [["name", f"cable{i}", "netns", name] for i, name in enumerate(self.names)]
            ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
            for index, (name, address) in enumerate(zip(self.names, ADDRESSES, strict=True)):
                ip("-n", name, "address", "add", f"{address}/24", "dev", f"cable{index}")
                for link in ("lo", f"cable{index}"):
                    ip("-n", name, "link", "set", link, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            self.__exit__()
            pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', error)}")
        return self

    def __exit__(self, *_):
        for process in self.running:
            process.kill()
            process.wait()
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def _on(self, index):
        """How a host runs a command; its name is its address, which JAX looks up."""
        enter = ["ip", "netns", "exec", self.names[index], "unshare", "--uts", "sh", "-c"]
        return [*enter, f'hostname {ADDRESSES[index]}; exec "$@"', "host"]

    def start(self, backend):
        addresses = [f"{address}:9876" for address in ADDRESSES]
        for index in range(2):
            task = {"type": "worker", "index": index}
            config = json.dumps({"cluster": {"worker": addresses}, "task": task})
            with self.outputs[index].open("w") as output:
                process = subprocess.Popen(
                    [*self._on(index), sys.executable, "-m", "tests.cluster.host_process"],
                    cwd=ROOT,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=os.environ | {"TF_CONFIG": config, "KERAS_BACKEND": backend},
                )
            self.running.append(process)

    def wait_for(self, text):
        """Wait until both have printed something."""
        end = time.monotonic() + LIMIT
        while not all(text in output.read_text() for output in self.outputs):
            assert time.monotonic() < end, self.shown()
            assert [process.poll() for process in self.running] == [None, None], self.shown()
            time.sleep(0.2)

    def cut_the_cable(self):
        ip("-n", self.names[0], "link", "set", "cable0", "down")

    def end(self):
        end = time.monotonic() + LIMIT
        return [process.wait(max(end - time.monotonic(), 0)) for process in self.running]

    def shown(self):
        return [output.read_text() for output in self.outputs]


@pytest.mark.exhaustive
@pytest.mark.skipif(not shutil.which("ip"), reason="the command `ip` is not there")
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_when_the_network_is_cut_both_hosts_report_it_and_end(tmp_path, backend):
    with Hosts(tmp_path) as hosts:
        hosts.start(backend)
        hosts.wait_for("step 3")
        hosts.cut_the_cable()
        codes = hosts.end()
        shown = hosts.shown()
    for code, output in zip(codes, shown, strict=True):
        assert code in (43, -signal.SIGABRT), output
        assert "Start all processes again" in output
