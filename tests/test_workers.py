"""Several processes of TensorFlow on one machine: equal to one, and never without an answer.

Each is a real process. Starting TensorFlow is what costs, so the first two do nearly everything.
"""

import json
import pathlib
import signal
import socket
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from kdpkit import strategies
from tests import worker_process
from tests.processes import SOON, once, with_tf_config

PROGRAM = ["-m", "tests.worker_process"]

pytestmark = [pytest.mark.slow, pytest.mark.tensorflow, pytest.mark.timeout(1800)]


def result_of(output):
    return json.loads(next(line for line in output.splitlines() if line.startswith("{")))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two processes with two devices each find, what they write, and how the first ends."""
    directory = tmp_path_factory.mktemp("workers")
    return once(tmp_path_factory, "two workers", lambda: of_two_processes(directory))


def of_two_processes(directory):
    written = directory / "written"
    written.mkdir()
    with with_tf_config(*PROGRAM, written, "2") as workers:
        workers.wait_for("step 2")
        workers[1].send(signal.SIGKILL)
        killed = time.monotonic()
        codes = workers.end(1500)
    return {
        "found": [result_of(output) for output in workers.shown],
        "written": str(written),
        "codes": codes,
        "seconds": time.monotonic() - killed,
        "shown": workers.shown,
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    def train():
        return worker_process.trained(strategies.select_strategy("one"))

    return once(tmp_path_factory, "one device", train)


@pytest.mark.parametrize(
    "way", ["fit", "fit, 2 steps in an execution", "loop", "loop, 2 micro-batches"]
)
def test_two_processes_train_evaluate_and_predict_as_one_device(two, alone, way):
    first, second = (found["trained"][way] for found in two["found"])
    assert first == second
    assert first.keys() == alone[way].keys()
    for name, expected in alone[way].items():
        for left, right in zip(*map(keras.tree.flatten, (first[name], expected)), strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-5, atol=2e-6, err_msg=name)


def test_the_strategy_shows_how_many_workers_there_are(two):
    for found in two["found"]:
        assert found["strategy"] == (
            "MultiWorkerMirroredStrategy: 4 replicas on CPU:0, CPU:1 of each of 2 workers"
        )
    assert [found["is_chief"] for found in two["found"]] == [True, False]


def test_the_first_process_alone_writes_and_prints_how_the_data_are_spread(two):
    names = {path.name for path in pathlib.Path(two["written"]).iterdir()}
    saved = {f"keras-{n}.keras" for n in (1, 2)} | {f"ours-{n}.weights.h5" for n in (1, 2)}
    assert names == {"log.csv", "board", *saved}
    assert len((pathlib.Path(two["written"]) / "log.csv").read_text().splitlines()) == 1 + 2
    for run in ("train", "validation"):
        assert len([*(pathlib.Path(two["written"]) / "board" / run).iterdir()]) == 1
    line = "Each of the 2 processes reads all of the data"
    assert [output.count(line) for output in two["shown"]] == [1, 0]


def test_a_model_that_the_first_process_saved_can_be_loaded(two):
    model = keras.models.load_model(pathlib.Path(two["written"]) / "keras-2.keras")
    assert int(model.optimizer.iterations) == 4  # of 8 batches, two in an update
    saved = model.get_weights()
    model.load_weights(pathlib.Path(two["written"]) / "ours-2.weights.h5")
    for one, other in zip(saved, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("order, fit", "All processes must read the same batches"),
        ("length, fit", "The number of the batches of the dataset must be the same"),
        ("end, loop", "one has come to its end before the others"),
    ],
)
def test_data_that_are_not_the_same_raise_in_all_processes(two, case, sentence):
    first, second = (found["disagreements"][case] for found in two["found"])
    assert first == second
    assert sentence in first
    assert "Build the same dataset in every process" in first


def test_a_metric_of_one_process_alone_raises(two):
    for found in two["found"]:
        assert "was made outside the strategy's scope" in found["disagreements"]["metric"]


def test_a_dataset_of_which_every_process_would_take_all_raises(two):
    for found in two["found"]:
        assert "Received: auto_shard_policy='OFF'" in found["disagreements"]["policy"]


def test_a_killed_process_ends_the_other_soon_with_one_sentence(two):
    assert two["codes"] == [43, -signal.SIGKILL]
    assert two["seconds"] < SOON
    assert "Another process of this training is gone" in two["shown"][0]
    assert "Traceback" not in two["shown"][0]


def test_a_process_lost_before_training_ends_the_other_with_one_sentence():
    with with_tf_config(*PROGRAM, "lost") as workers:
        workers.wait_for("joined")
        workers[1].send(signal.SIGKILL)
        assert workers.end() == [43, -signal.SIGKILL], workers.shown
    assert "Another process of this training is gone" in workers[0].shown
    assert "Traceback" not in workers[0].shown


def test_processes_with_unequal_devices_raise_in_all_of_them():
    with with_tf_config(*PROGRAM, "uneven") as workers:
        assert workers.end() == [2, 2], workers.shown
    for output in workers.shown:
        assert "Received: devices_by_process=[1, 2]. Let each see as many GPUs" in output


def test_starts_that_cannot_succeed_end_soon_with_one_sentence():
    late = [*PROGRAM, "late"]
    with socket.create_server(("localhost", 0)) as other:
        taken = f"localhost:{other.getsockname()[1]}"
        of_others = tf.data.experimental.service.DispatchServer()
        grpc = of_others.target.removeprefix("grpc://")
        with (
            with_tf_config(*PROGRAM, "starts", only=0) as several,
            with_tf_config(*late, only=1) as without_first,
            with_tf_config(*late, only=0, second=taken) as with_taken_port,
            with_tf_config(*late, only=0, second=grpc) as with_another_server,
        ):
            assert several.end() == [0], several.shown
            assert without_first.end() == [2], without_first.shown
            assert with_taken_port.end() == [2], with_taken_port.shown
            assert with_another_server.end() == [-signal.SIGALRM]
    assert "was ended. See what the others" in with_another_server[0].shown
    assert grpc in with_another_server[0].shown
    found = result_of(several[0].shown)
    assert "1 of 2 processes did not connect within 2 s" in found["the other does not come"]
    assert "No server can be started at localhost:" in found["the port is taken"]
    assert "could not be joined within 2 seconds" in without_first[0].shown
    assert "Traceback" not in without_first[0].shown
    sentence = f"Another program listens at an address of the cluster. Received: address='{taken}'"
    assert sentence in with_taken_port[0].shown
