"""What can be known of a TPU where there is none."""

import re

import keras
import pytest

from kdpkit._internal import machine
from tests.processes import run_code

NETWORK_CARD = ("0x1ae0", "0x0042")  # Google's, on every virtual machine of theirs
TPU_V5E = ("0x1ae0", "0x0063")
DISK = ("0x1af4", "0x1001")


def bus(directory, *devices):
    for index, (vendor, kind) in enumerate(devices):
        device = directory / f"0000:00:{index:02x}.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text(vendor + "\n")
        (device / "device").write_text(kind + "\n")
    return directory


@pytest.mark.parametrize(
    ("devices", "chips"),
    [([], 0), ([DISK, NETWORK_CARD], 0), ([TPU_V5E, NETWORK_CARD, *[TPU_V5E] * 7], 8)],
)
def test_tpu_chips_are_distinguished_from_other_devices_on_the_bus(tmp_path, devices, chips):
    assert machine.chips(bus(tmp_path / "devices", *devices)) == chips


@pytest.fixture(autouse=True)
def _names_no_tpu(monkeypatch):
    monkeypatch.delenv("TPU_NAME", raising=False)


CONNECT = """
import sys, tensorflow as tf
from kdpkit.strategies._tpu import connect_tpu
server = tf.distribute.Server({"worker": ["localhost:0"]}, "worker", 0)
for name in (server.target, *sys.argv[1:], "local"):
    try: connect_tpu(name)
    except ValueError as error: print(error)
"""


@pytest.mark.tensorflow
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_each_way_in_which_a_tpu_cannot_be_had_is_one_sentence():
    """The first is a server that has none."""
    names = ["grpc://localhost:1", "grpc://nowhere.invalid:8470", "grpc://localhost", "no-such-tpu"]
    printed = run_code(CONNECT, *names).stdout.splitlines()
    without, silent, unknown, portless, unnamed_tpu, nothing = printed
    assert "TPUs not found" in without
    assert "does not answer (Connection refused)" in silent
    assert "The TPU's host does not answer" in unknown
    assert "address and port" in portless
    assert "TPU no-such-tpu could not be initialised" in unnamed_tpu
    assert "this machine has no TPU chip" in nothing


@pytest.mark.jax
@pytest.mark.slow
@pytest.mark.parametrize(
    ("platforms", "sentence"),
    [
        # As JAX sets it where it finds libtpu and a TPU: then it does not go on without.
        ("tpu,cpu", "There is no TPU: this machine has no TPU chip"),
        ("cuda", "JAX cannot start its platform.*JAX_PLATFORMS=cuda"),
    ],
)
def test_on_jax_a_device_that_cannot_start_is_one_sentence(platforms, sentence):
    code = (
        "from kdpkit import sharding\n"
        "for ask in (sharding.tpu_devices, sharding.describe_choice, sharding.DataParallel):\n"
        "    try: ask()\n"
        "    except ValueError as error: print(error)\n"
    )
    printed = run_code(code, JAX_PLATFORMS=platforms).stdout.splitlines()
    assert len(printed) == 3
    assert all(re.search(sentence, line) for line in printed)


@pytest.mark.jax
def test_on_jax_no_tpu_is_one_sentence_and_the_cpu_is_reported():
    from kdpkit import experiment, sharding

    with pytest.raises(ValueError, match="this machine has no TPU chip"):
        sharding.tpu_devices()
    assert sharding.describe_choice() == "the CPU, as 8 devices. There is no GPU and no TPU."
    parser = experiment.argument_parser(
        "", epochs=1, per_replica_batch_size=1, base_learning_rate=1.0
    )
    with pytest.raises(ValueError, match="this machine has no TPU chip"):
        experiment.strategy_from(parser.parse_args(["--strategy", "tpu"]))
    assert keras.distribution.distribution() is None
