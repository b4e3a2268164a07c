"""Correctness, speed and memory on a machine with a GPU or TPU, with JAX and without TensorFlow.

    python -m tools.accelerator --out figures               # half an hour, most of it compiling
    python -m tools.accelerator --out figures gpt2 memory   # these parts
    python -m tools.accelerator --out rehearsal --rehearse  # on a CPU, at tiny sizes

It needs a checkout, JAX, Keras and KerasHub; PyTorch, torchvision and transformers take part where
they are installed. Each part is a process with a time limit, and its figures are in a file of their
own as soon as they are known, the ones worth most first. `summary.md` is the table of
docs/benchmarks.md.
"""

import argparse
import contextlib
import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

from tools.accelerator import device
from tools.accelerator.results import Results
from tools.accelerator.summary import markdown

# In the order of their worth, with the seconds that each may take: twice what an H100 took, or, of
# the first four, is expected to take.
PARTS = {
    "gpt2": 600,
    "slow_steps": 240,
    "profile": 240,
    "gpt2_long": 300,
    "correct": 150,
    "bert": 240,
    "resnet": 300,
    "memory": 480,
    "watching": 210,
}
WORKLOADS = ("gpt2", "gpt2_long", "bert", "resnet")
_SOON_COMPILED = (
    "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true"
)
_LEAST_GIB = 8
_SLOWER = 5  # two cores prepare the contestants that sixteen do
_ENVIRONMENT = {
    "KERAS_BACKEND": "jax",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # several processes share the device
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",  # contestants share what is the same
}


def parser() -> argparse.ArgumentParser:
    """Name where the figures go, and which parts are run."""
    found = argparse.ArgumentParser(
        prog="python -m tools.accelerator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    add("--out", type=pathlib.Path, required=True, metavar="DIRECTORY", help="a new directory")
    add("--rehearse", action="store_true", help="on a CPU, at tiny sizes")
    add("--rounds", type=int, default=5, help="of the contestants (default: %(default)s)")
    add("--child", type=pathlib.Path, help=argparse.SUPPRESS)  # the file that a part writes
    return found


def checked(argv: list[str] | None) -> argparse.Namespace:
    """Read the arguments, and reject what cannot be run before anything is measured."""
    found = parser()
    args = found.parse_args(argv)
    if unknown := [part for part in args.parts if part not in PARTS]:
        found.error(f"there is no part {unknown[0]!r}, choose from {', '.join(PARTS)}")
    if args.rounds < 1:
        found.error(f"--rounds must be at least 1. Received: {args.rounds}")
    if not args.child and args.out.exists() and (args.out.is_file() or any(args.out.iterdir())):
        found.error(f"--out must be a new directory, and has files already: {args.out}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the parts, and write and print the table; return 1 if anything failed or missed a goal.

    Ctrl-C ends it with the table of what has been measured, and 130.
    """
    args = checked(argv)
    if args.child:
        return run(args)
    os.environ.update(_ENVIRONMENT)
    if args.rehearse:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["XLA_FLAGS"] = _SOON_COMPILED
    if (problem := unfit(args)) is not None:
        print(f"python -m tools.accelerator: {problem}", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    codes = []
    with tempfile.TemporaryDirectory() as compiled:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled
        try:
            codes.extend(finished(part, args) for part in args.parts or PARTS)
        except KeyboardInterrupt:
            print("interrupted.", file=sys.stderr)
            codes.append(130)
    table = markdown(args.out)
    (args.out / "summary.md").write_text(table)
    print(table)
    return max(codes)


def unfit(args: argparse.Namespace) -> str | None:
    """Return why this machine is not one to measure on; None if it is."""
    try:
        found = device.look()
    except subprocess.CalledProcessError as error:
        return f"JAX does not start: {error.stderr.strip().splitlines()[-1]}"
    if args.rehearse:
        return None
    if found.platform == "cpu":
        return "JAX sees no GPU or TPU here. With --rehearse it runs on a CPU, at tiny sizes."
    if 0 < found.gib < _LEAST_GIB:
        return f"the device must have {_LEAST_GIB} GiB for the models. It has {found.gib:.1f}."
    return None


def finished(part: str, args: argparse.Namespace) -> int:
    """Run a part in its own process and its own time; return 0 if it came to its end."""
    file = args.out / f"{part}.json"
    flags = [f"--out={args.out}", f"--child={file}", f"--rounds={args.rounds}"]
    flags += ["--rehearse"] if args.rehearse else []
    command = [sys.executable, "-m", "tools.accelerator", part, *flags]
    limit = PARTS[part] * (_SLOWER if args.rehearse else 1)
    start = time.monotonic()
    print(f"{part} ...", file=sys.stderr, flush=True)
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait(timeout=limit)
        if code:
            print(f"{part} ended with exit code {code}.", file=sys.stderr)
    except subprocess.TimeoutExpired:
        print(f"{part} took more than {limit} s, and was ended.", file=sys.stderr)
        code = 1
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it has started
        process.wait()
    print(f"{part}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return int(code != 0)


def run(args: argparse.Namespace) -> int:
    """Run a part in this process; return 1 if something is missing or misses its goal."""
    (part,) = args.parts
    about = device.current()._asdict()
    results = Results(args.child, part=part, rehearsal=args.rehearse, device=about)
    module = importlib.import_module(f"tools.accelerator.{part}")
    if part in WORKLOADS:
        from tools.accelerator import speed

        speed.measure(module, results, rehearse=args.rehearse, rounds=args.rounds)
    else:
        module.measure(results, rehearse=args.rehearse)
    rows = json.loads(args.child.read_text())["rows"]
    return int(any(row["is_met"] is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
