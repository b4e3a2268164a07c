"""Train a small CNN through parameter servers: a chief, workers and servers, asynchronously.

    kdpkit launch --workers 2 --parameter-servers 1 -- python recipes/parameter_server.py

All processes run this program. Parameter servers keep the weights; workers take batches, each at
its own pace, and update the weights without waiting for each other; the chief hands out the
batches, evaluates, saves and prints. A single worker trains what one device trains; with several
the order of the updates differs from run to run. A killed process ends the run of this command;
with `--max-restarts 3` and `--resume DIRECTORY` all start again and continue. Where a scheduler
starts the processes, the others go on without a killed worker until it is back. The chief reads
the data, so every image is trained on once an epoch.
`--data` takes "builtin" (scikit-learn's digits), "mnist" or "fashion_mnist" (downloaded), or an
`.npz` file like Keras' mnist.npz. recipes/README.md has measured results.
"""

from kdpkit import experiment

parser = experiment.argument_parser(
    __doc__,
    strategy="parameter_server",
    epochs=30,
    per_replica_batch_size=64,
    base_learning_rate=2e-3,
)
calls = "steps of all workers between calls of the callbacks; 1 stands for 16 of each worker"
number = experiment.positive_integer
parser.add_argument("--steps-per-execution", type=number, default=1, help=calls)
experiment.start(parser, __name__)  # checks the flags first: the imports below take seconds

import keras
import tensorflow as tf
from keras import layers

from kdpkit import corpora, pipelines, schedules, strategies, training


def build_model(shape, classes):
    """Build two convolutions; images are uint8 until on the worker."""
    return keras.Sequential(
        [
            keras.Input(shape, dtype="uint8"),
            layers.Rescaling(1 / 255),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(classes, activation="softmax"),
        ]
    )


def main(argv=None):
    strategies.serve_if_server()  # does not return on workers and parameter servers
    args = parser.parse_args(argv)
    keras.utils.set_random_seed(args.seed)
    strategy = experiment.strategy_from(args)
    plan = experiment.plan_from(args, strategy)
    size = plan.global_batch_size

    splits = corpora.load_images(args.data)
    images, labels = splits.train
    print(f"{len(images):,} images to train on")
    train = pipelines.train_pipeline(
        tf.data.Dataset.from_tensor_slices((images, labels)),
        pipelines.PipelineConfig(seed=args.seed, remainder="keep"),
        steps_per_epoch=args.steps_per_epoch,
        global_batch_size=size,
    )
    held_out = tf.data.Dataset.from_tensor_slices(tuple(splits.test))
    test = pipelines.eval_pipeline(held_out, global_batch_size=size)
    steps = len(train)

    rate = schedules.warmup_cosine(
        plan.learning_rate, total_steps=steps * args.epochs, warmup_steps=steps // 2
    )
    with strategy.scope():
        model = training.replica_exact(build_model(images.shape[1:], splits.classes))
        model.compile(
            optimizer=keras.optimizers.Adam(rate),
            loss=keras.losses.SparseCategoricalCrossentropy(),
            metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
            steps_per_execution=args.steps_per_execution,
        )
    record = experiment.Recorder(args, model, strategy, plan)
    model.fit(
        record.resumed(train),
        validation_data=test,
        epochs=args.epochs,
        callbacks=record.callbacks,
        verbose=record.verbose,
        shuffle=False,  # the pipeline shuffles
    )
    return record.results(test=model.evaluate(test, return_dict=True, verbose=0))


if __name__ == "__main__":
    experiment.run(main)
