"""Classify images with a convolutional network and `fit`, on one device or many.

    python recipes/cnn_fit.py --strategy mirrored --replicas 2

`replica_exact` has Keras' `fit` train what one device would train. `--data` takes "builtin"
(scikit-learn's digits), "mnist" or "fashion_mnist" (downloaded), or an `.npz` file like Keras'
mnist.npz. With `--tfrecords DIRECTORY` the training images are written to GZIP TFRecord files there
and read back in parallel, as for data larger than memory. recipes/README.md has measured results.
"""

import zlib

from kdpkit import experiment

parser = experiment.argument_parser(
    __doc__, epochs=8, per_replica_batch_size=32, base_learning_rate=3e-3, rule="sqrt"
)
add, directory = parser.add_argument, experiment.writable_directory
add("--tfrecords", type=directory, metavar="DIRECTORY", help="write TFRecord files, and read them")
experiment.start(parser, __name__)  # checks the flags first: the imports below take seconds

import keras
import tensorflow as tf
from keras import layers

from kdpkit import corpora, pipelines, schedules, training

FILES = 4  # TFRecord files, read in parallel


def from_tfrecords(directory, images, labels):
    """Write the images to TFRecord files, unless they exist, and read them back."""
    name = f"train-{zlib.crc32(images):08x}-{zlib.crc32(labels):08x}"
    files = [f"{directory}/{name}-{index}.tfrecord" for index in range(FILES)]
    if not all(map(tf.io.gfile.exists, files)):
        for index, file in enumerate(files):
            with tf.io.TFRecordWriter(file, "GZIP") as writer:
                for image, label in zip(images[index::FILES], labels[index::FILES], strict=True):
                    writer.write(bytes([label]) + image.tobytes())  # a label is one byte

    def parse(record):
        values = tf.io.decode_raw(record, tf.uint8)
        return tf.reshape(values[1:], images.shape[1:]), tf.cast(values[0], tf.int32)

    records = tf.data.TFRecordDataset(files, "GZIP", num_parallel_reads=FILES)
    records = records.map(parse, num_parallel_calls=tf.data.AUTOTUNE)
    return records.apply(tf.data.experimental.assert_cardinality(len(images)))  # or raise


def shift(batch, seed):
    """Shift every image by up to a tenth of its size, differently each epoch."""
    images, labels = batch
    count, side = tf.shape(images)[0], images.shape[1]
    reach = max(1, side // 10)
    moves = tf.random.stateless_uniform([count, 2], seed, -reach, reach + 1, tf.int32)
    one, zero = tf.ones([count]), tf.zeros([count])
    x, y = tf.unstack(tf.cast(moves, tf.float32), axis=1)
    moved = tf.raw_ops.ImageProjectiveTransformV3(
        images=images,
        transforms=tf.stack([one, zero, x, zero, one, y, zero, zero], axis=1),
        output_shape=tf.shape(images)[1:3],
        fill_value=0.0,
        interpolation="NEAREST",
    )
    return tf.ensure_shape(moved, images.shape), labels


def build_model(shape, classes):
    """Build two convolutions and a dense layer; images are uint8 until on the device."""
    model = keras.Sequential([keras.Input(shape, dtype="uint8"), layers.Rescaling(1 / 255)])
    for filters in (32, 64):
        model.add(layers.Conv2D(filters, 3, padding="same", activation="relu"))
        model.add(layers.MaxPooling2D())
    for layer in (layers.Flatten(), layers.Dropout(0.25), layers.Dense(128, activation="relu")):
        model.add(layer)
    model.add(layers.Dense(classes))
    return model


def main(argv=None):
    args = parser.parse_args(argv)
    keras.utils.set_random_seed(args.seed)
    strategy = experiment.strategy_from(args)
    plan = experiment.plan_from(args, strategy)
    size = plan.global_batch_size

    splits = corpora.load_images(args.data)
    images, labels = splits.train
    print(f"{len(images):,} images to train on")
    source = tf.data.Dataset.from_tensor_slices((images, labels))
    train = pipelines.train_pipeline(
        from_tfrecords(args.tfrecords, images, labels) if args.tfrecords else source,
        pipelines.PipelineConfig(seed=args.seed),
        augment=shift,
        steps_per_epoch=args.steps_per_epoch,
        global_batch_size=size,
    )
    held_out = tf.data.Dataset.from_tensor_slices(tuple(splits.test))
    # Batches of one size, as XLA and TPUs prefer; metrics are then in `weighted_metrics`.
    test = pipelines.eval_pipeline(held_out, remainder="pad", global_batch_size=size)
    schedule = schedules.warmup_cosine(plan.learning_rate, total_steps=len(train) * args.epochs)
    with strategy.scope():
        model = training.replica_exact(build_model(images.shape[1:], splits.classes))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(schedule), loss, weighted_metrics=["accuracy"])
    record = experiment.Recorder(args, model, strategy, plan)
    model.fit(
        record.resumed(train),
        epochs=args.epochs,
        callbacks=record.callbacks,
        verbose=record.verbose,
        shuffle=False,  # the pipeline shuffles
    )
    return record.results(test=model.evaluate(test, return_dict=True, verbose=0))


if __name__ == "__main__":
    experiment.run(main)
