"""`bench`: the speed of a training on this machine, by replicas and batch sizes."""

import dataclasses
import json
import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kdpkit._internal import atomic_files, check_results, checks, cpu_threads
from kdpkit.diagnostics import _child_program, _packages
from kdpkit.diagnostics._bench import bench_text
from kdpkit.diagnostics._child_program import FAILED, TIMED_OUT, WORKS

MEASURED, NO_MEMORY = "measured", "out of memory"
WORKLOADS = ("cnn", "bert")
_SIZES = (32, 64, 128)
_CHILD = "kdpkit.diagnostics._bench.bench_child"
# In the messages of TensorFlow, JAX, NumPy, C++ and Linux when memory runs out.
_OUT_OF_MEMORY = re.compile(
    "resource_?exhausted|out of memory|memoryerror|bad_alloc|sigkill", re.IGNORECASE
)


@dataclasses.dataclass(frozen=True)
class BenchRow:
    """The speed of one number of replicas with one batch size.

    Attributes:
        replicas: That share a batch.
        per_replica_batch_size: Examples of each; None where the target's own is not known.
        result: `"measured"`, `"cannot"` (not on this machine), `"out of memory"`, `"failed"` or
            `"timed out"`.
        steps_per_second: The median of the rounds; None where it was not measured, as all that
            follows.
        quartiles: Of the steps per second.
        efficiency: Its examples per second, over those of one device times the replicas: of one
            device with the same batch (weak scaling), or with the same global batch (strong).
        peak_memory_gib: Of the GPU that needed most, or of the process.
        memory_of: `"device"` or `"process"`.
        where: The devices.
        reason: Why it was not measured.
    """

    replicas: int
    per_replica_batch_size: int | None
    result: str
    steps_per_second: float | None = None
    quartiles: tuple[float, float] = (0.0, 0.0)
    efficiency: float | None = None
    peak_memory_gib: float | None = None
    memory_of: str | None = None
    where: str = ""
    reason: str = ""

    @property
    def is_measured(self) -> bool:
        """Whether there is a speed."""
        return self.result == MEASURED

    @property
    def global_batch_size(self) -> int | None:
        """Examples of a batch over all replicas."""
        size = self.per_replica_batch_size
        return None if size is None else size * self.replicas

    @property
    def examples_per_second(self) -> float | None:
        """Examples trained in a second, over all replicas."""
        if self.steps_per_second is None or self.global_batch_size is None:
            return None
        return self.steps_per_second * self.global_batch_size


@dataclasses.dataclass(frozen=True)
class BenchReport:
    """What `bench` found; it prints as a table of 80 columns, and a verdict.

    Attributes:
        workload: What was trained.
        backend: `"tensorflow"` or `"jax"`.
        scaling: `"weak"` or `"strong"`: what the efficiency compares with.
        accelerators: GPUs or TPU cores; without them replicas are logical CPUs.
        rows: By batch size and replicas.
    """

    workload: str
    backend: str
    scaling: str
    accelerators: int
    rows: tuple[BenchRow, ...]

    @property
    def works(self) -> bool:
        """Whether something was measured and nothing failed; what does not fit is no failure."""
        results = [row.result for row in self.rows]
        return MEASURED in results and not {FAILED, TIMED_OUT} & {*results}

    @property
    def verdict(self) -> str:
        """Which batch is the fastest, and what replicas gain."""
        return bench_text.verdict(self)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, for JSON."""
        rows = [
            dataclasses.asdict(row)
            | {
                "quartiles": list(row.quartiles) if row.is_measured else None,
                "global_batch_size": row.global_batch_size,
                "examples_per_second": row.examples_per_second,
            }
            for row in self.rows
        ]
        return {"works": self.works} | vars(self) | {"rows": rows, "verdict": self.verdict}

    def __str__(self) -> str:
        """Return the table and the verdict."""
        backend = _packages.TITLES[self.backend]
        same = {"weak": "the same examples on each replica", "strong": "the same global batch"}
        title = f"{self.workload} on {backend}, {self.scaling} scaling: {same[self.scaling]}."
        paragraphs = [check_results.wrapped(text) for text in (title, self.verdict)]
        return "\n\n".join([paragraphs[0], bench_text.table(self.rows), paragraphs[1]])


def bench(
    target: str | None = None,
    *,
    workload: str | None = None,
    replicas: int | Iterable[int] | None = None,
    per_replica_batch_size: int | Iterable[int] | None = None,
    global_batch_size: int | Iterable[int] | None = None,
    backend: str | None = None,
    jit: bool | str | None = "measure",
    split: bool = False,
    seconds: float = 5.0,
    rounds: int = 5,
    timeout_seconds: float = 300.0,
    on_start: Callable[[str], None] = lambda _: None,
) -> BenchReport:
    """Measure how fast this machine trains, by the number of replicas and the batch size.

    Every pair of these is trained in a process of its own, one after the other, on one batch in
    memory: first the steps that compile, then rounds, whose median and quartiles are reported. What
    does not fit into memory, is not possible on this machine, fails or takes too long is a row with
    its reason. No process is left behind, however this ends.

    Replicas are GPUs (or TPU cores), or where there are none logical CPUs, which share the cores.
    One device is measured in any case, to compare with. Speeds are those of this machine at this
    time: compare what one call has measured.

    Args:
        target: `file.py:name` or `module:name` of a function that returns (dataset, model), of
            which the first batch is trained on by the model's `fit`, through
            `kdpkit.training.replica_exact`; instead of a workload.
        workload: `"cnn"`, two convolutions and a dense layer on images of 28 x 28; or `"bert"`,
            BERT tiny as a masked language model (needs KerasHub). None takes the first.
        replicas: Numbers of replicas. None takes 1, 2, 4 and so on up to all GPUs, or 1 and 2
            logical CPUs.
        per_replica_batch_size: Examples of each replica, for weak scaling. None takes 32, 64 and
            128, or the size of the target's own batches.
        global_batch_size: Examples over all replicas, for strong scaling; instead of the other.
        backend: `"tensorflow"` or `"jax"`; None takes Keras' own choice.
        jit: As in `kdpkit.training.TrainingLoop`; a target's model has its own.
        split: Whether a single GPU may be split for several replicas (TensorFlow).
        seconds: How long to train each pair for, besides compiling.
        rounds: Into how many rounds to divide that.
        timeout_seconds: How long each pair may take in all.
        on_start: Called before each pair with what is measured.

    Raises:
        ValueError: A number that is not positive; a global batch that replicas do not divide; two
            kinds of batch sizes; an unknown workload, target or backend.

    >>> bench(global_batch_size=100, replicas=[1, 3])
    Traceback (most recent call last):
    ...
    kdpkit.errors.InputError: `global_batch_size` must be a multiple of `replicas`, ...
    """
    settings = {
        "workload": _workload(workload, target),
        "target": target,
        "seconds": checks.number("seconds", seconds, above=0),
        "rounds": checks.integer("rounds", rounds),
        "jit": jit if jit is None else checks.one_of("jit", jit, (True, False, "measure")),
        "split": bool(split),
    }
    timeout_seconds = checks.number("timeout_seconds", timeout_seconds, above=0)
    counts = None if replicas is None else _several("replicas", replicas)
    sizes, scaling = _sizes(target, per_replica_batch_size, global_batch_size)
    for count in counts or ():
        for size in sizes if scaling == "strong" else ():
            checks.global_batch(size, count)
    measuring = _Measuring(settings, _backend(backend), timeout_seconds, on_start)
    rows = [*measuring.rows(sizes, counts, scaling)]
    return BenchReport(
        workload=target or str(settings["workload"]),
        backend=measuring.backend,
        scaling=scaling,
        accelerators=measuring.accelerators,
        rows=tuple(_with_efficiency(row, rows, scaling) for row in rows),
    )


def _workload(workload: str | None, target: str | None) -> str | None:
    if target is None:
        return str(checks.one_of("workload", workload or WORKLOADS[0], WORKLOADS))
    if workload is not None:
        checks.fail("Set a target or a workload.", target=target, workload=workload)
    place, _, name = target.rpartition(":")
    if not (place and name):
        checks.fail(
            "The target must be `file.py:name` or `module:name` of a function that returns "
            "(dataset, model).",
            target=target,
        )
    if place.endswith(".py"):
        atomic_files.readable_here(place)
    return None


def _several(name: str, values: int | Iterable[int]) -> tuple[int, ...]:
    """Check one positive integer or several; return each once, in order."""
    given = [*values] if isinstance(values, Iterable) else [values]
    if not given or isinstance(values, str):
        checks.fail(
            f"`{name}` must be a positive integer or several.", **dict[str, Any]({name: values})
        )
    return tuple(sorted({checks.integer(name, value) for value in given}))


def _backend(backend: str | None) -> str:
    chosen = _packages.keras_backend()[0] if backend is None else backend
    checks.one_of("backend", chosen, _packages.TITLES)
    if sentence := _packages.missing(chosen):
        checks.fail(sentence, backend=chosen)
    return chosen


def _sizes(
    target: str | None,
    per_replica: int | Iterable[int] | None,
    overall: int | Iterable[int] | None,
) -> tuple[tuple[int | None, ...], str]:
    """Return the batch sizes, None for that of the target's own, and the kind of scaling."""
    if per_replica is not None and overall is not None:
        checks.fail(
            "Set the batch size of a replica (weak scaling) or the global one (strong).",
            per_replica_batch_size=per_replica,
            global_batch_size=overall,
        )
    if overall is not None:
        return _several("global_batch_size", overall), "strong"
    if per_replica is not None:
        return _several("per_replica_batch_size", per_replica), "weak"
    return (_SIZES if target is None else (None,)), "weak"


class _Measuring:
    """The processes of one report."""

    def __init__(
        self,
        settings: dict[str, Any],
        backend: str,
        timeout_seconds: float,
        on_start: Callable[[str], None],
    ) -> None:
        self.backend = backend
        self.accelerators = 0
        self._settings = settings
        self._timeout_seconds = timeout_seconds
        self._on_start = on_start

    def rows(
        self, sizes: tuple[int | None, ...], counts: tuple[int, ...] | None, scaling: str
    ) -> Iterator[BenchRow]:
        """Measure size by size, one device first, which shows how many devices there are."""
        for size in sizes:
            yield self._row(1, size)
            for count in self._all_counts() if counts is None else counts:
                if count > 1 and (scaling == "weak" or size is None):
                    yield self._row(count, size)
                elif count > 1 and size is not None and size % count == 0:
                    yield self._row(count, size // count)

    def _all_counts(self) -> list[int]:
        if not self.accelerators:
            return [2] if cpu_threads.cores() > 1 else []
        powers = [2**power for power in range(1, self.accelerators.bit_length())]
        return sorted({*powers, self.accelerators} - {1})

    def _row(self, replicas: int, size: int | None) -> BenchRow:
        batch = "" if size is None else f" with {size} examples each"
        self._on_start(f"{replicas} replica{'s' * (replicas > 1)}{batch}")
        order = self._settings | {"replicas": replicas, "per_replica_batch_size": size}
        words = (_CHILD, json.dumps(order))
        with _child_program.started(words, {"KERAS_BACKEND": self.backend}) as program:
            outcome = program.wait(self._timeout_seconds)
        for report in outcome.reports:
            self.accelerators = max(self.accelerators, report["accelerators"])
        return _row(BenchRow(replicas, size, FAILED), outcome)


def _row(row: BenchRow, outcome: _child_program.Outcome) -> BenchRow:
    if outcome.result != WORKS:
        is_memory = outcome.result == FAILED and _OUT_OF_MEMORY.search(outcome.reason)
        result = NO_MEMORY if is_memory else outcome.result
        return dataclasses.replace(row, result=result, reason=outcome.reason)
    (report,) = outcome.reports
    names = ("per_replica_batch_size", "peak_memory_gib", "memory_of", "where")
    rates = [1 / seconds for seconds in report["seconds_of_steps"]]
    low, median, high = (
        statistics.quantiles(rates, n=4, method="inclusive") if len(rates) > 1 else rates * 3
    )
    return dataclasses.replace(
        row,
        result=MEASURED,
        steps_per_second=median,
        quartiles=(low, high),
        **{name: report[name] for name in names},
    )


def _with_efficiency(row: BenchRow, rows: Iterable[BenchRow], scaling: str) -> BenchRow:
    """Compare a row with one device that has the same per-replica or global batch."""
    name = "global_batch_size" if scaling == "strong" else "per_replica_batch_size"
    ones = [one for one in rows if one.replicas == 1 and getattr(one, name) == getattr(row, name)]
    alone = ones[0].examples_per_second if ones else None
    if not alone or not row.examples_per_second:
        return row
    efficiency = row.examples_per_second / alone / row.replicas
    return dataclasses.replace(row, efficiency=efficiency)
