"""Train on Ray Train's workers what one device would train, on TensorFlow.

    pip install "ray[train]"
    python recipes/cluster/ray_tensorflow.py --workers 2 --directory /shared/run

A small network learns scikit-learn's digits. Ray starts the workers and sets TF_CONFIG in each,
which `select_strategy("multi_worker")` reads. If a worker is lost, Ray starts all again, up to
three times, and they continue from the last state, to the same weights. All machines must see
`--directory`, an absolute path. recipes/cluster/README.md explains the lines.
"""

import argparse
import pathlib


def train(settings):
    """Train in a worker: all of them run this, each in a thread."""
    import keras
    import ray.train
    import tensorflow as tf

    from kdpkit import callbacks, corpora, strategies, training

    strategy = strategies.select_strategy("multi_worker")
    keras.utils.set_random_seed(0)
    images, labels = corpora.load_images().train
    batches = tf.data.Dataset.from_tensor_slices((images / 255, labels))
    batches = batches.shuffle(len(labels), seed=0).batch(64)
    with strategy.scope():
        layers = [keras.layers.Flatten(), keras.layers.Dense(64, "relu"), keras.layers.Dropout(0.2)]
        model = training.replica_exact(keras.Sequential([*layers, keras.layers.Dense(10)]))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])

    resume = callbacks.Resume(settings["directory"] / "state")

    def stop_before_preemption(batch, **_):
        if batch % 10 == 0 and ray.train.get_preemption_info():
            resume.request_stop()

    watching = keras.callbacks.LambdaCallback(on_train_batch_end=stop_before_preemption)
    history = model.fit(
        resume.track(batches), epochs=settings["epochs"], callbacks=[watching, resume], verbose=0
    )
    return {name: values[-1] for name, values in history.history.items()}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--directory", type=pathlib.Path, required=True)
    parser.add_argument("--gpu", action="store_true", help="one GPU for each worker")
    args = parser.parse_args(argv)

    import ray.train
    from ray.train.tensorflow import TensorflowTrainer

    trainer = TensorflowTrainer(
        train,
        train_loop_config=vars(args),
        scaling_config=ray.train.ScalingConfig(num_workers=args.workers, use_gpu=args.gpu),
        run_config=ray.train.RunConfig(
            storage_path=str(args.directory / "ray"),
            failure_config=ray.train.FailureConfig(max_failures=3),
        ),
    )
    print(trainer.fit().return_value)


if __name__ == "__main__":
    main()
