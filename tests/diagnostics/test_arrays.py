"""What `check_input` finds in arrays and other data without stages: faults, and correct twins."""

import keras
import numpy as np
import pytest

from kdpkit import batches, testing, training
from kdpkit.diagnostics import check_input

X, Y = testing.toy_classification(64)
SPARSE = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
ONE_HOT = keras.losses.CategoricalCrossentropy(from_logits=True)
BINARY = keras.losses.BinaryCrossentropy(from_logits=True)


def compiled(loss=SPARSE, classes=3):
    model = testing.tiny_classifier(classes=classes)
    model.compile("sgd", loss)
    return model


def changed(array, index, value):
    array = array.copy()
    array[index] = value
    return array


def case(data, *expected, loss=SPARSE, outputs=3, **settings):
    """Return data, a model's loss and outputs, other arguments, and the rules of findings."""
    return data, loss, outputs, settings, [*expected]


IN_ORDER = np.sort(Y)
VECTOR, COLUMN = np.zeros((64, 3), "float32"), np.zeros((64, 1), "float32")
IGNORING = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
PROBABILITIES = np.linspace(0, 1, 64)[:, None]
SPLIT = {"validation_split": 0.2}
CASES = {
    "arrays": case((X, Y)),
    "64 bits, which Keras casts": case((X.astype("float64"), Y.astype("int64"))),
    "no labels": case(X, "step"),
    "a NaN": case((changed(X, (5, 2), np.nan), Y), "not-finite"),
    "an infinite weight": case((X, Y, changed(COLUMN[:, 0], 3, np.inf)), "not-finite"),
    "a part of a dictionary": case(({"a": VECTOR * np.nan}, None), "not-finite"),
    "labels from 1": case((X, Y + 1), "labels"),
    "labels from -1": case((X, Y - 1), "labels", loss="sparse_categorical_crossentropy"),
    "a class that is ignored": case((X, changed(Y, 0, -1)), loss=IGNORING),
    "classes 1 and 2": case((X, COLUMN + (Y[:, None] > 0) + 1), "labels", loss=BINARY, outputs=1),
    "classes 0 and 1": case((X, COLUMN + (Y[:, None] > 0)), loss=BINARY, outputs=1),
    "three numbers for one output": case((X, VECTOR), "labels", loss="mse", outputs=1),
    "a number for one output": case((X, COLUMN), loss="mse", outputs=1),
    "numbers without an axis": case((X, COLUMN[:, 0]), loss="mse", outputs=1),
    "another loss": case((X, VECTOR), loss=lambda y, output: y[:, :1] - output, outputs=1),
    "one-hot": case((X, np.eye(3)[Y]), loss=ONE_HOT),
    "classes of validation": case((X, IN_ORDER), "split-classes", **SPLIT),
    "the same, one-hot": case((X, np.eye(3)[IN_ORDER]), "split-classes", loss=ONE_HOT, **SPLIT),
    "values in order": case((X, np.arange(64)), loss="mse", outputs=1, shuffle=False, **SPLIT),
    "probabilities": case((X, PROBABILITIES), loss=BINARY, outputs=1, shuffle=False, **SPLIT),
    "classes in order": case((X, IN_ORDER), "not-shuffled", shuffle=False),
    "classes in order, shuffled": case((X, IN_ORDER)),
    "classes in no order": case((X, Y), shuffle=False),
    "more steps than batches": case((X, Y), "runs-out", steps_per_epoch=5, batch_size=16),
    "as many steps": case((X, Y), steps_per_epoch=4, batch_size=16),
    "steps that cut the batches": case((X, Y), steps_per_epoch=5),
}


def rules(report):
    return [finding.rule for finding in report.findings if finding.level != "note"]


@pytest.mark.parametrize(
    ("data", "loss", "classes", "settings", "expected"), CASES.values(), ids=CASES
)
def test_arrays_have_the_findings_they_should_and_no_more(data, loss, classes, settings, expected):
    report = check_input(data, model=compiled(loss, classes), **settings)
    assert rules(report) == expected
    assert report.clean == (not expected)
    assert max(map(len, str(report).splitlines())) <= 80


def test_a_last_batch_of_few_examples_is_a_note():
    for size, notes in ((20, ["short-batch"]), (24, []), (32, [])):
        report = check_input((X, Y), batch_size=size)
        assert [finding.rule for finding in report.findings] == notes
        assert report.clean


def test_validation_data_and_other_datasets_are_checked_by_what_is_there():
    data = batches.ArrayBatches((X, Y), global_batch_size=16)
    report = check_input(data, validation_data=(X * np.nan, Y + 1), model=compiled())
    assert report.checked == ("train", "validation")
    assert {finding.where for finding in report.findings} == {"validation, x", "validation, y"}
    wrong = batches.ArrayBatches((X, Y + 1), global_batch_size=16)
    assert rules(check_input(wrong, model=compiled())) == ["labels"]


@pytest.mark.tensorflow
def test_a_smaller_last_batch_is_noted_on_replicas_unless_they_train_as_one_device():
    import tensorflow as tf

    from kdpkit import strategies

    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(24)
    with strategies.select_strategy("mirrored", devices=2).scope():
        for model, notes in (
            (compiled(), ["short-batch"]),
            (training.replica_exact(compiled()), []),
        ):
            for report in (
                check_input((X, Y), model=model, batch_size=24),
                check_input(data, model=model),
            ):
                assert [finding.rule for finding in report.findings] == notes


@pytest.mark.tensorflow
def test_batches_that_replicas_do_not_divide_are_wrong_in_stock_keras():
    from kdpkit import strategies

    with strategies.select_strategy("mirrored", devices=3).scope():
        for model, level in ((compiled(), "wrong"), (training.replica_exact(compiled()), "slow")):
            (finding,) = check_input((X[:48], Y[:48]), model=model, batch_size=16).findings
            assert (finding.rule, finding.level) == ("uneven-batch", level)
            assert "18" in finding.remedy
            assert check_input((X[:48], Y[:48]), model=model, batch_size=12).findings == ()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"dataset": (x for x in [X])}, "`dataset` must be"),
        ({"dataset": (X, Y[:9])}, "same number of examples"),
        ({"dataset": (X, Y), "validation_data": iter([X])}, "`validation_data` must be"),
    ],
)
def test_what_cannot_be_checked_is_one_sentence(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_input(**arguments)
