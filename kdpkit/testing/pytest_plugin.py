"""A pytest plugin that splits the CPU into logical devices before a framework's runtime starts.

In `pyproject.toml`, for the backend that `KERAS_BACKEND` names:

    [tool.pytest.ini_options]
    kdpkit_devices = 4

`@pytest.mark.kdpkit_devices(4)` skips a test where there are fewer, GPUs and TPUs counted first. In
suites without either nothing is loaded. pytest finds the plugin where kdpkit is installed.
"""

import pytest

from kdpkit import testing


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the setting, a number of logical CPU devices."""
    text = "logical CPU devices for Keras' backend; none are made without this setting"
    parser.addini("kdpkit_devices", text, default="")


def pytest_configure(config: pytest.Config) -> None:
    """Add the marker, and check the setting."""
    text = "kdpkit_devices(count): skipped where Keras' backend has fewer devices"
    config.addinivalue_line("markers", text)
    count = config.getini("kdpkit_devices")
    if count and not (count.isdecimal() and int(count)):
        raise pytest.UsageError(f"`kdpkit_devices` must be a positive integer, and is {count!r}.")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Split the CPU after each `conftest.py` was loaded, before the tests are."""
    config = session.config
    runs_no_test = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if (count := config.getini("kdpkit_devices")) and not runs_no_test:  # pytest-xdist's workers do
        try:
            testing.use_logical_cpus(int(count))
        except ValueError as error:  # a framework has started in a `conftest.py`
            raise pytest.UsageError(str(error)) from error


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a marked test where there are fewer devices."""
    marker = item.get_closest_marker("kdpkit_devices")
    if marker is not None:
        counts = [*marker.args, *marker.kwargs.values()]
        if len(counts) != 1 or not isinstance(counts[0], int):
            pytest.fail("Write `@pytest.mark.kdpkit_devices(4)`, with one number.", pytrace=False)
        import keras

        present = len(keras.distribution.list_devices())
        if present < counts[0]:
            setting = f"the setting `kdpkit_devices = {counts[0]}` makes them on the CPU"
            pytest.skip(f"needs {counts[0]} devices, and there are {present}; {setting}")
