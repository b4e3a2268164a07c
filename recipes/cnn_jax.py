"""Classify images on JAX in a loop of your own, over all GPUs, TPU cores or N logical CPUs.

    python recipes/cnn_jax.py --replicas 2

A small convnet, and the loop of Keras' guides to training in JAX. `replica_exact` above the step
has the devices share each batch, and train what one device would, on an uneven last batch too. With
`--resume DIRECTORY` a stopped run continues. `--data` takes "builtin" (scikit-learn's digits),
"mnist" or "fashion_mnist" (downloaded), or an `.npz` file like Keras' mnist.npz. Several processes,
also of SLURM's `srun` or with TF_CONFIG, train together; recipes/README.md has measured results.

    kdpkit launch --workers 2 --max-restarts 3 -- python recipes/cnn_jax.py --resume state
"""

import functools
import os

os.environ["KERAS_BACKEND"] = "jax"

from kdpkit import experiment

parser = experiment.argument_parser(
    __doc__, epochs=8, per_replica_batch_size=64, base_learning_rate=1e-3, rule="sqrt"
)
experiment.start(parser, __name__)  # checks the flags first: the imports below take seconds

import jax
import keras
from keras import layers

from kdpkit import batches, cluster, corpora, schedules, sharding, training


def build_model(shape, classes):
    """Build the guide's convnet; images are uint8 until on the device."""
    # With Keras' momentum of 0.99 the initial statistics would outlast a small dataset.
    norm = functools.partial(layers.BatchNormalization, scale=False, momentum=0.9)
    stack = [keras.Input(shape, dtype="uint8"), layers.Rescaling(1 / 255)]
    stack += [layers.Conv2D(12, 3, padding="same", use_bias=False), norm(), layers.ReLU()]
    stack += [layers.Conv2D(24, 6, strides=2, use_bias=False), norm(), layers.ReLU()]
    stack += [layers.Conv2D(32, 6, strides=2, padding="same"), norm(), layers.ReLU()]
    stack += [layers.GlobalAveragePooling2D(), layers.Dense(256, activation="relu")]
    return keras.Sequential([*stack, layers.Dropout(0.5), layers.Dense(classes)])


def make_train_step(model, metrics):
    """Return the guide's step: a function of a state, the values of all variables, and a batch."""

    def loss_and_updates(weights, others, x, y):
        logits, others = model.stateless_call(weights, others, x, training=True)
        return model.compute_loss(x, y, logits), (logits, others)

    @training.replica_exact
    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state, x, y):
        weights, others, slots, (of_loss, of_accuracy) = state
        grad_fn = jax.value_and_grad(loss_and_updates, has_aux=True)
        (loss, (logits, others)), gradients = grad_fn(weights, others, x, y)
        weights, slots = model.optimizer.stateless_apply(slots, gradients, weights)
        of_loss = metrics[0].stateless_update_state(of_loss, loss, len(x))
        of_accuracy = metrics[1].stateless_update_state(of_accuracy, y, logits)
        return weights, others, slots, [of_loss, of_accuracy]

    return train_step


def main(argv=None):
    args = parser.parse_args(argv)
    if cluster.source():  # A launcher or scheduler has started this process with others.
        here = cluster.ClusterConfig.from_environment()
        count, index = here.process_count, here.process_index
        sharding.join_processes(here.coordinator, process_count=count, process_index=index)
    keras.utils.set_random_seed(args.seed)
    strategy = experiment.strategy_from(args)
    plan = experiment.plan_from(args, strategy)
    splits = corpora.load_images(args.data)
    print(f"{len(splits.train.images):,} images to train on")
    settings = {"process_count": jax.process_count(), "process_index": jax.process_index()}
    settings |= {"global_batch_size": plan.global_batch_size}
    # Several processes need shards of one size; they may also go on as one.
    keep = jax.process_count() == 1 and args.global_batch_size is None
    of_train = settings | {"remainder": "keep" if keep else "drop", "seed": args.seed}
    of_test = settings | {"remainder": "keep" if keep else "pad", "mode": "eval"}
    of_train["steps_per_epoch"] = args.steps_per_epoch
    train = batches.ArrayBatches(tuple(splits.train), **of_train)
    test = batches.ArrayBatches(tuple(splits.test), **of_test)
    model = training.replica_exact(build_model(splits.train.images.shape[1:], splits.classes))
    rate = schedules.warmup_cosine(plan.learning_rate, total_steps=len(train) * args.epochs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate), loss, weighted_metrics=["accuracy"])
    model.optimizer.build(model.trainable_variables)
    metrics = [keras.metrics.Mean("loss"), keras.metrics.SparseCategoricalAccuracy("accuracy")]
    held = model.trainable_variables, model.non_trainable_variables, model.optimizer.variables
    held = *held, [metric.variables for metric in metrics]
    record = experiment.Recorder(args, model, strategy, plan)
    train, train_step = record.resumed(train), make_train_step(model, metrics)
    params = {"epochs": args.epochs, "steps": len(train), "metrics": metrics}
    params |= {"add_history": True, "verbose": record.verbose}
    hooks = keras.callbacks.CallbackList(record.callbacks, model=model, **params)
    hooks.on_train_begin()
    for epoch in range(record.resume.initial_epoch if record.resume else 0, args.epochs):
        jax.tree.map(lambda metric: metric.reset_state(), metrics)
        hooks.on_epoch_begin(epoch)
        for step, batch in enumerate(train):
            hooks.on_train_batch_begin(step)
            # Between steps the variables have the values, which callbacks may read and change.
            state = train_step(jax.tree.map(lambda variable: variable.value, held), *batch)
            jax.tree.map(lambda variable, value: variable.assign(value), held, state)
            hooks.on_train_batch_end(step, logs := {m.name: m.result() for m in metrics})
        train.on_epoch_end()
        tested = model.evaluate(test, verbose=0, return_dict=True)
        hooks.on_epoch_end(epoch, logs | {f"val_{name}": tested[name] for name in tested})
    hooks.on_train_end()
    return record.results(test=model.evaluate(test, verbose=0, return_dict=True))


if __name__ == "__main__":
    experiment.run(main)
