"""What becomes of a program on replicas: equal to one device, stopped with a sentence, or worse."""

import contextlib
import functools
import warnings

import keras
import numpy as np

from kdpkit.testing._toys import off_by
from kdpkit.training import replica_exact
from tests.training.exactness import ON_JAX, Outcome, scopes

ROUNDING = 1e-12  # of float64, which Adam may enlarge by a few orders


def outcome(program, replicas):
    """Train a program on one device as its author does, and on replicas, and compare.

    An optimizer such as Adam enlarges the rounding of gradients near zero. So where float32 differs
    by more than the tolerance, float64 decides: it differs by as much as before if the replicas do
    something else, and by nearly nothing if it was rounding. On JAX, where BatchNormalization
    computes in float32 always and XLA fails on some layers in float64, an Adam decides for these
    that divides no gradient by less than a thousandth.
    """
    try:
        found = compared(program, replicas)
    except Exception as error:  # whatever it is, it is the outcome
        message = str(error).strip()
        stopped = isinstance(error, ValueError) and "Received: " in message
        return Outcome("raises" if stopped else "crash", message=f"{type(error)}: {message}")
    if found <= program.tolerance:
        return Outcome("equal", found)
    try:
        with floatx("float64"):
            exact = compared(program, replicas)
        message = ""
    except Exception as error:  # some layers of Keras compute in float32 alone
        exact, message = np.inf, f"not comparable in float64: {error}"
    if exact <= 1e4 * ROUNDING:
        return Outcome("equal", max(found, exact))
    if ON_JAX and compared(program, replicas, epsilon=1e-3) <= program.tolerance:
        return Outcome("equal", found)
    return Outcome("wrong", found, message=message)


def compared(program, replicas, epsilon=None):
    """Return the largest difference of any weight or log, over the largest change of any weight."""
    before, one, logs = on_one_device(program, epsilon, keras.config.dtype_policy().name)
    _, many, logs_of_many = trained(program, replicas, epsilon)
    before = before if len(before) == len(one) else [0.0] * len(one)  # its first batch built it
    of_weights = off_by(many, one, before)  # which fails where the program trains nothing
    assert logs_of_many.keys() == logs.keys()
    of_logs = max(
        np.abs(np.subtract(logs_of_many[name], logs[name])).max() / max(np.abs(logs[name]).max(), 1)
        for name in logs
    )
    return float(max(of_weights, of_logs / 10))


@functools.lru_cache(maxsize=2)  # the next test is often the same program on more replicas
def on_one_device(program, epsilon, policy):
    assert policy == keras.config.dtype_policy().name
    return trained(program, None, epsilon)


def trained(program, replicas, epsilon=None):
    """Train a program; without a number of replicas as its author does, by stock Keras."""
    policy = keras.config.dtype_policy()
    keras.utils.clear_session(free_memory=False)
    keras.config.set_dtype_policy(policy)  # which Keras clears as well
    keras.utils.set_random_seed(0)
    building, training = scopes(replicas)
    with training:
        with building:
            model = program.build()
        if epsilon:
            model.optimizer.epsilon = epsilon
        if replicas:
            model = replica_exact(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is gathered, and Keras' own
            data = {"shuffle": False, "verbose": 0, "epochs": 2} | program.data()
            before = model.get_weights() if model.built else []
            logs = model.fit(**data).history
        return before, model.get_weights(), logs


@contextlib.contextmanager
def policy(name):
    """Have layers compute in this policy's type."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


@contextlib.contextmanager
def floatx(name):
    """Have Keras compute in this type."""
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx(name)
    keras.config.set_dtype_policy(name)
    try:
        with _as_wide(name):
            yield
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])


def _as_wide(name):
    """Let JAX have this type, too: it takes float32 for float64 unless it is told."""
    if not ON_JAX:
        return contextlib.nullcontext()
    import jax.experimental

    # JAX before 0.8 has it elsewhere; the object itself has no truth value.
    owner = jax if hasattr(jax, "enable_x64") else jax.experimental
    return owner.enable_x64(name == "float64")
