"""The table of a run, from the files of its parts."""

import datetime
import importlib.metadata
import json
import pathlib

from tools.benchmarks.paired import row_of, table

_PACKAGES = ("jax", "jaxlib", "keras", "keras-hub", "numpy", "torch", "transformers")


def markdown(directory: pathlib.Path) -> str:
    """Return the device, the versions, the table, and what is missing."""
    files = sorted(directory.glob("*.json"), key=lambda file: file.stat().st_ctime)
    parts = [json.loads(file.read_text()) for file in files]
    rows = [row_of(values) for part in parts for values in part["rows"]]
    missing = [f"- {sentence}" for part in parts for sentence in part["missing"]]
    devices = {f"{part['device']['count']} x {part['device']['kind']}" for part in parts}
    head = f"{', '.join(sorted(devices))}; {versions()}; {datetime.date.today()}."
    return "\n\n".join([head, table(rows), *(["\n".join(missing)] if missing else [])]) + "\n"


def versions() -> str:
    """Return the packages that matter, with their versions."""
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)
