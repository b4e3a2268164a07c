"""What is found in tf.data pipelines, on TensorFlow and on JAX."""

import numpy as np
import pytest
import tensorflow as tf

from kdpkit import pipelines, testing
from kdpkit.diagnostics import check_tpu
from tests.diagnostics.test_tpu_data import rules

X, Y = testing.toy_classification(192, features=8)


def dataset(*, drop_remainder=True):
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(64, drop_remainder=drop_remainder)


def only(report):
    (finding,) = (finding for finding in report.findings if finding.level != "note")
    return finding


def test_full_batches_are_clean():
    assert rules(check_tpu(dataset())) == set()


def test_what_train_pipeline_and_eval_pipeline_give_is_clean():
    examples = tf.data.Dataset.from_tensor_slices((X, Y))
    sizes = {"global_batch_size": 64, "replicas": 8}
    train = pipelines.train_pipeline(examples, augment=lambda batch, _: batch, **sizes)
    held_out = pipelines.eval_pipeline(examples.take(100), **sizes)
    assert rules(check_tpu(train, validation_data=held_out)) == set()
    padding = pipelines.PipelineConfig(remainder="pad")
    assert rules(check_tpu(pipelines.train_pipeline(examples, padding, **sizes))) == set()


def test_batches_without_drop_remainder_are_findings():
    finding = only(check_tpu(dataset(drop_remainder=False)))
    assert (finding.rule, finding.level) == ("dynamic-batch", "error")
    assert "drop_remainder=True" in finding.remedy


def test_lengths_that_vary_are_an_error_until_they_are_padded_to_one():
    lines = tf.data.Dataset.range(1, 65).map(lambda n: tf.ones([n]))
    finding = only(check_tpu(lines.padded_batch(64, drop_remainder=True)))
    assert (finding.rule, finding.level) == ("dynamic-shape", "error")
    assert "(64, None)" in finding.problem
    fixed = lines.padded_batch(64, padded_shapes=[128], drop_remainder=True)
    assert rules(check_tpu(fixed)) == set()


def test_a_part_that_is_none_is_not_checked():
    report = check_tpu(dataset().map(lambda x, _: (x, None)))
    assert rules(report) == set()


def test_ragged_batches_are_findings():
    lines = tf.data.Dataset.range(1, 65).map(lambda n: tf.range(tf.cast(n, tf.int32)))
    report = check_tpu(lines.ragged_batch(64, drop_remainder=True))
    assert {f.rule for f in report.findings if f.level == "error"} == {"dynamic-shape"}


def test_text_and_token_ids_of_64_bits_are_found():
    text = tf.data.Dataset.from_tensors("words").repeat(64).batch(64, drop_remainder=True)
    assert only(check_tpu(text)).rule == "string"
    ids = tf.data.Dataset.range(64).batch(64, drop_remainder=True)
    assert only(check_tpu(ids)).rule == "64-bit"
    assert rules(check_tpu(ids.map(lambda ids: tf.cast(ids, tf.int32)))) == set()


def by_python(x, y):
    moved = tf.numpy_function(lambda a: a + np.float32(1), [x], tf.float32)
    return tf.ensure_shape(moved, x.shape), y


def from_generator():
    spec = (tf.TensorSpec((64, 8), tf.float32), tf.TensorSpec((64,), tf.int32))
    return tf.data.Dataset.from_generator(lambda: iter([(X[:64], Y[:64])]), output_signature=spec)


@pytest.mark.parametrize(
    "make",
    [
        lambda: dataset().map(by_python),
        lambda: dataset().flat_map(
            lambda x, y: tf.data.Dataset.from_tensors((x, y)).map(by_python)
        ),
        from_generator,
    ],
    ids=["map", "inside a function", "from_generator"],
)
def test_python_in_the_pipeline_is_found(make):
    finding = only(check_tpu(make()))
    assert (finding.rule, finding.level) == ("python", "slow")
    assert finding.where.startswith("train: ")


def test_the_shape_that_python_hides_is_found_too():
    hidden = dataset().map(lambda x, y: (tf.numpy_function(lambda a: a, [x], tf.float32), y))
    assert rules(check_tpu(hidden)) == {"python", "dynamic-shape"}


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: dataset().take(0), "is empty"),
        (lambda: dataset().unbatch(), "has single examples"),
        (
            lambda: dataset().map(lambda x, _: tf.debugging.check_numerics(x / 0, "no number")),
            "raises before its first batch: InvalidArgumentError: .*no number",
        ),
    ],
    ids=["empty", "unbatched", "failing"],
)
def test_a_dataset_that_gives_no_batch_is_one_sentence(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_tpu(make())
