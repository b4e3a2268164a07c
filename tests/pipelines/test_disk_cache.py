import shutil
import subprocess
import sys

import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from kdpkit import pipelines
from kdpkit._internal import atomic_files, storage

OF_PYTHON = pytest.mark.filterwarnings("ignore:The examples come from the cache.*Python functions")


def counted_source(reads):
    """Ten numbers, with a note of each time one is really produced."""

    def read(number):
        reads.append(int(number))
        return number

    return tf.data.Dataset.range(10).map(
        lambda number: tf.ensure_shape(tf.py_function(read, [number], tf.int64), [])
    )


def numbers(dataset):
    return [int(number) for number in dataset]


@pytest.mark.slow
def test_a_second_program_reads_the_cache_and_not_the_source(tmp_path):
    directory = tmp_path / "cache"
    program = (
        "import sys, tensorflow as tf\n"
        "from kdpkit import pipelines\n"
        "source = tf.data.Dataset.range(3).map(lambda n: tf.py_function("
        "lambda n: print('read', int(n)) or n, [n], tf.int64))\n"
        "print([int(n) for n in source.apply(pipelines.cache(sys.argv[1]))])\n"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", program, directory],
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        ).stdout.split("\n")
        for _ in range(2)
    ]
    assert printed[0] == ["read 0", "read 1", "read 2", "[0, 1, 2]", ""]
    assert printed[1][-2:] == ["[0, 1, 2]", ""]


@pytest.mark.slow
@settings(max_examples=10)
@given(data=st.data())
def test_a_damaged_cache_is_filled_again(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("damaged") / "cache"
    source = tf.data.Dataset.range(100).map(lambda number: number * 7)
    expected = numbers(source)
    assert numbers(source.apply(pipelines.cache(directory))) == expected
    file = data.draw(st.sampled_from(sorted(directory.glob("*/*"))))
    content = bytearray(file.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[position] ^= data.draw(st.integers(1, 255))
    else:
        del content[position:]
    file.write_bytes(content)
    assert numbers(source.apply(pipelines.cache(directory))) == expected


def computed():
    # Of a `from_generator` TensorFlow itself gives now this fingerprint, now that.
    return tf.data.Dataset.range(3).map(
        lambda number: tf.numpy_function(lambda n: n, [number], tf.int64)
    )


def looked_up():
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(tf.range(3), tf.range(3)), default_value=-1
    )
    return tf.data.Dataset.from_tensor_slices(tf.range(3)).map(table.lookup)


@pytest.mark.parametrize(
    ("make", "what"), [(computed, "Python functions"), (looked_up, "variables or lookup tables")]
)
def test_it_warns_that_it_cannot_know_whether_a_pipeline_is_the_same(tmp_path, make, what):
    source = make()
    assert numbers(source.apply(pipelines.cache(tmp_path))) == [0, 1, 2]
    with pytest.warns(UserWarning, match=f"from the cache in .*{what}.*pass another directory"):
        assert numbers(source.apply(pipelines.cache(tmp_path))) == [0, 1, 2]


def test_an_interrupted_filling_leaves_nothing_behind(tmp_path):
    def fail(number):
        raise RuntimeError(number)

    broken = tf.data.Dataset.range(3).map(
        lambda number: tf.ensure_shape(tf.py_function(fail, [number], tf.int64), [])
    )
    with pytest.raises(tf.errors.UnknownError):
        broken.apply(pipelines.cache(tmp_path / "cache"))
    assert [path.name for path in tmp_path.rglob("*")] == ["cache"]


@OF_PYTHON
def test_a_complete_cache_is_kept_when_its_directory_moves(tmp_path):
    reads = []
    source = counted_source(reads)
    numbers(source.apply(pipelines.cache(tmp_path / "cache")))
    shutil.move(tmp_path / "cache", tmp_path / "moved")
    assert numbers(source.apply(pipelines.cache(tmp_path / "moved"))) == list(range(10))
    assert len(reads) == 10


def test_each_pipeline_has_a_cache_of_its_own_beside_other_files(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    for factor in (1, 2):
        source = tf.data.Dataset.range(3).map(lambda number, factor=factor: number * factor)
        assert numbers(source.apply(pipelines.cache(tmp_path))) == [0, factor, 2 * factor]
    assert (tmp_path / "thesis.txt").read_text() == "precious"


def test_a_directory_that_cannot_be_written_raises(tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(ValueError, match="cache cannot be kept .*file"):
        tf.data.Dataset.range(3).apply(pipelines.cache(file))


@OF_PYTHON
@pytest.mark.parametrize("remote", ["file"], indirect=True)
def test_a_cache_in_object_storage_is_filled_once_and_again_when_damaged(remote):
    reads = []
    source = counted_source(reads)
    for _ in range(2):
        assert numbers(source.apply(pipelines.cache(f"{remote}/cache"))) == list(range(10))
    assert len(reads) == 10
    directory = storage.path(f"{remote}/cache/kdpkit-{int(source.fingerprint()):016x}")
    *examples, manifest = sorted(directory.iterdir())
    assert manifest.name == "manifest.json"
    assert len(examples) > 1
    with atomic_files.replacing(examples[0]) as temporary:
        temporary.write_bytes(examples[0].read_bytes()[:-1])
    assert numbers(source.apply(pipelines.cache(f"{remote}/cache"))) == list(range(10))
    assert len(reads) == 20


def test_a_cache_without_its_manifest_is_not_taken_for_complete(tmp_path):
    reads, where = [], f"file://{tmp_path}/cache"
    source = counted_source(reads)
    numbers(source.apply(pipelines.cache(where)))
    (manifest,) = tmp_path.rglob("manifest.json")  # which a killed process would not have written
    manifest.unlink()
    numbers(source.apply(pipelines.cache(where)))
    assert len(reads) == 20


def test_two_processes_that_fill_a_cache_write_the_same_bytes(tmp_path):
    source = tf.data.Dataset.range(100).map(lambda n: n * 3, num_parallel_calls=4)
    for name in ("one", "other"):
        numbers(source.apply(pipelines.cache(f"file://{tmp_path}/{name}")))
    one, other = (
        {file.name: file.read_bytes() for file in (tmp_path / name).rglob("*") if file.is_file()}
        for name in ("one", "other")
    )
    assert one == other
    assert one


def test_a_cache_that_tensorflow_cannot_read_raises():
    with pytest.raises(ValueError, match="does not know memory://.*path='memory://cache'.*ram://"):
        tf.data.Dataset.range(3).apply(pipelines.cache("memory://cache"))
