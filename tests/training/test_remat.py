"""`TrainingLoop(remat=True)` against the same loop without; test_environments.py runs it on JAX."""

import functools

import keras
import numpy as np
import pytest
from keras import layers

from kdpkit.batches import ArrayBatches
from tests.training.test_loop import ON_JAX, assert_same, batches, loop_on, trained


def seeded(build):
    @functools.wraps(build)
    def built(*args, **kwargs):
        keras.utils.set_random_seed(7)
        return build(*args, **kwargs)

    return built


class Residual(layers.Layer):
    """A block with a state of each kind, and no `training` argument to pass on."""

    def __init__(self, *parts, penalty=0.0, **settings):
        super().__init__(**settings)
        self.supports_masking = True
        self.parts = parts
        self.penalty = penalty
        self.scale = None
        self.calls = self.add_weight(name="calls", initializer="zeros", trainable=False)

    def build(self, shape):
        for part in self.parts:
            part.build(shape)
        self.scale = self.add_weight(name="scale", shape=(shape[-1],), initializer="ones")

    def call(self, x):
        self.calls.assign_add(1.0)
        y = x
        for part in self.parts:
            y = part(y)
        self.add_loss(self.penalty * keras.ops.mean(keras.ops.square(y)))
        return x + self.scale * y


@seeded
def residual():
    inputs = keras.Input((4,))
    x = layers.Dense(6)(inputs)
    for _ in range(2):
        x = Residual(
            layers.Dense(6, "gelu", activity_regularizer=keras.regularizers.L2(0.01)),
            layers.Dropout(0.4),
            layers.BatchNormalization(momentum=0.8),
            penalty=0.1,
        )(x)
    return keras.Model(inputs, layers.Dense(3, kernel_regularizer="l2")(x))


@seeded
def nested():
    """A model whose blocks are in models, one of them a model of two inputs without blocks."""
    inputs = keras.Input((4,))
    hidden = keras.Input((6,)), keras.Input((6,))
    joined = layers.Dropout(0.3)(layers.Dense(6, "tanh")(layers.Concatenate()(hidden)))
    pair = keras.Model(hidden, [joined, hidden[0]])
    shared = keras.Sequential([layers.Dense(6, "gelu"), layers.Dropout(0.2)])
    inner = keras.Sequential([layers.Dense(6), Residual(layers.Dense(6)), shared])
    x = inner(inputs)
    one, two = pair([x, shared(x)])
    return keras.Model(inputs, layers.Dense(3)(one + two))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "replicas", "settings"),
    [
        pytest.param(
            *(residual, 2, {"steps_per_loop": 2}), marks=[pytest.mark.jax] if ON_JAX else []
        ),
        (nested, 2, {"accumulation": 2}),
    ],
)
def test_it_trains_what_a_loop_that_keeps_all_activations_trains(build, replicas, settings, capfd):
    arguments = {"metrics": (), "build": build, "data": batches(5)}
    expected = trained(1, **arguments, accumulation=settings.get("accumulation", 1))
    loop, history = trained(replicas, remat=True, **arguments, **settings)
    assert all("call" not in vars(layer) for layer in loop.model._flatten_layers())
    assert_same((loop, history), expected)
    for ours, theirs in zip(loop.model.variables, expected[0].model.variables, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)  # seeds, too
    assert "kdpkit: " not in capfd.readouterr().err


def failing(x, training):  # noqa: ARG001  # the arguments of a layer
    raise RuntimeError("in the forward pass")


@pytest.mark.needs(keras="3.14", reason="an `activity_regularizer` is a sum over the examples")
def test_a_step_that_fails_leaves_the_model_as_it_was():
    loop = loop_on(2, residual, remat=True, metrics=())
    block = loop.model.layers[-2]
    loop.evaluate(batches(), verbose=0)
    vars(block.parts[1])["call"] = failing
    with pytest.raises(RuntimeError, match="in the forward pass"):
        loop.fit(batches(), epochs=1, verbose=0)
    assert "call" not in vars(block)


def test_a_model_without_blocks_gets_one_sentence():
    with pytest.raises(ValueError, match="`remat`.*model='sequential.*keras.Sequential"):
        trained(1, remat=True)
    with pytest.raises(ValueError, match="`remat` must be.*remat='yes'"):
        trained(1, remat="yes")


class Borrowing(layers.Layer):
    """A block that uses a weight that is not its own, and random numbers without a seed."""

    def __init__(self, lender, *, is_noisy, **settings):
        super().__init__(**settings)
        self.dense = layers.Dense(6)
        vars(self)["lender"] = lender  # so that Keras does not track it
        self.is_noisy = is_noisy

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        noise = keras.random.uniform(keras.ops.shape(x)) if self.is_noisy else 1.0
        return self.dense(x) * noise + keras.ops.matmul(x, self.lender.kernel)


def test_weights_of_other_layers_and_numbers_without_a_seed_are_found():
    @seeded
    def borrowing():
        inputs = keras.Input((4,))
        lender = layers.Dense(6)
        x = layers.Dense(6)(inputs)
        blocks = [Borrowing(lender, is_noisy=not ON_JAX) for _ in range(2)]
        return keras.Model(inputs, layers.Dense(3)(lender(blocks[1](blocks[0](lender(x))))))

    settings = {"build": borrowing, "metrics": (), "epochs": 2}
    assert_same(trained(1, **settings), trained(2, remat=True, **settings))


@pytest.mark.jax
@pytest.mark.needs(jax="0.10", reason="schedules for memory on a CPU")
def test_it_needs_a_part_of_the_memory():
    import jax

    x = np.ones((512, 16), "float32")

    def deep():
        inner = [keras.Sequential([layers.Dense(512, "gelu"), layers.Dense(16)]) for _ in range(8)]
        return keras.Sequential([keras.Input((16,)), *inner])

    def activations(remat):
        loop = loop_on(1, deep, loss="mse", remat=remat, metrics=())
        steps, data = loop._steps, ArrayBatches((x, x), global_batch_size=len(x))
        steps.build(steps.open(data, "train", steps=None), training=True)
        lowered = jax.jit(steps._train_step).lower(steps._variables.read(), (x, x))
        # On CPUs XLA orders operations so that they run side by side, whatever that keeps.
        ordered = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
        compiled = lowered.compile(compiler_options=ordered)
        return compiled.memory_analysis().temp_size_in_bytes / (512 * 512 * 4)

    complete = activations(remat=False)
    assert complete > 23  # four of each block, three with JAX 0.12
    assert activations(remat=True) < complete / 2
