"""What `check_tpu` finds in data of all kinds, on both backends."""

import hypothesis
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from kdpkit import batches, testing, training
from kdpkit.diagnostics import check_tpu

Dataset = tf.data.Dataset
X, Y = testing.toy_classification(192, features=8)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def rules(report):
    return {finding.rule: finding.level for finding in report.findings if finding.level != "note"}


def compiled():
    model = testing.tiny_classifier(features=8)
    model.compile("sgd", LOSS)
    return model


class Given(keras.utils.PyDataset):
    def __init__(self, *batches):
        super().__init__()
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        if self.batches[index] is None:
            raise OSError("the disk is gone")
        return self.batches[index]


def of_length(length):
    return np.zeros((64, length), "float32"), np.zeros(64, "int32")


def objects(values):
    array = np.empty(64, object)
    array[:] = values
    return Given((array, Y[:64]))


def arrays(*data, size=64):
    return batches.ArrayBatches(data, global_batch_size=size)


def stages(*, drop_remainder=True):
    return Dataset.from_tensor_slices((X, Y)).batch(64, drop_remainder=drop_remainder)


def sequences():
    return Dataset.range(1, 65).map(lambda n: tf.range(tf.cast(n, tf.int32)))


ERROR, SLOW = "error", "slow"
DATA = {
    "arrays": (lambda: arrays(X, Y), {}),
    "float64 of a part": (lambda: arrays({"ids": X.astype("float64")}, Y), {"64-bit": SLOW}),
    "text in objects": (lambda: objects(["a"] * 64), {"string": ERROR}),
    "lists in objects": (
        lambda: objects([np.zeros(1 + row % 2) for row in range(64)]),
        {"dynamic-shape": ERROR},
    ),
    "lengths of arrays": (lambda: Given(of_length(5), of_length(9)), {"dynamic-shape": ERROR}),
    "full batches": (stages, {}),
    "a part that is None": (lambda: stages().map(lambda x, _: (x, None)), {}),
    "text": (
        lambda: Dataset.from_tensors("words").repeat(64).batch(64, drop_remainder=True),
        {"string": ERROR},
    ),
    "a smaller last batch": (lambda: stages(drop_remainder=False), {"dynamic-batch": ERROR}),
    "ragged": (lambda: sequences().ragged_batch(64, drop_remainder=True), {"dynamic-shape": ERROR}),
    "a shape that Python hides": (
        lambda: stages().map(lambda x, y: (tf.numpy_function(lambda a: a, [x], tf.float32), y)),
        {"dynamic-shape": ERROR},
    ),
}


@pytest.mark.parametrize(("make", "expected"), DATA.values(), ids=DATA)
def test_a_dataset_has_the_findings_it_should_and_no_more(make, expected):
    report = check_tpu(make())
    assert rules(report) == expected
    assert report.clean == (not expected)
    assert all(f.where.startswith("train, x") for f in report.findings if f.rule in ("64-bit",))


@hypothesis.given(st.integers(1, 64), st.integers(1, 192))
def test_a_batch_is_clean_exactly_if_every_core_gets_a_multiple_of_eight(replicas, examples):
    report = check_tpu(arrays(X, Y, size=examples), replicas=replicas)
    expected = {}
    if examples % replicas:
        expected = {"uneven-batch": "error"}
    elif examples // replicas % 8:
        expected = {"tile-batch": "slow"}
    assert rules(report) == expected


def test_arrays_are_cut_as_fit_cuts_them():
    assert rules(check_tpu((X, Y), replicas=4)) == {}  # into 32
    assert rules(check_tpu((X, Y), replicas=8)) == {"tile-batch": "slow"}
    assert "dynamic-batch" in rules(check_tpu(X[:100], batch_size=64))
    assert "dynamic-batch" not in rules(check_tpu((X[:100], Y[:100]), batch_size=50, replicas=1))


def test_validation_data_are_checked_in_batches_of_their_own():
    report = check_tpu((X, Y), validation_data=(X[:150], Y[:150]), batch_size=64)
    found = {(f.rule, f.where) for f in report.findings if f.level != "note"}
    assert found == {("dynamic-batch", "validation")}
    assert report.checked == ("train", "validation")


def test_looking_at_data_ends_no_epoch():
    data = batches.ArrayBatches((X, Y), global_batch_size=64, seed=0)
    check_tpu(data)
    data.on_epoch_end()  # as Keras does after it has built a model
    assert data.epoch == 0


@pytest.mark.jax
def test_an_uneven_last_batch_is_a_note_where_training_takes_it():
    data = batches.ArrayBatches((X[:100], Y[:100]), global_batch_size=64, remainder="keep")
    report = check_tpu(data, model=training.replica_exact(compiled()))
    assert [(f.rule, f.level) for f in report.findings] == [("dynamic-batch", "note")]
    assert rules(check_tpu(data, model=compiled())) == {"dynamic-batch": "error"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"dataset": iter([X])}, "`dataset` must be a `tf.data.Dataset`.*a generator"),
        ({"dataset": Given((X, Y, Y, Y))}, r"must have batches of arrays `x`, `\(x, y\)` or "),
        ({"dataset": Given()}, "is empty"),
        ({"dataset": Given(None)}, "raises before its first batch: OSError: the disk is gone"),
        ({"dataset": stages().unbatch()}, "has single examples"),
        ({"dataset": (X, Y), "model": keras.Sequential()}, "is not compiled"),
    ],
)
def test_what_cannot_be_checked_is_one_sentence(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_tpu(**arguments)
