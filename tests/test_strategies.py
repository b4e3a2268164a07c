import json
import re

import pytest
import tensorflow as tf

from kdpkit import strategies

NAMES = [f"CPU:{index}" for index in range(1000)]


@pytest.mark.parametrize(
    ("kind", "devices", "described"),
    [
        ("mirrored", 3, "MirroredStrategy: 3 replicas on CPU:0, CPU:1, CPU:2"),
        ("mirrored", ["/CPU:2", "cpu:5"], "MirroredStrategy: 2 replicas on CPU:2, CPU:5"),
        ("mirrored", None, "MirroredStrategy: 8 replicas on CPU:0, .*, CPU:7"),
    ],
)
def test_replicas_are_on_the_devices_asked_for(kind, devices, described):
    strategy = strategies.select_strategy(kind, devices=devices)
    assert re.fullmatch(described, strategies.describe(strategy))


def test_auto_without_accelerators_is_one_device():
    assert strategies.select_strategy() is tf.distribute.get_strategy()


def test_strategies_of_different_size_sum_over_their_replicas_in_one_process():
    for replicas in (4, 2, 3):
        strategy = strategies.select_strategy("mirrored", devices=replicas)
        total = strategy.reduce("SUM", strategy.run(lambda: tf.constant(1.0)), axis=None)
        assert float(total) == replicas


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"kind": "mirored"}, "`kind` must be one of 'auto'.*Received: kind='mirored'"),
        ({"kind": "mirrored", "devices": 9}, r"More replicas.*devices=9.*split_device.*at most 8"),
        ({"kind": "mirrored", "devices": ["CPU:8"]}, r"exist, each once.*'CPU:8'.*CPU:0, CPU:1"),
        ({"kind": "mirrored", "devices": NAMES}, "each once.{1,600}$"),
        ({"kind": "one", "devices": 2}, "`devices` are only for 'mirrored'.*devices=2"),
        ({"kind": "multi_worker"}, "No cluster is described.*kdpkit launch"),
        ({"kind": "parameter_server"}, "No cluster is described.*kdpkit launch"),
        ({"kind": "tpu"}, "this machine has no TPU chip"),
    ],
)
def test_bad_arguments_get_one_sentence(arguments, sentence, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(ValueError, match=sentence):
        strategies.select_strategy(**arguments)


@pytest.mark.parametrize(
    ("others", "sentence"),
    [
        ({"chief": ["d:4"], "ps": ["c:3"]}, "parameter_servers=.*'parameter_server'"),
        ({}, "has computed before .* Received: process=0. Call"),
    ],
)
def test_clusters_that_cannot_be_joined_raise(others, sentence, monkeypatch):
    tf.constant(0)
    cluster = {"worker": ["a:1", "b:2"]} | others
    config = {"cluster": cluster, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(ValueError, match=sentence):
        strategies.select_strategy("multi_worker")


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


@pytest.mark.parametrize("kind", ["auto", "one", "mirrored"])
def test_a_process_that_would_train_a_copy_raises(kind, monkeypatch):
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ValueError, match=r"Open MPI started.*process=1, processes=2.*unset .*OMPI_COMM_WORLD_RANK"
    ):
        strategies.select_strategy(kind)


@pytest.mark.parametrize(
    "environ",
    [
        dict.fromkeys(OPEN_MPI, "1") | {"OMPI_COMM_WORLD_RANK": "0"},
        {"SLURM_PROCID": "0", "SLURM_JOB_NODELIST": "n1", "SLURM_NTASKS": "2"},  # batch script
    ],
)
def test_a_process_that_trains_no_copy_may_have_any_strategy(environ, monkeypatch):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert strategies.select_strategy("one") is tf.distribute.get_strategy()


def test_a_strategy_inside_anothers_scope_raises():
    outer = strategies.select_strategy("mirrored", devices=2)
    with outer.scope(), pytest.raises(ValueError, match="active='MirroredStrategy'.*first"):
        strategies.select_strategy("one")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"kind": "GPU", "count": 2}, "`kind` must be one of 'CPU'.*'GPU'"),
        ({"kind": "CPU", "count": 9}, "8 logical CPU.*count=9"),
    ],
)
def test_bad_splits_get_one_sentence(arguments, sentence):
    tf.constant(0)  # starts the runtime
    with pytest.raises(ValueError, match=sentence) as raised:
        strategies.split_device(**arguments)
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__ or raised.value.__context__ is None
