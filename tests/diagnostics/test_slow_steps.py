"""What makes a step slow: found in a program that has the fault, and not in its twin."""

import functools
import math
import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops

from kdpkit import batches, strategies
from kdpkit.diagnostics import check_input, check_speed, plan_memory
from kdpkit.diagnostics._doctor import slow_steps, speed
from kdpkit.diagnostics._doctor.slow_steps import Device
from kdpkit.experiment import text
from kdpkit.training import remat, replica_exact, without_logits
from tests.training.test_programs import ALL

CPU, GPU, TPU = Device("cpu", False, 10.0), Device("gpu", True, 150.0), Device("tpu", True, 150.0)
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
TOKENS = np.zeros((16, 512), "int32")
IS_JAX = keras.backend.backend() == "jax"


def planned(test):
    return pytest.mark.jax(pytest.mark.needs(jax="0.10", reason="memory is planned")(test))


@pytest.fixture(autouse=True)
def settings():
    before = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(before)
    keras.config.enable_flash_attention()


class Attention(layers.Layer):
    """An attention as many write it out."""

    def call(self, x, value, use_causal_mask):
        del value, use_causal_mask
        x = ops.reshape(x, (-1, x.shape[1], 4, 16))
        scores = ops.einsum("bqnd,bknd->bnqk", x, x) / math.sqrt(x.shape[-1])
        x = ops.einsum("bnqk,bknd->bqnd", ops.softmax(scores), x)
        return ops.reshape(x, (-1, x.shape[1], 64))


def language_model(layer=layers.MultiHeadAttention, *, policy="mixed_bfloat16", **settings):
    """Build a model whose attention a kernel could compute, if no setting forbids it."""
    keras.config.set_dtype_policy(policy)
    length, size = settings.pop("length", 512), settings.pop("size", 100)
    settings = {"num_heads": 4, "key_dim": 16} | settings if layer is not Attention else {}
    tokens = keras.Input((length,), dtype="int32")
    x = layers.Embedding(size, 64)(tokens)
    x = layer(**settings, name="attention")(x, x, use_causal_mask=True)
    model = keras.Model(tokens, layers.Dense(size, name="last")(x))
    model.compile("adam", CROSS_ENTROPY)
    return model


def found(model, device=GPU, batch=(TOKENS, TOKENS)):
    return {each.rule: each for each in slow_steps.of_step(model, batch, device)}


# Attention that computes all scores.

FAULTS = {
    "some of them are dropped": {"dropout": 0.1},
    "the layer computes them itself": {"layer": Attention},
    "do not take float32": {"policy": "float32"},
    "heads have 12 numbers": {"key_dim": 12},
    "no mask of odd length": {"length": 513},
}


@pytest.mark.jax
@pytest.mark.parametrize("reason", FAULTS)
def test_attention_with_all_scores_is_found_with_its_reason_and_bytes(reason):
    fault = FAULTS[reason]
    shape = 16, 4, fault.get("length", 512), fault.get("length", 512)
    tokens = np.zeros((16, shape[-1]), "int32")
    finding = found(language_model(**fault), batch=(tokens, tokens))["attention"]
    kept = 2 + 2 + 1 if "dropout" in fault else 4 if "policy" in fault else 2
    size = f"{kept * math.prod(shape) / 2**20:.0f} MiB"
    assert f"{[*shape]}, and {size} of a batch" in finding.problem
    assert reason in finding.problem
    assert (finding.level, finding.where) == ("slow", "functional/attention")


@pytest.mark.jax
def test_what_a_device_decides_is_found_on_that_device():
    twin = language_model()
    assert found(twin, CPU) == {}  # on a GPU a kernel would compute it
    assert "this device or its cuDNN" in found(twin)["attention"].problem
    assert "no mask that depends on the data" in found(twin, TPU)["attention"].problem
    assert found(language_model(Attention), CPU)["attention"].level == "note"
    keras.config.disable_flash_attention()
    assert "enable_flash_attention()" in found(language_model())["attention"].remedy


@pytest.mark.jax
def test_a_kernel_of_cudnn_is_seen_in_the_program(monkeypatch):
    """JAX traces it for a GPU, which is here one that is not there."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda _: False)
    model = language_model()
    assert found(model) == {}
    assert text.attention(model, (TOKENS, TOKENS)) == "Attention: fused in 1 layer"
    assert "float32" in found(language_model(policy="float32"))["attention"].problem


def test_a_cpu_and_tensorflow_have_no_fused_attention_and_say_so():
    line = text.attention(language_model(), (TOKENS[:2], TOKENS[:2]))
    why = "a CPU has no kernel for it."
    assert line == f"Attention: all scores, [2, 4, 512, 512], in 1 layer: {why}"
    if not IS_JAX:
        finding = found(language_model(), CPU)["attention"]
        assert (finding.level, finding.remedy) == ("note", "Train with KERAS_BACKEND=jax.")


@planned
def test_without_its_dropout_an_attention_needs_less_memory():
    def plan(rate):
        data = batches.ArrayBatches((TOKENS, TOKENS), global_batch_size=4)
        model = language_model(dropout=rate, policy="float32")
        return plan_memory(lambda: (data, model), memory="1GiB")

    dropping, twin = plan(0.1), plan(0.0)
    assert "dropped" in dropping.findings[0].problem
    assert "    Remedy: Build the attention with `dropout=0.0`" in str(dropping)
    saved = dropping.chosen.activations - twin.chosen.activations
    assert saved >= 4 * 4 * 512**2 * (4 + 1)


# Logits, precision, and batches.


def test_logits_of_a_large_vocabulary_are_found_and_those_in_chunks_are_not():
    model = language_model(size=20_000, policy="float32")
    report = check_input((TOKENS, TOKENS), model=model, batch_size=16)
    (finding,) = (each for each in report.findings if each.rule == "logits")
    assert "20,000 tokens are held at 8,192 positions at once" in finding.problem
    assert f"{20_000 * 8192 * 8 / 2**30:.3g} GiB" in finding.problem
    assert "logits" not in found(without_logits(model))
    assert "logits" not in found(language_model(size=100))


@planned
def test_a_model_without_logits_is_planned_without_them():
    def planned_bytes(prepare):
        data = batches.ArrayBatches((TOKENS, TOKENS), global_batch_size=16)
        make = functools.partial(language_model, size=20_000, policy="float32")
        return plan_memory(lambda: (data, prepare(make())), memory="8GiB").uses[0].total

    assert planned_bytes(lambda model: model) - planned_bytes(without_logits) > 20_000 * 8192 * 4


def dense(policy="float32"):
    keras.config.set_dtype_policy(policy)
    model = keras.Sequential([keras.Input((4096,)), layers.Dense(4096)], name="wide")
    model.compile("adam", "mse")
    return model


def test_float32_is_found_on_a_device_that_has_bfloat16_and_only_there():
    batch = (np.zeros((4096, 4096), "float32"),) * 2
    finding = found(dense(), GPU, batch)["float32"]
    assert (finding.level, finding.where) == ("slow", "wide")
    assert 'set_dtype_policy("mixed_bfloat16")' in finding.remedy
    assert found(dense(), CPU, batch) == found(dense("mixed_bfloat16"), GPU, batch) == {}


def test_batches_too_small_for_the_update_are_found_and_larger_ones_are_faster(monkeypatch):
    monkeypatch.setattr(speed, "_ROUNDS", 1)
    model, data = dense(), np.zeros((64, 4096), "float32")
    small, large = (
        check_speed((data, data), model=model, batch_size=size, seconds=0.2) for size in (2, 64)
    )
    (finding,), others = (
        [finding for finding in report.findings if finding.rule != "input"]
        for report in (small, large)
    )
    assert (finding.rule, small.clean, others) == ("small-batch", False, [])
    assert f"moves {4 * (5 + 2 * 2) * 4096 * 4097 / 2**20:.0f} MiB" in finding.problem
    assert "batches of 64 examples" in finding.remedy
    assert 2 / small.step_seconds < 64 / large.step_seconds / 2


def test_blocks_computed_again_hold_less_of_the_scores():
    class SelfAttention(layers.Layer):
        def call(self, x):
            return ops.softmax(ops.matmul(x, ops.transpose(x, (0, 2, 1)))) @ x

    inputs = keras.Input((512, 8))
    blocks = (keras.Sequential([SelfAttention()]) for _ in range(2))
    model = keras.Model(inputs, functools.reduce(lambda x, block: block(x), blocks, inputs))
    model.compile("sgd", "mse")
    batch = (np.zeros((256, 512, 8), "float32"),) * 2
    assert "512 MiB" in found(model, CPU, batch)["attention"].problem
    assert "256 MiB" in found(remat(model), CPU, batch)["attention"].problem


# No false alarm.

STEP = {"step", "outputs", "attention", "logits", "float32", "small-batch"}


def test_programs_of_others_are_clean():
    checked = 0
    for program in ALL:
        if keras.backend.backend() in program.backends and checked < 20:
            keras.utils.clear_session(free_memory=False)
            model, data = program.build(), program.data()
            parts = data["x"], data.get("y"), data.get("sample_weight")
            parts = parts[0] if all(part is None for part in parts[1:]) else parts
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what JAX truncates
                report = check_input(parts, model=model, batch_size=data.get("batch_size"))
            expected = {"outputs"} if program.name.startswith("softmax called logits") else set()
            found = {each.rule for each in report.findings} & STEP
            assert found == expected, (program.name, str(report))
            checked += "step" in report.checked
    assert checked >= (10 if IS_JAX else 20)


def test_a_check_changes_nothing_of_what_is_trained_later():
    def trained(*, checked):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((8,)), layers.Dropout(0.5), layers.Dense(4)])
        model.compile("adam", CROSS_ENTROPY)
        x = np.random.default_rng(0).normal(size=(50, 8)), np.arange(50) % 4  # also in float64
        if checked:
            assert check_input(x, model=model).checked[-1] == "step"
        return model.fit(*x, epochs=2, verbose=0).history["loss"]

    assert trained(checked=True) == trained(checked=False)


def test_what_a_tokenizer_has_prepared_is_not_prepared_again():
    class Task(keras.Model):
        preprocessed = 0

        def preprocess_samples(self, *_):
            self.preprocessed += 1
            return {"ids": np.ones((2, 3), "float32")}, np.zeros((2, 1), "float32")

    ids = keras.Input((3,), name="ids")
    model = Task({"ids": ids}, layers.Dense(1)(ids))
    model.compile("sgd", "mse")
    for x, count in ((np.array(["a", "b"]), 1), ({"ids": np.ones((2, 3), "float32")}, 1)):
        assert check_input((x, np.zeros((2, 1))), model=model, batch_size=2).clean
        assert model.preprocessed == count


def test_an_attention_beside_a_dropout_of_its_shape_and_scores_after_an_ellipsis():
    inputs = keras.Input((512, 512))
    x = layers.Dropout(0.1)(inputs)
    x = layers.Lambda(lambda x: ops.softmax(ops.einsum("...td,...sd->...ts", x, x)) @ x)(x)
    model = keras.Model(inputs, layers.Dense(512, "mish")(x))
    model.compile("adam", "mse")
    batch = (np.zeros((32, 512, 512), "float32"),) * 2
    finding = found(model, CPU, batch)["attention"]
    assert "dropped" not in finding.problem
    assert f"and {32 * 512**2 * 4 / 2**20:.0f} MiB of" in finding.problem


def test_shifted_logits_are_found_and_outputs_that_are_no_vocabulary_are_not():
    tokens = keras.Input((128,), dtype="int32")
    logits = layers.Dense(20_000)(layers.Embedding(20_000, 8)(tokens))
    batch = np.zeros((16, 128), "int32"), np.zeros((16, 127), "int32")
    model = keras.Model(tokens, logits[:, :-1])
    model.compile("adam", CROSS_ENTROPY)
    assert "at 2,032 positions at once" in found(model, CPU, batch)["logits"].problem
    pixels = keras.Sequential([keras.Input((8,)), layers.Dense(12_288, "sigmoid")])
    pixels.compile("adam", "binary_crossentropy")
    assert found(pixels, CPU, (np.zeros((512, 8)), np.zeros((512, 12_288)))) == {}


def test_a_table_that_a_batch_looks_little_up_in_is_no_small_batch():
    items = keras.Input((1,), dtype="int32")
    x = layers.Flatten()(layers.Embedding(600_000, 32)(items))
    model = keras.Model(items, layers.Dense(1)(layers.Dense(64)(x)))
    model.compile("adam", "mse")
    assert found(model, CPU, (np.zeros((256, 1), "int32"), np.zeros((256, 1)))) == {}


def test_a_step_that_raises_is_a_finding_and_one_of_its_own_is_not_looked_at():
    class Own(keras.Sequential):
        def train_step(self, *arguments):
            return super().train_step(*arguments)

    class Prepared(keras.Sequential):
        def fit(self, *arguments, **settings):
            return super().fit(*arguments, **settings)

    x = np.zeros((32, 8), "float32")
    for kind, rules, checked, eager in (
        (keras.Sequential, ["step"], "step", False),
        (keras.Sequential, [], "train", True),
        (Own, [], "train", False),
        (Prepared, [], "train", False),
    ):
        model = kind([layers.Dense(4), layers.Reshape((3,))])
        model.compile("adam", "mse", run_eagerly=eager)
        report = check_input((x, x), model=model)
        assert [each.rule for each in report.findings] == rules
        assert report.checked[-1] == checked


class Sorted(layers.Layer):
    def call(self, x):
        import tensorflow as tf

        return tf.sort(x, axis=0)  # over the examples


@pytest.mark.tensorflow
@pytest.mark.parametrize("middle", [Sorted, layers.BatchNormalization])
def test_what_one_device_computes_for_all_is_found(middle):
    with strategies.select_strategy("mirrored", devices=2).scope():
        model = keras.Sequential([keras.Input((64,)), middle(), layers.Dense(2)])
        model.compile("adam", "mse")
        replica_exact(model)
    report = check_input((np.zeros((32, 64)), np.zeros((32, 2))), model=model, batch_size=16)
    places = [each.problem for each in report.findings if each.rule == "division"]
    assert len(places) == (middle is Sorted)
    assert all("at test_slow_steps.py:" in place for place in places)
