"""Readings taken at intervals in a thread of their own, and summed up epoch by epoch."""

import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from kdpkit.callbacks import _calls

Source = Callable[[], Mapping[str, float]]

_PEAKS = ("memory_gib", "temperature_celsius")
_PATIENCE = 5.0  # seconds to wait for a reading, once, and for the thread at the end


class Summary:
    """The mean of each reading over time, and of those whose highest value counts the highest.

    Attributes:
        readings: How many there were.

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
        """Add what was read, and for how many seconds it stands."""
        self.readings += 1
        seconds = max(seconds, 1e-6)  # of the clock's resolution at least
        for name, value in values.items():
            self._peaks[name] = max(value, self._peaks.get(name, value))
            self._sums[name] = self._sums.get(name, 0.0) + value * seconds
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def values(self) -> dict[str, float]:
        """Give a number for each name."""
        return {
            name: peak if name.endswith(_PEAKS) else self._sums[name] / self._seconds[name]
            for name, peak in self._peaks.items()
        }


class Sampler:
    """A thread that reads while the call that trains is under way, and ends with it.

    What happens in a source, an error or a wait without end, stays in the thread: training hears of
    it in a sentence, and goes on.

    Args:
        sources: Functions that give what they read, by name. One that raises is not asked again.
        interval_seconds: From one reading to the next.
        call: The call that trains, in the thread that makes the sampler.
    """

    def __init__(
        self, sources: Iterable[Source], interval_seconds: float, call: _calls.Call
    ) -> None:
        self._sources = [*sources]
        self._interval = interval_seconds
        self._call = call
        self._trainer = threading.get_ident()
        self._state = threading.Condition()  # guards all that follows
        self._is_counting = False
        self._is_anew = False  # the next reading begins to count, and stands for no time itself
        self._is_awaited = False
        self._has_ended = False
        self._patience = _PATIENCE
        self._summary = Summary()
        self._failures: list[str] = []
        self._thread = threading.Thread(target=self._run, name="kdpkit devices", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Forget what was counted, and count from now on."""
        with self._state:
            self._summary = Summary()
        self.go_on()

    def pause(self) -> None:
        """Count nothing until `go_on`; where nothing was counted, wait a little for one reading."""
        with self._state:
            if self._is_counting and not self._summary.readings:
                self._wait_for_one()
            self._is_counting = False

    def go_on(self) -> None:
        """Count from now on."""
        with self._state:
            self._is_counting = self._is_anew = True
            self._state.notify_all()

    def finish(self) -> Summary:
        """Pause, and give what was counted."""
        self.pause()
        return self._summary

    def _wait_for_one(self) -> None:
        self._is_awaited = True
        self._state.notify_all()
        is_there = self._state.wait_for(
            lambda: self._summary.readings or self._has_ended, self._patience
        )
        self._is_awaited = False
        if not is_there and self._patience:
            self._patience = 0.0  # it is not waited for again
            self._failures.append(
                f"The devices were not read within {_PATIENCE:g} seconds, so epochs that are "
                "shorter than that have no readings."
            )

    def take_failures(self) -> list[str]:
        """Give the sentences on what has failed since the last call."""
        with self._state:
            failures, self._failures = self._failures, []
        return failures

    def end(self) -> None:
        """End the thread; one that hangs in a driver is not waited for."""
        with self._state:
            self._has_ended = True
            self._state.notify_all()
        self._thread.join(_PATIENCE)

    def _run(self) -> None:
        before = time.perf_counter()
        while self._waited_for_turn() and self._is_training():
            values = self._values()
            now = time.perf_counter()
            with self._state:
                if self._is_counting and not self._is_anew:
                    self._summary.add(values, seconds=now - before)
                self._is_anew = False
                self._state.notify_all()
            before = now
        with self._state:
            self._has_ended = True  # whoever waits for a reading waits in vain
            self._state.notify_all()

    def _waited_for_turn(self) -> bool:
        """Wait until it is time to read; tell whether there is more to read."""
        with self._state:
            self._state.wait_for(lambda: self._has_ended or self._is_due(), self._interval)
            return not self._has_ended

    def _is_due(self) -> bool:
        is_first = self._is_awaited and not self._summary.readings
        return self._is_counting and (self._is_anew or is_first)

    def _is_training(self) -> bool:
        return _calls.is_under_way(self._call, sys._current_frames().get(self._trainer))

    def _values(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for source in [*self._sources]:
            try:
                values |= {name: float(value) for name, value in source().items()}
            except Exception as error:  # whatever a driver, or a function of the caller's, raises
                self._sources.remove(source)
                failure = (
                    f"{_name(source)} gives no readings any more ({type(error).__name__}: "
                    f"{error}). Training goes on; from here on they are NaN."
                )
                with self._state:
                    self._failures.append(failure)
        return values


def _name(source: Source) -> str:
    return getattr(source, "__qualname__", "") or str(source)
