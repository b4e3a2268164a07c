"""`plan_memory` against worked values and trainings, on JAX."""

import dataclasses
import functools

import keras
import numpy as np
import pytest
from keras import layers

from kdpkit import sharding, training
from kdpkit.batches import ArrayBatches
from kdpkit.diagnostics import plan_memory
from kdpkit.testing._toys import off_by

X = np.random.default_rng(0).normal(size=(20 * 16, 64)).astype("float32")
Y = np.random.default_rng(1).integers(0, 16, 20 * 16).astype("int32")
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
KERNELS, BIASES = 4 * (64 * 256 + 256 * 16), 4 * (256 + 16)  # bytes
needs_jax_0_10 = pytest.mark.needs(jax="0.10", reason="memory is planned on a CPU")


def on_jax(test):
    return pytest.mark.jax(needs_jax_0_10(test))


def data(size=16):
    return ArrayBatches((X, Y), global_batch_size=size, seed=3)


def net(*between):
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [keras.Input((64,)), layers.Dense(256, "tanh"), *between, layers.Dense(16)]
    )


def compiled(*between, size=16, **settings):
    model = net(*between)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, **settings)
    model.compile(optimizer, CROSS_ENTROPY)
    return data(size), model


def blocks():
    inner = (
        keras.Sequential([*(layers.Dense(64, "tanh") for _ in range(5)), layers.Dense(256)])
        for _ in range(4)
    )
    return compiled(*inner, size=320)


@pytest.fixture(scope="module")
def planned():
    return plan_memory(compiled, memory="1GiB", replicas=4)


# What is needed.


@on_jax
def test_variables_are_counted_by_hand_and_as_they_are_cut(planned):
    uses = {use.shard: use for use in planned.uses}
    for shard, of_weights, of_optimizer in (
        ("none", KERNELS, KERNELS),
        ("optimizer", KERNELS, KERNELS / 4),
        ("weights", KERNELS / 4, KERNELS / 4),
    ):
        use = uses[shard]
        assert use.weights == of_weights + BIASES + 8  # and sum and count of the loss
        assert use.optimizer == of_optimizer + BIASES + 8  # iterations and learning rate
    use = uses["none"]
    assert (planned.chosen, planned.replicas, planned.global_batch_size) == (use, 4, 16)
    assert use.gradients == KERNELS + BIASES
    parts = (use.weights, use.gradients, use.optimizer, use.activations, use.temporaries)
    assert use.total == sum(parts)


@on_jax
def test_nothing_is_allocated():
    import jax

    def make():
        model = keras.Sequential([keras.Input((2,), dtype="int32"), layers.Embedding(10**9, 64)])
        model.compile(keras.optimizers.SGD(momentum=0.9), "mse")
        return ArrayBatches((np.zeros((8, 2)), np.zeros((8, 2, 64))), global_batch_size=8), model

    before = sum(array.nbytes for array in jax.live_arrays())
    plan = plan_memory(make, memory="80GiB", replicas=8)
    assert sum(array.nbytes for array in jax.live_arrays()) <= before + 2**20
    of = {(use.model, use.shard, use.accumulation): use for use in plan.uses}
    cut = of[1, "weights", 1]
    assert cut.weights == pytest.approx(4 * 64 * 10**9 / 8)
    assert plan.chosen is None


# What is proposed.


@on_jax
def test_less_memory_takes_smaller_batches_and_no_memory_says_what_it_takes():
    free = plan_memory(compiled, memory="1GiB")
    assert free.chosen.accumulation == 1
    impossible = plan_memory(compiled, memory=2000)
    assert {use.accumulation for use in impossible.uses} == {1, 16}
    tight = plan_memory(compiled, memory=free.chosen.total - 1)
    assert tight.chosen is None or tight.chosen.total < free.chosen.total
    assert (impossible.chosen, impossible.lines) == (None, ())
    assert f"The least is {impossible.smallest.total / 2**20:.3g} MiB" in str(impossible)


@on_jax
def test_what_a_plan_calls_equal_trains_equal(planned):
    dataset, one = compiled()
    before = one.get_weights()
    one.fit(dataset, shuffle=False, verbose=0)
    after = one.get_weights()
    fitting = plan_memory(compiled, memory=planned.smallest.total, replicas=4)
    assert fitting.chosen == planned.smallest
    assert f'DataParallel(4, shard="{fitting.chosen.shard}")' in str(fitting)
    cut = plan_memory(compiled, memory=2000, replicas=4)
    equal = {use for plan in (planned, cut) for use in plan.uses if use.equal}
    assert {use.shard for use in equal if use.accumulation > 1} == {"none", "optimizer", "weights"}
    for use in equal:
        strategy = sharding.DataParallel(4, shard=use.shard)
        if use.model > 1:
            strategy = sharding.ModelParallel(4, model=use.model, shard=use.shard)
        with strategy.scope():
            parts = use.accumulation
            dataset, many = compiled(
                size=16 // parts, gradient_accumulation_steps=parts if parts > 1 else None
            )
            training.replica_exact(many).fit(dataset, shuffle=False, verbose=0)
        assert off_by(many.get_weights(), after, before) <= 1e-5


@on_jax
def test_devices_share_the_model_if_nothing_else_fits():
    """Of two examples every device computes both, unless devices share the model."""
    two_examples = functools.partial(compiled, size=2)
    free = plan_memory(two_examples, memory="1GiB", replicas=4)
    assert {use.model for use in free.uses} == {1}
    tight = plan_memory(two_examples, memory=free.smallest.total - 1, replicas=4)
    of_two = next(use for use in tight.uses if (use.model, use.shard) == (2, "none"))
    assert of_two.weights == KERNELS / 2 + BIASES + 8
    assert of_two.optimizer == KERNELS / 2 + BIASES + 8
    shared = dataclasses.replace(tight, uses=(of_two,), memory=of_two.total)
    assert shared.lines == (
        "keras.distribution.set_distribution(kdpkit.sharding.ModelParallel(4, model=2))",
    )


@on_jax
def test_blocks_are_computed_again_where_there_are_some(planned):
    assert not any(use.remat for use in planned.uses)
    plan = plan_memory(blocks, memory="1GiB")
    kept, again = plan.uses
    assert (kept.remat, again.remat, again.equal) == (False, True, True)
    assert again.activations < kept.activations
    assert kept.operations < again.operations < 1.5 * kept.operations
    assert plan.chosen == kept


@on_jax
def test_layers_that_see_the_batch_make_smaller_batches_another_training():
    plan = plan_memory(lambda: compiled(layers.BatchNormalization()), memory=2000)
    assert {(use.accumulation, use.equal) for use in plan.uses} == {(1, True), (16, False)}


# Bad input.


@pytest.mark.parametrize("memory", ["16 gigs", "16", 0])
def test_a_size_that_cannot_be_read_raises(memory):
    with pytest.raises(ValueError, match="`memory` must be"):
        plan_memory(compiled, memory=memory)


@on_jax
@pytest.mark.parametrize(
    ("make", "replicas", "message"),
    [
        (net, 1, "`make` must return a dataset and"),
        (lambda: (data(), net()), 1, "not compiled"),
        (compiled, 9, "JAX has 8 cpu"),
    ],
)
def test_what_cannot_be_planned_raises(make, replicas, message):
    with pytest.raises(ValueError, match=message):
        plan_memory(make, memory="1GiB", replicas=replicas)


@pytest.mark.tensorflow
def test_tensorflow_is_sent_to_jax():
    with pytest.raises(ValueError, match="Run with KERAS_BACKEND=jax"):
        plan_memory(compiled, memory="1GiB")
