"""The stages of a dataset, as its user wrote them.

This is the one place that reads tf.data's private parts: the names of its dataset classes, their
attributes, `_inputs()` and `_functions()`, which are alike in TensorFlow 2.19 to 2.21. They give
the dataset of each stage, which a serialised graph does not, and copy no data, which it would.
What they do not give is None, or an empty set, and nothing is concluded from that.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

_PYTHON_OPS = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc"})
_VARIABLE_OPS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd"})
_READING_OPS = frozenset(
    {"TFRecordDataset", "TFRecordDatasetV2", "TextLineDataset", "FixedLengthRecordDataset"}
    | {"FixedLengthRecordDatasetV2", "CSVDataset", "CSVDatasetV2"}
)
# Those with a state: they draw anew whenever they run.
_RANDOM_OPS = frozenset(
    {"RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal"}
    | {"ParameterizedTruncatedNormal", "RandomShuffle", "Multinomial", "RandomGamma"}
    | {"RandomPoisson", "RandomPoissonV2", "SampleDistortedBoundingBox"}
    | {"SampleDistortedBoundingBoxV2", "RngReadAndSkip", "RngSkip", "RandomCrop"}
    | {"StatefulUniform", "StatefulUniformInt", "StatefulStandardNormalV2", "RandomDatasetV2"}
    | {"StatefulTruncatedNormal", "StatefulUniformFullInt", "AnonymousRandomSeedGenerator"}
)
_CHEAP_NAMES = """
    Placeholder Const Identity IdentityN NoOp Cast Bitcast Reshape ExpandDims Squeeze Pack Unpack
    Shape Size Rank StridedSlice Slice Concat ConcatV2 Split SplitV GatherV2 Transpose Range Fill
    OnesLike ZerosLike Tile BroadcastTo OneHot Abs Neg Sign Square Sqrt Rsqrt Exp Log Maximum
    Minimum Add AddV2 Sub Mul Div RealDiv FloorDiv FloorMod Mod Pow Sum Mean Prod Max Min All Any
    Equal NotEqual Less LessEqual Greater GreaterEqual LogicalAnd LogicalOr LogicalNot Select
    SelectV2 Where ClipByValue Round Floor Ceil StringLength StopGradient EnsureShape Assert
    LookupTableFindV2 LookupTableInsertV2 LookupTableSizeV2 ReadVariableOp PartitionedCall
    StatefulPartitionedCall If StatelessIf Pad PadV2 ArgMax Timestamp
"""
_CHEAP_OPS = frozenset(_CHEAP_NAMES.split())
_KINDS = {
    "tensor_slice": "from_tensor_slices",
    "tensor": "from_tensors",
    "sparse_tensor_slice": "from_sparse_tensor_slices",
    "text_line": "TextLineDataset",
    "tf_record": "TFRecordDataset",
    "fixed_length_record": "FixedLengthRecordDataset",
    "csv": "CsvDataset",
    "directed_interleave": "choose_from_datasets",
    "data_service": "distribute",
    "variant": "dataset",
}
KEEPS = frozenset({"cache", "snapshot"})  # kinds of stages that keep what they are given
# They change neither the elements nor the work.
_TRANSPARENT = frozenset(
    {"options", "assert_cardinality", "restructured", "dense_to_ragged", "ignore_errors"}
)


@dataclasses.dataclass(frozen=True)
class Function:
    """What is known of a function that a stage calls.

    Attributes:
        name: Its name in Python.
        ops: The names of its operations, also those inside datasets and functions within it.
        is_stateful: Whether tf.data leaves it in its order, one call after the other.
        call: The function itself, as its user gave it; None where it is not known.
    """

    name: str
    ops: frozenset[str]
    is_stateful: bool
    call: Callable[..., Any] | None = None

    @property
    def calls_python(self) -> bool:
        """Whether it holds a `py_function`, a `numpy_function` or a generator."""
        return bool(self.ops & _PYTHON_OPS)

    @property
    def looks_up(self) -> bool:
        """Whether it reads a variable or a lookup table, such as a Keras layer's."""
        return any(op.startswith("LookupTable") or op in _VARIABLE_OPS for op in self.ops)

    @property
    def draws(self) -> bool:
        """Whether it draws other numbers each time, as augmentation and Keras layers do."""
        moves_a_seed = any(op.startswith("Assign") for op in self.ops)
        stateless = any(op.startswith("StatelessRandom") for op in self.ops)
        return bool(self.ops & _RANDOM_OPS) or (stateless and moves_a_seed)

    @property
    def reads_files(self) -> bool:
        """Whether it opens files of records or lines as a dataset."""
        return bool(self.ops & _READING_OPS)

    @property
    def is_cheap(self) -> bool:
        """Whether it only moves and compares numbers, for which a thread of its own is too much."""
        return self.ops <= _CHEAP_OPS


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """One stage of a pipeline.

    Attributes:
        dataset: What it gives, options and an asserted cardinality included.
        made_by: The dataset object of the stage itself.
        kind: The method or class that made it, such as `"map"` or `"TFRecordDataset"`.
        inputs: The stages that it takes elements from.
        functions: What it calls.
    """

    dataset: Any
    made_by: Any
    kind: str
    inputs: tuple["Stage", ...]
    functions: tuple[Function, ...]

    def argument(self, name: str) -> Any:
        """Give an argument as the dataset keeps it, None where it is unknown."""
        return getattr(self.made_by, f"_{name}", None)

    def setting(self, name: str) -> Any:
        """Give an argument as a Python value, None where it is unknown."""
        value = self.argument(name)
        value = tf.get_static_value(value) if tf.is_tensor(value) else value
        if value is None or isinstance(value, (bool, str)):
            return value
        return value.item() if hasattr(value, "item") and value.size == 1 else None

    @functools.cached_property
    def cardinality(self) -> int | None:
        """The elements it gives: None if TensorFlow does not know, infinity as -1."""
        count = int(self.dataset.cardinality())
        return None if count == tf.data.UNKNOWN_CARDINALITY else count

    @property
    def is_parallel(self) -> bool:
        """Whether its elements are made by threads of its own, ahead of being asked for."""
        return "Parallel" in type(self.made_by).__name__

    @property
    def label(self) -> str:
        """The stage as its user writes it: `map(decode)`, `shuffle(1000)`, `batch(32)`."""
        argument = _argument(self)
        return self.kind if argument is None else f"{self.kind}({argument})"


def end_of(dataset: tf.data.Dataset) -> Stage:
    """Give the last stage of a dataset, with all before it."""
    return _stage(dataset, {})


def line(end: Stage) -> tuple[Stage, ...]:
    """Give the stages from the last one back to where datasets come together, the source first."""
    stages = [end]
    while len(stages[-1].inputs) == 1:
        stages += stages[-1].inputs
    return tuple(reversed(stages))


def paths(end: Stage) -> Iterator[tuple[Stage, tuple[Stage, ...]]]:
    """Give each stage once, with the stages that follow it, the nearest first."""
    waiting: list[tuple[Stage, tuple[Stage, ...]]] = [(end, ())]
    seen: set[int] = set()
    while waiting:
        stage, after = waiting.pop(0)
        if id(stage) not in seen:
            seen.add(id(stage))
            yield stage, after
            waiting += [(before, (stage, *after)) for before in stage.inputs]


def before(stage: Stage) -> Iterator[Stage]:
    """Give all stages that a stage takes from."""
    return (one for one, after in paths(stage) if after)


def is_kept(after: tuple[Stage, ...]) -> bool:
    """Tell whether one of the stages that follow keeps what it was given."""
    return any(stage.kind in KEEPS for stage in after)


def shuffles(stage: Stage) -> bool:
    """Tell whether a stage has a new order each epoch, or its datasets within have."""
    if stage.kind == "train_pipeline":
        return True
    if stage.kind == "shuffle":
        return stage.setting("reshuffle_each_iteration") is not False
    return any("ShuffleDataset" in op for function in stage.functions for op in function.ops)


def has_work(stage: Stage) -> bool:
    """Tell whether a stage computes or reads, and does not only cut and mix what is in memory."""
    return any(not one.is_cheap for one in stage.functions) or stage.kind.endswith("Dataset")


def _stage(dataset: Any, known: dict[int, Stage]) -> Stage:
    if id(dataset) not in known:
        known[id(dataset)] = _read(dataset, known)
    return known[id(dataset)]


def _read(dataset: Any, known: dict[int, Stage]) -> Stage:
    movable = getattr(dataset, "movable", None)  # of `train_pipeline`, whose graph hides its source
    if movable is not None:
        return Stage(dataset, dataset, "train_pipeline", (_stage(movable.examples, known),), ())
    functions = tuple(_functions(dataset))
    kind = _kind(dataset)
    inputs = getattr(dataset, "_data_inputs", None) or _inputs(dataset)
    if kind in _TRANSPARENT and len(inputs) == 1:
        within = _stage(_normalized(kind, inputs[0]), known)
        return dataclasses.replace(within, dataset=dataset)
    if any("GeneratorDataset" in function.ops for function in functions) and kind == "flat_map":
        kind, inputs = "from_generator", ()
    if kind == "TFRecordDataset" and [_kind(one) for one in inputs] == ["from_tensor_slices"]:
        inputs = ()  # the names of its files
    return Stage(dataset, dataset, kind, tuple(_stage(one, known) for one in inputs), functions)


def _normalized(kind: str, dataset: Any) -> Any:
    """Give what `unbatch`, `rebatch` and `snapshot` were called on: they add a map of their own."""
    inputs = _inputs(dataset)
    return inputs[0] if kind == "restructured" and _kind(dataset) == "map" else dataset


def _inputs(dataset: Any) -> list[Any]:
    return [*getattr(dataset, "_inputs", list)()]


def _kind(dataset: Any) -> str:
    """Give `"take_while"` for `_TakeWhileDataset`, `"map"` for `_ParallelMapDataset`."""
    name = re.sub(r"(Dataset|V\d)+$", "", type(dataset).__name__.lstrip("_")).replace(
        "Parallel", ""
    )
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
    return _KINDS.get(words, words)


def _functions(dataset: Any) -> Iterator[Function]:
    for wrapper in getattr(dataset, "_functions", list)():
        graph = wrapper.function.graph.as_graph_def()
        nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
        ops = frozenset(node.op for node in nodes)
        call = getattr(wrapper, "_func", None)
        name = getattr(call, "__name__", "")
        yield Function(name.strip("<>"), ops, any(map(_is_stateful, ops)), call)


def _is_stateful(op: str) -> bool:
    """Tell whether tf.data takes an operation for one whose calls must keep their order."""
    if op in ("Assert", "StatefulPartitionedCall", "If", "While") or "Dataset" in op:
        return False  # the functions inside say so themselves
    definition = op_def_registry.get(op)
    return definition is not None and definition.is_stateful


def _argument(stage: Stage) -> Any:
    by_kind = {"shuffle": "buffer_size", "batch": "batch_size", "padded_batch": "batch_size"}
    if stage.kind in by_kind:
        return stage.setting(by_kind[stage.kind])
    if stage.kind == "prefetch":
        ahead = stage.setting("buffer_size")
        return "AUTOTUNE" if ahead == tf.data.AUTOTUNE else ahead
    if stage.kind in ("repeat", "take", "skip"):
        count = stage.setting("count")
        return "" if count == -1 else count
    if stage.kind in ("map", "filter", "flat_map", "interleave") and stage.functions:
        return stage.functions[0].name or None
    return None


def files_of(stage: Stage) -> int | None:
    """Count the files that a stage reads itself, None if it reads none or they are not known."""
    if stage.kind in ("TextLineDataset", "TFRecordDataset", "FixedLengthRecordDataset"):
        names = getattr(stage.made_by, "_filenames", None)
        if isinstance(names, tf.data.Dataset):
            count = int(names.cardinality())
            return count if count >= 0 else None
        return None
    if any(function.reads_files for function in stage.functions) and len(stage.inputs) == 1:
        count = stage.inputs[0].cardinality or 0
        return count if count > 0 else None
    return None
