"""What a `tf.data` pipeline's own graph says: Python functions in it, and the files it reads."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from kdpkit._findings import Finding

_PYTHON_OPS = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
_READING_OPS = {  # and which of their inputs names the files
    **dict.fromkeys(("TFRecordDataset", "TFRecordDatasetV2", "TextLineDataset"), 0),
    **dict.fromkeys(("FixedLengthRecordDataset", "FixedLengthRecordDatasetV2"), 0),
    **dict.fromkeys(("CSVDataset", "CSVDatasetV2", "MatchingFilesDataset"), 0),
    **dict.fromkeys(("ReadFile", "LoadDataset"), 0),
    **dict.fromkeys(("CacheDataset", "CacheDatasetV2"), 1),
    **dict.fromkeys(("SnapshotDataset", "SnapshotDatasetV2", "SaveDataset", "SaveDatasetV2"), 1),
}
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
    if remote:
        names = [*dict.fromkeys(_Graph(graph).local_files())]
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


class _Graph:
    """A pipeline's graph, searched for the constants that name the files it reads."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._functions = {f.signature.name: f.node_def for f in graph.library.function}

    def local_files(self) -> Iterator[str]:
        """Give the names of files here, patterns of such, and caches to be made."""
        yield from self._read_by(self._graph.node)

    def _read_by(self, nodes: Iterable[Any]) -> Iterator[str]:
        by_name = {node.name: node for node in nodes}
        for node in by_name.values():
            inputs = [by_name[name] for name in _inputs(node) if name in by_name]
            if node.op in _READING_OPS:
                named = by_name.get([*_inputs(node)][_READING_OPS[node.op]])
                if named is not None and named.op == "Const":
                    yield from filter(_is_local_name, _texts(named))
                elif named is not None:
                    yield from filter(_is_local, self._texts_before([named], by_name))
            called = [*self._called(node)]
            for function in called:
                yield from self._read_by(function)
            if any(map(self._reads, called)):  # what it is given
                yield from filter(_is_local, self._texts_before(inputs, by_name))

    def _texts_before(self, nodes: Iterable[Any], by_name: dict[str, Any]) -> Iterator[str]:
        """Give the texts that nodes are made of, those in functions too."""
        waiting, seen = [*nodes], set()
        while waiting:
            node = waiting.pop()
            if node.name not in seen:
                seen.add(node.name)
                yield from _texts(node)
                for function in self._called(node):
                    for inner in function:
                        yield from _texts(inner)
                waiting += [by_name[name] for name in _inputs(node) if name in by_name]

    def _called(self, node: Any) -> Iterator[Any]:
        """Give the nodes of each function that a node calls."""
        for attribute in node.attr.values():
            for function in (attribute.func, *attribute.list.func):
                if function.name in self._functions:
                    yield self._functions[function.name]

    def _reads(self, nodes: Iterable[Any]) -> bool:
        return any(
            node.op in _READING_OPS or any(map(self._reads, self._called(node))) for node in nodes
        )


def _inputs(node: Any) -> Iterator[str]:
    """Name the nodes that a node takes values from, in their order."""
    return (name.split(":")[0] for name in node.input if not name.startswith("^"))


def _texts(node: Any) -> Iterator[str]:
    """Give what a constant says, if it is text."""
    value = node.attr["value"].tensor if node.op == "Const" else None
    if value is not None and value.dtype == tf.string.as_datatype_enum:
        texts = tf.io.parse_tensor(value.SerializeToString(), tf.string)
        for text in np.ravel(texts.numpy()):
            yield text.decode(errors="replace")


def _is_local_name(text: str) -> bool:
    """Tell whether what certainly names a file names one here."""
    return bool(text) and (text.startswith("file://") or "://" not in text)


def _is_local(text: str) -> bool:
    """Tell whether a text, which may be a part of a name or a separator, names a file here."""
    if text.startswith("file://"):
        return True
    if not text or "://" in text or "\0" in text or "\n" in text:
        return False
    path = Path(text)
    try:
        return bool(path.name) and (path.is_absolute() or path.exists())
    except OSError:  # too long for a name
        return False
