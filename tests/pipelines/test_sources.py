import gzip
import pathlib

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hypothesis_numpy

from kdpkit import pipelines
from kdpkit._internal import atomic_files, storage

NUMBER = {"number": tf.TensorSpec([], "int64")}


def lines_of(dataset):
    return [line.numpy().decode() for line in dataset]


def write_numbers(directory, count, **arguments):
    examples = ({"number": number} for number in range(count))
    return pipelines.write_tfrecords(examples, directory / "numbers", **arguments)


def read_numbers(files, **arguments):
    parse = pipelines.example_parser(NUMBER)
    return [int(example["number"]) for example in pipelines.tfrecords(files, parse, **arguments)]


def test_lines_of_plain_and_gzip_files_come_in_the_order_given(tmp_path):
    plain, zipped = tmp_path / "b.txt", tmp_path / "a.txt.gz"
    plain.write_text("first\nsecond\n", encoding="utf-8")
    zipped.write_bytes(gzip.compress("dritte Zeile: äöü\n".encode()))
    lines = pipelines.text_lines([plain, zipped])
    assert lines_of(lines) == ["first", "second", "dritte Zeile: äöü"]
    assert lines_of(pipelines.text_lines(str(zipped), compression="GZIP")) == ["dritte Zeile: äöü"]


def test_characters_across_a_read_block_are_no_error(tmp_path):
    file = tmp_path / "wide.txt"
    file.write_text("x" + "ä" * (1 << 20), encoding="utf-8")
    assert len(lines_of(pipelines.text_lines(file))) == 1


def bad_utf8(path):
    path.write_bytes(b"good\nalso good\nbad \xff line\n")


def cut_utf8(path):
    path.write_bytes("good\nends in ä".encode()[:-1])


def truncated_gzip(path):
    path.write_bytes(gzip.compress(b"a line of text\n" * 1000)[:-20])


def corrupt_gzip(path):
    content = bytearray(gzip.compress(b"a line of text\n" * 1000))
    content[20] ^= 255
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (pathlib.Path.as_posix, "There is no such file: .*text"),
        (pathlib.Path.mkdir, "A file is needed, and this is a directory: .*text"),
        (pathlib.Path.touch, "The file is empty: .*text"),
        (bad_utf8, r"not UTF-8 text \(byte 0xff in line 3\): .*text.*iconv"),
        (cut_utf8, r"not UTF-8 text \(byte 0xc3 in line 2\): .*text"),
        (truncated_gzip, r"GZIP file is damaged or incomplete \(.*\): .*text.*Copy"),
        (corrupt_gzip, r"GZIP file is damaged or incomplete \(.*\): .*text.*Copy"),
    ],
)
def test_a_bad_text_file_is_named_before_training(tmp_path, damage, sentence):
    path = tmp_path / "text"
    damage(path)
    with pytest.raises(ValueError, match=sentence):
        pipelines.text_lines(path)


@settings(max_examples=10)
@given(
    count=st.integers(1, 40),
    shards=st.integers(1, 4),
    compression=st.sampled_from([None, "GZIP"]),
    at_once=st.integers(1, 5),
)
def test_records_come_back_once_each_in_the_same_order_every_time(
    tmp_path_factory, count, shards, compression, at_once
):
    shards = min(shards, count)
    directory = tmp_path_factory.mktemp("records")
    files = write_numbers(directory, count, shards=shards, compression=compression)
    assert len(files) == shards
    pattern = str(directory / "numbers-*.tfrecord")
    numbers = read_numbers(pattern, files_at_once=at_once, validate=True)
    assert sorted(numbers) == list(range(count))
    assert read_numbers(pattern, files_at_once=at_once) == numbers
    assert pipelines.validate_tfrecords(pattern) == count


def test_files_read_at_once_alternate(tmp_path):
    files = write_numbers(tmp_path, 6, shards=2)
    assert read_numbers(files) == [0, 1, 2, 3, 4, 5]
    assert read_numbers(files, files_at_once=1) == [0, 2, 4, 1, 3, 5]


arrays = st.sampled_from(["uint8", "int32", "int64", "float32", "bool"]).flatmap(
    lambda dtype: hypothesis_numpy.arrays(
        dtype,
        hypothesis_numpy.array_shapes(max_dims=3, max_side=4),
        elements={"allow_nan": False} if dtype == "float32" else None,
    )
)


@pytest.mark.slow
@settings(max_examples=20)
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
        assert batch["array"].shape == (2, *array.shape)
        np.testing.assert_array_equal(batch["array"], [array, array])
        assert [word.decode() for word in batch["text"].numpy()] == [text, text]


def test_an_array_of_another_size_than_declared_is_an_error_in_a_batch_too(tmp_path):
    examples = [{"image": np.zeros(size, "uint8")} for size in (8, 8)]
    files = pipelines.write_tfrecords(examples, tmp_path / "images")
    parse = pipelines.example_parser({"image": tf.TensorSpec([4], "uint8")})
    for records in (pipelines.tfrecords(files), pipelines.tfrecords(files).batch(2)):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[4\]|reshape"):
            list(records.map(parse))


def test_records_are_shuffled_and_parsed_in_batches_by_a_training_pipeline(tmp_path):
    files = write_numbers(tmp_path, 12, shards=3)
    parse = pipelines.example_parser(NUMBER)
    train = pipelines.train_pipeline(
        pipelines.tfrecords(files),
        global_batch_size=4,
        augment=lambda records, _: parse(records)["number"],
    )
    batches = [batch.numpy() for batch in train]
    assert train.element_spec.shape == (4,)
    assert sorted(np.concatenate(batches)) == list(range(12))
    assert list(np.concatenate(batches)) != read_numbers(files)


def test_a_writer_that_fails_leaves_no_file(tmp_path):
    def examples():
        yield {"number": 1}
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        pipelines.write_tfrecords(examples(), tmp_path / "broken")
    assert list(tmp_path.iterdir()) == []


def flip_a_byte(file, position):
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


def test_a_damaged_record_is_named_with_its_file(tmp_path):
    good, bad = map(pathlib.Path, write_numbers(tmp_path, 8, shards=2, compression=None))
    size = bad.stat().st_size // 4
    flip_a_byte(bad, 2 * size + size // 2)
    with pytest.raises(ValueError, match=rf"Record 2 \(counted from 0\) of .*{bad.name} is dam"):
        pipelines.validate_tfrecords([good, bad])
    with pytest.raises(ValueError, match=rf"Record 2 .*{bad.name}.*corrupted record at"):
        read_numbers([good, bad], validate=True)


@pytest.mark.parametrize("compression", [None, "GZIP"])
@pytest.mark.parametrize("missing", [1, 9, 30])
def test_a_truncated_record_file_is_named(tmp_path, compression, missing):
    (file,) = map(pathlib.Path, write_numbers(tmp_path, 50, compression=compression))
    file.write_bytes(file.read_bytes()[:-missing])
    with pytest.raises(ValueError, match=rf"(damaged|breaks off).*{file.name}|{file.name} is dam"):
        pipelines.validate_tfrecords(file)


def test_a_file_of_something_else_is_no_tfrecord_file(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("not records at all, but long enough to look like some")
    with pytest.raises(ValueError, match=r"Record 0 .*Is this even a TFRecord file"):
        pipelines.validate_tfrecords(file)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda at: read_numbers(f"{at}/none-*.tfrecord"), "No file matches: .*none-"),
        (lambda _: read_numbers([]), "`paths` names no file"),
        (lambda _: pipelines.text_lines([]), "`paths` names no file"),
        (lambda at: write_numbers(at, 0), "too few examples.*examples=0, shards=1"),
        (lambda at: write_numbers(at, 2, shards=3), "too few examples.*examples=2, shards=3"),
        (lambda at: write_numbers(at, 2, shards=0), "`shards` must be a positive"),
        (
            lambda _: pipelines.example_parser({"x": tf.TensorSpec([3], tf.string)}),
            r"`x` is one text or bytes.*shape=TensorShape\(\[3\]\)",
        ),
        (lambda at: write_numbers(at, 2, compression="ZIP"), "`compression` must be one of"),
        (
            lambda at: pipelines.write_tfrecords([{"x": np.zeros(1, complex)}], at / "c"),
            "Feature `x` cannot be stored.*complex128",
        ),
        (
            lambda _: pipelines.example_parser({"x": tf.TensorSpec([None])}),
            "Feature `x` needs a static shape",
        ),
    ],
)
def test_bad_arguments_get_one_sentence(tmp_path, call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_an_older_writing_left_is_not_read_with_the_new_files(tmp_path):
    for shards in (4, 2):
        files = write_numbers(tmp_path, 8, shards=shards)
    pattern = files[0].replace("-00000-of-00002", "-*")
    with pytest.raises(ValueError, match="several runs.*into 2 and into 4 files.*Delete"):
        read_numbers(pattern)
    assert sorted(read_numbers(files[0].replace("-00000-of", "-*-of"))) == sorted(
        read_numbers(files)
    )


def test_compressed_and_plain_files_cannot_be_mixed(tmp_path):
    for name, compression in (("a", None), ("b", "GZIP")):
        (tmp_path / name).mkdir()
        write_numbers(tmp_path / name, 2, compression=compression)
    with pytest.raises(ValueError, match="Compressed and plain TFRecord files cannot be mixed"):
        read_numbers(f"{tmp_path}/*/*.tfrecord")


in_object_storage = pytest.mark.parametrize("remote", ["file"], indirect=True)


@in_object_storage
def test_text_and_vocabularies_are_read_from_object_storage(remote):
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]
    for name, lines in (("text.txt", ["one", "two"]), ("vocabulary.txt", tokens)):
        with atomic_files.replacing(f"{remote}/{name}") as temporary:
            temporary.write_text("\n".join(lines) + "\n")
    assert lines_of(pipelines.text_lines(f"{remote}/text.txt")) == ["one", "two"]
    assert pipelines.read_vocabulary(f"{remote}/vocabulary.txt") == tokens


@in_object_storage
@pytest.mark.parametrize("compression", [None, "GZIP"])
def test_records_go_through_object_storage(remote, compression):
    directory = storage.path(remote) / "records"
    files = write_numbers(directory, 7, shards=2, compression=compression)
    assert sorted(path.name for path in directory.iterdir()) == [
        "numbers-00000-of-00002.tfrecord",
        "numbers-00001-of-00002.tfrecord",
    ]
    assert sorted(read_numbers(f"{directory}/numbers-*", validate=True)) == list(range(7))
    assert pipelines.validate_tfrecords(files) == 7


@in_object_storage
def test_a_writer_that_fails_leaves_no_file_in_object_storage(remote):
    with pytest.raises(ValueError, match="too few examples"):
        write_numbers(storage.path(remote), 1, shards=2)
    assert [*storage.path(remote).iterdir()] == []


@in_object_storage
def test_files_that_are_missing_in_object_storage_are_named(remote):
    with pytest.raises(ValueError, match=f"There is no such file: {remote}/none.txt"):
        pipelines.text_lines(f"{remote}/none.txt")
    with pytest.raises(ValueError, match=f"No file matches: {remote}/none-"):
        read_numbers(f"{remote}/none-*")


@pytest.mark.parametrize(
    "call",
    [
        lambda: pipelines.text_lines("memory://bucket/x"),
        lambda: read_numbers("memory://bucket/x-*"),
        lambda: pipelines.write_tfrecords([{"x": 1}], "memory://bucket/x"),
    ],
)
def test_a_scheme_that_tensorflow_does_not_know_raises(call):
    with pytest.raises(ValueError, match="does not know memory://.*memory://bucket/x.*Use one of"):
        call()


# Not even the administrator may write there.
@pytest.mark.parametrize("path", ["/sys/kernel/x", "/proc/x/y", "/dev/null/x"])
def test_a_directory_that_takes_no_records_is_named(path):
    sentence = rf"cannot be written \([\w /]+\): {path}-00000.*Pass a path in a directory with room"
    with pytest.raises(OSError, match=sentence):
        pipelines.write_tfrecords([{"x": 1}], path)


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="Linux has a full disk to try")
def test_a_disk_that_is_full_is_named(tmp_path):
    (tmp_path / "x-00000-of-00001.tfrecord.unfinished").symlink_to("/dev/full")
    with pytest.raises(
        OSError, match=r"cannot be written \(No space left on device\): .*with room"
    ):
        pipelines.write_tfrecords([{"x": b"1" * 10_000_000}] * 3, tmp_path / "x")


def test_a_path_where_records_cannot_be_written_is_named():
    with pytest.raises(OSError, match="file:///sys/kernel/x"):  # not even the administrator
        pipelines.write_tfrecords([{"x": 1}], "file:///sys/kernel/x")
