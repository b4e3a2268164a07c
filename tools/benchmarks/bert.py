"""Real tokens a second of the BERT recipe, on one device."""

import functools

import keras
import tensorflow as tf

from tools.benchmarks import workload
from tools.benchmarks.paired import compared, in_turns, seconds_of

PUBLISHED_STEPS, STEPS = 3, 24  # of a round


def rows(args):
    """Measure ours against the published recipe, stock `fit`, and a bare loop."""
    array = workload.rows(args)
    data = workload.packed(args, array, steps=STEPS)
    tokens = workload.real_tokens(args, [array[: STEPS * workload.BATCH]])
    contestants = {
        "ours": trained(workload.exact(args, jit_compile=True), data, tokens),
        "ours, no XLA": trained(workload.exact(args, jit_compile=False), data, tokens),
        "published": published(args),
        "stock fit": trained(stock(args), data, tokens),
        "bare loop": functools.partial(rate, tokens, bare_loop(args, data)),
    }
    figures = in_turns(contestants, args.rounds or 7)
    ours, goals = figures.pop("ours"), {"published": (">=", 5.5)}
    what = "BERT, one device, against {}"
    return [
        compared(what.format(name), "real tokens/s", ours, other, goal=goals.get(name))
        for name, other in figures.items()
    ]


def rate(tokens, train):
    """Return tokens a second of a call."""
    return tokens / seconds_of(train)


def trained(model, data, tokens):
    """Return the rate of an epoch of `fit`."""
    return lambda: rate(tokens, lambda: model.fit(data, verbose=0))


def published(args):
    """Return the rate of the published recipe, on the next lines in every round."""
    model, data = workload.published(args)
    batches = list(data)
    groups = workload.cycle(batches, PUBLISHED_STEPS)

    def measure():
        group = next(groups)
        given = tf.data.Dataset.from_tensor_slices(tf.stack(group)).prefetch(tf.data.AUTOTUNE)
        count = workload.real_tokens(args, group)
        return rate(count, lambda: model.fit(given, verbose=0))

    return measure


def stock(args):
    """Return the model as KerasHub has it."""
    size = workload.tokenizer(args.text, args.vocabulary).vocabulary_size()
    return workload.compiled(workload.masked_lm(size))


def bare_loop(args, data):
    """Train by hand, as the TensorFlow tutorials do, compiled by XLA."""
    size = workload.tokenizer(args.text, args.vocabulary).vocabulary_size()
    model, optimizer = workload.masked_lm(size), keras.optimizers.AdamW(workload.RATE)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer.build(model.trainable_variables)

    @tf.function(jit_compile=True)
    def step(x, y, weights):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True), sample_weight=weights)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    def epoch():
        for batch in data:
            loss = step(*batch)
        return float(loss)

    return epoch
