"""Photograph TensorBoard: train a short while, open its curves in Chromium, and keep a picture.

    python -m tests.screenshots recipes/images/tensorboard.png

trains `recipes/cnn_custom_loop.py` with two replicas; `--log-dir DIRECTORY` photographs a run that
is there already. Chromium must be installed (Debian: `apt-get install chromium`), and no more.
"""

# ruff: noqa: T201 a command-line program prints

import argparse
import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request

import kdpkit

CHECKOUT = pathlib.Path(kdpkit.__file__).parent.parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
RECIPE = ("recipes/cnn_custom_loop.py", "--strategy", "mirrored", "--replicas", "2")
SHOWN = (
    *("epoch_loss", "epoch_accuracy", "epoch_learning_rate"),
    *("epoch_examples_per_second", "device/cpu_utilization", "device/memory_gib"),
)
SIZE = (1900, 1120)
SECONDS = 240  # for TensorBoard to start, and for a picture


def browser():
    """Return the path of a Chromium; leave with a sentence if there is none."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    return found or sys.exit("No Chromium is installed. On Debian: `apt-get install chromium`.")


def train(log_dir):
    """Run the recipe."""
    subprocess.run(
        [sys.executable, *RECIPE, "--log-dir", log_dir],
        cwd=CHECKOUT,
        env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
        check=True,
    )


@contextlib.contextmanager
def tensorboard(log_dir):
    """Serve a directory, and return the address at which it has been read."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(log_dir)]
    with tempfile.TemporaryFile("w+") as printed:
        board = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", "0"], stdout=printed, stderr=printed
        )
        try:
            yield _address(board, printed)
        finally:
            board.send_signal(signal.SIGTERM)
            board.wait()


def _address(board, printed):
    end = time.monotonic() + SECONDS
    while board.poll() is None and time.monotonic() < end:
        printed.seek(0)
        address = re.search(r"http://127\.0\.0\.1:\d+/", printed.read())
        if address and _runs(address[0]):
            return address[0]
        time.sleep(0.5)
    printed.seek(0)
    raise RuntimeError(f"TensorBoard shows no run. Its output: {printed.read()}")


def _runs(address):
    with urllib.request.urlopen(f"{address}data/runs", timeout=SECONDS) as answer:
        return json.load(answer)


def photograph(page, picture, size=SIZE):
    """Keep a picture of a page, when all that it loads is there."""
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                *(browser(), "--headless", "--no-sandbox", "--hide-scrollbars"),
                "--disable-3d-apis",  # curves as SVG; by WebGL some are drawn after the picture
                "--virtual-time-budget=20000",
                f"--user-data-dir={profile}",
                f"--window-size={size[0]},{size[1]}",
                f"--screenshot={picture}",
                page,
            ],
            capture_output=True,
            timeout=SECONDS,
            check=True,
        )
    if not pathlib.Path(picture).is_file():
        raise RuntimeError(f"{browser()} made no picture.")


def curves(address, tags=SHOWN):
    """Return the page of the curves, with some of them side by side at its top."""
    pinned = json.dumps([{"plugin": "scalars", "tag": tag} for tag in tags])
    return f"{address}?{urllib.parse.urlencode({'smoothing': 0, 'pinnedCards': pinned})}#timeseries"


def main(argv=None):
    """Train, serve and photograph."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("picture", type=pathlib.Path, help="the .png file to write")
    parser.add_argument("--log-dir", help="a run that is there already (default: train one)")
    args = parser.parse_args(argv)
    browser()
    with tempfile.TemporaryDirectory() as directory:
        if args.log_dir is None:
            train(directory)
        with tensorboard(args.log_dir or directory) as address:
            photograph(curves(address), args.picture.resolve())
    print(f"{args.picture}: {args.picture.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
