"""Two processes that train one batch together: what they train is what one device would."""

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from tests.training.test_loop import batches, trained

WORKER = """
import json, sys
import numpy as np
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()

from kdpkit import testing
from kdpkit.training import TrainingLoop
from tests.training.test_loop import batches, crossentropy

options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
data = batches().with_options(options)
with strategy.scope():
    model = testing.tiny_classifier()
loop = TrainingLoop(
    model, optimizer="adam", loss=crossentropy(), metrics=["accuracy"], steps_per_loop=2
)
history = loop.fit(data, data, epochs=2, verbose=0).history
np.savez(sys.argv[1], *model.get_weights(), predictions=loop.predict(data, verbose=0))
print(json.dumps(history))
"""


def free_port():
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


@pytest.mark.slow
def test_two_processes_train_validate_and_predict_as_one_device(tmp_path):
    addresses = [f"localhost:{free_port()}" for _ in range(2)]
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(tmp_path / f"{index}.npz")],
            env=os.environ
            | {
                "TF_CONFIG": json.dumps(
                    {
                        "cluster": {"worker": addresses},
                        "task": {"type": "worker", "index": index},
                    }
                )
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=200) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    one, expected = trained(1)
    for index, (printed, errors) in enumerate(outputs):
        assert workers[index].returncode == 0, errors
        history = json.loads(printed.strip().splitlines()[-1])
        assert history["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        saved = np.load(tmp_path / f"{index}.npz")
        for number, weight in enumerate(one.model.get_weights()):
            np.testing.assert_allclose(saved[f"arr_{number}"], weight, atol=1e-6)
        np.testing.assert_allclose(
            saved["predictions"], one.predict(batches(), verbose=0), atol=1e-5
        )
