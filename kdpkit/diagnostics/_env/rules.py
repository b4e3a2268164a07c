"""Rules on a machine and its Python: functions from what is known to findings, all in `RULES`."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from packaging.requirements import Requirement

from kdpkit.diagnostics._env import machine, packages

_CPU_DEVICES = re.compile(r"--xla_force_host_platform_device_count=(\d{1,9})")
_TENSORFLOW_THREADS = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")

_Found: TypeAlias = Iterator[tuple[str, str, str, str]]  # level, where, problem, remedy


@dataclasses.dataclass(frozen=True)
class Framework:
    """What TensorFlow or JAX reported.

    Attributes:
        name: `"tensorflow"` or `"jax"`.
        version: None if it is not installed.
        devices: By kind, `{"CPU": 1, "GPU": 2}`; None if it was not asked, or does not start.
        is_built_with_cuda: As TensorFlow reports; None for JAX.
        problem: Why it does not start.
    """

    name: str
    version: str | None
    devices: dict[str, int] | None = None
    is_built_with_cuda: bool | None = None
    problem: str | None = None

    def __str__(self) -> str:
        """Return its devices in a line, or why it has none."""
        if self.version is None:
            return f"not installed. {packages.install_hint(self.name)}"
        if self.problem:
            return f"does not start: {self.problem}"
        if self.devices is None:
            return "not started"
        return ", ".join(f"{kind}: {count}" for kind, count in self.devices.items())


@dataclasses.dataclass(frozen=True)
class Known:
    """What is known: the environment's variables, the hardware, TensorFlow and JAX, the backend."""

    environ: Mapping[str, str]
    machine: machine.Machine
    frameworks: tuple[Framework, ...] = ()
    backend: str = "tensorflow"
    backend_source: str = "default"

    @property
    def hides_gpus(self) -> bool:
        """Whether the variables hide all GPUs from programs."""
        return self.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")

    def integer(self, name: str) -> int:
        """Return a variable, 0 if it is no number."""
        value = self.environ.get(name, "")
        return int(value) if re.fullmatch(r"\d{1,9}", value) else 0


def _version(is_newer: bool) -> _Found:
    for package, text in packages.wanted().items():
        installed, supported = packages.version(package), Requirement(text).specifier
        if installed and not supported.contains(installed, prereleases=True):
            upper = [bound for bound in supported if bound.operator == "<"]
            if any(not bound.contains(installed) for bound in upper) == is_newer:
                problem = f"Version {installed} is installed, and kdpkit works with {text}."
                yield "error", package, problem, f"Run `{packages.install_command(text)}`."


def _old_version(_: Known) -> _Found:
    return _version(is_newer=False)


def _untested_version(_: Known) -> _Found:
    return _version(is_newer=True)


def _two_tensorflows(_: Known) -> _Found:
    installed = packages.installed_tensorflows()
    if len(installed) > 1:
        problem = f"Several distributions overwrite each other's files: {', '.join(installed)}."
        yield "error", "tensorflow", problem, "Uninstall all of them, then install one."


def _hidden_gpus(known: Known) -> _Found:
    count = len(known.machine.gpus)
    if count and known.hides_gpus:
        problem = f"It hides {count} GPU{'s' * (count > 1)}."
        yield "note", "CUDA_VISIBLE_DEVICES", problem, "Leave it out to train on them."


def _device_threads(known: Known) -> _Found:
    wanted = _CPU_DEVICES.findall(known.environ.get("XLA_FLAGS", ""))
    devices = int(wanted[-1]) if wanted else 1
    threads = known.integer("PJRT_NPROC") or known.machine.cores
    if devices > 1 and threads < 2 * devices:
        problem = (
            f"JAX has {devices} CPU devices and {threads} threads for them: with fewer than two "
            "for each, training can hang."
        )
        remedy = f"Set PJRT_NPROC={2 * devices}, or call `kdpkit.testing.use_logical_cpus`."
        yield "error", "XLA_FLAGS", problem, remedy


def _many_threads(known: Known) -> _Found:
    cores = known.machine.cores
    for name in ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS"):
        if known.integer(name) > cores:
            problem = (
                f"{known.integer(name)} threads share the {cores} cores that this process may use."
            )
            yield "slow", name, problem, f"Leave {name} out, or set it to {cores}."


def _container_share(known: Known) -> _Found:
    limit, cores = known.machine.cores_limit, known.machine.cores
    is_chosen = all(map(known.integer, _TENSORFLOW_THREADS))
    if limit is not None and cores >= 2 * limit and not is_chosen:
        settings = ", ".join(f"{name}={max(1, round(limit))}" for name in _TENSORFLOW_THREADS)
        problem = (
            f"The container may use the time of {limit:g} cores, and TensorFlow and JAX start a "
            f"thread for each of the {cores} that they see: all wait when the time is used up."
        )
        remedy = f"Set {settings}, or assign cores to the container (a cpuset)."
        yield "slow", "threads", problem, remedy


def _backend(known: Known) -> _Found:
    backend, chosen = known.backend, f"(chosen by {known.backend_source})"
    if backend not in packages.TITLES:
        problem = f"kdpkit does not train on this backend of Keras {chosen}."
        yield "error", backend, problem, "Set KERAS_BACKEND=tensorflow or KERAS_BACKEND=jax."
    elif not packages.version(backend):
        (other,) = {*packages.TITLES} - {backend}
        instead = f" Or set KERAS_BACKEND={other}." if packages.version(other) else ""
        problem = f"It is Keras' backend {chosen}, and is not installed."
        yield "error", backend, problem, f"{packages.install_hint(backend)}{instead}"


def _does_not_start(known: Known) -> _Found:
    for each in known.frameworks:
        if each.problem:
            problem = f"{packages.TITLES[each.name]} {each.version} does not start: {each.problem}"
            remedy = f'Run `python -c "import {each.name}"` to see the complete error.'
            yield "error", each.name, problem, remedy


def _unused_gpu(known: Known) -> _Found:
    found = {each.name: each for each in known.frameworks if each.devices is not None}
    if not known.machine.gpus or known.hides_gpus:
        return
    tensorflow, jax = found.get("tensorflow"), found.get("jax")
    if tensorflow and "GPU" not in (tensorflow.devices or ()):
        problem = "There is a GPU, and this TensorFlow was built without CUDA."
        if tensorflow.is_built_with_cuda:
            problem = (
                "There is a GPU, and TensorFlow does not find CUDA's libraries, or not its own."
            )
        command = packages.install_command(f"tensorflow[and-cuda]=={tensorflow.version}")
        yield "slow", "tensorflow", problem, f"Run `{command}`."
    platforms = known.environ.get("JAX_PLATFORMS", "")
    is_wanted = not platforms or re.search("gpu|cuda", platforms)
    if jax and is_wanted and not {"GPU", "CUDA"} & {*(jax.devices or ())}:
        extra = "cuda13" if (known.machine.cuda_of_driver or "").startswith("13") else "cuda12"
        problem = "There is a GPU, and JAX was installed for the CPU alone, or cannot start it."
        command = packages.install_command(f"jax[{extra}]=={jax.version}")
        yield "slow", "jax", problem, f"Run `{command}`."


RULES = {
    rule.__name__[1:].replace("_", "-"): rule
    for rule in (
        *(_old_version, _untested_version, _two_tensorflows, _hidden_gpus, _device_threads),
        *(_many_threads, _container_share, _backend, _does_not_start, _unused_gpu),
    )
}
