"""The stages of a dataset, as the user wrote them.

This file uses private parts of tf.data: the names of its dataset classes, their attributes,
`_inputs()` and `_functions()`, which are the same in TensorFlow 2.20 and 2.21. Unlike a serialized
graph they give access to the dataset of each stage and copy no data. Unknown values are None or an
empty set, and no rule draws conclusions from them.
"""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from kdpkit.pipelines._epochs import TrainDataset

# Names of operations, as regular expressions.
_PYTHON = r"PyFunc(Stateless)?|EagerPyFunc"
_STORED = r"LookupTable.*|ReadVariableOp|ResourceGather(Nd)?"
_READING = r"(TFRecord|TextLine|FixedLengthRecord|CSV)Dataset(V2)?"
# Stateful ones: they draw again whenever they run.
_RANDOM = (
    r"Random(?!Index).*|(Parameterized)?TruncatedNormal|Multinomial|SampleDistortedBoundingBox.*"
    r"|Rng.*|Stateful(Uniform|StandardNormal|Truncated|Random).*|AnonymousRandomSeedGenerator"
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
# These change neither the elements nor the work.
_TRANSPARENT = frozenset(
    {"options", "assert_cardinality", "restructured", "dense_to_ragged", "ignore_errors"}
)
# The first of the two inputs of a dataset's operation that are its seeds.
_SEEDS_OF = {"ShuffleDatasetV3": 2, "ShuffleDataset": 2, "RandomDataset": 0, "RandomDatasetV2": 0}
# Arguments that stages do not keep, or that let threads change the order.
_ARGUMENTS = {"deterministic": True, "sloppy": False, "row_splits_dtype": tf.int64}
_NAMED_BY = {
    **dict.fromkeys(("shuffle", "prefetch"), "buffer_size"),
    **dict.fromkeys(("batch", "padded_batch"), "batch_size"),
    **dict.fromkeys(("repeat", "take", "skip"), "count"),
}


@dataclasses.dataclass(frozen=True)
class Function:
    """A function that a stage calls.

    Attributes:
        name: Its name in Python.
        ops: The names of its operations, including those in nested datasets and functions.
        call: The function that the user passed; None if unknown.
        captures_datasets: Whether it uses datasets that were made outside of it.
        has_unseeded_order: Whether it makes a dataset of random order without a seed.
    """

    name: str
    ops: frozenset[str]
    call: Callable[..., Any] | None
    captures_datasets: bool
    has_unseeded_order: bool

    @property
    def is_stateful(self) -> bool:
        """Whether tf.data runs its calls serially, in order."""
        return any(map(_is_stateful, self.ops))

    @property
    def calls_python(self) -> bool:
        """Whether it holds a `py_function`, a `numpy_function` or a generator."""
        return self._has(_PYTHON)

    @property
    def looks_up(self) -> bool:
        """Whether it reads a variable or a lookup table, such as a Keras layer's."""
        return self._has(_STORED)

    @property
    def draws(self) -> bool:
        """Whether it draws new random numbers each time, as augmentation and Keras layers do."""
        moves_a_seed = self._has("StatelessRandom.*") and self._has("Assign.*")
        return self._has(_RANDOM) or moves_a_seed

    @property
    def assigns(self) -> bool:
        """Whether it changes a variable, such as a counter."""
        return self._has("Assign.*")

    @property
    def reads_files(self) -> bool:
        """Whether it opens record or text files as a dataset."""
        return self._has(_READING)

    @property
    def is_cheap(self) -> bool:
        """Whether it only moves and compares numbers, too little work for a thread."""
        return self.ops <= _CHEAP_OPS

    def _has(self, pattern: str) -> bool:
        return any(re.fullmatch(pattern, op) for op in self.ops)


def _is_stateful(op: str) -> bool:
    """Return whether tf.data considers an operation stateful, so its calls keep their order."""
    if op in ("Assert", "StatefulPartitionedCall", "If", "While") or "Dataset" in op:
        return False  # decided by the operations of the inner functions
    definition = op_def_registry.get(op)
    return definition is not None and definition.is_stateful


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """One stage of a pipeline.

    Attributes:
        dataset: Its output, including options and an asserted cardinality.
        made_by: The dataset object of the stage.
        kind: The method or class that created it, such as `"map"` or `"TFRecordDataset"`.
        inputs: The stages that it takes elements from.
    """

    dataset: tf.data.Dataset
    made_by: tf.data.Dataset
    kind: str
    inputs: tuple["Stage", ...]

    @functools.cached_property
    def functions(self) -> tuple[Function, ...]:
        """The functions that it calls."""
        return tuple(functions_of(self.made_by))

    def argument(self, name: str) -> Any:
        """Return an argument as stored in the dataset; None if unknown."""
        return getattr(self.made_by, f"_{name}", None)

    def setting(self, name: str) -> Any:
        """Return an argument as a Python value; None if unknown."""
        value = self.argument(name)
        value = tf.get_static_value(value) if tf.is_tensor(value) else value
        if value is None or isinstance(value, (bool, str)):
            return value
        return value.item() if hasattr(value, "item") and value.size == 1 else None

    @functools.cached_property
    def cardinality(self) -> int | None:
        """The number of its elements: None if unknown, -1 if infinite."""
        count = int(self.dataset.cardinality())
        return None if count == tf.data.UNKNOWN_CARDINALITY else count

    @property
    def is_parallel(self) -> bool:
        """Whether its own threads produce elements ahead of time."""
        return "Parallel" in type(self.made_by).__name__

    @property
    def keeps(self) -> bool:
        """Whether it is a cache."""
        return self.kind in ("cache", "snapshot")

    @property
    def shuffles(self) -> bool:
        """Whether it, or a dataset inside it, has a new order each epoch."""
        if self.kind == "shuffle":
            return self.setting("reshuffle_each_iteration") is not False
        within = (op for function in self.functions for op in function.ops)
        return self.kind == "train_pipeline" or any("ShuffleDataset" in op for op in within)

    @property
    def has_work(self) -> bool:
        """Whether it computes or reads, instead of only slicing and mixing data in memory."""
        return self.kind.endswith("Dataset") or not all(one.is_cheap for one in self.functions)

    @property
    def label(self) -> str:
        """The stage as the user writes it: `map(decode)`, `shuffle(1000)`, `batch(32)`."""
        argument = self.setting(_NAMED_BY[self.kind]) if self.kind in _NAMED_BY else None
        if self.kind == "prefetch" and argument == tf.data.AUTOTUNE:
            argument = "AUTOTUNE"
        elif self.kind in ("repeat", "take", "skip") and argument == -1:
            argument = ""
        elif self.kind in ("map", "filter", "flat_map", "interleave") and self.functions:
            argument = self.functions[0].name or None
        return self.kind if argument is None else f"{self.kind}({argument})"

    @property
    def files(self) -> int | None:
        """The number of files that it reads itself; None if unknown or none."""
        names = None
        if self.kind in ("TextLineDataset", "TFRecordDataset", "FixedLengthRecordDataset"):
            names = self.argument("filenames")
        elif len(self.inputs) == 1 and any(one.reads_files for one in self.functions):
            names = self.inputs[0].dataset
        count = int(names.cardinality()) if isinstance(names, tf.data.Dataset) else 0
        return count if count > 0 else None


def end_of(dataset: tf.data.Dataset) -> Stage:
    """Return the last stage of a dataset, which refers to all stages before it."""
    return _stage(dataset, {})


def line(end: Stage) -> tuple[Stage, ...]:
    """Return the stages back to where datasets are combined, source first."""
    stages = [end]
    while len(stages[-1].inputs) == 1:
        stages += stages[-1].inputs
    return tuple(reversed(stages))


def paths(end: Stage) -> Iterator[tuple[Stage, tuple[Stage, ...]]]:
    """Yield each stage once, with the stages after it, the nearest first."""
    waiting: list[tuple[Stage, tuple[Stage, ...]]] = [(end, ())]
    seen: set[int] = set()
    while waiting:
        stage, after = waiting.pop(0)
        if id(stage) not in seen:
            seen.add(id(stage))
            yield stage, after
            waiting += [(before, (stage, *after)) for before in stage.inputs]


def before(stage: Stage) -> Iterator[Stage]:
    """Yield all stages before a stage."""
    return (one for one, after in paths(stage) if after)


def remade(
    dataset: tf.data.Dataset,
    other: Callable[[tf.data.Dataset], tf.data.Dataset],
    traced: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> tf.data.Dataset | None:
    """Return the last stage of a dataset on other inputs, with its threads in order.

    Args:
        dataset: A dataset whose stage keeps its arguments as attributes, as most do.
        other: Returns what takes the place of an input.
        traced: Returns a user's function as it is to be traced.

    Returns:
        The stage, or None where its arguments are not known.
    """
    if kind_of(dataset) == "options":
        return other(dataset._inputs()[0])

    def again(value: Any) -> Any:
        if isinstance(value, tf.data.Dataset):
            return other(value)
        if not isinstance(value, tf.Tensor):
            return traced(value._func) if hasattr(value, "_func") else value
        known = tf.get_static_value(value)
        if known is None or value.dtype not in (tf.bool, tf.int64):
            return value
        return known if known.shape else known.item()

    arguments = {}
    for name, parameter in inspect.signature(type(dataset)).parameters.items():
        kept = "_input_dataset" if name == "dataset" else f"_{name}"
        value = _ARGUMENTS.get(name, getattr(dataset, kept, parameter.default))
        if value is parameter.empty:
            return None
        is_data = name in ("padding_values", "initial_state")  # whose type counts
        arguments[name] = value if is_data else tf.nest.map_structure(again, value)
    made = type(dataset)(**arguments)
    return made if made.element_spec == dataset.element_spec else None


def _stage(dataset: tf.data.Dataset, known: dict[int, Stage]) -> Stage:
    if id(dataset) not in known:
        known[id(dataset)] = _read(dataset, known)
    return known[id(dataset)]


def _read(dataset: tf.data.Dataset, known: dict[int, Stage]) -> Stage:
    if isinstance(dataset, TrainDataset):  # its graph hides its source
        return Stage(dataset, dataset, "train_pipeline", (_stage(dataset.examples, known),))
    kind = kind_of(dataset)
    # The inputs of a choice between datasets, without the selector.
    inputs = getattr(dataset, "_data_inputs", None) or dataset._inputs()
    if kind in _TRANSPARENT and len(inputs) == 1:
        if kind == "restructured" and kind_of(inputs[0]) == "map":
            inputs = inputs[0]._inputs()  # `unbatch`, `rebatch` and `snapshot` add their own map
        return dataclasses.replace(_stage(inputs[0], known), dataset=dataset)
    if kind == "flat_map" and any("GeneratorDataset" in one.ops for one in functions_of(dataset)):
        kind, inputs = "from_generator", ()
    if kind == "TFRecordDataset" and [kind_of(one) for one in inputs] == ["from_tensor_slices"]:
        inputs = ()  # only the names of its files
    return Stage(dataset, dataset, kind, tuple(_stage(one, known) for one in inputs))


def kind_of(dataset: tf.data.Dataset) -> str:
    """Return `"take_while"` for `_TakeWhileDataset`, `"map"` for `_ParallelMapDataset`."""
    name = re.sub(r"^_|Parallel|(Dataset|V\d)+$", "", type(dataset).__name__)
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
    return _KINDS.get(words, words)


def functions_of(dataset: tf.data.Dataset) -> Iterator[Function]:
    """Yield the functions that the last stage of a dataset calls."""
    for wrapper in dataset._functions():
        graph = wrapper.function.graph.as_graph_def()
        bodies = [graph.node, *(function.node_def for function in graph.library.function)]
        call = getattr(wrapper, "_func", None)
        yield Function(
            getattr(call, "__name__", "").strip("<>"),
            frozenset(node.op for body in bodies for node in body),
            call,
            any(tensor.dtype == tf.variant for tensor in wrapper.function.captured_inputs),
            any(map(_has_unseeded_order, bodies)),
        )


def _has_unseeded_order(nodes: Any) -> bool:
    """Return whether a dataset that these operations make has the seeds (0, 0), which are none."""
    zeros = {
        node.name
        for node in nodes
        if node.op == "Const" and not tf.make_ndarray(node.attr["value"].tensor).any()
    }
    for node in nodes:
        first = _SEEDS_OF.get(node.op)
        names = [] if first is None else [one.partition(":")[0] for one in node.input[first:][:2]]
        if names and zeros.issuperset(names):
            return True
    return False
