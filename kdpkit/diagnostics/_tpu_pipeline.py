"""What a `tf.data` pipeline's own graph says: Python functions in it, and the files it reads."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from kdpkit._findings import Finding

_PYTHON_OPS = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
_READING_OPS = (
    *("TFRecordDataset", "TFRecordDatasetV2", "TextLineDataset", "MatchingFilesDataset"),
    *("FixedLengthRecordDataset", "FixedLengthRecordDatasetV2", "CSVDataset", "CSVDatasetV2"),
    *("CacheDataset", "CacheDatasetV2", "ReadFile", "SaveDataset", "LoadDataset"),
    *("SnapshotDataset", "SnapshotDatasetV2", "DatasetFromGraph"),
)
_NAMES_SHOWN = 2


def findings(dataset: tf.data.Dataset, *, remote: bool, what: str) -> Iterator[Finding]:
    """Check a pipeline.

    Args:
        dataset: The pipeline.
        remote: Whether the TPU is reached over the network.
        what: Which dataset this is.
    """
    try:
        graph = _graph_of(dataset)
    except (tf.errors.OpError, ValueError) as error:
        yield Finding(
            "unread-pipeline",
            "note",
            what,
            f"TensorFlow does not give this pipeline's graph ({str(error).splitlines()[0]}), so "
            "Python functions and files in it were not looked for.",
            "Look for `py_function`, `numpy_function` and `from_generator` in it.",
        )
        return
    nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
    if any(node.op in _PYTHON_OPS for node in nodes):
        yield Finding(
            "python-op",
            "slow",
            what,
            "The pipeline calls Python (`py_function`, `numpy_function` or `from_generator`), one "
            "example after the other on the host, for which the TPU waits.",
            "Write it in TensorFlow operations, or prepare the data beforehand, in TFRecord files.",
        )
    if remote and any(node.op in _READING_OPS for node in nodes):
        names = [*dict.fromkeys(filter(_is_local, _texts(nodes)))]
        if names:
            more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
            yield Finding(
                "local-file",
                "refused",
                what,
                f"The pipeline reads files of this machine ({', '.join(names[:_NAMES_SHOWN])}"
                f"{more}), and a TPU that is reached over the network reads Cloud Storage alone.",
                "Copy them with `gcloud storage cp`, and give `gs://...` paths; keep caches in "
                "memory.",
            )


def _graph_of(dataset: tf.data.Dataset) -> Any:
    serialized = tf.raw_ops.DatasetToGraphV2(
        input_dataset=tf.data.experimental.to_variant(dataset),
        external_state_policy=1,  # generators and tables are part of it, and nothing is run
        strip_device_assignment=True,
    )
    return tf.compat.v1.GraphDef.FromString(serialized.numpy())


def _texts(nodes: list[Any]) -> Iterator[str]:
    """Give the constants of a graph that are text, of which file names are some."""
    for node in nodes:
        value = node.attr["value"].tensor if node.op == "Const" else None
        if value is not None and value.dtype == tf.string.as_datatype_enum:
            texts = tf.io.parse_tensor(value.SerializeToString(), tf.string)
            for text in np.ravel(texts.numpy()):
                yield text.decode(errors="replace")


def _is_local(text: str) -> bool:
    """Tell whether a text names a file here, a pattern of such, or a cache to be made."""
    if not text or "://" in text or "\0" in text or "\n" in text:
        return False
    path = Path(text)
    try:
        return path.is_absolute() or path.exists()
    except OSError:  # too long for a name
        return False
