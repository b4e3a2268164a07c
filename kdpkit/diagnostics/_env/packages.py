"""Which packages are installed and in which versions, read from their metadata, not imported."""

import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path

from packaging.requirements import Requirement

TITLES = {"tensorflow": "TensorFlow", "jax": "JAX"}  # of the backends, as they write themselves
_OTHER_BACKENDS = ("torch", "numpy", "openvino")
_MAIN = ("kdpkit", "numpy", "keras", "tensorflow", "tensorflow-text", "keras-hub", "jax", "jaxlib")
_OWN_USE = ("test", "all")  # extras for kdpkit's own development
# Distributions of another name that bring the package `tensorflow`.
_TENSORFLOWS = (
    "tensorflow",
    "tensorflow-cpu",
    "tensorflow-tpu",
    "tensorflow-rocm",
    "tensorflow-macos",
    "tf-nightly",
)


def versions() -> dict[str, str | None]:
    """Return the version of Python and of each package that matters; None where it is missing."""
    names = [*_MAIN, *sorted({*wanted()} - {*_MAIN}), *installed_tensorflows()]
    return {"python": platform.python_version()} | {name: version(name) for name in names}


def version(package: str) -> str | None:
    """Return the installed version, of TensorFlow that of any of its distributions."""
    names = _TENSORFLOWS if package == "tensorflow" else (package,)
    return next((found for name in names if (found := _version(name))), None)


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
            return (backend if backend in (*TITLES, *_OTHER_BACKENDS) else "unknown"), source
    return "tensorflow", "default"


def install_command(requirement: str) -> str:
    """Return the command that installs something, for any shell.

    >>> print(install_command("jax>=0.7.2"))
    python -m pip install "jax>=0.7.2"
    """
    return f'python -m pip install "{requirement}"'


def install_hint(package: str) -> str:
    """Return a sentence that says how to install a package in the version that kdpkit wants."""
    return f"Run `{install_command(wanted().get(package, package))}`."


def installed_tensorflows() -> tuple[str, ...]:
    """Return the distributions that bring the package `tensorflow`."""
    return tuple(name for name in _TENSORFLOWS if _version(name))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def wanted() -> dict[str, str]:
    """Return what kdpkit and its extras for users ask for; nothing if it is not installed."""
    if not _version("kdpkit"):
        return {}
    extras = importlib.metadata.metadata("kdpkit").get_all("Provides-Extra") or []
    names = ["", *(extra for extra in extras if extra not in _OWN_USE)]
    return {
        requirement.name: f"{requirement.name}{requirement.specifier}"
        for requirement in map(Requirement, importlib.metadata.requires("kdpkit") or [])
        if requirement.name != "kdpkit"
        and (
            requirement.marker is None
            or any(requirement.marker.evaluate({"extra": name}) for name in names)
        )
    }
