"""`environment`: what this machine and this Python give a training, and what stands in its way."""

import contextlib
import dataclasses
import json
import os
import platform
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kdpkit import _checks, _findings
from kdpkit.diagnostics import (
    _framework_child,
    _machine,
    _packages,
    _private,
    _program,
    _settings,
    _usable,
)

_FRAMEWORKS = ("tensorflow", "jax")
_BACKENDS = (*_FRAMEWORKS, "torch", "numpy", "openvino")
_WIDTH = 80
_CHILD = "kdpkit.diagnostics._framework_child"


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
        strategies: What can be used here, and what not.
        settings: The variables that are set for threads and devices, as far as they may be shown.
        extras: What each extra of kdpkit lacks.
        findings: What stands in the way, the worst first.
    """

    system: str
    versions: dict[str, str | None]
    backend: str
    backend_source: str
    machine: _machine.Machine
    frameworks: tuple[_usable.Framework, ...]
    strategies: tuple[_usable.Usable, ...]
    settings: dict[str, str]
    extras: tuple[_packages.Extra, ...]
    findings: tuple[_findings.Finding, ...]

    @property
    def clean(self) -> bool:
        """Whether nothing stands in the way; notes are fine."""
        return _findings.are_notes(self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Give it as plain values, for JSON."""
        plain = dataclasses.asdict(self)
        plain["extras"] = {
            extra.name: {"missing": list(extra.missing), "command": extra.command}
            for extra in self.extras
        }
        plain["findings"] = _findings.as_dicts(self.findings)
        return {"clean": self.clean} | plain

    def __str__(self) -> str:
        """Say it in lines of at most 80 columns, but for words that are longer."""
        return "\n\n".join(
            [
                _section("Machine", self._of_machine()),
                _section("Versions", self._of_versions()),
                _section("Strategies", self._of_strategies()),
                _section("Settings", self._of_settings()),
                _section("Extras of kdpkit", self._of_extras()),
                *map(str, self.findings),
            ]
        )

    def _of_machine(self) -> Iterator[str]:
        machine = self.machine
        cores = f"{machine.cores} of {machine.cores_present} cores"
        if machine.cores_limit is not None:
            cores += f", of whose time {machine.cores_limit:g} cores' may be used"
        yield _row("system", self.system)
        yield _row("processor", machine.cpu)
        yield _row("", cores)
        yield _row("memory", f"{machine.memory_gib} GiB" if machine.memory_gib else "not known")
        for gpu in machine.gpus:
            memory = f"{gpu.memory_gib} GiB" if gpu.memory_gib else "memory not known"
            capability = gpu.compute_capability or "not known"
            yield _row("GPU", f"{gpu.name}, {memory}, compute capability {capability}")
        if machine.gpus:
            cuda = f"driver {machine.gpu_driver}, for CUDA up to {machine.cuda_of_driver}"
            yield _row("", cuda)
        else:
            yield _row(
                "GPU", (machine.gpus_unread and f"not read: {machine.gpus_unread}") or "none"
            )
        yield _row("TPU", f"chips: {machine.tpu_chips}" if machine.tpu_chips else "none")

    def _of_versions(self) -> Iterator[str]:
        installed = [f"{name} {version}" for name, version in self.versions.items() if version]
        missing = [name for name, version in self.versions.items() if not version]
        yield _row("installed", ", ".join(installed))
        yield _row("missing", ", ".join(missing) or "none")
        yield _row("backend", f"{self.backend} (chosen by {self.backend_source})")

    def _of_strategies(self) -> Iterator[str]:
        for usable in self.strategies:
            title = {"tensorflow": "TensorFlow", "jax": "JAX"}[usable.framework]
            count = f"replicas: {usable.replicas}" if usable.replicas else ""
            word = "yes" if usable.usable else "no"
            yield _row(usable.strategy, f"{title:<10}  {word:<3}  {count}".rstrip())
            if usable.detail:
                yield _row("", usable.detail)

    def _of_settings(self) -> Iterator[str]:
        width = max(map(len, self.settings), default=0)
        for name, value in self.settings.items():
            yield _row(name, value, width=width)
        if not self.settings:
            yield "  none is set"

    def _of_extras(self) -> Iterator[str]:
        for extra in self.extras:
            if extra.command is None:
                yield _row(extra.name, "complete")
            else:
                yield _row(extra.name, f"lacks {', '.join(extra.missing)}")
                yield _packages.wrapped_command(extra.command, indent="    ", width=_WIDTH)
        if not self.extras:
            yield "  not known: kdpkit is not installed"


def environment(*, start_frameworks: bool = True, timeout_seconds: float = 60.0) -> Environment:
    """Tell what this machine and this Python give a training, and what stands in its way.

    Versions and requirements are read from the packages' metadata. TensorFlow and JAX are started
    in a process of their own each, both at a time, to ask for their devices: so a broken one, or
    one that never answers, is reported like all else, and this process loads neither. A missing
    one is no fault. The report holds no path, no name of a machine or user, and of variables no
    value but numbers and known words, so that it can be shown to anyone.

    Findings are what cannot work or wastes time: a package below kdpkit's minimum, or not fitting
    another; a GPU that the framework cannot use, and why; a backend that is not installed; numbers
    of threads that fight each other, the cores or the container's share of them.

    Args:
        start_frameworks: Whether to start TensorFlow and JAX. Without it their devices, and how
            many replicas there would be, are not known.
        timeout_seconds: How long each may take to answer.

    Raises:
        ValueError: A limit that is not positive.

    >>> found = environment(start_frameworks=False)
    >>> found.versions["keras"] is not None, found.machine.cores > 0
    (True, True)
    >>> [usable.strategy for usable in found.strategies]
    ['one', 'mirrored', 'multi_worker', 'parameter_server', 'tpu', 'mesh']
    """
    timeout_seconds = _checks.number("timeout_seconds", timeout_seconds, above=0)
    machine = _machine.look()
    tensorflow, jax = _frameworks(timeout_seconds if start_frameworks else None)
    backend, source = _backend()
    found = [
        *_packages.findings(),
        *_settings.findings(os.environ, machine),
        *_of_backend(backend, source),
        *_of_frameworks(tensorflow, jax),
        *_of_gpus(machine, tensorflow, jax),
    ]
    return Environment(
        system=f"{platform.system()}, {platform.machine()}",
        versions=_packages.versions(),
        backend=backend,
        backend_source=source,
        machine=machine,
        frameworks=(tensorflow, jax),
        strategies=_usable.strategies(tensorflow, jax, tpu_chips=machine.tpu_chips),
        settings=_settings.shown(os.environ),
        extras=_packages.extras(),
        findings=_findings.in_order(found),
    )


# Keras' backend.


def chosen_backend() -> str:
    """Give what Keras uses, or would use if it were imported now."""
    return _backend()[0]


def _backend() -> tuple[str, str]:
    """Give what Keras uses, or would use if it were imported now, and what chose it."""
    if "keras" in sys.modules:
        return str(sys.modules["keras"].config.backend()), "this program"
    if chosen := os.environ.get("KERAS_BACKEND"):
        return chosen if chosen in _BACKENDS else "unknown", "KERAS_BACKEND"
    if (chosen := _of_keras_file()) is not None:
        return chosen if chosen in _BACKENDS else "unknown", "keras.json"
    return "tensorflow", "default"


def _of_keras_file() -> str | None:
    home = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras").expanduser()
    try:
        return json.loads((home / "keras.json").read_text(encoding="utf-8")).get("backend")
    except (OSError, ValueError, AttributeError):  # Keras too goes on without it
        return None


def _of_backend(backend: str, source: str) -> Iterator[_findings.Finding]:
    if backend == "unknown":
        yield _findings.Finding(
            "backend",
            "refused",
            source,
            "Keras has no such backend, and cannot be imported.",
            "Use tensorflow or jax.",
        )
    elif backend in _FRAMEWORKS and not _packages.version(backend):
        others = [name for name in _FRAMEWORKS if _packages.version(name)]
        instead = f"Or set KERAS_BACKEND={others[0]}. " if others else ""
        yield _findings.Finding(
            "backend",
            "refused",
            backend,
            f"It is Keras' backend (chosen by {source}), and is not installed.",
            f"{instead}{_packages.way_to(backend)}",
        )
    elif backend not in _FRAMEWORKS:
        yield _findings.Finding(
            "backend",
            "refused",
            backend,
            f"It is Keras' backend (chosen by {source}), on which kdpkit does not train.",
            "Set KERAS_BACKEND=tensorflow or KERAS_BACKEND=jax.",
        )


# TensorFlow and JAX.


def _frameworks(timeout_seconds: float | None) -> tuple[_usable.Framework, _usable.Framework]:
    """Look both up, and ask those that are installed, at the same time."""
    found = [_usable.Framework(name, _packages.version(name)) for name in _FRAMEWORKS]
    with contextlib.ExitStack() as running:
        asked = {
            framework.name: running.enter_context(
                _program.started(
                    [_CHILD, framework.name],
                    # A question must not take the memory of a GPU that somebody trains on.
                    {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "3"},
                )
            )
            for framework in found
            if framework.version and timeout_seconds
        }
        tensorflow, jax = (
            _answered(framework, asked[framework.name].wait(timeout_seconds), timeout_seconds)
            if framework.name in asked and timeout_seconds
            else framework
            for framework in found
        )
    return tensorflow, jax


def _answered(
    framework: _usable.Framework, ended: _program.Ended, timeout_seconds: float
) -> _usable.Framework:
    answers = [line for line in ended.stdout.splitlines() if line.startswith(_framework_child.SIGN)]
    if answers:
        said = json.loads(answers[-1].removeprefix(_framework_child.SIGN))
        if "problem" in said:
            said["problem"] = _private.without(said["problem"])
        return dataclasses.replace(framework, **said)
    problem = f"it did not answer within {timeout_seconds:g} s."
    if ended.exit_code is not None:
        lines = [line for line in ended.stderr.splitlines() if line.strip()]
        last = _private.without(lines[-1]) if lines else "it said nothing"
        problem = f"it ended with exit code {ended.exit_code} ({last})."
    return dataclasses.replace(framework, problem=problem)


def _of_frameworks(*frameworks: _usable.Framework) -> Iterator[_findings.Finding]:
    for framework in frameworks:
        if framework.problem:
            yield _findings.Finding(
                "does-not-start",
                "refused",
                framework.name,
                f"{framework.title} {framework.version} does not start: {framework.problem}",
                f'See what `python -c "import {framework.name}"` says. If it needs longer, give '
                "`kdpkit env --timeout` more seconds.",
            )


def _of_gpus(
    machine: _machine.Machine, tensorflow: _usable.Framework, jax: _usable.Framework
) -> Iterator[_findings.Finding]:
    if machine.gpus_unread:
        yield _findings.Finding(
            "unread-gpus",
            "note",
            "GPU",
            f"There is a driver for NVIDIA's GPUs, but {machine.gpus_unread}.",
            "Run `python -m pip install nvidia-ml-py`, or see what `nvidia-smi` says.",
        )
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    if not machine.gpus or hidden:
        return
    if tensorflow.devices is not None and not tensorflow.count("GPU"):
        yield _unused_by_tensorflow(tensorflow)
    told_of_others = os.environ.get("JAX_PLATFORMS", "")
    if told_of_others and not re.search("gpu|cuda", told_of_others):
        return
    if jax.devices is not None and not jax.count("GPU", "CUDA"):
        extra = "cuda13" if (machine.cuda_of_driver or "").startswith("13") else "cuda12"
        yield _findings.Finding(
            "unused-gpu",
            "slow",
            "jax",
            "There is a GPU, and JAX was installed for the CPU alone, or cannot start it.",
            f"Run `{_packages.install_command([f'jax[{extra}]=={jax.version}'])}`.",
        )


def _unused_by_tensorflow(tensorflow: _usable.Framework) -> _findings.Finding:
    if tensorflow.is_built_with_cuda:
        problem = "There is a GPU, and TensorFlow does not find CUDA's libraries, or not its own."
    else:
        problem = "There is a GPU, and this TensorFlow was built without CUDA."
    wanted = f"tensorflow[and-cuda]=={tensorflow.version}"
    return _findings.Finding(
        "unused-gpu",
        "slow",
        "tensorflow",
        problem,
        f"Run `{_packages.install_command([wanted])}`.",
    )


# The text.


def _section(title: str, rows: Iterable[str]) -> str:
    return "\n".join([title, *rows])


def _row(name: str, text: str, *, width: int = 16) -> str:
    begin = f"  {name:<{width}}  "
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=begin,
        subsequent_indent=" " * len(begin),
        break_long_words=False,
        break_on_hyphens=False,
    )
