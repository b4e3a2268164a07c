"""Meshes and sharded batches on JAX; test_environments.py runs it there."""

import jax
import keras
import numpy as np
import pytest
from jax.sharding import Mesh

from kdpkit import sharding
from kdpkit.sharding._meshes import as_mesh, data_mesh

pytestmark = pytest.mark.jax


# Meshes.


def test_a_mesh_takes_all_devices_a_number_or_a_choice_of_them():
    assert data_mesh().size == 8
    assert [*data_mesh(3).devices.flat] == jax.devices()[:3]
    chosen = [jax.devices()[5], jax.devices()[2]]
    assert [*data_mesh(chosen).devices.flat] == chosen


@pytest.mark.parametrize(
    ("devices", "sentence"),
    [
        (9, r"JAX has 8 cpu device\(s\).*devices=9.*use_logical_cpus"),
        ([jax.devices()[0]] * 2, "each once"),
        ([0, 1], r"devices of `jax.devices\(\)`.*\[0, 1\]"),
    ],
)
def test_impossible_meshes_raise(devices, sentence):
    with pytest.raises(ValueError, match=sentence):
        data_mesh(devices)


def test_a_strategy_is_a_mesh_or_a_distribution_or_what_keras_has_set():
    mesh = data_mesh(2)
    assert as_mesh(mesh) is mesh
    distribution = keras.distribution.DataParallel(devices=["cpu:0", "cpu:1", "cpu:2"])
    assert as_mesh(distribution).size == 3
    with distribution.scope():
        assert as_mesh(None).size == 3
    assert as_mesh(None).size == 1
    two_axes = Mesh(np.array(jax.devices()).reshape(2, 4), ("batch", "model"))
    assert as_mesh(two_axes) is two_axes
    with pytest.raises(ValueError, match=r"a strategy is .* or a `jax.sharding.Mesh`.*'mirrored'"):
        as_mesh("mirrored")


# Processes; tests/test_processes.py starts real ones.


@pytest.mark.parametrize(
    ("joining", "sentence"),
    [
        ({"coordinator": "http://localhost:80"}, "`coordinator` must be the address and port"),
        ({"process_index": 2}, "one of the cluster's.*index=2, of_this_role=2"),
    ],
)
def test_impossible_positions_among_processes_raise(joining, sentence):
    place = {"coordinator": "localhost:9876", "process_count": 2, "process_index": 0}
    with pytest.raises(ValueError, match=sentence):
        sharding.join_processes(**place | joining)
