"""A backend of Keras that trains on one device alone: what cannot work there is one sentence."""

from tests.processes import run_code

PROGRAM = """
import tempfile
import keras, numpy as np
import kdpkit
from kdpkit import testing

model = testing.tiny_classifier()
for call in (
    lambda: kdpkit.training.replica_exact(model),
    lambda: kdpkit.training.remat(model),
    lambda: kdpkit.training.without_logits(model),
    lambda: kdpkit.training.linear_cross_entropy(np.eye(3), np.eye(3), np.zeros(3, int)),
    lambda: kdpkit.training.check_parity(lambda: model, (np.ones(4), np.ones(4)), replicas=2),
    lambda: kdpkit.strategies.select_strategy("mirrored", devices=2),
    lambda: kdpkit.sharding.DataParallel(1),
    lambda: kdpkit.diagnostics.plan_memory(lambda: model, memory="1GiB"),
    lambda: kdpkit.callbacks.Resume(tempfile.mkdtemp()),
):
    try:
        call()
    except ValueError as error:
        print(error)
"""


def test_what_trains_on_several_devices_names_the_backends_that_do():
    sentences = run_code(PROGRAM, KERAS_BACKEND="numpy").stdout.splitlines()
    assert len(sentences) == 9
    for sentence in sentences:
        assert "does not work on Keras' backend 'numpy'. Run with KERAS_BACKEND=" in sentence
