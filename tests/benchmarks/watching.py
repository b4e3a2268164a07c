"""What the usual callbacks cost, on a tiny model and on BERT."""

import tempfile

import keras
import tensorflow as tf

from kdpkit import callbacks, testing
from tests.benchmarks import workload
from tests.benchmarks.paired import compared, in_turns, seconds_of

TINY_BATCH, TINY_STEPS, BERT_STEPS = 32, 1000, 20
ROUNDS = {"tiny model": 45, "BERT": 15}  # an epoch of the tiny one varies by a tenth on its own


def rows(args):
    """Measure an epoch with `training_callbacks` on and off."""
    found = []
    for name, epoch, goal in (("tiny model", tiny(), 1.1), ("BERT", bert(args), 1.01)):
        with tempfile.TemporaryDirectory() as directory:
            usual = callbacks.training_callbacks(directory, global_batch_size=workload.BATCH)
            figures = in_turns(
                {
                    "on": lambda epoch=epoch, usual=usual: epoch(usual),
                    "off": lambda epoch=epoch: epoch([]),
                },
                args.rounds or ROUNDS[name],
            )
        found.append(
            compared(
                f"{name}, training_callbacks on against off",
                "ms a step",
                figures["on"],
                figures["off"],
                goal=("<=", goal),
            )
        )
    return found


def tiny():
    """Return an epoch of `fit` on a model without work."""
    model = testing.tiny_classifier()
    rate = keras.optimizers.schedules.PolynomialDecay(0.1, 1_000_000)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
    batch = tf.data.Dataset.from_tensors(testing.toy_classification(TINY_BATCH)).cache()
    data = batch.repeat(TINY_STEPS).prefetch(tf.data.AUTOTUNE)
    return lambda usual: (
        1e3 * seconds_of(lambda: model.fit(data, callbacks=usual, verbose=0)) / TINY_STEPS
    )


def bert(args):
    """Return an epoch of our BERT."""
    data = workload.packed(args, workload.rows(args), steps=BERT_STEPS)
    loop = workload.loop_of(args, jit=True)
    return lambda usual: (
        1e3 * seconds_of(lambda: loop.fit(data, epochs=1, callbacks=usual, verbose=0)) / BERT_STEPS
    )
