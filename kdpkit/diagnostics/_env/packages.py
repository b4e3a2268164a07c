"""Which packages are installed and in which versions, read from their metadata, not imported."""

import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

BACKENDS = ("tensorflow", "jax")  # on which kdpkit trains
_OTHER_BACKENDS = ("torch", "numpy", "openvino")
_SHOWN = ("kdpkit", "numpy", "keras", "tensorflow", "tensorflow-text", "keras-hub", "jax", "jaxlib")
# Distributions, some of another name, that bring a package.
_DISTRIBUTIONS = {
    "keras": ("keras", "keras-nightly"),
    "keras-hub": ("keras-hub", "keras-hub-nightly"),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-rocm", "tf-nightly"),
}


def versions() -> dict[str, str]:
    """Return the version of Python and of each package that matters, where it is installed."""
    installed = {name: version(name) for name in _SHOWN}
    return {"python": platform.python_version()} | {name: v for name, v in installed.items() if v}


def version(package: str) -> str | None:
    """Return the installed version, also of a nightly release and its like."""
    for name in _DISTRIBUTIONS.get(package, (package,)):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def keras_backend() -> tuple[str, str]:
    """Return the backend that Keras has or would have if it were imported, and what chose it."""
    if "keras" in sys.modules:
        return str(sys.modules["keras"].config.backend()), "this program"
    home = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras").expanduser()
    try:
        in_file = json.loads((home / "keras.json").read_text(encoding="utf-8")).get("backend")
    except (OSError, ValueError, AttributeError):  # Keras ignores such a file too
        in_file = None
    chosen = {"KERAS_BACKEND": os.environ.get("KERAS_BACKEND"), "keras.json": in_file}
    for source, backend in chosen.items():
        if backend:
            return (backend if backend in (*BACKENDS, *_OTHER_BACKENDS) else "unknown"), source
    return "tensorflow", "default"


def install_hint(package: str) -> str:
    """Return a sentence with the command that installs a version that kdpkit works with.

    >>> install_hint("torch==2.9")
    'Run `python -m pip install "torch==2.9"`.'
    """
    return f'Run `python -m pip install "{package}{supported().get(package, "")}"`.'


def supported() -> dict[str, SpecifierSet]:
    """Return the versions of packages that kdpkit works with; nothing if it is not installed."""
    specifiers: dict[str, SpecifierSet] = {}
    for text in (importlib.metadata.requires("kdpkit") or []) if version("kdpkit") else []:
        requirement = Requirement(text)
        if requirement.name in _SHOWN and requirement.specifier:
            specifiers.setdefault(requirement.name, requirement.specifier)
    return specifiers
