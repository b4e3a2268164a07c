"""The generators, messages of laws that need a framework, and the pytest plugin."""

import sys
import textwrap

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import find, given
from hypothesis import strategies as st

from kdpkit import errors
from kdpkit.testing import generators, laws
from tests.processes import run, run_code
from tests.test_architecture import FRAMEWORKS


@given(st.data(), st.integers(1, 8))
def test_what_is_drawn_is_within_its_limits(data, divisor):
    smallest, largest = sorted([data.draw(st.integers(0, 9)), data.draw(st.integers(0, 40))])
    count = data.draw(generators.example_counts(divisor, min_value=smallest, max_value=largest))
    assert smallest <= count <= largest


@pytest.mark.parametrize("count", [0, 3, 13])
def test_corner_cases_of_batches_of_four_are_drawn(count):
    assert find(generators.example_counts(4), lambda drawn: drawn == count) == count


@pytest.mark.tensorflow
@given(generators.datasets())
def test_datasets_have_the_examples_that_they_name_each_once(data):
    assert len({*map(repr, data.source.as_numpy_iterator())}) == len(data)
    laws.every_example_once(data.dataset, examples=data.examples)
    sizes = [int(tf.nest.flatten(batch)[0].shape[0]) for batch in data.dataset]
    assert sizes[:-1] == [data.global_batch_size] * (len(sizes) - 1)


def test_what_cannot_be_compared_raises():
    with pytest.raises(errors.InputError, match="parts=2, parts_of_examples=1.*`key`"):
        laws.every_example_once(iter([(np.ones(2), np.ones(2))]), examples=2)
    laws.every_example_once(
        iter([(np.ones(2), np.arange(2))]), examples=2, key=lambda batch: batch[1]
    )
    with pytest.raises(AssertionError, match="not among them(.|\n)*changes examples, pass `key`"):
        laws.every_example_once(iter([np.array([0, 10])]), examples=2)
    with pytest.raises(AssertionError, match="different numbers of examples: 2, 3"):
        laws.every_example_once(iter([(np.ones(2), np.ones(3))]), examples=(np.ones(3), np.ones(3)))
    for batches in ([np.ones(2), np.zeros(2)], [(np.ones(2), np.ones(2))], [0, 1]):
        with pytest.raises(errors.InputError, match=r"has batches.*`iter\(batches\)`"):
            laws.every_example_once(batches, examples=4)
    with pytest.raises(AssertionError, match="does not end"):
        laws.equal_steps([iter(int, 1)])
    with pytest.raises(errors.InputError, match="an iterable of batches.*read=None"):
        laws.same_examples_for_any_replicas(lambda _: None, replicas=2)
    with pytest.raises(errors.InputError, match="`after` must be a non-negative.*-1"):
        laws.resumed_run_continues(range, after=-1)
    with pytest.raises(errors.InputError, match="two examples that differ"):
        laws.held_out_does_not_leak(iter, np.ones(2))
    with pytest.raises(errors.InputError, match="the same data at each call"):
        laws.held_out_does_not_leak(lambda _: iter(np.random.random(2)), np.arange(2))


@pytest.mark.tensorflow
def test_examples_of_any_kind_are_compared():
    missing = np.array([[np.nan, 1.0], [2.0, np.nan]])
    laws.every_example_once(iter([missing[::-1].copy()]), examples=missing)
    serialized = np.array([b"\xff\x00\x01", b"\xfe"], object)
    laws.every_example_once(iter([serialized]), examples=serialized)
    listed = [{"text": "a"}, {"text": "b"}]
    laws.every_example_once(iter([listed[:1], listed[1:]]), examples=listed)
    x = np.array([[1, 0], [0, 2], [0, 0]])
    sparse = [tf.sparse.from_dense(x[:2]), tf.sparse.from_dense(x[2:])]
    laws.every_example_once(iter(sparse), examples=x)


def test_runs_that_seed_the_same_global_numbers_are_reproducible():
    def make(seed):
        np.random.seed(seed)
        while True:
            yield iter(np.random.permutation(6))

    laws.reproducible(make, seed=3)


@pytest.mark.tensorflow  # once
def test_only_the_generators_need_hypothesis_and_say_so():
    code = """
    import sys
    sys.modules["hypothesis"] = None
    from kdpkit import testing
    testing.laws.every_example_once(range(3), examples=3)
    try:
        testing.generators
    except ImportError as error:
        print(error)
    print(*{name.split(".")[0] for name in sys.modules})
    """
    done = run_code(textwrap.dedent(code), check=False)
    message, loaded = done.stdout.splitlines()
    assert message.startswith("`kdpkit.testing.generators` needs Hypothesis. Run `pip install")
    assert FRAMEWORKS & {*loaded.split()} == {"numpy"}


@pytest.mark.tensorflow  # once: it is a process on JAX
def test_without_tensorflow_datasets_are_arrays():
    code = """
    import sys
    sys.modules["tensorflow"] = None
    from hypothesis import given, settings
    from kdpkit.testing import generators, laws

    @settings(deadline=None)
    @given(generators.datasets())
    def law(data):
        assert type(data.dataset).__name__ == "ArrayBatches" and len(data)
        laws.every_example_once(data.dataset, examples=data.examples)

    law()
    print("passed")
    """
    done = run_code(textwrap.dedent(code), KERAS_BACKEND="jax", check=False)
    assert done.stdout == "passed\n", done.stderr


TESTS = """
import sys
import pytest

def test_what_is_loaded():
    print(*{name.split(".")[0] for name in sys.modules})

@pytest.mark.kdpkit_devices(3)
def test_on_three_devices():
    import keras
    assert len(keras.distribution.list_devices()) == 3

@pytest.mark.kdpkit_devices(4)
def test_on_four_devices():
    raise RuntimeError
"""


def with_plugin(directory, tests, *flags, **variables):
    (directory / "test_devices.py").write_text(tests)
    command = (sys.executable, "-m", "pytest", "-p", "kdpkit.testing.pytest_plugin", *flags)
    done = run(*command, cwd=directory, check=False, **variables)
    return done.stdout + done.stderr


@pytest.mark.tensorflow  # once
def test_the_plugin_makes_devices_and_skips_what_needs_more(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\nkdpkit_devices = 3\n")
    flags, unset = ("-rs", "--strict-markers", "--strict-config"), {"XLA_FLAGS": ""}
    printed = with_plugin(tmp_path, TESTS, *flags, KERAS_BACKEND="jax", **unset)
    assert "2 passed, 1 skipped" in printed, printed
    assert "needs 4 devices, and there are 3" in printed


@pytest.mark.tensorflow  # once
@pytest.mark.parametrize(
    ("setting", "marker", "sentence"),
    [
        ("four", "4", "ERROR: `kdpkit_devices` must be a positive integer, and is 'four'."),
        ("", "'4'", "Write `@pytest.mark.kdpkit_devices(4)`, with one number."),
    ],
)
def test_a_wrong_setting_or_marker_is_one_sentence(setting, marker, sentence, tmp_path):
    test = f"import pytest\n@pytest.mark.kdpkit_devices({marker})\nclass TestA:\n"
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nkdpkit_devices = {setting}\n")
    printed = with_plugin(tmp_path, f"{test}    def test_a(self):\n        pass\n")
    assert sentence in printed
    assert "Traceback" not in printed


@pytest.mark.tensorflow  # once
def test_the_plugin_loads_nothing_in_suites_that_do_not_use_it(tmp_path):
    printed = with_plugin(tmp_path, TESTS, "-s", "-k", "loaded")
    assert "1 passed" in printed, printed
    assert not (FRAMEWORKS | {"hypothesis"}) & {*printed.split()}
