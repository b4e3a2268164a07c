"""A program that lives through one leg of an elastic run; tests/elastic.py starts it.

    kdpkit launch --workers 2 -- python -m tests.elastic_process SETTINGS

Without a leg it is a program that trains with as many workers as there are. The second of two is
lost in a step, and cannot be started again until the other, on its own, has it come back.
"""

# ruff: noqa: ARG002, E402 Keras calls its hooks; devices are asked for before the backends start

import json
import os
import pathlib
import signal
import sys

from kdpkit import cluster, experiment, testing

SETTINGS = json.loads(sys.argv[1])
DIRECTORY = pathlib.Path(SETTINGS["directory"])
HERE = cluster.ClusterConfig.from_environment()
LEG = SETTINGS["leg"] or {
    "setting": {"replicas": 2 * HERE.process_count, "processes": HERE.process_count},
    "end": "last",
    "at": 0,
    "of": 0,
    "save_freq": 2,
}
SETTING = LEG.pop("setting")

testing.use_logical_cpus(SETTING["replicas"] // SETTING["processes"])

import keras

from tests import elastic

if elastic.ON_JAX:
    from kdpkit import sharding
    from kdpkit._internal import shards

    shards.SMALL = 1  # every variable that the devices divide can be cut

LOST, REPAIRED = (DIRECTORY / name for name in ("is lost", "is repaired"))


class LostAndBack(keras.callbacks.Callback):
    """Loses the second worker in a step, and calls it back in one of the first on its own."""

    steps = 0

    def on_train_batch_begin(self, batch, logs=None):
        self.steps += 1
        if self.steps == 3 and HERE.process_index == 1 and not LOST.exists():
            LOST.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.steps == 2 and HERE.process_count == 1:
            REPAIRED.touch()
            os.kill(os.getppid(), signal.SIGUSR1)


def main():
    if HERE.process_index == 1 and LOST.exists() and not REPAIRED.exists() and not SETTINGS["leg"]:
        sys.exit("no such device")
    if elastic.ON_JAX:
        sharding.join_processes(
            HERE.coordinator, process_count=HERE.process_count, process_index=HERE.process_index
        )
    others = [] if SETTINGS["leg"] else [LostAndBack()]
    pause = 0.05 if SETTINGS["leg"] else 0.3
    leg = elastic.Leg(elastic.Setting(**SETTING), **LEG)
    result = elastic.lived(SETTINGS["program"], leg, DIRECTORY, *others, seconds_a_step=pause)
    if HERE.process_index == 0:
        (DIRECTORY / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    experiment.run(main)
