"""The same global batch on logical CPUs of one machine, against one device."""

import keras
import numpy as np
import tensorflow as tf

from kdpkit import corpora, pipelines, strategies, testing
from kdpkit.training import TrainingLoop
from recipes import cnn_custom_loop
from tests.benchmarks import workload
from tests.benchmarks.paired import compared, in_turns, seconds_of

REPLICAS = (1, 2, 4)
STEPS = {"BERT": 24, "CNN": 40}
CNN_BATCH = 128


def rows(args):
    """Measure a step of BERT and of the CNN on 2 and 4 replicas."""
    testing.use_logical_cpus(max(REPLICAS))
    array = workload.rows(args)
    found = []
    for name, epoch_on in {"BERT": bert, "CNN": cnn}.items():
        contestants = {
            replicas: timed(epoch_on(args, array, replicas), STEPS[name]) for replicas in REPLICAS
        }
        figures = in_turns(contestants, args.rounds or 7)
        found += [
            compared(
                f"{name}, {replicas} logical replicas against one device, same global batch",
                "ms a step",
                figures[replicas],
                figures[1],
                goal=("<=", 1.1) if replicas == 2 else None,
            )
            for replicas in REPLICAS[1:]
        ]
    return found


def timed(epoch, steps):
    """Return milliseconds of a step."""
    return lambda: 1e3 * seconds_of(epoch) / steps


def strategy_of(replicas):
    """One device, or some replicas in step."""
    return strategies.select_strategy("mirrored" if replicas > 1 else "one", devices=replicas)


def bert(args, array, replicas):
    """Return an epoch of our BERT."""
    strategy = strategy_of(replicas)
    with strategy.scope():
        loop = workload.loop_of(args, strategy=strategy, jit=True)
    data = workload.packed(args, array, steps=STEPS["BERT"], replicas=replicas)
    return lambda: loop.fit(data, epochs=1, verbose=0)


def cnn(args, _, replicas):
    """Return an epoch of the article's CNN."""
    splits = corpora.load_images(args.images)
    strategy = strategy_of(replicas)
    with strategy.scope():
        model = cnn_custom_loop.build_model(splits.train.images.shape[1:], splits.classes)
    loop = TrainingLoop(
        model,
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(),
        metrics=["accuracy"],
        strategy=strategy,
        jit=False,
    )
    rows = STEPS["CNN"] * CNN_BATCH
    data = pipelines.train_pipeline(
        tf.data.Dataset.from_tensor_slices(
            tuple(np.resize(array, (rows, *array.shape[1:])) for array in splits.train)
        ),
        global_batch_size=CNN_BATCH,
        replicas=replicas,
    )
    return lambda: loop.fit(data, epochs=1, verbose=0)
