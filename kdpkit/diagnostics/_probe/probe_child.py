"""Two training steps of one kind, in a process of its own: what `kdpkit probe` starts.

    python -m kdpkit.diagnostics._probe_child mirrored

The last line says what came out, as JSON. `multi_worker` and `parameter_server` are for each of the
processes that `kdpkit launch` starts.
"""

import json
import math
import os
import sys
import traceback
from typing import Any

from kdpkit import _checks, _garbage

SIGN = "kdpkit-probe "  # begins the line that says what came out
WORKED, FAILED, CANNOT = 0, 1, 2  # exit codes

_STEPS = 2
_ROWS = 16  # of a batch
_CPUS = 2  # logical ones, where there are no two devices of another kind


def run(kind: str) -> int:
    """Train, and say what came out; give the exit code."""
    jax = kind.startswith("jax")
    os.environ["KERAS_BACKEND"] = "jax" if jax else "tensorflow"
    try:
        found = (_on_jax if jax else _on_tensorflow)(kind)
        problem = _problem(found)
        outcome, code = found | ({"reason": problem} if problem else {}), int(bool(problem))
    except _checks.InputError as error:
        outcome, code = {"reason": str(error)}, CANNOT
    except Exception as error:  # of any kind: what training raises is what is looked for
        traceback.print_exc()
        first = str(error).strip().partition("\n")[0]
        outcome, code = {"reason": f"{type(error).__name__}: {first}"}, FAILED
    sys.stdout.write(f"{SIGN}{json.dumps(outcome | {'code': code})}\n")
    sys.stdout.flush()
    return code


def _on_tensorflow(kind: str) -> dict[str, Any]:
    import tensorflow as tf

    from kdpkit import strategies, testing

    tf.config.experimental.enable_tensor_float_32_execution(False)  # float32 is what is compared
    strategies.serve_if_server()
    gpus = len(tf.config.list_physical_devices("GPU"))
    devices = None
    if kind == "mirrored" and gpus < _CPUS:
        devices = strategies.split_device("CPU", _CPUS)
    strategy = strategies.select_strategy(kind, devices=devices)
    with strategy.scope():
        model = testing.tiny_classifier()
    data = tf.data.Dataset.from_tensor_slices(testing.toy_classification(_STEPS * _ROWS))
    trained = _trained(model, data.batch(_ROWS, drop_remainder=True), strategy)
    where = strategies.describe(strategy).partition(": ")[2]
    return trained | {"where": where, "accelerators": gpus}


def _on_jax(kind: str) -> dict[str, Any]:
    from kdpkit import batches, sharding, testing

    testing.use_logical_cpus(_CPUS)
    distribution = sharding.DataParallel(1 if kind == "jax_one" else _CPUS)
    arrays = testing.toy_classification(_STEPS * _ROWS)
    data = batches.ArrayBatches(arrays, global_batch_size=_ROWS)
    trained = _trained(testing.tiny_classifier(), data, distribution)
    import jax

    accelerators = jax.device_count() if jax.default_backend() != "cpu" else 0
    where = sharding.describe(distribution).partition(": ")[2]
    return trained | {"where": where, "accelerators": accelerators}


def _trained(model: Any, data: Any, strategy: Any) -> dict[str, Any]:
    import keras

    from kdpkit.training import TrainingLoop

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
    }


def _flat(model: Any) -> list[float]:
    return [float(number) for weight in model.get_weights() for number in weight.ravel()]


def _problem(found: dict[str, Any]) -> str:
    if not math.isfinite(found["loss"]):
        return f"The loss is {found['loss']}."
    if found["steps"] != _STEPS:
        return f"The optimizer counted {found['steps']} of {_STEPS} steps."
    return ""


if __name__ == "__main__":
    with _garbage.uncollected():  # it imports the frameworks, and is over soon
        exit_code = run(sys.argv[1])
    if exit_code:  # without a wait for others, which would not end
        sys.stderr.flush()
        os._exit(exit_code)
