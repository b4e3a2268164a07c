"""Classify images on JAX, over all GPUs, TPU cores or N logical CPUs, without TensorFlow.

    python recipes/cnn_jax.py --replicas 2

This is the workload of the Keras guide to multi-GPU training with JAX: a small convnet with batch
normalization and dropout. A step uses the statistics of the global batch, as on one device, every
image is trained on, including those of an uneven last batch, and the model has its optimizer state,
statistics and metrics when training ends. With `--resume DIRECTORY` a stopped run continues.
`--data` takes "builtin" (scikit-learn's digits), "mnist" or "fashion_mnist" (downloaded), or an
`.npz` file like Keras' mnist.npz. recipes/README.md has measured results.

Several processes, on one machine or many, train together:

    kdpkit launch --workers 2 --max-restarts 3 -- python recipes/cnn_jax.py --resume state

Under SLURM's `srun`, or with TF_CONFIG, they find each other in the same way. Otherwise pass the
address of the first process, their number and the index of each: `--coordinator localhost:9876
--processes 2 --process 0`.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"

from kdpkit import errors, experiment

parser = experiment.argument_parser(
    __doc__, epochs=8, per_replica_batch_size=64, base_learning_rate=1e-3, rule="sqrt"
)
add, positive = parser.add_argument, experiment.positive_integer
add("--steps-per-loop", type=positive, default=1, help="steps per compiled call")
add("--coordinator", metavar="HOST:PORT", help="address of the first of several processes")
add("--processes", type=positive, default=1, help="how many")
add("--process", type=int, default=0, help="index of this process")
experiment.start(parser, __name__)  # checks the flags first: the imports below take seconds

import jax
import keras
from keras import layers

from kdpkit import batches, cluster, corpora, schedules, sharding, training


def build_model(shape, classes):
    """Build the guide's convnet; images are uint8 until on the device."""
    # With Keras' momentum of 0.99 the initial statistics would outlast a small dataset.
    normalized = {"scale": False, "momentum": 0.9}
    return keras.Sequential(
        [
            keras.Input(shape, dtype="uint8"),
            layers.Rescaling(1 / 255),
            layers.Conv2D(12, 3, padding="same", use_bias=False),
            layers.BatchNormalization(**normalized),
            layers.ReLU(),
            layers.Conv2D(24, 6, strides=2, use_bias=False),
            layers.BatchNormalization(**normalized),
            layers.ReLU(),
            layers.Conv2D(32, 6, padding="same", strides=2),
            layers.BatchNormalization(**normalized),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(256, activation="relu"),
            layers.Dropout(0.5),
            layers.Dense(classes),
        ]
    )


def join_others(args):
    """Join the other processes, if the flags or the environment describe any."""
    first, count, index = args.coordinator, args.processes, args.process
    if not first and cluster.source():
        here = cluster.ClusterConfig.from_environment()
        first, count, index = here.coordinator, here.process_count, here.process_index
    if count > 1 and not first:
        raise errors.InputError("--processes needs --coordinator, such as localhost:9876.")
    if first:
        sharding.join_processes(first, process_count=count, process_index=index)


def main(argv=None):
    args = parser.parse_args(argv)
    join_others(args)
    keras.utils.set_random_seed(args.seed)
    strategy = experiment.strategy_from(args)
    plan = experiment.plan_from(args, strategy)
    count, index = jax.process_count(), jax.process_index()

    splits = corpora.load_images(args.data)
    print(f"{len(splits.train.images):,} images to train on")
    here = {"process_count": count, "process_index": index}
    here["global_batch_size"] = plan.global_batch_size
    # Several processes need shards of one size; they may also go on as one.
    keep = count == 1 and args.global_batch_size is None
    train = batches.ArrayBatches(
        tuple(splits.train),
        seed=args.seed,
        remainder="keep" if keep else "drop",
        steps_per_epoch=args.steps_per_epoch,
        **here,
    )
    padded = "keep" if keep else "pad"
    test = batches.ArrayBatches(tuple(splits.test), remainder=padded, mode="eval", **here)

    rate = schedules.warmup_cosine(plan.learning_rate, total_steps=len(train) * args.epochs)
    model = build_model(splits.train.images.shape[1:], splits.classes)
    loop = training.TrainingLoop(
        model,
        optimizer=keras.optimizers.Adam(rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        strategy=strategy,
        steps_per_loop=args.steps_per_loop,
    )
    record = experiment.Recorder(args, model, strategy, plan)
    loop.fit(
        record.resumed(train),
        test,
        epochs=args.epochs,
        callbacks=record.callbacks,
        verbose=record.verbose,
    )
    results = record.results(test=loop.evaluate(test, verbose=0))
    if args.log_dir:
        experiment.save_model(model, args.log_dir / "model.keras")
    return results


if __name__ == "__main__":
    experiment.run(main)
