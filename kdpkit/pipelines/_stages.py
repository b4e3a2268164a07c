"""The stages of a dataset: the one reader for `lint`, `doctor --measure` and `Resume`.

This file uses private parts of tf.data: the names of its dataset classes, their attributes,
`_inputs()` and `_functions()`, which are the same in TensorFlow 2.20 and 2.21. Unlike a serialized
graph they give access to the dataset of each stage and copy no data. Unknown values are None or an
empty set, and no rule draws conclusions from them.
"""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import os
import pickle
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.data.ops import structured_function
from tensorflow.python.framework import op_def_registry

from kdpkit._internal import checks
from kdpkit._internal.datasets import untuned
from kdpkit.pipelines._epochs import TrainDataset

# Names of operations, as regular expressions: what `Function.runs` takes.
PYTHON = r"PyFunc(Stateless)?|EagerPyFunc"
ASSIGNING = "Assign.*"
# Stateful ones: they draw again whenever they run.
_RANDOM = (
    r"Random(?!Index).*|(Parameterized)?TruncatedNormal|Multinomial|SampleDistortedBoundingBox.*"
    r"|Rng.*|Stateful(Uniform|StandardNormal|Truncated|Random).*|AnonymousRandomSeedGenerator"
)
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
_TRANSPARENT = frozenset({"options", "assert_cardinality", "restructured", "dense_to_ragged"})
# These pass their elements on as they are; those of `_UNCHANGED` keep nothing for a later reader.
_UNCHANGED = frozenset({"filter", "ignore_errors", "prefetch", "shard", "skip", "take"})
_PASSING = _UNCHANGED | {"cache", "repeat", "shuffle", "take_while"}
_SOURCES = frozenset(
    {"CsvDataset", "FixedLengthRecordDataset", "TextLineDataset", "TFRecordDataset"}
    | {"concatenate", "flat_map", "from_tensor_slices", "interleave", "map", "range", "zip"}
)
_READ_AT_ONCE = 32
_FEW = 32  # labels, too few to tell their order
_BATCHING = ("batch", "padded_batch", "rebatch")
# The first of the two inputs of a dataset's operation that are its seeds.
_SEEDS_OF = {"ShuffleDatasetV3": 2, "ShuffleDataset": 2, "RandomDataset": 0, "RandomDatasetV2": 0}
_NAMED_BY = {
    **dict.fromkeys(("shuffle", "prefetch"), "buffer_size"),
    **dict.fromkeys(("batch", "padded_batch"), "batch_size"),
    **dict.fromkeys(("repeat", "take", "skip"), "count"),
}
_LIBRARIES = ("kdpkit", "keras", "tensorflow", "datasets", "tensorflow_datasets")


@dataclasses.dataclass(frozen=True)
class Function:
    """A function that a stage calls.

    Attributes:
        call: The function that the user passed; None if unknown.
        ops: The names of its operations, including those in nested datasets and functions.
        captures_datasets: Whether it uses datasets that were made outside of it.
        has_unseeded_order: Whether it makes a dataset of random order without a seed.
    """

    call: Callable[..., Any] | None
    ops: frozenset[str]
    captures_datasets: bool
    has_unseeded_order: bool

    @property
    def name(self) -> str:
        return str(getattr(self.call, "__name__", "")).strip("<>")

    @property
    def location(self) -> str:
        """Where the user defined it, such as `"line 12 of train.py"`; empty if unknown."""
        function = self.call and inspect.unwrap(self.call)
        code = getattr(function, "__code__", None)
        if code is None or str(function.__module__).partition(".")[0] in _LIBRARIES:
            return ""
        return f"line {code.co_firstlineno} of {Path(code.co_filename).name}"

    def runs(self, operations: str) -> bool:
        """Return whether it has an operation whose name matches."""
        return any(re.fullmatch(operations, op) for op in self.ops)

    @property
    def draws(self) -> bool:
        """Whether it draws new random numbers each time, as augmentation and Keras layers do."""
        return self.runs(_RANDOM) or (self.runs("StatelessRandom.*") and self.runs(ASSIGNING))

    @property
    def is_stateful(self) -> bool:
        """Whether tf.data runs its calls serially, in order."""
        # For these the operations of their inner functions decide.
        calling = re.compile("Assert|StatefulPartitionedCall|If|While|.*Dataset.*")
        definitions = (op_def_registry.get(op) for op in self.ops if not calling.fullmatch(op))
        return any(definition and definition.is_stateful for definition in definitions)


def require_dataset(name: str, value: Any) -> None:
    if not isinstance(value, tf.data.Dataset):
        checks.fail(
            f"`{name}` must be a tf.data.Dataset.",
            **{name: type(value).__name__},
            remedy="Make one of arrays with `tf.data.Dataset.from_tensor_slices`.",
        )


class Stage:
    """One stage of a pipeline.

    Args:
        dataset: The dataset of the stage, for which nothing is run.
        is_hidden: Whether the user did not write the stage, or it only has options; `line`, `paths`
            and `before` leave it out.
    """

    def __init__(self, dataset: tf.data.Dataset, *, is_hidden: bool = False) -> None:
        self.dataset = dataset
        self.is_hidden = is_hidden or self.kind in _TRANSPARENT

    @functools.cached_property
    def kind(self) -> str:
        """The method or class that created it, such as `"map"` or `"TFRecordDataset"`."""
        if isinstance(self.dataset, TrainDataset):
            return "train_pipeline"
        kind = _kind_of(self.dataset)
        makes_generator = any("GeneratorDataset" in function.ops for function in self.functions)
        return "from_generator" if kind == "flat_map" and makes_generator else kind

    @functools.cached_property
    def inputs(self) -> tuple["Stage", ...]:
        """The stages that it takes elements from, of a choice between datasets all but the chooser.

        A file's reader that has the names in memory is a source, and so is a generator.
        """
        if isinstance(self.dataset, TrainDataset):  # its graph hides its source
            return (Stage(self.dataset.examples),)
        inputs = getattr(self.dataset, "_data_inputs", None) or self.dataset._inputs()
        kinds = [_kind_of(dataset) for dataset in inputs]
        if self.kind == "from_generator" or (
            self.kind == "TFRecordDataset" and kinds == ["from_tensor_slices"]
        ):
            return ()
        # `unbatch`, `rebatch` and `snapshot` add a map of their own.
        is_hidden = self.kind == "restructured" and kinds == ["map"]
        return tuple(Stage(dataset, is_hidden=is_hidden) for dataset in inputs)

    @functools.cached_property
    def functions(self) -> tuple[Function, ...]:
        return tuple(map(_function, self.dataset._functions()))

    @property
    def library_call(self) -> str:
        """What a library made it for, as `"tensorflow.rejection_resample"`; "" if the user did."""
        call = next((function.call for function in self.functions), None)
        name, inside, _ = str(getattr(call, "__qualname__", "")).partition(".<locals>")
        library = str(getattr(call, "__module__", "")).partition(".")[0]
        is_made = inside and library in _LIBRARIES and self.kind != "from_generator"
        return f"{library}.{name.rpartition('.')[2].strip('_')}" if is_made else ""

    def argument(self, name: str) -> Any:
        """Return an argument as stored in the dataset; None if unknown."""
        return getattr(self.dataset, f"_{name}", None)

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
        with tf.init_scope():  # a graph would not compute it
            count = int(self.dataset.cardinality())
        return None if count == tf.data.UNKNOWN_CARDINALITY else count

    def runs(self, operations: str) -> bool:
        """Return whether a function that it calls has an operation whose name matches."""
        return any(function.runs(operations) for function in self.functions)

    @property
    def draws_while_traced(self) -> bool:
        """Whether it draws numbers of Python or NumPy, which its graph then has as constants."""
        return not self.calls_python and any(map(_differs_if_traced, self.dataset._functions()))

    @property
    def is_readable(self) -> bool:
        """Whether reading it changes nothing for a later reader."""
        is_pure = not any(f.captures_datasets or f.is_stateful for f in self.functions)
        return self.is_hidden or (self.kind in _SOURCES | _UNCHANGED and is_pure)

    @property
    def calls_python(self) -> bool:
        """Whether its elements come from Python."""
        return self.kind == "from_generator" or self.runs(PYTHON)

    @property
    def caches(self) -> bool:
        return self.kind in ("cache", "snapshot")

    @property
    def reshuffles(self) -> bool:
        """Whether it is a `shuffle` that has a new order in each iteration."""
        return self.kind == "shuffle" and self.setting("reshuffle_each_iteration") is not False

    @property
    def seeds(self) -> list[Any]:
        return [self.setting("seed"), self.setting("seed2")]

    @functools.cached_property
    def has_own_order(self) -> bool:
        """Whether each program has another order: a shuffle has no seed, or threads compete."""
        has_no_seed = self.kind == "shuffle" and self.seeds == [0, 0]
        is_unordered = self.argument("deterministic") == "false"
        if "ParallelInterleave" in type(self.dataset).__name__:  # stores it in its graph only
            graph = tf.compat.v1.GraphDef.FromString(self.dataset._as_serialized_graph().numpy())
            is_unordered = any(node.attr["deterministic"].s == b"false" for node in graph.node)
        return has_no_seed or is_unordered or any(f.has_unseeded_order for f in self.functions)

    @property
    def shuffles(self) -> bool:
        """Whether it, or a dataset inside it, has a new order in each epoch."""
        within = self.kind != "shuffle" and self.runs(".*ShuffleDataset.*")
        return self.reshuffles or within or self.kind == "train_pipeline"

    @property
    def label(self) -> str:
        """The stage as the user writes it: `map(decode)`, `shuffle(1000)`, `batch(32)`."""
        if self.library_call:
            return self.library_call
        argument = self.setting(_NAMED_BY[self.kind]) if self.kind in _NAMED_BY else None
        if self.kind == "prefetch" and argument == tf.data.AUTOTUNE:
            argument = "AUTOTUNE"
        elif self.kind in ("repeat", "take", "skip") and argument == -1:
            argument = ""
        elif self.kind in ("map", "filter", "flat_map", "interleave") and self.functions:
            argument = self.functions[0].name or None
        return self.kind if argument is None else f"{self.kind}({argument})"


def line(end: Stage) -> tuple[Stage, ...]:
    """Return the stages back to where datasets are combined, source first."""
    stages = [end]
    while len(stages[-1].inputs) == 1:
        stages += stages[-1].inputs
    return tuple(stage for stage in reversed(stages) if not stage.is_hidden)


def paths(end: Stage) -> Iterator[tuple[Stage, tuple[Stage, ...]]]:
    """Yield each stage once, with the stages after it, the nearest first."""
    waiting: list[tuple[Stage, tuple[Stage, ...]]] = [(end, ())]
    seen: set[int] = set()
    while waiting:
        stage, after = waiting.pop(0)
        if id(stage.dataset) not in seen:
            seen.add(id(stage.dataset))
            if not stage.is_hidden:
                yield stage, after
                after = (stage, *after)
            waiting += [(before, after) for before in stage.inputs]


def before(stage: Stage) -> Iterator[Stage]:
    """Yield all stages before a stage."""
    return (earlier for end in stage.inputs for earlier, _ in paths(end))


def maker(stage: Stage) -> Stage:
    """Return the stage that made the elements, which the stages after it pass on as they are."""
    while (stage.is_hidden or stage.kind in _PASSING) and len(stage.inputs) == 1:
        (stage,) = stage.inputs
    return stage


def makes_batches(stage: Stage) -> bool:
    """Return whether the elements that a stage makes are certainly batches of examples.

    `batch` also cuts sequences into windows, each of which is an example. Windows are complete and
    usually have a single part; a `map` makes examples of others.
    """
    if stage.kind == "train_pipeline":
        return True
    if stage.kind not in _BATCHING:
        return False
    size, elements = stage.setting("batch_size"), stage.inputs[0].cardinality
    divides = size is not None and elements is not None and (elements < 0 or elements % size == 0)
    is_complete = divides or stage.setting("drop_remainder") is not False
    return len(tf.nest.flatten(stage.dataset.element_spec)) > 1 or not is_complete


def label_run(end: Stage) -> int:
    """Return how many neighbors have the same class, or 0 if classes are mixed or not known.

    The first labels are read, for a second, if that changes nothing for a later reader.
    """
    spec = end.dataset.element_spec
    label = spec[1] if type(spec) is tuple and len(spec) > 1 else None
    is_class = isinstance(label, tf.TensorSpec) and label.dtype != tf.string
    if not is_class or not all(stage.is_readable for stage, _ in paths(end)):
        return 0
    pairs = end.dataset.map(lambda *parts: parts[1])
    labels = end.inputs[1].dataset if end.kind == "zip" else pairs  # without the features
    stop = time.monotonic() + 1
    read: list[Any] = []
    with contextlib.suppress(tf.errors.OpError):  # training raises them too
        batches = untuned(labels.batch(_READ_AT_ONCE)).as_numpy_iterator()
        for batch in itertools.takewhile(lambda _: time.monotonic() < stop, batches):
            read.extend(batch)
    classes = np.array(read)
    if classes.ndim == 2 and np.all(np.sum(classes, 1) == 1):  # one-hot
        classes = np.argmax(classes, 1)
    if len(classes) < _FEW or classes.size > len(classes) or np.any(classes % 1):
        return 0
    changes = np.count_nonzero(np.diff(classes.ravel()))
    shares = np.unique(classes, return_counts=True)[1] / len(classes)
    expected = len(classes) * (1 - np.sum(shares**2))  # in a random order
    return round(len(classes) / (changes + 1)) if changes < expected / 4 else 0


def require_examples(source: tf.data.Dataset, *, prepared: bool) -> None:
    """Raise where the elements of a source are certainly no single examples.

    They need not be if they are `prepared` by a function, which may get the names of files.
    """
    stage = maker(Stage(source))
    if makes_batches(stage):
        problem = f"`{stage.label}` makes batches"
        remedy = (
            "Leave out that stage, or add `.unbatch()`. Where each of its elements is an example, "
            "such as a window, add a `.map` that returns it."
        )
    elif stage.kind == "from_tensors" and have_one_length(source):
        problem = "`from_tensors` makes one element of all examples"
        remedy = "Use `tf.data.Dataset.from_tensor_slices`."
    elif not prepared and _are_names_of_files(stage):
        problem = "its elements are names of files"
        remedy = "Pass `read=tf.data.TFRecordDataset`, or what else reads one, or use `prepare`."
    else:
        return
    checks.fail(
        f"`source` must have single examples, and {problem}.",
        source=source.element_spec,
        remedy=remedy,
    )


def have_one_length(dataset: tf.data.Dataset) -> bool:
    """Return whether an element has several parts, which all have as many entries."""
    shapes = [part.shape for part in tf.nest.flatten(dataset.element_spec)]
    lengths = {shape[0] if shape.rank else None for shape in shapes}
    return len(shapes) > 1 and len(lengths) == 1 and (lengths.pop() or 0) > 1


def _are_names_of_files(stage: Stage) -> bool:
    tensors = stage.argument("tensors") if stage.kind == "from_tensor_slices" else None
    if tensors is None or len(tensors) != 1 or tensors[0].dtype != tf.string:
        return False
    names = tf.get_static_value(tensors[0])
    if names is None or not names.size:
        return False
    try:
        return Path(os.fsdecode(names.flat[0])).is_file()
    except (OSError, ValueError):  # a text that cannot be a name
        return False


def _kind_of(dataset: tf.data.Dataset) -> str:
    """Return `"take_while"` for `_TakeWhileDataset`, `"map"` for `_ParallelMapDataset`."""
    name = re.sub(r"^_|Parallel|(Dataset|V\d)+$", "", type(dataset).__name__)
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
    return _KINDS.get(words, words)


def _function(wrapper: Any) -> Function:
    bodies = _bodies(wrapper)
    return Function(
        getattr(wrapper, "_func", None),
        frozenset(node.op for body in bodies for node in body),
        any(tensor.dtype == tf.variant for tensor in wrapper.function.captured_inputs),
        any(map(_has_unseeded_order, bodies)),
    )


def _differs_if_traced(wrapper: Any) -> bool:
    """Return whether tracing a function again draws numbers in Python, or makes other constants.

    The generators of Python and NumPy are left as they were.
    """
    states = random.getstate(), np.random.get_state()
    call = getattr(wrapper._func, "python_function", wrapper._func)  # of a `tf.function`
    again = structured_function.StructuredFunctionWrapper(
        call, "lint", input_structure=wrapper._input_structure
    )
    draws = pickle.dumps(states) != pickle.dumps((random.getstate(), np.random.get_state()))
    random.setstate(states[0])
    np.random.set_state(states[1])
    return draws or _constants(again) != _constants(wrapper)


def _bodies(wrapper: Any) -> list[Any]:
    graph = wrapper.function.graph.as_graph_def()
    return [graph.node, *(function.node_def for function in graph.library.function)]


def _constants(wrapper: Any) -> list[bytes]:
    nodes = itertools.chain.from_iterable(_bodies(wrapper))
    return sorted(n.attr["value"].tensor.SerializeToString() for n in nodes if n.op == "Const")


def _has_unseeded_order(nodes: Any) -> bool:
    """Return whether a dataset that these operations make has the seeds (0, 0), which are none."""
    zeros = {
        node.name
        for node in nodes
        if node.op == "Const" and not tf.make_ndarray(node.attr["value"].tensor).any()
    }
    for node in nodes:
        first = _SEEDS_OF.get(node.op)
        names = [] if first is None else [name.partition(":")[0] for name in node.input[first:][:2]]
        if names and zeros.issuperset(names):
            return True
    return False
