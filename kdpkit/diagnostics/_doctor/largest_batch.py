"""`largest_batch`: the most examples with which a step trains on this machine, found by trying."""

import gc
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from kdpkit import checkpoints, errors
from kdpkit._internal import checks
from kdpkit.diagnostics._doctor import batches, speed, training_step

_STEPS = 3  # of a trial: while the second runs, the first has not been cleared away


def largest_batch(
    dataset: Any, *, model: Any, multiple_of: int = 8, most: int | None = None
) -> int:
    """Return the most examples with which a step fits into the memory of the devices.

    Real steps are trained on the dataset's first batch, repeated or cut: its size is doubled until
    a step runs out of memory (or halved until none does), and then bisected, so that the result is
    less than a quarter below what fits. Each size compiles the step again. Afterwards the model is
    built, `model.history` is that of the last trial, and the rest is what it was. On JAX
    `plan_memory` finds the batch without a device. On a CPU the system may end the process before
    anything runs out of memory: limit the trials by `most`, or the process by `ulimit -v`.

    Args:
        dataset: What `fit` trains on: as for `check_tpu`.
        model: A compiled model, on one device or on several replicas, in one process.
        multiple_of: What divides each size that is tried, such as 8 examples for each replica.
        most: The most examples to try; None has no limit.

    Returns:
        Examples of a global batch, at most `most`.

    Raises:
        ValueError: Not even `multiple_of` examples fit; parts of the batch that are no plain
            arrays; training that fails for another reason; and as `check_speed`.

    >>> from kdpkit import testing
    >>> model = testing.tiny_classifier()
    >>> model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    >>> largest_batch(testing.toy_classification(16), model=model, most=50)
    48
    """
    unit = checks.integer("multiple_of", multiple_of)
    limit = sys.maxsize if most is None else checks.integer("most", most, minimum=unit) // unit
    speed.check_trainer(model)
    data = batches.batches_of(dataset)
    if others := [part.name for part in data.parts if not part.is_dense]:
        checks.fail("All parts of a batch must be plain arrays.", others=others)
    try:
        training_step.build(model, data.first)
        largest = search(
            lambda count: _trains(model, data, count * unit), max(1, data.examples // unit), limit
        )
    except errors.InputError:
        raise
    except Exception as error:  # training runs the user's code, which may raise anything
        raise errors.InputError(f"The training fails: {checks.reason_of(error)}") from error
    if not largest:
        checks.fail(
            "Not even the smallest batch fits into the memory of the devices.",
            multiple_of=unit,
            remedy="Use a smaller `multiple_of` or model; docs/how_to/shard_variables.md has more.",
        )
    return largest * unit


def search(fits: Callable[[int], bool], start: int = 1, most: int = sys.maxsize) -> int:
    """Return the largest number that fits, to a quarter; 0 if none does.

    >>> search(lambda number: number <= 100)
    96
    """
    fitting, too_large, number = 0, most + 1, min(start, most)
    while number > fitting and too_large - fitting > fitting // 4:
        if fits(number):
            fitting = number
        else:
            too_large = number
        number = min(2 * fitting, (fitting + too_large) // 2) if fitting else too_large // 2
    return fitting


def _trains(model: keras.Model, data: batches.Batches, examples: int) -> bool:
    """Return whether steps on so many examples fit; what they change is restored."""
    fit = training_step.fit_of(model)
    settings = {"steps_per_epoch": _STEPS, "shuffle": False, "verbose": 0}
    try:
        with speed.unchanged(model):
            which = np.arange(examples) % data.examples
            batch = keras.tree.map_structure(
                lambda part: part if part is None else np.asarray(part)[which], data.first
            )
            fit(batches.repeated(batch), epochs=1, **settings)
            # JAX raises where a result is read that was computed meanwhile, or was not.
            checkpoints.values_of({"model": model.variables[:1]})
    except Exception as error:
        if not _is_out_of_memory(error):
            raise
        return False
    finally:
        gc.collect()  # what a trial left on the devices
    return True


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError):
        return True
    if keras.backend.backend() == "jax":
        import jax

        # On accelerators, and on a CPU, where the library of its kernels gives no other reason.
        reasons = ("RESOURCE_EXHAUSTED", "Out of memory", "YNNPACK operation failed")
        is_of_backend = isinstance(error, jax.errors.JaxRuntimeError)
        return is_of_backend and any(reason in str(error) for reason in reasons)
    import tensorflow as tf

    return isinstance(error, tf.errors.ResourceExhaustedError)
