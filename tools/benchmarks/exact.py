"""What `replica_exact` costs on two replicas, against stock `fit` where that is right."""

import keras
import numpy as np
import tensorflow as tf

from kdpkit import corpora, strategies, testing
from kdpkit.training import replica_exact
from recipes import cnn_custom_loop
from tools.benchmarks import workload
from tools.benchmarks.paired import compared, in_turns, seconds_of

BERT_STEPS, TINY_STEPS, MASKED_STEPS = 12, 400, 20


def rows(args):
    """Measure a step of several models, and the seconds to the end of the first one."""
    testing.use_logical_cpus(2)
    strategy = strategies.select_strategy("mirrored", devices=2)
    array = workload.rows(args)
    size = workload.tokenizer(args.text, args.vocabulary).vocabulary_size()
    images = corpora.load_images(args.images)

    def bert():
        return workload.compiled(workload.masked_lm(size))

    def cnn():
        return compiled(cnn_custom_loop.build_model(images.train.images.shape[1:], images.classes))

    text = workload.packed(args, array, steps=BERT_STEPS, replicas=2)
    pictures = batches(*images.train, size=128)
    numbers = batches(*testing.toy_classification(32 * TINY_STEPS), size=32)
    wide = np.ones((256 * MASKED_STEPS, 4096), "float32")
    masked_data = batches(wide, np.ones(len(wide), "int32"), size=256)
    steps = {
        "BERT": (bert, text, BERT_STEPS, 1.0),
        "a tiny model": (tiny, numbers, TINY_STEPS, 1.05),
        "eight dropout masks": (masked, masked_data, MASKED_STEPS, 1.05),
    }
    starts = {"BERT": (bert, text, 1.5), "the CNN": (cnn, pictures, None)}
    starts["a tiny model"] = tiny, numbers, None
    return [
        *(step(strategy, name, *settings, args.rounds or 9) for name, settings in steps.items()),
        *(start(strategy, name, *settings, args.rounds or 5) for name, settings in starts.items()),
    ]


def batches(x, y, *, size):
    """Even batches, in memory."""
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(size, drop_remainder=True).cache()


def compiled(model):
    """Compile a classifier as most are."""
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def tiny():
    """Build a model whose steps are calls of Python and TensorFlow, and no arithmetic."""
    return compiled(testing.tiny_classifier())


def masked():
    """Build a model that draws masks, and little else."""
    layers = [keras.layers.Dropout(0.5, seed=number) for number in range(8)]
    return compiled(keras.Sequential([keras.Input((4096,)), *layers, keras.layers.Dense(2)]))


def step(strategy, name, build, data, steps, goal, rounds):
    """Hold a step of `replica_exact` and `fit` against one of stock `fit`."""

    def epoch(mend):
        with strategy.scope():
            model = build()
        mend(model)
        return lambda: 1e3 * seconds_of(lambda: model.fit(data, verbose=0, shuffle=False)) / steps

    figures = in_turns({"ours": epoch(replica_exact), "stock": epoch(lambda _: None)}, rounds)
    return compared(
        f"{name}, 2 replicas, replica_exact and fit against stock fit",
        "ms a step",
        figures["ours"],
        figures["stock"],
        goal=("<=", goal),
    )


def start(strategy, name, build, data, goal, rounds):
    """Measure the seconds to the end of the first step of a new model, against stock `fit`."""

    def first_step(mend):
        def run():
            with strategy.scope():
                model = build()
            mend(model)
            return seconds_of(lambda: model.fit(data, steps_per_epoch=1, verbose=0))

        return run

    starts = {"ours": first_step(replica_exact), "stock": first_step(lambda _: None)}
    figures = in_turns(starts, rounds)
    return compared(
        f"{name}, 2 replicas: seconds to the end of the first step, against stock fit",
        "s",
        figures["ours"],
        figures["stock"],
        goal=goal and ("<=", goal),
    )
