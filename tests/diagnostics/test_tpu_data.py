"""What the data say, on both backends: arrays and `PyDataset`."""

import json
import random

import hypothesis
import keras
import numpy as np
import pytest
from hypothesis import strategies as st

from kdpkit import batches, testing, training
from kdpkit.diagnostics import check_tpu

X, Y = testing.toy_classification(192, features=8)


def rules(report, *levels):
    levels = levels or ("error", "slow")
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


def test_text_is_an_error_and_the_step_is_not_compiled():
    model = testing.tiny_classifier(features=8)
    model.compile("sgd", "mse")
    report = checked(X.astype("str"), Y, model=model)
    assert rules(report) == {"string"}
    assert "unchecked-step" in rules(report, "note")
    assert "step" not in report.checked


@hypothesis.given(st.integers(1, 64), st.integers(1, 192))
def test_a_batch_is_clean_exactly_if_every_core_gets_a_multiple_of_eight(replicas, examples):
    report = checked(X, Y, size=examples, replicas=replicas)
    expected = set()
    if examples % replicas:
        expected = {"uneven-batch"}
    elif examples // replicas % 8:
        expected = {"tile-batch"}
    assert rules(report) == expected


def test_the_waste_of_a_core_that_gets_6_examples_is_a_quarter():
    (finding,) = (f for f in checked(X, Y, size=48).findings if f.rule == "tile-batch")
    assert "25%" in finding.problem
    assert "64" in finding.remedy


@pytest.mark.parametrize("data", [(X[:100], Y[:100]), X[:100]], ids=["pair", "inputs"])
def test_a_smaller_last_batch_of_arrays_is_found(data):
    assert "dynamic-batch" in rules(check_tpu(data, batch_size=64))
    assert "dynamic-batch" not in rules(check_tpu(data, batch_size=50, replicas=1))


def test_arrays_are_cut_as_fit_cuts_them_into_32_rows():
    assert rules(check_tpu((X, Y), replicas=4)) == set()
    assert rules(check_tpu((X, Y), replicas=8)) == {"tile-batch"}


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


def test_examples_of_varying_length_are_an_error_and_of_one_length_are_not():
    (finding,) = (f for f in check_tpu(Lengths(5, 9)).findings if f.level == "error")
    assert (finding.rule, finding.where) == ("dynamic-shape", "train, x")
    assert "(64, None)" in finding.problem
    assert rules(check_tpu(Lengths(5, 5))) == set()


class Given(keras.utils.PyDataset):
    """A dataset of the batches that it was given."""

    def __init__(self, *batches):
        super().__init__()
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


class Unsized(keras.utils.PyDataset):
    def __getitem__(self, index):
        return X[:64], Y[:64]


class Endless(Unsized):
    num_batches = None


def notes(dataset, **settings):
    found = check_tpu(dataset, **settings).findings
    return [finding for finding in found if finding.level == "note"]


@pytest.mark.parametrize(
    ("dataset", "looked_at"),
    [
        (Lengths(5, 9, 5), "the first and the last of 3 batches"),
        (Endless(), "the first batch"),
    ],
)
def test_a_note_says_which_batches_were_checked_where_others_may_differ(dataset, looked_at):
    (note,) = (note for note in notes(dataset) if note.rule == "unseen-batches")
    assert f"Checked was {looked_at};" in note.problem


def test_no_note_is_needed_where_all_batches_are_known():
    for dataset in (Lengths(5, 5), (X, Y), batches.ArrayBatches((X, Y), global_batch_size=64)):
        assert "unseen-batches" not in {note.rule for note in notes(dataset)}


def generator(*data):
    yield from data


def test_a_generator_is_left_alone_and_the_rest_is_checked():
    rows = generator("the first batch")
    model = testing.tiny_classifier(features=8)
    model.compile("sgd", "mse")
    report = check_tpu(rows, model=model, callbacks=[keras.callbacks.History()])
    assert report.checked == ("callbacks",)
    assert {"unchecked-data", "unchecked-step"} <= rules(report, "note")
    assert next(rows) == "the first batch"
    report = check_tpu((X, Y), validation_data=generator(), batch_size=64)
    assert report.checked == ("data",)
    assert [f.where for f in report.findings if f.rule == "unchecked-data"] == ["validation"]


def test_grain_datasets_are_checked_and_not_used_up():
    grain = pytest.importorskip("grain")
    rows = grain.MapDataset.source([*zip(X.astype("float64"), Y, strict=True)]).batch(64)
    for dataset in (rows, rows.to_iter_dataset()):
        assert rules(check_tpu(dataset)) == {"64-bit"}
        assert len([*dataset]) == 3


def test_object_arrays_are_text_only_where_they_hold_text():
    ragged = np.empty(64, object)
    ragged[:] = [np.zeros(1 + row % 2) for row in range(64)]
    assert rules(check_tpu(Given((ragged, Y[:64])))) == {"dynamic-shape"}
    assert rules(check_tpu(Given((np.array(["a"] * 64, object), Y[:64])))) == {"string"}


def test_a_rule_is_not_reported_over_and_over():
    report = checked({f"x{column:03}": X[:, 0].astype("float64") for column in range(100)})
    found = [finding for finding in report.findings if finding.rule == "64-bit"]
    assert len(found) == 8
    assert found[-1].where == "train, x['x007'] and 92 more like it"


def test_looking_at_data_draws_none_of_the_random_numbers_of_training():
    class Drawing(Unsized):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            return X[:64] * np.random.rand() + random.random(), Y[:64]

    drawn = []
    for is_checked in (False, True):
        keras.utils.set_random_seed(0)
        if is_checked:
            check_tpu(Drawing())
        drawn.append((np.random.rand(), random.random()))
    assert drawn[0] == drawn[1]


def test_validation_data_are_checked_too():
    report = check_tpu((X, Y), validation_data=(X, Y.astype("int64")), batch_size=64)
    (finding,) = (f for f in report.findings if f.level != "note")
    assert (finding.rule, finding.where) == ("64-bit", "validation, y")
    report = check_tpu((X, Y), validation_data=(X, Y), batch_size=64, validation_batch_size=60)
    found = {(f.rule, f.where) for f in report.findings if f.level != "note"}
    assert found == {("uneven-batch", "validation"), ("dynamic-batch", "validation")}
    assert check_tpu(validation_data=(X, Y), batch_size=64).checked == ("validation data",)


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
        ({"dataset": iter([X])}, "`dataset` must be"),
        ({"dataset": (X, Y), "validation_data": "v"}, "`validation_data` must.*validation_data='"),
        ({"dataset": generator()}, "Nothing can be checked"),
        ({"dataset": Given((X, Y, Y, Y))}, r"must have batches `x`, `\(x, y\)` or .*parts=4"),
        ({"dataset": Given((X, Y), X)}, "different parts.*first=.'x', 'y'.*last=.'x'"),
        ({"dataset": Given(([1.0] * 64, Y))}, r"has lists of Python's numbers.*x\[3\]', '...'"),
        ({"dataset": Unsized()}, "does not report how many batches.*num_batches"),
        ({"callbacks": 3}, "`callbacks` must be Keras callbacks.*3"),
        ({"dataset": Lengths()}, "is empty"),
        ({"dataset": Lengths(None)}, "raises before its first batch: OSError: the disk is gone"),
        ({"dataset": (X, Y), "model": "model"}, "`model` must be a Keras model"),
        ({"dataset": (X, Y), "model": keras.Sequential()}, "is not compiled"),
    ],
)
def test_what_cannot_be_checked_is_one_sentence(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_tpu(**arguments)
