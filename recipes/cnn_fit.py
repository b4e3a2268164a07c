"""Classify images with a convolutional network and `fit`, on one device or many.

    python recipes/cnn_fit.py --strategy mirrored --replicas 2

`--data` takes "builtin" (scikit-learn's digits), "mnist" or "fashion_mnist" (downloaded), or a
directory with MNIST's IDX files. With `--tfrecords DIRECTORY` the training images are written to
GZIP TFRecord files there and read back in parallel, as for data larger than memory.
recipes/README.md has measured results.
"""

import zlib

from kdpkit import experiment

with experiment.quick_imports():
    import keras
    import tensorflow as tf

    from kdpkit import callbacks, corpora, pipelines, schedules, training

FILES = 4  # TFRecord files, read in parallel


def parse(argv):
    parser = experiment.argument_parser(
        __doc__,
        epochs=8,
        per_replica_batch_size=32,
        base_learning_rate=3e-3,
        rule="sqrt",
        smoke={"epochs": 2, "steps_per_epoch": 4, "per_replica_batch_size": 8},
    )
    parser.add_argument(
        "--tfrecords",
        type=experiment.path,
        metavar="DIRECTORY",
        help="write TFRecord files there and train from them",
    )
    return parser.parse_args(argv)


def from_tfrecords(directory, images, labels):
    """Write the images to TFRecord files, unless they exist, and read them back."""
    name = f"train-{zlib.crc32(images):08x}-{zlib.crc32(labels):08x}"
    if len(list(directory.glob(f"{name}-*.tfrecord"))) < FILES:
        examples = (
            {"image": image, "label": label} for image, label in zip(images, labels, strict=True)
        )
        examples = experiment.track(examples, "Writing TFRecords", total=len(images))
        pipelines.write_tfrecords(examples, directory / name, shards=FILES)
    parse = pipelines.example_parser(
        {
            "image": tf.TensorSpec(images.shape[1:], "uint8"),
            "label": tf.TensorSpec([], "int32"),
        }
    )
    files = sorted(directory.glob(f"{name}-*.tfrecord"))
    records = pipelines.tfrecords(files, parse, validate=True)
    return records.map(lambda example: (example["image"], example["label"]))


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
    return keras.Sequential(
        [
            keras.Input(shape, dtype="uint8"),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.25),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(classes),
        ]
    )


def main(argv=None):
    args = parse(argv)
    keras.utils.set_random_seed(args.seed)
    strategy = experiment.strategy_from(args)
    print(experiment.describe(strategy))
    plan = experiment.plan_from(args, strategy)

    splits = corpora.load_images(args.data)
    images, labels = splits.train
    print(f"{len(images):,} images to train on")
    batches = {
        "global_batch_size": plan.global_batch_size,
        "replicas": strategy.num_replicas_in_sync,
    }
    if args.tfrecords:
        source = from_tfrecords(args.tfrecords, images, labels)
    else:
        source = tf.data.Dataset.from_tensor_slices((images, labels))
    train = pipelines.train_pipeline(
        source,
        pipelines.PipelineConfig(seed=args.seed),
        augment=shift,
        steps_per_epoch=args.steps_per_epoch,
        **batches,
    )
    test = pipelines.eval_pipeline(
        tf.data.Dataset.from_tensor_slices(tuple(splits.test)), **batches
    ).apply(pipelines.normalize_weights)
    schedule = schedules.warmup_cosine(plan.learning_rate, total_steps=len(train) * args.epochs)

    with strategy.scope():
        model = build_model(images.shape[1:], splits.classes)
        model.compile(
            optimizer=keras.optimizers.Adam(schedule),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            weighted_metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        )
    if args.strategy == "multi_worker":
        training.replica_exact(model)  # plain Keras cannot `fit` in several processes
    watching = callbacks.training_callbacks(
        args.log_dir, hyperparameters={"plan": plan, "epochs": args.epochs}, **batches
    )
    train, watching = experiment.resuming(args.resume, train, watching)
    with experiment.saving_on_interrupt(model, args.log_dir) as stop:
        history = model.fit(
            train,
            epochs=args.epochs,
            callbacks=[*watching, stop],
            shuffle=False,  # the pipeline shuffles
        )
    if args.log_dir:
        experiment.save_model(model, args.log_dir / "model.keras")
    results = experiment.results_of(
        model, history, strategy=strategy, global_batch_size=plan.global_batch_size
    )
    experiment.write_results(args.results, results)  # in case the test is interrupted
    results["test"] = model.evaluate(test, return_dict=True)
    experiment.write_results(args.results, results)
    print(f"Test: {results['test']}")
    return results


if __name__ == "__main__":
    experiment.run(main)
