"""Pipelines as people write them: public mistakes, each with its correct twin, and guides' own.

They are written again in few words, on small data. `test_lint.py` runs them.
"""

# ruff: noqa: ARG005 -- a function of an example takes features and label

import atexit
import shutil
import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

Dataset = tf.data.Dataset
AUTOTUNE = tf.data.AUTOTUNE
RANDOM = np.random.default_rng(0)
FILES = str(Path(__file__).parent / "*.py")

X = RANDOM.random((2000, 8)).astype("float32")
SORTED = np.arange(2000, dtype="int32") // 200
MIXED = RANDOM.permutation(SORTED)
RARE = (RANDOM.random(2000) < 0.1).astype("int32")
IMAGES = np.zeros((400, 8, 8, 3), "uint8")
MASKS = np.zeros((400, 8, 8, 1), "uint8")


sampled = Dataset.sample_from_datasets


def listed(**settings):
    return Dataset.list_files(FILES, **settings)


def both(*datasets):
    return Dataset.zip(datasets)


def slices(*arrays):
    return Dataset.from_tensor_slices(arrays if len(arrays) > 1 else arrays[0])


def alternating(*datasets):
    turns = Dataset.range(2).repeat()
    return Dataset.choose_from_datasets(datasets, turns, stop_on_empty_dataset=False)


def mixed():
    return slices(X, MIXED)


def ordered():
    return slices(X, SORTED)


def rare_last():
    return ordered().take(1800), ordered().skip(1800)


def two_parts():
    return ordered().take(1000).concatenate(ordered().skip(1000))


def batched(dataset, size=40):
    return dataset.batch(size, drop_remainder=True).prefetch(AUTOTUNE)


def is_rare(wanted):
    return slices(X, RARE).filter(lambda _, y: y == wanted)


def decode(name):
    return tf.reshape(
        tf.cast(tf.io.decode_raw(tf.io.read_file(name), tf.uint8)[:192], "float32"), [8, 8, 3]
    )


def decode_both(name, of_mask):
    return decode(name), decode(of_mask)[..., :1]


def images_and_masks(**settings):
    masks = listed(**settings).map(lambda name: decode(name)[..., :1], AUTOTUNE)
    return both(listed(**settings).map(decode, AUTOTUNE), masks)


def apart(dataset):
    return both(dataset.map(lambda x, y: x), dataset.map(lambda x, y: y))


def noise(x, y):
    return x + np.random.rand(8), y


def helped(x, y):
    return scaled(x), y


def scaled(x):
    from numpy.random import uniform

    return x * uniform(0.9, 1.1)


class Augmentation:
    def __init__(self):
        self.rng = np.random.default_rng(1)

    def shifted(self, x, y):
        return x + self.rng.normal(), y

    def __call__(self, x, y):
        return self.shifted(x, y)


NOISE = keras.layers.GaussianNoise(0.1)


def drawn_by_tensorflow(x, y):
    return x + tf.random.uniform([8]) * np.float32(np.pi), y


def in_python(x, y):
    return tf.ensure_shape(
        tf.numpy_function(lambda x: x + np.random.rand(8).astype("f"), [x], "float32"), [8]
    ), y


def checked(x, y):
    return tf.debugging.check_numerics(x, ""), y


def windows(dataset):
    many = dataset.window(20, shift=1, drop_remainder=True).flat_map(lambda w: w.batch(20))
    return many.map(lambda w: (w[:-1], w[-1]), AUTOTUNE)


def by_batch(dataset):
    return dataset.batch(21, drop_remainder=True).map(lambda w: (w[:-1], w[1:]), AUTOTUNE)


def lines(names, **settings):
    return names.interleave(tf.data.TextLineDataset, num_parallel_calls=AUTOTUNE, **settings)


def reading(**settings):
    return lines(listed(shuffle=False), **settings)


def unordered(dataset):
    options = tf.data.Options()
    options.deterministic = False
    return dataset.with_options(options)


FIT = {"epochs": 3, "steps_per_epoch": 50}


def folder(count=40):
    root = Path(tempfile.mkdtemp(prefix="kdpkit-images-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    for number in range(count):
        path = root / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(tf.io.encode_png(IMAGES[0]).numpy())
    return str(root)


class Flipped(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.image, self.mask = (keras.layers.RandomFlip("horizontal", seed=4) for _ in range(2))

    def call(self, image, mask):
        return self.image(image), self.mask(mask)


def images(label_mode="int", **settings):
    return keras.utils.image_dataset_from_directory(
        folder(), image_size=(8, 8), batch_size=8, label_mode=label_mode, verbose=False, **settings
    )


def flipped(array):
    images = slices(array).cache().map(tf.image.random_flip_left_right, AUTOTUNE)
    return images.shuffle(1000).batch(1)


def contrasted(example, seed):
    return tf.image.stateless_random_contrast(example[0], 0.5, 1, seed), example[1]


def of_pairs(first, second):
    return tuple((a + tf.cast(b, a.dtype)) / 2 for a, b in zip(first, second, strict=True))


TEXTS = np.array([f"a text {number}" for number in range(2000)])
AUGMENT = Flipped()

#: Correct pipelines of tutorials, by where they are from.
TUTORIALS = {
    "tensorflow: cyclegan": lambda: both(*map(flipped, (IMAGES, IMAGES[:300]))),
    "tensorflow: segmentation": lambda: (
        slices(IMAGES, MASKS)
        .cache()
        .shuffle(1000)
        .batch(50)
        .repeat()
        .map(AUGMENT, AUTOTUNE)
        .prefetch(AUTOTUNE)
    ),
    "tensorflow: augmentation with counters": lambda: (
        both(slices(IMAGES, np.arange(400) % 10), (Dataset.counter(), Dataset.counter()))
        .shuffle(1000)
        .map(contrasted, AUTOTUNE)
        .batch(50)
        .prefetch(AUTOTUNE)
    ),
    "tensorflow: rejection sampling": lambda: (
        slices(X, RARE)
        .shuffle(2000)
        .rejection_resample(lambda _, y: y, [0.5, 0.5], [0.9, 0.1])
        .map(lambda _, example: example, AUTOTUNE)
        .batch(10)
        .prefetch(2)
    ),
    "tensorflow: time series": lambda: keras.utils.timeseries_dataset_from_array(
        X, None, sequence_length=24, shuffle=True, batch_size=32
    ).map(lambda w: (w[:, :-1], w[:, -1:])),
    "keras: records without an order": lambda: (
        unordered(lines(listed()))
        .map(tf.strings.length, AUTOTUNE)
        .shuffle(2048)
        .prefetch(AUTOTUNE)
        .batch(64)
    ),
    "keras: segmentation of permuted paths": lambda: (
        slices(IMAGES, MASKS).map(lambda x, y: (tf.cast(x, "float32"), y), AUTOTUNE).batch(50)
    ),
    "keras: forecasting": lambda: keras.utils.timeseries_dataset_from_array(
        X, np.arange(2000) // 500, sequence_length=24, batch_size=32, shuffle=False
    ),
    "keras: labels of an activity, windows": lambda: (
        slices(X, SORTED)
        .window(20, shift=20, drop_remainder=True)
        .flat_map(lambda x, y: both(x.batch(20), y.batch(20)))
        .shuffle(100)
        .batch(10)
    ),
    "keras: mixup": lambda: both(
        mixed().shuffle(2000).batch(50), mixed().shuffle(2000).batch(50)
    ).map(of_pairs, AUTOTUNE),
    "keras: triplets": lambda: (
        both(slices(TEXTS), slices(TEXTS), slices(TEXTS).concatenate(slices(TEXTS)).shuffle(4096))
        .shuffle(1024)
        .map(lambda *names: tuple(map(tf.strings.length, names)))
        .batch(32, drop_remainder=True)
        .prefetch(8)
    ),
    "keras: labelled and unlabelled": lambda: both(
        slices(X).shuffle(2000).batch(50), mixed().shuffle(2000).batch(50)
    ).prefetch(AUTOTUNE),
    "keras: two domains": lambda: both(
        slices(IMAGES, np.arange(400) % 10).shuffle(400).batch(50),
        slices(np.zeros((400, 16, 16, 3), "float32")).shuffle(400).batch(50),
    ),
    "keras: rarely positive": lambda: slices(
        X, (np.arange(2000) % 500 == 499).astype("int32")
    ).batch(50),
    "validation, in the order of classes": lambda: batched(ordered()),
    "a regression, sorted": lambda: batched(slices(X, np.linspace(0, 1, 2000))),
    "all labels the same": lambda: batched(slices(X, np.zeros(2000, "int32"))),
}
#: How `fit` is called in some of these, and of mistakes; in `TWINS`, with the twin.
FITS = {
    "repeat, then shuffle": FIT,
    "a split of a cache": {"training": False},
    "two classes, one after the other": FIT,
    "tensorflow: segmentation": {"epochs": 20, "steps_per_epoch": 6},
    "validation, in the order of classes": {"training": False},
}
TWINS = {"oversampling that ends": FIT}
#: By rule: what is wrong, the wrong pipeline, and its correct twin.
MISTAKES = {
    "shuffled-apart": {
        "features shuffled, labels not": (
            lambda: batched(both(slices(X).shuffle(2000), slices(MIXED))),
            lambda: batched(both(slices(X), slices(MIXED)).shuffle(2000)),
        ),
        "each with a seed of its own": (
            lambda: batched(
                both(slices(X).shuffle(2000, seed=1), slices(MIXED).shuffle(2000, seed=2))
            ),
            lambda: batched(
                both(slices(X).shuffle(2000, seed=1), slices(MIXED).shuffle(2000, seed=1))
            ),
        ),
        "images and masks of listed files": (
            lambda: batched(images_and_masks()),
            lambda: batched(images_and_masks(shuffle=False).shuffle(400)),
        ),
        "names zipped, then read": (
            lambda: batched(both(listed(), listed()).map(decode_both, AUTOTUNE)),
            lambda: batched(both(listed(seed=3), listed(seed=3)).map(decode_both, AUTOTUNE)),
        ),
        "one shuffled dataset, read twice": (
            lambda: batched(apart(mixed().shuffle(2000))),
            lambda: batched(apart(mixed()).shuffle(2000)),
        ),
        "several inputs, a label apart": (
            lambda: batched(both(slices(X, X[:, :2]).shuffle(2000), slices(MIXED).shuffle(2000))),
            lambda: batched(slices((X, X[:, :2]), MIXED).shuffle(2000)),
        ),
        "images and masks of two folders": (
            lambda: both(images(None), images(None, color_mode="grayscale")),
            lambda: both(images(None, seed=2), images(None, seed=2, color_mode="grayscale")),
        ),
    },
    "shuffle-before-shard": {
        "shuffle, then shard": (
            lambda: batched(mixed().shuffle(2000).shard(2, 0), 20),
            lambda: batched(mixed().shard(2, 0).shuffle(1000), 20),
        ),
        "listed files, then shard": (
            lambda: batched(lines(listed().shard(2, 1)).shuffle(999)),
            lambda: batched(lines(listed(shuffle=False).shard(2, 1)).shuffle(999)),
        ),
        "read with threads, then shard": (
            lambda: batched(reading(deterministic=False).shard(2, 0).shuffle(999)),
            lambda: batched(reading().shard(2, 0).shuffle(999)),
        ),
    },
    "repeat-before-shuffle": {
        "repeat, then shuffle": (
            lambda: batched(mixed().repeat().shuffle(2000)),
            lambda: batched(mixed().shuffle(2000).repeat()),
        )
    },
    "cut-cache": {
        "cache().take()": (
            lambda: batched(mixed().cache().take(1000).shuffle(1000)),
            lambda: batched(mixed().take(1000).cache().shuffle(1000)),
        ),
        "a split of a cache": (
            lambda: batched(mixed().map(lambda x, y: (x * 2, y), AUTOTUNE).cache().take(1200)),
            lambda: batched(mixed().take(1200).map(lambda x, y: (x * 2, y), AUTOTUNE).cache()),
        ),
    },
    "constant-random": {
        "np.random in map": (
            lambda: batched(mixed().shuffle(2000).map(noise, AUTOTUNE)),
            lambda: batched(mixed().shuffle(2000).map(drawn_by_tensorflow, AUTOTUNE)),
        ),
        "in a function that is called": (
            lambda: batched(mixed().shuffle(2000)).map(helped, AUTOTUNE),
            lambda: batched(mixed().shuffle(2000)).map(
                lambda x, y: (NOISE(x, training=True), y), AUTOTUNE
            ),
        ),
        "of an object": (
            lambda: batched(mixed().shuffle(2000).map(Augmentation().shifted, AUTOTUNE)),
            lambda: batched(mixed().shuffle(2000).map(in_python, AUTOTUNE).cache().shuffle(2000)),
        ),
        "an object that is called": (
            lambda: batched(mixed().shuffle(2000).map(Augmentation(), AUTOTUNE)),
            lambda: batched(mixed().map(lambda x, y: (x + X[0], y), AUTOTUNE).shuffle(2000)),
        ),
    },
    "shuffle-before-window": {
        "shuffle, then window": (
            lambda: windows(slices(X[:, 0]).shuffle(2000)).batch(32).prefetch(1),
            lambda: windows(slices(X[:, 0])).shuffle(2000).batch(32).prefetch(1),
        ),
        "shuffle, then windows by batch": (
            lambda: by_batch(slices(MIXED).shuffle(2000)).batch(19).prefetch(1),
            lambda: by_batch(slices(MIXED)).shuffle(95).batch(19).prefetch(1),
        ),
    },
    "never-shuffled": {
        "never shuffled, in classes": (lambda: batched(ordered()), lambda: batched(mixed())),
        "labels one-hot, cached": (
            lambda: batched(
                slices(X, np.eye(10, dtype="float32")[SORTED])
                .map(lambda x, y: (x * 2, y), AUTOTUNE)
                .cache()
            ),
            lambda: batched(slices(X, np.eye(10, dtype="float32")[SORTED]).cache().shuffle(2000)),
        ),
        "two classes, one after the other": (
            lambda: batched(two_parts().repeat()),
            lambda: batched(two_parts().shuffle(2000).repeat()),
        ),
        "a folder in the order of classes": (lambda: images(shuffle=False), lambda: images()),
    },
    "small-shuffle": {
        "a buffer of less than a class": (
            lambda: batched(ordered().shuffle(100)),
            lambda: batched(ordered().shuffle(2000)),
        )
    },
    "uneven-samples": {
        "oversampling that ends": (
            lambda: batched(sampled([*rare_last()], [0.5, 0.5])),
            lambda: batched(sampled([part.repeat() for part in rare_last()], [0.5, 0.5])),
        ),
        "classes by filter, sampled": (
            lambda: batched(sampled([is_rare(0), is_rare(1)]).shuffle(2000)),
            lambda: batched(
                sampled([is_rare(0), is_rare(1)], stop_on_empty_dataset=True).shuffle(2000)
            ),
        ),
        "a choice of datasets that ends": (
            lambda: batched(alternating(mixed().take(1500), mixed().skip(1500))),
            lambda: batched(alternating(mixed().take(1000), mixed().skip(1000))),
        ),
    },
    "ignored-errors": {
        "errors ignored": (
            lambda: batched(mixed().shuffle(2000).map(checked, AUTOTUNE).ignore_errors()),
            lambda: batched(mixed().shuffle(2000).filter(lambda x, y: tf.reduce_all(x > -np.inf))),
        )
    },
    "split-after-shuffle": {
        "read with threads, then split": (
            lambda: batched(reading(deterministic=False).skip(40)),
            lambda: batched(reading().skip(40).shuffle(2000)),
        )
    },
    "batched-twice": {
        "all examples as one": (
            lambda: batched(Dataset.from_tensors((X, MIXED))),
            lambda: Dataset.from_tensors((X, MIXED)),
        )
    },
    "batch-before-shuffle": {
        "shuffled in place of batches": (
            lambda: batched(mixed()).shuffle(50),
            lambda: batched(mixed().shuffle(2000)),
        )
    },
}
