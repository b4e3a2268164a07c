"""TF_CONFIG is checked before TensorFlow sees it; tests/test_workers.py starts real processes."""

import json

import pytest
import tensorflow as tf

from kdpkit import _multi_worker, strategies

TWO = {"worker": ["a:1", "b:2"]}
FIRST = {"type": "worker", "index": 0}

pytestmark = pytest.mark.tensorflow


def read(cluster, task):
    return _multi_worker.read_tf_config(json.dumps({"cluster": cluster, "task": task}))


@pytest.mark.parametrize(
    ("cluster", "task", "index", "addresses"),
    [
        (TWO, FIRST, 0, ("a:1", "b:2")),
        (TWO, {"type": "worker", "index": 1}, 1, ("a:1", "b:2")),
        ({"chief": ["c:3"], **TWO}, {"type": "chief", "index": 0}, 0, ("c:3", "a:1", "b:2")),
        ({"chief": ["c:3"], **TWO}, {"type": "worker", "index": 1}, 2, ("c:3", "a:1", "b:2")),
        ({"ps": [], **TWO}, FIRST, 0, ("a:1", "b:2")),
        ({"worker": ["[::1]:80"]}, FIRST, 0, ("[::1]:80",)),
    ],
)
def test_a_process_finds_its_place(cluster, task, index, addresses):
    found = read(cluster, task)
    assert (found.index, found.addresses) == (index, addresses)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{'cluster'", "TF_CONFIG is no JSON .*Received: \"{'cluster'\""),
        ("3", "has no `cluster`.*TF_CONFIG=3"),
        ("{}", "has no `cluster`"),
        ('{"cluster": {"worker": ["a:1"]}}', "has no `task`.*Received: task=None"),
    ],
)
def test_what_is_no_cluster_is_refused(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        _multi_worker.read_tf_config(text)


@pytest.mark.parametrize(
    ("cluster", "task", "sentence"),
    [
        ({"ps": ["c:3"], **TWO}, FIRST, r"tasks=\['ps', 'worker'\].*'parameter_server'"),
        ({"worker": ["a"]}, FIRST, "a host and a port. Received: address='a'"),
        ({"worker": ["http://a:1"]}, FIRST, "a host and a port"),
        ({"worker": ["a:70000"]}, FIRST, "a host and a port"),
        ({"worker": ["a:1", "a:1"]}, FIRST, "an address of its own"),
        ({"chief": ["c:3", "d:4"], **TWO}, FIRST, "There can be one `chief`"),
        (TWO, {"type": "worker"}, "no `task` that says which process this is"),
        (TWO, {"type": "chief", "index": 0}, "of a type that its cluster has not.*type='chief'"),
        (TWO, {"type": "worker", "index": 2}, "2 tasks of the type 'worker', .*index=2"),
        (TWO, {"type": "worker", "index": "1"}, "`index` must be a non-negative integer"),
    ],
)
def test_a_wrong_cluster_or_place_is_refused(cluster, task, sentence):
    with pytest.raises(ValueError, match=sentence):
        read(cluster, task)


def test_a_start_after_the_first_tensor_is_refused(monkeypatch):
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
def test_bad_settings_are_refused(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        strategies.select_strategy("multi_worker", **arguments)


def test_a_process_alone_is_the_chief():
    assert strategies.is_chief()
