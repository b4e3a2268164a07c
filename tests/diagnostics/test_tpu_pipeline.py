"""What is found in tf.data pipelines, on TensorFlow and on JAX."""

import numpy as np
import pytest
import tensorflow as tf

from kdpkit import pipelines, testing
from kdpkit.diagnostics import check_tpu
from tests.diagnostics.test_tpu_data import rules

Dataset = tf.data.Dataset
X, Y = testing.toy_classification(192, features=8)


def dataset(*, drop_remainder=True):
    return Dataset.from_tensor_slices((X, Y)).batch(64, drop_remainder=drop_remainder)


def ids():
    return Dataset.range(64).batch(64, drop_remainder=True)


def sequences():
    return Dataset.range(1, 65).map(lambda n: tf.range(tf.cast(n, tf.int32)))


def by_python(x, y):
    moved = tf.numpy_function(lambda a: a + np.float32(1), [x], tf.float32)
    return tf.ensure_shape(moved, x.shape), y


def from_generator():
    spec = (tf.TensorSpec((64, 8), tf.float32), tf.TensorSpec((64,), tf.int32))
    return Dataset.from_generator(lambda: iter([(X[:64], Y[:64])]), output_signature=spec)


DATASETS = {
    "full batches": (dataset, {}),
    "a part that is None": (lambda: dataset().map(lambda x, _: (x, None)), {}),
    "ids of 32 bits": (lambda: ids().map(lambda n: tf.cast(n, tf.int32)), {}),
    "ids of 64 bits": (ids, {"64-bit": "slow"}),
    "text": (
        lambda: Dataset.from_tensors("words").repeat(64).batch(64, drop_remainder=True),
        {"string": "error"},
    ),
    "a smaller last batch": (lambda: dataset(drop_remainder=False), {"dynamic-batch": "error"}),
    "lengths": (
        lambda: sequences().padded_batch(64, drop_remainder=True),
        {"dynamic-shape": "error"},
    ),
    "one length": (
        lambda: sequences().padded_batch(64, padded_shapes=[128], drop_remainder=True),
        {},
    ),
    "ragged": (
        lambda: sequences().ragged_batch(64, drop_remainder=True),
        {"dynamic-shape": "error"},
    ),
    "Python": (lambda: dataset().map(by_python), {"python": "slow"}),
    "Python within a function": (
        lambda: dataset().flat_map(lambda *batch: Dataset.from_tensors(batch).map(by_python)),
        {"python": "slow"},
    ),
    "a generator": (from_generator, {"python": "slow"}),
    "a shape that Python hides": (
        lambda: dataset().map(lambda x, y: (tf.numpy_function(lambda a: a, [x], tf.float32), y)),
        {"python": "slow", "dynamic-shape": "error"},
    ),
}


@pytest.mark.parametrize(("make", "expected"), DATASETS.values(), ids=DATASETS)
def test_a_dataset_has_the_findings_it_should_and_no_more(make, expected):
    found = {f.rule: f for f in check_tpu(make()).findings if f.level != "note"}
    assert {rule: finding.level for rule, finding in found.items()} == expected
    assert all(finding.where.startswith("train") for finding in found.values())


def test_what_train_pipeline_and_eval_pipeline_give_is_clean():
    examples = Dataset.from_tensor_slices((X, Y))
    sizes = {"global_batch_size": 64, "replicas": 8}
    train = pipelines.train_pipeline(examples, augment=lambda batch, _: batch, **sizes)
    held_out = pipelines.eval_pipeline(examples.take(100), **sizes)
    assert rules(check_tpu(train, validation_data=held_out)) == set()
    padding = pipelines.PipelineConfig(remainder="pad")
    assert rules(check_tpu(pipelines.train_pipeline(examples, padding, **sizes))) == set()


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
