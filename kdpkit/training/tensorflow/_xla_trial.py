"""Whether XLA makes a training step faster, found out while training goes on."""

import math
import statistics

_CALLS = 5  # timed for each choice, after the one that compiles
_SECONDS = 0.2  # that the timed calls of a choice take at least


class XlaTrial:
    """Decides for each call of the training function whether XLA compiles it, until one way wins.

    Calls without and with XLA take turns, so that a busy machine slows both alike; the first call
    of each compiles and is not counted. Every call trains, and none is made for the measurement.

    >>> trial = XlaTrial()
    >>> while not trial.verdict:
    ...     trial.record(steps=4, seconds=0.2 if trial.jit else 0.4)
    >>> trial.jit, trial.verdict
    (True, 'XLA: on, a step takes 50.0 ms with it and 100 ms without.')
    """

    def __init__(self) -> None:
        self.jit = False
        self.verdict = ""
        self._seconds_of_steps: dict[bool, list[float]] = {False: [], True: []}
        self._seconds = {False: 0.0, True: 0.0}
        self._is_compiled = {False: False, True: False}

    @property
    def is_new(self) -> bool:
        """Whether no call was recorded."""
        return not any(self._is_compiled.values())

    def record(self, *, steps: int, seconds: float) -> None:
        """Note how long a call took that ran as `jit` says, and choose how the next one runs."""
        if not steps or self.verdict:
            return
        if self._is_compiled[self.jit]:
            self._seconds_of_steps[self.jit].append(seconds / steps)
            self._seconds[self.jit] += seconds
        self._is_compiled[self.jit] = True
        self.jit = not self.jit
        if all(map(self._is_known, (False, True))):
            self._decide()

    def _is_known(self, jit: bool) -> bool:
        return len(self._seconds_of_steps[jit]) >= _CALLS and self._seconds[jit] >= _SECONDS

    def _decide(self) -> None:
        plain, compiled = (statistics.median(self._seconds_of_steps[jit]) for jit in (False, True))
        self.jit = compiled < plain
        self.verdict = (
            f"XLA: {'on' if self.jit else 'off'}, a step takes {_milliseconds(compiled)} with it "
            f"and {_milliseconds(plain)} without."
        )


def _milliseconds(seconds: float) -> str:
    """Return three digits of a time.

    >>> [_milliseconds(seconds) for seconds in (0.0000123, 0.0123, 1.23456)]
    ['0.0123 ms', '12.3 ms', '1230 ms']
    """
    number = seconds * 1000
    digits = max(2 - math.floor(math.log10(number)), 0) if number else 0
    return f"{float(f'{number:.3g}'):.{digits}f} ms"
