"""Rules on a machine and its Python: functions from what is known to findings, all in `RULES`."""

import dataclasses
import platform
import re
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from kdpkit.diagnostics._env import packages

_CPU_DEVICES = re.compile(r"--xla_force_host_platform_device_count=(\d{1,9})")

_Found: TypeAlias = Iterator[tuple[str, str, str, str]]  # level, where, problem, remedy


@dataclasses.dataclass(frozen=True)
class Known:
    """What is known.

    Attributes:
        environ: The environment's variables.
        cores: Those on which this process may run.
        has_gpu: Whether there is one, used or not.
        devices: Of TensorFlow and JAX, by kind, where they start.
        broken: Why they do not.
        backend: Keras' backend.
    """

    environ: Mapping[str, str]
    cores: int
    has_gpu: bool = False
    devices: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    broken: Mapping[str, str] = dataclasses.field(default_factory=dict)
    backend: str = "tensorflow"

    def integer(self, name: str) -> int:
        """Return a variable, 0 if it is no number."""
        value = self.environ.get(name, "")
        return int(value) if re.fullmatch(r"\d{1,9}", value) else 0


def _version(_: Known) -> _Found:
    for package, text in packages.wanted().items():
        installed, supported = packages.version(package), Requirement(text).specifier
        if installed and not supported.contains(installed, prereleases=True):
            if _is_newer(installed, supported):
                problem = f"Version {installed} is untested: kdpkit was tested with {text}."
                yield "note", package, problem, f"If it fails: {packages.install_hint(package)}"
            else:
                problem = f"Version {installed} is installed, and kdpkit works with {text}."
                yield "error", package, problem, packages.install_hint(package)


def _is_newer(installed: str, supported: SpecifierSet) -> bool:
    """Return whether only what is below an upper bound is supported, and this is above it."""
    others = [bound for bound in supported if not bound.operator.startswith("<")]
    return all(bound.contains(installed, prereleases=True) for bound in others)


def _python(_: Known) -> _Found:
    tested, running = packages.tested_pythons(), ".".join(platform.python_version_tuple()[:2])
    if tested and running not in tested:
        problem = f"Version {running} is untested: kdpkit was tested with {', '.join(tested)}."
        yield "note", "python", problem, f"If it fails: use Python {tested[-1]}."


def _device_threads(known: Known) -> _Found:
    wanted = _CPU_DEVICES.findall(known.environ.get("XLA_FLAGS", ""))
    devices = int(wanted[-1]) if wanted else 1
    threads = known.integer("PJRT_NPROC") or known.cores
    if devices > 1 and threads < 2 * devices:
        problem = (
            f"JAX has {devices} CPU devices and {threads} threads for them: with fewer than two "
            "for each, training can hang."
        )
        remedy = f"Set PJRT_NPROC={2 * devices}, or call `kdpkit.testing.use_logical_cpus`."
        yield "error", "XLA_FLAGS", problem, remedy


def _many_threads(known: Known) -> _Found:
    cores = known.cores
    for name in ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS"):
        if (threads := known.integer(name)) > cores:
            problem = f"{threads} threads share the {cores} cores that this process may use."
            yield "slow", name, problem, f"Leave {name} out, or set it to {cores}."


def _backend(known: Known) -> _Found:
    if known.backend not in packages.BACKENDS:
        problem = "kdpkit does not train on this backend of Keras."
        yield "error", known.backend, problem, "Set KERAS_BACKEND=tensorflow or KERAS_BACKEND=jax."
    elif not packages.version(known.backend):
        problem = "It is Keras' backend, and is not installed."
        yield "error", known.backend, problem, packages.install_hint(known.backend)


def _does_not_start(known: Known) -> _Found:
    for name, reason in known.broken.items():
        remedy = f'Run `python -c "import {name}"` to see the complete error.'
        yield "error", name, f"It does not start: {reason}", remedy


def _unused_gpu(known: Known) -> _Found:
    is_hidden = known.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    for name, devices in known.devices.items():
        if known.has_gpu and not is_hidden and not {"GPU", "CUDA"} & devices.keys():
            extra = "and-cuda" if name == "tensorflow" else "cuda12"
            problem = (
                "There is a GPU that it does not use: it was installed for the CPU, or does not "
                "find CUDA's libraries."
            )
            remedy = packages.install_hint(f"{name}[{extra}]=={packages.version(name)}")
            yield "slow", name, problem, remedy


RULES = {
    "version": _version,
    "python": _python,
    "device-threads": _device_threads,
    "many-threads": _many_threads,
    "backend": _backend,
    "does-not-start": _does_not_start,
    "unused-gpu": _unused_gpu,
}
