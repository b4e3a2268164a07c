"""`environment`: what this machine and this Python offer for training."""

import contextlib
import dataclasses
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kdpkit._internal import check_results, checks
from kdpkit._internal.check_results import Finding
from kdpkit.diagnostics._env import child_program, machine, packages, rules, strategy_trials
from kdpkit.diagnostics._env.machine import Machine

# Variables that choose threads and devices. Only what is known to be harmless is shown of their
# values, numbers and the usual words; the rest may be a path or a secret.
_NAMES = (
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
    "TF_GPU_THREAD_MODE",
    "TF_ENABLE_ONEDNN_OPTS",
    "TF_FORCE_GPU_ALLOW_GROWTH",
    "TF_XLA_FLAGS",
    "XLA_FLAGS",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "JAX_PLATFORMS",
    "JAX_ENABLE_X64",
    "PJRT_NPROC",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
)
_VALUE = r"(-?\d+(\.\d+)?|true|false|on|off|cpu|gpu|cuda|rocm|tpu|gpu_private|gpu_shared|global)"
_HARMLESS = re.compile(rf"(--(xla|tf)_\w+=)?{_VALUE}(,{_VALUE})*", re.IGNORECASE)
# Asking must not take the memory of a GPU that somebody trains on.
_WHEN_ASKED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "3"}


@dataclasses.dataclass(frozen=True)
class Environment:
    """What `environment` found; it prints in 80 columns.

    Attributes:
        system: The operating system and the kind of processor.
        versions: Of Python and of packages; None for one that is missing.
        backend: Keras' backend.
        backend_source: What chose it: `"KERAS_BACKEND"`, `"keras.json"`, `"default"`, or
            `"this program"` where Keras is loaded.
        machine: Processor, memory, GPUs, TPU chips.
        frameworks: TensorFlow and JAX, and their devices.
        settings: The variables that are set for threads and devices, as far as they may be shown.
        strategies: What came of two training steps with each strategy, if they were tried.
        findings: What prevents or slows training, the worst first.
    """

    system: str
    versions: dict[str, str | None]
    backend: str
    backend_source: str
    machine: Machine
    frameworks: tuple[rules.Framework, ...]
    settings: dict[str, str]
    findings: tuple[Finding, ...]
    strategies: tuple[strategy_trials.StrategyTrial, ...] = ()

    @property
    def clean(self) -> bool:
        """Whether there are only notes, and every strategy that was tried works or cannot."""
        trials = all(trial.works_or_cannot for trial in self.strategies)
        return trials and check_results.are_notes(self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, for JSON."""
        return {"clean": self.clean} | dataclasses.asdict(self)

    def __str__(self) -> str:
        """Return lines of at most 80 columns, unless a word is longer."""
        sections = {
            "Machine": self._of_machine(),
            "Versions": self._of_versions(),
            "Devices": ((packages.TITLES[each.name], str(each)) for each in self.frameworks),
            "Settings": self.settings.items() or [("none is set", "")],
        }
        if self.strategies:
            sections["Strategies"] = ((trial.name, str(trial)) for trial in self.strategies)
        texts = ["\n".join([title, *map(_row, rows)]) for title, rows in sections.items()]
        return "\n\n".join([*texts, *map(str, self.findings)])

    def _of_machine(self) -> Iterator[tuple[str, str]]:
        machine = self.machine
        limit = machine.cores_limit
        share = "" if limit is None else f" (the container may use the time of {limit:g})"
        yield "system", self.system
        yield "processor", machine.cpu
        yield "cores", f"{machine.cores} of {machine.cores_present}{share}"
        yield "memory", f"{machine.memory_gib} GiB" if machine.memory_gib else "not known"
        for gpu in machine.gpus:
            memory = f"{gpu.memory_gib} GiB" if gpu.memory_gib else "memory not known"
            capability = gpu.compute_capability or "not known"
            yield "GPU", f"{gpu.name}, {memory}, compute capability {capability}"
        if machine.gpus:
            yield "", f"driver {machine.gpu_driver}, for CUDA up to {machine.cuda_of_driver}"
        else:
            yield "GPU", "none that NVML finds (package nvidia-ml-py)"
        yield "TPU", f"chips: {machine.tpu_chips}" if machine.tpu_chips else "none"

    def _of_versions(self) -> Iterator[tuple[str, str]]:
        installed = [f"{name} {version}" for name, version in self.versions.items() if version]
        missing = [name for name, version in self.versions.items() if not version]
        yield "installed", ", ".join(installed)
        yield "missing", ", ".join(missing) or "none"
        yield "backend", f"{self.backend} (chosen by {self.backend_source})"


def environment(
    *,
    start_frameworks: bool = True,
    try_strategies: bool = False,
    timeout_seconds: float = 120.0,
    on_start: Callable[[str], None] = lambda _: None,
) -> Environment:
    """Report what this machine and this Python offer for training, and what is wrong with them.

    Versions are read from the packages' metadata. TensorFlow and JAX are started at the same time,
    each in a process of its own, to count their devices: one that is broken or hangs is reported
    like all else, and this process loads neither. The report holds no path, no name of a machine or
    user, and of variables only numbers and known words, so that it can be shown to anyone.

    With `try_strategies` two steps are trained with each strategy, in processes of its own: on
    TensorFlow one device, all GPUs (two logical CPUs where there are no two GPUs), two processes, a
    parameter server, a TPU if there is one; on JAX all devices. Both steps are in one compiled
    loop; on TensorFlow the second batch leaves replicas without examples. A strategy works if the
    weights are those of one device, to `1e-5` of their change (`1e-2` on a TPU of TensorFlow, which
    computes in bfloat16). `"numbers"` compares what the first device draws with what the CPU draws,
    and its float32 with float64: docs/explanation/tensorflow_on_gpus.md.

    Findings are what cannot work or wastes time: a package with which kdpkit does not work; a GPU
    that the framework cannot use, and why; a backend that is not installed; more threads than
    cores, or than the container's share of them.

    Args:
        start_frameworks: Whether to start TensorFlow and JAX. Without it their devices are not
            known.
        try_strategies: Whether to train with every strategy, which takes seconds for each.
        timeout_seconds: How long TensorFlow and JAX may take to answer, and each strategy to train.
        on_start: Called with the name of each strategy before it is tried.

    Raises:
        ValueError: A limit that is not positive; strategies to be tried without the frameworks.

    >>> found = environment(start_frameworks=False)
    >>> found.versions["keras"] is not None, found.machine.cores > 0
    (True, True)
    """
    timeout_seconds = checks.number("timeout_seconds", timeout_seconds, above=0)
    if try_strategies and not start_frameworks:
        checks.fail(
            "Strategies are not tried without starting TensorFlow and JAX.",
            start_frameworks=start_frameworks,
            try_strategies=try_strategies,
        )
    hardware = machine.look()
    frameworks = tuple(rules.Framework(name, packages.version(name)) for name in packages.TITLES)
    if start_frameworks:
        frameworks = _started(frameworks, timeout_seconds)
    devices = {each.name: each.devices for each in frameworks if each.devices}
    trials = try_strategies and strategy_trials.run_all(devices, timeout_seconds, on_start)
    backend, source = packages.keras_backend()
    known = rules.Known(os.environ, hardware, frameworks, backend, source)
    return Environment(
        system=f"{platform.system()}, {platform.machine()}",
        versions=packages.versions(),
        backend=backend,
        backend_source=source,
        machine=hardware,
        frameworks=frameworks,
        settings=shown_settings(os.environ),
        findings=check_results.found(rules.RULES, known),
        strategies=trials or (),
    )


def _started(
    frameworks: tuple[rules.Framework, ...], timeout_seconds: float
) -> tuple[rules.Framework, ...]:
    """Start those that are installed at the same time, and ask them for their devices."""
    with contextlib.ExitStack() as running:
        programs = [
            each.version
            and running.enter_context(
                child_program.started(
                    [strategy_trials.CHILD, f"devices-of-{each.name}"], _WHEN_ASKED
                )
            )
            for each in frameworks
        ]
        return tuple(
            _answered(each, program.wait(timeout_seconds)) if program else each
            for each, program in zip(frameworks, programs, strict=True)
        )


def _answered(framework: rules.Framework, outcome: child_program.Outcome) -> rules.Framework:
    if outcome.result != child_program.WORKS:
        return dataclasses.replace(framework, problem=outcome.reason)
    (found,) = outcome.reports
    return dataclasses.replace(
        framework, devices=found["devices"], is_built_with_cuda=found.get("is_built_with_cuda")
    )


def shown_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are set, with as much of their values as may be shown.

    >>> shown_settings({"OMP_NUM_THREADS": "2", "XLA_FLAGS": "--xla_dump_to=/home/a", "HOME": "/"})
    {'XLA_FLAGS': '(not shown)', 'OMP_NUM_THREADS': '2'}
    """
    return {name: _value(environ[name]) for name in _NAMES if name in environ}


def _value(value: str) -> str:
    words = [word if _HARMLESS.fullmatch(word) else "(not shown)" for word in value.split()]
    return " ".join(words) or "empty"


def _row(row: tuple[str, str]) -> str:
    name, text = row
    begin = f"  {name:<16}  "
    return check_results.wrapped(text, first=begin, indent=20).rstrip() or begin.rstrip()
