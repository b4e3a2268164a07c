import gzip
import struct
import sysconfig

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kdpkit import corpora
from kdpkit._internal import atomic_files
from tests.processes import run_code


def idx(array):
    """Write an IDX file, in the words of its definition: a magic number, the sizes, the data."""
    sizes = struct.pack(f">{array.ndim}I", *array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


def words(lines):
    return sum(len(line.split()) for line in lines)


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


def test_documentation_is_of_paragraphs_in_one_split_each_in_the_promised_proportions(
    documentation,
):
    lines = [*documentation.train, *documentation.validation, *documentation.test]
    sizes = [
        words(split)
        for split in (documentation.train, documentation.validation, documentation.test)
    ]
    assert sum(sizes) > 200_000
    assert 0.85 < sizes[0] / sum(sizes) < 0.95
    assert min(sizes) > 0.03 * sum(sizes)
    assert any(line.startswith("Compound statements contain (groups of)") for line in lines)
    assert any("JSON (JavaScript Object Notation)" in line for line in lines)
    assert len(lines) == len(set(lines))
    assert all(line and line == " ".join(line.split()) for line in lines)
    assert not any(line.startswith(">>>") for line in lines)


def test_modules_of_one_directory_go_to_one_split_without_tests_and_comments(library):
    parts = modules(40, '"""Part {0}, {0} and {0}."""')
    others = {"tests/test_a.py": '"""Never shown."""', "z.py": "# Nor this.\nx = 'Nor that.'"}
    others |= {"old.py": 'print "Python 2"', "nul.py": "x = '\0'"}
    library(modules(60) | others | {f"sub/{name}": text for name, text in parts.items()})
    splits = corpora.load_text()
    holding = [
        any(line.startswith("Part") for line in split)
        for split in (splits.train, splits.validation, splits.test)
    ]
    assert sum(holding) == 1
    lines = (*splits.train, *splits.validation, *splits.test)
    assert not any("Nor" in line or "Never" in line for line in lines)


def test_a_python_without_its_source_raises(library):
    library(modules(3))
    with pytest.raises(ValueError, match="too few source files.*files=3"):
        corpora.load_text()


# WikiText and text files


def write_wikitext(folder, **files):
    for name, lines in files.items():
        (folder / f"wiki.{name}.tokens").write_text("".join(f" {line} \n \n" for line in lines))
    return folder


def test_wikitext_reads_its_three_files(tmp_path):
    folder = write_wikitext(tmp_path, train=["a b", "c"], valid=["d"], test=["e", "f"])
    assert corpora.load_text(folder) == corpora.TextSplits(("a b", "c"), ("d",), ("e", "f"))


line_text = st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), min_size=1).map(
    str.strip
)


@given(lines=st.lists(line_text.filter(bool), min_size=3, max_size=80), packed=st.booleans())
def test_a_text_file_is_split_into_three_blocks_in_order(tmp_path_factory, lines, packed):
    path = tmp_path_factory.getbasetemp() / "lines.txt"
    content = "\r\n\n".join(lines).encode()
    path.write_bytes(gzip.compress(content, mtime=0) if packed else content)
    splits = corpora.load_text(path)
    assert [*splits.train, *splits.validation, *splits.test] == [
        line.removeprefix("\ufeff") if i == 0 else line for i, line in enumerate(lines)
    ]
    assert len(splits.validation) == len(splits.test) == max(1, round(0.05 * len(lines)))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "no such file or directory: .*text. .*'builtin'"),
        (b"", "The file is empty"),
        (b" \n\n", "only blank lines"),
        (b"one\ntwo\n", "3 lines.*, not 2: .*text"),
        (b"one\ncaf\xe9 noir\nthree", r"not UTF-8 text \(byte 7, in line 2\)"),
        (gzip.compress(b"one\ntwo\nthree\n" * 100, mtime=0)[:-9], "damaged.*text"),
    ],
)
def test_bad_text_files_get_one_sentence(tmp_path, content, sentence):
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(OSError, match=sentence):
        corpora.load_text(path)


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


def write_images(folder, images, labels, prefix="train", *, packed=False):
    for name, array in (
        (f"{prefix}-images-idx3-ubyte", images),
        (f"{prefix}-labels-idx1-ubyte", labels),
    ):
        path = folder / (f"{name}.gz" if packed else name)
        path.write_bytes(gzip.compress(idx(array), mtime=0) if packed else idx(array))


FEW = np.arange(12, dtype="u1").reshape(2, 2, 3), np.arange(2, dtype="u1")


@given(
    images=hnp.arrays("u1", hnp.array_shapes(min_dims=3, max_dims=3, max_side=4)),
    packed=st.booleans(),
)
def test_idx_files_round_trip(tmp_path_factory, images, packed):
    folder = tmp_path_factory.mktemp("images")
    labels = (np.arange(len(images)) % 4).astype("u1")
    write_images(folder, images, labels, packed=packed)
    write_images(folder, *FEW, "t10k")
    splits = corpora.load_images(folder)
    assert splits.train.images.flags.writeable
    np.testing.assert_array_equal(splits.train.images, images[..., None], strict=True)
    np.testing.assert_array_equal(splits.train.labels, labels.astype("int32"), strict=True)
    np.testing.assert_array_equal(splits.test.images, FEW[0][..., None], strict=True)
    assert splits.classes == max(2, labels.max() + 1)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"\x89PNG\r\n", "not an IDX file.*89 50 4e 47"),
        (idx(FEW[1]), "not an IDX file of bytes in 3 dimensions"),
        (b"\0\0\x0b\x03" + idx(FEW[0])[4:], "not an IDX file of bytes"),  # of int16
        (idx(FEW[0])[:-1], r"damaged.*12 bytes.*\(2, 2, 3\).* 11 are there"),
        (gzip.compress(idx(FEW[0]) * 100, mtime=0)[:-9], "gzipped file is damaged"),
    ],
)
def test_bad_idx_files_get_one_sentence(tmp_path, content, sentence):
    write_images(tmp_path, *FEW)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(OSError, match=f"{sentence}.*train-images"):
        corpora.load_images(tmp_path)


def test_missing_and_unequal_idx_files_get_one_sentence(tmp_path):
    write_images(tmp_path, *FEW)
    with pytest.raises(ValueError, match="no such file.*t10k-images"):
        corpora.load_images(tmp_path)
    write_images(tmp_path, FEW[0], FEW[1][:1], "t10k")
    with pytest.raises(ValueError, match="2 images and 1 labels in the `t10k` files"):
        corpora.load_images(tmp_path)


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
    files = {"text.txt": b"one\ntwo\nthree\n"}
    for name in ("train", "t10k"):
        files[f"images/{name}-images-idx3-ubyte"] = idx(FEW[0])
        files[f"images/{name}-labels-idx1-ubyte"] = idx(FEW[1])
    for name, content in files.items():
        with atomic_files.replacing(f"{remote}/{name}") as temporary:
            temporary.write_bytes(content)
    assert corpora.load_text(f"{remote}/text.txt").test == ("three",)
    assert len(corpora.load_images(f"{remote}/images").test.labels) == 2
