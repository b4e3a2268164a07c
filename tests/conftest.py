"""Eight logical CPUs for every test process, on the backend that KERAS_BACKEND names."""

import atexit
import collections
import contextlib
import gc
import importlib.util
import os
import pathlib
import re
import shutil
import signal
import tempfile
import uuid
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
# Processes that start from here on, those that run the tests among them, start sooner.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [
        str(pathlib.Path(__file__).parents[1] / "tools" / "quick_start"),
        str(pathlib.Path(__file__).parents[1]),
        *filter(None, [os.getenv("PYTHONPATH")]),
    ]
)

# What XLA compiles for one test serves all others, in processes that tests start too.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    compiled = os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="kdpkit-xla-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    atexit.register(shutil.rmtree, compiled, ignore_errors=True)

import hypothesis
import pytest

from kdpkit.launch import _child_processes as child_processes
from tests import processes

# XLA as it compiles soonest, for JAX: tests are about what is computed, and each runs a few steps.
# A version that does not know one of these settings ends the process.
SOON_COMPILED = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
NOT_SINCE_JAX_0_11 = "--xla_cpu_use_fusion_emitters=false"

# A shell that runs tests in the background has them ignore Ctrl-C, and `nohup` the end of the
# terminal; some tests send both.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# The examples are the law's, the same on every run; a shared machine's pauses are no failure.
hypothesis.settings.register_profile(
    "kdpkit",
    deadline=None,
    derandomize=True,
    max_examples=50,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("kdpkit")


def pytest_ignore_collect(collection_path):
    """Leave out what imports JAX where there is none."""
    if collection_path.suffix == ".py" and importlib.util.find_spec("jax") is None:
        return bool(re.search(r"^(import|from) jax\b", collection_path.read_text(), re.MULTILINE))
    return None


def pytest_configure(config):
    """Have JAX compile quickly, and load the frameworks where tests run."""
    older = _older(reason="knows other settings of XLA", jax="0.10", tensorflow="2.21")
    if not (older or config.getoption("exhaustive")):
        know_all = _is_older("jax", "0.11") and _is_older("tensorflow", "2.22")
        soon = f"{SOON_COMPILED} {NOT_SINCE_JAX_0_11}" if know_all else SOON_COMPILED
        os.environ["KDPKIT_TESTS_XLA_FLAGS"] = soon
    if hasattr(config, "workerinput") or not config.getoption("numprocesses"):
        from kdpkit import testing  # not in the process that hands tests out: it takes seconds

        testing.use_logical_cpus(8)


def pytest_collection_finish():
    """Collect garbage as Python does, but leave out all that was imported."""
    gc.freeze()
    gc.set_threshold(700, 10, 10)


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run the slow tests too")
    parser.addoption("--exhaustive", action="store_true", help="run these and what repeats others")


def pytest_collection_modifyitems(config, items):
    """Run what was asked for; leave tests of another backend to the process that has it."""
    _mark_cases_beyond_samples(items)
    left_out = {"exhaustive": not config.getoption("exhaustive")}
    left_out["slow"] = left_out["exhaustive"] and not config.getoption("all")
    kept, deselected = [], []
    for item in items:
        unwanted = any(left_out.get(marker.name) for marker in item.iter_markers())
        (deselected if unwanted else kept).append(item)
    config.hook.pytest_deselected(items=deselected)
    items[:] = kept
    backend = os.environ["KERAS_BACKEND"]
    for item in items:
        if item.get_closest_marker("jax") and backend != "jax":
            item.add_marker(pytest.mark.skip(reason="runs in tests/test_environments.py on JAX"))
        if item.get_closest_marker("tensorflow") and backend != "tensorflow":
            item.add_marker(pytest.mark.skip(reason="is about TensorFlow alone"))
        for marker in item.iter_markers("needs"):
            if older := _older(**marker.kwargs):
                item.add_marker(pytest.mark.skip(reason=older))
    _start_with_the_longest(items, getattr(config, "workerinput", {}).get("workercount", 1))


def _start_with_the_longest(items, processes):
    """Begin the part of each process, as `worksteal` cuts them, with tests that take minutes."""
    long, short = [], []
    for item in items:
        limit = item.get_closest_marker("timeout")
        (long if limit and limit.args[0] >= 1800 else short).append(item)
    del items[:]
    for parts in range(processes, 0, -1):
        size = (len(long) + len(short)) // parts
        first = long[::parts]
        del long[::parts]
        items += first + short[: size - len(first)]
        del short[: size - len(first)]


def _mark_cases_beyond_samples(items):
    seen = collections.Counter()
    for item in items:
        sample = item.get_closest_marker("sampled")
        if sample is not None:
            test = item.path, item.originalname
            if seen[test] >= sample.args[0]:
                item.add_marker(pytest.mark.exhaustive)
            seen[test] += 1


def _older(*, reason, **versions):
    """Name the package that is too old for a test, or is not there; empty if none is."""
    return ", ".join(
        f"{package} {_version(package)} is older than {wanted}: {reason}"
        for package, wanted in versions.items()
        if _is_older(package, wanted)
    )


def _is_older(package, wanted):
    return Version(_version(package)) < Version(wanted)


def _version(package):
    for name in (package, f"{package}-nightly"):
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    return "0"


@pytest.fixture(params=["file", "memory"])
def remote(request, tmp_path):
    """Return a directory with a scheme; `memory` begins with a bucket, as object storage does."""
    place = tmp_path if request.param == "file" else f"{tmp_path.name}-{uuid.uuid4()}"
    return f"{request.param}://{place}"


@pytest.fixture
def mark(monkeypatch):
    """Mark all processes that a test starts; fail if any is left, and leave none."""
    own = f"{uuid.uuid4().hex};"
    monkeypatch.setenv(child_processes.MARK, own)
    yield own
    left = processes.left_of(own)
    child_processes.end_marked(own, grace_seconds=0)
    assert left == []


@pytest.fixture(autouse=True)
def _signals_as_before():
    """Leave to the next test the handlers that there were: training that fails leaves some."""
    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _fresh_keras_names():
    """Start every test with the same layer names and random seed."""
    import keras

    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
