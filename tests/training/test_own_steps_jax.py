"""Steps of loops of one's own on JAX, beside one device; test_environments.py runs it on JAX."""

import contextlib
import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from keras import layers

from kdpkit import sharding
from kdpkit.sharding import _meshes
from kdpkit.testing._toys import off_by
from kdpkit.training import replica_exact
from tests.processes import ROOT
from tests.training.exactness import assert_close

FENCED = re.compile(r"^```python.*?\n(.*?)^```", re.MULTILINE | re.DOTALL)
pytestmark = pytest.mark.jax
RANDOM = np.random.default_rng(0)
SIZES = (12, 11, 7, 1)
IMAGES = RANDOM.normal(size=(31, 6, 6, 2)).astype("float32")
RANDOM_WEIGHTS = RANDOM.normal(size=(75, 16)).astype("float32")
LABELS = RANDOM.integers(0, 3, 31)
TOKENS = RANDOM.integers(0, 20, (31, 6))
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
BINARY = keras.losses.BinaryCrossentropy(from_logits=True)


def batches(*arrays):
    """Return batches of uneven sizes, twice."""
    starts = np.cumsum((0, *SIZES))
    return [tuple(a[start:end] for a in arrays) for start, end in itertools.pairwise(starts)] * 2


def values_of(owner):
    return [variable.value for variable in owner.variables]


def convnet():
    keras.utils.set_random_seed(0)
    inner = [layers.Conv2D(4, 3), layers.BatchNormalization(momentum=0.9), layers.ReLU()]
    outer = [layers.Flatten(), layers.Dropout(0.3), layers.Dense(3)]
    return keras.Sequential([keras.Input((6, 6, 2)), *inner, *outer])


# Loops as guides have them. Each takes what to put on a step, and returns the first state, the last
# state, and what the loop has printed.


def keras_guide(on_step):
    """Keras' guide to writing a training loop from scratch in JAX."""
    model, optimizer = convnet(), keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    accuracy = keras.metrics.SparseCategoricalAccuracy()

    def compute_loss_and_updates(trainable, others, metrics, x, y):
        logits, others = model.stateless_call(trainable, others, x, training=True)
        loss = CROSS_ENTROPY(y, logits)
        metrics = accuracy.stateless_update_state(metrics, y, logits)
        return loss, (logits, others, metrics)

    grad_fn = jax.value_and_grad(compute_loss_and_updates, has_aux=True)

    @on_step
    def train_step(state, data):
        trainable, others, of_optimizer, metrics = state
        (loss, (logits, others, metrics)), grads = grad_fn(trainable, others, metrics, *data)
        trainable, of_optimizer = optimizer.stateless_apply(of_optimizer, grads, trainable)
        return loss, logits, (trainable, others, of_optimizer, metrics)

    trainable = [variable.value for variable in model.trainable_variables]
    others = [variable.value for variable in model.non_trainable_variables]
    state = first = (trainable, others, values_of(optimizer), values_of(accuracy))
    first, printed = jax.tree.map(np.array, first), []
    for data in batches(IMAGES, LABELS):
        loss, logits, state = train_step(state, data)
        printed += [float(loss), np.asarray(logits), accuracy.stateless_result(state[3])]
    for variable, value in zip(model.trainable_variables, state[0], strict=True):
        variable.assign(value)
    return first[:2], state[:2], [printed, np.asarray(model(IMAGES))]


def adam_by_hand(on_step):
    """The shape of Optax' loops: parameters, the optimizer's state and a batch."""

    def predict(params, x):
        return jax.nn.tanh(x @ params["in"]["w"] + params["in"]["b"]) @ params["out"]

    def loss_fn(params, x, y):
        log_probs = jax.nn.log_softmax(predict(params, x.reshape(len(x), -1)))
        return -jnp.take_along_axis(log_probs, y[:, None], 1).mean()

    def update(gradient, state):
        count, mu, nu = state
        mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mu, gradient)
        nu = jax.tree.map(lambda n, g: 0.99 * n + 0.01 * g**2, nu, gradient)
        scale = jnp.sqrt(1 - 0.99 ** (count + 1)) / (1 - 0.9 ** (count + 1))
        return jax.tree.map(lambda m, n: -0.01 * scale * m / (n**0.5 + 1e-3), mu, nu), (
            (count + 1, mu, nu)
        )

    @on_step
    def step(params, opt_state, x, *, y):
        loss, gradient = jax.value_and_grad(loss_fn)(params, x, y)
        updates, opt_state = update(gradient, opt_state)
        return jax.tree.map(jnp.add, params, updates), opt_state, loss

    w, b, out = (jax.random.normal(jax.random.key(0), shape) for shape in ((72, 8), 8, (8, 3)))
    params = {"in": {"w": 0.1 * w, "b": b}, "out": out}
    zeros, losses = jax.tree.map(jnp.zeros_like, params), []
    state, first = (jnp.zeros((), int), zeros, zeros), jax.tree.map(np.array, params)
    for x, y in batches(IMAGES, LABELS):
        params, state, loss = step(params, state, jnp.asarray(x), y=y)
        losses.append(float(loss))
    return first, params, losses


def sharding_guide(on_step):
    """JAX' guides to sharding: a mesh, a replicated state and sharded batches, all put by hand."""
    devices = jax.devices()[: 1 if on_step is jitted else 2]
    mesh = Mesh(np.array(devices), ("data",))
    replicated = NamedSharding(mesh, PartitionSpec())
    by_data = NamedSharding(mesh, PartitionSpec("data"))
    params = [
        (0.1 * jax.random.normal(jax.random.key(0), shape), jnp.zeros(shape[1]))
        for shape in ((72, 16), (16, 3))
    ]
    first, params = jax.tree.map(np.array, params), jax.device_put(params, replicated)

    def loss_fn(params, x, y):
        for w, b in params:
            x = jax.nn.relu(x) @ w + b
        return -jnp.take_along_axis(jax.nn.log_softmax(x), y[:, None], 1).mean()

    @on_step
    @functools.partial(jax.jit, donate_argnums=0)
    def update(params, x, y):
        gradient = jax.grad(loss_fn)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)

    for x, y in batches(IMAGES.reshape(31, -1), LABELS):
        if len(x) % 2 == 0:
            x, y = jax.device_put((x, y), by_data)
        params = update(params, x, y)
    return first, params, None


def language_model(on_step):
    """A model with a table, which is looked up, and attention; a subclass with a method as step."""
    keras.utils.set_random_seed(0)
    tokens = keras.Input((6,), dtype="int32")
    hidden = layers.Embedding(20, 8)(tokens)
    hidden += layers.MultiHeadAttention(2, 4)(hidden, hidden, use_causal_mask=True)
    logits = layers.Dense(20)(layers.LayerNormalization()(hidden))
    model, optimizer = keras.Model(tokens, logits), keras.optimizers.SGD(0.1, clipnorm=1.0)
    optimizer.build(model.trainable_variables)

    class Trainer:
        @on_step
        @functools.partial(jax.jit, static_argnums=(0, 3))
        def step(self, state, tokens, training):
            def loss_fn(weights):
                logits, _ = model.stateless_call(weights, [], tokens, training=training)
                return CROSS_ENTROPY(tokens[:, 1:], logits[:, :-1])

            loss, gradient = jax.value_and_grad(loss_fn)(state["weights"])
            weights, slots = optimizer.stateless_apply(state["slots"], gradient, state["weights"])
            return {"slots": slots, "weights": weights}, loss

    trainer, losses = Trainer(), []
    state = {"weights": values_of(model), "slots": values_of(optimizer)}
    first = jax.tree.map(np.array, state["weights"])
    for (batch,) in batches(TOKENS):
        state, loss = trainer.step(state, batch, True)
        losses.append(float(loss))
    return first, state["weights"], losses


def gan(on_step):
    """Two networks with an optimizer each, and noise from a key of JAX."""
    keras.utils.set_random_seed(0)
    inner = [layers.Dense(9), layers.BatchNormalization(), layers.LeakyReLU(), layers.Dense(72)]
    generator = keras.Sequential([keras.Input((4,)), *inner])
    inner = [layers.Dense(9, "leaky_relu"), layers.Dropout(0.3), layers.Dense(1)]
    discriminator = keras.Sequential([keras.Input((72,)), *inner])
    networks = generator, discriminator
    optimizers = [keras.optimizers.SGD(0.05) for _ in networks]
    for network, optimizer in zip(networks, optimizers, strict=True):
        optimizer.build(network.trainable_variables)

    def state_of(network, optimizer):
        groups = network.trainable_variables, network.non_trainable_variables, optimizer.variables
        return tuple([variable.value for variable in group] for group in groups)

    @on_step
    def step(of_generator, of_discriminator, images, key):
        noise = jax.random.normal(key, (len(images), 4))

        def losses(trained, index):
            generate, discriminate = (
                functools.partial(network.stateless_call, training=True) for network in networks
            )
            g_weights, d_weights = of_generator[0], of_discriminator[0]
            g_weights, d_weights = (trained, d_weights) if index == 0 else (g_weights, trained)
            fakes, g_state = generate(g_weights, of_generator[1], noise)
            real, d_state = discriminate(d_weights, of_discriminator[1], images)
            fake, d_state = discriminate(d_weights, d_state, fakes)
            if index == 0:
                return BINARY(jnp.ones_like(fake), fake), g_state
            loss = BINARY(jnp.ones_like(real), real) + BINARY(jnp.zeros_like(fake), fake)
            return loss, d_state

        states, printed = [], []
        for index, (weights, _, slots) in enumerate((of_generator, of_discriminator)):
            (loss, others), grads = jax.value_and_grad(losses, has_aux=True)(weights, index)
            weights, slots = optimizers[index].stateless_apply(slots, grads, weights)
            states.append((weights, others, slots))
            printed.append(loss)
        return *states, printed

    states, key = [*map(state_of, networks, optimizers)], jax.random.PRNGKey(0)
    first, printed = jax.tree.map(np.array, states), []
    for (images,) in batches(IMAGES.reshape(31, -1)):
        key, subkey = jax.random.split(key)
        *states, losses = step(*states, images, subkey)
        printed.append([*map(float, losses)])
    return first, states, printed


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["step", "params"], meta_fields=["apply_fn"]
)
@dataclasses.dataclass
class TrainState:
    """A state as Flax has it."""

    step: int
    params: dict
    apply_fn: object


def scanned(on_step):
    """Micro-batches in a `jax.lax.scan`, and a state that is a dataclass."""

    def apply_fn(params, x):
        return jax.nn.tanh(x @ params["in"]) @ params["out"]

    @on_step
    @jax.jit
    def step(state, batch):
        count = max(n for n in (1, 2, 3) if len(batch["x"]) % n == 0)
        parts = jax.tree.map(lambda a: a.reshape(count, -1, *a.shape[1:]), batch)

        def loss_fn(params, part):
            squares = (state.apply_fn(params, part["x"]) - part["y"]) ** 2
            return squares.mean()

        def add(total, part):
            loss, gradient = jax.value_and_grad(loss_fn)(state.params, part)
            return jax.tree.map(jnp.add, total, gradient), loss

        zeros = jax.tree.map(jnp.zeros_like, state.params)
        gradient, losses = jax.lax.scan(add, zeros, parts)
        params = jax.tree.map(lambda p, g: p - 0.02 * g / count, state.params, gradient)
        return TrainState(state.step + 1, params, state.apply_fn), {"loss": losses.mean()}

    params = {"in": 0.1 * RANDOM_WEIGHTS[:72], "out": RANDOM_WEIGHTS[72:75].T}
    state, losses = TrainState(0, params, apply_fn), []
    for x, y in batches(IMAGES.reshape(31, -1), np.eye(3, dtype="float32")[LABELS]):
        state, logs = step(state, {"x": x, "y": y})
        losses.append(float(logs["loss"]))
    assert state.step == len(losses)
    return params, state.params, losses


# Beside one device.

DEVICES = {
    2: lambda: sharding.DataParallel(2),
    3: lambda: sharding.DataParallel(3),
    "2x2": lambda: sharding.ModelParallel(4, model=2),
    "sharded": lambda: sharding.DataParallel(2, shard="weights"),
}
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def jitted(function):
    return function if isinstance(function, jax.stages.Wrapped) else jax.jit(function)


@functools.cache
def on_one_device(program):
    return program(jitted)


def assert_equal(program, on_step):
    first, one, printed = on_one_device(program)
    _, many, printed_many = program(on_step)
    # Sums of micro-batches were measured at 2.7e-6, where XLA compiles soonest.
    largest = 4e-6 if program is scanned else 2e-6
    assert off_by(*map(jax.tree.leaves, (many, one, first))) <= largest
    assert_close(*map(jax.tree.leaves, (printed_many, printed)), atol=1e-5)


@pytest.mark.parametrize(
    ("program", "devices"),
    [
        (adam_by_hand, 2),
        slow(keras_guide, 2),
        slow(keras_guide, 3),
        slow(keras_guide, "2x2"),
        slow(language_model, 2),
        slow(language_model, "2x2"),
        slow(gan, 2),
        slow(gan, 3),
        slow(gan, "sharded"),
        (scanned, 3),
        slow(scanned, "2x2"),
    ],
)
def test_a_loop_of_ones_own_trains_what_one_device_trains(program, devices):
    with DEVICES[devices]().scope():
        assert_equal(program, replica_exact)


@pytest.mark.slow
@pytest.mark.parametrize("program", [sharding_guide, adam_by_hand])
def test_a_mesh_of_jax_is_a_strategy(program):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    assert_equal(program, replica_exact(strategy=mesh))


def test_jit_may_stand_above():
    with DEVICES[2]().scope():
        assert_equal(scanned, lambda function: jax.jit(replica_exact(function)))


@pytest.mark.parametrize("devices", [None, 2])
@pytest.mark.parametrize("settings", [{"static_argnums": 3}, {"static_argnames": "kind"}])
def test_jit_may_stand_above_with_static_arguments(settings, devices):
    def step(w, x, y, kind):
        return sgd(w, x, y) if kind == "trained" else w

    with DEVICES[devices]().scope() if devices else contextlib.nullcontext():
        step = jax.jit(replica_exact(step), **settings)
        for kind, expected in {"trained": sgd(W, X, Y), "frozen": W}.items():
            np.testing.assert_allclose(step(W, X, Y, kind=kind), expected, rtol=1e-5, atol=1e-6)
            if "static_argnums" in settings:
                np.testing.assert_allclose(step(W, X, Y, kind), expected, rtol=1e-5, atol=1e-6)


# Stopped, and started again.


def test_the_loop_of_the_page_is_resumed_bit_for_bit(tmp_path, monkeypatch):
    page = ROOT / "docs" / "how_to" / "resume.md"
    (program,) = [each for each in FENCED.findall(page.read_text()) if "import jax" in each]
    stopping = program.replace("on_train_batch_end(step)", "on_train_batch_end(stop(epoch, step))")
    assert stopping != program

    def stop(epoch, step):
        if (epoch, step) == (1, 7):
            names["resume"].request_stop()
        return step

    monkeypatch.chdir(tmp_path)
    uninterrupted, names, resumed = {}, {"stop": stop}, {}
    with DEVICES[2]().scope():
        exec(program.replace('"state"', '"other"'), uninterrupted)
        with pytest.raises(SystemExit, match="42"):
            exec(stopping, names)
        exec(program, resumed)
    assert names["model"].history.epoch == [0]
    for name in ("model", "optimizer"):
        for one, other in zip(uninterrupted[name].variables, resumed[name].variables, strict=True):
            np.testing.assert_array_equal(one, other)
    assert uninterrupted["model"].history.history == resumed["model"].history.history


# How it is compiled.


def sgd(w, x, y):
    return w - 0.1 * jax.grad(lambda w: ((x @ w - y) ** 2).mean())(w)


W, X, Y = (RANDOM.normal(size=size).astype("float32") for size in ((4, 2), (12, 4), (12, 2)))


@contextlib.contextmanager
def compilations():
    events = []

    def listen(event, *_, **__):
        events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield lambda: events.count("/jax/core/compile/backend_compile_duration")


def test_each_shape_is_traced_and_compiled_once_and_xla_divides_it():
    traces = []

    def step(w, x, y):
        traces.append(x.shape)
        return sgd(w, x, y)

    w = W
    with DEVICES[2]().scope(), compilations() as count:
        step = replica_exact(step)
        for size in (12, 11):
            w = step(w, X[:size], Y[:size])
            before = count()
            for _ in range(2):
                w = step(w, X[:size], Y[:size])
            assert count() == before
        program = jax.jit(step).lower(w, X, Y).compile().as_text()
    assert traces == [(12, 4), (11, 4)]
    assert "f32[6,4]" in program
    assert "all-reduce" in program


def test_a_state_keeps_its_layout_and_outputs_may_be_uneven():
    strategy = sharding.DataParallel(2, shard="weights")
    layout = NamedSharding(strategy.device_mesh.backend_mesh, PartitionSpec(None, "batch"))
    with strategy.scope():
        step = replica_exact(lambda state, x: (x @ state["w"], x * 2, {"w": state["w"] + 1}))
        predictions, doubled, state = step({"w": jax.device_put(W, layout)}, X[:11])
    np.testing.assert_allclose(predictions, X[:11] @ W, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(doubled, X[:11] * 2)
    assert state["w"].sharding.is_equivalent_to(layout, 2)


def test_donated_arrays_are_reused_and_others_stay():
    donating = functools.partial(jax.jit, donate_argnames="w")
    with DEVICES[2]().scope():
        step, keeping = replica_exact(donating(sgd)), replica_exact(sgd)
        first = keeping(jnp.asarray(W), X, Y)
        second = step(first, X, Y)
        keeping(second, X, Y)
    assert first.is_deleted()
    assert not second.is_deleted()


def test_without_a_distribution_it_is_the_function_compiled():
    np.testing.assert_array_equal(replica_exact(sgd)(W, X, Y), jax.jit(sgd)(W, X, Y))


# Bad input.


@pytest.fixture
def fresh():
    """Forget what the tests before have made and used."""
    used = _meshes.is_one_used.is_set()
    _meshes.made.clear()
    _meshes.is_one_used.clear()
    yield _meshes
    if used:
        _meshes.is_one_used.set()


def test_another_distribution_is_one_sentence():
    step = replica_exact(sgd)
    with DEVICES[2]().scope():
        w = step(W, X, Y)
    with DEVICES[3]().scope():
        with pytest.raises(ValueError, match="Another distribution is set"):
            step(W, X, Y)
        with pytest.raises(ValueError, match="on other devices than those of the distribution"):
            replica_exact(sgd)(w, X, Y)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("owner", ["step", "model"])
@pytest.mark.parametrize("make", DEVICES.values(), ids=DEVICES)
def test_a_distribution_that_is_made_and_not_set_is_one_sentence(make, owner, order):
    distribution = make() if order == "before" else None

    def train():
        if owner == "step":
            return functools.partial(replica_exact(sgd), W, X, Y)
        model = replica_exact(convnet())
        model.compile("sgd", CROSS_ENTROPY)
        return functools.partial(model.fit, IMAGES, LABELS, verbose=0)

    call = train()
    distribution = distribution or make()
    sentence = rf"made but is not set, so the {owner}.*\d repl.*set_distribution.*leave out"
    with pytest.raises(ValueError, match=sentence):
        call()
    with distribution.scope():
        train()()
    train()()  # which knows by now what it does


def test_programs_of_one_device_forget_nothing(fresh):
    one = sharding.DataParallel(1)
    replica_exact(sgd)(W, X, Y)
    sharding.DataParallel(2)  # and it is gone
    replica_exact(sgd)(W, X, Y)
    with one.scope():
        replica_exact(sgd)(W, X, Y)
    assert not fresh.is_one_used.is_set()


def test_axes_that_are_divided_by_hand_are_one_sentence():
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(AxisType.Explicit,))
    with pytest.raises(ValueError, match="axes of the type `Auto`.*axis_types"):
        replica_exact(sgd, strategy=mesh)


def test_errors_of_the_function_stay_its_own():
    with DEVICES[2]().scope(), pytest.raises(TypeError, match="dot_general requires contracting"):
        replica_exact(sgd)(W, X[:, :3], Y)
