"""`kdpkit env --try`: two training steps with every strategy that this machine has.

Each runs in processes of its own, under a time limit. By hand, to see all that one prints:

    python -m kdpkit.diagnostics._env.strategy_trials mirrored
"""

import dataclasses
import functools
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kdpkit._internal import machine
from kdpkit.diagnostics._env import child_program
from kdpkit.diagnostics._env.child_program import CANNOT, WORKS

CHILD = "kdpkit.diagnostics._env.strategy_trials"
_ALWAYS = {
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",  # what is compared is float32
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # a GPU may be somebody else's, too
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
}
_CPU_ONLY = {"CUDA_VISIBLE_DEVICES": "-1"}
_TOLERANCE = 1e-5  # of the largest change of a weight, as in `check_parity`
_TPU_TOLERANCE = 1e-2  # TensorFlow multiplies in bfloat16 there, whose rounding is 2**-8
_FULL_PRECISION = 1e-5  # float32 products are right to about 1e-7, TensorFloat-32's to 5e-4


@dataclasses.dataclass(frozen=True)
class StrategyTrial:
    """What came of two training steps with a strategy.

    Attributes:
        name: `"one"`, `"mirrored"`, `"multi_worker"`, `"parameter_server"`, `"tpu"`, `"jax"`; or
            `"numbers"` for random numbers and precision on TensorFlow's first device.
        result: `"works"`, `"cannot"` (not as it is installed), `"failed"` or `"timed out"`.
        text: The replicas and their devices, or what is wrong.
    """

    name: str
    result: str
    text: str

    @property
    def works_or_cannot(self) -> bool:
        """Whether nothing is wrong."""
        return self.result in (WORKS, CANNOT)

    def __str__(self) -> str:
        """Return it in one line."""
        return f"{self.result}: {self.text}"


def run_all(
    devices: Mapping[str, Mapping[str, int]],
    timeout_seconds: float,
    on_start: Callable[[str], None],
) -> tuple[StrategyTrial, ...]:
    """Try every strategy, one after the other.

    Args:
        devices: Those of each framework that starts, by kind.
        timeout_seconds: For each strategy, the start of its processes included.
        on_start: Called with the name of each before it starts.
    """
    trials = []
    for name, words, variables in _programs(devices):
        on_start(name)
        with child_program.started(words, variables | _ALWAYS) as program:
            found = program.wait(timeout_seconds)
        text = found.reports[0]["text"] if found.reports else found.reason
        trial = StrategyTrial(name, found.result, text)
        if not trial.works_or_cannot:
            command = " ".join(["python -m", *words]).replace(sys.executable, "python")
            text = f"{text.rstrip('.')}. `{command}` shows all that it prints."
        trials.append(dataclasses.replace(trial, text=text))
    return tuple(trials)


def _programs(
    devices: Mapping[str, Mapping[str, int]],
) -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """Iterate over names of strategies, with the module that tries each and its variables."""
    if "tensorflow" in devices:
        gpus = devices["tensorflow"].get("GPU", 0)
        yield "numbers", [CHILD, "numbers"], {}
        yield "one", [CHILD, "one"], {}
        yield "mirrored", [CHILD, "mirrored"], {} if gpus > 1 else _CPU_ONLY
        yield _launched("multi_worker", gpus // 2, "--workers", "2")
        servers = ("--workers", "1", "--parameter-servers", "1")
        yield _launched("parameter_server", min(gpus, 1), *servers)
        if machine.address(None) is not None:
            yield "tpu", [CHILD, "tpu"], {}
    if "jax" in devices:
        yield "jax", [CHILD, "jax"], {}


def _launched(name: str, gpus: int, *flags: str) -> tuple[str, list[str], dict[str, str]]:
    each = ("--gpus-per-worker", str(gpus)) if gpus else ()
    child = (sys.executable, "-m", CHILD, name)
    return name, ["kdpkit", "launch", *flags, *each, "--", *child], {} if gpus else _CPU_ONLY


# In the processes that are started.


def _trained_on_tensorflow(kind: str) -> dict[str, str]:
    import tensorflow as tf

    from kdpkit import experiment, strategies, testing

    tf.config.experimental.enable_tensor_float_32_execution(False)  # float32 is what is compared
    strategies.serve_if_server()
    gpus = tf.config.list_physical_devices("GPU")
    is_split = kind == "mirrored" and not gpus
    cpus = strategies.split_device("CPU", 2) if is_split else None
    strategy = strategies.select_strategy(kind, devices=cpus)
    is_tpu = kind == "tpu"
    inner = ["Dense"] if is_tpu else ["LSTM" if gpus else "Dense", "Dropout"]
    # A second batch of one example leaves replicas without any. A TPU takes none of other sizes.
    arrays = testing.toy_classification(16 if is_tpu else 9)
    data = tf.data.Dataset.from_tensor_slices(arrays).batch(8)
    train = functools.partial(_trained, data, inner, jit=False)
    one = train(tf.distribute.get_strategy())
    if kind != "one":
        _compare(train(strategy), one, _TPU_TOLERANCE if is_tpu else _TOLERANCE)
    return {"text": experiment.describe(strategy)}


def _trained_on_jax() -> dict[str, str]:
    from kdpkit import batches, experiment, sharding, testing

    testing.use_logical_cpus(2)
    import jax

    data = batches.ArrayBatches(testing.toy_classification(16), global_batch_size=8)
    mesh = sharding.DataParallel(jax.device_count())
    train = functools.partial(_trained, data, ["Dense", "Dropout"], jit=None)
    _compare(train(mesh), train(sharding.DataParallel(1)), _TOLERANCE)
    return {"text": experiment.describe(mesh)}


def _trained(data: Any, inner: list[str], strategy: Any, *, jit: bool | None) -> Any:
    """Train a small model, both steps in one loop, and return its weights before and after."""
    import keras
    import numpy as np

    from kdpkit.training import TrainingLoop

    keras.utils.set_random_seed(0)
    layers = keras.layers
    makers = {
        "Dense": lambda: layers.Dense(8, activation="relu"),
        "LSTM": lambda: keras.Sequential([layers.Reshape((4, 1)), layers.LSTM(8)]),  # cuDNN's
        "Dropout": lambda: layers.Dropout(0.5),
    }
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((4,)), *(makers[name]() for name in inner), layers.Dense(3)]
        )
    loop = TrainingLoop(
        model,
        optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        strategy=strategy,
        steps_per_loop=2,
        jit=jit,
    )
    start = np.concatenate([weight.ravel() for weight in model.get_weights()])
    loop.fit(data, epochs=1, verbose=0)
    steps = int(keras.ops.convert_to_numpy(model.optimizer.iterations))
    if steps != 2:
        raise ArithmeticError(f"The optimizer counted {steps} of 2 steps.")
    return start, np.concatenate([weight.ravel() for weight in model.get_weights()])


def _compare(found: Any, one: Any, tolerance: float) -> None:
    """Raise if a strategy trained other weights than one device."""
    (_, weights), (start, reference) = found, one
    difference = float(abs(weights - reference).max() / abs(reference - start).max())
    if not difference <= tolerance:  # it may be NaN
        raise ArithmeticError(
            f"It does not train what one device does: weights differ by {difference:.0e} of their "
            "change. This is a bug of kdpkit or of a framework: please report it, with the output "
            "of `kdpkit env`."
        )


def _numbers() -> dict[str, str]:
    """Compare random numbers by position with the CPU's, and float32 with float64."""
    import tensorflow as tf

    device = "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"
    for dtype in (tf.bfloat16, tf.float32, tf.float64):
        for name in ("StatelessRandomUniformV2", "StatelessRandomNormalV2"):
            _compare_random_numbers(device, name, dtype)
    with tf.device(device):
        one, other = (tf.random.stateless_normal([512, 512], [0, seed]) for seed in (1, 2))
        exact = tf.cast(one, tf.float64) @ tf.cast(other, tf.float64)
        error = tf.reduce_max(abs(tf.cast(one @ other, tf.float64) - exact)) / tf.reduce_max(exact)
    rounding = f"float32 products on {device} are right to {float(error):.0e}"
    if error > _FULL_PRECISION:
        rounding += (
            ", as TensorFloat-32's are; `tf.config.experimental."
            "enable_tensor_float_32_execution(False)` has them computed in full"
        )
    return {"text": f"random numbers by position are those of the CPU; {rounding}"}


def _compare_random_numbers(device: str, name: str, dtype: Any) -> None:
    """Raise if a device draws other numbers than the CPU, or others from a position on."""
    import tensorflow as tf

    block = 2 if dtype == tf.float64 else 4  # numbers for each value of the counter

    def draw(start: int) -> Any:
        key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=[3, 4])
        counter += tf.constant([start // block, 0], tf.uint64)
        operation = getattr(tf.raw_ops, name)
        return operation(shape=[1000 - start], key=key, counter=counter, alg=1, dtype=dtype)

    # Uniform ones bit by bit; others are computed with the device's own logarithm and cosine.
    close = 0.0 if "Uniform" in name else 1e-2
    with tf.device("CPU:0"):
        expected = draw(0)
    with tf.device(device):
        pairs = {"than the CPU": (draw(0), expected, close)}
        pairs["from a position on"] = (draw(400), draw(0)[400:], 0.0)
        if dtype == tf.float32:
            compiled = tf.function(draw, jit_compile=True, autograph=False)
            pairs["from a position on under XLA"] = (compiled(400), compiled(0)[400:], 0.0)
    for how, (drawn, reference, allowed) in pairs.items():
        drawn, reference = tf.cast(drawn, tf.float64), tf.cast(reference, tf.float64)
        difference = float(tf.reduce_max(abs(drawn - reference)))
        if not (math.isfinite(difference) and difference <= allowed):
            raise ArithmeticError(
                f"{name} of {dtype.name} draws other numbers on {device} {how}, by "
                f"{difference:.0e}, so that dropout differs from that on one device."
            )


def _devices_of_tensorflow() -> dict[str, Any]:
    import tensorflow as tf

    kinds = [device.device_type for device in tf.config.list_physical_devices()]
    devices = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    return {"devices": devices, "is_built_with_cuda": tf.test.is_built_with_cuda()}


def _devices_of_jax() -> dict[str, Any]:
    import jax

    return {"devices": {jax.default_backend().upper(): jax.device_count()}}


def _try(name: str) -> dict[str, Any]:
    os.environ["KERAS_BACKEND"] = "jax" if name == "jax" else "tensorflow"
    others = {
        "jax": _trained_on_jax,
        "numbers": _numbers,
        "devices-of-tensorflow": _devices_of_tensorflow,
        "devices-of-jax": _devices_of_jax,
    }
    return others[name]() if name in others else _trained_on_tensorflow(name)


if __name__ == "__main__":
    exit_code = child_program.report(functools.partial(_try, sys.argv[1]))
    if exit_code or sys.argv[1].startswith("devices"):
        os._exit(exit_code)  # without waiting for other processes, which would not end
