"""What a recipe writes and reads again, and what it was made with."""

import hashlib
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

    It is kept in `cache_dir`, as JSON. Where that cannot be written, a line reports it.
    """
    import keras_hub

    from kdpkit import pipelines

    key = json.dumps([kdpkit.__version__, keras_hub.__version__, size, *lines])
    digest = hashlib.sha256(key.encode()).hexdigest()
    path = storage.path(cache_dir) / f"vocabulary-{size}-{digest[:16]}.json"
    if path.exists():
        print(f"Vocabulary: read from {path}.")
        return list(json.loads(path.read_text(encoding="utf-8")))
    tokens = pipelines.learn_vocabulary(lines, size)
    try:
        with atomic_files.replacing(path) as temporary:
            temporary.write_text(json.dumps(tokens), encoding="utf-8")
    except OSError as error:
        print(f"Vocabulary: not kept, as {path} cannot be written ({error.strerror}).")
    return tokens


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
