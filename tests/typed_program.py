"""A program as a user writes it, which `mypy --strict` accepts and which trains.

tests/test_package.py does both with the installed package. `assert_type` fails for what is `Any`.
"""

import sys
from typing import assert_type

import keras
import numpy as np
import tensorflow as tf

import kdpkit
from kdpkit import callbacks, pipelines, scaling, schedules, strategies, testing, training

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


def main(directory: str) -> None:
    """Train on two replicas, and resume for one more epoch."""
    testing.use_logical_cpus(2)
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
    peak = float(np.max(schedules.preview(schedule, 9)))

    with strategy.scope():
        model = training.replica_exact(build(schedule))
    assert_type(model, Classifier)
    assert_type(model.units(), int)
    resume = callbacks.Resume(directory)
    watching = [*callbacks.training_callbacks(global_batch_size=plan.global_batch_size), resume]
    history = model.fit(resume.track(train), epochs=EPOCHS, callbacks=watching, verbose=0).history

    with strategy.scope():
        loop = training.TrainingLoop(
            build(schedule), optimizer="sgd", loss="sparse_categorical_crossentropy"
        )
    assert_type(loop, training.TrainingLoop)
    report = training.check_parity(lambda: build(schedule), train, replicas=2)
    assert_type(report.equal, bool)
    assert_type(report.variable, str)
    sys.stdout.write(f"{len(history['loss'])} epochs, peak {peak:.1f}, {report.equal}\n")


if __name__ == "__main__":
    main(sys.argv[1])
