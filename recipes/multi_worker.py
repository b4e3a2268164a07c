"""Classify images in several processes, on one machine or many, as one device would.

    export TF_CONFIG='{"cluster": {"worker": ["10.0.0.1:9876", "10.0.0.2:9876"]},
                       "task": {"type": "worker", "index": 0}}'
    python recipes/multi_worker.py

Start each process with the same flags and a TF_CONFIG with its own index; each trains on all its
GPUs, or on its CPU. This is the workload of TensorFlow's guide to multi-worker training: a small
convnet and `fit`. Every process reads the same images in the same order and takes its examples of
every batch, so the losses equal those of one device with the same global batch, even with uneven
last batches and batch normalization. The first process writes the model, results and TensorBoard
files. If a process is killed or fails, the others end within seconds with the reason; started
again, they continue from the last epoch:

    kdpkit launch --workers 2 --max-restarts 3 -- python recipes/multi_worker.py --resume state

`--data` takes "builtin" (scikit-learn's digits), "mnist" or "fashion_mnist" (downloaded), or an
`.npz` file like Keras' mnist.npz. `--strategy mirrored` and `--strategy one` train in a single
process. recipes/README.md has measured results.
"""

from kdpkit import experiment

SETTINGS = {"epochs": 8, "per_replica_batch_size": 64, "base_learning_rate": 1e-3, "rule": "sqrt"}
parser = experiment.argument_parser(__doc__, strategy="multi_worker", **SETTINGS)
links = "sum gradients over the network or between GPUs"
parser.add_argument("--communication", choices=["auto", "ring", "nccl"], default="auto", help=links)
experiment.start(parser, __name__)  # checks the flags first: the imports below take seconds

import keras
import tensorflow as tf
from keras import layers

from kdpkit import corpora, pipelines, schedules, training


def build_model(shape, classes):
    """Build a convolution and two dense layers; images are uint8 until on the device."""
    return keras.Sequential(
        [
            keras.Input(shape, dtype="uint8"),
            layers.Rescaling(1 / 255),
            layers.Conv2D(32, 3, padding="same", use_bias=False),
            layers.BatchNormalization(synchronized=True, momentum=0.9),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(classes),
        ]
    )


def main(argv=None):
    args = parser.parse_args(argv)
    keras.utils.set_random_seed(args.seed)
    strategy = experiment.strategy_from(args)
    plan = experiment.plan_from(args, strategy)
    size = plan.global_batch_size

    splits = corpora.load_images(args.data)
    images, labels = splits.train
    train = pipelines.train_pipeline(
        tf.data.Dataset.from_tensor_slices((images, labels)),
        pipelines.PipelineConfig(seed=args.seed, remainder="keep"),
        steps_per_epoch=args.steps_per_epoch,
        global_batch_size=size,
    )
    held_out = tf.data.Dataset.from_tensor_slices(tuple(splits.test))
    test = pipelines.eval_pipeline(held_out, global_batch_size=size)

    rate = schedules.warmup_cosine(plan.learning_rate, total_steps=len(train) * args.epochs)
    with strategy.scope():
        model = training.replica_exact(build_model(images.shape[1:], splits.classes))
        model.compile(
            optimizer=keras.optimizers.Adam(rate),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
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
