"""TF_CONFIG is checked before TensorFlow sees it; tests/test_workers.py starts real processes."""

import json

import pytest
import tensorflow as tf

from kdpkit import strategies
from kdpkit.cluster import _multi_worker

TWO = {"worker": ["a:1", "b:2"]}
FIRST = {"type": "worker", "index": 0}

pytestmark = pytest.mark.tensorflow


def read(cluster, task):
    return _multi_worker.read({"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})})


def test_workers_and_a_chief_train_in_step():
    found = read({"chief": ["c:3"], **TWO}, {"type": "worker", "index": 1})
    assert (found.process_index, found.process_count) == (2, 3)


@pytest.mark.parametrize(
    ("cluster", "task", "sentence"),
    [
        ({"chief": ["d:4"], "ps": ["c:3"], **TWO}, FIRST, r"others=\['ps'\].*'parameter_server'"),
        (TWO, {"type": "evaluator", "index": 0}, r"others=\['evaluator'\].*a program of its own"),
        ({"worker": ["a:1", "a:1"]}, FIRST, "an address of its own"),
    ],
)
def test_a_cluster_of_another_kind_raises(cluster, task, sentence):
    with pytest.raises(ValueError, match=sentence):
        read(cluster, task)


def test_a_start_after_the_first_tensor_raises(monkeypatch):
    tf.constant(0)
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": TWO, "task": FIRST}))
    with pytest.raises(ValueError, match="has computed before .* Received: process=0. Call"):
        strategies.select_strategy("multi_worker")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"communication": "gloo"}, "`communication` must be one of 'auto', 'ring', 'nccl'"),
        ({"start_timeout_seconds": 0}, "`start_timeout_seconds` must be a positive integer"),
    ],
)
def test_bad_settings_raise(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        strategies.select_strategy("multi_worker", **arguments)


def test_a_process_alone_is_the_chief():
    assert strategies.is_chief()
