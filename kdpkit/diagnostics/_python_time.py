"""How long Python functions of the user run where a framework calls them, and which these are."""

import collections
import functools
import site
import sys
import sysconfig
import threading
import time
from pathlib import Path
from types import FrameType

_EVERY_SECONDS = 0.002
_SWITCH_SECONDS = 0.0005  # at Python's own 0.005 short functions end before a sample is taken
_FRAMEWORKS = ("keras", "tensorflow", "jax")


class PythonWatch:
    """Samples all threads between `start` and `stop`, and adds up the time in the user's functions.

    A function counts while a framework has called it, in whatever thread: a `py_function` of a
    step, a callback, a step that runs eagerly as long as it is not in the framework itself. Waiting
    counts too: the step waits for the function.
    """

    def __init__(self) -> None:
        self._seconds: collections.defaultdict[str, float] = collections.defaultdict(float)
        self._watched = 0.0
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._switch_interval = sys.getswitchinterval()
        self._older: dict[int, FrameType] = {}

    def start(self) -> None:
        """Begin, or go on."""
        self._is_over.clear()
        # Of what ran before, such as the data of another run; it may never end.
        self._older = sys._current_frames()
        self._switch_interval = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_SECONDS)
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop for now."""
        if self._thread is not None:
            self._is_over.set()
            self._thread.join()
            self._thread = None
            self._older = {}
            sys.setswitchinterval(self._switch_interval)

    @property
    def share(self) -> float:
        """The part of the time in which functions of the user ran."""
        return sum(self._seconds.values()) / self._watched if self._watched else 0.0

    @property
    def longest(self) -> str:
        """The function that ran longest, with its file and its first line; "" if none ran."""
        return max(self._seconds, key=lambda name: self._seconds[name], default="")

    def _sample(self) -> None:
        before = time.perf_counter()
        while not self._is_over.wait(_EVERY_SECONDS):
            now = time.perf_counter()
            own = threading.get_ident()
            frames = [
                frame
                for thread, frame in sys._current_frames().items()
                if thread != own and frame is not self._older.get(thread)
            ]
            if running := next(filter(None, map(_called_by_framework, frames)), None):
                self._seconds[running] += now - before
            self._watched += now - before
            before = now


def _called_by_framework(frame: FrameType | None) -> str | None:
    """Name the user's function that a thread is in, if a framework called it and it runs itself."""
    of_user = None
    while frame is not None:
        owner = _owner(frame.f_code.co_filename)
        if owner == "framework":
            return of_user
        if owner == "user":
            code = frame.f_code
            of_user = f"{code.co_name} ({Path(code.co_filename).name}:{code.co_firstlineno})"
        frame = frame.f_back
    return None


@functools.cache
def _owner(file: str) -> str:
    """Tell whose a file is: "framework", "library", or "user"."""
    for directory in _libraries():
        if file.startswith(directory):
            package = file.removeprefix(directory).lstrip("/\\").split("/")[0].split("\\")[0]
            return "framework" if package in _FRAMEWORKS else "library"
    if file.startswith(_OWN):
        return "framework"
    return "library" if file.startswith("<") else "user"


@functools.cache
def _libraries() -> tuple[str, ...]:
    """Give the directories of installed packages, and of Python itself behind them."""
    packages = [*site.getsitepackages(), site.getusersitepackages()]
    packages += [str(Path(module.__file__).parents[1]) for module in _loaded_frameworks()]
    return (*packages, sysconfig.get_path("stdlib"))


def _loaded_frameworks() -> list:
    loaded = (sys.modules.get(name) for name in _FRAMEWORKS)
    return [module for module in loaded if getattr(module, "__file__", None)]


_OWN = str(Path(__file__).parents[1])
