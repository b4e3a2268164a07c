"""Correct pipelines, written as the public guides to TensorFlow and Keras write them: no alarm."""

# ruff: noqa: ARG001 the guides are called alike, with the files that some of them read

import numpy as np
import pytest
import tensorflow as tf

from kdpkit.pipelines import lint

Dataset = tf.data.Dataset
AUTOTUNE = tf.data.AUTOTUNE
IMAGES = np.zeros((320, 8, 8, 3), "uint8")
LABELS = np.arange(320, dtype="int32") % 10
GUIDES = {}


def guide(make):
    """Keep a pipeline under its name."""
    GUIDES[make.__name__] = make
    return make


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Write a directory of images by class, lines, a table and records."""
    directory = tmp_path_factory.mktemp("guides")
    for label in ("cats", "dogs"):
        (directory / "images" / label).mkdir(parents=True)
        for index in range(20):
            image = tf.io.encode_jpeg(IMAGES[0]).numpy()
            (directory / "images" / label / f"{index}.jpg").write_bytes(image)
    for index in range(4):
        with tf.io.TFRecordWriter(str(directory / f"{index}.tfrecord")) as records:
            for _ in range(50):
                records.write(tf.train.Example().SerializeToString())
    return directory


def augment(image, label):
    image = tf.image.random_flip_left_right(tf.image.random_crop(image, [6, 6, 3]))
    return image, label


def to_float(image, label):
    return tf.cast(image, tf.float32) / 255.0, label


def read_image(path):
    label = tf.strings.split(path, "/")[-2] == "cats"
    return tf.image.resize(tf.io.decode_jpeg(tf.io.read_file(path), 3), [8, 8]), label


def parse(record):
    features = {"x": tf.io.FixedLenFeature([], tf.float32, 0.0)}
    return tf.io.parse_single_example(record, features)["x"]


@guide
def augmentation_after_the_cache(files):
    dataset = Dataset.from_tensor_slices((IMAGES, LABELS)).cache().shuffle(320)
    return dataset.map(augment, AUTOTUNE).batch(64).prefetch(AUTOTUNE)


@guide
def image_files_split_by_take_and_skip(files):
    paths = Dataset.list_files(str(files / "images/*/*"), shuffle=False)
    paths = paths.shuffle(40, reshuffle_each_iteration=False)
    dataset = paths.skip(8).map(read_image, num_parallel_calls=AUTOTUNE)
    return dataset.cache().shuffle(32).batch(8).prefetch(AUTOTUNE)


@guide
def records_interleaved(files):
    names = Dataset.list_files(str(files / "*.tfrecord"))
    records = names.interleave(
        tf.data.TFRecordDataset, cycle_length=4, num_parallel_calls=AUTOTUNE, deterministic=False
    )
    parsed = records.map(parse, num_parallel_calls=AUTOTUNE)
    return parsed.shuffle(128).batch(32, drop_remainder=True).prefetch(AUTOTUNE)


@guide
def windows_of_a_series(files):
    windows = Dataset.from_tensor_slices(np.zeros(400, "float32"))
    windows = windows.window(21, shift=1, drop_remainder=True)
    series = windows.flat_map(lambda window: window.batch(21))
    return series.shuffle(400).map(lambda one: (one[:-1], one[-1])).batch(32).prefetch(1)


@pytest.mark.parametrize("name", GUIDES)
def test_a_correct_pipeline_gives_no_alarm(name, files):
    assert [str(finding) for finding in lint(GUIDES[name](files))] == []
