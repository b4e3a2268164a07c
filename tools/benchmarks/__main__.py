"""What kdpkit costs and gains, measured side by side in one run.

    python -m tools.benchmarks                                    # all, on built-in data
    python -m tools.benchmarks bert --text wiki.tokens --vocabulary vocab.txt > bert.md

Every benchmark is a module beside this file and runs in a process of its own. Its contestants
alternate, so that a busy machine slows all alike; figures are medians over the rounds with
quartiles, ratios are taken round by round.
"""

import argparse
import dataclasses
import datetime
import importlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from kdpkit._internal import machine as machines
from kdpkit.diagnostics._env.environment import processor
from kdpkit.experiment import positive_integer
from kdpkit.experiment._recorder import versions
from tools.benchmarks.paired import row_of, table

NAMES = ("machine", "bert", "loops", "exact", "pauses")


def parser():
    """Name what to measure, and on which data."""
    found = argparse.ArgumentParser(prog="python -m tools.benchmarks", description=__doc__)
    found.formatter_class = argparse.RawDescriptionHelpFormatter
    add = found.add_argument
    add("names", nargs="*", metavar="NAME", type=name, help=", ".join(NAMES))
    add("--rounds", type=positive_integer, help="(default: what each benchmark needs)")
    add("--text", type=pathlib.Path, metavar="FILE", help="lines of text (default: built-in)")
    add("--vocabulary", type=pathlib.Path, metavar="FILE", help="(default: one of 30,522 learned)")
    add("--images", default="builtin", metavar="DIRECTORY", help="with MNIST (default: built-in)")
    add("--child", help=argparse.SUPPRESS)  # the file that a benchmark's own process writes
    return found


def name(word):
    """Accept the name of a benchmark."""
    if word not in NAMES:
        raise argparse.ArgumentTypeError(f"there is no {word!r}, choose from {', '.join(NAMES)}")
    return word


def checked(argv):
    """Read the arguments, and reject files that there are not."""
    found = parser()
    args = found.parse_args(argv)
    for file in (args.text, args.vocabulary):
        if file and not file.is_file():
            found.error(f"there is no such file: {file}")
    return args


def main(argv=None):
    """Measure, and print the table; return 1 if a goal was missed or a benchmark failed.

    Ctrl-C ends it with the table of what has been measured, and 130.
    """
    args = checked(argv)
    if args.child:
        (name,) = args.names
        rows = importlib.import_module(f"tools.benchmarks.{name}").rows(args)
        pathlib.Path(args.child).write_text(json.dumps([dataclasses.asdict(row) for row in rows]))
        return 0
    rows, code = [], 0
    try:
        for name in args.names or NAMES:
            of_one = measured(name, flags_of(args))
            code |= of_one is None
            rows += of_one or []
    except KeyboardInterrupt:
        print("interrupted.", file=sys.stderr)
        code = 130
    installed = ", ".join(" ".join(pair) for pair in versions().items())
    today = datetime.datetime.now(tz=datetime.UTC).date()
    print(f"{machines.cores()} cores of {processor()}; {installed}; {today}.\n\n{table(rows)}")
    return code or int(any(row.is_met is False for row in rows))


def flags_of(args):
    """Return the flags that a benchmark's own process needs."""
    given = {name: getattr(args, name) for name in ("rounds", "text", "vocabulary", "images")}
    return [f"--{name}={value}" for name, value in given.items() if value is not None]


def measured(name, flags):
    """Run one benchmark in its own process, and return its rows; None if it failed."""
    with tempfile.TemporaryDirectory() as directory:
        file = pathlib.Path(directory) / "rows.json"
        command = [sys.executable, "-m", "tools.benchmarks", name, *flags, "--child", str(file)]
        print(f"{name} ...", file=sys.stderr, flush=True)
        finished = subprocess.run(
            command, check=False, env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"}
        )
        if finished.returncode:
            print(f"{name} failed, exit code {finished.returncode}", file=sys.stderr)
            return None
        return [row_of(values) for values in json.loads(file.read_text())]


if __name__ == "__main__":
    sys.exit(main())
