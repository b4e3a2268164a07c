"""`environment`: what this machine and this Python offer for training."""

import dataclasses
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from kdpkit._internal import check_results, checks, machine
from kdpkit._internal.check_results import Finding
from kdpkit.diagnostics._env import packages, strategy_trials

# Asking must not take the memory of a GPU that somebody trains on.
_WHEN_ASKED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "3"}


@dataclasses.dataclass(frozen=True)
class Environment:
    """What `environment` found; it prints in 80 columns.

    Attributes:
        machine: Its system, processor, memory, GPUs and TPU chips.
        versions: Of Python and of packages, where they are installed.
        backend: Keras' backend, and what chose it.
        devices: Those of TensorFlow and JAX, or why there are none.
        strategies: Each strategy that was tried: the result, `"works"`, `"cannot"` (not as it is
            installed), `"failed"` or `"timed out"`, and its devices, or what is wrong.
        findings: What prevents or slows training, the worst first.
    """

    machine: dict[str, str]
    versions: dict[str, str]
    backend: str
    devices: dict[str, str]
    strategies: dict[str, tuple[str, str]]
    findings: tuple[Finding, ...]

    @property
    def clean(self) -> bool:
        """Whether there are only notes, and every strategy that was tried works or cannot."""
        trials = all(result in strategy_trials.HARMLESS for result, _ in self.strategies.values())
        return trials and check_results.are_notes(self.findings)

    def __str__(self) -> str:
        """Return lines of at most 80 columns, unless a word is longer."""
        installed = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        sections: dict[str, Mapping[str, str]] = {
            "Machine": self.machine,
            "Versions": {"installed": installed, "backend": self.backend},
            "Devices": self.devices,
        }
        if self.strategies:
            sections["Strategies"] = {n: ": ".join(trial) for n, trial in self.strategies.items()}
        texts = ["\n".join([title, *map(_row, rows.items())]) for title, rows in sections.items()]
        return "\n\n".join([*texts, *map(str, self.findings)])


def _row(row: tuple[str, str]) -> str:
    name, text = row
    begin = f"  {name:<16}  "
    return check_results.wrapped(text, first=begin, indent=20).rstrip() or begin.rstrip()


def environment(
    *,
    try_strategies: bool = False,
    timeout_seconds: float = 120.0,
    on_start: Callable[[str], None] = lambda _: None,
) -> Environment:
    """Report what this machine and this Python offer for training, and what is wrong with them.

    Versions are read from the packages' metadata. TensorFlow and JAX count their devices in
    processes of their own: one that is broken or hangs is reported, and this process loads neither.
    The report names no machine and no user; what a framework raised may name directories.

    With `try_strategies` two steps are trained with each strategy, in processes of its own: on
    TensorFlow all GPUs (two logical CPUs where there are no two GPUs), two processes, a parameter
    server; on JAX all devices. A strategy works if the weights are those of one device, to `1e-5`
    of their change.

    Args:
        try_strategies: Whether to train with every strategy, which takes seconds for each.
        timeout_seconds: How long TensorFlow and JAX may take to answer, and each strategy to train.
        on_start: Called with the name of each strategy before it is tried.

    Raises:
        ValueError: A limit that is not positive.
    """
    timeout_seconds = checks.number("timeout_seconds", timeout_seconds, above=0)
    gpus, versions = _gpus(), packages.versions()
    devices: dict[str, str] = {}
    counts: dict[str, dict[str, int]] = {}
    broken: dict[str, str] = {}
    for name in packages.BACKENDS:
        if name not in versions:
            devices[name] = f"not installed. {packages.install_hint(name)}"
            continue
        words = [strategy_trials.CHILD, f"devices-of-{name}"]
        result, report = strategy_trials.run(words, _WHEN_ASKED, timeout_seconds)
        if result == strategy_trials.WORKS:
            counts[name] = report
            devices[name] = ", ".join(f"{kind}: {count}" for kind, count in report.items())
        else:
            broken[name] = report
            devices[name] = f"does not start: {report}"
    trials = strategy_trials.run_all(counts, timeout_seconds, on_start) if try_strategies else ()
    backend, source = packages.keras_backend()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Environment(
        machine={
            "system": f"{platform.system()}, {platform.machine()}",
            "processor": f"{processor()}, {machine.cores()} cores",
            "memory": f"{memory / 2**30:.1f} GiB",
            "GPU": gpus or "none that NVML finds (package nvidia-ml-py)",
            "TPU chips": str(machine.chips()),
        },
        versions=versions,
        backend=f"{backend} (chosen by {source})",
        devices=devices,
        strategies=dict(trials),
        findings=check_results.in_order(findings(backend, counts, broken, has_gpu=bool(gpus))),
    )


def findings(
    backend: str,
    devices: Mapping[str, Mapping[str, int]],
    broken: Mapping[str, str],
    *,
    has_gpu: bool,
) -> Iterator[Finding]:
    """Yield what prevents training, or leaves a GPU unused: there may be one that nothing sees."""
    for package, versions in packages.supported().items():
        installed = packages.version(package)
        if installed and not versions.contains(installed, prereleases=True):
            problem = f"Version {installed} is installed, and kdpkit was tested with {versions}."
            yield Finding("version", "wrong", package, problem, packages.install_hint(package))
    if backend not in packages.BACKENDS:
        problem = "kdpkit does not train on this backend of Keras."
        remedy = "Set KERAS_BACKEND=tensorflow or KERAS_BACKEND=jax."
        yield Finding("backend", "error", backend, problem, remedy)
    elif not packages.version(backend):
        problem = "It is Keras' backend, and is not installed."
        yield Finding("backend", "error", backend, problem, packages.install_hint(backend))
    for name, reason in broken.items():
        remedy = f'Run `python -c "import {name}"` to see the complete error.'
        yield Finding("does-not-start", "error", name, f"It does not start: {reason}", remedy)
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    for name, kinds in devices.items():
        if has_gpu and not is_hidden and not {"GPU", "CUDA"} & kinds.keys():
            problem = (
                "It does not use the GPU: it is for the CPU, or does not find CUDA's libraries."
            )
            extra = "and-cuda" if name == "tensorflow" else "cuda12"
            remedy = packages.install_hint(f"{name}[{extra}]=={packages.version(name)}")
            yield Finding("unused-gpu", "slow", name, problem, remedy)


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _gpus() -> str:
    """Name NVIDIA's GPUs and their driver, also of those that CUDA_VISIBLE_DEVICES hides."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except Exception:  # it is not installed, or there is no driver
        return ""
    handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
    names = ", ".join(map(nvml.nvmlDeviceGetName, handles))
    return f"{names}; driver {nvml.nvmlSystemGetDriverVersion()}" if names else ""
