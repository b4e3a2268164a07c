"""`kdpkit env --try`: two training steps with every strategy that this machine has.

Each runs in its own processes, under a time limit: TensorFlow and JAX may hang, or end the process.
`python -m kdpkit.diagnostics._env.strategy_trials mirrored` shows all that one prints.
"""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kdpkit import errors
from kdpkit._internal import checks
from kdpkit.cluster._config import VARIABLES

CHILD = "kdpkit.diagnostics._env.strategy_trials"
WORKS, CANNOT, FAILED, TIMED_OUT = "works", "cannot", "failed", "timed out"
HARMLESS = (WORKS, CANNOT)
_REPORT = "kdpkit-report "  # begins the line in which a process reports
_VARIABLES = {
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",  # float32 is what is compared
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # another program may use the GPU
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
}
_TOLERANCE = 1e-5  # of the largest change of a weight, as in `check_parity`

Devices = Mapping[str, Mapping[str, int]]  # the number of each kind, by framework


def run_all(
    devices: Devices, timeout_seconds: float, on_start: Callable[[str], None]
) -> Iterator[tuple[str, tuple[str, str]]]:
    """Try every strategy, one after the other; yield its name, the result and a sentence."""
    for name, (words, variables) in programs(devices).items():
        on_start(name)
        result, text = run(words, variables | _VARIABLES, timeout_seconds)
        if result not in HARMLESS:
            command = " ".join(["python -m", *words]).replace(sys.executable, "python")
            text = f"{text.rstrip('.')}. `{command}` shows all that it prints."
        yield name, (result, text)


def programs(devices: Devices) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Return the words after `python -m` that try each strategy, and environment variables."""
    gpus = devices.get("tensorflow", {}).get("GPU", 0)
    tried: dict[str, tuple[list[str], dict[str, str]]] = {}

    def add(name: str, gpus: int, *flags: str) -> None:
        words = [CHILD, name]
        if flags:
            flags += ("--gpus-per-worker", str(gpus)) if gpus else ()
            words = ["kdpkit", "launch", *flags, "--grace-seconds", "5", "--"]
            words += [sys.executable, "-m", CHILD, name]
        tried[name] = words, {} if gpus else {"CUDA_VISIBLE_DEVICES": "-1"}

    if "tensorflow" in devices:
        add("mirrored", gpus if gpus > 1 else 0)
        add("multi_worker", gpus // 2, "--workers", "2")
        add("parameter_server", min(gpus, 1), "--workers", "1", "--parameter-servers", "1")
    if "jax" in devices:
        tried["jax"] = [CHILD, "jax"], {}
    return tried


def run(
    words: Sequence[str], variables: Mapping[str, str], timeout_seconds: float
) -> tuple[str, Any]:
    """Run a module outside of any cluster; return the result, with its report or the reason."""
    inherited = {name: text for name, text in os.environ.items() if name not in VARIABLES}
    quiet = {"PYTHONUNBUFFERED": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    try:
        ended = subprocess.run(  # noqa: S603 this Python
            [sys.executable, "-m", *words],
            env=inherited | quiet | dict(variables),
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
    lines = ended.stdout.splitlines()
    reports = [json.loads(line.partition(_REPORT)[2]) for line in lines if _REPORT in line]
    if ended.returncode or not reports:
        last = [f": {line.strip(' .')}" for line in ended.stderr.splitlines() if line.strip()][-1:]
        reports.append((FAILED, f"It ended with exit code {ended.returncode}{''.join(last)}."))
    result, text = next((report for report in reports if report[0] != WORKS), reports[0])
    return result, text if result == WORKS else text.replace(str(Path.home()), "~")


# In the processes that are started.


def _count_devices(framework: str) -> dict[str, int]:
    if framework == "jax":
        import jax

        return {jax.default_backend().upper(): jax.device_count()}
    import tensorflow as tf

    kinds = [device.device_type for device in tf.config.list_physical_devices()]
    return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}


def _try(name: str) -> str:
    """Train with a strategy and on one device, compare the weights, describe the strategy."""
    os.environ["KERAS_BACKEND"] = "jax" if name == "jax" else "tensorflow"
    from kdpkit import testing

    if name == "jax":
        testing.use_logical_cpus(2)
        import jax

        from kdpkit import batches, sharding

        data = batches.ArrayBatches(testing.toy_classification(16), global_batch_size=8)
        mesh = sharding.DataParallel(jax.device_count())
        compare(_trained(data, mesh), _trained(data, sharding.DataParallel(1)))
        return str(mesh)
    import tensorflow as tf

    from kdpkit import strategies

    tf.config.experimental.enable_tensor_float_32_execution(False)
    strategies.serve_if_server()
    is_split = name == "mirrored" and not tf.config.list_physical_devices("GPU")
    cpus = strategies.split_device("CPU", 2) if is_split else None
    strategy = strategies.select_strategy(name, devices=cpus)
    # A second batch of one example leaves replicas without any.
    data = tf.data.Dataset.from_tensor_slices(testing.toy_classification(9)).batch(8)
    compare(_trained(data, strategy), _trained(data, tf.distribute.get_strategy()))
    return strategies.describe(strategy)


def _trained(data: Any, strategy: Any) -> tuple[Any, Any]:
    """Train a small model, both steps in one execution; return its weights before and after."""
    import keras

    from kdpkit import testing
    from kdpkit.training import replica_exact

    with strategy.scope():
        model = replica_exact(testing.tiny_classifier())
        model.compile(
            keras.optimizers.SGD(0.1, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            steps_per_execution=2,
            jit_compile="auto" if keras.backend.backend() == "jax" else False,
        )
        start = model.get_weights()
        model.fit(data, epochs=1, verbose=0, shuffle=False)
    return start, model.get_weights()


def compare(trained: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    """Raise if a strategy trained other weights than one device."""
    from kdpkit.testing import _toys

    difference = _toys.off_by(trained[1], expected[1], expected[0])
    if not difference <= _TOLERANCE:  # it may be NaN
        raise ArithmeticError(
            "It does not train what one device does: weights differ by "
            f"{difference:.0e} of their change. Please report this bug, with the output "
            "of `kdpkit env`."
        )


def main(name: str) -> None:
    """Do what the name says, print a line with the result, and end without other processes."""
    framework = name.removeprefix("devices-of-")
    report: tuple[str, Any]
    try:
        report = WORKS, _try(name) if framework == name else _count_devices(framework)
    except errors.InputError as error:
        report = CANNOT, str(error)
    except Exception as error:  # training may raise anything
        traceback.print_exc()
        report = FAILED, checks.reason_of(error)
    sys.stdout.write(f"\n{_REPORT}{json.dumps(report)}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    code = [WORKS, FAILED, CANNOT].index(report[0])
    if code or framework != name:
        os._exit(code)  # without waiting for processes that do not end


if __name__ == "__main__":
    main(sys.argv[1])
