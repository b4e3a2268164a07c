"""What a step of `TrainingLoop` costs with `noise_scale=True` next to one without.

On the backend that KERAS_BACKEND names.
"""

import contextlib

import keras

from kdpkit import batches, testing
from kdpkit.training import TrainingLoop
from tests.benchmarks.paired import compared, in_turns, seconds_of

ON_JAX = keras.backend.backend() == "jax"
STEPS_PER_LOOP = 16
CASES = {  # replicas, micro-batches
    "2 micro-batches": (1, 2),
    "2 replicas": (2, 2 if ON_JAX else 1),
}


def rows(args):
    """Measure each model on replicas and on micro-batches."""
    testing.use_logical_cpus(2)
    return [row_of(name, case, args.rounds or 15) for name in MODELS for case in CASES]


def small_cnn():
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.Conv2D(32, 3, strides=2, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ]
    )


def images(rows):
    x, y = testing.toy_classification(rows, features=28 * 28, classes=10)
    return x.reshape(rows, 28, 28, 1), y


MODELS = {  # a model, its data, examples of a batch, and steps of an epoch
    "tiny classifier": (testing.tiny_classifier, testing.toy_classification, 32, 512),
    "small CNN": (small_cnn, images, 64, 32),
}


def epoch_of(build, data, replicas, accumulation, *, noise_scale):
    """Return a function that trains an epoch."""
    if ON_JAX:
        from kdpkit import sharding

        strategy, scope = sharding.data_mesh(replicas), contextlib.nullcontext()
    else:
        from kdpkit import strategies

        several = replicas > 1
        strategy = strategies.select_strategy(
            "mirrored" if several else "one", devices=replicas if several else None
        )
        scope = strategy.scope()
    with scope:
        loop = TrainingLoop(
            build(),
            optimizer="adam",
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            strategy=strategy,
            steps_per_loop=STEPS_PER_LOOP,
            accumulation=accumulation,
            noise_scale=noise_scale,
        )
    return lambda: loop.fit(data, epochs=1, verbose=0)


def feed(arrays, size):
    if ON_JAX:
        return batches.ArrayBatches(arrays, global_batch_size=size)
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(arrays).batch(size, drop_remainder=True).cache()


def row_of(name, case, rounds):
    """Measure a model on some replicas and micro-batches."""
    build, draw, size, steps = MODELS[name]
    data = feed(draw(size * steps), size)

    def microseconds(train):
        return lambda: 1e6 * seconds_of(train) / steps

    contestants = {
        noise_scale: microseconds(epoch_of(build, data, *CASES[case], noise_scale=noise_scale))
        for noise_scale in (False, True)
    }
    figures = in_turns(contestants, rounds)
    return compared(
        f"noise scale on against off, {name}, {case}", "us a step", figures[True], figures[False]
    )
