"""Classify images with a custom training loop, on one device or many.

    python recipes/cnn_custom_loop.py --strategy mirrored --replicas 2 --log-dir logs/cnn

This is the workload of TensorFlow's guide to custom training loops: two convolutions, 64 images on
each replica, Adam. The loop trains on every image, including an uneven last batch. To change a
step, override one method, as `Smoothed` does for `--label-smoothing`. With `--log-dir` the recipe
plots samples of the data and the learning curves, and saves a checkpoint each epoch; `--restore
FILE` continues from one on any number of replicas. `--data` takes "builtin" (scikit-learn's
digits), "mnist" or "fashion_mnist" (downloaded), or a directory with IDX files. recipes/README.md
has measured results.
"""

import argparse

from kdpkit import experiment

with experiment.quick_imports():
    import keras
    import tensorflow as tf
    from keras import ops
    from matplotlib.figure import Figure

    from kdpkit import callbacks, corpora, pipelines, training

FASHION = (
    *("T-shirt", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)


def smoothing(text):
    """Parse `--label-smoothing`; at 1 the labels would have no effect."""
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 0 and below 1. Received: {text!r}")
    return value


def parse(argv):
    parser = experiment.argument_parser(
        __doc__,
        epochs=10,
        per_replica_batch_size=64,
        base_learning_rate=1e-3,
        rule="sqrt",
        smoke={"epochs": 2, "steps_per_epoch": 4, "per_replica_batch_size": 8},
    )
    add = parser.add_argument
    add("--steps-per-loop", type=int, default=10, help="steps per compiled call (default: 10)")
    add("--accumulation", type=int, default=1, help="micro-batches per step (default: 1)")
    add("--jit", action="store_true", help="compile the forward and backward pass with XLA")
    add("--label-smoothing", type=smoothing, default=0.0, help="below 1 (default: 0)")
    add(
        "--remainder",
        choices=("keep", "drop"),
        default="keep",
        help="keep or drop a smaller last batch; drop it for a TPU (default: keep)",
    )
    add("--restore", type=experiment.path, metavar="FILE", help="checkpoint to load (.keras)")
    return parser.parse_args(argv)


def build_model(shape, classes):
    """Build two convolutions of 64 and 128 filters; images are uint8 until on the device."""
    return keras.Sequential(
        [
            keras.Input(shape, dtype="uint8"),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(128, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(classes, activation="softmax"),
        ]
    )


def restore(path, shape, classes, learning_rate):
    """Load a model for these images, and set the learning rate."""
    try:
        with experiment.reading(path) as file:
            model = keras.models.load_model(file)
        model.optimizer.learning_rate = learning_rate
    except Exception as error:  # a damaged file, or an optimizer without such a rate
        raise experiment.InputError(
            f"--restore: {path} cannot be used ({' '.join(str(error).split())}). Pass a "
            "complete .keras file that this recipe saved while it trained."
        ) from error
    found, needed = (model.input_shape, model.output_shape), ((None, *shape), (None, classes))
    if found != needed:
        raise experiment.InputError(
            f"--restore: the model in {path} maps {found[0]} to {found[1]}, but the data need "
            f"{needed[0]} to {needed[1]}. Pass the `--data` that it was trained on."
        )
    return model


class Smoothed(training.TrainingLoop):
    """A loop with label smoothing in the training loss but not in evaluation."""

    def __init__(self, *args, label_smoothing, **settings):
        super().__init__(*args, **settings)
        self.label_smoothing = label_smoothing

    def per_example_loss(self, x, y, *, training):
        """Return the loss of each image; overriding this method changes the step."""
        losses, predictions = super().per_example_loss(x, y, training=training)
        if not training:
            return losses, predictions
        of_any_class = -ops.mean(ops.log(predictions + keras.config.epsilon()), axis=-1)
        return losses + self.label_smoothing * (of_any_class - losses), predictions


def draw_samples(images, labels, names, path):
    """Plot the first 25 images with the names of their labels."""
    figure = Figure(figsize=(8, 8), layout="constrained")
    for axes, image, label in zip(figure.subplots(5, 5).flat, images, labels, strict=False):
        axes.imshow(image[..., 0], cmap="gray_r")
        axes.set(title=names[label], xticks=[], yticks=[])
    with experiment.writing(path) as file:
        figure.savefig(file)


def draw_curves(history, path):
    """Plot loss and accuracy of training and test by epoch."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    epochs = [epoch + 1 for epoch in history.epoch]
    for axes, name in zip(figure.subplots(1, 2), ("loss", "accuracy"), strict=True):
        axes.plot(epochs, history.history[name], marker="o", label="training")
        axes.plot(epochs, history.history[f"val_{name}"], marker="o", label="test")
        axes.set(xlabel="epoch", ylabel=name, xticks=epochs)
        axes.legend()
    with experiment.writing(path) as file:
        figure.savefig(file)


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
    train = pipelines.train_pipeline(
        tf.data.Dataset.from_tensor_slices((images, labels)),
        pipelines.PipelineConfig(seed=args.seed, remainder=args.remainder),
        steps_per_epoch=args.steps_per_epoch,
        **batches,
    )
    held_out = tf.data.Dataset.from_tensor_slices(tuple(splits.test))
    if args.remainder == "keep":
        test = pipelines.eval_pipeline(held_out, remainder="keep", **batches)
    else:  # every image is evaluated, in batches of one size
        test = pipelines.eval_pipeline(held_out, **batches).apply(pipelines.normalize_weights)

    with strategy.scope():
        shapes = images.shape[1:], splits.classes
        if args.restore:
            model = restore(args.restore, *shapes, plan.learning_rate)
        else:
            model = build_model(*shapes)
    loop = Smoothed(
        model,
        optimizer=model.optimizer if args.restore else keras.optimizers.Adam(plan.learning_rate),
        loss=keras.losses.SparseCategoricalCrossentropy(),
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        strategy=strategy,
        steps_per_loop=args.steps_per_loop,
        accumulation=args.accumulation,
        jit=args.jit,
        label_smoothing=args.label_smoothing,
    )
    watching = callbacks.training_callbacks(
        args.log_dir, hyperparameters={"plan": plan, "epochs": args.epochs}, **batches
    )
    if args.log_dir:
        names = FASHION if args.data == "fashion_mnist" else range(splits.classes)
        draw_samples(images, labels, names, args.log_dir / "samples.png")
        watching.append(callbacks.ModelCheckpoint(args.log_dir / "epoch-{epoch:02d}.keras"))
    train, watching = experiment.resuming(args.resume, train, watching)
    with experiment.saving_on_interrupt(model, args.log_dir) as stop:
        history = loop.fit(train, test, epochs=args.epochs, callbacks=[*watching, stop])
    results = experiment.results_of(
        model,
        history,
        strategy=strategy,
        global_batch_size=plan.global_batch_size,
        test=loop.evaluate(test),
    )
    experiment.write_results(args.results, results)
    if args.log_dir:
        draw_curves(history, args.log_dir / "curves.png")
    print(f"Test: {results['test']}")
    return results


if __name__ == "__main__":
    experiment.run(main)
