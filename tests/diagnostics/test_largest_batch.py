"""The largest batch: found by real steps, up to a real end of memory."""

import os
import pathlib
import resource
import sys

import hypothesis
import hypothesis.strategies as st
import keras
import numpy as np
import pytest

from kdpkit import batches, testing
from kdpkit.diagnostics import largest_batch
from kdpkit.diagnostics._doctor.largest_batch import search
from tests.processes import run

X, Y = testing.toy_classification(64, features=8)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
IS_JAX = keras.backend.backend() == "jax"


def compiled():
    layers = [keras.layers.Dropout(0.5), keras.layers.BatchNormalization(), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile("adam", LOSS)
    return model


def values_of(model):
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


@hypothesis.given(st.integers(0, 10_000), st.integers(1, 500), st.integers(500, 20_000))
def test_the_largest_number_is_found_to_a_quarter_and_nothing_is_tried_twice(limit, start, most):
    tried = []
    largest = search(lambda number: tried.append(number) or number <= limit, start, most)
    assert largest <= min(limit, most) <= largest * 1.25
    assert len(tried) == len({*tried})  # each costs a compilation
    assert max(tried) <= most


class AtMost40(keras.layers.Layer):
    """Has no memory for more than 40 examples."""

    def call(self, x):
        if isinstance(x.shape[0], int) and x.shape[0] > 40:
            raise MemoryError
        return x


def test_a_step_that_lacks_memory_is_too_large_and_the_weights_stay():
    model = keras.Sequential([keras.Input((8,)), AtMost40(), keras.layers.Dense(3)])
    model.compile("adam", LOSS, run_eagerly=True)
    model.fit(X[:8], Y[:8], verbose=0)
    before = values_of(model)
    assert largest_batch((X, Y), model=model) == 40
    np.testing.assert_equal(values_of(model), before)


def test_nothing_is_trained_and_training_goes_on_as_if_nothing_had_been_tried():
    data = batches.ArrayBatches((X, Y), global_batch_size=16, seed=0)
    model = compiled()
    model.fit(data, shuffle=False, verbose=0)
    before = values_of(model)
    assert largest_batch(data, model=model, most=24) == 24
    np.testing.assert_equal(values_of(model), before)
    model.fit(data, shuffle=False, verbose=0)


@pytest.mark.slow
def test_memory_ends_where_it_does_and_the_weights_stay():
    """In a process that has little memory, whose backend raises what it raises."""
    program = [sys.executable, "-m", "tests.diagnostics.test_largest_batch"]
    found = run(*program).stdout
    assert 32 <= int(found.split()[-1]) < (20_000 if IS_JAX else 64)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"most": 4}, "`most` must be an integer of at least 8"),
        ({"multiple_of": 0}, "`multiple_of` must be a positive integer"),
        ({"model": testing.tiny_classifier()}, "`model` is not compiled"),
        ({"dataset": (X[:, :3], Y)}, "The training fails: "),
    ],
)
def test_bad_input_is_one_sentence(arguments, sentence):
    given = {"dataset": (X, Y), "model": compiled()} | arguments
    with pytest.raises(ValueError, match=sentence):
        largest_batch(given.pop("dataset"), **given)


class Hungry(keras.layers.Layer):
    """Takes 28 MiB for each example at once: TensorFlow ends where it lacks small things."""

    def call(self, x):
        import tensorflow as tf

        return x + tf.raw_ops.Empty(shape=[tf.shape(x)[0], 7 * 2**20], dtype="float32")[:, :1]


def main():
    """Look for the largest batch with 1.5 GiB more than a small step takes."""
    hungry = keras.layers.Dense(2**15, "tanh") if IS_JAX else Hungry()
    # TensorFlow waits 10 seconds for memory at each batch that is too large: one is.
    sizes = {} if IS_JAX else {"multiple_of": 32, "most": 64}
    model = keras.Sequential([keras.Input((8,)), hungry, keras.layers.Dense(3)])
    model.compile("sgd", LOSS)
    model.fit(X[:8], Y[:8], verbose=0)  # starts threads, whose stacks count
    before = values_of(model)
    status = pathlib.Path("/proc/self/status").read_text().splitlines()
    (taken,) = (int(line.split()[1]) for line in status if line.startswith("VmSize"))
    resource.setrlimit(resource.RLIMIT_AS, (taken * 1024 + 3 * 2**29, resource.RLIM_INFINITY))
    found = largest_batch((X, Y), model=model, **sizes)
    np.testing.assert_equal(values_of(model), before)
    model.fit(X[:8], Y[:8], verbose=0)
    sys.stdout.write(f"{found}\n")


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    main()
