"""Several processes of TensorFlow on one machine: equal to one, and never without an answer.

Each is a real process. Starting TensorFlow is what costs, so the first two do nearly everything.
"""

import json
import pathlib
import signal
import sys

import keras
import numpy as np
import pytest

from kdpkit import strategies
from kdpkit.cluster import _network
from tests import worker_process
from tests.process_programs import assert_close
from tests.processes import SOON, Process, Together, free_port, once, with_tf_config

PROGRAM = ["-m", "tests.worker_process"]

pytestmark = [pytest.mark.slow, pytest.mark.tensorflow, pytest.mark.timeout(900)]


def result_of(output):
    return json.loads(next(line for line in output.splitlines() if line.startswith("{")))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two processes with two devices each find, what they write, and how the first ends.

    They know the address of the first one only.
    """
    directory = tmp_path_factory.mktemp("workers")
    return once(tmp_path_factory, "two workers", lambda: of_two_processes(directory))


def of_two_processes(directory):
    written = directory / "written"
    written.mkdir()
    known = {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "JAX_NUM_PROCESSES": "2"}
    program = [sys.executable, *PROGRAM, written]
    with Together(Process(*program, **known, JAX_PROCESS_ID=index) for index in "01") as workers:
        workers.wait_for("step 2")
        workers[1].send(signal.SIGKILL)
        codes = workers.end(SOON)
    return {
        "found": [result_of(output) for output in workers.shown],
        "written": str(written),
        "codes": codes,
        "shown": workers.shown,
    }


def test_two_processes_train_evaluate_and_predict_as_one_device(two):
    """By steps of one's own: tests/test_elastic.py."""
    alone = worker_process.by_fit(strategies.select_strategy("one"))
    first, second = (found["fit"] for found in two["found"])
    assert first == second
    assert_close(first, alone, atol=2e-6)


def test_the_first_process_alone_writes_and_reports(two):
    for found, is_chief in zip(two["found"], (True, False), strict=True):
        assert found["is_chief"] is is_chief
        assert found["strategy"] == (
            "MultiWorkerMirroredStrategy: 4 replicas on CPU:0, CPU:1 of each of 2 workers"
        )
    written = pathlib.Path(two["written"])
    saved = {f"keras-{n}.keras" for n in (1, 2)}
    by_orbax = {"orbax"} if worker_process.HAS_ORBAX else set()
    assert {path.name for path in written.iterdir()} == {"log.csv", "board", *by_orbax, *saved}
    assert len((written / "log.csv").read_text().splitlines()) == 1 + 2
    for run in ("train", "validation"):
        assert len([*(written / "board" / run).iterdir()]) == 1
    line = "Each of the 2 processes reads all of the data"
    assert [output.count(line) for output in two["shown"]] == [1, 0]
    model = keras.models.load_model(written / "keras-2.keras")
    assert int(model.optimizer.iterations) == 4  # of 8 batches, two in an update
    if by_orbax:
        import orbax.checkpoint as ocp

        with ocp.StandardCheckpointer() as plain:
            tree = plain.restore(written / "orbax" / "1" / "pytree")
        (layers,) = tree["trainable_variables"].values()
        for variable in model.trainable_variables:
            layer, name = variable.path.split("/")
            np.testing.assert_array_equal(layers[layer][name], variable)


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("order, fit", "All processes must read the same batches"),
        ("length, fit", "The number of the batches of the dataset must be the same"),
        ("end, fit", "one has come to its end before the others"),
        ("policy", "Received: auto_shard_policy='OFF'"),
        ("batch, step", "All processes must read the same batches"),
        ("iterator, step", "Pass it the batches"),
    ],
)
def test_data_that_are_not_the_same_raise_in_all_processes(two, case, sentence):
    first, second = (found["disagreements"][case] for found in two["found"])
    assert first == second
    assert sentence in first
    assert (
        case in ("policy", "iterator, step") or "Build the same dataset in every process" in first
    )


def test_a_killed_process_ends_the_other_soon_with_one_sentence(two):
    assert two["codes"] == [43, -signal.SIGKILL]
    assert "Another process of this training is gone" in two["shown"][0]
    assert "Traceback" not in two["shown"][0]


def test_starts_in_vain_are_one_sentence_and_a_process_that_stops_before_training_is_named():
    with with_tf_config(*PROGRAM, "starts") as workers:
        assert workers[0].end() == 43, workers.shown
    assert "Another process of this training is gone" in workers[0].shown
    assert "Traceback" not in workers[0].shown
    for index, found in enumerate(map(result_of, workers.shown)):
        assert "Received: devices_by_process=(1, 2). Let each see as many GPUs" in found["uneven"]
        assert "address already in use" in found["taken"].lower()
        reason = "Connection refused" if index else "processes [1] are missing"
        assert reason in found["alone"]


def test_a_process_that_is_lost_while_all_are_connected_does_not_hang_the_others():
    addresses = [f"localhost:{free_port()}" for _ in range(2)]
    with with_tf_config(*PROGRAM, "hangs", addresses=addresses, only=[0]) as one:
        settings = {"index": 1, "count": 2, "seconds": SOON}
        met = _network.exchange(addresses[1], 1, addresses[0], **settings)
        assert [address for address, _ in met] == addresses
        assert one.end() == [-signal.SIGALRM], one.shown
    assert "were not connected within 3 seconds, and this one was ended" in one[0].shown
    assert addresses[1] in one[0].shown
