"""`probe`: two training steps with every strategy, each in processes of its own."""

import dataclasses
import math
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from kdpkit._internal import checks, tpu_host
from kdpkit.diagnostics import _child_program, _packages, _text
from kdpkit.diagnostics._child_program import CANNOT, FAILED, TIMED_OUT, WORKS, Outcome

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
_CHILD = "kdpkit.diagnostics._probe.probe_child"
_CPU_ALONE = {"CUDA_VISIBLE_DEVICES": "-1", "JAX_PLATFORMS": "cpu"}
_ALWAYS = {
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",  # TPUs multiply in bfloat16 otherwise
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # a GPU may be somebody else's, too
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
}
_TOLERANCE = 1e-5  # of the largest change of a weight, as in `check_parity`
_TPU_TOLERANCE = 1e-2  # TensorFlow multiplies in bfloat16 there, whose rounding is 2**-8


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
        reason: Why it does not work, and how to fix it.
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
        """Return it as plain values, for JSON."""
        return {
            "works": self.works,
            "results": [dataclasses.asdict(result) for result in self.results],
        }

    def __str__(self) -> str:
        """Return the table, with the reasons beneath their rows."""
        rows = [("strategy", "backend", "result", "seconds", "where"), *map(_cells, self.results)]
        reasons = ["", *(result.reason for result in self.results)]
        return _text.table(rows, left=(0, 1, 2, 4), notes=reasons)


def _cells(result: ProbeResult) -> tuple[str, ...]:
    seconds = "-" if result.seconds is None else f"{result.seconds:.1f}"
    return (result.name, _packages.TITLES[result.backend], result.result, seconds, result.where)


def probe(
    only: Iterable[str] = (),
    *,
    timeout_seconds: float = 180.0,
    on_start: Callable[[str], None] = lambda _: None,
) -> ProbeReport:
    """Train two steps with every strategy and backend, and report which work on this machine.

    On TensorFlow: one device; mirrored over all GPUs, or over two logical CPUs where there are no
    two GPUs; two processes of this machine that train in step; a chief with a worker and a
    parameter server; a TPU. On JAX: one device, and a mesh of two, made of the CPU where there are
    no two others. Each way has processes of its own, one after the other, and a limit of time; none
    is left behind, however this ends.

    A way works if its loss is finite, its optimizer has counted two steps, and its weights are
    those that one device of the same kind has after the same steps, to `1e-5` of the largest
    change (`1e-2` on a TPU of TensorFlow, which computes in bfloat16): the promise of kdpkit, here
    for a small dense network in `TrainingLoop`.

    Args:
        only: Names of ways, or `"tensorflow"` and `"jax"` for all of one backend; none means all.
            One device is trained on in any case, to compare with.
        timeout_seconds: How long each way may take, the start of its processes included.
        on_start: Called with the name of each way before it starts.

    Raises:
        ValueError: An unknown name, or a limit that is not positive.

    >>> probe(["mirrorred"])
    Traceback (most recent call last):
    ...
    kdpkit.errors.InputError: `only` must be one of 'one', ... Received: only='mirrorred'.
    """
    chosen = [checks.one_of("only", name, (*NAMES, *_packages.TITLES)) for name in only]
    timeout_seconds = checks.number("timeout_seconds", timeout_seconds, above=0)
    wanted = [
        name
        for name, backend in _BACKENDS.items()
        if not chosen or name in chosen or backend in chosen
    ]
    probing = _Probing(timeout_seconds, on_start)
    return ProbeReport(tuple(map(probing.result, wanted)))


class _Way(NamedTuple):
    """How a way is started: its module with arguments, and whether on CPUs alone."""

    words: tuple[str, ...]
    on_cpu: bool = False

    @property
    def variables(self) -> dict[str, str]:
        return _ALWAYS | (_CPU_ALONE if self.on_cpu else {})


class _Probing:
    """The runs of one report; those on one device are made once, to compare with."""

    def __init__(self, timeout_seconds: float, on_start: Callable[[str], None]) -> None:
        self._timeout_seconds = timeout_seconds
        self._on_start = on_start
        self._on_one_device: dict[tuple[str, bool], Outcome] = {}

    def result(self, name: str) -> ProbeResult:
        """Run a way, and what it is compared with, if these can run."""
        backend = _BACKENDS[name]
        if obstacle := _obstacle(name):
            return ProbeResult(name, backend, CANNOT, reason=obstacle)
        way = _way(name, _accelerators(self._one(backend, on_cpu=False)))
        one = self._one(backend, on_cpu=way.on_cpu)
        run = one if name == _ONE[backend] else self._run(name, way)
        difference = None
        if run.result == WORKS:
            run, difference = _compared(run, one, _TPU_TOLERANCE if name == "tpu" else _TOLERANCE)
        where = run.reports[0]["where"] if run.reports else ""
        seconds = round(run.seconds, 1)
        return ProbeResult(name, backend, run.result, seconds, where, difference, run.reason)

    def _one(self, backend: str, *, on_cpu: bool) -> Outcome:
        default = self._on_one_device.get((backend, False))
        if on_cpu and default and default.reports and not _accelerators(default):
            return default  # which was on the CPU too
        if (backend, on_cpu) not in self._on_one_device:
            name = _ONE[backend]
            self._on_one_device[backend, on_cpu] = self._run(name, _Way((_CHILD, name), on_cpu))
        return self._on_one_device[backend, on_cpu]

    def _run(self, name: str, way: _Way) -> Outcome:
        self._on_start(name)
        with _child_program.started(way.words, way.variables) as program:
            run = program.wait(self._timeout_seconds)
        if run.result in (FAILED, TIMED_OUT):
            command = " ".join(["python -m", *way.words]).replace(sys.executable, "python")
            reason = f"{run.reason.rstrip('.')}. `{command}` shows all that it prints."
            return dataclasses.replace(run, reason=reason)
        return run


def _accelerators(one: Outcome) -> int:
    """Return how many devices besides the CPU a run on one device found."""
    return one.reports[0]["accelerators"] if one.reports else 0


def _obstacle(name: str) -> str:
    """Return why a way cannot be tried, where that is known beforehand."""
    if sentence := _packages.missing(_BACKENDS[name]):
        return sentence
    return tpu_host.nowhere() if name == "tpu" and tpu_host.address(None) is None else ""


def _way(name: str, accelerators: int) -> _Way:
    """Return how to start a way on so many GPUs, or devices of JAX other than CPUs."""
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


def _compared(run: Outcome, one: Outcome, tolerance: float) -> tuple[Outcome, float | None]:
    """Compare the weights of all processes with those of one device."""
    if not one.reports:
        reason = f"It trained, but the run on one device, to compare with, {one.result}: "
        return dataclasses.replace(run, result=FAILED, reason=reason + one.reason), None
    difference = max(_difference(found, one.reports[0]) for found in run.reports)
    if difference <= tolerance:
        return run, difference
    shown = difference if math.isfinite(difference) else None  # JSON has no infinity
    reason = (
        f"It does not train what one device does: weights differ by {difference:.0e} of their "
        "change. This is a bug of kdpkit or of a framework: please report it, with the output of "
        "`kdpkit env`."
    )
    return dataclasses.replace(run, result=FAILED, reason=reason), shown


def _difference(found: dict[str, Any], one: dict[str, Any]) -> float:
    """Return the largest difference of a weight, over the largest change on one device."""
    pairs = list(zip(found["weights"], one["weights"], one["start"], strict=True))
    if not all(math.isfinite(weight) for weight, *_ in pairs):
        return math.inf
    largest = max(abs(weight - reference) for weight, reference, _ in pairs)
    return largest / max(abs(reference - start) for _, reference, start in pairs)
