"""Classify images on JAX, over all GPUs, TPU cores or N logical CPUs, without TensorFlow.

    python recipes/cnn_jax.py --replicas 2

This is the workload of the Keras guide to multi-GPU training with JAX: a small convnet with batch
normalization and dropout. A step uses the statistics of the global batch, as on one device, every
image is trained on, including those of an uneven last batch, and the model has its optimizer state,
statistics and metrics when training ends. With `--resume DIRECTORY` a stopped run continues.
`--data` takes "builtin" (scikit-learn's digits), "mnist" or "fashion_mnist" (downloaded), or a
directory with MNIST's IDX files. recipes/README.md has measured results.

Several processes, on one machine or many, train together:

    kdpkit launch --workers 2 --max-restarts 3 -- python recipes/cnn_jax.py --resume state

Under SLURM's `srun`, or with TF_CONFIG, they find each other in the same way. Otherwise pass the
address of the first process, their number and the index of each: `--coordinator localhost:9876
--processes 2 --process 0`.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"


from kdpkit import experiment

with experiment.quick_imports():
    import jax
    import keras

    from kdpkit import batches, callbacks, cluster, corpora, schedules, sharding, training


def parse(argv):
    parser = experiment.argument_parser(
        __doc__,
        epochs=8,
        per_replica_batch_size=64,
        base_learning_rate=1e-3,
        rule="sqrt",
        smoke={"epochs": 2, "steps_per_epoch": 4, "per_replica_batch_size": 8},
    )
    add = parser.add_argument
    add("--steps-per-loop", type=int, default=1, help="steps per compiled call (default: 1)")
    add("--coordinator", metavar="HOST:PORT", help="address of the first of several processes")
    add("--processes", type=experiment.positive_integer, default=1, help="how many (default: 1)")
    add("--process", type=experiment.count, default=0, help="index of this process (default: 0)")
    return parser.parse_args(argv)


def build_model(shape, classes):
    """Build the guide's convnet; images are uint8 until on the device."""
    layers = keras.layers
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
    if not args.coordinator and cluster.source():
        here = cluster.ClusterConfig.from_environment()
        args.coordinator = here.coordinator
        args.processes, args.process = here.process_count, here.process_index
    if args.processes > 1 and not args.coordinator:
        raise experiment.InputError(
            "Several processes need the address of the first one. Received: "
            f"--processes {args.processes}. Pass --coordinator, such as localhost:9876."
        )
    if args.coordinator:
        sharding.join_processes(
            args.coordinator, process_count=args.processes, process_index=args.process
        )


def main(argv=None):
    args = parse(argv)
    join_others(args)
    keras.utils.set_random_seed(args.seed)
    strategy = experiment.strategy_from(args)
    print(experiment.describe(strategy))
    plan = experiment.plan_from(args, strategy)

    splits = corpora.load_images(args.data)
    images, labels = splits.train
    print(f"{len(images):,} images to train on")
    settings = {
        "global_batch_size": plan.global_batch_size,
        "process_count": jax.process_count(),
        "process_index": jax.process_index(),
    }
    # Several processes need shards of one size; they may also go on as one.
    alone = jax.process_count() == 1 and args.global_batch_size is None
    train = batches.ArrayBatches(
        (images, labels),
        seed=args.seed,
        remainder="keep" if alone else "drop",
        steps_per_epoch=args.steps_per_epoch,
        **settings,
    )
    test = batches.ArrayBatches(
        tuple(splits.test), remainder="keep" if alone else "pad", mode="eval", **settings
    )

    schedule = schedules.warmup_cosine(plan.learning_rate, total_steps=len(train) * args.epochs)
    loop = training.TrainingLoop(
        build_model(images.shape[1:], splits.classes),
        optimizer=keras.optimizers.Adam(schedule),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        strategy=strategy,
        steps_per_loop=args.steps_per_loop,
    )
    is_first = jax.process_index() == 0
    watching = callbacks.training_callbacks(
        args.log_dir if is_first else None,
        global_batch_size=plan.global_batch_size,
        replicas=strategy.num_replicas_in_sync,
        hyperparameters={"plan": plan, "epochs": args.epochs},
    )
    train, watching = experiment.resuming(args.resume, train, watching)
    with experiment.saving_on_interrupt(loop.model, args.log_dir) as stop:
        history = loop.fit(
            train,
            test,
            epochs=args.epochs,
            callbacks=[*watching, stop],
            verbose="auto" if is_first else 0,
        )
    results = experiment.results_of(
        loop.model,
        history,
        strategy=strategy,
        global_batch_size=plan.global_batch_size,
        test=loop.evaluate(test, verbose=0),
    )
    if args.log_dir:
        experiment.save_model(loop.model, args.log_dir / "model.keras")
    if is_first:
        experiment.write_results(args.results, results)
        print(f"Test: {results['test']}")
    return results


if __name__ == "__main__":
    experiment.run(main)
