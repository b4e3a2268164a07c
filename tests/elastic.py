"""Runs that are stopped, and go on with other replicas and processes; tests/test_elastic.py.

A leg in processes of its own starts this file as a program.
"""

# ruff: noqa: ARG002 Keras calls its hooks with arguments that not every callback needs

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import signal
import sys
import threading
import time

import keras
import numpy as np

from kdpkit import checkpoints, errors, experiment, launch, schedules, testing
from kdpkit._internal import processes
from kdpkit.callbacks import LearningRateLogger, Resume
from kdpkit.training import replica_exact
from tests.callbacks.resume_programs import (
    EPOCHS,
    LOSS,
    ON_JAX,
    STEPS,
    CrashError,
    batches,
    build,
    fit,
    held_out,
    pipeline,
)

LAST, SIGKILL_ALL = "last", "SIGKILL to all"


@dataclasses.dataclass(frozen=True)
class Leg:
    """One life of a run, which ends at a step of it, or after "SIGKILL" so many seconds.

    So many `processes` are launched, of which the end happens to the last one, or to all; 0 is
    this process. On JAX so many devices of each replica share the `model`.
    """

    replicas: int
    end: str = LAST
    at: float = 0
    processes: int = 0
    shard: str = "none"
    model: int = 1
    save_freq: str | int = 2


@functools.cache
def several_processes():
    from kdpkit import strategies

    return strategies.select_strategy("multi_worker", communication="ring")


def strategy_of(leg):
    """Return what a leg trains with; None is one device as stock Keras has it."""
    if ON_JAX:
        from kdpkit import sharding

        if leg and leg.model > 1:
            devices = leg.replicas * leg.model if leg.processes <= 1 else None
            return sharding.ModelParallel(devices, model=leg.model, shard=leg.shard)
        replicas = leg.replicas if leg and leg.processes <= 1 else None
        return sharding.DataParallel(replicas, shard=leg.shard) if leg else None
    from kdpkit import strategies

    if leg is None:
        return strategies.select_strategy("one")
    if "TF_CONFIG" in os.environ:  # also if it has this process alone
        return several_processes()
    return strategies.select_strategy("mirrored", devices=leg.replicas)


@contextlib.contextmanager
def distributing(strategy):
    if not ON_JAX:
        with strategy.scope():
            yield
        return
    keras.distribution.set_distribution(strategy)
    try:
        yield
    finally:
        keras.distribution.set_distribution(None)


def trained(program, leg=None, *callbacks, resume=None):
    here = {"process_count": processes.count(), "process_index": processes.index()}
    strategy, rate = strategy_of(leg), 0.1
    if program == "schedule":
        rate = schedules.warmup_cosine(0.1, total_steps=STEPS * EPOCHS)
    with distributing(strategy):
        keras.utils.set_random_seed(0)
        layers = keras.layers
        model = build(layers.Dense(8), layers.BatchNormalization(), layers.GaussianNoise(0.1))
        model.compile(keras.optimizers.SGD(rate, momentum=0.9), LOSS, metrics=["accuracy"])
        if leg and program == "own step":
            from tests.training.step_column import trained_by_own_step

            model = trained_by_own_step(model)
        elif leg:
            model = replica_exact(model)
    before = weights_of(model)
    train = batches(**here) if ON_JAX else pipeline()
    validation = batches(seed=None, **here) if ON_JAX else held_out()
    watching = [LearningRateLogger(), *callbacks]
    if resume:
        train = resume.track(train)
        watching.append(resume)
    with distributing(strategy) if ON_JAX else contextlib.nullcontext():
        fit(model, train, *watching, validation_data=validation)
    return {
        "before": before,
        "weights": weights_of(model),
        "iterations": int(model.optimizer.iterations.numpy()),
        "history": {name: [*map(float, of)] for name, of in model.history.history.items()},
    }


def weights_of(model):
    values = checkpoints.values_of({"model": model.variables}).values()
    return [value.tolist() for value in values]


def callbacks_of(program):
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.6, patience=1, min_delta=0.2)
    return [plateau] if program == "plateau" else []


class Ending(keras.callbacks.Callback):
    """Ends a leg as it asks for; in a process of its own its steps last."""

    def __init__(self, leg, resume, seconds_a_step):
        super().__init__()
        self.leg = leg
        self.resume = resume
        self.seconds_a_step = seconds_a_step
        self.steps = 0

    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(self.seconds_a_step)
        if processes.index() == processes.count() - 1:
            if self.leg.end == "SIGKILL" and not self.steps:
                threading.Timer(self.leg.at, os.kill, (os.getpid(), signal.SIGKILL)).start()
            elif self.steps == self.leg.at:
                self.end()
        elif self.leg.end == SIGKILL_ALL and self.steps == self.leg.at:
            self.end()
        self.steps += 1

    def end(self):
        if self.leg.end == "SIGTERM":
            signal.raise_signal(signal.SIGTERM)
        elif self.leg.end == "request":
            self.resume.request_stop()
        elif self.leg.end == "error":
            raise CrashError
        elif self.leg.end == SIGKILL_ALL:
            os.kill(os.getpid(), signal.SIGKILL)


def lived(program, leg, directory, *, seconds_a_step=0.0):
    learning = callbacks_of(program)
    resume = Resume(directory, save_freq=leg.save_freq, callbacks=learning)
    ending = Ending(leg, resume, seconds_a_step)
    return trained(program, leg, *learning, ending, resume=resume)


def lived_here(program, leg, directory):
    """Live through a leg in this process, as a program does that starts afterwards."""
    former = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        return lived(program, leg, directory)
    except (SystemExit, CrashError):
        return None
    finally:
        signal.signal(signal.SIGTERM, former)


def lived_by_children(program, leg, directory):
    what = {"program": program, "leg": dataclasses.asdict(leg), "directory": str(directory)}
    command = [sys.executable, "-m", "tests.elastic", json.dumps(what)]
    code = launch.launch(command, workers=leg.processes)
    # Once in a while TensorFlow crashes while processes come together.
    crashed = not ON_JAX and leg.processes > 1
    ended = 128 + signal.SIGKILL if leg.end in ("SIGKILL", SIGKILL_ALL) else errors.STOPPED
    assert code in (0, ended) or crashed, code


def main():
    settings = json.loads(sys.argv[1])
    leg = Leg(**settings["leg"])
    testing.use_logical_cpus(leg.replicas * leg.model // leg.processes)
    if ON_JAX:
        from kdpkit import cluster, sharding
        from kdpkit.sharding import _shards as shards

        shards.SMALL = 1  # every variable that the devices divide can be sharded
        here = cluster.ClusterConfig.from_environment()
        sharding.join_processes(
            here.coordinator, process_count=here.process_count, process_index=here.process_index
        )
    directory = pathlib.Path(settings["directory"])
    lived(settings["program"], leg, directory, seconds_a_step=0.05)


def lived_all(program, legs, directory):
    for leg in legs:
        live = lived_by_children if leg.processes else lived_here
        found = live(program, leg, directory)
    return found


def assert_ends_as_undisturbed(program, legs, directory):
    """Live through all legs; compare with one device that nothing stops; return the result.

    Weights are compared by the largest change in training.
    """
    expected = trained(program, None, *callbacks_of(program))
    found = lived_all(program, legs, directory)
    assert found["iterations"] == expected["iterations"] == STEPS * EPOCHS
    pairs = [*zip(expected["before"], expected["weights"], strict=True)]
    change = max(np.abs(np.subtract(*pair)).max() for pair in pairs if np.ndim(pair[0]) > 1)
    for one, other in zip(found["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * change)
    assert found["history"].keys() == expected["history"].keys()
    for name, values in expected["history"].items():
        np.testing.assert_allclose(
            found["history"][name], values, rtol=1e-5, atol=1e-5, err_msg=name
        )
    return found


if __name__ == "__main__":
    experiment.run(main)
