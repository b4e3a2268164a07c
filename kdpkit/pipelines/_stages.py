"""The stages of a dataset: the one reader for `lint`, `doctor --measure` and `Resume`.

This file uses private parts of tf.data: the names of its dataset classes, their attributes,
`_inputs()` and `_functions()`, which are the same in TensorFlow 2.20 and 2.21. Unlike a serialized
graph they give access to the dataset of each stage and copy no data. Unknown values are None or an
empty set, and no rule draws conclusions from them.
"""

import contextlib
import dataclasses
import dis
import functools
import inspect
import itertools
import os
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from kdpkit._internal import checks
from kdpkit._internal.datasets import untuned
from kdpkit.pipelines._epochs import TrainDataset, as_written

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
_UNCHANGED = frozenset({"ignore_errors", "prefetch", "shard", "skip", "take"})
_PASSING = _UNCHANGED | {"cache", "filter", "repeat", "shuffle", "take_while"}
_SOURCES = frozenset(
    {"CsvDataset", "FixedLengthRecordDataset", "TextLineDataset", "TFRecordDataset"}
    | {"concatenate", "flat_map", "from_tensor_slices", "interleave", "map", "range", "zip"}
)
_FEW, _MANY = 32, 1_000_000  # labels: too few to tell their order, and enough; values to copy
_BATCHING = ("batch", "padded_batch", "rebatch")
# The first of the two inputs of a dataset's operation that are its seeds.
_SEEDS_OF = {"ShuffleDatasetV3": 2, "ShuffleDataset": 2, "RandomDataset": 0, "RandomDatasetV2": 0}
_NAMED_BY = {
    **dict.fromkeys(("shuffle", "prefetch"), "buffer_size"),
    **dict.fromkeys(("batch", "padded_batch"), "batch_size"),
    **dict.fromkeys(("repeat", "take", "skip"), "count"),
}
_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator)
_LIBRARIES = ("kdpkit", "keras", "tensorflow", "datasets", "tensorflow_datasets")


@dataclasses.dataclass(frozen=True)
class Function:
    """A function that a stage calls."""

    call: Callable[..., Any] | None  # that the user passed; None if unknown
    ops: frozenset[str]  # names of operations, also in nested datasets and functions
    captures_datasets: bool  # that were made outside of it
    has_unseeded_order: bool  # whether it makes a dataset of random order without a seed

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
    """One stage of a pipeline, the last of its dataset, for which nothing is run.

    It `is_hidden` if the user did not write it, or it only has options: `line`, `paths` and
    `before` leave it out.
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
        if value is None or isinstance(value, (bool, str, bytes)):
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
        return not self.calls_python and any(
            _draws_in_python(f.call, set()) for f in self.functions
        )

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
        sources = (stage.argument("tensors") or () for stage in before(self))
        held = sum(t.shape.num_elements() or 0 for t in itertools.chain.from_iterable(sources))
        # An `interleave` has it in its graph only, into which arrays in memory are copied.
        if "ParallelInterleave" in type(self.dataset).__name__ and held < _MANY:
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
    pairs = end.dataset.map(as_written(lambda *parts: parts[1]))
    labels = end.inputs[1].dataset if end.kind == "zip" else pairs  # without the features
    stop = tf.timestamp() + 1
    in_time = labels.take_while(as_written(lambda _: tf.timestamp() < stop)).batch(_MANY)
    classes = np.array([])
    with contextlib.suppress(tf.errors.OpError):  # training raises them too
        classes = next(untuned(in_time).as_numpy_iterator(), classes)
    if classes.ndim == 2 and np.all(np.sum(classes, 1) == 1):  # one-hot
        classes = np.argmax(classes, 1)
    if len(classes) < _FEW or classes.size > len(classes) or np.any(classes % 1):
        return 0
    changes = np.count_nonzero(np.diff(classes.ravel()))
    shares = np.unique(classes, return_counts=True)[1] / len(classes)
    expected = len(classes) * (1 - np.sum(shares**2))  # in a random order
    return round(len(classes) / (changes + 1)) if changes < expected / 4 else 0


def require_examples(source: tf.data.Dataset, *, name: str, prepared: bool) -> None:
    """Raise where a source repeats, or its elements are certainly no single examples.

    They need not be if they are `prepared` by a function, which may get the names of files.
    """
    end = Stage(source)
    if _is_infinite(end) or _is_repeated(end):
        checks.fail(
            f"`{name}` repeats its examples, and `fit(epochs=N)` would repeat it again.",
            remedy="Take `.repeat(...)` out of the pipeline and let `epochs` count the passes.",
        )
    stage = maker(end)
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
        f"`{name}` must have single examples, and {problem}.",
        elements=source.element_spec,
        remedy=remedy,
    )


def _is_infinite(end: Stage) -> bool:
    """Return whether a pipeline never ends; of unknown length if a stage never does, uncut."""
    if end.cardinality is not None:
        return bool(end.cardinality == tf.data.INFINITE_CARDINALITY)
    return any(
        stage.cardinality == tf.data.INFINITE_CARDINALITY and "take" not in {s.kind for s in after}
        for stage, after in paths(end)
    )


def _is_repeated(stage: Stage) -> bool:
    """Return whether all examples come several times, and not only some, as of a rare class."""
    while len(stage.inputs) == 1 and stage.kind not in ("take", "flat_map", "interleave"):
        if stage.kind == "repeat" and stage.setting("count") != 1:
            return True
        (stage,) = stage.inputs
    return False


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


def _draws_in_python(call: Any, read: set[Any]) -> bool:
    """Return whether a function, or one that it calls, uses random numbers of Python or NumPy.

    Its code is read. To call it once more might raise, take long, or change what it uses.
    """
    if not callable(call):
        return False
    call = inspect.unwrap(getattr(call, "python_function", call))  # of a `tf.function`
    call = call.func if isinstance(call, functools.partial) else call
    call = call if inspect.isroutine(call) else call.__call__
    owner, function = getattr(call, "__self__", None), getattr(call, "__func__", call)
    if isinstance(owner, _GENERATORS):
        return True
    if not inspect.isfunction(function) or function in read:
        return False
    # What a library that the user's function calls draws inside, such as a name, is its own affair.
    is_user_code = "-packages" not in function.__code__.co_filename
    if read and not is_user_code and not function.__module__.startswith("kdpkit."):
        return False
    read.add(function)
    used = _known_values(function, owner)
    return any(isinstance(value, _GENERATORS) or _draws_in_python(value, read) for value in used)


def _known_values(function: Any, owner: Any) -> Iterator[Any]:
    """Yield what the code of a function names: variables from outside, and their attributes."""
    codes = [function.__code__]
    for code in codes:  # and of the functions inside it
        codes += filter(inspect.iscode, code.co_consts)
    names = function.__globals__ | dict.fromkeys(codes[0].co_varnames)
    for name, cell in zip(codes[0].co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it is empty
            names[name] = cell.cell_contents
    if owner is not None:
        names[codes[0].co_varnames[0]] = owner
    value: Any = None
    for kind, name in itertools.chain.from_iterable(map(_instructions, codes)):
        operation, _, what = kind.partition("_")
        if operation == "STORE" and what in ("FAST", "DEREF"):
            names[name] = value
        elif kind == "IMPORT_NAME":
            value = sys.modules.get(name)
        elif what in ("ATTR", "METHOD", "FROM"):
            value = _attribute(value, name)
        else:
            value = names.get(name) if operation == "LOAD" and what != "CONST" else None
        yield value


def _instructions(code: Any) -> Iterator[tuple[str, Any]]:
    """Yield the instructions of a code, and what each names: two that Python 3.13 joins as two."""
    for step in dis.get_instructions(code):
        joined = re.findall("(?:LOAD|STORE)_FAST", step.opname)
        if len(joined) == 2:  # such as STORE_FAST_LOAD_FAST
            yield from zip(joined, step.argval, strict=True)
        else:
            yield step.opname, step.argval


def _attribute(value: Any, name: str) -> Any:
    """Return an attribute or a method; None for what would have to be computed."""
    stored = inspect.getattr_static(value, name, None)
    is_computed = hasattr(stored, "__get__") and not inspect.isroutine(stored)
    return None if stored is None or is_computed else getattr(value, name)


def _bodies(wrapper: Any) -> list[Any]:
    graph = wrapper.function.graph.as_graph_def()
    return [graph.node, *(function.node_def for function in graph.library.function)]


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
