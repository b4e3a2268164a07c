"""What `replica_exact` costs on a tiny model, where a step is nothing but overhead."""

import keras
import tensorflow as tf

from kdpkit import testing
from kdpkit.training import replica_exact
from tools.benchmarks.paired import compared, in_turns, seconds_of

BATCH, STEPS, STEPS_PER_CALL = 32, 2048, 64


def rows(args):
    """Measure many steps in a call against stock `fit`, and against a loop written by hand."""
    features, labels = testing.toy_classification(BATCH)
    batch = tf.data.Dataset.from_tensors((features, labels)).cache()
    data = batch.repeat(STEPS).prefetch(tf.data.AUTOTUNE)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    contestants = {"bare loop": bare_loop(data, loss)}
    for name, prepare, steps in (
        ("fit", lambda model: model, 1),
        (1, replica_exact, 1),
        (STEPS_PER_CALL, replica_exact, STEPS_PER_CALL),
    ):
        model = prepare(testing.tiny_classifier())
        settings = {"steps_per_execution": steps, "jit_compile": False}
        model.compile("adam", loss, metrics=["accuracy"], **settings)
        contestants[name] = lambda model=model: model.fit(data, verbose=0)
    figures = in_turns(
        {
            name: lambda train=train: 1e6 * seconds_of(train) / STEPS
            for name, train in contestants.items()
        },
        args.rounds or 9,
    )
    many, one = figures[STEPS_PER_CALL], figures[1]
    what = "tiny model, replica_exact with {} against {}"
    loop = f"{STEPS_PER_CALL} steps a call"
    return [
        compared(
            what.format(loop, "stock fit"), "us a step", many, figures["fit"], goal=("<=", 0.25)
        ),
        compared(
            what.format(loop, "a bare loop of as many"),
            "us a step",
            many,
            figures["bare loop"],
            goal=("<=", 1.1),
        ),
        compared(what.format("1 step a call", "stock fit"), "us a step", one, figures["fit"]),
    ]


def bare_loop(data, loss_of):
    """Write the same loop by hand: gradients, update, loss and accuracy, many steps in a call."""
    model = testing.tiny_classifier()
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    mean, accuracy = keras.metrics.Mean(), keras.metrics.SparseCategoricalAccuracy()

    @tf.function
    def steps(iterator):
        for _ in tf.range(STEPS_PER_CALL):
            x, y = next(iterator)
            with tf.GradientTape() as tape:
                predictions = model(x, training=True)
                loss = loss_of(y, predictions)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
            mean.update_state(loss)
            accuracy.update_state(y, predictions)
        return mean.result(), accuracy.result()

    def epoch():
        iterator = iter(data)
        mean.reset_state()
        accuracy.reset_state()
        for _ in range(STEPS // STEPS_PER_CALL):
            logs = [float(result) for result in steps(iterator)]
        return logs

    return epoch
