"""Time to the same masked-LM loss on the published evaluation, and accuracy by tokens seen."""

import keras
import keras_hub
import tensorflow as tf

from tests.benchmarks import workload
from tests.benchmarks.paired import Row, Spread, seconds_of

PUBLISHED_STEPS, EVALUATE_EVERY, MOST_STEPS = 96, 4, 600
HELD_OUT = 128  # lines


def rows(args):
    """Train the published recipe for some steps, and ours until it is as good."""
    figures = [race(args) for _ in range(args.rounds or 1)]
    times, losses, ours, theirs = zip(*figures, strict=True)
    note = f"validation loss {losses[0]:.3f} on {HELD_OUT} lines, 512 wide, with 96 places"
    return [
        Row(
            "BERT, time to the published recipe's loss, share of its time",
            "",
            Spread.of([one / other for one, other in times]),
            goal=("<=", 0.2),
            note=f"{times[0][0]:.1f} s against {times[0][1]:.1f}; {note}",
        ),
        Row(
            "BERT, masked accuracy after as many real tokens",
            "%",
            Spread.of(list(ours)),
            Spread.of(list(theirs)),
            Spread.of([one / other for one, other in zip(ours, theirs, strict=True)]),
            goal=(">=", 1.0),
            note=note,
        ),
    ]


def race(args):
    """Return seconds of ours and the other, the loss, and the accuracies after as many tokens."""
    model, data = workload.published(args)
    *batches, _ = list(data)
    held_out = evaluation(args, batches)
    batches = batches[HELD_OUT // workload.BATCH :]
    start = model.get_weights()
    model.fit(one(batches[0]), verbose=0)  # compiles
    model.set_weights(start)
    reset(model.optimizer)
    seconds = seconds_of(lambda: model.fit(cycled(batches), verbose=0))
    seen = PUBLISHED_STEPS * workload.real_tokens(args, batches) / len(batches)
    loss, accuracy = scores(model, held_out)
    time_of_ours, accuracy_of_ours = ours(args, start, held_out, loss, seen)
    return (time_of_ours, seconds), loss, 100 * accuracy_of_ours, 100 * accuracy


def evaluation(args, batches):
    """Mask lines once, in the published format."""
    tokens = workload.tokenizer(args.text, args.vocabulary)
    keras.utils.set_random_seed(1)
    preprocessor = keras_hub.models.BertMaskedLMPreprocessor(
        tokens,
        sequence_length=workload.PUBLISHED_LENGTH,
        mask_selection_length=workload.PUBLISHED_SLOTS,
    )
    masked = [preprocessor(batch) for batch in batches[: HELD_OUT // workload.BATCH]]
    parts = tf.nest.map_structure(lambda *leaves: tf.concat(leaves, 0), *masked)
    return tf.data.Dataset.from_tensor_slices(parts).batch(workload.BATCH)


def scores(model, held_out):
    """Return the loss of a masked token, and the accuracy, both by hand."""
    total = right = weight = 0.0
    for x, y, weights in held_out:
        logits = model(x, training=False)
        losses = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
        hits = tf.cast(tf.equal(tf.argmax(logits, -1, tf.int32), tf.cast(y, tf.int32)), tf.float32)
        total += float(tf.reduce_sum(losses * weights))
        right += float(tf.reduce_sum(hits * weights))
        weight += float(tf.reduce_sum(weights))
    return total / weight, right / weight


def ours(args, start, held_out, loss, seen):
    """Train until the loss is reached; return the seconds of it, and accuracy after `seen`."""
    array = workload.rows(args)
    loop = workload.loop_of(args, jit=True)
    data = workload.packed(args, array).repeat()
    loop.fit(data, epochs=1, steps_per_epoch=2, verbose=0)  # compiles
    loop.model.set_weights(start)
    reset(loop.optimizer)
    seconds, steps, needed, accuracy = 0.0, 0, None, None
    per_step = workload.BATCH * (workload.LENGTH - 2)
    while steps < MOST_STEPS and (needed is None or accuracy is None):
        seconds += seconds_of(
            lambda: loop.fit(data, epochs=1, steps_per_epoch=EVALUATE_EVERY, verbose=0)
        )
        steps += EVALUATE_EVERY
        here, right = scores(loop.model, held_out)
        if needed is None and here <= loss:
            needed = seconds
        if accuracy is None and steps * per_step >= seen:
            accuracy = right
    return needed or float("inf"), accuracy


def reset(optimizer):
    """Forget what the steps that compiled have left."""
    for variable in optimizer.variables:
        if variable is not optimizer.learning_rate:
            variable.assign(tf.zeros_like(variable.value))


def one(batch):
    """Make a dataset of one batch."""
    return tf.data.Dataset.from_tensors(batch)


def cycled(batches):
    """Make a dataset of as many steps as the published recipe trains."""
    return tf.data.Dataset.from_tensor_slices(tf.stack(batches)).repeat().take(PUBLISHED_STEPS)
