"""What Keras and JAX do differently in the versions that kdpkit works with, in one file.

Private places inside Keras that training needs are in `kdpkit.training._keras_internals`.
"""

import inspect
from typing import Any, NoReturn

import keras

from kdpkit import _checks

KERAS = tuple(map(int, keras.__version__.split(".")[:2]))


def last_batch(batch: int, batches_at_once: int) -> int:
    """Give the index of an execution's last batch, from the one that `on_train_batch_end` got.

    Until Keras 3.11 that was the index of its first one. Only `fit` executes several: a
    `TrainingLoop` tells the last one itself, and its model executes one batch at once.

    Args:
        batch: What the hook got.
        batches_at_once: The model's `steps_per_execution`.
    """
    return batch + batches_at_once - 1 if KERAS < (3, 11) else batch


def refuse_unknown(name: str, **versions: str) -> NoReturn:
    """Refuse a Keras, or what is below it, that has something inside as no version tried has."""
    _checks.refuse(
        f"`replica_exact` works inside Keras 3.10 to 3.15, and in this version `{name}` differs. "
        "Install one of these, or update kdpkit.",
        keras=keras.__version__,
        **versions,
    )


def refuse_grain(name: str, dataset: Any) -> None:
    """Refuse a Grain dataset where Keras takes none."""
    if KERAS < (3, 11) and type(dataset).__module__.startswith("grain."):
        _checks.refuse(
            f"`{name}` is a Grain dataset, which Keras takes from 3.11 on. Install that version or "
            "a later one, or give a `keras.utils.PyDataset` or a `tf.data.Dataset`.",
            keras=keras.__version__,
        )


def refuse_sums_over_rows(model: Any) -> None:
    """Refuse regularizers of activities in Keras before 3.14, which have no mean over the rows.

    They grow with the rows of a batch, so that those of replicas and micro-batches do not add up as
    all else in a loss does.
    """
    for layer in model._flatten_layers() if KERAS < (3, 14) else ():
        if getattr(layer, "activity_regularizer", None) is not None:
            _checks.refuse(
                "Before Keras 3.14 an `activity_regularizer` is a sum over the rows of a batch, "
                "which cannot be made exact where replicas or micro-batches share them. Install "
                "Keras 3.14 or later, or call `add_loss` with a mean over the rows.",
                layer=layer.name,
                keras=keras.__version__,
            )


def join_jax_processes(
    coordinator: str, *, heartbeat_timeout_seconds: int, **arguments: Any
) -> None:
    """Call `jax.distributed.initialize`, also where it takes no `heartbeat_timeout_seconds` yet."""
    import jax

    if "heartbeat_timeout_seconds" in inspect.signature(jax.distributed.initialize).parameters:
        arguments["heartbeat_timeout_seconds"] = heartbeat_timeout_seconds
        jax.distributed.initialize(coordinator, **arguments)
        return
    from jax._src import distributed, xla_bridge

    # Before JAX 0.7 the time could be set in this place alone; what the public function checks
    # first is checked here.
    if xla_bridge.backends_are_initialized():
        raise RuntimeError("JAX has computed something before the processes join.")
    beats = {"heartbeat_interval_seconds": 1, "max_missing_heartbeats": heartbeat_timeout_seconds}
    both = {f"{end}_{name}": beat for end in ("service", "client") for name, beat in beats.items()}
    distributed.global_state.initialize(coordinator, **arguments, **both)
