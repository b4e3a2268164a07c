"""`kdpkit data-service` as a process: where it serves, how it ends, what it does not support."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import tensorflow as tf

from kdpkit import cli
from kdpkit.pipelines import prepare_with_services

pytestmark = [pytest.mark.timeout(600), pytest.mark.tensorflow]

SOON = 120.0


@contextlib.contextmanager
def command(*flags):
    """Start `kdpkit data-service`; it does not outlive the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kdpkit", "data-service", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_it_prints_where_it_serves_and_serves_until_it_is_ended():
    with command("--port", "0", "--host", "localhost", "--import", "json") as process:
        line = process.stdout.readline()
        address = line.split()[2].rstrip(";")
        assert line == f"Serves at {address}; examples come from {line.split()[-1]}\n"
        examples = tf.data.Dataset.range(40)
        squares = examples.apply(prepare_with_services(tf.square, [address]))
        assert [int(number) for number in squares] == [number**2 for number in range(40)]
        process.send_signal(signal.SIGTERM)
        assert process.wait(SOON) == 143


def test_ctrl_c_ends_it_and_json_has_where_it_was(capsys):
    before = signal.getsignal(signal.SIGINT)

    def press():
        while signal.getsignal(signal.SIGINT) == before:  # else it would end the tests
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    pressing = threading.Thread(target=press, daemon=True)
    pressing.start()
    assert cli.main(["data-service", "--port", "0", "--json"]) == 130
    pressing.join()
    where = json.loads(capsys.readouterr().out)
    assert [where[name].split(":")[0] for name in ("address", "worker_address")] == [
        "localhost"
    ] * 2


def test_what_cannot_be_served_is_one_sentence_and_exit_code_2(capsys):
    with contextlib.closing(socket.create_server(("", 0))) as taken:
        port = str(taken.getsockname()[1])
        for flags, sentence in {
            (
                "--port",
                port,
            ): f"cannot listen there (address already in use). Received: port={port}",
            ("--port", "70000"): "there are ports 0 to 65535",
            ("--port", "0", "--import", "no_such"): "`--import no_such` fails: ModuleNotFoundError",
            ("--port", "0", "--host", "a b"): "`host` must be",
            (): "the following arguments are required: --port",
        }.items():
            assert cli.main(["data-service", *flags]) == 2
            assert sentence in capsys.readouterr().err
