"""A program that trains with others until it is ended, on the current backend; for test_hosts.py.

TF_CONFIG=... KERAS_BACKEND=... python -m tests.cluster.host_process
"""

# ruff: noqa: ARG002, T201 Keras calls hooks with arguments; it prints for the test

import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras

from kdpkit import cluster, experiment, testing
from kdpkit.batches import ArrayBatches
from kdpkit.training import replica_exact


class Printing(keras.callbacks.Callback):
    """Prints its steps, which last."""

    def on_train_batch_end(self, batch, logs=None):
        print(f"step {batch}", flush=True)
        time.sleep(0.1)


def scope():
    """Join the others; return what the model is built in."""
    if keras.backend.backend() == "tensorflow":
        from kdpkit import strategies

        return strategies.select_strategy("multi_worker", communication="ring").scope()
    from kdpkit import sharding

    here = cluster.ClusterConfig.from_environment()
    sharding.join_processes(
        here.coordinator, process_count=here.process_count, process_index=here.process_index
    )
    return keras.distribution.DataParallel(auto_shard_dataset=False).scope()


def batches():
    here = cluster.ClusterConfig.from_environment()
    position = {"process_count": here.process_count, "process_index": here.process_index}
    if keras.backend.backend() == "tensorflow":
        position = {}
    return ArrayBatches(testing.toy_classification(4000), global_batch_size=4, **position)


def main():
    with scope():
        model = replica_exact(testing.tiny_classifier())
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.fit(batches(), epochs=1000, shuffle=False, callbacks=[Printing()], verbose=0)


if __name__ == "__main__":
    experiment.run(main)
