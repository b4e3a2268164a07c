"""A program and tests as a user writes them, which `mypy --strict` accepts and which pass.

tests/test_package.py does both with the installed package. `assert_type` fails for what is `Any`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import assert_type

import keras
import numpy as np
import tensorflow as tf
from hypothesis import given, settings

import kdpkit
from kdpkit import callbacks, pipelines, scaling, schedules, strategies, testing, training
from kdpkit.testing import generators, laws

EPOCHS = 2


class Classifier(keras.Sequential):  # type: ignore[misc]  # Keras has no types
    """A model of the user's own, whose type must survive."""

    def units(self) -> int:
        """Return the number of classes."""
        return int(self.output_shape[-1])


def build(schedule: keras.optimizers.schedules.LearningRateSchedule) -> Classifier:
    """Return a compiled model; call it in a strategy's scope."""
    model = Classifier([keras.Input((4,)), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(schedule), loss)
    return model


def test_the_program_trains(tmp_path: Path) -> None:
    """On the two logical CPUs that `kdpkit_devices` makes."""
    strategy = strategies.select_strategy("mirrored")
    plan = scaling.ScalePlan(replicas=2, per_replica_batch_size=8, base_learning_rate=0.1)
    assert_type(plan.global_batch_size, int)
    assert_type(plan.learning_rate, float)
    assert_type(kdpkit.scaling.split_batch(10, 4), tuple[int, ...])

    features, labels = testing.toy_classification(48)
    assert_type(kdpkit.__version__, str)
    train = pipelines.train_pipeline(
        tf.data.Dataset.from_tensor_slices((features, labels)),
        pipelines.PipelineConfig(cache=False),
        global_batch_size=plan.global_batch_size,
        replicas=plan.replicas,
    )
    assert_type(len(train), int)
    schedule = schedules.warmup_cosine(plan.learning_rate, total_steps=9, warmup_steps=2)
    assert_type(schedules.LinearWarmup(schedule, warmup_steps=2), schedules.LinearWarmup)
    assert float(np.max(schedules.preview(schedule, 9))) > 0

    with strategy.scope():
        model = training.replica_exact(build(schedule))
    assert_type(model, Classifier)
    assert_type(model.units(), int)
    resume = callbacks.Resume(tmp_path)
    watching = [*callbacks.training_callbacks(global_batch_size=plan.global_batch_size), resume]
    history = model.fit(resume.track(train), epochs=EPOCHS, callbacks=watching, verbose=0).history

    @training.replica_exact(strategy=strategy)
    def predict(x: np.ndarray, scale: float = 1.0) -> object:
        return model(x) * scale

    assert_type(predict(features[:5], scale=2.0), object)
    assert_type(training.replica_exact(predict)(features[:5]), object)

    report = training.check_parity(lambda: build(schedule), train, replicas=2)
    assert_type(report.equal, bool)
    assert_type(report.variable, str)
    assert (len(history["loss"]), report.equal) == (EPOCHS, True)


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


@settings(deadline=None)
@given(generators.datasets())
def test_a_dataset_has_every_example(data: generators.Batches) -> None:
    """A tf.data.Dataset, or arrays."""
    assert_type(len(data), int)
    laws.every_example_once(data.dataset, examples=data.examples)


@settings(deadline=None, max_examples=1)
@given(generators.labelled_batches())
def test_a_model_trains_alike(batch: tuple[np.ndarray, ...]) -> None:
    """Trains it on two replicas."""

    def make() -> Classifier:
        return training.replica_exact(build(schedules.warmup_cosine(0.1, total_steps=9)))

    report = training.check_parity(make, batch, replicas=2)
    assert report.equal, report
