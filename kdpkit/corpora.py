"""Real text and images that need no download, or from files in common formats.

Every corpus comes in splits without overlap: text as `TextSplits` of lines, images as `ImageSplits`
of arrays. The same files give the same splits on every machine and in every run.

>>> splits = load_images()
>>> splits.train.images.shape, splits.train.images.dtype, splits.classes
((1442, 8, 8, 1), dtype('uint8'), 10)
"""

import ast
import hashlib
import io
import json
import os
import re
import sysconfig
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kdpkit import errors
from kdpkit._internal import checks, storage

__all__ = ["learn_vocabulary", "load_images", "load_pairs", "load_text"]

_HELD_OUT = 0.05  # the fraction of lines or words for validation, and for test
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_NOT_DOCUMENTATION = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
_SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_DOWNLOADED = ("mnist", "fashion_mnist")


@dataclass(frozen=True)
class TextSplits:
    """Lines of text, or pairs, for training, validation and test; none is in two of them."""

    train: tuple[Any, ...]
    validation: tuple[Any, ...]
    test: tuple[Any, ...]


class LabelledImages(NamedTuple):
    """Images, uint8 of shape `[examples, height, width, 1]`, and their labels, int32."""

    images: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class ImageSplits:
    """Images for training and test."""

    train: LabelledImages
    test: LabelledImages

    @property
    def classes(self) -> int:
        """Number of classes: one more than the largest label."""
        return int(max(self.train.labels.max(), self.test.labels.max())) + 1


def load_text(data: str | os.PathLike[str] = "builtin", *, longer_than: int = 0) -> TextSplits:
    """Load text, as a recipe's `--data` names it.

    The built-in text is the English documentation that ships with Python, about 300,000 words: each
    line is a paragraph of a docstring of the standard library, or of the reference that `help()`
    shows. Modules are parsed, never imported; their paragraphs go to one split by directory, about
    90 % of the words to training and 5 % each to validation and test. It depends on the version of
    Python.

    Args:
        data: `"builtin"`; a directory of WikiText, with `wiki.{train,valid,test}.tokens`; or a
            UTF-8 text file, of which the first 90 % of the lines are for training, the next 5 % for
            validation and the last 5 % for test. Both may be in object storage
            (`gs://bucket/...`). Blank lines are left out.
        longer_than: Lines of this many bytes or less, such as headings, are left out too.

    Raises:
        ValueError: A file is missing, empty or not UTF-8, or has fewer than 3 lines, or no line of
            a split is long enough.
    """
    longer_than = checks.integer("longer_than", longer_than, minimum=0)
    splits = _text_splits(data)
    long = [
        tuple(line for line in lines if len(line.encode()) > longer_than)
        for lines in (splits.train, splits.validation, splits.test)
    ]
    if not all(long):
        checks.fail(
            "No line of the training, validation or test text is long enough.",
            data=str(data),
            longer_than=longer_than,
            remedy=f"Lines of {longer_than} bytes or less are left out; join short ones.",
        )
    return TextSplits(*long)


def _text_splits(data: str | os.PathLike[str]) -> TextSplits:
    if data == "builtin":
        documents = _documents(Path(sysconfig.get_path("stdlib")))
        return TextSplits(*_split_documents(documents))
    path = storage.path(data)
    if path.is_dir():
        files = [path / f"wiki.{name}.tokens" for name in ("train", "valid", "test")]
        return TextSplits(*map(_lines, files))
    if not path.exists():
        remedy = "Text comes from a text file, a directory of WikiText files, or 'builtin'."
        checks.fail_for_file("There is no such file or directory", path, remedy=remedy)
    lines = _lines(path)
    if len(lines) < 3:
        checks.fail_for_file(f"3 lines are needed that are not blank, not {len(lines)}", path)
    held_out = max(1, round(_HELD_OUT * len(lines)))
    train, rest = lines[: -2 * held_out], lines[-2 * held_out :]
    return TextSplits(train, rest[:held_out], rest[held_out:])


def load_pairs(file: str | os.PathLike[str]) -> TextSplits:
    """Load pairs of a prompt and its answer, from a file of JSON lines.

    Args:
        file: Each line is an object with a "prompt" and an "answer". Every tenth pair is held out,
            alternating between validation and test. It may be in object storage.

    Returns:
        Splits of tuples `(prompt, answer)` in place of lines.

    Raises:
        ValueError: The file is missing, a line is no such object, or there are fewer than 20.
    """
    pairs = []
    for line in _lines(storage.path(file)):
        try:
            pair = json.loads(line)
            prompt, answer = pair["prompt"], pair["answer"]
            if not (isinstance(prompt, str) and isinstance(answer, str) and answer.strip()):
                raise ValueError("no texts")
        except (ValueError, KeyError, TypeError) as error:
            raise errors.FileInputError(
                f'A line of {file} is no JSON object with a "prompt" and an "answer", which are '
                f"text. Received: {line[:60]!r}."
            ) from error
        pairs.append((prompt, answer))
    if len(pairs) < 20:
        checks.fail_for_file(
            f"20 pairs are needed, of which two are held out, not {len(pairs)}", file
        )
    train = tuple(pair for index, pair in enumerate(pairs) if index % 10)
    return TextSplits(train, tuple(pairs[::20]), tuple(pairs[10::20]))


def learn_vocabulary(lines: Iterable[str], size: int, *, lowercase: bool = True) -> list[str]:
    """Learn a WordPiece vocabulary, the same in every process, with BERT's special tokens first.

    The package `tokenizers` learns it, which comes with KerasHub.

    Args:
        lines: Texts.
        size: Number of tokens; fewer if the text has no more, and more if its letters need them.
        lowercase: Whether text is converted to lowercase first, as the tokenizer then has to.

    Raises:
        ValueError: There is no text, or `size` is too small for the special tokens.

    >>> learn_vocabulary(["ab ab c"], 10)
    ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', '##b', 'a', 'b', 'c', 'ab']
    """
    import tokenizers

    size = checks.integer("size", size, minimum=len(_SPECIAL_TOKENS) + 1)
    texts = [lines] if isinstance(lines, str) else list(lines)
    if not all(isinstance(text, str) for text in texts) or not any(map(str.strip, texts)):
        checks.fail("A vocabulary is learned from lines of text.", lines=texts)
    learner = tokenizers.Tokenizer(tokenizers.models.WordPiece())
    normalizer = tokenizers.normalizers.BertNormalizer(strip_accents=False, lowercase=lowercase)
    splitter = tokenizers.pre_tokenizers.BertPreTokenizer()
    learner.normalizer, learner.pre_tokenizer = normalizer, splitter
    normalized = map(normalizer.normalize_str, texts)
    words = {word for text in normalized for word, _ in splitter.pre_tokenize_str(text)}
    # The trainer numbers these in the order of a hash, and words of equal frequency by the numbers.
    endings = sorted({f"##{letter}" for word in words for letter in word[1:]})
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=min(size, 10_000_000),
        special_tokens=[*_SPECIAL_TOKENS, *endings],
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer)
    ids = learner.get_vocab()
    return sorted(ids, key=ids.__getitem__)


def load_images(data: str | os.PathLike[str] = "builtin") -> ImageSplits:
    """Load images, as a recipe's `--data` names them.

    The built-in images are scikit-learn's 1,797 handwritten digits of 8 x 8 pixels in ten classes,
    whose intensities of 0 to 16 are scaled to 0 to 255. The last fifth of each class is the test
    split: both have the same class balance, and most writers of the one are not in the other.

    Args:
        data: `"builtin"`; `"mnist"` or `"fashion_mnist"`, which Keras downloads once into
            `~/.keras`; or an `.npz` file in the form of its `mnist.npz`, with the arrays `x_train`,
            `y_train`, `x_test` and `y_test`, also in object storage.

    Raises:
        ValueError: A file is missing or damaged, there is no network, or no scikit-learn.
    """
    if data == "builtin":
        return _digits()
    return _downloaded(str(data)) if data in _DOWNLOADED else _from_npz(storage.path(data))


def _documents(root: Path) -> dict[str, list[str]]:
    """Return paragraphs by the directory of their module, or by the module if it is at the top.

    A repeated paragraph, and a module that cannot be parsed, is left out.
    """
    documents: dict[str, list[str]] = {}
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _NOT_DOCUMENTATION.intersection(relative.parts):
            continue
        name = relative.parent if len(relative.parts) > 1 else relative
        document = documents.setdefault(f"stdlib/{name.as_posix()}", [])
        try:
            lines = [line for line in dict.fromkeys(_documentation(path)) if line not in seen]
        except (SyntaxError, ValueError, RecursionError):
            continue
        document += lines
        seen.update(lines)
    return documents


def _documentation(path: Path) -> Iterator[str]:
    """Yield the paragraphs of a module's docstrings, or of the texts in `pydoc_data/topics.py`.

    Each is one line; interpreter sessions and rules of dashes are left out.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # modules may have invalid string escapes
        tree = ast.parse(path.read_bytes())
    holds_topics = path.parts[-2:] == ("pydoc_data", "topics.py")
    for node in ast.walk(tree):
        if holds_topics:
            value = getattr(node, "value", None)
            text = value if isinstance(value, str) and "\n" in value else ""
        else:
            text = (isinstance(node, _DOCUMENTED) and ast.get_docstring(node)) or ""
        for paragraph in re.split(r"\n\s*\n", text):
            line = " ".join(paragraph.split())
            if not line.startswith(">>>") and any(map(str.isalpha, line)):
                yield line


def _split_documents(documents: dict[str, list[str]]) -> list[tuple[str, ...]]:
    """Divide documents between train, validation and test, in an order derived from their names.

    A document that would exceed the fraction of the test and the validation split is for training.
    """
    words = {name: sum(len(line.split()) for line in lines) for name, lines in documents.items()}
    quota = _HELD_OUT * sum(words.values())
    words_of_split = {"test": 0, "validation": 0}
    split_of = {}
    for name in sorted(documents, key=lambda name: hashlib.sha256(name.encode()).digest()):
        fits = [split for split, count in words_of_split.items() if count + words[name] <= quota]
        split_of[name] = fits[0] if fits else "train"
        if fits:
            words_of_split[fits[0]] += words[name]
    return [
        tuple(line for name in documents if split_of[name] == split for line in documents[name])
        for split in ("train", "validation", "test")
    ]


def _content(path: storage.AnyPath) -> bytes:
    try:
        return path.read_bytes()
    except errors.InputError:  # object storage raises its own
        raise
    except OSError as error:
        checks.fail_for_file(f"The file cannot be read ({error.strerror})", path)


def _lines(path: storage.AnyPath) -> tuple[str, ...]:
    """Read the lines of a UTF-8 file, stripped, without the blank ones."""
    content = _content(path)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        problem = f"The file is not UTF-8 text (byte {error.start}, in line {line})"
        checks.fail_for_file(problem, path, remedy="Convert it, as with `iconv -t UTF-8`.")
    lines = tuple(stripped for line in text.split("\n") if (stripped := line.strip()))
    if not lines:
        checks.fail_for_file("The file has only blank lines", path)
    return lines


def _digits() -> ImageSplits:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise errors.InputError(
            "The built-in digits come with scikit-learn, which is not installed. Run "
            "`pip install scikit-learn`, or pass an .npz file."
        ) from error
    bunch = load_digits()
    images = np.round(bunch.images * (255 / 16)).astype("uint8")
    is_test = np.zeros(len(images), bool)
    for label in range(10):
        examples = np.flatnonzero(bunch.target == label)
        is_test[examples[-(len(examples) // 5) :]] = True
    train, test = (_labelled(images[part], bunch.target[part]) for part in (~is_test, is_test))
    return ImageSplits(train, test)


def _downloaded(name: str) -> ImageSplits:
    import keras  # imported here because the other corpora need no framework

    try:
        train, test = getattr(keras.datasets, name).load_data()
    except Exception as error:  # Keras raises a bare Exception when a download fails
        raise errors.InputError(
            f"Keras could not download {name} ({error}). Pass an .npz file, or "
            "use the built-in digits."
        ) from error
    return ImageSplits(_labelled(*train), _labelled(*test))


def _from_npz(path: storage.AnyPath) -> ImageSplits:
    content = _content(path)
    names = ("x_train", "y_train", "x_test", "y_test")
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            x_train, y_train, x_test, y_test = (arrays[name] for name in names)
    except (KeyError, OSError, ValueError, AttributeError, zipfile.BadZipFile) as error:
        reason = "it is not a zip file" if "pickle" in str(error) else checks.first_line(error)
        problem = f"This is not an .npz file with {', '.join(names)} ({reason})"
        remedy = "Images come from such a file, 'builtin', 'mnist' or 'fashion_mnist'."
        checks.fail_for_file(problem, path, remedy=remedy)
    for images, labels in ((x_train, y_train), (x_test, y_test)):
        if images.ndim != 3 or images.shape[:1] != labels.shape:
            shapes = f"images of shape {images.shape}, and labels of {labels.shape}"
            checks.fail_for_file(
                f"There must be a label for each gray image. It has {shapes}", path
            )
    return ImageSplits(_labelled(x_train, y_train), _labelled(x_test, y_test))


def _labelled(images: np.ndarray, labels: np.ndarray) -> LabelledImages:
    return LabelledImages(images[..., np.newaxis], labels.astype("int32"))
