import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from kdpkit import pipelines


def write(directory, counts):
    """Write so many numbers, counted on, to each of several files."""
    files, written = [], 0
    for index, count in enumerate(counts):
        files.append(str(directory / f"numbers-{index}.tfrecord"))
        with tf.io.TFRecordWriter(files[-1]) as writer:
            for number in range(written, written + count):
                writer.write(str(number))
        written += count
    return files


def read(files, **arguments):
    records = pipelines.interleave_files(files, tf.data.TFRecordDataset, **arguments)
    return [int(n) for n in records.map(tf.strings.to_number)]


@settings(max_examples=6)
@given(counts=st.lists(st.integers(1, 20), min_size=1, max_size=5), at_once=st.integers(1, 5))
def test_records_come_once_each_in_the_same_order_every_time(tmp_path_factory, counts, at_once):
    directory = tmp_path_factory.mktemp("records")
    files = write(directory, counts)
    numbers = read(f"{directory}/numbers-*.tfrecord", files_at_once=at_once)
    assert sorted(numbers) == [*range(sum(counts))]
    assert read(files, files_at_once=at_once) == numbers


def test_files_read_at_once_alternate(tmp_path):
    files = write(tmp_path, [3, 3])
    assert read(files) == [0, 3, 1, 4, 2, 5]
    assert read(files, files_at_once=1) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("pattern", "sentence"),
    [
        ("none-*.tfrecord", "No file matches: none-"),
        ([], "`pattern` names no file"),
        ("memory://bucket/x-*", "memory://bucket/x-.* cannot be used .*not implemented"),
    ],
)
def test_files_that_are_not_there_get_one_sentence(pattern, sentence):
    with pytest.raises(ValueError, match=sentence):
        read(pattern)


@pytest.mark.parametrize("remote", ["file"], indirect=True)
def test_records_are_read_from_object_storage(remote, tmp_path):
    write(tmp_path, [4, 3])
    assert sorted(read(f"{remote}/numbers-*")) == [*range(7)]
    with pytest.raises(ValueError, match=f"No file matches: {remote}/none-"):
        read(f"{remote}/none-*")
