"""Who takes part: what is written is read back, and a cluster that cannot be raises."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdpkit.cluster import ClusterConfig
from kdpkit.cluster._launchers import ADDRESSES, COUNT, INDEX


@st.composite
def configs(draw):
    """Any cluster, seen by any of its processes."""
    hosts = st.sampled_from(["a", "gpu01", "10.0.0.7", "node-3.cluster", "[fd00::2]"])
    address = st.builds("{}:{}".format, hosts, st.integers(1, 65535))
    addresses = draw(st.lists(address, min_size=1, max_size=7, unique=True))
    servers = draw(st.integers(0, len(addresses) - 1))
    workers, parameter_servers = addresses[servers:], addresses[:servers]
    chief = workers.pop() if len(workers) > 1 and draw(st.booleans()) else None
    config = ClusterConfig(workers, chief=chief, parameter_servers=parameter_servers)
    role, index, _ = draw(st.sampled_from(config.tasks))
    return dataclasses.replace(config, role=role, index=index)


@given(configs())
def test_what_is_written_is_read_back_and_keras_sees_the_same_processes(config):
    variables = config.to_environment()
    assert ClusterConfig.from_environment(variables) == config
    assert ClusterConfig.from_environment({"TF_CONFIG": variables.pop("TF_CONFIG")}) == config
    assert bool(variables) is not bool(config.parameter_servers)
    if variables:
        keras = ClusterConfig.from_environment(variables)
        for name in ("coordinator", "process_count", "process_index"):
            assert getattr(keras, name) == getattr(config, name)


@given(configs())
def test_every_process_is_numbered_once_and_the_first_is_the_coordinator(config):
    training = [
        dataclasses.replace(config, role=role, index=index)
        for role, index, _ in config.tasks
        if role != "ps"
    ]
    assert [one.process_index for one in training] == list(range(config.process_count))
    assert training[0].address == config.coordinator


def test_the_coordinator_alone_is_enough_for_jax():
    environ = {ADDRESSES: "10.0.0.1:1234", COUNT: "3", INDEX: "2"}
    config = ClusterConfig.from_environment(environ)
    assert (config.coordinator, config.process_count) == ("10.0.0.1:1234", 3)
    assert (config.process_index, config.address) == (2, None)
    assert config.to_environment() == environ
    with pytest.raises(ValueError, match="TF_CONFIG needs the address of every process"):
        config.to_tf_config()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"workers": []}, "A cluster needs a worker"),
        ({"workers": "a:1"}, "`workers` must be a list of strings"),
        ({"workers": ["a:65536"]}, "`worker 0` must be the address and port.*from 1 to 65535"),
        ({"workers": ["a:1"], "chief": "a:1"}, "an address of its own.*'chief 0', 'worker 0'"),
        ({"workers": ["a:1"], "index": 1}, "one of the cluster's.*index=1, of_this_role=1"),
        ({"workers": ["a:1", "b:1"], "processes": 3}, "only that of the first"),
    ],
)
def test_clusters_that_cannot_be_raise(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        ClusterConfig(**arguments)
