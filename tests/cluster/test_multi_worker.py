"""What is checked before TensorFlow starts; tests/test_workers.py starts real processes."""

import json

import pytest
import tensorflow as tf

from kdpkit import strategies

TWO = {"worker": ["a:1", "b:2"]}

pytestmark = pytest.mark.tensorflow


@pytest.mark.parametrize(
    ("cluster", "sentence"),
    [
        ({"chief": ["d:4"], "ps": ["c:3"], **TWO}, "parameter_servers=.*'parameter_server'"),
        (TWO, "has computed before .* Received: process=0. Call"),
    ],
)
def test_clusters_that_cannot_be_joined_raise(cluster, sentence, monkeypatch):
    tf.constant(0)
    config = {"cluster": cluster, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(ValueError, match=sentence):
        strategies.select_strategy("multi_worker")
