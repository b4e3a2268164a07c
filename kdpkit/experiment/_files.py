"""What a recipe writes and reads again, and what it was made with."""

import hashlib
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import kdpkit
from kdpkit._internal import atomic_files, storage

if TYPE_CHECKING:
    import keras


def save_model(model: "keras.Model", path: str | os.PathLike[str]) -> None:
    """Save a model atomically, for example as `model.keras` or `gs://bucket/model.keras`.

    All processes must call this, since each may hold parts of the model; the first one's file is
    kept.
    """
    with atomic_files.replacing_in_first_process(path) as temporary:
        model.save(temporary)


def learned_vocabulary(
    lines: Sequence[str], size: int, cache_dir: str | os.PathLike[str]
) -> list[str]:
    """Learn a WordPiece vocabulary (`kdpkit.pipelines.learn_vocabulary`), once for the same lines.

    Where TensorFlow is not installed, the package `tokenizers` learns it, and finds other tokens.
    It is kept in `cache_dir`, as JSON. Where that cannot be written, a line reports it.
    """
    import keras_hub

    has_tensorflow = importlib.util.find_spec("tensorflow") is not None
    key = json.dumps([kdpkit.__version__, keras_hub.__version__, has_tensorflow, size, *lines])
    digest = hashlib.sha256(key.encode()).hexdigest()
    path = storage.path(cache_dir) / f"vocabulary-{size}-{digest[:16]}.json"
    if path.exists():
        print(f"Vocabulary: read from {path}.")
        return list(json.loads(path.read_text(encoding="utf-8")))
    if has_tensorflow:
        from kdpkit import pipelines

        tokens = pipelines.learn_vocabulary(lines, size)
    else:
        tokens = _learned_without_tensorflow(lines, size)
    try:
        with atomic_files.replacing(path) as temporary:
            temporary.write_text(json.dumps(tokens), encoding="utf-8")
    except OSError as error:
        print(f"Vocabulary: not kept, as {path} cannot be written ({error.strerror}).")
    return tokens


def _learned_without_tensorflow(lines: Sequence[str], size: int) -> list[str]:
    import tokenizers

    learner = tokenizers.BertWordPieceTokenizer(strip_accents=False)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    learner.train_from_iterator(lines, size, special_tokens=special, show_progress=False)
    ids = learner.get_vocab()
    return sorted(ids, key=ids.__getitem__)


def versions() -> dict[str, str]:
    """Return the versions of Python, kdpkit, Keras, the backend and the platform.

    >>> sorted(versions())
    ['backend', ...'kdpkit', 'keras', ...'numpy', 'platform', 'python'...]
    """
    import keras

    backend = keras.backend.backend()
    packages = ["keras", "numpy", backend]
    packages += [name for name in ("keras_hub", "tensorflow_text") if name in sys.modules]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "kdpkit": kdpkit.__version__,
        "backend": backend,
        **{name: sys.modules[name].__version__ for name in packages},
    }
