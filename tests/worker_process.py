"""A program that trains as one of several processes of TensorFlow; tests/test_workers.py.

    TF_CONFIG=... python -m tests.worker_process DIRECTORY | starts | hangs

It prints what came out as one line of JSON, and then trains until it is ended. The test process
calls the same functions on one device.
"""

# ruff: noqa: T201 it prints for the test that started it

import json
import os
import pathlib
import signal
import socket
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended

from kdpkit import callbacks, experiment, strategies, testing
from kdpkit._internal import processes
from kdpkit.batches import ArrayBatches
from kdpkit.training import replica_exact
from tests import process_programs
from tests.process_programs import LOSS, sentence_of
from tests.processes import free_port

HAS_ORBAX = hasattr(keras.callbacks, "OrbaxCheckpoint")  # since Keras 3.14
EXAMPLES, BATCH = 22, 7  # shards of 2, 2, 2 and 1 examples, and at the end of the epoch one example


def dataset(examples=EXAMPLES, *, seed=3):
    """Shuffled batches; those of an epoch have sizes that no number of replicas divides."""
    weights = 1 + np.arange(examples, dtype="float32") % 3
    data = tf.data.Dataset.from_tensor_slices((*testing.toy_classification(examples), weights))
    return data.shuffle(examples, seed=seed).batch(BATCH)


def of_unknown_length(batches):
    """Return the same batches in all processes, but as many as asked for, which nobody knows."""
    data = tf.data.Dataset.from_tensor_slices(testing.toy_classification(EXAMPLES + BATCH))
    return data.batch(BATCH).take(batches).filter(lambda *_: True)


def watching(directory):
    by_orbax = [keras.callbacks.OrbaxCheckpoint(str(directory / "orbax"))] if HAS_ORBAX else []
    return [
        *by_orbax,
        keras.callbacks.ModelCheckpoint(directory / "keras-{epoch}.keras"),
        keras.callbacks.CSVLogger(directory / "log.csv"),
        callbacks.TensorBoard(directory / "board"),
    ]


def by_fit(strategy, directory=None):
    """Train two steps in an execution, of which two make an update."""
    x, y = testing.toy_classification(EXAMPLES)
    with strategy.scope():
        model = process_programs.classifier()
    found = process_programs.by_fit(
        model,
        ArrayBatches((x, y), global_batch_size=BATCH, remainder="keep", seed=3),
        dataset(),
        epochs=2,
        compiled={
            "optimizer": keras.optimizers.Adam(0.01, clipnorm=0.1, gradient_accumulation_steps=2),
            "steps_per_execution": 2,
            "jit_compile": False,
        },
        class_weight={0: 0.5, 1: 2.0, 2: 1.0},
        callbacks=watching(directory) if directory else [],
    )
    return found | {"on_batch": model.train_on_batch(x[:5], y[:5])}


def disagreements(strategy, model):
    index = processes.index()
    with strategy.scope():
        other = testing.tiny_classifier()
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    off = dataset().with_options(options)
    step = replica_exact(lambda batch: other(batch), strategy=strategy)
    ways = {
        "batch, step": lambda: step(np.full((5, 4), index, "float32")),
        "iterator, step": lambda: step(iter(dataset())),
        "policy": lambda: model.evaluate(off, verbose=0),
        "order, fit": lambda: model.fit(dataset(seed=index), verbose=0),
        "length, fit": lambda: model.fit(dataset(EXAMPLES + BATCH * index), verbose=0),
        "end, fit": lambda: model.fit(of_unknown_length(3 + index), verbose=0),
    }
    return {name: sentence_of(way) for name, way in ways.items()}


def select(seconds=60):
    return strategies.select_strategy(
        "multi_worker", communication="ring", start_timeout_seconds=seconds
    )


def failed_start(task, addresses):
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
    return sentence_of(lambda: select(1))


def start_in_vain():
    """Start where it cannot work; print the sentences. Then start, and lose the other process."""
    complete = json.loads(os.environ["TF_CONFIG"])
    index = complete["task"]["index"]
    strategies.split_device("CPU", 1 + index)
    found = {"uneven": sentence_of(select)}
    nobody, nobody_else = (f"localhost:{free_port()}" for _ in range(2))
    with socket.create_server(("", 0)) as taken:
        addresses = [f"localhost:{taken.getsockname()[1]}", nobody]
        found["taken"] = failed_start(complete["task"], addresses[:: -1 if index else 1])
    found["alone"] = failed_start(complete["task"], [nobody, nobody_else])
    print(json.dumps(found), flush=True)
    os.environ["TF_CONFIG"] = json.dumps(complete)
    strategies.split_device("CPU", 1)
    strategy = select()
    if index:
        os.kill(os.getpid(), signal.SIGSTOP)
    with strategy.scope():
        process_programs.classifier()


def train_on_every_logical_cpu(count):
    """Put a replica on each, as on GPUs, where TensorFlow takes the first CPU alone."""
    original = CollectiveAllReduceExtended._initialize_local_devices

    def local_devices(extended, resolver, worker):
        _, kind = original(extended, resolver, worker)
        return tuple(f"{worker}/device:CPU:{index}" for index in range(count)), kind

    CollectiveAllReduceExtended._initialize_local_devices = local_devices


def main():
    if sys.argv[1] == "starts":
        start_in_vain()
        return
    if sys.argv[1] == "hangs":
        select(3)
    strategies.split_device("CPU", 2)
    train_on_every_logical_cpu(2)
    strategy = select()
    with strategy.scope():
        model = replica_exact(testing.tiny_classifier())
    model.compile("sgd", LOSS)
    found = {
        "strategy": strategies.describe(strategy),
        "is_chief": strategies.is_chief(),
        "fit": by_fit(strategy, pathlib.Path(sys.argv[1])),
        "disagreements": disagreements(strategy, model),
    }
    print(json.dumps(found, default=float), flush=True)
    endless, steps = dataset().repeat(), process_programs.Steps(0.2)
    model.fit(endless, steps_per_epoch=1000, callbacks=[steps], verbose=0)


if __name__ == "__main__":
    experiment.run(main)
