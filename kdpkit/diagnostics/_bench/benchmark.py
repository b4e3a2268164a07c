"""`bench`: the speed of a training on this machine, by replicas and batch sizes."""

import dataclasses
import importlib.util
import json
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kdpkit import _checks, _cpu_threads, _files
from kdpkit.diagnostics import (
    _bench_child,
    _bench_text,
    _environment,
    _packages,
    _private,
    _program,
)
from kdpkit.diagnostics._bench_child import FAILED, MEASURED, NO_MEMORY, Order

TIMED_OUT = "timed out"
WORKLOADS = ("cnn", "bert")
_SIZES = (32, 64, 128)
_TITLES = {"tensorflow": "TensorFlow", "jax": "JAX"}
_CHILD = "kdpkit.diagnostics._bench_child"
_KILLED = 128 + 9


@dataclasses.dataclass(frozen=True)
class BenchRow:
    """The speed of one number of replicas with one batch size.

    Attributes:
        replicas: That share a batch.
        per_replica_batch_size: Rows of each; None where the target's own is not known.
        result: `"measured"`, `"cannot"` (not on this machine), `"out of memory"`, `"failed"` or
            `"timed out"`.
        steps_per_second: The median of the rounds; None where it was not measured, as all that
            follows.
        quartiles: Of the steps per second.
        efficiency: Its examples per second, over those of one device times the replicas: of one
            device with the same rows (weak scaling), or with the same global batch (strong).
        peak_memory_gib: Of the GPU that needed most, or of the process.
        memory_of: `"device"` or `"process"`.
        machine_speed: How often one core does a fixed piece of work in a second, just before and
            after: rows between which it differs were not measured on an equally free machine.
        where: The devices.
        reason: Why it was not measured, and the way out.
    """

    replicas: int
    per_replica_batch_size: int | None
    result: str
    steps_per_second: float | None = None
    quartiles: tuple[float, float] = (0.0, 0.0)
    efficiency: float | None = None
    peak_memory_gib: float | None = None
    memory_of: str | None = None
    machine_speed: float | None = None
    where: str = ""
    reason: str = ""

    @property
    def is_measured(self) -> bool:
        """Whether there is a speed."""
        return self.result == MEASURED

    @property
    def global_batch_size(self) -> int | None:
        """Rows of a batch over all replicas."""
        size = self.per_replica_batch_size
        return None if size is None else size * self.replicas

    @property
    def examples_per_second(self) -> float | None:
        """Rows trained in a second, over all replicas."""
        if self.steps_per_second is None or self.global_batch_size is None:
            return None
        return self.steps_per_second * self.global_batch_size


@dataclasses.dataclass(frozen=True)
class BenchReport:
    """What `bench` found; it prints as a table of 80 columns, and a verdict.

    Attributes:
        workload: What was trained.
        backend: `"tensorflow"` or `"jax"`.
        scaling: `"weak"` or `"strong"`: what the efficiency is held against.
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
    def title(self) -> str:
        """The backend as it writes itself."""
        return _TITLES[self.backend]

    @property
    def verdict(self) -> str:
        """Which batch is the fastest, what replicas gain, and what one more of them costs."""
        return _bench_text.verdict(self)

    def to_dict(self) -> dict[str, Any]:
        """Give it as plain values, for JSON."""
        rows = [
            dataclasses.asdict(row)
            | {
                "quartiles": list(row.quartiles) if row.is_measured else None,
                "global_batch_size": row.global_batch_size,
                "examples_per_second": row.examples_per_second,
            }
            for row in self.rows
        ]
        plain = {name: value for name, value in vars(self).items() if name != "rows"}
        return {"works": self.works} | plain | {"rows": rows, "verdict": self.verdict}

    def __str__(self) -> str:
        """Give the table and the verdict."""
        return _bench_text.of(self)


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

    Every pair of these is trained in a process of its own, one after the other, on rows that are in
    memory: first the steps that compile, then rounds, whose median and quartiles are told. What
    does not fit into memory, cannot be on this machine, fails or takes too long is a row with its
    reason. No process is left behind, however this ends.

    Replicas are GPUs (or TPU cores), or where there are none logical CPUs, which share the cores.
    One device is measured in any case, to compare with. Speeds are those of this machine at this
    time: compare what one call has measured.

    Args:
        target: `file.py:name` or `module:name` of a function that gives (dataset, model), of which
            the first batch is trained on by the model's `fit`, through
            `kdpkit.training.replica_exact`; in the place of a workload.
        workload: `"cnn"`, two convolutions and a dense layer on images of 28 x 28; or `"bert"`,
            BERT tiny as a masked language model on rows of 128 tokens, for which KerasHub is
            needed. Both are trained by `kdpkit.training.TrainingLoop`. None takes the first.
        replicas: Numbers of replicas. None takes 1, 2, 4 and so on up to all GPUs, or 1 and 2
            logical CPUs.
        per_replica_batch_size: Rows of each replica, for weak scaling. None takes 32, 64 and 128,
            or the rows of the target's own batches.
        global_batch_size: Rows over all replicas, for strong scaling; in the place of the other.
        backend: `"tensorflow"` or `"jax"`; None takes Keras' own choice.
        jit: As in `kdpkit.training.TrainingLoop`; a target's model has its own.
        split: Whether a single GPU may be split for several replicas (TensorFlow).
        seconds: How long to train each pair for, beside compiling.
        rounds: Into how many rounds to divide that.
        timeout_seconds: How long each pair may take in all.
        on_start: Called before each pair with what is measured.

    Returns:
        The report, with `rows`, `verdict`, `works` and `to_dict()`.

    Raises:
        ValueError: A number that is not positive; a global batch that replicas do not divide; two
            kinds of batch sizes; a workload, a target or a backend that there is not.

    >>> bench(global_batch_size=100, replicas=[1, 3])
    Traceback (most recent call last):
    ...
    kdpkit._checks.InputError: `global_batch_size` must be a multiple of `replicas`, ...
    """
    settings = {
        "workload": _workload(workload, target),
        "target": _target(target),
        "seconds": _checks.number("seconds", seconds, above=0),
        "rounds": _checks.integer("rounds", rounds),
        "jit": jit if jit is None else _checks.one_of("jit", jit, (True, False, "measure")),
        "split": bool(split),
    }
    timeout_seconds = _checks.number("timeout_seconds", timeout_seconds, above=0)
    counts = None if replicas is None else _several("replicas", replicas)
    sizes = _Sizes.of(target, per_replica_batch_size, global_batch_size)
    sizes.check(counts)
    measuring = _Measuring(settings, _backend(backend), timeout_seconds, on_start)
    found = [*measuring.rows(sizes, counts)]
    rows = [_held_against_one(row, found, sizes) for row in found]
    return BenchReport(
        workload=target or str(settings["workload"]),
        backend=measuring.backend,
        scaling="strong" if sizes.are_global else "weak",
        accelerators=measuring.accelerators,
        rows=tuple(rows),
    )


# What is asked for.


def _workload(workload: str | None, target: str | None) -> str | None:
    if target is None:
        return str(_checks.one_of("workload", workload or WORKLOADS[0], WORKLOADS))
    if workload is not None:
        _checks.refuse("Give a target or a workload.", target=target, workload=workload)
    return None


def _target(target: str | None) -> str | None:
    if target is None:
        return None
    place, colon, name = target.rpartition(":")
    if not (place and colon and name):
        _checks.refuse(
            "The target must be `file.py:name` or `module:name` of a function that gives (dataset, "
            "model).",
            target=target,
        )
    if place.endswith(".py"):
        _files.readable_here(place)
    return target


def _several(name: str, values: Any) -> tuple[int, ...]:
    """Accept one positive integer or several; give each once, in order."""
    given = [*values] if isinstance(values, Iterable) else [values]
    if not given or isinstance(values, str):
        _checks.refuse(f"`{name}` must be a positive integer or several.", **{name: values})
    return tuple(sorted({_checks.integer(name, value) for value in given}))


def _backend(backend: str | None) -> str:
    chosen = _environment.chosen_backend() if backend is None else backend
    _checks.one_of("backend", chosen, _TITLES)
    if importlib.util.find_spec(chosen) is None:
        _checks.refuse(
            f"{_TITLES[chosen]} is not installed.", remedy=_packages.way_to(chosen), backend=chosen
        )
    return chosen


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """The batch sizes; None is that of the target's own batches."""

    values: tuple[int | None, ...]
    are_global: bool

    @classmethod
    def of(
        cls,
        target: str | None,
        per_replica: int | Iterable[int] | None,
        overall: int | Iterable[int] | None,
    ) -> "_Sizes":
        if per_replica is not None and overall is not None:
            _checks.refuse(
                "Give the batch size of a replica (weak scaling) or the global one (strong).",
                per_replica_batch_size=per_replica,
                global_batch_size=overall,
            )
        if overall is not None:
            return cls(_several("global_batch_size", overall), are_global=True)
        if per_replica is not None:
            return cls(_several("per_replica_batch_size", per_replica), are_global=False)
        return cls(_SIZES if target is None else (None,), are_global=False)

    def check(self, counts: Iterable[int] | None) -> None:
        """Refuse a global batch that replicas do not divide."""
        for count in counts or ():
            for size in self.values if self.are_global else ():
                _checks.global_batch(size, count)

    def of_replica(self, size: int | None, count: int) -> int | None:
        """Give the rows of each replica."""
        return size // count if self.are_global and size is not None else size

    def fits(self, size: int | None, count: int) -> bool:
        """Tell whether replicas divide a size."""
        return not self.are_global or size is None or size % count == 0


# The processes.


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

    def rows(self, sizes: _Sizes, counts: tuple[int, ...] | None) -> Iterator[BenchRow]:
        """Measure size by size, one device first."""
        for size in sizes.values:
            yield self._row(1, size)  # which tells how many devices there are
            others = self._all_counts() if counts is None else counts
            for count in others:
                if count > 1 and sizes.fits(size, count):
                    yield self._row(count, sizes.of_replica(size, count))

    def _all_counts(self) -> list[int]:
        if not self.accelerators:
            return [2] if _cpu_threads.cores() > 1 else []
        powers = [2**power for power in range(1, self.accelerators.bit_length())]
        return sorted({*powers, self.accelerators} - {1})

    def _row(self, replicas: int, size: int | None) -> BenchRow:
        self._on_start(
            f"{replicas} replica{'s' * (replicas > 1)}"
            + ("" if size is None else f" with {size} rows each")
        )
        order = Order(**self._settings, replicas=replicas, per_replica_batch_size=size)
        words = (_CHILD, json.dumps(dataclasses.asdict(order)))
        with _program.started(words, {"KERAS_BACKEND": self.backend}) as program:
            ended = program.wait(self._timeout_seconds)
        row = _judged(BenchRow(replicas, size, FAILED), ended, self._timeout_seconds)
        for said in ended.said(_bench_child.SIGN):
            self.accelerators = max(self.accelerators, said.get("accelerators", 0))
        return row


def _judged(row: BenchRow, ended: _program.Ended, timeout_seconds: float) -> BenchRow:
    """Tell what a process came to from what it said, and from how it ended."""
    if ended.exit_code is None:
        reason = f"It did not end within {timeout_seconds:g} s. Give it longer with --timeout."
        return dataclasses.replace(row, result=TIMED_OUT, reason=reason)
    for said in ended.said(_bench_child.SIGN):
        if said["result"] != MEASURED:
            reason = _private.without(said["reason"])
            return dataclasses.replace(row, result=said["result"], reason=reason)
        return _measured(row, said)
    if ended.exit_code == _KILLED or "bad_alloc" in ended.stderr:
        reason = f"{ended.how()}. Most likely memory ran out; take a smaller batch."
        return dataclasses.replace(row, result=NO_MEMORY, reason=reason)
    return dataclasses.replace(row, reason=f"{ended.how()}.")


def _measured(row: BenchRow, said: dict[str, Any]) -> BenchRow:
    rates = [1 / seconds for seconds in said["seconds_of_steps"]]
    low, median, high = (
        statistics.quantiles(rates, n=4, method="inclusive") if len(rates) > 1 else rates * 3
    )
    return dataclasses.replace(
        row,
        result=MEASURED,
        per_replica_batch_size=said["per_replica_batch_size"],
        steps_per_second=median,
        quartiles=(low, high),
        peak_memory_gib=said["peak_memory_gib"],
        memory_of=said["memory_of"],
        machine_speed=said["machine_speed"],
        where=said["where"],
    )


def _held_against_one(row: BenchRow, rows: list[BenchRow], sizes: _Sizes) -> BenchRow:
    """Give a row its efficiency, against one device with the same rows or global batch."""

    def size_of(other: BenchRow) -> int | None:
        return other.global_batch_size if sizes.are_global else other.per_replica_batch_size

    one = next(
        (other for other in rows if other.replicas == 1 and size_of(other) == size_of(row)), None
    )
    if one is None or not one.examples_per_second or not row.examples_per_second:
        return row
    efficiency = row.examples_per_second / one.examples_per_second / row.replicas
    return dataclasses.replace(row, efficiency=efficiency)
