"""What input costs: the share of training that waits for it, and TFRecord files read."""

import tempfile
import time

import numpy as np
import tensorflow as tf

from kdpkit import pipelines
from tests.benchmarks import workload
from tests.benchmarks.paired import Row, Spread, compared, in_turns

RECORDS, SIDE, BATCH, FILES = 40_000, 28, 256, 4
STEPS = 24


def rows(args):
    """Measure waiting in the BERT recipe, and how fast records come."""
    waiting = [waited(args) for _ in range(args.rounds or 3)]
    found = [
        Row("BERT, share of training that waits for input", "%", Spread.of(waiting), goal=("<=", 2))
    ]
    with tempfile.TemporaryDirectory() as directory:
        files = written(directory)
        found += records(files, args.rounds or 9)
    return found


def waited(args):
    """Train on batches one by one; return the share of time in which nothing trains."""
    loop = workload.loop_of(args, jit=True)
    data = workload.packed(args, workload.rows(args), steps=STEPS)
    one = next(iter(data))
    kept = tf.data.Dataset.from_tensors(one)
    loop.fit(kept, epochs=1, verbose=0)  # compiles
    waiting = training = 0.0
    batches = iter(data)
    for _ in range(STEPS):
        start = time.perf_counter()
        batch = next(batches)
        taken = time.perf_counter()
        loop.fit(tf.data.Dataset.from_tensors(batch), epochs=1, verbose=0)
        waiting += taken - start
        training += time.perf_counter() - taken
    return 100 * waiting / (waiting + training)


def written(directory):
    """Write images to TFRecord files."""
    images = np.random.default_rng(0).integers(0, 256, (RECORDS, SIDE, SIDE, 1), "uint8")
    examples = ({"image": image, "label": number % 10} for number, image in enumerate(images))
    return pipelines.write_tfrecords(examples, f"{directory}/train", shards=FILES, compression=None)


def records(files, rounds):
    """Read and decode in our way, and read bytes alone, one record at a time and in batches."""
    parse = pipelines.example_parser(
        {"image": tf.TensorSpec([SIDE, SIDE, 1], "uint8"), "label": tf.TensorSpec([], "int32")}
    )
    decoded = pipelines.tfrecords(files).batch(BATCH).map(parse, tf.data.AUTOTUNE).prefetch(2)
    bare = tf.data.TFRecordDataset(files)
    contestants = {
        "ours": drained(decoded, BATCH),
        "bare": drained(bare, 1),
        "bare, in batches": drained(bare.batch(BATCH), BATCH),
    }
    figures = in_turns(contestants, rounds)
    what, unit = "TFRecord, read and decoded, against a TFRecordDataset", "records/s"
    return [
        compared(f"{what}, bare", unit, figures["ours"], figures["bare"], goal=(">=", 0.8)),
        compared(f"{what}, in batches", unit, figures["ours"], figures["bare, in batches"]),
    ]


def drained(dataset, size):
    """Return the records a second of a whole pass."""

    @tf.function
    def drain():
        return dataset.reduce(tf.constant(0), lambda count, _: count + size)

    def measure():
        start = time.perf_counter()
        drain().numpy()
        return RECORDS / (time.perf_counter() - start)

    return measure
