"""Two training steps of one kind, in a process of its own: what `kdpkit probe` starts.

    python -m kdpkit.diagnostics._probe.probe_child mirrored

For `multi_worker` and `parameter_server` that is each of the processes of `kdpkit launch`.
"""

import functools
import math
import os
import sys
from typing import Any

from kdpkit._internal import garbage_collection
from kdpkit.diagnostics import _child_program

_STEPS = 2
_EXAMPLES = 16  # of a batch
_CPUS = 2  # logical ones, where there are no two devices of another kind


def trained(kind: str) -> dict[str, Any]:
    """Train, and return the weights before and after."""
    is_jax = kind.startswith("jax")
    os.environ["KERAS_BACKEND"] = "jax" if is_jax else "tensorflow"
    found = (_on_jax if is_jax else _on_tensorflow)(kind)
    if not math.isfinite(found["loss"]):
        raise ArithmeticError(f"The loss is {found['loss']}.")
    if found["steps"] != _STEPS:
        raise ArithmeticError(f"The optimizer counted {found['steps']} of {_STEPS} steps.")
    return found


def _on_tensorflow(kind: str) -> dict[str, Any]:
    import tensorflow as tf

    from kdpkit import strategies, testing

    tf.config.experimental.enable_tensor_float_32_execution(False)  # float32 is what is compared
    strategies.serve_if_server()
    gpus = len(tf.config.list_physical_devices("GPU"))
    is_split = kind == "mirrored" and gpus < _CPUS
    devices = strategies.split_device("CPU", _CPUS) if is_split else None
    strategy = strategies.select_strategy(kind, devices=devices)
    data = tf.data.Dataset.from_tensor_slices(testing.toy_classification(_STEPS * _EXAMPLES))
    return _trained(data.batch(_EXAMPLES, drop_remainder=True), strategy, gpus)


def _on_jax(kind: str) -> dict[str, Any]:
    from kdpkit import batches, sharding, testing

    testing.use_logical_cpus(_CPUS)
    import jax

    distribution = sharding.DataParallel(1 if kind == "jax_one" else _CPUS)
    arrays = testing.toy_classification(_STEPS * _EXAMPLES)
    data = batches.ArrayBatches(arrays, global_batch_size=_EXAMPLES)
    accelerators = jax.device_count() if jax.default_backend() != "cpu" else 0
    return _trained(data, distribution, accelerators)


def _trained(data: Any, strategy: Any, accelerators: int) -> dict[str, Any]:
    import keras

    from kdpkit import experiment, testing
    from kdpkit.training import TrainingLoop

    with strategy.scope():
        model = testing.tiny_classifier()
    loop = TrainingLoop(
        model,
        optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        strategy=strategy,
    )
    start = _flat(model)
    (loss,) = loop.fit(data, epochs=1, verbose=0).history["loss"]
    return {
        "loss": float(loss),
        "steps": int(keras.ops.convert_to_numpy(model.optimizer.iterations)),
        "start": start,
        "weights": _flat(model),
        "where": experiment.describe(strategy).partition(": ")[2],
        "accelerators": accelerators,
    }


def _flat(model: Any) -> list[float]:
    return [float(number) for weight in model.get_weights() for number in weight.ravel()]


if __name__ == "__main__":
    with garbage_collection.uncollected():  # it imports the frameworks, and is over soon
        exit_code = _child_program.report(functools.partial(trained, sys.argv[1]))
    if exit_code:
        os._exit(exit_code)  # without waiting for other processes, which would not end
