import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hypothesis_numpy

from kdpkit import pipelines
from kdpkit._internal import storage

NUMBER = {"number": tf.TensorSpec([], "int64")}


def write_numbers(directory, numbers, **arguments):
    examples = ({"number": number} for number in numbers)
    return pipelines.write_tfrecords(examples, directory / "numbers", **arguments)


def read_numbers(files, **arguments):
    parse = pipelines.example_parser(NUMBER)
    return [int(example["number"]) for example in pipelines.tfrecords(files, parse, **arguments)]


@settings(max_examples=10)
@given(
    counts=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    shards=st.integers(1, 3),
    at_once=st.integers(1, 5),
)
def test_records_come_back_once_each_in_the_same_order_every_time(
    tmp_path_factory, counts, shards, at_once
):
    directory = tmp_path_factory.mktemp("records")
    written, files = 0, []
    for index, count in enumerate(counts):  # compressed and not
        files += write_numbers(
            directory / str(index),
            range(written, written + count),
            shards=min(shards, count),
            compression=("GZIP", None)[index % 2],
        )
        written += count
    numbers = read_numbers(f"{directory}/*/numbers-*.tfrecord", files_at_once=at_once)
    assert sorted(numbers) == list(range(written))
    assert read_numbers(sorted(files), files_at_once=at_once) == numbers


def test_files_read_at_once_alternate(tmp_path):
    files = write_numbers(tmp_path, range(6), shards=2)
    assert read_numbers(files) == [0, 1, 2, 3, 4, 5]
    assert read_numbers(files, files_at_once=1) == [0, 2, 4, 1, 3, 5]


arrays = st.sampled_from(["uint8", "int32", "int64", "float32", "bool"]).flatmap(
    lambda dtype: hypothesis_numpy.arrays(
        dtype,
        hypothesis_numpy.array_shapes(max_dims=3, max_side=4),
        elements={"allow_nan": False} if dtype == "float32" else None,
    )
)


@settings(max_examples=15)
@given(array=arrays, text=st.text())
def test_features_keep_shape_dtype_and_value(tmp_path_factory, array, text):
    directory = tmp_path_factory.mktemp("features")
    files = pipelines.write_tfrecords([{"array": array, "text": text}], directory / "one")
    spec = {"array": tf.TensorSpec(array.shape, array.dtype), "text": tf.TensorSpec([], "string")}
    (example,) = pipelines.tfrecords(files, pipelines.example_parser(spec))
    assert example["array"].dtype == array.dtype
    np.testing.assert_array_equal(example["array"], array)
    assert example["text"].numpy().decode() == text
    for batch in pipelines.tfrecords(files).repeat(2).batch(2).map(pipelines.example_parser(spec)):
        np.testing.assert_array_equal(batch["array"], [array, array])
        assert [word.decode() for word in batch["text"].numpy()] == [text, text]


def test_an_array_of_another_size_than_declared_is_an_error_in_a_batch_too(tmp_path):
    examples = [{"image": np.zeros(size, "uint8")} for size in (8, 8)]
    files = pipelines.write_tfrecords(examples, tmp_path / "images")
    parse = pipelines.example_parser({"image": tf.TensorSpec([4], "uint8")})
    for records in (pipelines.tfrecords(files), pipelines.tfrecords(files).batch(2)):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[4\]|reshape"):
            list(records.map(parse))


def test_a_writer_that_fails_leaves_no_file(tmp_path):
    def examples():
        yield 1
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        write_numbers(tmp_path, examples())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda at: read_numbers(f"{at}/none-*.tfrecord"), "No file matches: .*none-"),
        (lambda _: read_numbers([]), "`pattern` names no file"),
        (lambda at: write_numbers(at, range(2), shards=3), "too few examples.*=2, shards=3"),
        (lambda at: write_numbers(at, range(2), shards=0), "`shards` must be a positive"),
        (lambda at: write_numbers(at, range(2), compression="ZIP"), "`compression` must be one"),
        (
            lambda at: pipelines.write_tfrecords([{"x": np.zeros(1, complex)}], at / "c"),
            "Feature `x` cannot be stored.*complex128",
        ),
        (
            lambda _: pipelines.example_parser({"x": tf.TensorSpec([3], tf.string)}),
            r"`x` is one text or bytes.*shape=TensorShape\(\[3\]\)",
        ),
        (
            lambda _: pipelines.example_parser({"x": tf.TensorSpec([None])}),
            "Feature `x` needs a static shape",
        ),
        (lambda _: read_numbers("memory://bucket/x-*"), "does not know memory://.*Use one of"),
        (
            lambda _: pipelines.write_tfrecords([{"x": 1}], "memory://bucket/x"),
            "does not know memory://.*Use one of",
        ),
    ],
)
def test_bad_arguments_get_one_sentence(tmp_path, call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("remote", ["file"], indirect=True)
def test_records_go_through_object_storage(remote):
    directory = storage.path(remote) / "records"
    write_numbers(directory, range(7), shards=2)
    assert sorted(path.name for path in directory.iterdir()) == [
        "numbers-00000-of-00002.tfrecord",
        "numbers-00001-of-00002.tfrecord",
    ]
    assert sorted(read_numbers(f"{directory}/numbers-*")) == list(range(7))
    with pytest.raises(ValueError, match=f"No file matches: {remote}/none-"):
        read_numbers(f"{remote}/none-*")
