"""Devices that share a model train what one device trains; test_environments.py runs it on JAX."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from keras import layers, ops

from kdpkit import sharding, testing, training
from kdpkit.batches import ArrayBatches
from kdpkit.sharding._batches import place_batch
from kdpkit.sharding._layouts import Layouts
from kdpkit.sharding._meshes import as_mesh
from kdpkit.testing._toys import off_by
from kdpkit.training.jax._lowering import divide_sums

pytestmark = [
    pytest.mark.jax,
    pytest.mark.filterwarnings("ignore:`.*stays complete"),
    pytest.mark.filterwarnings("ignore:A large variable stays complete"),
    pytest.mark.filterwarnings("ignore:.*does not support masking"),
]
VOCABULARY, LENGTH, WIDTH = 64, 16, 32
SIZES = {"vocabulary_size": VOCABULARY, "num_layers": 2, "hidden_dim": WIDTH}
GROUPED = SIZES | {"num_query_heads": 4, "num_key_value_heads": 2, "intermediate_dim": 64}
CLASSIC = SIZES | {"num_heads": 4, "intermediate_dim": 128, "max_sequence_length": LENGTH}
TOKENS = np.random.default_rng(1).integers(1, VOCABULARY, (23, LENGTH)).astype("int32")
IMAGES = np.random.default_rng(1).normal(size=(23, 16, 16, 3)).astype("float32")
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
FAMILIES = {  # KerasHub's, with the collectives of a forward pass: one for each weight that ends
    "Llama3": (GROUPED, 5),
    "Bert": (CLASSIC, 5),
    "GPT2": (CLASSIC, 5),
    "Gemma": (GROUPED | {"num_key_value_heads": 1, "head_dim": 8, "intermediate_dim": 128}, 5),
    "Gemma3": (GROUPED | {"head_dim": 8, "image_size": 16}, 5),
    "Mixtral": (GROUPED | {"num_experts": 4, "top_k": 2}, 13),
    "T5": (SIZES | {"num_heads": 4, "intermediate_dim": 64, "key_value_dim": 8}, 11),
    # Their attention ends in a square matrix, or blocks share weights or relative positions.
    "Falcon": (SIZES | {"num_attention_heads": 4, "intermediate_dim": 128}, 5),
    "DebertaV3": (CLASSIC | {"bucket_size": 8}, 5),
    "Albert": (CLASSIC | {"embedding_dim": 16}, 5),
    "Whisper": (
        SIZES
        | {"num_heads": 4, "intermediate_dim": 128, "num_mels": 8}
        | {"max_encoder_sequence_length": 2 * LENGTH, "max_decoder_sequence_length": LENGTH},
        12,  # 2 and 3 for each encoder and decoder layer, 1 for the convolutions
    ),
}

REPEATING = ("Bert", "Gemma3", "Mixtral", "DebertaV3", "Albert", "Whisper")


class LanguageModel(keras.Model):
    def __init__(self, family):
        super().__init__()
        import keras_hub

        sizes, _ = FAMILIES[family]
        self.backbone = getattr(keras_hub.models, f"{family}Backbone")(**sizes)

    def call(self, tokens, training=None):
        names = self.backbone.input
        inputs = {name: ops.ones_like(tokens) for name in names if "mask" in name}
        inputs |= {name: tokens for name in names if "token_ids" in name}
        inputs |= {name: ops.zeros_like(tokens) for name in names if "segment" in name}
        if "encoder_features" in names:
            inputs["encoder_features"] = ops.one_hot(ops.repeat(tokens % 8, 2, 1), 8)
        hidden = self.backbone(inputs, training=training)
        for name in ("decoder_sequence_output", "sequence_output"):
            hidden = hidden.get(name, hidden) if isinstance(hidden, dict) else hidden
        table = self.backbone.token_embedding
        return table(hidden[..., : table.output_dim], reverse=True)


def vision():
    import keras_hub

    backbone = keras_hub.models.ViTBackbone((16, 16, 3), 4, 2, 4, WIDTH, 128)
    return keras.Sequential([backbone, layers.Flatten(), layers.Dense(10)])


class Attention(layers.Layer):
    """Attention as it is often written by hand: one kernel for queries, keys and values."""

    def __init__(self):
        super().__init__()
        self.three, self.out = layers.Dense(3 * WIDTH), layers.Dense(WIDTH)

    def call(self, x):
        heads = ops.reshape(self.three(x), (-1, LENGTH, 3, 4, WIDTH // 4))
        queries, keys, values = ops.unstack(ops.transpose(heads, (2, 0, 3, 1, 4)))
        scores = ops.softmax(ops.matmul(queries, ops.swapaxes(keys, -1, -2)) / 3.0)
        mixed = ops.transpose(ops.matmul(scores, values), (0, 2, 1, 3))
        return self.out(ops.reshape(mixed, (-1, LENGTH, WIDTH)))


def own_transformer():
    x = inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH)(x)
    for _ in range(2):
        x = x + Attention()(layers.LayerNormalization()(x))
        inner = layers.Dense(4 * WIDTH, "gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dropout(0.1, seed=3)(layers.Dense(WIDTH)(inner))
    return keras.Model(inputs, layers.Dense(VOCABULARY)(x))


def convolutional():
    x = inputs = keras.Input((16, 16, 3))
    for filters in (16, 32, 64):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.MaxPooling2D()(layers.BatchNormalization()(ops.relu(x)))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def recurrent():
    names = [layers.Embedding(VOCABULARY, WIDTH), layers.LSTM(24, return_sequences=True)]
    return keras.Sequential([keras.Input((LENGTH,)), *names, layers.GRU(24), layers.Dense(10)])


class Depthwise(layers.Layer):
    """A convolution that JAX computes, without a layer of Keras, inside of what transforms it."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(3, 3, 1, shape[-1]), name="kernel")

    def call(self, x):
        @jax.checkpoint
        def step(x, _):
            more = jax.lax.conv_general_dilated(
                x,
                ops.convert_to_tensor(self.kernel),
                (1, 1),
                "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
                feature_group_count=x.shape[-1],
            )
            return x + more, None

        return jax.lax.scan(step, x, None, length=2)[0]


def in_groups():
    kinds = layers.DepthwiseConv2D(3, depth_multiplier=2), layers.SeparableConv2D(16, 3, strides=2)
    names = [layers.Conv2D(8, 3), *kinds, layers.Conv2D(16, 3, groups=4), Depthwise()]
    ends = [layers.GlobalAveragePooling2D(), layers.Dense(10)]
    return keras.Sequential([keras.Input((16, 16, 3)), *names, *ends])


IMAGES_OF = vision, convolutional, in_groups
BUILDERS = {b.__name__: b for b in (*IMAGES_OF, own_transformer, recurrent)}
# The most collectives in a forward pass. A kernel of queries, keys and values, or two of them, is
# not sharded where they begin: one all-gather or two permutations in each block.
OWN_COLLECTIVES = {"own_transformer": 7, "recurrent": 1}
BY_TOKENS = (np.roll(TOKENS, -1, 1), np.arange(23) % 10)


def data_of(name):
    is_image = BUILDERS.get(name) in IMAGES_OF
    return IMAGES if is_image else TOKENS, BY_TOKENS[is_image or name == "recurrent"]


def trained(name, distribution=None, *, size=10, prepare=lambda model: model, **settings):
    """Train three steps, the last of an uneven batch; return the model and its first weights."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    with distribution.scope() if distribution else contextlib.nullcontext():
        model = prepare(BUILDERS[name]() if name in BUILDERS else LanguageModel(name))
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9, **settings)
        model.compile(optimizer, CROSS_ENTROPY, metrics=["accuracy"])
        x, y = data_of(name)
        model(x[:1])  # builds it
        before = model.get_weights()
        model = training.replica_exact(model) if distribution else model
        model.fit(x, y, batch_size=size, epochs=1, shuffle=False, verbose=0)
        if distribution:
            model.evaluate(x, y, batch_size=10, verbose=0)
            model.predict(x, batch_size=10, verbose=0)
    return model, before


@functools.cache
def on_one_device(name, size=10, **settings):
    model, before = trained(name, size=size, **settings)
    return model.get_weights(), before


def assert_trained_as_one(model, name, **settings):
    expected, before = on_one_device(name, **settings)
    tolerance = 1e-4 if name == "convolutional" else 1e-5  # statistics enlarge what is rounded
    assert off_by(model.get_weights(), expected, before) <= tolerance


def share_on_a_device(model):
    values = [variable.value for variable in model.weights]
    here = sum(value.addressable_shards[0].data.nbytes for value in values)
    return here / sum(value.nbytes for value in values)


def collectives(model, x, distribution):
    """Return the numbers of collectives in a forward pass, by kind."""
    with distribution.scope():
        placed = place_batch(x, as_mesh(distribution))
        variables = model.trainable_variables, model.non_trainable_variables
        values = [[variable.value for variable in group] for group in variables]
        program = jax.jit(functools.partial(model.stateless_call, training=False))
        text = program.lower(*values, placed).compile().as_text()
    names = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
    found = {name: len(re.findall(rf" {name}(?:-start)?\(", text)) for name in names}
    return {name: count for name, count in found.items() if count}


@pytest.mark.parametrize("groups", [2, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "family",
    [
        "Llama3",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("Gemma", "GPT2", "T5", "Falcon")),
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in REPEATING),
    ],
)
def test_a_family_of_kerashub_trains_as_on_one_device(family, groups):
    distribution = sharding.ModelParallel(4, model=4 // groups)
    model, _ = trained(family, distribution)
    assert_trained_as_one(model, family)
    if groups == 2:
        assert share_on_a_device(model) <= 0.56
        found = collectives(model, TOKENS[:8], distribution)
        assert sum(found.values()) <= FAMILIES[family][1]


@pytest.mark.parametrize(
    "name",
    [
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("own_transformer", "convolutional")
        ),
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("vision", "recurrent")),
    ],
)
def test_a_model_of_ones_own_trains_as_on_one_device(name):
    distribution = sharding.ModelParallel(4, model=2)
    model, _ = trained(name, distribution)
    assert_trained_as_one(model, name)
    if name != "recurrent":  # A recurrent layer stays complete.
        assert share_on_a_device(model) <= (0.6 if name in ("vision", "convolutional") else 0.56)
    if name in OWN_COLLECTIVES:
        found = collectives(model, data_of(name)[0][:8], distribution)
        assert sum(found.values()) <= OWN_COLLECTIVES[name]


@pytest.mark.slow
def test_accumulated_gradients_and_blocks_computed_again_train_as_on_one_device():
    settings = {"size": 4, "gradient_accumulation_steps": 3}
    distribution = sharding.ModelParallel(4, model=2)
    model, _ = trained("Llama3", distribution, prepare=training.remat, **settings)
    assert_trained_as_one(model, "Llama3", **settings)


@pytest.mark.parametrize(
    "shard",
    [
        pytest.param("weights", marks=pytest.mark.slow),
        pytest.param("optimizer", marks=pytest.mark.exhaustive),
    ],
)
def test_weights_or_the_optimizer_are_sharded_over_the_groups_besides(shard, monkeypatch):
    monkeypatch.setattr("kdpkit.sharding._shards.SMALL", 64)
    distribution = sharding.ModelParallel(4, model=2, shard=shard)
    model, _ = trained("Llama3", distribution)
    assert_trained_as_one(model, "Llama3")
    assert share_on_a_device(model) <= (0.3 if shard == "weights" else 0.56)
    of_optimizer = [v.value for v in model.optimizer.variables if v.value.size > 64]
    assert all(v.size == 4 * v.addressable_shards[0].data.size for v in of_optimizer)


def test_a_model_under_keras_own_model_parallelism_trains_as_on_one_device():
    mesh = keras.distribution.DeviceMesh((2, 2), ["batch", "model"], [f"cpu:{i}" for i in range(4)])
    layout_map = keras.distribution.LayoutMap(mesh)
    layout_map[".*embeddings"], layout_map[".*kernel"] = ("model", None), (None, "model")
    distribution = keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
    model, _ = trained("own_transformer", distribution)
    assert_trained_as_one(model, "own_transformer")
    kernel = next(v for v in model.weights if v.path.endswith("kernel"))
    assert kernel.value.sharding.spec == jax.sharding.PartitionSpec(None, "model")


@pytest.mark.parametrize("sizes", [(4, 2), pytest.param((8, 4), marks=pytest.mark.exhaustive)])
def test_convolutions_in_groups_train_as_on_one_device(sizes):
    devices, model = sizes
    model, _ = trained("in_groups", sharding.ModelParallel(devices, model=model))
    assert_trained_as_one(model, "in_groups")


def normalized(table, tokens):
    return table[tokens] * jax.lax.rsqrt(jnp.mean(table[tokens] ** 2, -1, keepdims=True) + 1e-6)


def depthwise(table, tokens, stride=1):
    images = (jnp.sin(table[:4].reshape(8, 8)) * tokens[:, :1, None])[..., None]
    kernel = table[4:8].reshape(8, 8)[:3, :3, None, None] * jnp.ones(4)
    shape = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "feature_group_count": 4}
    return jax.lax.conv_general_dilated(
        images * jnp.ones(4), kernel, (stride, stride), "SAME", **shape
    )


SUMS = {
    "lookup": lambda t, k: normalized(t, k[:3]),
    "of columns": lambda t, k: normalized(t, k[:3].T),
    "in a scan": lambda t, k: jax.lax.scan(
        lambda sums, i: (sums + normalized(t, k[:3] + i), None), 0.0 * t[k[:3]], jnp.arange(3)
    )[0],
    "under jit": jax.jit(lambda t, k: jax.checkpoint(normalized)(t, k[:5])),
    "segments": lambda t, k: jax.ops.segment_sum(normalized(t, k[:3, 0]), k[:3, 1], 64),
    # In numbers that do not round: JAX finds the entries that are the maximum by comparing, and XLA
    # may compute what it compares twice, with other instructions.
    "maximum": lambda t, k: t.at[k[:3, 1]].max(2 * t[k[:3, 0]] + 20),
    "of some columns": lambda t, k: (k[:3] * t[0, :8])[:, np.array([1, 1, 5])],
    "depthwise": depthwise,
    "strided": lambda t, k: depthwise(t, k, stride=2),
    "conditional": lambda t, k: jax.lax.cond(
        t[0, 0] > 9, lambda: 0 * depthwise(t, k), lambda: depthwise(t, k)
    ),
    # XLA aborts the process where it divides these unevenly.
    "sorted": lambda t, k: jnp.sort(t[k[:3, 0]], axis=0) * jnp.arange(3.0)[:, None],
    "median": lambda t, k: jnp.median(t[k[:5, 0]], axis=0),
    "along": lambda t, k: jnp.take_along_axis(t[k[:3, 0]], k[:3, :4] % 16, axis=1),
    "each example": lambda t, k: jax.vmap(lambda row: depthwise(t, row[None])[0])(k),
}


@pytest.mark.parametrize("shape", [(2, 2), (4, 2)])
@pytest.mark.parametrize("name", SUMS)
def test_sums_that_xla_computes_wrong_are_those_of_one_device(name, shape):
    """docs/upstream/xla_grouped_convolutions.py and xla_adds_up_padding.py."""
    random = np.random.default_rng(0)
    table = random.normal(size=(64, 16)).astype("float32")
    tokens = random.integers(1, 64, (24, 8)).astype("int32")

    def loss(table, tokens):
        return jnp.sum(jnp.sin(SUMS[name](table, tokens)))

    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    mesh = jax.sharding.Mesh(devices, ("batch", "model"))
    divide_sums(mesh)
    step = jax.jit(jax.value_and_grad(loss))
    expected = step(table, tokens)
    specs = jax.sharding.PartitionSpec("model"), jax.sharding.PartitionSpec("batch")
    placements = [jax.sharding.NamedSharding(mesh, spec) for spec in specs]
    sums = step(*jax.device_put((table, tokens), (*placements,)))
    for part, other in zip(sums, expected, strict=True):
        np.testing.assert_allclose(part, other, rtol=1e-4, atol=1e-4 * np.abs(other).max())


def test_a_model_that_was_built_before_is_shared_then():
    keras.utils.set_random_seed(0)
    model, distribution = own_transformer(), sharding.ModelParallel(4, model=2)
    data = ArrayBatches(data_of("own_transformer"), global_batch_size=8)
    model.compile("sgd", CROSS_ENTROPY)
    with distribution.scope():
        training.replica_exact(model).fit(data, verbose=0)
    assert share_on_a_device(model) <= 0.56


# Layouts.


@given(sizes=st.lists(st.integers(1, 12), min_size=2, max_size=4), devices=st.integers(1, 6))
def test_a_found_axis_is_one_that_the_devices_divide(sizes, devices):
    layer = layers.Layer()
    axis = Layouts(devices).axis(layer, "kernel", sizes)
    assert axis is None or sizes[axis] % devices == 0


def test_layouts_are_megatrons():
    """Worked out by hand: a block's first kernels lead to heads, its last ones back."""
    with sharding.ModelParallel(4, model=2).scope():
        model = own_transformer()
    specs = [tuple(v.value.sharding.spec) for v in model.weights if len(v.shape) > 1]
    to, back = (None, "model"), ("model",)
    assert [spec[: 1 + spec.index("model")] for spec in specs] == [back, *[to, back] * 4, to]


@pytest.mark.parametrize(
    ("widths", "leading_back"),
    [
        ("hhhh", [3]),  # queries, keys, values, output
        ("hhhhh", [4]),  # and a gate, or relative positions
        ("h2hhh", [3]),  # one kernel of keys and values, relative positions, output
        ("3hh", [1]),  # one kernel of all three, output
        ("hhhhhhhh", [3, 7]),  # attention, and over an encoder's output
        ("hhhhf", [3]),  # and a feed-forward network
        ("sh", [1]),  # one kernel of all three by heads, output
    ],
)
def test_a_square_kernel_leads_back_if_it_is_the_last_of_attention(widths, leading_back):
    kinds = re.findall(r"[23]?[hfs]", widths)
    sizes = {"h": WIDTH, "2h": 2 * WIDTH, "3h": 3 * WIDTH, "f": 4 * WIDTH}

    class Block(layers.Layer):
        def __init__(self):
            super().__init__()
            self.all = [
                layers.EinsumDense("abc,cde->abde", (None, 4, 3 * WIDTH // 4))
                if kind == "s"
                else layers.Dense(sizes[kind])
                for kind in kinds
            ]

        def call(self, x):
            return x + sum(ops.mean(each(x)) for each in self.all)

    with sharding.ModelParallel(4, model=2).scope():
        x = inputs = keras.Input((LENGTH,), dtype="int32")
        block = Block()
        keras.Model(inputs, block(layers.Embedding(VOCABULARY, WIDTH)(x)))
    specs = [tuple(each.kernel.value.sharding.spec) for each in block.all]
    assert [i for i, spec in enumerate(specs) if spec[0] == "model"] == leading_back


def test_what_lora_adds_is_shared_as_its_layers_kernel_is():
    with sharding.ModelParallel(4, model=2).scope():
        keras.utils.set_random_seed(0)
        model = LanguageModel("Llama3").backbone
        model.enable_lora(2)
    rows = sharding.describe(model).splitlines()
    of_lora = {re.sub(r" +", " ", row)[: row.index(")")] for row in rows if "lora" in row}
    # Of queries and values: (width, heads, rank) along the heads; (rank, head size) not at all.
    assert any("lora_kernel_a" in row and "(-, 'model', -)" in row for row in rows), of_lora
    assert any("lora_kernel_b" in row and "(-, -)" in row for row in rows), of_lora


def test_own_layouts_come_first_and_what_matches_nothing_raises():
    distribution = sharding.ModelParallel(
        4, model=2, layout_map={"embedding/embeddings": (None, "model")}
    )
    keras.utils.clear_session(free_memory=False)
    with distribution.scope():
        model = own_transformer()
        table = next(v for v in model.weights if v.path == "embedding/embeddings")
        assert tuple(table.value.sharding.spec) == (None, "model")
    late = keras.Sequential(
        [layers.Embedding(VOCABULARY, WIDTH, name="embedding"), layers.Dense(2)]
    )
    late.compile("sgd", "mse")
    late_layouts = sharding.ModelParallel(
        4, model=2, layout_map={"sequential.*/embeddings": (None, "model")}
    )
    with late_layouts.scope():  # a model that `fit` builds
        training.replica_exact(late).fit(TOKENS[:4], np.zeros((4, LENGTH, 2)), verbose=0)
    assert tuple(late.weights[0].value.sharding.spec) == (None, "model")
    wrong = sharding.ModelParallel(4, model=2, layout_map={"embeding/embeddings": ("model", None)})
    keras.utils.clear_session(free_memory=False)
    with wrong.scope():
        model = training.replica_exact(own_transformer())
        model.compile("sgd", CROSS_ENTROPY)
        with pytest.raises(ValueError, match=r"matches no variable.*nearest are embedding/embed"):
            model.fit(*data_of("own_transformer"), verbose=0)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"model": 3}, r"`model` must divide the devices.*model=3, devices=4"),
        ({"model": 0}, r"`model` must be.*model=0"),
        ({"model": 2, "shard": "all"}, r"shard='all'"),
        ({"model": 2, "layout_map": {"kernel": ("heads", None)}}, r"A layout is a tuple.*heads"),
        ({"model": 2, "layout_map": {"kernel": "model"}}, r"A layout is a tuple.*'model'"),
        ({"model": 2, "layout_map": {"kernel": ("model", "model")}}, r"names each once"),
        ({"model": 2, "layout_map": {"a(": (None,)}}, r"cannot be read.*pattern='a\('"),
        ({"model": 2, "layout_map": [1]}, r"maps patterns of paths"),
    ],
)
def test_impossible_meshes_are_one_sentence(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        sharding.ModelParallel(4, **arguments)


@pytest.mark.parametrize("layout", [("model",), (None, "model")])
def test_a_layout_that_does_not_fit_names_the_variable(layout):
    distribution = sharding.ModelParallel(4, model=2, layout_map={".*kernel": layout})
    with (
        distribution.scope(),
        pytest.raises(ValueError, match=r"dense/kernel.*\(64, 63\).*'model'"),
    ):
        keras.Sequential([keras.Input((64,)), layers.Dense(63, name="dense")])


def test_a_distribution_that_was_set_later_is_one_sentence():
    later = sharding.DataParallel(2)
    x, y = np.zeros((4, 3)), np.zeros((4, 1))

    def compiled():
        model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
        model.compile("sgd", "mse")
        return training.replica_exact(model)

    model = compiled()
    with later.scope(), pytest.raises(ValueError, match=r"Another distribution is set"):
        model.fit(x, y, verbose=0)
    with sharding.ModelParallel(4, model=2).scope():
        model = compiled()
    model.fit(x, y, verbose=0)  # in the scope in which the model was built
    for method in (model.evaluate, model.train_on_batch):
        model.train_function = None  # it was traced
        with later.scope(), pytest.raises(ValueError, match=r"Another distribution is set"):
            method(x, y)


def test_a_batch_axis_of_another_name_is_one_sentence():
    mesh = keras.distribution.DeviceMesh((2, 2), ["model", "data"], [f"cpu:{i}" for i in range(4)])
    layout_map = keras.distribution.LayoutMap(mesh)
    wrong = keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="data")
    with pytest.raises(ValueError, match=r'Batches are sharded over the axis "batch".*data'):
        as_mesh(wrong)


def test_a_large_variable_that_stays_complete_is_told_once():
    with (
        pytest.warns(
            UserWarning, match=r"`kernel` of the Dense .*\(71, 73\).*stays complete"
        ) as shown,
        sharding.ModelParallel(4, model=2).scope(),
    ):
        keras.Sequential([keras.Input((71,)), layers.Dense(73), layers.Dense(71)])
    assert len(shown) == 1


def test_variables_are_described_with_what_a_device_holds():
    with sharding.ModelParallel(4, model=2).scope():
        model = testing.tiny_classifier()
        model.compile("adam", CROSS_ENTROPY)
        model.optimizer.build(model.trainable_variables)
    table = sharding.describe(model).splitlines()
    assert table[0].split() == ["variables", "count", "shape", "layout", "MiB", "on", "a", "device"]
    assert [row.split()[0] for row in table[-2:]] == ["all", "optimizer"]
