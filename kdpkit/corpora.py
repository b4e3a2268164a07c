"""Real text and images that need no download, and readers for common file formats.

Every corpus comes in splits without overlap: text as `TextSplits` of lines, images as `ImageSplits`
of arrays. The same files give the same splits on every machine and in every run.

>>> splits = digits()
>>> splits.train.images.shape, splits.train.images.dtype, splits.classes
((1442, 8, 8, 1), dtype('uint8'), 10)
"""

import ast
import gzip
import hashlib
import math
import os
import re
import struct
import sysconfig
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kdpkit import errors
from kdpkit._internal import atomic_files, checks, storage

_SHARE_HELD_OUT = 0.05  # of the lines or words, each for validation and for test
_NOT_DOCUMENTATION = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
_SHINGLE_WORDS = 5
_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


@dataclass(frozen=True)
class TextSplits:
    """Lines of text for training, validation and test; no line is in two of them.

    `note` is what a reader of the results should know about the splits, or empty.
    """

    train: tuple[str, ...]
    validation: tuple[str, ...]
    test: tuple[str, ...]
    note: str = ""


class LabelledImages(NamedTuple):
    """Images, uint8 of shape `[examples, height, width, 1]`, and their labels, int32."""

    images: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class ImageSplits:
    """Images for training and test; `note` as in `TextSplits`."""

    train: LabelledImages
    test: LabelledImages
    note: str = ""

    @property
    def classes(self) -> int:
        """Number of classes: one more than the largest label."""
        return int(max(self.train.labels.max(), self.test.labels.max())) + 1


def load_text(data: str | os.PathLike[str] = "builtin") -> TextSplits:
    """Load the text that a recipe's `--data` names.

    Args:
        data: `"builtin"` for `documentation_text`, a directory for `wikitext`, or a text file
            for `text_file`, on this machine or in object storage (`gs://bucket/...`).

    Raises:
        ValueError: None of these is there; else as the function that reads it.
    """
    if data == "builtin":
        return documentation_text()
    path = storage.path(data)
    if path.is_dir():
        return wikitext(path)
    if not path.exists():
        checks.fail_for_file(
            "There is no such file or directory",
            path,
            remedy="Text comes from a text file, a directory of WikiText files, or 'builtin'.",
        )
    return text_file(path)


def load_images(data: str | os.PathLike[str] = "builtin") -> ImageSplits:
    """Load the images that a recipe's `--data` names.

    Args:
        data: `"builtin"` for `digits`, `"mnist"` or `"fashion_mnist"` for a download by Keras, or
            a directory with the IDX files of either, as `gs://bucket/mnist` too.

    Raises:
        ValueError: None of these is there; else as the function that reads it.
    """
    named = {"builtin": digits, "mnist": mnist, "fashion_mnist": fashion_mnist}
    return named[str(data)]() if data in named else mnist(data)


def documentation_text() -> TextSplits:
    """Read the English documentation that ships with Python: about 300,000 words.

    Each line is one paragraph of a docstring of the standard library, or of the language reference
    that `help()` shows. The source is parsed, never imported. Interpreter sessions, tests and
    repeated paragraphs are left out. About 90 % of the words train and 5 % each validate and test.
    All modules of a directory go to one split, and held-out paragraphs that a paragraph of an
    earlier split nearly repeats (half of their five-word sequences) are dropped.

    The text depends on the Python version.

    Raises:
        ValueError: This Python comes without the source of its standard library.
    """
    documents, unparsed = _read_documents(Path(sysconfig.get_path("stdlib")))
    train, validation, test = _held_apart(_split_documents(_without_repeats(documents)))
    if not (validation and test):
        checks.fail(
            "This Python has too few source files in its standard library to train on their "
            "documentation.",
            files=len(documents),
            remedy="Pass a text file or a directory of WikiText files.",
        )
    note = f"Left out, as Python cannot parse them: {unparsed} files." if unparsed else ""
    return TextSplits(train, validation, test, note)


def wikitext(directory: str | os.PathLike[str]) -> TextSplits:
    """Read WikiText-2 or WikiText-103 from `wiki.{train,valid,test}.tokens`, blank lines left out.

    If `wiki.train.tokens` is missing, the validation file is used for training, and the two halves
    of the test file, cut between two articles, for validation and test; `note` then reports it.

    Raises:
        ValueError: The directory or its files are missing, empty or not UTF-8.
    """
    folder = storage.path(directory)
    if not folder.is_dir():
        checks.fail_for_file("There is no such directory", folder, remedy="Check the path.")
    paths = {name: folder / f"wiki.{name}.tokens" for name in ("train", "valid", "test")}
    missing = [path.name for name, path in paths.items() if name != "train" and not path.exists()]
    if missing:
        checks.fail_for_file(
            f"WikiText needs {' and '.join(missing)}, and there is {_listing(folder)}", folder
        )
    valid, test = _lines(paths["valid"]), _lines(paths["test"])
    if paths["train"].exists():
        return TextSplits(_lines(paths["train"]), valid, test)
    middle = _middle_article(test)
    return TextSplits(
        train=valid,
        validation=test[:middle],
        test=test[middle:],
        note="Without wiki.train.tokens it trains on wiki.valid.tokens, and validates and tests "
        "on the two halves of wiki.test.tokens.",
    )


def text_file(path: str | os.PathLike[str]) -> TextSplits:
    """Read a UTF-8 text file, plain or gzipped, one example per line, blank lines left out.

    The first 90 % of the lines are for training, the next 5 % for validation and the last 5 % for
    test, so neighbouring lines stay together.

    Raises:
        ValueError: The file is missing, empty, damaged, not UTF-8, or has fewer than 3 lines.
    """
    lines = _lines(storage.path(path))
    if len(lines) < 3:
        checks.fail_for_file(
            f"Splitting needs at least 3 lines that are not blank, and the file has {len(lines)}",
            path,
        )
    held_out = max(1, round(_SHARE_HELD_OUT * len(lines)))
    return TextSplits(
        train=lines[: -2 * held_out],
        validation=lines[-2 * held_out : -held_out],
        test=lines[-held_out:],
    )


def digits() -> ImageSplits:
    """Return scikit-learn's 1,797 handwritten digits: 8 x 8 pixels, ten classes.

    The intensities of 0 to 16 are scaled to 0 to 255. The last fifth of each class is the test
    split, so both splits have the same class balance, and most writers of the test split are not in
    the training split.

    Raises:
        ValueError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise errors.InputError(
            "The built-in digits come with scikit-learn, which is not installed. Run "
            "`pip install scikit-learn`, or pass a directory with IDX files."
        ) from error
    bunch = load_digits()
    images = np.round(bunch.images * (255 / 16)).astype("uint8")[..., np.newaxis]
    labels = bunch.target.astype("int32")
    tested = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        examples = np.flatnonzero(labels == label)
        tested[examples[-(len(examples) // 5) :]] = True
    return ImageSplits(
        LabelledImages(images[~tested], labels[~tested]),
        LabelledImages(images[tested], labels[tested]),
    )


def mnist(directory: str | os.PathLike[str] | None = None) -> ImageSplits:
    """Load MNIST: handwritten digits of 28 x 28 pixels, ten classes.

    Args:
        directory: Where the IDX files are (`train-images-idx3-ubyte` and its three companions,
            gzipped or not). With only the `t10k` files, the first four fifths of them (8,000
            images) are for training and the rest for test; `note` then reports it. None downloads
            the files through Keras, once, into `~/.keras`.

    Raises:
        ValueError: A file is missing or damaged, or there is no network.
    """
    return _images("mnist", directory)


def fashion_mnist(directory: str | os.PathLike[str] | None = None) -> ImageSplits:
    """Load Fashion-MNIST: articles of clothing in ten classes, in the format of `mnist`.

    Args:
        directory: As for `mnist`; the files have the same names.

    Raises:
        ValueError: As for `mnist`.
    """
    return _images("fashion_mnist", directory)


def read_idx(path: str | os.PathLike[str]) -> np.ndarray:
    """Read an array from an IDX file, the format of MNIST, gzipped or not.

    All data types of the format and any number of dimensions are supported; the result has the
    machine's byte order.
    Source: Yann LeCun's MNIST page, "The IDX file format".

    Raises:
        ValueError: The file is missing, not an IDX file, truncated, or has bytes after its data.
    """
    content = _content(storage.path(path))
    try:
        zeros, code, dimensions = struct.unpack_from(">HBB", content)
        shape = struct.unpack_from(f">{dimensions}I", content, offset=4)
        dtype = np.dtype(_IDX_TYPES[code])
    except (struct.error, KeyError):
        zeros = None
    if zeros != 0:
        checks.fail_for_file(
            f"This is not an IDX file (it begins with the bytes {content[:4].hex(' ')})", path
        )
    start = 4 + 4 * dimensions
    expected, present = math.prod(shape) * dtype.itemsize, len(content) - start
    if present != expected:
        problem = "is cut short" if present < expected else "goes on after its data"
        checks.fail_for_file(
            f"The IDX file {problem}: its header announces {expected:,} bytes, for {dtype.name} of "
            f"shape {shape}, and {present:,} are there",
            path,
        )
    return np.ndarray(shape, dtype, content, start).astype(dtype.newbyteorder("="))


def _read_documents(root: Path) -> tuple[dict[str, list[str]], int]:
    """Read the paragraphs by document, and count the files that cannot be parsed.

    A document, which goes to one split, is a directory of modules or a top-level module.
    """
    documents: dict[str, list[str]] = {}
    unparsed = 0
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if _NOT_DOCUMENTATION.intersection(inside.parts):
            continue
        name = inside.parent if len(inside.parts) > 1 else inside
        document = documents.setdefault(f"stdlib/{name.as_posix()}", [])
        try:
            document.extend(_documentation(path))
        except (SyntaxError, ValueError, RecursionError):
            unparsed += 1
    return documents, unparsed


def _documentation(path: Path) -> Iterator[str]:
    """Yield the paragraphs of a module's docstrings, or of the texts in `pydoc_data/topics.py`.

    Each is one line; interpreter sessions and rules of dashes are left out.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the module's own string escapes
        tree = ast.parse(path.read_bytes())
    holds_topics = path.parts[-2:] == ("pydoc_data", "topics.py")
    for text in map(_topic if holds_topics else _docstring, ast.walk(tree)):
        for paragraph in re.split(r"\n\s*\n", text):
            line = " ".join(paragraph.split())
            if not line.startswith(">>>") and any(map(str.isalpha, line)):
                yield line


def _docstring(node: ast.AST) -> str:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return ast.get_docstring(node) or ""
    return ""


def _topic(node: ast.AST) -> str:
    text = getattr(node, "value", None)
    return text if isinstance(text, str) and "\n" in text else ""


def _without_repeats(documents: dict[str, list[str]]) -> dict[str, list[str]]:
    """Keep each paragraph where it comes first."""
    seen: set[str] = set()
    kept = {}
    for name, lines in documents.items():
        kept[name] = [line for line in dict.fromkeys(lines) if line not in seen]
        seen.update(kept[name])
    return kept


def _split_documents(documents: dict[str, list[str]]) -> list[list[str]]:
    """Divide documents between train, validation and test, in an order derived from their names.

    Test and validation take documents until they have their fraction of the words; a document that
    would exceed it is for training.
    """
    words = {name: sum(len(line.split()) for line in lines) for name, lines in documents.items()}
    quota = _SHARE_HELD_OUT * sum(words.values())
    taken = {"test": 0, "validation": 0}
    split_of = {}
    for name in sorted(documents, key=lambda name: hashlib.sha256(name.encode()).digest()):
        fits = [split for split in taken if taken[split] + words[name] <= quota]
        split_of[name] = fits[0] if fits else "train"
        if fits:
            taken[fits[0]] += words[name]
    return [
        [line for name, lines in documents.items() if split_of[name] == split for line in lines]
        for split in ("train", "validation", "test")
    ]


def _held_apart(splits: Iterable[list[str]]) -> Iterator[tuple[str, ...]]:
    """Drop from each split the lines that an earlier split nearly repeats."""
    earlier: set[tuple[str, ...]] = set()
    for lines in splits:
        shingles = {line: _shingles(line) for line in lines}
        kept = [line for line in lines if 2 * len(shingles[line] & earlier) < len(shingles[line])]
        yield tuple(kept)
        earlier.update(*(shingles[line] for line in kept))


def _shingles(line: str) -> set[tuple[str, ...]]:
    """Return the sequences of five words in a line, or all its words where they are fewer.

    Digits and case are ignored, so "codec cp1250" repeats "codec cp1251".
    """
    words = re.findall(r"[^\W\d_]+", line.lower())
    last = max(1, len(words) - _SHINGLE_WORDS + 1)
    return {tuple(words[start : start + _SHINGLE_WORDS]) for start in range(last)}


def _lines(path: storage.AnyPath) -> tuple[str, ...]:
    """Read the lines of a UTF-8 file, stripped, without the blank ones."""
    content = _content(path)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        checks.fail_for_file(
            f"The file is not UTF-8 text (byte {error.start}, in line {line})",
            path,
            remedy="Convert it, for example with `iconv -t UTF-8`.",
        )
    lines = tuple(stripped for line in text.split("\n") if (stripped := line.strip()))
    if not lines:
        checks.fail_for_file("The file has only blank lines", path)
    return lines


def _content(path: storage.AnyPath) -> bytes:
    """Read a file's bytes, unpacked if they are gzipped."""
    content = atomic_files.readable(path).read_bytes()
    if not content.startswith(b"\x1f\x8b"):
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, OSError, zlib.error) as error:
        checks.fail_for_file(
            f"The gzipped file is damaged or cut short ({error})", path, remedy="Fetch it again."
        )


def _middle_article(lines: Sequence[str]) -> int:
    """Return the index of the article title nearest to the middle, in the middle half of lines."""
    middle = len(lines) // 2
    titles = [
        index
        for index in range(len(lines) // 4, len(lines) * 3 // 4 + 1)
        if 0 < index < len(lines) and re.fullmatch(r"= [^=].* =", lines[index])
    ]
    return min(titles, key=lambda index: abs(index - middle), default=middle)


def _listing(folder: storage.AnyPath) -> str:
    names = sorted(path.name for path in folder.iterdir())
    shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
    return shown or "nothing"


def _images(name: str, directory: str | os.PathLike[str] | None) -> ImageSplits:
    return _downloaded(name) if directory is None else _image_directory(storage.path(directory))


def _downloaded(name: str) -> ImageSplits:
    import keras  # the other corpora need no framework

    try:
        (images, labels), (test_images, test_labels) = getattr(keras.datasets, name).load_data()
    except Exception as error:  # Keras raises a bare Exception when a download fails
        raise errors.InputError(
            f"Keras could not download {name} ({error}). Pass a directory with its IDX files, or "
            "use the built-in digits."
        ) from error
    return ImageSplits(_labelled(images, labels), _labelled(test_images, test_labels))


def _image_directory(folder: storage.AnyPath) -> ImageSplits:
    if not folder.is_dir():
        checks.fail_for_file(
            "There is no such directory",
            folder,
            remedy="Images come from a directory with IDX files, 'builtin', 'mnist' or "
            "'fashion_mnist'.",
        )
    test = _labelled_idx(folder, "t10k")
    if _idx_file(folder, "train-images-idx3-ubyte"):
        return ImageSplits(_labelled_idx(folder, "train"), test)
    trained = len(test.labels) * 4 // 5
    if not trained:
        checks.fail_for_file("Training and testing need at least 2 images", folder)
    return ImageSplits(
        LabelledImages(test.images[:trained], test.labels[:trained]),
        LabelledImages(test.images[trained:], test.labels[trained:]),
        note=f"Without the train files it trains on the first {trained:,} of the t10k images and "
        f"tests on the last {len(test.labels) - trained:,}.",
    )


def _labelled_idx(folder: storage.AnyPath, prefix: str) -> LabelledImages:
    names = (f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte")
    paths = [_idx_file(folder, name) for name in names]
    missing = [name for name, path in zip(names, paths, strict=True) if path is None]
    if missing:
        checks.fail_for_file(
            f"{' and '.join(missing)} (or the same with .gz) must be here, and there is "
            f"{_listing(folder)}",
            folder,
        )
    images, labels = (read_idx(path) for path in paths if path is not None)
    fits = images.ndim == 3 and images.size and labels.shape == images.shape[:1]
    if not fits or {images.dtype, labels.dtype} != {np.dtype("uint8")}:
        checks.fail_for_file(
            "Images of shape [n, height, width] and n labels, both uint8, are needed, and there "
            f"are {images.dtype} of {images.shape} and {labels.dtype} of {labels.shape}",
            folder / names[0],
        )
    return _labelled(images, labels)


def _idx_file(folder: storage.AnyPath, name: str) -> storage.AnyPath | None:
    candidates = (folder / name, folder / f"{name}.gz")
    return next((path for path in candidates if path.exists()), None)


def _labelled(images: np.ndarray, labels: np.ndarray) -> LabelledImages:
    return LabelledImages(images[..., np.newaxis], labels.astype("int32"))
