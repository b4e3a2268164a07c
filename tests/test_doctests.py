"""The examples in the docstrings run."""

import doctest
import importlib
import pkgutil

import keras
import pytest

import kdpkit

BACKENDS = {"kdpkit.sharding": "jax"} | {
    f"kdpkit.{part}": "tensorflow" for part in ("pipelines", "strategies", "testing", "training")
}
MODULES = ["kdpkit", *(module.name for module in pkgutil.walk_packages(kdpkit.__path__, "kdpkit."))]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_the_module_run(name):
    package = ".".join(name.split(".")[:2])
    backend = keras.backend.backend()
    if BACKENDS.get(package, backend) != backend:
        pytest.skip(f"{package} has examples for {BACKENDS[package]}")
    for needed in ("datasets", "grain") if name == "kdpkit.batches._sources" else ():
        pytest.importorskip(needed)
    if name == "kdpkit.diagnostics._plan.memory_plan" and backend == "jax":
        pytest.importorskip("jax", "0.10")  # which it needs on a CPU
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    result = doctest.testmod(importlib.import_module(name), optionflags=flags)
    assert result.failed == 0
