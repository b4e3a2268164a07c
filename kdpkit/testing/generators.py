"""Hypothesis strategies for batches, replicas, shards, datasets, schedules and models.

They are called generators here, as a strategy is `tf.distribute`'s. Sizes come with their corner
cases: none, one, primes, and one fewer and one more than what divides. What fails is shrunk to few
examples, replicas and steps. Examples have values that name them: example 3 has the label 3 and the
text "example 3", so that a counterexample can be read.
"""

import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from kdpkit import errors, scaling
from kdpkit._internal import checks
from kdpkit.testing._reading import leaves, mapped, taken

try:
    from hypothesis import strategies as st
except ModuleNotFoundError as error:
    raise errors.PackageInputError(
        f"`kdpkit.testing.generators` needs Hypothesis. Run `{checks.install_command('testing')}`."
    ) from error

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from kdpkit.batches import ArrayBatches
    from kdpkit.schedules import Rate

Nest: TypeAlias = Any  # arrays in tuples and dictionaries

KINDS = ("float", "int", "bool", "text", "ragged")
LAYERS: dict[str, dict[str, Any]] = {
    "Dense": {"units": 5, "activation": "tanh", "kernel_initializer": "identity"},
    "LayerNormalization": {},
    "BatchNormalization": {},
    "Dropout": {"rate": 0.5, "seed": 1},
}
REDUCTIONS = ("sum_over_batch_size", "sum", "mean_with_sample_weight")


def replica_counts(*, max_value: int = 8) -> st.SearchStrategy[int]:
    """Draw a number of replicas or processes, from 1 on."""
    return st.integers(1, max_value)


def global_batch_sizes(
    replicas: int = 1, *, min_value: int = 1, max_value: int = 32
) -> st.SearchStrategy[int]:
    """Draw the size of a global batch, often one that the replicas just divide, or just do not.

    Args:
        replicas: Their number, R: R - 1, R, R + 1, 2R - 1 and so on are drawn often.
        min_value: The smallest size; 0 for the batch that an empty epoch has.
        max_value: The largest size.
    """
    return _counts(replicas, min_value, max_value)


def example_counts(
    global_batch_size: int = 1, *, min_value: int = 0, max_value: int = 32
) -> st.SearchStrategy[int]:
    """Draw the number of examples of an epoch, often one that just fills batches, or just not."""
    return _counts(global_batch_size, min_value, max_value)


class Split(NamedTuple):
    """A global batch, and the replicas that it is split over."""

    global_batch_size: int
    replicas: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many examples each replica gets from `tf.distribute`."""
        return scaling.split_batch(*self)


def splits(
    *, min_size: int = 0, max_size: int = 32, max_replicas: int = 8
) -> st.SearchStrategy[Split]:
    """Draw a `Split(global_batch_size, replicas)`, uneven ones and empty replicas among them."""
    return replica_counts(max_value=max_replicas).flatmap(
        lambda replicas: st.builds(
            Split,
            global_batch_size=_counts(replicas, min_size, max_size),
            replicas=st.just(replicas),
        )
    )


class Shards(NamedTuple):
    """An epoch of examples, read in batches by several processes."""

    examples: int
    global_batch_size: int
    processes: int

    @property
    def process_batch_size(self) -> int:
        """Examples that a process reads for each global batch."""
        return self.global_batch_size // self.processes


def shards(
    *, min_examples: int = 0, max_examples: int = 32, max_processes: int = 4
) -> st.SearchStrategy[Shards]:
    """Draw `Shards(examples, global_batch_size, processes)`.

    The processes divide the batch; the batches often just divide the examples, or just do not.
    """

    def of_size(drawn: tuple[int, int]) -> st.SearchStrategy[Shards]:
        part, processes = drawn
        return st.builds(
            Shards,
            examples=_counts(part * processes, min_examples, max_examples),
            global_batch_size=st.just(part * processes),
            processes=st.just(processes),
        )

    return st.tuples(st.integers(1, 4), st.integers(1, max_processes)).flatmap(of_size)


@st.composite
def nested_examples(
    draw: st.DrawFn, *, min_size: int = 0, max_size: int = 12, kinds: Sequence[str] = KINDS
) -> Nest:
    """Draw examples: an array, dictionaries and tuples of them, `(x, y)`, `(x, y, sample_weight)`.

    No two examples are equal.

    Args:
        draw: Hypothesis passes it.
        min_size: The smallest number of examples.
        max_size: The largest.
        kinds: What arrays hold, besides labels and weights: `"float"` with two axes, and with one
            `"int"`, `"bool"`, `"text"`, and `"ragged"`: lists of different lengths, as objects.
    """
    count = draw(example_counts(min_value=min_size, max_value=max_size))
    naming = st.sampled_from([kind for kind in kinds if kind != "bool"])
    x: Nest = _array(draw(naming), count)
    if draw(st.booleans()):
        others = draw(st.lists(st.sampled_from(kinds), max_size=2))
        x = {"a": x} | {name: _array(kind, count) for name, kind in zip("bc", others, strict=False)}
    if draw(st.booleans()):
        x = (x, _array("int", count))
        x += (_array("weight", count),) if draw(st.booleans()) else ()
    return x


def labelled_batches(
    *, min_size: int = 1, max_size: int = 12, weighted: bool = False
) -> st.SearchStrategy[tuple[np.ndarray, ...]]:
    """Draw a batch `(x, y)` for a classifier, or `(x, y, sample_weight)`.

    It is a part of `kdpkit.testing.toy_classification`: `x` has 4 float32 features, and `y` is one
    of 3 classes.
    """
    from kdpkit.testing import toy_classification

    most = max_size + 32  # with batches of each class, and of several
    x, y = toy_classification(most)
    parts = (x, y, _array("weight", most)) if weighted else (x, y)
    sizes = example_counts(min_value=min_size, max_value=max_size)
    return st.tuples(sizes, st.integers(0, 32)).map(  # few examples first where it shrinks
        lambda drawn: taken(parts, slice(drawn[1], sum(drawn)))
    )


@dataclasses.dataclass(frozen=True)
class Batches:
    """Examples, and the size of the global batches in which a dataset gives them.

    Attributes:
        examples: A nest of arrays.
        global_batch_size: Examples in a batch; the last has what is left.
    """

    examples: Nest
    global_batch_size: int

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(leaves(self.examples)[0])

    @property
    def source(self) -> "tf.data.Dataset":
        """A new `tf.data.Dataset` of single examples, in order."""
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices(mapped(_as_tensor, self.examples))

    @property
    def dataset(self) -> "tf.data.Dataset | ArrayBatches":
        """A new `tf.data.Dataset` of batches; without TensorFlow `kdpkit.batches.ArrayBatches`."""
        if _has_tensorflow():
            return self.source.batch(self.global_batch_size)
        from kdpkit.batches import ArrayBatches

        size = self.global_batch_size
        return ArrayBatches(self.examples, global_batch_size=size, remainder="keep")


def datasets(
    *, max_size: int = 12, max_batch_size: int = 5, kinds: Sequence[str] = KINDS
) -> st.SearchStrategy[Batches]:
    """Draw `Batches` of nested examples: their `dataset` has an uneven tail, one batch or none.

    Where TensorFlow is not installed there are numbers only, and at least one example.

    Args:
        max_size: The largest number of examples.
        max_batch_size: The largest global batch.
        kinds: As in `nested_examples`.
    """
    if not _has_tensorflow():
        kinds = [kind for kind in kinds if kind not in ("text", "ragged")]
    examples = nested_examples(min_size=not _has_tensorflow(), max_size=max_size, kinds=kinds)
    sizes = global_batch_sizes(max_value=max_batch_size)
    return st.builds(Batches, examples=examples, global_batch_size=sizes)


def schedules(*, max_steps: int = 20) -> "st.SearchStrategy[Rate]":
    """Draw Keras' and kdpkit's learning-rate schedules, wrapped and joined a few deep.

    Args:
        max_steps: The longest warmup, decay or time at the peak; they add up.
    """
    from kdpkit.testing import _schedules

    return _schedules.of_any_kind(max_steps)


def schedule_steps(schedule: "Rate", *, max_value: int = 100) -> st.SearchStrategy[int]:
    """Draw a step of a schedule, often where it changes: its boundaries, before them and after.

    Args:
        schedule: A learning-rate schedule; lengths are found in its attributes, such as
            `warmup_steps` and `boundaries`, and in those of schedules that it wraps.
        max_value: The last step.
    """
    from kdpkit.testing import _schedules

    around = {at + by for at in {0, *_schedules.boundaries(schedule)} for by in (-1, 0, 1)}
    corners = sorted(step for step in around if 0 <= step <= max_value)
    return st.sampled_from(corners) | st.integers(0, max_value)


@dataclasses.dataclass(frozen=True)
class ModelBuilder:
    """A small model, built and compiled again by each call, with the same initial weights.

    `labelled_batches` fit it: its input has 4 features, and its output 3 logits.

    Attributes:
        layers: The names of the Keras layers before the last one, of `LAYERS`.
        optimizer: The optimizer, by Keras' name.
        reduction: That of its loss, as in `losses`.
        wrap: A function that the model passes through, such as `kdpkit.training.replica_exact`.
    """

    layers: tuple[str, ...]
    optimizer: str
    reduction: str
    wrap: "Callable[[keras.Model], keras.Model] | None" = None

    def __call__(self) -> "keras.Model":
        """Return a new, compiled model."""
        import keras

        initial = keras.initializers.RandomNormal(seed=1)
        inner = [getattr(keras.layers, name)(**LAYERS[name]) for name in self.layers]
        last = keras.layers.Dense(3, kernel_initializer=initial)
        model = keras.Sequential([keras.Input((4,)), *inner, last])
        model = model if self.wrap is None else self.wrap(model)
        model.compile(self.optimizer, _loss(self.reduction))
        return model


def models(
    *, wrap: "Callable[[keras.Model], keras.Model] | None" = None
) -> st.SearchStrategy[ModelBuilder]:
    """Draw a `ModelBuilder`: call it for a new, compiled model that `labelled_batches` fit.

    Args:
        wrap: A function that each model passes through before it is compiled.
    """
    layers = st.lists(st.sampled_from([*LAYERS]), max_size=2).map(tuple)
    return st.builds(
        ModelBuilder,
        layers=layers,
        optimizer=st.sampled_from(["sgd", "adam"]),
        reduction=st.sampled_from(REDUCTIONS),
        wrap=st.just(wrap),
    )


def losses() -> "st.SearchStrategy[keras.Loss]":
    """Draw a Keras loss for logits and the labels of `labelled_batches`, with any reduction."""
    return st.sampled_from(REDUCTIONS).map(_loss)


def _loss(reduction: str) -> "keras.Loss":
    import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)


@st.composite
def _counts(draw: st.DrawFn, divisor: int, smallest: int, largest: int) -> int:
    """Draw a multiple and what is left over, so that each is shrunk by itself."""
    multiples = st.integers(smallest // divisor, largest // divisor)
    if divisor == 1:
        primes = [size for size in (2, 3, 5, 7, 11, 13) if smallest <= size <= largest]
        return draw(multiples | st.sampled_from(primes) if primes else multiples)
    rest = st.sampled_from([0, 1, divisor - 1]) | st.integers(0, divisor - 1)
    return min(max(draw(multiples) * divisor + draw(rest), smallest), largest)


def _array(kind: str, count: int) -> np.ndarray:
    """Return an array whose examples' values name them."""
    numbers = np.arange(count)
    if kind == "text":
        return np.array([f"example {index}" for index in numbers], str)
    if kind == "ragged":
        array = np.empty(count, object)
        for index in range(count):
            array[index] = [index] * (index % 3 + (index > 0))  # the first is empty
        return array
    if kind == "float":
        return (numbers[:, None] + np.arange(2) / 4).astype("float32")
    values = {"int": numbers, "bool": numbers % 2 == 0, "weight": (1 + numbers % 3) / 2}[kind]
    return values.astype("float32") if kind == "weight" else values


def _as_tensor(array: np.ndarray) -> Any:
    import tensorflow as tf

    is_ragged = array.dtype == object
    return tf.ragged.constant(array.tolist(), tf.int64, ragged_rank=1) if is_ragged else array


def _has_tensorflow() -> bool:
    return importlib.util.find_spec("tensorflow") is not None
