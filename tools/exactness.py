"""Measures the tables of exactness: every setting, column and count of replicas.

    python -m tools.exactness > tables.md

The settings are those of the tests. Stock Keras may abort the process, so every column and replica
count is measured in processes of its own.
"""

import argparse
import collections
import dataclasses
import itertools
import json
import os
import subprocess
import sys

from kdpkit import testing
from tests.training.exactness import COLUMNS, REPLICAS, SETTINGS, Outcome, columns_on, measure


def main(argv=None):
    """Measure the columns in processes of their own and print a backend's as a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", help=f"instead of {REPLICAS}")
    parser.add_argument("--columns", nargs="+", default=[*COLUMNS], choices=[*COLUMNS])
    parser.add_argument("--settings", nargs="+", default=[s.name for s in SETTINGS])
    parser.add_argument("--here", action="store_true", help="measure in this process, print JSON")
    arguments = parser.parse_args(argv)
    if arguments.here:
        _measure_here(arguments.columns[0], arguments.replicas[0], arguments.settings)
        return
    for backend, replicas in REPLICAS.items():
        columns = [column for column in columns_on(backend) if column in arguments.columns]
        if columns:
            lines = _table(columns, arguments.replicas or replicas, arguments.settings)
            sys.stdout.writelines([*lines, "\n"])


def _table(columns, replica_counts, settings):
    outcomes = collections.defaultdict(dict)
    for column, replicas in itertools.product(columns, replica_counts):
        for name, outcome in measure_apart(column, replicas, settings).items():
            outcomes[name, column][replicas] = outcome
    rows = [["setting", *columns], ["---"] * (1 + len(columns))]
    rows += [[name, *(_cell(outcomes[name, column]) for column in columns)] for name in settings]
    return [f"| {' | '.join(row)} |\n" for row in rows]


def _measure_here(column, replicas, names):
    testing.use_logical_cpus(8)
    settings = {setting.name: setting for setting in SETTINGS}
    for name in names:
        outcome = measure(settings[name], column, replicas)
        sys.stdout.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
        sys.stdout.flush()
        if outcome.verdict == "crash":
            sys.exit(1)  # a failed collective breaks those after it


def measure_apart(column, replicas, names):
    """Measure settings in other processes, each up to the first that crashes or takes it down.

    A crash counts where it was the first thing in its process: one setting may break the next.
    """
    outcomes = []
    while len(outcomes) < len(names):
        command = [sys.executable, "-m", "tools.exactness", "--here", "--columns", column]
        command += ["--replicas", str(replicas), "--settings", *names[len(outcomes) :]]
        backend = {"KERAS_BACKEND": "jax" if "JAX" in column else "tensorflow"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        lines = subprocess.run(command, env=os.environ | backend, **pipes).stdout.splitlines()
        found = [Outcome(**json.loads(line)) for line in lines if line.startswith("{")]
        whole = [*itertools.takewhile(lambda outcome: outcome.verdict != "crash", found)]
        outcomes += whole or found or [Outcome("crash", message="the process aborted")]
    return dict(zip(names, outcomes, strict=True))


def _cell(outcomes):
    """Put the outcomes for all replica counts into a few words."""
    by_verdict = collections.defaultdict(list)
    for replicas, outcome in outcomes.items():
        by_verdict[outcome.verdict].append((replicas, outcome))
    parts = []
    for verdict, found in by_verdict.items():
        differences = [outcome.difference for _, outcome in found]
        differences += [outcome.logs for _, outcome in found if verdict != "equal weights"]
        is_measured = verdict in ("equal", "equal weights", "wrong")
        number = f" {max(differences):.0e}" if is_measured else ""
        where = f" (R = {', '.join(str(replicas) for replicas, _ in found)})"
        parts.append(f"{verdict}{number}{where if len(by_verdict) > 1 else ''}")
    return "; ".join(parts)


if __name__ == "__main__":
    main()
