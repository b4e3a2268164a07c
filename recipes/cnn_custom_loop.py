"""Train a convolutional network with a loop of its own, on one device or many.

    python recipes/cnn_custom_loop.py --strategy mirrored --replicas 2 --log-dir logs/cnn

This is the workload and the loop of TensorFlow's guide to custom training loops. It trains on every
image; `--label-smoothing` makes the step one's own. With `--log-dir` it plots samples of the data
and learning curves. `--data` takes "builtin" (scikit-learn's digits), "mnist" or "fashion_mnist"
(downloaded), or an `.npz` file like Keras' mnist.npz. recipes/README.md has measured results.
"""

from kdpkit import experiment

parser = experiment.argument_parser(
    __doc__, epochs=10, per_replica_batch_size=64, base_learning_rate=1e-3, rule="sqrt"
)
add = parser.add_argument
add("--label-smoothing", type=float, default=0.0, help="share of all classes in a label")
add("--remainder", choices=("keep", "drop"), default="keep", help="smaller last batch (TPU: drop)")
experiment.start(parser, __name__)  # checks the flags first: the imports below take seconds

import keras
import tensorflow as tf
from keras import layers
from matplotlib.figure import Figure

from kdpkit import corpora, pipelines, training


def build_model(shape, classes):
    """Build two convolutions of 64 and 128 filters; images are uint8 until on the device."""
    model = keras.Sequential([keras.Input(shape, dtype="uint8"), layers.Rescaling(1 / 255)])
    for filters in (64, 128):
        model.add(layers.Conv2D(filters, 3, padding="same", activation="relu"))
        model.add(layers.MaxPooling2D())
    for layer in (layers.Flatten(), layers.Dropout(0.5), layers.Dense(classes, "softmax")):
        model.add(layer)
    return model


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
        model = training.replica_exact(build_model(images.shape[1:], splits.classes))
        metrics = [keras.metrics.Mean("loss"), keras.metrics.SparseCategoricalAccuracy("accuracy")]
        optimizer = keras.optimizers.Adam(plan.learning_rate)
        model.compile(optimizer, "sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
        optimizer.build(model.trainable_variables)

    @training.replica_exact  # without it a step of one device, as the guide has it
    def train_step(images, labels):
        with tf.GradientTape() as tape:
            predictions = model(images, training=True)
            loss = model.compute_loss(images, labels, predictions)
            # Labels are smoothed in training, and not in evaluation.
            uniform_loss = -tf.reduce_mean(tf.math.log(predictions + keras.config.epsilon()))
            loss += args.label_smoothing * (uniform_loss - loss)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        metrics[0].update_state(loss, sample_weight=tf.shape(images)[0])
        metrics[1].update_state(labels, predictions)

    record = experiment.Recorder(args, model, strategy, plan)
    train = record.resumed(train)
    params = {"epochs": args.epochs, "steps": len(train), "metrics": metrics}
    params |= {"add_history": True, "verbose": record.verbose}
    hooks = keras.callbacks.CallbackList(record.callbacks, model=model, **params)
    hooks.on_train_begin()
    for epoch in range(record.resume.initial_epoch if record.resume else 0, args.epochs):
        for metric in metrics:
            metric.reset_state()
        hooks.on_epoch_begin(epoch)
        for step, batch in enumerate(train):
            hooks.on_train_batch_begin(step)
            train_step(*batch)
            hooks.on_train_batch_end(step, logs := {m.name: m.result() for m in metrics})
        tested = model.evaluate(test, verbose=0, return_dict=True)
        hooks.on_epoch_end(epoch, logs | {f"val_{name}": tested[name] for name in tested})
    hooks.on_train_end()
    results = record.results(test=model.evaluate(test, verbose=0, return_dict=True))
    if args.log_dir:
        draw(images, labels, results["history"], args.log_dir)
    return results


if __name__ == "__main__":
    experiment.run(main)
