"""`kdpkit env --try`: two training steps with every strategy that this machine has.

Each runs in processes of its own, under a time limit, as TensorFlow and JAX may hang, or end the
process that loads them. By hand, to see all that one prints:

    python -m kdpkit.diagnostics._env.strategy_trials mirrored
"""

import functools
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kdpkit import cluster, errors
from kdpkit._internal import checks

CHILD = "kdpkit.diagnostics._env.strategy_trials"
WORKS, CANNOT, FAILED, TIMED_OUT = "works", "cannot", "failed", "timed out"
HARMLESS = (WORKS, CANNOT)
_SIGN = "kdpkit-report "  # begins the line in which a process reports
_ALWAYS = {
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",  # what is compared is float32
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # a GPU may be somebody else's, too
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
}
_CPU_ONLY = {"CUDA_VISIBLE_DEVICES": "-1"}
_TOLERANCE = 1e-5  # of the largest change of a weight, as in `check_parity`


def run_all(
    devices: Mapping[str, Mapping[str, int]],
    timeout_seconds: float,
    on_start: Callable[[str], None],
) -> Iterator[tuple[str, tuple[str, str]]]:
    """Try every strategy, one after the other; yield its name, the result and a sentence."""
    for name, words, variables in _programs(devices):
        on_start(name)
        result, text = run(words, variables | _ALWAYS, timeout_seconds)
        if result not in HARMLESS:
            command = " ".join(["python -m", *words]).replace(sys.executable, "python")
            text = f"{text.rstrip('.')}. `{command}` shows all that it prints."
        yield name, (result, text)


def _programs(
    devices: Mapping[str, Mapping[str, int]],
) -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """Iterate over names of strategies, with the module that tries each and its variables."""
    if "tensorflow" in devices:
        gpus = devices["tensorflow"].get("GPU", 0)
        if gpus == 1:  # else the other strategies train it too, to compare
            yield "one", [CHILD, "one"], {}
        yield "mirrored", [CHILD, "mirrored"], {} if gpus > 1 else _CPU_ONLY
        yield _launched("multi_worker", gpus // 2, "--workers", "2")
        servers = ("--workers", "1", "--parameter-servers", "1")
        yield _launched("parameter_server", min(gpus, 1), *servers)
    if "jax" in devices:
        yield "jax", [CHILD, "jax"], {}


def _launched(name: str, gpus: int, *flags: str) -> tuple[str, list[str], dict[str, str]]:
    each = ("--gpus-per-worker", str(gpus)) if gpus else ()
    child = (sys.executable, "-m", CHILD, name)
    flags = (*flags, "--grace-seconds", "5")
    return name, ["kdpkit", "launch", *flags, *each, "--", *child], {} if gpus else _CPU_ONLY


def run(
    words: Sequence[str], variables: Mapping[str, str], timeout_seconds: float
) -> tuple[str, Any]:
    """Run a module of kdpkit with these variables, in no cluster, and end it when the time is up.

    What `kdpkit launch` started ends with it, however it ends. The result comes with what the
    program returned, or why it does not work.
    """
    kept = {name: text for name, text in os.environ.items() if name not in cluster.VARIABLES}
    quiet = {"PYTHONUNBUFFERED": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    try:
        ended = subprocess.run(  # noqa: S603 this Python
            [sys.executable, "-m", *words],
            env=kept | quiet | dict(variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        limit = f"It did not end within {timeout_seconds:g} s. Allow it longer with --timeout."
        return TIMED_OUT, limit
    lines = [line.partition(_SIGN)[2] for line in ended.stdout.splitlines() if _SIGN in line]
    reports = [json.loads(line) for line in lines]
    for result, reason in reports:
        if result != WORKS:
            return result, _without_home(reason)
    if ended.returncode or not reports:
        last = [f": {line.strip(' .')}" for line in ended.stderr.splitlines() if line.strip()][-1:]
        reason = f"It ended with exit code {ended.returncode}{''.join(last)}."
        return FAILED, _without_home(reason)
    return WORKS, reports[0][1]


def _without_home(text: str) -> str:
    return text.replace(str(Path.home()), "~")


# In the processes that are started.


def _report(work: Callable[[], Any]) -> int:
    """Run something in the child process, print what came of it, and return the exit code."""
    try:
        found = WORKS, work()
    except errors.InputError as error:
        found = CANNOT, str(error)
    except Exception as error:  # of any kind: what training raises is to be reported
        traceback.print_exc()
        found = FAILED, checks.reason_of(error)
    sys.stdout.write(f"\n{_SIGN}{json.dumps(found)}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    return [WORKS, FAILED, CANNOT].index(found[0])


def _trained_on_tensorflow(kind: str) -> str:
    import tensorflow as tf

    from kdpkit import experiment, strategies, testing

    tf.config.experimental.enable_tensor_float_32_execution(False)  # float32 is what is compared
    strategies.serve_if_server()
    gpus = tf.config.list_physical_devices("GPU")
    is_split = kind == "mirrored" and not gpus
    cpus = strategies.split_device("CPU", 2) if is_split else None
    strategy = strategies.select_strategy(kind, devices=cpus)
    # A second batch of one example leaves replicas without any.
    data = tf.data.Dataset.from_tensor_slices(testing.toy_classification(9)).batch(8)
    train = functools.partial(_trained, data, jit_compile=False)
    one = train(tf.distribute.get_strategy())
    if kind != "one":
        _compare(train(strategy), one)
    return experiment.describe(strategy)


def _trained_on_jax() -> str:
    from kdpkit import batches, experiment, sharding, testing

    testing.use_logical_cpus(2)
    import jax

    data = batches.ArrayBatches(testing.toy_classification(16), global_batch_size=8)
    mesh = sharding.DataParallel(jax.device_count())
    train = functools.partial(_trained, data, jit_compile="auto")
    _compare(train(mesh), train(sharding.DataParallel(1)))
    return experiment.describe(mesh)


def _trained(data: Any, strategy: Any, *, jit_compile: Any) -> Any:
    """Train a small model, both steps in one loop, and return its weights before and after."""
    import keras
    import numpy as np

    from kdpkit.training import TrainingLoop

    keras.utils.set_random_seed(0)
    layers = keras.layers
    with strategy.scope():
        hidden = [layers.Dense(8, "relu"), layers.Dropout(0.5)]
        model = keras.Sequential([keras.Input((4,)), *hidden, layers.Dense(3)])
    loop = TrainingLoop(
        model,
        optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        strategy=strategy,
        steps_per_loop=2,
        jit_compile=jit_compile,
    )
    start = np.concatenate([weight.ravel() for weight in model.get_weights()])
    loop.fit(data, epochs=1, verbose=0)
    steps = int(keras.ops.convert_to_numpy(model.optimizer.iterations))
    if steps != 2:
        raise ArithmeticError(f"The optimizer counted {steps} of 2 steps.")
    return start, np.concatenate([weight.ravel() for weight in model.get_weights()])


def _compare(found: Any, one: Any) -> None:
    """Raise if a strategy trained other weights than one device."""
    (_, weights), (start, reference) = found, one
    difference = float(abs(weights - reference).max() / abs(reference - start).max())
    if not difference <= _TOLERANCE:  # it may be NaN
        raise ArithmeticError(
            f"It does not train what one device does: weights differ by {difference:.0e} of their "
            "change. This is a bug of kdpkit or of a framework: please report it, with the output "
            "of `kdpkit env`."
        )


def _devices(framework: str) -> dict[str, int]:
    if framework == "jax":
        import jax

        return {jax.default_backend().upper(): jax.device_count()}
    import tensorflow as tf

    kinds = [device.device_type for device in tf.config.list_physical_devices()]
    return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}


def _work(name: str) -> str | dict[str, int]:
    framework = name.removeprefix("devices-of-")
    if framework != name:
        return _devices(framework)
    os.environ["KERAS_BACKEND"] = "jax" if name == "jax" else "tensorflow"
    return _trained_on_jax() if name == "jax" else _trained_on_tensorflow(name)


if __name__ == "__main__":
    exit_code = _report(functools.partial(_work, sys.argv[1]))
    if exit_code or sys.argv[1].startswith("devices"):
        os._exit(exit_code)  # without waiting for other processes, which would not end
