"""Train on Ray Train's workers what one device would train, on JAX.

    pip install "ray[train]"
    python recipes/cluster/ray_jax.py --workers 2 --directory /shared/run

A small network learns scikit-learn's digits. Ray starts the workers and broadcasts the address at
which the first one waits for the others. If a worker is lost, Ray starts all again, up to three
times, and they continue from the last state, to the same weights. All machines must see
`--directory`, an absolute path. recipes/cluster/README.md explains the lines.
"""

import argparse
import pathlib
import socket


def free_address():
    """Return an address of this machine with a free port."""
    import ray

    with socket.socket() as free:
        free.bind(("", 0))
        return f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"


def train(settings):
    """Train in a worker: all of them run this, each in a thread."""
    import os

    os.environ["KERAS_BACKEND"] = "jax"
    import keras
    import ray.train
    from ray.train.collective import broadcast_from_rank_zero

    from kdpkit import batches, callbacks, corpora, sharding, training

    context = ray.train.get_context()
    here = {"process_count": context.get_world_size(), "process_index": context.get_world_rank()}
    coordinator = broadcast_from_rank_zero(free_address())
    sharding.join_processes(coordinator, **here)
    keras.distribution.set_distribution(sharding.DataParallel())
    keras.utils.set_random_seed(0)
    images, labels = corpora.load_images().train
    data = batches.ArrayBatches(
        (images / 255, labels), global_batch_size=64, remainder="drop", seed=0, **here
    )
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
        resume.track(data),
        epochs=settings["epochs"],
        callbacks=[watching, resume],
        shuffle=False,
        verbose=0,
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
    from ray.train.v2.jax import JaxConfig, JaxTrainer

    trainer = JaxTrainer(
        train,
        train_loop_config=vars(args),
        jax_config=JaxConfig(),
        scaling_config=ray.train.ScalingConfig(num_workers=args.workers, use_gpu=args.gpu),
        run_config=ray.train.RunConfig(
            storage_path=str(args.directory / "ray"),
            failure_config=ray.train.FailureConfig(max_failures=3),
        ),
    )
    print(trainer.fit().return_value)


if __name__ == "__main__":
    main()
