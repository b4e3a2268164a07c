"""Collects what a machine with JAX and PyTorch lacks, where it cannot download anything itself.

    python -m tools.accelerator.wheels wheels                # of Keras, KerasHub and what they need
    python -m tools.accelerator.wheels wheels --python 3.13 transformers==5.17.0

Copy the directory to the machine, and there:

    python -m pip install --no-index --no-deps --target site wheels/*.whl
    PYTHONPATH=site:. python -m tools.accelerator --out figures
"""

import argparse
import pathlib
import subprocess
import sys

NAMES = ("keras", "keras-hub", "namex", "optree", "rich", "nvidia-ml-py")
_MOST_MEGABYTES = 60
_GLIBC = (17, 27, 28, 34, 35)  # pip matches each version exactly


def main(argv: list[str] | None = None) -> int:
    """Download the wheels; return 1 if one cannot be had, or all are too large to be carried."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.accelerator.wheels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("packages", nargs="*", help=f"more than {', '.join(NAMES)}")
    parser.add_argument("--python", default="3.12", help="of that machine (default: %(default)s)")
    args = parser.parse_args(argv)
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in _GLIBC]
    finished = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
            *("--only-binary=:all:", f"--python-version={args.python}", "--implementation=cp"),
            *(*platforms, "--platform=manylinux2014_x86_64", f"--dest={args.directory}"),
            *(*NAMES, *args.packages),
        ],
        check=False,
    )
    if finished.returncode:
        print("The wheels could not be downloaded: pip says why above.", file=sys.stderr)
        return 1
    megabytes = sum(file.stat().st_size for file in args.directory.glob("*.whl")) / 1e6
    print(f"{args.directory}: {megabytes:.1f} MB")
    if megabytes > _MOST_MEGABYTES:
        print(f"That is more than {_MOST_MEGABYTES} MB; name fewer packages.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
