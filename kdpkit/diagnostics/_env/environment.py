"""`environment`: what this machine and this Python offer for training."""

import contextlib
import dataclasses
import os
import platform
import re
from collections.abc import Callable, Iterator
from typing import Any

from kdpkit._internal import check_results, checks
from kdpkit._internal.check_results import Finding
from kdpkit.diagnostics import _child_program, _machine, _packages
from kdpkit.diagnostics._env import settings, strategy_trials

_CHILD = "kdpkit.diagnostics._env.framework_child"
# Asking must not take the memory of a GPU that somebody trains on.
_WHEN_ASKED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "3"}


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
            return f"not installed. {_packages.install_hint(self.name)}"
        if self.problem:
            return f"does not start: {self.problem}"
        if self.devices is None:
            return "not started"
        return ", ".join(f"{kind}: {count}" for kind, count in self.devices.items())

    def has(self, *kinds: str) -> bool:
        """Return whether it has a device of one of the kinds."""
        return any(kind in (self.devices or {}) for kind in kinds)


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
    machine: _machine.Machine
    frameworks: tuple[Framework, ...]
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
            "Devices": ((_packages.TITLES[each.name], str(each)) for each in self.frameworks),
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
    machine = _machine.look()
    frameworks = tuple(Framework(name, _packages.version(name)) for name in _packages.TITLES)
    if start_frameworks:
        frameworks = _started(frameworks, timeout_seconds)
    devices = {each.name: each.devices for each in frameworks if each.devices}
    trials = try_strategies and strategy_trials.run_all(devices, timeout_seconds, on_start)
    backend, source = _packages.keras_backend()
    found = [
        *_packages.findings(),
        *settings.findings(os.environ, machine),
        *_of_backend(backend, source),
        *_of_frameworks(frameworks),
        *_of_gpus(machine, *frameworks),
    ]
    return Environment(
        system=f"{platform.system()}, {platform.machine()}",
        versions=_packages.versions(),
        backend=backend,
        backend_source=source,
        machine=machine,
        frameworks=frameworks,
        settings=settings.shown(os.environ),
        findings=check_results.in_order(found),
        strategies=trials or (),
    )


def _started(frameworks: tuple[Framework, ...], timeout_seconds: float) -> tuple[Framework, ...]:
    """Start those that are installed at the same time, and ask them for their devices."""
    with contextlib.ExitStack() as running:
        programs = [
            each.version
            and running.enter_context(_child_program.started([_CHILD, each.name], _WHEN_ASKED))
            for each in frameworks
        ]
        return tuple(
            _answered(each, program.wait(timeout_seconds)) if program else each
            for each, program in zip(frameworks, programs, strict=True)
        )


def _answered(framework: Framework, outcome: _child_program.Outcome) -> Framework:
    if outcome.result != _child_program.WORKS:
        return dataclasses.replace(framework, problem=outcome.reason)
    (found,) = outcome.reports
    return dataclasses.replace(
        framework, devices=found["devices"], is_built_with_cuda=found.get("is_built_with_cuda")
    )


def _of_backend(backend: str, source: str) -> Iterator[Finding]:
    if backend not in _packages.TITLES:
        problem = f"kdpkit does not train on this backend of Keras (chosen by {source})."
        remedy = "Set KERAS_BACKEND=tensorflow or KERAS_BACKEND=jax."
    elif not _packages.version(backend):
        problem = f"It is Keras' backend (chosen by {source}), and is not installed."
        (other,) = {*_packages.TITLES} - {backend}
        instead = f" Or set KERAS_BACKEND={other}." if _packages.version(other) else ""
        remedy = f"{_packages.install_hint(backend)}{instead}"
    else:
        return
    yield Finding("backend", "error", backend, problem, remedy)


def _of_frameworks(frameworks: tuple[Framework, ...]) -> Iterator[Finding]:
    for framework in frameworks:
        if framework.problem:
            title = _packages.TITLES[framework.name]
            yield Finding(
                "does-not-start",
                "error",
                framework.name,
                f"{title} {framework.version} does not start: {framework.problem}",
                f'Run `python -c "import {framework.name}"` to see the complete error.',
            )


def _of_gpus(machine: _machine.Machine, tensorflow: Framework, jax: Framework) -> Iterator[Finding]:
    if not machine.gpus or settings.hides_gpus(os.environ):
        return
    if tensorflow.devices is not None and not tensorflow.has("GPU"):
        problem = (
            "There is a GPU, and TensorFlow does not find CUDA's libraries, or not its own."
            if tensorflow.is_built_with_cuda
            else "There is a GPU, and this TensorFlow was built without CUDA."
        )
        yield _unused_gpu(problem, f"tensorflow[and-cuda]=={tensorflow.version}")
    platforms = os.environ.get("JAX_PLATFORMS", "")
    is_wanted = not platforms or re.search("gpu|cuda", platforms)
    if is_wanted and jax.devices is not None and not jax.has("GPU", "CUDA"):
        extra = "cuda13" if (machine.cuda_of_driver or "").startswith("13") else "cuda12"
        problem = "There is a GPU, and JAX was installed for the CPU alone, or cannot start it."
        yield _unused_gpu(problem, f"jax[{extra}]=={jax.version}")


def _unused_gpu(problem: str, requirement: str) -> Finding:
    where = requirement.partition("[")[0]
    remedy = f"Run `{_packages.install_command(requirement)}`."
    return Finding("unused-gpu", "slow", where, problem, remedy)


def _row(row: tuple[str, str]) -> str:
    name, text = row
    begin = f"  {name:<16}  "
    return check_results.wrapped(text, first=begin, indent=20).rstrip() or begin.rstrip()
