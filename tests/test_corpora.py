import io
import itertools
import json
import sysconfig

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdpkit import corpora
from kdpkit._internal import storage
from tests.processes import run_code


def words(lines):
    return sum(len(line.split()) for line in lines)


def parts(splits):
    return splits.train, splits.validation, splits.test


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Return a function that puts files in place of the standard library."""
    monkeypatch.setattr(sysconfig, "get_path", lambda _: tmp_path)

    def write(files):
        for file, text in files.items():
            path = tmp_path / file
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)

    return write


def modules(count, text='"""Module {0} does what {0} others do not.\n\nIt does it {0} times."""\n'):
    names = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]
    letters = [f"{first}{second}" for first in names for second in names]
    return {f"m{i:02}.py": text.replace("{0}", letters[i]) for i in range(count)}


# Documentation


@pytest.mark.slow
def test_documentation_is_of_paragraphs_in_one_split_each_in_the_promised_proportions():
    documentation = corpora.load_text("builtin")
    lines = [*itertools.chain(*parts(documentation))]
    sizes = [*map(words, parts(documentation))]
    assert sum(sizes) > 200_000
    assert 0.85 < sizes[0] / sum(sizes) < 0.95
    assert min(sizes) > 0.03 * sum(sizes)
    assert any(line.startswith("Compound statements contain (groups of)") for line in lines)
    assert any("JSON (JavaScript Object Notation)" in line for line in lines)
    assert len(lines) == len(set(lines))
    assert all(line and line == " ".join(line.split()) for line in lines)
    assert not any(line.startswith(">>>") for line in lines)


def test_modules_of_one_directory_go_to_one_split_without_tests_and_comments(library):
    similar = modules(40, '"""Part {0}, {0} and {0}."""')
    others = {"tests/test_a.py": '"""Never shown."""', "z.py": "# Nor this.\nx = 'Nor that.'"}
    others |= {"old.py": 'print "Python 2"', "nul.py": "x = '\0'"}
    library(modules(60) | others | {f"sub/{name}": text for name, text in similar.items()})
    splits = corpora.load_text()
    holding = [any(line.startswith("Part") for line in split) for split in parts(splits)]
    assert sum(holding) == 1
    lines = itertools.chain(*parts(splits))
    assert not any("Nor" in line or "Never" in line for line in lines)


# WikiText and text files


def test_wikitext_reads_its_three_files(tmp_path):
    for name, lines in {"train": ["a b", "c"], "valid": ["d"], "test": ["e", "f"]}.items():
        text = "".join(f" {line} \n \n" for line in lines)
        (tmp_path / f"wiki.{name}.tokens").write_text(text)
    assert corpora.load_text(tmp_path) == corpora.TextSplits(("a b", "c"), ("d",), ("e", "f"))


line_text = st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), min_size=1).map(
    str.strip
)


@settings(max_examples=20)
@given(lines=st.lists(line_text.filter(bool), min_size=3, max_size=80))
def test_a_text_file_is_split_into_three_blocks_in_order(tmp_path_factory, lines):
    path = tmp_path_factory.getbasetemp() / "lines.txt"
    path.write_bytes("\r\n\n".join(lines).encode())
    splits = corpora.load_text(path)
    assert [*splits.train, *splits.validation, *splits.test] == [
        line.removeprefix("\ufeff") if i == 0 else line for i, line in enumerate(lines)
    ]
    assert len(splits.validation) == len(splits.test) == max(1, round(0.05 * len(lines)))


def test_short_lines_are_left_out_by_bytes_and_some_are_needed(tmp_path):
    path = tmp_path / "text"
    path.write_text("\n".join(["abc", "\u00e9\u00e9", "ab"] * 20))
    kept = corpora.load_text(path, longer_than=2)
    assert {*kept.train, *kept.validation, *kept.test} == {"abc", "\u00e9\u00e9"}
    with pytest.raises(ValueError, match="long enough.*longer_than=4"):
        corpora.load_text(path, longer_than=4)


def test_pairs_are_read_and_each_is_in_one_split(tmp_path):
    file = tmp_path / "pairs.jsonl"
    pairs = [("prompt", f"answer {number}") for number in range(40)]
    lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in pairs]
    file.write_text("\n".join(lines))
    splits = corpora.load_pairs(file)
    assert sorted([*splits.train, *splits.validation, *splits.test]) == sorted(pairs)
    assert (len(splits.validation), len(splits.test)) == (2, 2)
    file.write_text("\n".join(lines[:19]))
    with pytest.raises(OSError, match="20 pairs are needed.*not 19"):
        corpora.load_pairs(file)


NO_ANSWERS = ['{"prompt": "a", "answer": " "}', '{"prompt": "a", "answer": null}']


@pytest.mark.parametrize("line", [*NO_ANSWERS, '{"prompt": "a"}', "not JSON", "[1, 2]"])
def test_a_line_that_is_no_pair_is_one_sentence(line, tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"prompt": "a", "answer": "b"}\n' + line)
    with pytest.raises(ValueError, match=r"A line of .*pairs.jsonl is no JSON object") as raised:
        corpora.load_pairs(file)
    assert line in str(raised.value)


@pytest.mark.needs(reason="KerasHub reads text with it", **{"tensorflow-text": "2.20"})
def test_a_learned_vocabulary_has_the_special_tokens_and_reads_its_text():
    models = pytest.importorskip("keras_hub").models
    lines = ["Replicas train what one device trains."] * 3
    words = corpora.learn_vocabulary(lines, 60)
    assert words[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert len(words) <= 60
    tokenizer = models.BertTokenizer(words, lowercase=True)
    assert tokenizer.detokenize(tokenizer(lines[0])) == "replicas train what one device trains ."


@settings(max_examples=10)
@given(st.lists(st.text("abcdefgh\u00e9.", min_size=1, max_size=30), min_size=3, max_size=20))
def test_a_vocabulary_is_always_the_same(lines):
    assert corpora.learn_vocabulary(lines, 40) == corpora.learn_vocabulary(lines, 40)


@pytest.mark.parametrize(
    ("lines", "size", "sentence"),
    [
        (["", " "], 100, "learned from lines of text"),
        ([("a", "b")], 100, "learned from lines of text"),
        (["a"], 5, "`size` .* at least 6"),
    ],
)
def test_a_vocabulary_that_cannot_be_learned_is_one_sentence(lines, size, sentence):
    with pytest.raises(ValueError, match=sentence):
        corpora.learn_vocabulary(lines, size)


# Images


def test_digits_are_the_published_ones_in_255_steps():
    splits = corpora.load_images()
    assert splits.train.images.dtype == np.uint8
    assert splits.train.labels.dtype == np.int32
    assert splits.train.images.max() == 255
    # The first digit's first row is 0 0 5 13 9 1 0 0, of 16; 13 * 255 / 16 = 207.19.
    assert splits.train.images[0, 0, :, 0].tolist() == [0, 0, 80, 207, 143, 16, 0, 0]
    assert splits.classes == 10
    train, test = (np.bincount(split.labels) for split in (splits.train, splits.test))
    assert sum(train) + sum(test) == 1797
    np.testing.assert_array_equal(test, (train + test) // 5)
    images = np.concatenate([splits.train.images, splits.test.images])
    assert len(np.unique(images, axis=0)) == 1797


FEW = {"x_train": np.arange(12, dtype="u1").reshape(2, 2, 3), "y_train": np.arange(2, dtype="u1")}
FEW |= {"x_test": FEW["x_train"][:1], "y_test": FEW["y_train"][:1]}


def packed(**arrays):
    """Return the bytes of an .npz file."""
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def test_a_file_as_of_keras_has_both_splits(tmp_path):
    (tmp_path / "mnist.npz").write_bytes(packed(**FEW))
    splits = corpora.load_images(tmp_path / "mnist.npz")
    np.testing.assert_array_equal(splits.train.images, FEW["x_train"][..., None], strict=True)
    np.testing.assert_array_equal(splits.train.labels, np.arange(2, dtype="int32"), strict=True)
    assert splits.test.images.shape == (1, 2, 3, 1)
    assert splits.classes == 2


TEXT, IMAGES = corpora.load_text, corpora.load_images


@pytest.mark.parametrize(
    ("load", "content", "sentence"),
    [
        (TEXT, None, "no such file or directory: .*named. .*'builtin'"),
        (TEXT, b" \n\n", "only blank lines"),
        (TEXT, b"one\ntwo\n", "3 lines.*, not 2: .*named"),
        (TEXT, b"one\ncaf\xe9 noir\nthree", r"not UTF-8 text \(byte 7, in line 2\)"),
        (IMAGES, None, "cannot be read .No such file or directory.: .*named"),
        (IMAGES, b"\x89PNG\r\n", "not an .npz file.*named.*'builtin', 'mnist'"),
        (IMAGES, packed(**FEW)[:-30], "not an .npz file with x_train"),
        (
            IMAGES,
            packed(**FEW | {"y_test": FEW["y_train"]}),
            r"shape \(1, 2, 3\), and labels of \(2,\)",
        ),
        (IMAGES, packed(**FEW | {"x_train": np.zeros((2, 2, 3, 3))}), "a label for each gray"),
    ],
)
def test_bad_files_get_one_sentence(tmp_path, load, content, sentence):
    path = tmp_path / "named"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(OSError, match=sentence):
        load(path)


@pytest.mark.slow
def test_without_a_network_one_sentence_names_the_fix(tmp_path):
    code = (
        "from kdpkit import corpora\n"
        "for name in ('mnist', 'fashion_mnist'):\n"
        "    try: corpora.load_images(name)\n"
        "    except ValueError as error: print(error)\n"
    )
    nowhere = "http://127.0.0.1:9"
    where = {"KERAS_HOME": str(tmp_path), "KERAS_BACKEND": "numpy", "https_proxy": nowhere}
    printed = run_code(code, **where).stdout
    for name in ("mnist", "fashion_mnist"):
        assert f"could not download {name} (URL fetch failure on https://" in printed
    assert printed.count("built-in digits") == 2


def test_text_and_images_are_read_from_object_storage(remote):
    files = {"text.txt": b"one\ntwo\nthree\n", "images.npz": packed(**FEW)}
    for name, content in files.items():
        with storage.replacing(f"{remote}/{name}") as temporary:
            temporary.write_bytes(content)
    assert corpora.load_text(f"{remote}/text.txt").test == ("three",)
    assert len(corpora.load_images(f"{remote}/images.npz").train.labels) == 2
