"""Hypothesis strategies for examples, batches and the shards of several processes.

They are called generators here, as a strategy is `tf.distribute`'s. Sizes come with their corner
cases: none, one, primes, and one fewer and one more than what divides. What fails is shrunk to few
examples and processes. Examples have values that name them: example 3 has the label 3 and the text
"example 3", so that a counterexample can be read.
"""

import dataclasses
import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from kdpkit import errors
from kdpkit._internal import checks
from kdpkit.testing._reading import leaves, mapped, taken

try:
    from hypothesis import strategies as st
except ModuleNotFoundError as error:
    raise errors.PackageInputError(
        f"`kdpkit.testing.generators` needs Hypothesis. Run `{checks.install_command('testing')}`."
    ) from error

if TYPE_CHECKING:
    import tensorflow as tf

    from kdpkit.batches import ArrayBatches

__all__ = ["datasets", "example_counts", "labelled_batches", "shards"]

Nest: TypeAlias = Any  # arrays in tuples and dictionaries

_KINDS = ("float", "int", "bool", "text", "ragged")


def example_counts(
    global_batch_size: int = 1, *, min_value: int = 0, max_value: int = 32
) -> st.SearchStrategy[int]:
    """Draw a number of examples, often one that just fills batches, or just does not.

    With `min_value=1` it is the size of a batch too, and a number of replicas in place of
    `global_batch_size` often just divides it.
    """
    return _counts(global_batch_size, min_value, max_value)


class Shards(NamedTuple):
    """An epoch of examples, read in batches by several processes."""

    examples: int
    global_batch_size: int
    processes: int

    @property
    def process_batch_size(self) -> int:
        """Examples that a process reads for each global batch."""
        return self.global_batch_size // self.processes


def shards(*, min_examples: int = 0, max_examples: int = 32) -> st.SearchStrategy[Shards]:
    """Draw `Shards(examples, global_batch_size, processes)`, a tuple.

    The processes divide the batch; the batches often just divide the examples, or just do not. A
    failure is shrunk to two processes, and to one only if two do not show it.
    """

    def of_size(drawn: tuple[int, int]) -> st.SearchStrategy[Shards]:
        processes, part = drawn
        # Hypothesis shrinks to fewer choices first, so one process needs as many as two.
        choices = st.just(None) if processes > 1 else st.tuples(st.booleans(), st.booleans())
        return st.builds(
            Shards,
            examples=_counts(part * processes, min_examples, max_examples),
            global_batch_size=st.just(part * processes),
            processes=choices.map(lambda _: processes),
        )

    return st.tuples(st.sampled_from([2, 1, 3, 4]), st.integers(1, 4)).flatmap(of_size)


def labelled_batches(
    *, min_size: int = 1, max_size: int = 12
) -> st.SearchStrategy[tuple[np.ndarray, ...]]:
    """Draw a batch `(x, y)` for a classifier.

    It is a part of `kdpkit.testing.toy_classification`: `x` has 4 float32 features, and `y` is one
    of 3 classes.
    """
    from kdpkit.testing import toy_classification

    most = max_size + 32  # with batches of each class, and of several
    parts = toy_classification(most)
    sizes = example_counts(min_value=min_size, max_value=max_size)
    return st.tuples(sizes, st.integers(0, 32)).map(  # few examples first where it shrinks
        lambda drawn: taken(parts, slice(drawn[1], sum(drawn)))
    )


@dataclasses.dataclass(frozen=True)
class Batches:
    """Examples, and the size of the global batches in which a dataset has them."""

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
    *, min_size: int = 0, max_size: int = 12, kinds: Sequence[str] = _KINDS
) -> st.SearchStrategy[Batches]:
    """Draw examples in batches: an array, dictionaries and tuples, `(x, y)`, `(x, y, weight)`.

    No two examples are equal. What is drawn has the attributes `examples` (a nest of arrays),
    `global_batch_size`, `source` (a `tf.data.Dataset` of single examples) and `dataset` (of
    batches, with an uneven tail, one batch or none). Where TensorFlow is not installed there are
    numbers only, and at least one example.

    Args:
        min_size: The smallest number of examples.
        max_size: The largest.
        kinds: What arrays hold, besides labels and weights: `"float"` with two axes, and with one
            `"int"`, `"bool"`, `"text"`, and `"ragged"`: lists of different lengths, as objects.
    """
    if not _has_tensorflow():
        kinds = [kind for kind in kinds if kind not in ("text", "ragged")]
        min_size = max(min_size, 1)
    return st.builds(
        Batches,
        examples=_nested_examples(min_size, max_size, kinds),
        global_batch_size=example_counts(min_value=1, max_value=5),
    )


@st.composite
def _nested_examples(draw: st.DrawFn, min_size: int, max_size: int, kinds: Sequence[str]) -> Nest:
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
