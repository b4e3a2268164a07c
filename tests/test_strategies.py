import subprocess
import sys

import pytest
import tensorflow as tf

from kdpkit import strategies


def test_mirrored_on_a_count_takes_the_first_devices():
    strategy = strategies.select_strategy("mirrored", devices=3)
    assert strategies.describe(strategy) == "MirroredStrategy: 3 replicas on CPU:0, CPU:1, CPU:2"


def test_mirrored_on_named_devices_takes_those():
    strategy = strategies.select_strategy("mirrored", devices=["/CPU:2", "cpu:5"])
    assert strategies.describe(strategy) == "MirroredStrategy: 2 replicas on CPU:2, CPU:5"


def test_mirrored_without_devices_takes_every_logical_cpu():
    assert strategies.select_strategy("mirrored").num_replicas_in_sync == 8


def test_one_is_plain_keras():
    strategy = strategies.select_strategy("one")
    assert strategy is tf.distribute.get_strategy()
    assert strategies.describe(strategy) == "no strategy: 1 replica on CPU:0"


def test_one_on_a_named_device_sits_there():
    strategy = strategies.select_strategy("one", devices=["CPU:1"])
    assert strategies.describe(strategy) == "OneDeviceStrategy: 1 replica on CPU:1"


def test_auto_without_accelerators_is_one_device(monkeypatch):
    for name in ("TPU_NAME", "COLAB_TPU_ADDR"):
        monkeypatch.delenv(name, raising=False)
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
        ({"kind": "mirrored", "devices": 0}, "`devices` must be a positive integer.*devices=0"),
        ({"kind": "mirrored", "devices": ["CPU:8"]}, r"exist, each once.*'CPU:8'.*CPU:0, CPU:1"),
        ({"kind": "mirrored", "devices": ["CPU:0", "CPU:0"]}, "exist, each once"),
        ({"kind": "mirrored", "devices": []}, "exist, each once"),
        ({"kind": "one", "devices": 2}, "single device.*devices=2.*'mirrored'"),
        ({"kind": "multi_worker", "devices": 2}, "`devices` goes with 'one' and 'mirrored'"),
        ({"kind": "one", "tpu": "mine"}, "`tpu` goes with 'tpu' and 'auto' alone.*'mine'"),
        ({"kind": "auto", "devices": 2}, "`devices` goes with 'one' and 'mirrored'.*'auto'"),
        ({"kind": "multi_worker"}, "No cluster is described.*kdpkit launch"),
        ({"kind": "parameter_server"}, "No cluster is described.*kdpkit launch"),
        ({"kind": "tpu", "tpu": "no-such-tpu"}, "No TPU of this name.*'no-such-tpu'.*grpc:"),
    ],
)
def test_bad_arguments_get_one_sentence(arguments, sentence, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(ValueError, match=sentence):
        strategies.select_strategy(**arguments)


def test_a_strategy_inside_anothers_scope_is_refused():
    outer = strategies.select_strategy("mirrored", devices=2)
    with outer.scope(), pytest.raises(ValueError, match="active='MirroredStrategy'.*first"):
        strategies.select_strategy("one")


def test_splitting_after_the_runtime_started_is_refused():
    tf.constant(0)
    with pytest.raises(ValueError, match="runtime has started with 8 logical CPU.*count=9"):
        strategies.split_device("CPU", 9)


def test_splitting_again_into_no_more_devices_is_fine():
    tf.constant(0)
    assert strategies.split_device("CPU", 2) == ["CPU:0", "CPU:1"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("TPU", 2), "`kind` must be one of 'CPU', 'GPU'"),
        (("CPU", 0), "`count` must be a positive integer"),
    ],
)
def test_bad_splits_get_one_sentence(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        strategies.split_device(*arguments)


def test_a_memory_limit_for_cpus_is_refused():
    with pytest.raises(ValueError, match="Memory limits are for GPUs.*memory_limit_mb=100"):
        strategies.split_device("CPU", 2, memory_limit_mb=100)


@pytest.mark.slow
def test_more_replicas_than_devices_are_refused_in_an_unsplit_process():
    code = (
        "from kdpkit import strategies\n"
        "try: strategies.select_strategy('mirrored', devices=2)\n"
        "except ValueError as error: print(error)\n"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    ).stdout
    assert 'Call `kdpkit.strategies.split_device("CPU", 2)` first' in printed
