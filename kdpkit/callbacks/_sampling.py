"""Readings taken at intervals in a thread, and summarized for each epoch."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping

Source = Callable[[], Mapping[str, float]]

_PEAKS = ("memory_gib", "temperature_celsius")
# Keras has no hook for failed training, so the thread ends if no hook is called for this long; the
# next hook starts it again. (Reading the frames of the training thread crashed CPython 3.11.)
_QUIET_SECONDS = 600.0
_PATIENCE = 5.0  # seconds to wait for the thread to end


class Summary:
    """The mean of each reading over time, or the peak for memory and temperature.

    Attributes:
        readings: Number of readings.

    >>> summary = Summary()
    >>> summary.add({"gpu_0_utilization": 90.0, "gpu_0_memory_gib": 4.0}, seconds=3.0)
    >>> summary.add({"gpu_0_utilization": 50.0, "gpu_0_memory_gib": 2.0}, seconds=1.0)
    >>> summary.values()
    {'gpu_0_utilization': 80.0, 'gpu_0_memory_gib': 4.0}
    """

    def __init__(self) -> None:
        self.readings = 0
        self._peaks: dict[str, float] = {}
        self._sums: dict[str, float] = {}
        self._seconds: dict[str, float] = {}

    def add(self, values: Mapping[str, float], *, seconds: float) -> None:
        """Add readings, weighted by seconds."""
        self.readings += 1
        seconds = max(seconds, 1e-6)  # at least the clock's resolution
        for name, value in values.items():
            self._peaks[name] = max(value, self._peaks.get(name, value))
            self._sums[name] = self._sums.get(name, 0.0) + value * seconds
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def values(self) -> dict[str, float]:
        """Return the mean or peak of each name."""
        return {
            name: peak if name.endswith(_PEAKS) else self._sums[name] / self._seconds[name]
            for name, peak in self._peaks.items()
        }


class Sampler:
    """Reads the sources at `begin` and `finish`, and in a thread in between.

    Args:
        sources: Functions that return readings by name. One that raises is not called again, and a
            message reports it.
        interval_seconds: Seconds between readings.
    """

    def __init__(self, sources: Iterable[Source], interval_seconds: float) -> None:
        self._sources = [*sources]
        self._interval = interval_seconds
        self._thread: threading.Thread | None = None
        self._has_ended = threading.Event()
        self._last_hook = time.monotonic()
        self._lock = threading.Lock()  # guards the sources and everything below
        self._summary = Summary()
        self._failures: list[str] = []
        self._since: float | None = None  # time of the previous reading; None while paused

    def begin(self) -> None:
        """Discard earlier readings, and count from now on."""
        with self._lock:
            self._summary = Summary()
        self.resume()

    def resume(self) -> None:
        """Count from now on."""
        with self._lock:
            self._read()  # sources that report the time since the last reading start here
            self._since = time.perf_counter()
        self.note_progress()

    def note_progress(self) -> None:
        """Note that training continues, so the thread keeps running."""
        self._last_hook = time.monotonic()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="kdpkit devices", daemon=True)
            self._thread.start()

    def pause(self) -> None:
        """Count up to now, then stop until `resume`."""
        with self._lock:
            self._count()
            self._since = None

    def finish(self) -> tuple[Summary, list[str]]:
        """Pause; return the summary, and messages about failures since the last call."""
        self.pause()
        with self._lock:
            failures, self._failures = self._failures, []
        return self._summary, failures

    def end(self) -> None:
        """End the thread."""
        self._has_ended.set()
        if self._thread:
            self._thread.join(_PATIENCE)

    def _run(self) -> None:
        while not self._has_ended.wait(self._interval):
            if time.monotonic() - self._last_hook > _QUIET_SECONDS:
                return
            with self._lock:
                self._count()

    def _count(self) -> None:
        """Read, for the time since the previous reading."""
        if self._since is not None:
            values, now = self._read(), time.perf_counter()
            self._summary.add(values, seconds=now - self._since)
            self._since = now

    def _read(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for source in [*self._sources]:
            try:
                values |= {name: float(value) for name, value in source().items()}
            except Exception as error:  # any error of a driver or a user's function
                self._sources.remove(source)
                self._failures.append(
                    f"{getattr(source, '__qualname__', source)} has no readings any more "
                    f"({type(error).__name__}: {error}). Training continues; from here on they are "
                    "NaN."
                )
        return values
