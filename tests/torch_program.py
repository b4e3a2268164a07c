"""What works on Keras' torch backend, and what raises; `tests/test_torch.py` runs it.

    KERAS_BACKEND=torch python -m tests.torch_program DIRECTORY

What came out is printed as JSON.
"""

# ruff: noqa: ARG002, T201

import json
import pathlib
import sys

import keras
import numpy as np

from kdpkit import batches, callbacks, schedules, testing

EPOCHS, STEPS = 3, 5
DIRECTORY = pathlib.Path(sys.argv[1])
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
X, Y = testing.toy_classification(4 * STEPS)


class Stopping(keras.callbacks.Callback):
    """Asks for the end of training before a step."""

    def __init__(self, resume, step):
        super().__init__()
        self.resume, self.steps_left = resume, step

    def on_train_batch_end(self, batch, logs=None):
        self.steps_left -= 1
        if self.steps_left == 0:
            self.resume.request_stop()


def trained(name, *, seed, stops_after=0):
    """Train until a step, or to the end; return None, or the model, and its history."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dropout(0.3),  # draws from torch's own numbers
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3, seed=1),  # and this one from Keras'
            keras.layers.Dense(3),
        ]
    )
    rate = schedules.warmup_cosine(1e-2, total_steps=EPOCHS * STEPS, warmup_steps=3)
    model.compile(keras.optimizers.Adam(rate), LOSS, weighted_metrics=["accuracy"])
    stopping = keras.callbacks.EarlyStopping("loss", patience=9)
    resume = callbacks.Resume(DIRECTORY / name, callbacks=[stopping])
    train = resume.track(batches.ArrayBatches((X, Y), global_batch_size=4, seed=1))
    watching = [
        *callbacks.training_callbacks(None, global_batch_size=4),
        stopping,
        Stopping(resume, stops_after),
        resume,
    ]
    try:
        history = model.fit(
            train, epochs=EPOCHS, shuffle=False, callbacks=watching, verbose=0
        ).history
    except SystemExit as stop:
        return {"code": stop.code}
    variables = [*model.variables, *model.optimizer.variables]
    weights = [keras.ops.convert_to_numpy(variable).tolist() for variable in variables]
    return {"weights": weights, "history": history}


def sentence_of(call):
    try:
        call()
    except (ValueError, ImportError) as error:
        return str(error)
    return None


def part(name):
    """Use a part that another backend has."""
    import kdpkit

    model = testing.tiny_classifier()
    calls = {
        "replica_exact": lambda: kdpkit.training.replica_exact(model),
        "linear_cross_entropy": lambda: kdpkit.training.linear_cross_entropy(
            np.ones((2, 3)), np.ones((5, 3)), np.zeros(2, int)
        ),
        "check_parity": lambda: kdpkit.training.check_parity(lambda: model, (X, Y), replicas=2),
        "strategies": lambda: kdpkit.strategies.select_strategy("mirrored", devices=2),
        "sharding": lambda: kdpkit.sharding.DataParallel(1),
        "plan_memory": lambda: kdpkit.diagnostics.plan_memory(lambda: model, memory="1GiB"),
    }
    return sentence_of(calls[name])


def main():
    found = {
        "backend": keras.backend.backend(),
        "stopped": trained("stopped", seed=0, stops_after=7),
        "resumed": trained("stopped", seed=99),
        "undisturbed": trained("undisturbed", seed=0),
        "sentences": {name: part(name) for name in sys.argv[2:]},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
