"""A program that logs its training to Weights & Biases, MLflow and TensorBoard; test_trackers.py.

    python -m tests.tracker_process train DIRECTORY STRATEGY WAY...
    python -m tests.tracker_process read DIRECTORY

`train` makes one run in each way, in a directory of its own; `read` prints what the trackers have
of them, as one line of JSON. They are not imported by the tests: both change the process.
"""

# ruff: noqa: ARG002, T201 it prints for the test that started it

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import struct
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ |= {
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}

import keras
import mlflow
import tensorflow as tf
import wandb

from kdpkit import callbacks, scaling, strategies, testing
from kdpkit.training import TrainingLoop, replica_exact

EXAMPLES, EPOCHS = 40, 2
BLOCK = 32768  # bytes, of W&B's files, which are logs as LevelDB writes them


class Dying(keras.callbacks.Callback):
    """Kills the second process in its second epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1 and not strategies.is_chief():
            os.kill(os.getpid(), signal.SIGKILL)


def logged_by_lambda(run):
    return [
        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: run.log({"epoch": epoch, **logs})
        )
    ]


def logged_by_wandb():
    from wandb.integration.keras import WandbMetricsLogger

    def keep_rate(_, logs):
        logs.update(applied_learning_rate=logs["learning_rate"])

    return [keras.callbacks.LambdaCallback(on_epoch_end=keep_rate), WandbMetricsLogger()]


def train(strategy, way):
    """Train in a way, in the current directory; return History."""
    plan = scaling.ScalePlan(
        replicas=strategy.num_replicas_in_sync if strategy else 1,
        per_replica_batch_size=5,
        base_learning_rate=1e-3,
    )
    rate = keras.optimizers.schedules.PolynomialDecay(plan.learning_rate, 12)
    scope = strategy.scope if strategy else contextlib.nullcontext
    with scope():
        model = testing.tiny_classifier()
    data = tf.data.Dataset.from_tensor_slices(testing.toy_classification(EXAMPLES))
    batches = data.batch(plan.global_batch_size)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    listed = callbacks.training_callbacks(
        "logs",
        global_batch_size=plan.global_batch_size,
        replicas=plan.replicas,
        hyperparameters={"plan": plan},
    )
    with contextlib.ExitStack() as runs:
        if way.startswith("autolog"):
            mlflow.autolog()
        elif is_first():
            config = dataclasses.asdict(plan) | {"learning_rate": plan.learning_rate}
            here = pathlib.Path.cwd()  # W&B would stay in the directory of its first run
            run = runs.enter_context(
                wandb.init(project="tests", config=config, mode="offline", dir=here)
            )
            runs.enter_context(mlflow.start_run())
            mlflow.log_params(config)
            by_wandb = way == "WandbMetricsLogger"
            listed += logged_by_wandb() if by_wandb else logged_by_lambda(run)
            listed.append(mlflow.keras.MlflowCallback())
        if way == "killed":
            listed.append(Dying())
        settings = {"epochs": EPOCHS, "callbacks": listed, "verbose": 0}
        if way.endswith("loop"):
            loop = TrainingLoop(
                model, optimizer=keras.optimizers.Adam(rate), loss=loss, strategy=strategy
            )
            return loop.fit(batches, **settings).history
        with scope():
            model = replica_exact(model)
            model.compile(keras.optimizers.Adam(rate), loss)
        return model.fit(batches, **settings).history


def is_first():
    if keras.backend.backend() == "jax":
        import jax

        return jax.process_index() == 0
    return strategies.is_chief()


def main(directory, strategy, *ways):
    strategy = {
        "mirrored": lambda: strategies.select_strategy(
            "mirrored", devices=strategies.split_device("CPU", 2)
        ),
        "multi_worker": lambda: strategies.select_strategy("multi_worker"),
        "none": lambda: None,
    }[strategy]()
    found = {}
    for way in ways:
        (directory / way).mkdir(parents=True, exist_ok=True)
        os.chdir(directory / way)
        mlflow.set_tracking_uri(f"sqlite:///{directory.absolute() / way}/mlflow.db")
        try:
            found[way] = train(strategy, way)
        except AttributeError as error:
            found[way] = str(error)
    print(json.dumps(found, default=float))


# Reading what the trackers have.


def wandb_runs(directory):
    """Return configuration, history and exit code of all runs below a directory."""
    return [of_wandb(file) for file in directory.glob("wandb/offline-run-*/*.wandb")]


def of_wandb(file):
    found = {"config": {}, "history": [], "exit": None}
    for record in records(file.read_bytes()):
        kind = record.WhichOneof("record_type")
        if kind in ("run", "config"):
            config = record.run.config if kind == "run" else record.config
            found["config"] |= {item.key: json.loads(item.value_json) for item in config.update}
        elif kind == "history":
            names = {item.key or item.nested_key[-1]: item for item in record.history.item}
            found["history"].append({k: json.loads(v.value_json) for k, v in names.items()})
        elif kind == "exit":
            found["exit"] = record.exit.exit_code
    return found


def records(data):
    from wandb.proto import wandb_internal_pb2

    position, parts = 7, b""  # after the file's header
    while position + 7 <= len(data):
        left = BLOCK - position % BLOCK
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # complete, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def mlflow_runs(directory):
    """Return parameters, metrics and status of all runs in a directory's database."""
    if not (directory / "mlflow.db").exists():
        return []
    client = mlflow.MlflowClient(f"sqlite:///{directory}/mlflow.db")
    ids = [experiment.experiment_id for experiment in client.search_experiments()]
    return [
        {
            "config": run.data.params,
            "history": {
                name: [
                    (each.step, each.value)
                    for each in client.get_metric_history(run.info.run_id, name)
                ]
                for name in run.data.metrics
            },
            "status": run.info.status,
        }
        for run in client.search_runs(ids)
    ]


def read(directory):
    found = {
        way.name: {
            "wandb": wandb_runs(way),
            "mlflow": mlflow_runs(way),
            "boards": [str(path.relative_to(way)) for path in way.glob("logs/**/*tfevents*")],
        }
        for way in directory.iterdir()
        if way.is_dir()
    }
    print(json.dumps(found))


if __name__ == "__main__":
    mode, where, *words = sys.argv[1:]
    {"train": main, "read": read}[mode](pathlib.Path(where), *words)
