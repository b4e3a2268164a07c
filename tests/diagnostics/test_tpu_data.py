"""What the data say, on both backends: arrays and `PyDataset`."""

import json

import hypothesis
import keras
import numpy as np
import pytest
from hypothesis import strategies as st

from kdpkit import batches, testing, training
from kdpkit.diagnostics import check_tpu

X, Y = testing.toy_classification(192, features=8)


def rules(report, *levels):
    levels = levels or ("refused", "slow")
    return {finding.rule for finding in report.findings if finding.level in levels}


def checked(*data, size=64, **settings):
    """Check arrays, cut into batches without a remainder."""
    data = data[0] if len(data) == 1 else data
    return check_tpu(batches.ArrayBatches(data, global_batch_size=size), **settings)


def test_full_batches_of_float32_and_int32_are_clean():
    report = checked(X, Y)
    assert report.clean
    assert rules(report) == set()
    head = str(report).splitlines()[0]
    assert head == "Nothing found (looked at: data); not proven on a TPU."


@pytest.mark.parametrize(
    ("kind", "narrow"), [("int64", "int32"), ("float64", "float32"), ("uint64", "uint32")]
)
def test_64_bits_in_data_are_found_and_named(kind, narrow):
    report = checked({"ids": X.astype(kind)}, Y)
    (finding,) = (f for f in report.findings if f.level != "note")
    assert (finding.rule, finding.level) == ("64-bit", "slow")
    assert finding.where == "train, x['ids']"
    assert narrow in finding.remedy


def test_text_is_refused_and_the_step_is_not_compiled():
    model = testing.tiny_classifier(features=8)
    model.compile("sgd", "mse")
    report = checked(X.astype("str"), Y, model=model)
    assert rules(report) == {"string"}
    assert "unchecked-step" in rules(report, "note")
    assert "step" not in report.checked


@hypothesis.given(st.integers(1, 64), st.integers(1, 192))
def test_a_batch_is_clean_exactly_if_every_core_gets_a_multiple_of_eight_rows(replicas, rows):
    report = checked(X, Y, size=rows, replicas=replicas)
    expected = set()
    if rows % replicas:
        expected = {"uneven-batch"}
    elif rows // replicas % 8:
        expected = {"tile-batch"}
    assert rules(report) == expected


def test_the_waste_of_a_core_that_gets_6_rows_is_a_quarter():
    (finding,) = (f for f in checked(X, Y, size=48).findings if f.rule == "tile-batch")
    assert "25%" in finding.problem
    assert "64" in finding.remedy


def test_the_nearest_batches_that_fit_are_named():
    (finding,) = (f for f in checked(X, Y, size=100).findings if f.rule == "uneven-batch")
    assert "64 or 128" in finding.remedy


@pytest.mark.parametrize("data", [(X[:100], Y[:100]), X[:100]], ids=["pair", "inputs"])
def test_a_smaller_last_batch_of_arrays_is_found(data):
    assert "dynamic-batch" in rules(check_tpu(data, batch_size=64))
    assert "dynamic-batch" not in rules(check_tpu(data, batch_size=50, replicas=1))


def test_arrays_are_cut_as_fit_cuts_them_into_32_rows():
    assert rules(check_tpu((X, Y), replicas=4)) == set()
    assert rules(check_tpu((X, Y), replicas=8)) == {"tile-batch"}


@pytest.mark.parametrize(("remainder", "found"), [("keep", True), ("drop", False), ("pad", False)])
def test_array_batches_are_full_unless_they_keep_the_remainder(remainder, found):
    data = batches.ArrayBatches((X[:100], Y[:100]), global_batch_size=64, remainder=remainder)
    assert ("dynamic-batch" in rules(check_tpu(data))) == found


def test_looking_at_batches_leaves_the_epoch_where_it_was():
    data = batches.ArrayBatches((X, Y), global_batch_size=64, seed=0)
    check_tpu(data)
    data.on_epoch_end()  # as Keras does after it has built a model
    assert data.epoch == 0


class Lengths(keras.utils.PyDataset):
    """Rows of varying length, as without padding."""

    def __init__(self, *lengths):
        super().__init__()
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        if self.lengths[index] is None:
            raise OSError("the disk is gone")
        return np.zeros((64, self.lengths[index]), "float32"), np.zeros(64, "int32")


def test_rows_of_varying_length_are_refused_and_of_one_length_are_not():
    (finding,) = (f for f in check_tpu(Lengths(5, 9)).findings if f.level == "refused")
    assert (finding.rule, finding.where) == ("dynamic-shape", "train, x")
    assert "(64, None)" in finding.problem
    assert rules(check_tpu(Lengths(5, 5))) == set()


def test_validation_data_are_looked_at_too():
    report = check_tpu((X, Y), validation_data=(X, Y.astype("int64")), batch_size=64)
    (finding,) = (f for f in report.findings if f.level != "note")
    assert (finding.rule, finding.where) == ("64-bit", "validation, y")


@pytest.mark.jax
def test_an_uneven_last_batch_is_a_note_where_training_takes_it():
    model = testing.tiny_classifier(features=8)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    loop = training.TrainingLoop(model, optimizer="sgd", loss=loss)
    data = batches.ArrayBatches((X[:100], Y[:100]), global_batch_size=64, remainder="keep")
    report = check_tpu(data, model=loop)
    assert report.clean
    assert rules(report, "note") == {"dynamic-batch"}


def test_the_report_as_json_says_that_nothing_is_proven():
    report = json.loads(json.dumps(checked(X.astype("float64"), Y).to_dict()))
    assert report["clean"] is False
    assert report["proven_on_tpu"] is False
    assert report["replicas"] == 8
    assert report["backend"] == keras.backend.backend()
    assert report["findings"][0]["rule"] == "64-bit"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({}, "nothing to check"),
        ({"dataset": "data"}, "`dataset` must be a `tf.data.Dataset`.*'str'"),
        ({"dataset": iter([X])}, "`dataset` must be"),
        ({"dataset": (X, Y), "replicas": 0}, "`replicas` must be a positive integer"),
        ({"dataset": Lengths()}, "is empty"),
        ({"dataset": Lengths(None)}, "fails when it is to give a batch: OSError: the disk is gone"),
        ({"dataset": (X, Y[:3])}, "same rows"),
        ({"dataset": (X, Y), "model": "model"}, "`model` must be a Keras model"),
        ({"dataset": (X, Y), "model": keras.Sequential()}, "is not compiled"),
    ],
)
def test_what_cannot_be_checked_is_one_sentence(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_tpu(**arguments)
