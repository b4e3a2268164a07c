"""Runs that are stopped, and go on with other replicas and processes; tests/test_elastic.py.

A schedule of such a run follows from its seed alone, and so can be repeated.
"""

# ruff: noqa: ARG002 Keras calls its hooks with arguments that not every callback needs

import contextlib
import dataclasses
import functools
import json
import os
import random
import signal
import sys
import threading
import time

import keras
import numpy as np

from kdpkit import checkpoints, errors, launch, schedules, testing
from kdpkit._internal import processes
from kdpkit.batches import ArrayBatches
from kdpkit.callbacks import LearningRateLogger, Resume
from kdpkit.training import TrainingLoop, replica_exact

ON_JAX = keras.backend.backend() == "jax"
EPOCHS, BATCHES = 3, 3
STEPS = EPOCHS * BATCHES
LAST = "last"

# What all legs of a run have in common. "fit" has a plateau, the loops a schedule of the rate;
# "micro" is a loop that may cut batches into micro-batches.
PROGRAMS = ("fit", "loop", "micro")


class CrashError(Exception):
    """An error in a step."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a leg trains on; replicas are those of all processes."""

    replicas: int
    processes: int = 1
    shard: str = "none"
    accumulation: int = 1


@dataclasses.dataclass(frozen=True)
class Leg:
    """One life of a run.

    Args:
        setting: What it trains on.
        end: "SIGTERM", "request", "error", "SIGKILL", or `LAST`.
        at: The step of this leg at which it ends, or the seconds after its first step.
        of: The process that this happens to.
        save_freq: As in `Resume`.
    """

    setting: Setting
    end: str
    at: float
    of: int
    save_freq: str | int


# Schedules.


HERE = ("SIGTERM", "request", "error")


def drawn(seed, *, most_legs=5, most_replicas=8, processes=(1,), ends=HERE):
    """Draw a program and its legs."""
    draw = random.Random(seed)
    program = PROGRAMS[seed % len(PROGRAMS)]
    legs = draw.randint(2, most_legs)
    settings = [_setting(draw, program, most_replicas, processes) for _ in range(legs)]
    ends = [draw.choice(ends) for _ in range(legs - 1)] + [LAST]
    return program, [_leg(draw, *of) for of in zip(settings, ends, strict=True)]


def _setting(draw, program, most_replicas, processes):
    count = draw.choice(processes)
    return Setting(
        replicas=count * draw.randint(1, most_replicas // count),
        processes=count,
        shard=draw.choice(["none", "optimizer", "weights"]) if ON_JAX else "none",
        accumulation=draw.choice([1, 3]) if program == "micro" else 1,
    )


def _leg(draw, setting, end):
    at = draw.uniform(0, 0.6) if end == "SIGKILL" else draw.randrange(STEPS - 1)
    of = draw.randrange(setting.processes)
    return Leg(setting, end, at, of, draw.choice([1, 2, 5, "epoch"]))


# What is trained.


def toy():
    """Return examples for batches of 16; several processes of JAX need a last one like the rest."""
    return testing.toy_classification(48 if ON_JAX else 44)


def dataset(count, index):
    if ON_JAX:
        position = {"process_count": count, "process_index": index}
        return ArrayBatches(toy(), global_batch_size=16, remainder="keep", seed=1, **position)
    import tensorflow as tf

    from kdpkit import pipelines

    return pipelines.train_pipeline(
        tf.data.Dataset.from_tensor_slices(toy()),
        pipelines.PipelineConfig(seed=1, remainder="keep"),
        global_batch_size=16,
        augment=lambda batch, seed: (
            batch[0] + tf.random.stateless_normal(tf.shape(batch[0]), seed, stddev=0.1),
            batch[1],
        ),
    )


def validation(count, index):
    x, y = toy()
    if ON_JAX:
        position = {"process_count": count, "process_index": index}
        return ArrayBatches((x[:32], y[:32]), global_batch_size=16, remainder="keep", **position)
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((x[:32], y[:32])).batch(16)


def net(program):
    layers = keras.layers
    keras.utils.set_random_seed(0)
    # Each micro-batch is normalized on its own.
    per_batch = layers.BatchNormalization(momentum=0.9)
    middle = layers.LayerNormalization() if program == "micro" else per_batch
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(8, activation="tanh"),
            layers.Dropout(0.3),
            layers.Dense(8, use_bias=False),
            middle,
            layers.GaussianNoise(0.1),
            layers.Dense(8, activation="tanh"),
            layers.Dropout(0.2, noise_shape=(None, 8)),
            layers.Dense(3),
        ]
    )


def optimizer(program):
    rate = 0.1 if program == "fit" else schedules.warmup_cosine(0.1, total_steps=STEPS)
    return keras.optimizers.SGD(rate, momentum=0.9)


def distribution(setting):
    from kdpkit import sharding

    return sharding.DataParallel(
        setting.replicas if setting.processes == 1 else None, shard=setting.shard
    )


@functools.cache
def several_processes():
    from kdpkit import strategies

    return strategies.select_strategy("multi_worker", communication="ring")


def strategy_of(setting):
    from kdpkit import strategies

    if setting is None:
        return strategies.select_strategy("one")
    if "TF_CONFIG" in os.environ:  # also if it has this process alone
        return several_processes()
    return strategies.select_strategy("mirrored", devices=setting.replicas)


class Trainer:
    """A model that trains on one setting; None is one device as stock Keras has it.

    Tracing a step is what costs, so one trainer serves many legs: it begins each as a new program
    does.
    """

    def __init__(self, program, setting):
        self.program = program
        self.setting = setting
        if ON_JAX:
            self._strategy = distribution(setting) if setting else None
            self._scope = self._distributing
        else:
            self._strategy = strategy_of(setting)
            self._scope = self._strategy.scope
        with self._scope():
            self.model = net(program)
            self._compile()
            self.model.optimizer.build(self.model.trainable_variables)
        self._initial = checkpoints.values_of(self._variables())
        self.before = weights_of(self.model)

    def _compile(self):
        compiled = {
            "optimizer": optimizer(self.program),
            "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "metrics": ["accuracy"],
        }
        if self.program == "fit":
            self.model = replica_exact(self.model) if self.setting else self.model
            self.model.compile(**compiled)
        else:
            settings = {"accumulation": self.setting.accumulation} if self.setting else {}
            self.loop = TrainingLoop(self.model, **compiled, strategy=self._strategy, **settings)

    def _variables(self):
        return {"model": self.model.variables, "optimizer": self.model.optimizer.variables}

    @contextlib.contextmanager
    def _distributing(self):
        keras.distribution.set_distribution(self._strategy)
        try:
            yield
        finally:
            keras.distribution.set_distribution(None)

    def train(self, *callbacks, resume=None):
        """Train a new program's life; return its result."""
        checkpoints.assign(self._variables(), self._initial)
        position = (processes.count(), processes.index())
        train, held_out = dataset(*position), validation(*position)
        watching = [LearningRateLogger(), *callbacks]
        if resume:
            train = resume.track(train)
            watching.append(resume)
        settings = {"epochs": EPOCHS, "callbacks": watching, "verbose": 0}
        if self.program == "fit":
            with self._scope() if ON_JAX else contextlib.nullcontext():
                history = self.model.fit(train, validation_data=held_out, shuffle=False, **settings)
        else:
            history = self.loop.fit(train, held_out, **settings)
        return {
            "weights": weights_of(self.model),
            "iterations": int(self.model.optimizer.iterations.numpy()),
            "history": {name: [*map(float, of)] for name, of in history.history.items()},
        }


def weights_of(model):
    values = checkpoints.values_of({"model": model.variables}).values()
    return [value.tolist() for value in values]


def plateau():
    return keras.callbacks.ReduceLROnPlateau("loss", factor=0.6, patience=1, min_delta=0.2)


def callbacks_of(program):
    return [plateau()] if program == "fit" else []


trainer = functools.cache(Trainer)


@functools.cache
def undisturbed(program):
    """Return the weights before and the result of one device that nothing stops."""
    alone = Trainer(program, None)
    return alone.before, alone.train(*callbacks_of(program))


# Legs.


class Ending(keras.callbacks.Callback):
    """Ends a leg as it asks for; in a process of its own its steps last."""

    def __init__(self, leg, resume, *, seconds_a_step=0.0):
        super().__init__()
        self.leg = leg
        self.resume = resume
        self.seconds_a_step = seconds_a_step
        self.steps = 0

    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(self.seconds_a_step)
        if processes.index() == self.leg.of:
            if self.leg.end == "SIGKILL" and not self.steps:
                threading.Timer(self.leg.at, os.kill, (os.getpid(), signal.SIGKILL)).start()
            elif self.steps == self.leg.at:
                self.end()
        self.steps += 1

    def end(self):
        if self.leg.end == "SIGTERM":
            signal.raise_signal(signal.SIGTERM)
        elif self.leg.end == "request":
            self.resume.request_stop()
        elif self.leg.end == "error":
            raise CrashError


def lived(program, leg, directory, *others, seconds_a_step=0.0):
    """Live through a leg in this process; return its result, or None if it was stopped."""
    learning = callbacks_of(program)
    resume = Resume(directory, save_freq=leg.save_freq, callbacks=learning)
    ending = Ending(leg, resume, seconds_a_step=seconds_a_step)
    try:
        return trainer(program, leg.setting).train(*learning, *others, ending, resume=resume)
    except CrashError:
        return None


def lived_here(program, leg, directory):
    """Live through a leg in this process, as a program does that starts afterwards."""
    former = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        return lived(program, leg, directory)
    except SystemExit:
        return None
    finally:
        signal.signal(signal.SIGTERM, former)


def lived_by_children(program, leg, directory):
    """Live through a leg in processes of its own."""
    result = directory / "result.json"
    result.unlink(missing_ok=True)
    what = {
        "program": program,
        "leg": dataclasses.asdict(leg),
        "directory": str(directory),
    }
    command = [sys.executable, "-m", "tests.elastic_process", json.dumps(what)]
    # Restarts to spare: once in a while TensorFlow crashes while processes come together.
    spare = 3 if leg.end == LAST and not ON_JAX else 0
    code = launch.launch(command, workers=leg.setting.processes, max_restarts=spare)
    ends = {LAST: [0], "SIGKILL": [0, 128 + signal.SIGKILL]}.get(leg.end, [0, errors.STOPPED])
    crashed = not ON_JAX and leg.setting.processes > 1 and leg.end != LAST
    assert code in ends or crashed, code
    return json.loads(result.read_text()) if result.exists() else None


def run(seed, directory, *, live=lived_here, **how):
    """Live through a schedule; fail unless it ends as what nothing stopped."""
    program, legs = drawn(seed, **how)
    shown = "\n".join(map(str, [f"seed {seed}, {how}", program, *legs]))
    try:
        for leg in legs:
            found = live(program, leg, directory)
        assert_equal(found, *undisturbed(program))
    except BaseException as error:
        error.add_note(shown)
        raise


def assert_equal(found, before, expected):
    """Compare weights by the largest change in training, and what History has."""
    assert found["iterations"] == expected["iterations"] == STEPS
    pairs = [*zip(before, expected["weights"], strict=True)]
    change = max(np.abs(np.subtract(*pair)).max() for pair in pairs if np.ndim(pair[0]) > 1)
    for one, other in zip(found["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * change)
    assert found["history"].keys() == expected["history"].keys()
    for name, values in expected["history"].items():
        np.testing.assert_allclose(
            found["history"][name], values, rtol=1e-5, atol=1e-5, err_msg=name
        )
