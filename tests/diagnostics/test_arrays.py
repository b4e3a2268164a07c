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


IN_ORDER = np.sort(Y)
VECTOR, COLUMN = np.zeros((64, 3), "float32"), np.zeros((64, 1), "float32")
#: Data, loss, outputs of the model, other arguments, and what is found besides notes.
CASES = {
    "arrays": ((X, Y), SPARSE, 3, {}, []),
    "64 bits, which Keras casts": ((X.astype("float64"), Y.astype("int64")), SPARSE, 3, {}, []),
    "no labels": (X, SPARSE, 3, {}, []),
    "a NaN": ((changed(X, (5, 2), np.nan), Y), SPARSE, 3, {}, ["not-finite"]),
    "an infinite weight": ((X, Y, changed(COLUMN[:, 0], 3, np.inf)), SPARSE, 3, {}, ["not-finite"]),
    "a part of a dictionary": (({"a": VECTOR * np.nan}, None), SPARSE, 3, {}, ["not-finite"]),
    "labels from 1": ((X, Y + 1), SPARSE, 3, {}, ["labels"]),
    "labels from -1": ((X, Y - 1), "sparse_categorical_crossentropy", 3, {}, ["labels"]),
    "a class that is ignored": (
        (X, changed(Y, 0, -1)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1),
        *(3, {}, []),
    ),
    "two classes, as 1 and 2": ((X, 1 + COLUMN + (Y == 1)[:, None]), BINARY, 1, {}, ["labels"]),
    "two classes": ((X, COLUMN + (Y == 1)[:, None]), BINARY, 1, {}, []),
    "three numbers for one output": ((X, VECTOR), "mse", 1, {}, ["labels"]),
    "a number for one output": ((X, COLUMN), "mse", 1, {}, []),
    "numbers without an axis": ((X, COLUMN[:, 0]), "mse", 1, {}, []),
    "one-hot": ((X, np.eye(3)[Y]), ONE_HOT, 3, {}, []),
    "classes that only validation has": (
        (X, IN_ORDER),
        *(SPARSE, 3, {"validation_split": 0.2, "shuffle": True}, ["split-classes"]),
    ),
    "the same, one-hot": (
        *((X, np.eye(3)[IN_ORDER]), ONE_HOT, 3),
        *({"validation_split": 0.2}, ["split-classes"]),
    ),
    "values in order are no classes": (
        *((X, np.arange(64)), "mse", 1),
        *({"validation_split": 0.2, "shuffle": False}, []),
    ),
    "probabilities are no classes": (
        *((X, np.linspace(0, 1, 64)[:, None]), BINARY, 1),
        *({"validation_split": 0.2, "shuffle": False}, []),
    ),
    "a loss of one's own": ((X, VECTOR), lambda y, output: y[:, :1] - output, 1, {}, []),
    "classes in order": ((X, IN_ORDER), SPARSE, 3, {"shuffle": False}, ["not-shuffled"]),
    "classes in order, shuffled": ((X, IN_ORDER), SPARSE, 3, {}, []),
    "classes in no order": ((X, Y), SPARSE, 3, {"shuffle": False}, []),
    "more steps than batches": (
        (X, Y),
        SPARSE,
        3,
        {"steps_per_epoch": 5, "batch_size": 16},
        ["runs-out"],
    ),
    "as many steps": ((X, Y), SPARSE, 3, {"steps_per_epoch": 4, "batch_size": 16}, []),
    "steps that cut the batches": ((X, Y), SPARSE, 3, {"steps_per_epoch": 5}, []),
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
