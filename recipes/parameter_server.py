"""Train a small CNN through parameter servers: a chief, workers and servers, asynchronously.

    kdpkit launch --workers 2 --parameter-servers 1 -- python recipes/parameter_server.py

All processes run this program. Parameter servers keep the weights; workers take batches, each at
its own pace, and update the weights without waiting for each other; the chief hands out the
batches, evaluates, saves and prints. A killed worker can be restarted, as `kdpkit launch
--max-restarts 3` does; with `--resume DIRECTORY` the run also continues after any other failure.
The chief reads the data, so every image is trained on once an epoch; with `--shards` each worker
reads its own shard. `--data` takes "builtin" (scikit-learn's digits), "mnist" or "fashion_mnist"
(downloaded), or a directory with IDX files. recipes/README.md has measured results.
"""

from kdpkit import experiment

with experiment.quick_imports():
    import keras
    import tensorflow as tf

    from kdpkit import callbacks, corpora, pipelines, schedules, strategies, training


def parse(argv):
    parser = experiment.argument_parser(
        __doc__,
        epochs=30,
        per_replica_batch_size=64,
        base_learning_rate=2e-3,
        smoke={"epochs": 2, "steps_per_epoch": 4, "per_replica_batch_size": 8},
    )
    parser.set_defaults(strategy="parameter_server")
    parser.add_argument("--shards", action="store_true", help="each worker reads its own shard")
    parser.add_argument(
        "--steps-per-loop",
        type=experiment.positive_integer,
        default=1,
        metavar="STEPS",
        help="steps of all workers between calls of the callbacks (default: 16 per worker)",
    )
    return parser.parse_args(argv)


def build_model(shape, classes):
    """Build two convolutions; images are uint8 until on the worker."""
    return keras.Sequential(
        [
            keras.Input(shape, dtype="uint8"),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(classes, activation="softmax"),
        ]
    )


def shards_of(split, *, batch_size, seed):
    """Return a function that builds a worker's dataset: its shard, in its own order."""
    images, labels = split

    def of_worker(worker, workers):
        shard = tf.data.Dataset.from_tensor_slices((images, labels)).shard(workers, worker)
        return shard.shuffle(len(images) // workers + 1, seed=seed).batch(batch_size).prefetch(2)

    return of_worker


def main(argv=None):
    strategies.serve_if_server()  # does not return on workers and parameter servers
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
    train = pipelines.train_pipeline(
        tf.data.Dataset.from_tensor_slices((images, labels)),
        pipelines.PipelineConfig(seed=args.seed, remainder="keep"),
        steps_per_epoch=args.steps_per_epoch,
        **batches,
    )
    test = pipelines.eval_pipeline(
        tf.data.Dataset.from_tensor_slices(tuple(splits.test)), remainder="keep", **batches
    )
    steps = len(train)

    with strategy.scope():
        model = build_model(images.shape[1:], splits.classes)
    loop = training.TrainingLoop(
        model,
        optimizer=keras.optimizers.Adam(
            schedules.warmup_cosine(
                plan.learning_rate, total_steps=steps * args.epochs, warmup_steps=steps // 2
            )
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        strategy=strategy,
        steps_per_loop=args.steps_per_loop,
    )
    watching = callbacks.training_callbacks(
        args.log_dir, hyperparameters={"plan": plan, "epochs": args.epochs}, **batches
    )
    if args.log_dir:
        watching.append(callbacks.ModelCheckpoint(args.log_dir / "epoch-{epoch:02d}.keras"))
    if args.shards:
        train = shards_of(splits.train, batch_size=plan.global_batch_size, seed=args.seed)
    train, watching = experiment.resuming(args.resume, train, watching)
    with experiment.saving_on_interrupt(model, args.log_dir) as stop:
        history = loop.fit(
            train,
            test,
            epochs=args.epochs,
            steps_per_epoch=steps if args.shards else None,
            callbacks=[*watching, stop],
        )
    results = experiment.results_of(
        model,
        history,
        strategy=strategy,
        global_batch_size=plan.global_batch_size,
        test=loop.evaluate(test),
    )
    experiment.write_results(args.results, results)
    print(f"Test: {results['test']}")
    return results


if __name__ == "__main__":
    experiment.run(main)
