"""Train a convolutional network with a loop of its own, on one device or many.

    python recipes/cnn_custom_loop.py --strategy mirrored --replicas 2 --log-dir logs/cnn

This is the workload of TensorFlow's guide to custom training loops: two convolutions, 64 images on
each replica, Adam. The loop trains on every image, including an uneven last batch. To change a
step, override one method, as `Smoothed` does for `--label-smoothing`. With `--log-dir` the recipe
saves the model after each epoch, and plots samples of the data and the learning curves. `--data`
takes "builtin" (scikit-learn's digits), "mnist" or "fashion_mnist" (downloaded), or an `.npz`
file like Keras' mnist.npz. recipes/README.md has measured results.
"""

from kdpkit import experiment

parser = experiment.argument_parser(
    __doc__, epochs=10, per_replica_batch_size=64, base_learning_rate=1e-3, rule="sqrt"
)
add, positive = parser.add_argument, experiment.positive_integer
add("--steps-per-loop", type=positive, default=10, help="steps per compiled call")
add("--accumulation", type=positive, default=1, metavar="K", help="micro-batches of a batch")
add("--label-smoothing", type=float, default=0.0, help="share of all classes in a label")
last = "keep or drop a smaller last batch; drop it for a TPU"
add("--remainder", choices=("keep", "drop"), default="keep", help=last)
experiment.start(parser, __name__)  # checks the flags first: the imports below take seconds

import keras
import tensorflow as tf
from keras import layers, ops
from matplotlib.figure import Figure

from kdpkit import corpora, pipelines, training


def build_model(shape, classes):
    """Build two convolutions of 64 and 128 filters; images are uint8 until on the device."""
    return keras.Sequential(
        [
            keras.Input(shape, dtype="uint8"),
            layers.Rescaling(1 / 255),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(128, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(classes, activation="softmax"),
        ]
    )


class Smoothed(training.TrainingLoop):
    """A loop with label smoothing in the training loss but not in evaluation."""

    label_smoothing = 0.0

    def per_example_loss(self, x, y, *, training):
        """Return the loss of each image; overriding this method changes the step."""
        losses, predictions = super().per_example_loss(x, y, training=training)
        if training:
            uniform_loss = -ops.mean(ops.log(predictions + keras.config.epsilon()), axis=-1)
            losses += self.label_smoothing * (uniform_loss - losses)
        return losses, predictions


def draw(images, labels, history, directory):
    """Plot the first images with their labels, and loss and accuracy by epoch."""
    samples, curves = Figure(figsize=(8, 4), layout="constrained"), Figure(figsize=(10, 4))
    for axes, image, label in zip(samples.subplots(3, 6).flat, images, labels, strict=False):
        axes.imshow(image[..., 0], cmap="gray_r")
        axes.set(title=label, xticks=[], yticks=[])
    for axes, name in zip(curves.subplots(1, 2), ("loss", "accuracy"), strict=True):
        axes.plot(history[name], marker="o", label="training")
        axes.plot(history[f"val_{name}"], marker="o", label="test")
        axes.set(xlabel="epoch", ylabel=name)
        axes.legend()
    for name, figure in (("samples", samples), ("curves", curves)):
        with experiment.writing(directory / f"{name}.png") as file:
            figure.savefig(file)


def main(argv=None):
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
        pipelines.PipelineConfig(seed=args.seed, remainder=args.remainder),
        steps_per_epoch=args.steps_per_epoch,
        global_batch_size=size,
    )
    held_out = tf.data.Dataset.from_tensor_slices(tuple(splits.test))
    # Batches of one size, as XLA and TPUs prefer; metrics are then in `weighted_metrics`.
    test = pipelines.eval_pipeline(held_out, remainder="pad", global_batch_size=size)

    with strategy.scope():
        model = build_model(images.shape[1:], splits.classes)
    loop = Smoothed(
        model,
        optimizer=keras.optimizers.Adam(plan.learning_rate),
        loss=keras.losses.SparseCategoricalCrossentropy(),
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        strategy=strategy,
        steps_per_loop=args.steps_per_loop,
        accumulation=args.accumulation,
    )
    loop.label_smoothing = args.label_smoothing
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
        draw(images, labels, results["history"], args.log_dir)
    return results


if __name__ == "__main__":
    experiment.run(main)
