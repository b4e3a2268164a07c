"""A file of tests as a user writes it, which `mypy --strict` accepts and which pass.

tests/test_package.py does both with the installed package. `assert_type` fails for what is `Any`.
"""

from collections.abc import Iterator
from typing import assert_type

import keras
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kdpkit import training
from kdpkit.testing import generators, laws


def batches(examples: int, size: int, processes: int, index: int) -> Iterator[np.ndarray]:
    """Return the parts of each batch that a process reads."""
    for start in range(0, examples, size):
        yield np.arange(examples)[start : start + size][index::processes]


@given(generators.shards())
def test_processes_share_the_examples(shards: generators.Shards) -> None:
    """The parts of a NamedTuple are integers."""
    assert_type(shards.process_batch_size, int)
    read = [batches(*shards, index) for index in range(shards.processes)]
    laws.every_example_once(read, examples=shards.examples)


@given(generators.splits(), st.data())
def test_a_split_is_that_of_tf_distribute(split: generators.Split, data: st.DataObject) -> None:
    """Sizes only."""
    assert_type(split.sizes, tuple[int, ...])
    laws.split_as_tf_distribute(split.sizes, of=split.global_batch_size)
    size = data.draw(generators.global_batch_sizes(split.replicas))
    assert_type(size, int)


@settings(deadline=None)
@given(generators.datasets())
def test_a_dataset_has_every_example(data: generators.Batches) -> None:
    """A tf.data.Dataset, or arrays."""
    assert_type(len(data), int)
    laws.every_example_once(data.dataset, examples=data.examples)


@settings(deadline=None, max_examples=1)
@given(generators.models(wrap=training.replica_exact), generators.labelled_batches())
def test_a_model_trains_alike(
    build: generators.ModelBuilder, batch: tuple[np.ndarray, ...]
) -> None:
    """On the two logical CPUs that `kdpkit_devices` makes."""
    laws.same_training_for_any_replicas(build, batch, replicas=2)
    laws.per_example(keras.layers.Dense(2), batch[0])
