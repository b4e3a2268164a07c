"""The toy data, the generators, messages of laws that need a framework, and the pytest plugin."""

import importlib.metadata
import sys
import textwrap
import tomllib

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import find, given
from hypothesis import strategies as st

from kdpkit import errors, scaling, schedules, testing
from kdpkit.testing import generators, laws
from kdpkit.training import replica_exact
from tests.processes import run, run_code
from tests.test_architecture import FRAMEWORKS, ROOT


def build_clipping():
    model = testing.tiny_classifier()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, clipnorm=0.01), loss)
    return model


@pytest.mark.tensorflow
def test_the_same_training_is_denied_with_what_the_replicas_raised():
    with pytest.raises(AssertionError, match="cannot train.*AddN") as failed:
        laws.same_training_for_any_replicas(
            build_clipping, testing.toy_classification(9), replicas=2
        )
    assert "AddN" in str(failed.value.__cause__)


@pytest.mark.slow
@pytest.mark.tensorflow
@pytest.mark.parametrize("layers", [(), ("Dense", "BatchNormalization"), ("Dropout",)])
def test_models_that_are_drawn_train_what_one_device_trains(layers):
    for reduction in generators.REDUCTIONS:
        build = generators.ModelBuilder(layers, "sgd", reduction, replica_exact)
        laws.same_training_for_any_replicas(build, testing.toy_classification(5), replicas=3)


@pytest.mark.tensorflow
def test_shards_of_a_real_strategy_have_every_example_and_are_its_split():
    x = np.arange(5)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(4)])
    read = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(x).batch(5))
    laws.every_example_once(read, examples=x)
    (batch,) = [strategy.experimental_local_results(batch) for batch in read]
    laws.split_as_tf_distribute(batch, of=x)
    with pytest.raises(AssertionError, match="replica 1 is .2. and not .2, 3."):
        laws.split_as_tf_distribute(np.array_split(x, 4), of=x)


def test_toy_models_and_data_depend_on_the_seed_alone():
    first, again = (testing.tiny_classifier(seed=3).get_weights() for _ in range(2))
    other = testing.tiny_classifier(seed=4).get_weights()
    for weight, same in zip(first, again, strict=True):
        np.testing.assert_array_equal(weight, same)
    assert any((weight != new).any() for weight, new in zip(first, other, strict=True))


@given(st.data(), st.integers(1, 8))
def test_sizes_are_within_their_limits(data, divisor):
    smallest, largest = sorted([data.draw(st.integers(0, 9)), data.draw(st.integers(0, 40))])
    for kind in (generators.global_batch_sizes, generators.example_counts):
        assert (
            smallest <= data.draw(kind(divisor, min_value=smallest, max_value=largest)) <= largest
        )


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 7, 13])
def test_corner_cases_of_four_replicas_are_drawn(size):
    found = find(generators.splits(), lambda split: split == (size, 4))
    assert found.sizes == scaling.split_batch(size, 4)
    assert sum(found.sizes) == size


@pytest.mark.tensorflow
@given(generators.datasets())
def test_datasets_have_the_examples_that_they_name_each_once(data):
    assert len({*map(repr, data.source.as_numpy_iterator())}) == len(data)
    laws.every_example_once(data.dataset, examples=data.examples)
    sizes = [int(tf.nest.flatten(batch)[0].shape[0]) for batch in data.dataset]
    assert sizes[:-1] == [data.global_batch_size] * (len(sizes) - 1)


@given(generators.datasets(kinds=("int", "float", "bool")))
def test_weights_of_examples_are_compared_too(data):
    if isinstance(data.examples, tuple) and len(data.examples) == 3 and len(data):
        x, y, weight = data.examples
        laws.every_example_once(iter([(x, y, weight)]), examples=data.examples)
        with pytest.raises(AssertionError, match="not among them"):
            laws.every_example_once(iter([(x, y, weight + 1)]), examples=data.examples)


@given(generators.schedules(), st.data())
def test_steps_of_a_schedule_are_within_their_limits(schedule, data):
    assert 0 <= data.draw(generators.schedule_steps(schedule, max_value=30)) <= 30


def test_steps_are_drawn_around_the_boundaries_of_nested_schedules():
    decay = keras.optimizers.schedules.PolynomialDecay(1.0, 7, 0.0)
    joined = schedules.JoinedSchedule([0.5, schedules.LinearWarmup(decay, 3)], [40])
    for step in (0, 1, 3, 7, 39, 40, 41):
        found = find(generators.schedule_steps(joined), lambda drawn, step=step: drawn == step)
        assert found == step
    steps = generators.schedule_steps(joined, max_value=10**6)
    assert find(steps, lambda drawn: drawn == 41) == 41  # by chance it is not


def test_what_cannot_be_compared_raises():
    with pytest.raises(errors.InputError, match="parts=2, parts_of_examples=1.*`key`"):
        laws.every_example_once(iter([(np.ones(2), np.ones(2))]), examples=2)
    laws.every_example_once(
        iter([(np.ones(2), np.arange(2))]), examples=2, key=lambda batch: batch[1]
    )
    with pytest.raises(AssertionError, match="different numbers of examples: 2, 3"):
        laws.every_example_once(iter([(np.ones(2), np.ones(3))]), examples=(np.ones(3), np.ones(3)))
    with pytest.raises(errors.InputError, match="steps=3, examples=2"):
        laws.accumulation_equals_the_batch(lambda parts: parts[0], np.ones(2), steps=3)
    with pytest.raises(AssertionError, match="does not end"):
        laws.equal_steps([iter(int, 1)])
    with pytest.raises(errors.InputError, match="an iterable of batches.*read=None"):
        laws.same_examples_for_any_replicas(lambda _: None, replicas=2)
    with pytest.raises(errors.InputError, match="`after` must be a non-negative.*-1"):
        laws.resumed_run_continues(range, after=-1)
    with pytest.raises(errors.InputError, match="`through` must have"):
        laws.continuous_schedule(float, through={})


@pytest.mark.parametrize("returned", [None, "text", [[1.0], [2.0, 3.0]]])
def test_a_function_that_returns_no_numbers_is_named(returned):
    calls = [
        lambda of: laws.same_numbers_for_any_replicas(of, replicas=2),
        lambda of: laws.padding_keeps_the_loss(of, (np.ones(1),), (np.ones(2),)),
        lambda of: laws.continuous_schedule(of, through={0: 0.0, 2: 1.0}),
    ]
    for call in calls:
        with pytest.raises(errors.InputError, match="must return"):
            call(lambda _: returned)


def test_examples_of_any_kind_are_compared():
    missing = np.array([[np.nan, 1.0], [2.0, np.nan]])
    laws.every_example_once(iter([missing[::-1].copy()]), examples=missing)
    serialized = np.array([b"\xff\x00\x01", b"\xfe"], object)
    laws.every_example_once(iter([serialized]), examples=serialized)
    listed = [{"text": "a"}, {"text": "b"}]
    laws.every_example_once(iter([listed[:1], listed[1:]]), examples=listed)
    with pytest.raises(AssertionError, match=r"number 1 is .*\+0|number 1 is 2 and not 1"):
        laws.same_numbers_for_any_replicas(lambda r: np.array([1 + 1j * r]), replicas=2)


@pytest.mark.parametrize("label", range(3))
def test_small_batches_have_every_class(label):
    batch = find(generators.labelled_batches(max_size=5), lambda batch: label in batch[1])
    assert batch[1].tolist() == [label]


@pytest.mark.tensorflow
@pytest.mark.parametrize("kind", [keras.metrics.R2Score, keras.metrics.F1Score])
def test_metrics_that_are_built_by_their_first_update_are_tried(kind):
    metric = kind()
    laws.per_example(metric, np.eye(3, 2), np.full((3, 2), 0.6))
    assert not any(np.any(variable) for variable in metric.variables)
    with pytest.raises(errors.InputError, match="Pass the inputs"):
        laws.per_example(metric)


@pytest.mark.tensorflow
def test_sparse_examples_are_compared():
    x = np.array([[1, 0], [0, 2], [0, 0]])
    batches = [tf.sparse.from_dense(x[:2]), tf.sparse.from_dense(x[2:])]
    laws.every_example_once(iter(batches), examples=x)


def test_a_message_shows_of_an_image_its_first_numbers_and_its_last():
    images = np.arange(2 * 32 * 32 * 3.0).reshape(2, 32, 32, 3)
    with pytest.raises(AssertionError, match=r"0.5, 1.5, 2.5.* \.\.\. .*3071.5") as failed:
        laws.every_example_once(iter([images + 0.5, images]), examples=images)
    assert len(str(failed.value)) < 1000


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


@pytest.mark.tensorflow  # once
@pytest.mark.parametrize("backend", ["jax", pytest.param("tensorflow", marks=pytest.mark.slow)])
def test_the_plugin_makes_devices_and_skips_what_needs_more(backend, tmp_path):
    (tmp_path / "test_devices.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nkdpkit_devices = 3\n")
    command = (sys.executable, "-m", "pytest", "-rs", "--strict-markers", "--strict-config")
    plugin = ("-p", "kdpkit.testing.pytest_plugin")
    unset = {"XLA_FLAGS": "", "KERAS_BACKEND": backend}
    done = run(*command, *plugin, cwd=tmp_path, check=False, **unset)
    assert "2 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert "needs 4 devices, and there are 3" in done.stdout


@pytest.mark.tensorflow  # once
@pytest.mark.parametrize(
    ("setting", "marker", "sentence"),
    [
        ("four", "4", "ERROR: `kdpkit_devices` must be a positive integer, and is 'four'."),
        ("0", "4", "ERROR: `kdpkit_devices` must be a positive integer, and is '0'."),
        ("", "", "Write `@pytest.mark.kdpkit_devices(4)`, with one number."),
        ("", "'4'", "Write `@pytest.mark.kdpkit_devices(4)`, with one number."),
    ],
)
def test_a_wrong_setting_or_marker_is_one_sentence(setting, marker, sentence, tmp_path):
    test = f"import pytest\n@pytest.mark.kdpkit_devices({marker})\nclass TestA:\n"
    (tmp_path / "test_marked.py").write_text(f"{test}    def test_a(self):\n        pass\n")
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nkdpkit_devices = {setting}\n")
    plugin = ("-p", "kdpkit.testing.pytest_plugin")
    done = run(sys.executable, "-m", "pytest", *plugin, cwd=tmp_path, check=False)
    assert sentence in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.tensorflow  # once
def test_the_plugin_loads_nothing_in_suites_that_do_not_use_it(tmp_path):
    (tmp_path / "test_devices.py").write_text(TESTS)
    plugin = ("-p", "kdpkit.testing.pytest_plugin")
    command = (sys.executable, "-m", "pytest", "-s", "-k", "loaded")
    done = run(*command, *plugin, cwd=tmp_path, check=False)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert not (FRAMEWORKS | {"hypothesis"}) & {*done.stdout.split()}


def test_pytest_finds_the_plugin_by_its_entry_point():
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"]["pytest11"].items()
    entry = importlib.metadata.EntryPoint(name, value, "pytest11")
    assert entry.load().__name__ == name == "kdpkit.testing.pytest_plugin"
    assert project["optional-dependencies"]["testing"][0].startswith("hypothesis>=6.170")
