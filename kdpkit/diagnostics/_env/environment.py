"""`environment`: what this machine and this Python offer for training."""

import contextlib
import dataclasses
import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kdpkit._internal import check_results, checks, machine
from kdpkit._internal.check_results import Finding
from kdpkit.diagnostics._env import children, packages, rules, strategy_trials

# Asking must not take the memory of a GPU that somebody trains on.
_WHEN_ASKED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "3"}
_CPU_FILE = Path("/proc/cpuinfo")


@dataclasses.dataclass(frozen=True)
class Environment:
    """What `environment` found; it prints in 80 columns.

    Attributes:
        machine: Its system, processor, memory, GPUs and TPU chips.
        versions: Of Python and of packages, where they are installed.
        backend: Keras' backend, and what chose it.
        devices: Those of TensorFlow and JAX, or why there are none.
        strategies: What came of two training steps with each strategy, if they were tried: the
            result, `"works"`, `"cannot"` (not as it is installed), `"failed"` or `"timed out"`, and
            the replicas and their devices, or what is wrong.
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
        trials = all(result in children.HARMLESS for result, _ in self.strategies.values())
        return trials and check_results.are_notes(self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, for JSON."""
        return {"clean": self.clean} | dataclasses.asdict(self)

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
    start_frameworks: bool = True,
    try_strategies: bool = False,
    timeout_seconds: float = 120.0,
    on_start: Callable[[str], None] = lambda _: None,
) -> Environment:
    """Report what this machine and this Python offer for training, and what is wrong with them.

    Versions are read from the packages' metadata. TensorFlow and JAX are started in processes of
    their own, to count their devices: one that is broken or hangs is reported like all else, and
    this process loads neither. The report holds no path, and no name of a machine or user, so that
    it can be shown to anyone.

    With `try_strategies` two steps are trained with each strategy, in processes of its own, and
    compared with one device's: on TensorFlow all GPUs (two logical CPUs where there are no two
    GPUs), two processes, a parameter server; on JAX all devices. Both steps are in one compiled
    loop; on TensorFlow the second batch leaves replicas without examples. A strategy works if the
    weights are those of one device, to `1e-5` of their change.

    Args:
        start_frameworks: Whether to start TensorFlow and JAX. Without it their devices are not
            known.
        try_strategies: Whether to train with every strategy, which takes seconds for each.
        timeout_seconds: How long TensorFlow and JAX may take to answer, and each strategy to train.
        on_start: Called with the name of each strategy before it is tried.

    Raises:
        ValueError: A limit that is not positive; strategies to be tried without the frameworks.

    >>> found = environment(start_frameworks=False)
    >>> "keras" in found.versions, found.devices["jax"]
    (True, 'not started')
    """
    timeout_seconds = checks.number("timeout_seconds", timeout_seconds, above=0)
    if try_strategies and not start_frameworks:
        checks.fail(
            "Strategies are not tried without starting TensorFlow and JAX.",
            start_frameworks=start_frameworks,
            try_strategies=try_strategies,
        )
    gpus = _gpus()
    versions = packages.versions()
    devices = dict.fromkeys(packages.BACKENDS, "not started")
    counted: dict[str, dict[str, int]] = {}
    broken: dict[str, str] = {}
    for name in packages.BACKENDS:
        if name not in versions:
            devices[name] = f"not installed. {packages.install_hint(name)}"
        elif start_frameworks:
            words = [strategy_trials.CHILD, f"devices-of-{name}"]
            result, found = children.run(words, _WHEN_ASKED, timeout_seconds)
            if result == children.WORKS:
                counted[name] = found
                devices[name] = ", ".join(f"{kind}: {count}" for kind, count in found.items())
            else:
                broken[name] = found
                devices[name] = f"does not start: {found}"
    trials = {}
    if try_strategies:
        trials = dict(strategy_trials.run_all(counted, timeout_seconds, on_start))
    backend, source = packages.keras_backend()
    known = rules.Known(os.environ, machine.cores(), bool(gpus), counted, broken, backend)
    return Environment(
        machine=_machine(gpus),
        versions=versions,
        backend=f"{backend} (chosen by {source})",
        devices=devices,
        strategies=trials,
        findings=check_results.found(rules.RULES, known),
    )


def _machine(gpus: str) -> dict[str, str]:
    """Return what there is, without a framework."""
    memory = "not known"
    with contextlib.suppress(AttributeError, ValueError):  # Windows has no `sysconf`
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        memory = f"{size / 2**30:.1f} GiB"
    return {
        "system": f"{platform.system()}, {platform.machine()}",
        "processor": f"{processor()}, {machine.cores()} cores",
        "memory": memory,
        "GPU": gpus or "none that NVML finds (package nvidia-ml-py)",
        "TPU": machine.counted(machine.chips()),
    }


def processor() -> str:
    """Return the processor's name."""
    lines = _CPU_FILE.read_text(errors="replace").splitlines() if _CPU_FILE.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


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
