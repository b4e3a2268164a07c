import pytest
import tensorflow as tf

from kdpkit import pipelines
from tests.processes import run_code


def numbers(dataset):
    return [int(number) for number in dataset]


PROGRAM = """
import sys, tensorflow as tf
from kdpkit import pipelines
source = tf.data.Dataset.range(9).map(lambda number: number * 7)
print([int(number) for number in source.apply(pipelines.cache(sys.argv[1]))])
"""


@pytest.mark.slow
def test_a_second_program_reads_the_cache_of_the_first(tmp_path):
    written = []
    for _ in range(2):
        printed = run_code(PROGRAM, tmp_path).stdout
        assert printed.endswith("[0, 7, 14, 21, 28, 35, 42, 49, 56]\n")
        written.append({file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")})
    assert written[0] == written[1]


def test_a_damaged_cache_is_reported_by_tensorflow(tmp_path):
    cached = tf.data.Dataset.range(100).apply(pipelines.cache(tmp_path))
    (file,) = tmp_path.glob("*/*.data-*")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(tf.errors.DataLossError, match="hecksum"):
        numbers(cached)


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
    with pytest.raises(ValueError, match="directory of this machine.*cache='gs://bucket/cache'"):
        tf.data.Dataset.range(3).apply(pipelines.cache("gs://bucket/cache"))
