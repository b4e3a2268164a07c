import gzip
import re
import struct
import subprocess
import sys
import sysconfig

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kdpkit import corpora
from kdpkit._internal import atomic_files

IDX_CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def idx(array):
    """Write an IDX file, in the words of its definition: a magic number, the sizes, the data."""
    code = IDX_CODES[array.dtype.str[1:]]
    sizes = struct.pack(f">{array.ndim}I", *array.shape)
    return (
        bytes([0, 0, code, array.ndim])
        + sizes
        + array.astype(array.dtype.newbyteorder(">")).tobytes()
    )


def words(lines):
    return sum(len(line.split()) for line in lines)


def five_word_sequences(line):
    letters = re.sub(r"[\W\d_]+", " ", line.lower()).split()
    if len(letters) < 5:
        return {" ".join(letters)}
    return {" ".join(five) for five in zip(*(letters[i:] for i in range(5)), strict=False)}


@pytest.fixture(scope="module")
def documentation():
    return corpora.load_text("builtin")


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
def test_documentation_has_the_promised_size_and_proportions(documentation):
    sizes = [
        words(split)
        for split in (documentation.train, documentation.validation, documentation.test)
    ]
    assert sum(sizes) > 200_000
    assert 0.85 < sizes[0] / sum(sizes) < 0.95
    assert min(sizes) > 0.03 * sum(sizes)
    assert documentation.note == ""


def test_documentation_holds_docstrings_and_the_language_reference(documentation):
    everything = {*documentation.train, *documentation.validation, *documentation.test}
    assert any(line.startswith("Compound statements contain (groups of)") for line in everything)
    assert any("JSON (JavaScript Object Notation)" in line for line in everything)


def test_documentation_lines_are_single_paragraphs_in_one_split_only(documentation):
    lines = [*documentation.train, *documentation.validation, *documentation.test]
    assert len(lines) == len(set(lines))
    assert all(line and line == " ".join(line.split()) for line in lines)
    assert not any(line.startswith(">>>") for line in lines)


def test_no_held_out_line_is_half_repeated_by_an_earlier_split(documentation):
    seen = set().union(*map(five_word_sequences, documentation.train))
    for split in (documentation.validation, documentation.test):
        for line in split:
            sequences = five_word_sequences(line)
            assert len(sequences & seen) < len(sequences) / 2, line
        seen.update(*map(five_word_sequences, split))


def test_numbered_variants_of_a_line_are_near_repeats(library):
    repeated = '"""Python Character Mapping Codec cp12{0} generated from CP12{0}."""\n'
    library({f"d{i}/m.py": repeated.replace("{0}", str(i)) for i in range(40)} | modules(60))
    splits = corpora.documentation_text()
    assert any("Codec" in line for line in splits.train)
    assert not any("Codec" in line for line in (*splits.validation, *splits.test))


@pytest.mark.slow
def test_the_splits_depend_on_names_alone_not_on_the_process(documentation):
    code = "from kdpkit import corpora; print(*corpora.documentation_text().test, sep='\\n')"
    printed = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "1", "PYTHONUTF8": "1"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
        check=True,
    ).stdout
    assert tuple(printed.rstrip("\n").split("\n")) == documentation.test


def test_modules_of_one_directory_go_to_one_split(library):
    parts = modules(40, '"""Part {0}, {0} and {0}."""')
    library(modules(60) | {f"sub/{name}": text for name, text in parts.items()})
    splits = corpora.documentation_text()
    holding = [
        any(line.startswith("Part") for line in split)
        for split in (splits.train, splits.validation, splits.test)
    ]
    assert sum(holding) == 1


def test_tests_comments_and_files_that_do_not_parse_are_no_documentation(library):
    files = {"tests/test_a.py": '"""Never shown."""', "z.py": "# Nor this.\nx = 'Nor that.'"}
    library(modules(60) | files | {"old.py": 'print "Python 2"', "nul.py": "x = '\0'"})
    splits = corpora.documentation_text()
    lines = (*splits.train, *splits.validation, *splits.test)
    assert not any("Nor" in line or "Never" in line for line in lines)
    assert "2 files" in splits.note


@pytest.mark.parametrize("count", [0, 3])
def test_a_python_without_its_source_raises(library, count):
    library(modules(count))
    with pytest.raises(ValueError, match=f"too few source files.*files={count}"):
        corpora.documentation_text()


# WikiText and text files


def write_wikitext(folder, **files):
    for name, lines in files.items():
        (folder / f"wiki.{name}.tokens").write_text("".join(f" {line} \n \n" for line in lines))
    return folder


def test_wikitext_reads_its_three_files(tmp_path):
    folder = write_wikitext(tmp_path, train=["a b", "c"], valid=["d"], test=["e", "f"])
    assert corpora.wikitext(folder) == corpora.TextSplits(("a b", "c"), ("d",), ("e", "f"))


def test_wikitext_without_train_uses_valid_and_the_halves_of_test(tmp_path):
    folder = write_wikitext(tmp_path, valid=["d"], test=["e", "f", "g", "h"])
    splits = corpora.wikitext(folder)
    assert (splits.train, splits.validation, splits.test) == (("d",), ("e", "f"), ("g", "h"))
    assert "Without wiki.train.tokens it trains on wiki.valid.tokens" in splits.note


def test_the_test_file_is_cut_at_the_article_nearest_its_middle(tmp_path):
    lines = ["= A =", "a", "= B =", "b", "c", "= = Part = =", "= C =", "c", "= D =", "d"]
    splits = corpora.wikitext(write_wikitext(tmp_path, valid=["x"], test=lines))
    assert splits.validation == tuple(lines[:6])
    assert splits.test == tuple(lines[6:])


@given(st.integers(2, 60), st.sets(st.integers(0, 59)))
def test_both_halves_of_the_test_file_hold_at_least_a_quarter(count, titles):
    lines = [f"= {i} =" if i in titles else "text" for i in range(count)]
    cut = corpora._middle_article(lines)
    assert count // 4 <= cut <= count * 3 / 4
    assert 0 < cut < count


def test_wikitext_errors_name_what_is_missing(tmp_path):
    with pytest.raises(OSError, match="no such directory.*nowhere"):
        corpora.wikitext(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="wiki.valid.tokens and wiki.test.tokens.*nothing"):
        corpora.wikitext(tmp_path)
    write_wikitext(tmp_path, train=["a"], valid=["b"])
    with pytest.raises(ValueError, match="wiki.test.tokens.*wiki.train.tokens, wiki.valid.tokens"):
        corpora.wikitext(tmp_path)
    for content in ("", " \n\n"):
        (tmp_path / "wiki.test.tokens").write_text(content)
        with pytest.raises(OSError, match="wiki.test.tokens"):
            corpora.wikitext(tmp_path)


line_text = st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), min_size=1).map(
    str.strip
)


@given(lines=st.lists(line_text.filter(bool), min_size=3, max_size=80), packed=st.booleans())
def test_a_text_file_is_split_into_three_blocks_in_order(tmp_path_factory, lines, packed):
    path = tmp_path_factory.getbasetemp() / "lines.txt"
    content = "\r\n\n".join(lines).encode()
    path.write_bytes(gzip.compress(content) if packed else content)
    splits = corpora.text_file(path)
    assert [*splits.train, *splits.validation, *splits.test] == [
        line.removeprefix("\ufeff") if i == 0 else line for i, line in enumerate(lines)
    ]
    assert len(splits.validation) == len(splits.test) == max(1, round(0.05 * len(lines)))


@given(before=st.text("ab\n", max_size=30))
def test_a_file_that_is_not_utf8_names_the_byte_and_the_line(tmp_path_factory, before):
    path = tmp_path_factory.getbasetemp() / "latin.txt"
    path.write_bytes(before.encode() + b"caf\xe9 noir\nab\n")
    sentence = rf"not UTF-8 text \(byte {len(before) + 3}, in line {before.count(chr(10)) + 1}\): "
    with pytest.raises(OSError, match=sentence):
        corpora.text_file(path)


def test_bad_text_files_get_one_sentence(tmp_path):
    path = tmp_path / "text.txt.gz"
    path.write_text("one\ntwo\n")
    with pytest.raises(OSError, match="3 lines.* has 2.*text.txt.gz"):
        corpora.text_file(path)
    path.write_bytes(gzip.compress(b"one\ntwo\nthree\n" * 100)[:-9])
    with pytest.raises(OSError, match="damaged.*text.txt.gz"):
        corpora.text_file(path)
    with pytest.raises(OSError, match="directory"):
        corpora.text_file(tmp_path)


def test_data_names_the_text(tmp_path):
    folder = write_wikitext(tmp_path, train=["a", "b", "c"], valid=["d"], test=["e"])
    assert corpora.load_text(folder) == corpora.wikitext(folder)
    path = folder / "wiki.train.tokens"
    assert corpora.load_text(str(path)) == corpora.text_file(path)
    with pytest.raises(OSError, match="no such file or directory: .*nowhere. .*'builtin'"):
        corpora.load_text(folder / "nowhere")


# Images


def test_digits_are_the_published_ones_in_255_steps():
    splits = corpora.digits()
    assert splits.train.images.dtype == np.uint8
    assert splits.train.labels.dtype == np.int32
    assert splits.train.images.max() == 255
    # The first digit's first row is 0 0 5 13 9 1 0 0, of 16; 13 * 255 / 16 = 207.19.
    assert splits.train.images[0, 0, :, 0].tolist() == [0, 0, 80, 207, 143, 16, 0, 0]
    assert splits.classes == 10


def test_the_digits_are_split_alike_in_every_class():
    splits = corpora.digits()
    train, test = (np.bincount(split.labels) for split in (splits.train, splits.test))
    assert sum(train) + sum(test) == 1797
    np.testing.assert_array_equal(test, (train + test) // 5)
    images = np.concatenate([splits.train.images, splits.test.images])
    assert len(np.unique(images, axis=0)) == 1797


arrays = st.sampled_from(sorted(IDX_CODES)).flatmap(
    lambda dtype: hnp.arrays(
        dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
    )
)


@given(array=arrays, packed=st.booleans())
def test_idx_files_round_trip(tmp_path_factory, array, packed):
    path = tmp_path_factory.getbasetemp() / "array.idx"
    path.write_bytes(gzip.compress(idx(array)) if packed else idx(array))
    read = corpora.read_idx(path)
    assert read.dtype == array.dtype
    assert read.flags.writeable
    np.testing.assert_array_equal(read, array, strict=True)


@given(array=arrays, data=st.data())
def test_an_idx_file_of_another_length_raises(tmp_path_factory, array, data):
    path = tmp_path_factory.getbasetemp() / "damaged.idx"
    content = idx(array)
    length = data.draw(st.integers(1, len(content) + 8).filter(lambda n: n != len(content)))
    path.write_bytes(content[:length].ljust(length, b"\0"))
    sentence = "(not an IDX file|cut short|goes on after its data).*damaged.idx"
    with pytest.raises(OSError, match=sentence):
        corpora.read_idx(path)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"\x89PNG\r\n", "not an IDX file.*89 50 4e 47"),
        (b"\0\0\x0a\x01\0\0\0\0", "not an IDX file"),
        (b"\0\0\x0b\x02\0\0\0\2\0\0\0\3abc", r"12 bytes.*int16.*\(2, 3\).* 3 "),
        (b"\0\0\x08\x01\0\0\0\1ab", "goes on after its data.* 1 bytes.* 2 "),
    ],
)
def test_bad_idx_files_get_one_sentence(tmp_path, content, sentence):
    path = tmp_path / "bad.idx"
    path.write_bytes(content)
    with pytest.raises(OSError, match=f"{sentence}.*bad.idx"):
        corpora.read_idx(path)


def write_images(folder, prefix, count, packed=False):
    images = np.arange(count * 6, dtype="u1").reshape(count, 2, 3)
    labels = (np.arange(count) % 4).astype("u1")
    for name, array in (
        (f"{prefix}-images-idx3-ubyte", images),
        (f"{prefix}-labels-idx1-ubyte", labels),
    ):
        path = folder / (f"{name}.gz" if packed else name)
        path.write_bytes(gzip.compress(idx(array)) if packed else idx(array))
    return images[..., None], labels


@pytest.mark.parametrize("load", [corpora.mnist, corpora.fashion_mnist, corpora.load_images])
def test_image_directories_give_train_and_test(tmp_path, load):
    train = write_images(tmp_path, "train", 8, packed=True)
    test = write_images(tmp_path, "t10k", 3)
    splits = load(tmp_path)
    for read, written in ((splits.train, train), (splits.test, test)):
        np.testing.assert_array_equal(read.images, written[0], strict=True)
        np.testing.assert_array_equal(read.labels, written[1].astype("int32"), strict=True)
    assert (splits.classes, splits.note) == (4, "")


def test_the_test_images_alone_are_split_four_to_one(tmp_path):
    images, labels = write_images(tmp_path, "t10k", 10, packed=True)
    splits = corpora.mnist(tmp_path)
    np.testing.assert_array_equal(splits.train.images, images[:8])
    np.testing.assert_array_equal(splits.test.images, images[8:])
    np.testing.assert_array_equal(splits.test.labels, labels[8:])
    assert "the first 8 of the t10k images and tests on the last 2" in splits.note


def test_image_directories_that_cannot_serve_get_one_sentence(tmp_path):
    for load in (corpora.mnist, corpora.load_images):
        with pytest.raises(OSError, match="no such directory: .*nowhere"):
            load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="t10k-images-idx3-ubyte and t10k-labels.*nothing"):
        corpora.mnist(tmp_path)
    write_images(tmp_path, "train", 5)
    with pytest.raises(ValueError, match="t10k-images.*train-images"):
        corpora.mnist(tmp_path)
    write_images(tmp_path, "t10k", 1)
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(ValueError, match="^train-labels-idx1-ubyte "):
        corpora.mnist(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").unlink()
    with pytest.raises(ValueError, match="at least 2 images"):
        corpora.mnist(tmp_path)


@pytest.mark.parametrize(
    ("images", "labels"),
    [
        (np.zeros((2, 4), "u1"), np.zeros(2, "u1")),
        (np.zeros((2, 4, 4), "f4"), np.zeros(2, "u1")),
        (np.zeros((2, 4, 4), "u1"), np.zeros(3, "u1")),
    ],
)
def test_images_and_labels_that_do_not_belong_together_raise(tmp_path, images, labels):
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(idx(images))
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(labels))
    with pytest.raises(
        ValueError, match="Images of shape .* are needed, and there are .*t10k-images"
    ):
        corpora.mnist(tmp_path)


def test_without_a_network_one_sentence_names_the_fix(tmp_path):
    code = (
        "from kdpkit import corpora\n"
        "for name in ('mnist', 'fashion_mnist'):\n"
        "    try: corpora.load_images(name)\n"
        "    except ValueError as error: print(error)\n"
    )
    nowhere = "http://127.0.0.1:9"
    printed = subprocess.run(
        [sys.executable, "-c", code],
        env={"KERAS_HOME": str(tmp_path), "KERAS_BACKEND": "numpy", "https_proxy": nowhere},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    ).stdout
    for name in ("mnist", "fashion_mnist"):
        assert f"could not download {name} (URL fetch failure on https://" in printed
    assert printed.count("built-in digits") == 2


def test_text_and_images_are_read_from_object_storage(remote):
    images = np.arange(20 * 16, dtype="uint8").reshape(20, 4, 4)
    files = {
        "text.txt": b"one\ntwo\nthree\n",
        "wiki/wiki.valid.tokens": b"a\nb\n",
        "wiki/wiki.test.tokens": b"c\nd\n",
        "images/t10k-images-idx3-ubyte": idx(images),
        "images/t10k-labels-idx1-ubyte": idx(images[:, 0, 0]),
    }
    for name, content in files.items():
        with atomic_files.replacing(f"{remote}/{name}") as temporary:
            temporary.write_bytes(content)
    assert corpora.load_text(f"{remote}/text.txt").test == ("three",)
    assert corpora.load_text(f"{remote}/wiki").train == ("a", "b")
    assert len(corpora.load_images(f"{remote}/images").test.labels) == 4
    with pytest.raises(ValueError, match=f"There is no such file or directory: {remote}/none"):
        corpora.load_text(f"{remote}/none")
    with pytest.raises(ValueError, match=f"There is no such directory: {remote}/none"):
        corpora.load_images(f"{remote}/none")
