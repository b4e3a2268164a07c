import gzip
import itertools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from kdpkit.callbacks import Resume
from kdpkit.pipelines import PipelineConfig, eval_pipeline, lint, train_pipeline
from kdpkit.testing import laws


def of_name(name):
    is_compressed = tf.strings.regex_full_match(name, r".*\.gz")
    return tf.data.TFRecordDataset(name, tf.where(is_compressed, "GZIP", ""))


def as_number(record):
    return tf.strings.to_number(record, tf.int64)


def write(file, numbers, compression=""):
    with tf.io.TFRecordWriter(str(file), compression) as writer:
        for number in numbers:
            writer.write(f"{number:05}".encode())


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """40 files, of which one is empty and one compressed, and the numbers in them."""
    directory = tmp_path_factory.mktemp("files")
    for index in range(40):
        name = f"train-{index:02}.gz" if index == 7 else f"train-{index:02}"
        numbers = range(index * 100, index * 100 + (0 if index == 3 else 20 + index % 3))
        write(directory / name, numbers, "GZIP" if index == 7 else "")
    numbers = [100 * index + k for index in range(40) if index != 3 for k in range(20 + index % 3)]
    return directory, np.array(numbers)


def numbers_of(batches):
    return [int(number) for batch in batches for number in batch]


@settings(max_examples=2)
@given(cache=st.booleans(), buffer=st.sampled_from([0, 50]), seed=st.integers(0, 9))
def test_every_example_of_all_files_comes_once_an_epoch_in_one_order(files, cache, buffer, seed):
    directory, numbers = files
    config = PipelineConfig(cache=cache, shuffle_buffer=buffer, seed=seed, remainder="keep")
    arguments = {"read": of_name, "prepare": as_number, "global_batch_size": 32}

    def build(source):
        return train_pipeline(source, config, **arguments)

    train = build(directory / "train-*")
    names = [*map(str, directory.iterdir())]
    others = [build(source) for source in (names[::-1], tf.data.Dataset.list_files(names))]
    epochs = [numbers_of(train) for _ in range(2)]
    laws.every_example_once(train, examples=numbers)
    assert (epochs[0] == epochs[1]) == (buffer == 0)
    # Neither the order in which they are listed nor how many read at a time changes it.
    assert [numbers_of(other) for other in others] == [epochs[0]] * 2
    assert lint(train) == []


def test_without_a_cache_the_files_are_in_a_new_order_in_each_epoch(files):
    directory, _ = files
    config = PipelineConfig(cache=False, shuffle_buffer=2)
    arguments = {"read": of_name, "prepare": as_number, "global_batch_size": 16}
    train = train_pipeline(directory / "train-*", config, **arguments)
    first = [{number // 100 for number in numbers_of(train)[:100]} for _ in range(2)]
    assert first[0] != first[1]


@pytest.mark.parametrize("cache", [True, False])
def test_files_are_read_on_from_any_batch(files, cache, tmp_path):
    directory, _ = files

    def tracked():
        config = PipelineConfig(cache=cache, shuffle_buffer=40, seed=3)
        arguments = {"read": of_name, "prepare": as_number, "global_batch_size": 32}
        train = train_pipeline(directory / "train-*", config, **arguments)
        return Resume(tmp_path).track(train)

    complete = tracked()
    epochs = [[batch.numpy().tolist() for batch in complete] for _ in range(2)]
    for epoch, step in itertools.product(range(2), (0, 7)):
        resumed = tracked()
        resumed.epoch_counter.move(epoch, step)
        assert [batch.numpy().tolist() for batch in resumed] == epochs[epoch][step:]


def test_files_are_evaluated_in_the_order_of_their_names(tmp_path):
    for index in range(3):
        (tmp_path / f"{index}.txt").write_text("".join(f"{index}{k:02}\n" for k in range(20)))
    arguments = {"read": tf.data.TextLineDataset, "global_batch_size": 60}
    (batch,) = eval_pipeline(tmp_path / "*.txt", prepare=as_number, **arguments)
    in_turn = [
        (index, k) for first in (0, 16) for index in range(3) for k in range(first, first + 16)
    ]
    assert batch.numpy().tolist() == [100 * index + k for index, k in in_turn if k < 20]


def cut(size):
    return lambda file, data: file.write_bytes(data[:size])


#: What happens to a file of 20 records of 5 bytes, and what the sentence has.
DAMAGE = {
    "in a header": (cut(15 * 21 + 3), "last record is not complete"),
    "in a record": (cut(15 * 21 + 14), "last record is not complete"),
    "after a length": (cut(15 * 21 + 8), "last record is not complete"),
    "in a first record": (cut(1), "last record is not complete"),
    "a length": (lambda file, data: file.write_bytes(data[:21] + b"\7" + data[22:]), "damaged"),
    "compressed": (lambda file, data: file.write_bytes(gzip.compress(data)), "is compressed"),
    "gone": (lambda file, _: file.unlink(), "cannot be read"),
    "a directory": (lambda file, _: (file.unlink(), file.mkdir()), "Is a directory"),
}


@pytest.mark.parametrize(("damage", "sentence"), DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("build", [train_pipeline, eval_pipeline])
def test_a_file_that_was_cut_is_named(tmp_path, build, damage, sentence):
    files = [tmp_path / name for name in "abc"]
    for file in files:
        write(file, range(20))
    damage(files[1], files[1].read_bytes())
    with pytest.raises(ValueError, match=f"A file of `source`.*{sentence}.*{files[1]}'"):
        build(files, read=tf.data.TFRecordDataset, global_batch_size=4)


def test_what_was_cut_is_read_as_shorter(tmp_path):
    """Without an error: this is why the builders look at files."""
    records, lines = tmp_path / "records", tmp_path / "lines.gz"
    write(records, range(20))
    cut(15 * 21 + 3)(records, records.read_bytes())
    assert len([*tf.data.TFRecordDataset(str(records))]) == 15
    packed = gzip.compress(b"".join(b"%d\n" % k for k in range(2000)))
    lines.write_bytes(packed[: len(packed) // 2])
    assert 0 < len([*tf.data.TextLineDataset(str(lines), "GZIP")]) < 2000


@pytest.mark.parametrize("records", [True, False])
def test_a_compressed_file_that_was_cut_is_named(tmp_path, records):
    reader = tf.data.TFRecordDataset if records else tf.data.TextLineDataset
    file = tmp_path / "a.gz"
    if records:
        write(file, range(2000), "GZIP")
    else:
        file.write_bytes(gzip.compress(b"".join(b"%d\n" % k for k in range(2000))))
    arguments = {"read": lambda name: reader(name, "GZIP"), "global_batch_size": 4}
    assert len(train_pipeline([file], **arguments)) == 500
    file.write_bytes(file.read_bytes()[:-2000])
    with pytest.raises(ValueError, match=f"was cut, or is damaged.*{file}"):
        train_pipeline([file], **arguments)


@pytest.mark.parametrize("build", [train_pipeline, eval_pipeline])
@pytest.mark.parametrize(
    ("source", "read", "sentence"),
    [
        ([], of_name, "names of files.*source=\\[\\]"),
        (3, of_name, "names of files.*source=3"),
        ("nothing-*", of_name, "matches.*nothing-"),
        ([__file__, __file__], of_name, "each once.*repeated=.*test_files"),
        ([1, 2], of_name, "names of files.*source=\\[1, 2\\]"),
        ([__file__], lambda name: name, "`read` must return a tf.data.Dataset"),
        ([__file__], lambda name: tf.data.TextLineDataset(name).batch(7), "`read` must.*batch.7."),
        ([__file__], lambda name: tf.data.TextLineDataset(name).repeat(), "`read` repeats"),
    ],
)
def test_bad_files_get_one_sentence(build, source, read, sentence):
    with pytest.raises(ValueError, match=sentence):
        build(source, read=read, global_batch_size=4)


def test_names_may_have_brackets_and_any_type(tmp_path):
    file = tmp_path / "a[1] b*.rec"
    write(file, range(6))
    name = str(file)
    for source in (file, name, name.encode(), [file], np.array([name]), tf.constant([name])):
        batches = eval_pipeline(source, read=tf.data.TFRecordDataset, global_batch_size=4)
        assert len(batches) == 2


def test_a_compression_that_is_not_gzip_is_not_taken_for_damage(tmp_path):
    write(tmp_path / "a", range(6), "ZLIB")
    batches = eval_pipeline(
        tmp_path / "a", read=lambda name: tf.data.TFRecordDataset(name, "ZLIB"), global_batch_size=4
    )
    assert len(batches) == 2
