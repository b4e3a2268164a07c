"""Examples that other processes prepare are those that this one would prepare, in their order."""

import contextlib
import gc
import os
import socket
import subprocess
import sys
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from kdpkit import callbacks, testing
from kdpkit.pipelines import (
    PipelineConfig,
    data_service,
    eval_pipeline,
    prepare_with_services,
    train_pipeline,
)
from kdpkit.training import replica_exact

pytestmark = pytest.mark.timeout(600)

# A service that imports TensorFlow alone.
PROCESS = """
import sys
import tensorflow as tf
service = tf.data.experimental.service
dispatcher = service.DispatchServer(service.DispatcherConfig(port=int(sys.argv[1])))
address = dispatcher.target.split("://")[1]
worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=address))
print(address, flush=True)
sys.stdin.read()
"""

PREPARED = {
    "numbers": lambda number: number * 3,
    "vectors of any length": lambda number: tf.range(number % 5),
    "features and label": lambda number: ({"x": tf.fill([2, 3], number)}, number % 2 == 0),
    "text and ragged": lambda number: (
        tf.strings.as_string(number),
        tf.ragged.range(tf.stack([number % 3, number % 4])),
    ),
    "noise": lambda number: tf.random.stateless_normal([2], [7, number]),
}


@pytest.fixture(scope="module")
def services():
    """Start three services in this process; return their addresses."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(data_service()).address for _ in range(3)]


@contextlib.contextmanager
def service_process(port=0):
    """Start a service in a process of its own; return the process and its address."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def plain(dataset):
    """Return the examples as nested lists and tuples of Python values."""

    def value(tensor):
        listed = tensor.to_list() if isinstance(tensor, tf.RaggedTensor) else tensor.numpy()
        return listed.tolist() if isinstance(listed, np.ndarray) else listed

    return [tf.nest.map_structure(value, example) for example in dataset]


@pytest.mark.slow
@settings(max_examples=6)
@given(
    examples=st.one_of(st.integers(0, 10), st.integers(0, 700)),
    count=st.integers(1, 3),
    prepare=st.sampled_from(sorted(PREPARED)),
    keep=st.sampled_from([None, 2, 3]),
)
def test_examples_and_order_are_those_of_a_plain_map(services, examples, count, prepare, keep):
    source = tf.data.Dataset.range(examples)
    if keep is not None:
        source = source.filter(lambda number: number % keep == 1)
    here = source.map(PREPARED[prepare])
    there = source.apply(prepare_with_services(PREPARED[prepare], services[:count]))
    assert there.element_spec == here.element_spec
    assert there.cardinality() == here.cardinality()
    assert plain(there) == plain(here)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("cache", [None, "memory", "directory"])
def test_a_pipeline_gives_the_same_epochs_with_and_without_services(services, cache, tmp_path):
    def epochs(given):
        config = PipelineConfig(cache=tmp_path / str(given) if cache == "directory" else cache)
        train = train_pipeline(
            tf.data.Dataset.range(20),
            config,
            global_batch_size=4,
            keep=lambda number: number > 3,
            prepare=lambda number: number * 5,
            services=given,
        )
        evaluation = eval_pipeline(
            tf.data.Dataset.range(5).map(lambda number: (number, number)),
            config,
            global_batch_size=2,
            prepare=lambda x, y: (x * 2, y),
            services=given,
        )
        return [plain(train) for _ in range(2)], len(train), plain(evaluation)

    assert epochs(services[:2]) == epochs(())


@pytest.mark.slow
def test_a_complete_cache_on_disk_needs_no_service(tmp_path):
    def build(given):
        config = PipelineConfig(cache=tmp_path)
        source = tf.data.Dataset.range(8)
        return train_pipeline(
            source, config, global_batch_size=4, prepare=lambda n: n + 1, services=given
        )

    with data_service() as service:
        filled = build([service.address])
    gone = build([service.address])
    assert plain(gone) == plain(filled) == plain(build(()))
    assert len(list(tmp_path.glob("kdpkit-*"))) == 1


@pytest.mark.slow
def test_training_gives_the_same_weights_to_the_bit(services, tmp_path):
    x, y = testing.toy_classification(24)

    def weights(given, resume=None):
        train = train_pipeline(
            tf.data.Dataset.from_tensor_slices((x, y)),
            global_batch_size=8,
            prepare=lambda x, y: (x * 0.5, y),
            services=given,
        )
        model = testing.tiny_classifier()
        model.compile(
            optimizer=keras.optimizers.SGD(0.5),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        model = replica_exact(model)
        if resume is None:
            model.fit(train, epochs=4, verbose=0)
        else:
            for epochs in (2, 4):  # the second call goes on from the first one's state
                keeper = callbacks.Resume(resume)
                model.fit(keeper.track(train), epochs=epochs, verbose=0, callbacks=[keeper])
        return model.get_weights()

    without = weights(())
    for with_services in (weights(services[:2]), weights(services[:2], tmp_path)):
        for here, there in zip(without, with_services, strict=True):
            np.testing.assert_array_equal(here, there)


def test_two_trainers_at_once_get_all_examples_each(services):
    stage = prepare_with_services(lambda number: number + 1, services[:2])
    results = {}

    def read(trainer):
        results[trainer] = plain(tf.data.Dataset.range(300).apply(stage))

    threads = [threading.Thread(target=read, args=(trainer,)) for trainer in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {trainer: list(range(1, 301)) for trainer in range(2)}


@pytest.mark.slow
def test_garbage_collection_takes_nothing_that_a_pipeline_needs(services):
    stage = prepare_with_services(lambda number: number + 1, services[:2])
    examples = tf.data.Dataset.range(20).apply(stage)
    gc.collect()
    assert plain(examples) == list(range(1, 21))


# Faults.


def large_from(address):
    """Return a pipeline whose examples do not fit into what a service sends ahead."""
    stage = prepare_with_services(lambda number: tf.fill([200_000], number), [address])
    return tf.data.Dataset.range(3000).apply(stage)


@pytest.mark.slow
def test_a_service_that_is_killed_fails_the_pipeline():
    with service_process() as (process, address):
        examples = large_from(address)
        iterator = iter(examples)
        next(iterator)
        process.kill()
        process.wait()
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"service at {address} is gone"):
            for _ in iterator:
                pass
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"service at {address} is gone"):
            next(iter(examples))
        with pytest.raises(ValueError, match=f"Nothing listens .*{address}"):
            large_from(address)


@pytest.mark.exhaustive  # TensorFlow waited for the second service without limit, once in many runs
@pytest.mark.timeout(120, method="thread")
def test_a_service_that_was_killed_may_come_back():
    with service_process() as (process, address):
        examples = large_from(address)
        next(iter(examples))
        process.kill()
        process.wait()
    with service_process(port=int(address.rpartition(":")[2])) as (_, again):
        assert again == address
        with pytest.raises(tf.errors.OpError, match="not found"):  # it knows nothing of before
            next(iter(examples))
        assert int(next(iter(large_from(address)))[0]) == 0


@pytest.mark.slow
def test_a_tokenizer_needs_its_package_in_the_service(services):
    import keras_hub

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]
    tokenizer = keras_hub.models.BertTokenizer(words)
    lines = tf.data.Dataset.from_tensor_slices(["a b", "b", "a a a", ""])
    with (
        service_process() as (_, bare),
        pytest.raises(ValueError, match="does not know .*--import tensorflow_text"),
    ):
        lines.apply(prepare_with_services(tokenizer, [bare]))
    there = lines.apply(prepare_with_services(tokenizer, services[:2]))  # keras_hub imports it
    assert plain(there) == plain(lines.map(tokenizer)) == [[5, 6], [6], [5, 5, 5], []]


def test_an_error_in_prepare_reaches_the_trainer(services):
    def prepare(number):
        tf.debugging.assert_less(number, tf.constant(3, tf.int64), message="too large a number")
        return number

    examples = tf.data.Dataset.range(9).apply(prepare_with_services(prepare, services[:2]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="too large a number"):
        list(examples)


def test_what_cannot_run_elsewhere_raises(services):
    variable = tf.Variable(1, dtype=tf.int64)
    unsupported = {
        "EagerPyFunc": lambda number: tf.py_function(lambda n: n, [number], tf.int64),
        "PyFunc": lambda number: tf.numpy_function(lambda n: n, [number], tf.int64),
        "RandomUniform": lambda _: tf.random.uniform([]),
        "ReadVariableOp": lambda number: number + variable,
    }
    for operation, prepare in unsupported.items():
        stage = prepare_with_services(prepare, services[:1])
        with pytest.raises(ValueError, match=f"no `tf.py_function`.*operation='{operation}'"):
            tf.data.Dataset.range(3).apply(stage)


def test_a_source_that_changes_its_order_raises(services, tmp_path):
    (tmp_path / "a.txt").write_text("a\n")
    stage = prepare_with_services(lambda value: value, services)
    numbers = tf.data.Dataset.range(9)
    for source in (
        numbers.shuffle(9).map(lambda number: number + 1),
        tf.data.Dataset.list_files(str(tmp_path / "*.txt")),
        numbers.interleave(
            tf.data.Dataset.range, cycle_length=2, num_parallel_calls=2, deterministic=False
        ),
    ):
        with pytest.raises(ValueError, match="the same order every time.*shuffle=False"):
            source.apply(stage)


@pytest.mark.parametrize(
    ("services", "sentence"),
    [
        ([], "must name at least one service"),
        ("localhost:5050", "must be a list of strings"),
        (["localhost"], "must be the address and port.*services='localhost'"),
        (["localhost:99999"], "must be the address and port"),
        (["localhost:1"], "Nothing listens at.*localhost:1'.*kdpkit data-service --port 1"),
    ],
)
def test_bad_addresses_get_one_sentence(services, sentence):
    with pytest.raises(ValueError, match=sentence):
        tf.data.Dataset.range(3).apply(prepare_with_services(lambda number: number, services))


@pytest.mark.parametrize("build", [train_pipeline, eval_pipeline])
def test_services_without_anything_to_prepare_raise(build):
    with pytest.raises(ValueError, match="`services` run `prepare`"):
        build(tf.data.Dataset.range(3), global_batch_size=1, services=["localhost:5050"])


def test_a_taken_port_raises():
    with contextlib.closing(socket.create_server(("", 0))) as taken:
        port = taken.getsockname()[1]
        for arguments in ({"port": port}, {"worker_port": port}):
            with (
                pytest.raises(ValueError, match=f"cannot listen there .*port={port}"),
                data_service(**arguments),
            ):
                pass
