"""Time from the start of the BERT recipe to its first step, its data being in the cache.

Beside it stands what a program needs that imports the recipe's frameworks and does nothing.
"""

import pathlib
import subprocess
import sys
import tempfile
import time

from tests.benchmarks.paired import compared, in_turns, seconds_of

IMPORTS = [sys.executable, "-c", "import keras, keras_hub, tensorflow"]
RECIPE = pathlib.Path(__file__).parents[2] / "recipes" / "bert_mlm.py"


def rows(args):
    """Measure whole processes: imports, reading, building, tracing, compiling, one step."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-u", RECIPE, "--strategy", "one", "--epochs", "1"]
        command += ["--steps-per-epoch", "1", "--cache-dir", cache]
        command += ["--data", args.text] if args.text else []
        contestants = {  # the first round, which counts for nothing, fills the cache
            "recipe": lambda: first_step([*map(str, command)]),
            "imports": lambda: seconds_of(lambda: subprocess.run(IMPORTS, check=True)),
        }
        figures = in_turns(contestants, args.rounds or 7)
    what = "BERT recipe, start to the end of the first step, against its imports alone"
    return [compared(what, "s", figures["recipe"], figures["imports"])]


def first_step(command):
    """Return the seconds until the first step is reported."""
    start, output = time.perf_counter(), b""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        while b"done in" not in output:
            byte = process.stdout.read(1)
            if not byte:
                raise RuntimeError(f"the recipe ended without a step: {output[-500:]!r}")
            output += byte
        seconds = time.perf_counter() - start
        process.kill()
    return seconds
