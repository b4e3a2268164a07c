"""Who takes part: what is written is read back, and a cluster that cannot be raises."""

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdpkit.cluster import ClusterConfig
from kdpkit.cluster._launchers import ADDRESSES, COUNT, INDEX


@st.composite
def configs(draw):
    """Any cluster, seen by any of its processes."""
    hosts = st.sampled_from(["a", "gpu01", "10.0.0.7", "node-3.cluster", "[::1]"])
    address = st.builds("{}:{}".format, hosts, st.integers(1, 65535))
    addresses = draw(st.lists(address, min_size=1, max_size=7, unique=True))
    servers = draw(st.integers(0, len(addresses) - 1))
    workers, parameter_servers = addresses[servers:], addresses[:servers]
    chief = workers.pop() if len(workers) > 1 and draw(st.booleans()) else None
    config = ClusterConfig(workers, chief=chief, parameter_servers=parameter_servers)
    role, index, _ = draw(st.sampled_from([*config.tasks, ("evaluator", 0, None)]))
    return config.for_task(role, index)


@given(configs())
def test_what_is_written_is_read_back(config):
    assert ClusterConfig.from_environment({"TF_CONFIG": config.to_tf_config()}) == config
    assert ClusterConfig.from_environment(config.to_environment()) == config


@given(configs())
def test_keras_sees_the_same_processes(config):
    variables = config.to_environment()
    variables.pop("TF_CONFIG")
    if config.parameter_servers or config.role == "evaluator":
        assert variables == {}
        return
    keras = ClusterConfig.from_environment(variables)
    for name in ("coordinator", "process_count", "process_index", "is_chief"):
        assert getattr(keras, name) == getattr(config, name)
    assert keras.to_environment()[ADDRESSES] == variables[ADDRESSES]


@given(configs())
def test_every_process_is_numbered_once_and_one_is_the_chief(config):
    training = [config.for_task(r, i) for r, i, _ in config.tasks if r in ("chief", "worker")]
    assert sorted(c.process_index for c in training) == list(range(config.process_count))
    assert [c.address for c in training if c.is_chief] == [config.coordinator]


def test_the_coordinator_alone_is_enough_for_jax():
    environ = {ADDRESSES: "10.0.0.1:1234", COUNT: "3", INDEX: "2"}
    config = ClusterConfig.from_environment(environ)
    assert (config.coordinator, config.process_count) == ("10.0.0.1:1234", 3)
    assert (config.process_index, config.address, config.is_chief) == (2, None, False)
    assert config.to_environment() == environ
    with pytest.raises(ValueError, match="TF_CONFIG needs the address of every process"):
        config.to_tf_config()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"workers": []}, "A cluster needs a worker"),
        ({"workers": "a:1"}, "`workers` must be a list of strings"),
        ({"workers": ["a"]}, "`worker 0` must be the address and port"),
        ({"workers": ["a:65536"]}, "the port from 1 to 65535"),
        ({"workers": ["http://a:80"]}, "`worker 0` must be the address and port"),
        ({"workers": ["a:1"], "chief": "a:1"}, "an address of its own.*'chief 0', 'worker 0'"),
        ({"workers": ["a:1"], "index": 1}, "one of the cluster's.*index=1, of_this_role=1"),
        ({"workers": ["a:1"], "role": "ps"}, "one of the cluster's.*of_this_role=0"),
        ({"workers": ["a:1"], "role": "boss"}, "`role` must be one of"),
        ({"workers": ["a:1", "b:1"], "processes": 3}, "only that of the first"),
        ({"workers": [], "chief": "a:1", "parameter_servers": ["b:1"]}, "need workers"),
    ],
)
def test_clusters_that_cannot_be_raise(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        ClusterConfig(**arguments)


def test_a_local_address_beside_others_raises():
    config = ClusterConfig(["localhost:1", "gpu2:1"])
    with pytest.raises(ValueError, match=r"local=\['localhost'\], others=\['gpu2'\]"):
        config.validate()
    local = ClusterConfig(["localhost:1", "127.0.0.1:2"])
    assert local.validate() is local


@pytest.mark.parametrize("role", ["ps", "evaluator"])
def test_servers_and_evaluators_have_no_number_among_those_that_train(role):
    config = ClusterConfig(["a:1"], chief="b:1", parameter_servers=["c:1"]).for_task(role, 0)
    assert not config.is_chief
    with pytest.raises(ValueError, match="not among the processes that train"):
        _ = config.process_index


@pytest.mark.timeout(300)
def test_hosts_are_reachable_also_before_their_process_listens():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        addresses = ["127.0.0.1:1", f"127.0.0.1:{listening.getsockname()[1]}"]
        ClusterConfig(addresses).validate(reachable=True, timeout_seconds=30)


@pytest.mark.timeout(300)
def test_a_host_whose_name_does_not_resolve_is_named():
    config = ClusterConfig(["here.invalid:1", "no-such-host.invalid:1"])
    with pytest.raises(ValueError, match=r"cannot be reached.*'no-such-host.invalid:1'"):
        config.validate(reachable=True, timeout_seconds=1)
