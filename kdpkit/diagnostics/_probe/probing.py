"""`probe`: two training steps in every way that there is, each in processes of its own."""

import dataclasses
import importlib.util
import math
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kdpkit import _checks, _tpu
from kdpkit.diagnostics import _packages, _private, _probe_child, _program

WORKS, CANNOT, FAILED, TIMED_OUT = "works", "cannot", "failed", "timed out"

_BACKENDS = {
    "one": "tensorflow",
    "mirrored": "tensorflow",
    "multi_worker": "tensorflow",
    "parameter_server": "tensorflow",
    "tpu": "tensorflow",
    "jax_one": "jax",
    "jax_mesh": "jax",
}
NAMES = tuple(_BACKENDS)
_ONE = {"tensorflow": "one", "jax": "jax_one"}
_TITLES = {"tensorflow": "TensorFlow", "jax": "JAX"}
_CHILD = "kdpkit.diagnostics._probe_child"
_CPU_ALONE = {"CUDA_VISIBLE_DEVICES": "-1", "JAX_PLATFORMS": "cpu"}
_ALWAYS = {
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",  # TPUs multiply in bfloat16 otherwise
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # a GPU may be somebody else's, too
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
}
_TOLERANCE = 1e-5  # of the largest change of a weight, as in `check_parity`
_TPU_TOLERANCE = 1e-2  # TensorFlow multiplies in bfloat16 there, whose rounding is 2**-8
_WIDTH = 80


@dataclasses.dataclass(frozen=True)
class ProbeResult:
    """What came of one way to train.

    Attributes:
        name: Of the way: `"one"`, `"mirrored"`, `"multi_worker"`, `"parameter_server"` and `"tpu"`
            are TensorFlow's, `"jax_one"` and `"jax_mesh"` JAX's.
        backend: `"tensorflow"` or `"jax"`.
        result: `"works"`, `"cannot"` (not on this machine, or not as it is installed), `"failed"`
            or `"timed out"`.
        seconds: From the start of its processes to their end; None where none was started.
        where: The replicas and their devices.
        difference: The largest difference of a weight from one device's, over the largest change
            of a weight; None where it was not compared.
        reason: Why it does not work, and the way out.
    """

    name: str
    backend: str
    result: str
    seconds: float | None = None
    where: str = ""
    difference: float | None = None
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class ProbeReport:
    """What `probe` found; it prints as a table of 80 columns.

    Attributes:
        results: One for each way to train.
    """

    results: tuple[ProbeResult, ...]

    @property
    def works(self) -> bool:
        """Whether all that this machine could do works."""
        return all(result.result in (WORKS, CANNOT) for result in self.results)

    def to_dict(self) -> dict[str, Any]:
        """Give it as plain values, for JSON."""
        return {
            "works": self.works,
            "results": [dataclasses.asdict(result) for result in self.results],
        }

    def __str__(self) -> str:
        """Give the table, with the reasons beneath their rows."""
        head = ("strategy", "backend", "result", "seconds", "where")
        return "\n".join([_line(head), *map(_lines, self.results)])


def probe(
    only: Iterable[str] = (),
    *,
    timeout_seconds: float = 180.0,
    on_start: Callable[[str], None] = lambda _: None,
) -> ProbeReport:
    """Train two steps in every way that there is, and say which work on this machine.

    On TensorFlow: one device; mirrored over all GPUs, or over two logical CPUs where there are no
    two GPUs; two processes of this machine that train in step, which share the GPUs if there are
    two; a chief with a worker and a parameter server; a TPU. On JAX: one device, and a mesh of two,
    of which the CPU is made where there are no two others. Each way has processes of its own, one
    after the other, and a limit of time; none is left behind, however this ends.

    A way works if its loss is finite, its optimizer has counted two steps, and its weights are
    those that one device of the same kind has after the same steps, to `1e-5` of the largest
    change: the promise of kdpkit, here for a small dense network in `TrainingLoop`. (The one worker
    of the parameter server takes its steps in order, and so is held to it too. On a TPU of
    TensorFlow, whose numbers are those of bfloat16, it is `1e-2`.)

    Args:
        only: Names of ways, or `"tensorflow"` and `"jax"` for all of one backend; none means all.
            One device is trained on in any case, to compare with.
        timeout_seconds: How long each way may take, the start of its processes included.
        on_start: Called with the name of each way before it starts.

    Returns:
        The report. It prints as a table, and has `results`, `works` and `to_dict()`.

    Raises:
        ValueError: A name that there is not, or a limit that is not positive.

    >>> probe(["mirrorred"])
    Traceback (most recent call last):
    ...
    kdpkit._checks.InputError: `only` must be one of 'one', ... Received: only='mirrorred'.
    """
    chosen = [_checks.one_of("only", name, (*NAMES, *_TITLES)) for name in only]
    timeout_seconds = _checks.number("timeout_seconds", timeout_seconds, above=0)
    wanted = [
        name
        for name, backend in _BACKENDS.items()
        if not chosen or name in chosen or backend in chosen
    ]
    probing = _Probing(timeout_seconds, on_start)
    return ProbeReport(tuple(map(probing.result, wanted)))


@dataclasses.dataclass(frozen=True)
class _Way:
    """How a way is started: its module's words, its variables, and what it is compared with."""

    words: tuple[str, ...]
    on_cpu: bool = False

    @property
    def variables(self) -> dict[str, str]:
        return _ALWAYS | (_CPU_ALONE if self.on_cpu else {})


@dataclasses.dataclass(frozen=True)
class _Run:
    """What came of the processes of a way, and what each of them said that trained."""

    result: str
    seconds: float | None
    reason: str = ""
    trained: Sequence[dict[str, Any]] = ()


class _Probing:
    """The runs of one report, of which those on one device serve all others."""

    def __init__(self, timeout_seconds: float, on_start: Callable[[str], None]) -> None:
        self._timeout_seconds = timeout_seconds
        self._on_start = on_start
        self._on_one_device: dict[tuple[str, bool], _Run] = {}

    def result(self, name: str) -> ProbeResult:
        """Run a way, and what it is compared with, if these can run."""
        backend = _BACKENDS[name]
        if obstacle := _obstacle(name):
            return ProbeResult(name, backend, CANNOT, reason=obstacle)
        way = _way(name, self._accelerators(backend))
        one = self._one(backend, on_cpu=way.on_cpu)
        run = one if name == _ONE[backend] else self._run(name, way)
        if run.result == WORKS:
            run, difference = _compared(run, one, _TPU_TOLERANCE if name == "tpu" else _TOLERANCE)
        else:
            difference = None
        where = run.trained[0]["where"] if run.trained else ""
        seconds = None if run.seconds is None else round(run.seconds, 1)
        return ProbeResult(name, backend, run.result, seconds, where, difference, run.reason)

    def _accelerators(self, backend: str) -> int:
        """Count what the backend trains on beside the CPU, as its run on one device told."""
        one = self._one(backend, on_cpu=False)
        return one.trained[0]["accelerators"] if one.trained else 0

    def _one(self, backend: str, *, on_cpu: bool) -> _Run:
        # Without accelerators they are the same run.
        default = self._on_one_device.get((backend, False))
        if on_cpu and default and default.trained and not default.trained[0]["accelerators"]:
            return default
        if (backend, on_cpu) not in self._on_one_device:
            name = _ONE[backend]
            way = _Way((_CHILD, name), on_cpu=on_cpu)
            self._on_one_device[backend, on_cpu] = self._run(name, way)
        return self._on_one_device[backend, on_cpu]

    def _run(self, name: str, way: _Way) -> _Run:
        self._on_start(name)
        with _program.started(way.words, way.variables) as program:
            ended = program.wait(self._timeout_seconds)
        return _judged(name, ended, self._timeout_seconds)


def _obstacle(name: str) -> str:
    """Say why a way cannot be tried, where that is known beforehand."""
    backend = _BACKENDS[name]
    if importlib.util.find_spec(backend) is None:
        return f"{_TITLES[backend]} is not installed. {_packages.way_to(backend)}"
    return _tpu.nowhere() if name == "tpu" and _tpu.address(None) is None else ""


def _way(name: str, accelerators: int) -> _Way:
    """Say how to start a way on so many GPUs, or devices of JAX that are no CPUs."""
    one_alone = accelerators < 2
    if name == "multi_worker":
        gpus = () if one_alone else ("--gpus-per-worker", str(accelerators // 2))
        return _Way(_launched(name, "--workers", "2", *gpus), on_cpu=one_alone)
    if name == "parameter_server":
        gpus = ("--gpus-per-worker", "1") if accelerators else ()
        servers = ("--workers", "1", "--parameter-servers", "1")
        return _Way(_launched(name, *servers, *gpus), on_cpu=not accelerators)
    return _Way((_CHILD, name), on_cpu=one_alone and name in ("mirrored", "jax_mesh"))


def _launched(name: str, *flags: str) -> tuple[str, ...]:
    child = (sys.executable, "-m", _CHILD, name)
    return ("kdpkit", "launch", *flags, "--grace-seconds", "2", "--", *child)


def _judged(name: str, ended: _program.Ended, timeout_seconds: float) -> _Run:
    """Tell what a run came to from what its processes said, and from how they ended."""
    said = ended.said(_probe_child.SIGN)
    for code, result in ((_probe_child.CANNOT, CANNOT), (_probe_child.FAILED, FAILED)):
        reasons = [_private.without(one["reason"]) for one in said if one["code"] == code]
        if reasons:
            reason = (
                reasons[0] if result == CANNOT else f"{reasons[0].rstrip('.')}. {_more_of(name)}"
            )
            return _Run(result, ended.seconds, reason)
    if ended.exit_code is None:
        reason = (
            f"It did not end within {timeout_seconds:g} s. Give it longer with --timeout; if that "
            f"does not help: {_more_of(name)}"
        )
        return _Run(TIMED_OUT, ended.seconds, reason)
    if ended.exit_code or not said:
        reason = f"{ended.how()}. {_more_of(name)}"
        return _Run(FAILED, ended.seconds, reason)
    return _Run(WORKS, ended.seconds, trained=said)


def _more_of(name: str) -> str:
    flags = {
        "multi_worker": "kdpkit launch --workers 2 -- ",
        "parameter_server": "kdpkit launch --workers 1 --parameter-servers 1 -- ",
    }
    return f"`{flags.get(name, '')}python -m {_CHILD} {name}` shows all that it says."


def _compared(run: _Run, one: _Run, tolerance: float) -> tuple[_Run, float | None]:
    """Hold the weights of all processes against those of one device."""
    if not one.trained:
        reason = f"It trained, but the run on one device, to compare with, {one.result}: "
        return dataclasses.replace(run, result=FAILED, reason=reason + one.reason), None
    difference = max(_difference(trained, one.trained[0]) for trained in run.trained)
    if difference <= tolerance:
        return run, difference
    shown = difference if math.isfinite(difference) else None  # JSON has no infinity
    reason = (
        f"It trains something else than one device: weights differ by {difference:.0e} of their "
        "change. This is a fault of kdpkit, or of what it stands on: please report it, with what "
        "`kdpkit env` says."
    )
    return dataclasses.replace(run, result=FAILED, reason=reason), shown


def _difference(trained: dict[str, Any], one: dict[str, Any]) -> float:
    """Give the largest difference of a weight, over the largest change on one device."""
    pairs = list(zip(trained["weights"], one["weights"], one["start"], strict=True))
    if not all(math.isfinite(weight) for weight, *_ in pairs):
        return math.inf
    largest = max(abs(weight - reference) for weight, reference, _ in pairs)
    return largest / max(abs(reference - start) for _, reference, start in pairs)


# The table.


def _lines(result: ProbeResult) -> str:
    seconds = "-" if result.seconds is None else f"{result.seconds:.1f}"
    row = _line((result.name, _TITLES[result.backend], result.result, seconds, result.where))
    if not result.reason:
        return row
    reason = textwrap.fill(
        result.reason,
        _WIDTH,
        initial_indent="    ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return f"{row}\n{reason}"


def _line(cells: Sequence[str]) -> str:
    name, backend, result, seconds, where = cells
    line = f"{name:<16}  {backend:<10}  {result:<9}  {seconds:>7}  "
    return (
        textwrap.fill(
            where, _WIDTH, initial_indent=line, subsequent_indent=" " * len(line)
        ).rstrip()
        or line.rstrip()
    )
