"""A program that lives through one leg of an elastic run; tests/elastic.py starts it.

kdpkit launch --workers 2 -- python -m tests.elastic_process SETTINGS
"""

# ruff: noqa: E402 devices are asked for before the backends start

import json
import pathlib
import sys

from kdpkit import cluster, experiment, testing

SETTINGS = json.loads(sys.argv[1])
DIRECTORY = pathlib.Path(SETTINGS["directory"])
HERE = cluster.ClusterConfig.from_environment()
LEG = SETTINGS["leg"]

testing.use_logical_cpus(LEG["replicas"] * LEG["model"] // LEG["processes"])

from tests import elastic

if elastic.ON_JAX:
    from kdpkit import sharding
    from kdpkit._internal import shards

    shards.SMALL = 1  # every variable that the devices divide can be sharded


def main():
    if elastic.ON_JAX:
        sharding.join_processes(
            HERE.coordinator, process_count=HERE.process_count, process_index=HERE.process_index
        )
    leg = elastic.Leg(**LEG)
    elastic.lived(SETTINGS["program"], leg, DIRECTORY, seconds_a_step=0.05)


if __name__ == "__main__":
    experiment.run(main)
