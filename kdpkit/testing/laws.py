"""What must hold for pipelines of your own.

A law is a plain function: it is called with what your code gave or, where it needs to be computed
again, with a function, and raises `AssertionError` if the law is broken. It does not run Hypothesis
itself, so that a test reads as any other does: `@given` chooses the inputs, `@settings` and
`@example` work as always, Hypothesis shrinks to the smallest input that breaks the law and prints
it, and the law says what is wrong with it. It is as useful under `pytest.mark.parametrize`.

    @given(generators.shards())
    def test_every_process_reads_its_own_examples(shards):
        read = [my_shard(shards.examples, index) for index in range(shards.processes)]
        laws.every_example_once(read, examples=shards.examples)
        laws.equal_steps(read)

**What is read** is a dataset or any other iterable of batches: a `tf.data.Dataset`, what
`experimental_distribute_dataset` returns, a `keras.utils.PyDataset`, a generator. A list or a tuple
has one of them for each shard, that is for each process or replica: `iter(batches)` makes one
dataset of a list of batches. A batch is a tensor or a nest of tensors with the examples along axis
0; a number, or an example without that axis, is a batch of one. Examples are compared by their
values, and named by their position, counted from 0.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from kdpkit._internal import checks
from kdpkit.testing._reading import (
    Example,
    Shard,
    counted,
    examples_of,
    listed,
    mapped,
    read_shards,
    taken,
    text,
)

Read: TypeAlias = Any  # a dataset or another iterable of batches, or a list of them
Nest: TypeAlias = Any  # arrays in tuples, lists and dictionaries


__all__ = [
    "equal_steps",
    "every_example_once",
    "held_out_does_not_leak",
    "reproducible",
    "resumed_run_continues",
    "same_examples_for_any_replicas",
]


def every_example_once(
    read: Read, *, examples: Nest | int, may_drop: int = 0, key: Callable[[Any], Any] | None = None
) -> None:
    """Fail unless every example comes exactly once an epoch, over all shards.

    Padding may repeat examples in batches `(x, y, sample_weight)`, with weight 0, if `examples` is
    `x` or `(x, y)`.

    >>> every_example_once([[0, 1, 2], [3, 4]], examples=5)
    >>> every_example_once([[0, 1], [1, 2]], examples=4)
    Traceback (most recent call last):
    AssertionError: Of 4 examples, example 3 is lost and example 1 is read again, on 2 shards with
    batches of 1:
      shard 0: [0], [1]
      shard 1: [1], [2]

    Args:
        read: What is read of one epoch, or of each of several shards.
        examples: A nest of arrays with the examples along axis 0, or their number, where they are
            the numbers from 0 on.
        may_drop: How many examples may be left out: `global_batch_size - 1` if a smaller last batch
            is dropped.
        key: A function of a batch that returns what `examples` has of it, where the pipeline
            changes examples.

    Raises:
        AssertionError: Some are lost, come twice or come from elsewhere; the message names them.
        ValueError: Batches have other parts than `examples`.
    """
    if isinstance(examples, int | np.integer):
        examples = np.arange(checks.integer("examples", examples, minimum=0))
    expected = examples_of(examples)
    numbers = {example: index for index, example in reversed([*enumerate(expected)])}
    shards = read_shards(read, key=key, like=examples, most=len(expected))
    count = Counter(example for shard in shards for batch in shard for example in batch)
    lost = sorted(numbers[example] for example in (Counter(expected) - count).elements())
    surplus = count - Counter(expected)
    again = sorted(numbers[example] for example in surplus if example in numbers)
    others = [example for example in surplus if example not in numbers]
    problems = [f"{_in_words('example', lost)} lost"] if len(lost) > may_drop else []
    problems += [f"{_in_words('example', again)} read again"] if again else []
    problems += [f"{_in_words('value', others)} not among them"] if others else []
    if problems:
        largest = max((len(batch) for shard in shards for batch in shard), default=0)
        batches = f" with batches of {largest}" if largest else ""
        sizes = [sum(map(len, shard)) for shard in shards]
        least = min(sizes, default=0)
        is_one = lost and len(sizes) > 1 and sizes.count(least) == 1
        fewest = f" (shard {sizes.index(least)} has the fewest, {least})" if is_one else ""
        raise AssertionError(
            f"Of {counted(len(expected), 'example')}, {' and '.join(problems)}, on "
            f"{counted(len(shards), 'shard')}{batches}{fewest}:"
            f"{listed(shards, numbers)}"
            + ("\nWhere the pipeline changes examples, pass `key`." if others and not key else "")
        )


def equal_steps(read: Sequence[Read]) -> None:
    """Fail unless all shards have the same number of batches.

    A process that runs out of batches ends, or waits, while the others wait for it in a collective.

    >>> equal_steps([[0, 1, 2], [3, 4]])
    Traceback (most recent call last):
    AssertionError: Not all shards have the same number of batches, [3, 2]:
      shard 0: [0], [1], [2]
      shard 1: [3], [4]
    """
    shards = read_shards(read)
    steps = [len(shard) for shard in shards]
    if len({*steps}) > 1:
        raise AssertionError(
            f"Not all shards have the same number of batches, {steps}:{listed(shards)}"
        )


def same_examples_for_any_replicas(read: Callable[[int], Read], *, replicas: int) -> None:
    """Fail unless replicas read the same examples in the same order as one device.

    >>> same_examples_for_any_replicas(lambda replicas: range(6 // replicas * replicas), replicas=4)
    Traceback (most recent call last):
    AssertionError: On 4 replicas, example 4 in order is nothing and not 4.
    one:
      [0], [1], [2], [3], [4], [5]
    replicas:
      [0], [1], [2], [3]

    Args:
        read: A function of the number of replicas that returns global batches, or the batches of
            each shard: of each step, shard 0 has the first examples, then shard 1, and so on.
        replicas: The number that is compared with one.
    """
    single, several = (read_shards(read(count)) for count in (1, replicas))
    what = f"On {replicas} replicas, example {{}} in order"
    _same([*_in_order(single)], [*_in_order(several)], what, one=single, replicas=several)


def reproducible(make: Callable[[int], Read | Iterator[Read]], *, seed: int = 0) -> None:
    """Fail unless an epoch's examples follow from the seed, in a new order each epoch.

    Two datasets of the same seed must give the same batches in each of their epochs, and the order
    must change in some of them. Of few examples, orders are alike by chance: as many epochs, two or
    more, are read as make that unlikely. Of fewer than two examples, the order cannot change.

    Args:
        make: A function of the seed that returns a dataset, of which each iteration is an epoch, or
            an iterator of epochs: `lambda seed: (batches(seed, epoch) for epoch in count())`.
        seed: What it is called with.

    Raises:
        AssertionError: The message names the epoch, and what comes in it.

    >>> reproducible(lambda seed: np.array([2, 0, 1, 4, 3]))
    Traceback (most recent call last):
    AssertionError: All of 6 epochs have the same order with seed 0:
      [2], [0], [1], [4], [3]
    """
    first, orders = [], set()
    for epoch, shards in enumerate(_epochs(make(seed))):
        first.append(shards)
        order = (*_in_order(shards),)
        orders.add(order)
        possible = math.lgamma(len({*order}) + 1)  # orders, and their logarithm
        if epoch and (possible == 0 or (len(orders) > 1 and epoch * possible > math.log(1e4))):
            break
        if epoch * possible > math.log(1e9) and len(orders) == 1:
            raise AssertionError(
                f"All of {epoch + 1} epochs have the same order with seed {seed}:{listed(shards)}"
            )
    # After the first run, since both may draw from NumPy's or TensorFlow's global numbers.
    for epoch, (shards, again) in enumerate(zip(first, _epochs(make(seed)), strict=False)):
        what = f"With seed {seed}, batch {{}} of epoch {epoch}"
        expected, read = ([*itertools.chain.from_iterable(run)] for run in (shards, again))
        _same(expected, read, what, first=shards, again=again)


def resumed_run_continues(resume: Callable[[int], Read], *, after: int) -> None:
    """Fail unless a run that is resumed continues with the batches that it had not read.

    >>> resumed_run_continues(lambda steps: range(steps // 2 * 2, 6), after=3)
    Traceback (most recent call last):
    AssertionError: Resumed after 3 batches, batch 3 is [2] and not [3].
    uninterrupted:
      [0], [1], [2], [3], [4], [5]
    resumed:
      [2], [3], [4], [5]

    Args:
        resume: A function of a number of batches that returns what is left of an epoch after a stop
            there: it reads as many, saves, restores into new objects, and returns their iterator.
            For 0 it returns an epoch that nothing stops.
        after: The number of batches after which to stop; after the last there is nothing to read.
    """
    checks.integer("after", after, minimum=0)
    full, rest = (read_shards(resume(steps)) for steps in (0, after))
    none: Shard = []
    for shard, left in itertools.zip_longest(full, rest, fillvalue=none):
        what = f"Resumed after {counted(after, 'batch')}, batch {{}}"
        _same(shard, shard[:after] + left, what, uninterrupted=full, resumed=rest)


def held_out_does_not_leak(read: Callable[[Nest], Read], held_out: Nest) -> None:
    """Fail unless training data stay the same when the held-out examples change.

    A statistic of all examples, such as a mean or a vocabulary, carries what is held out for
    validation or test into the training, and the results look better than they are. Each held-out
    example is replaced by the first one, and then by the last one.

    >>> train = np.array([1.0, 2.0])
    >>> def divided(held_out):
    ...     return iter(train / np.max([*train, *held_out]))
    >>> held_out_does_not_leak(divided, np.array([2.0, 4.0]))
    Traceback (most recent call last):
    AssertionError: With other held-out examples, training example 0 in order is 0.5 and not 0.25...

    Args:
        read: A function of the held-out examples that prepares the data as your program does, and
            returns those for training, the same ones at each call.
        held_out: A nest of arrays with the examples along axis 0, of which two differ at least.

    Raises:
        AssertionError: They change; the message names the first training example that does.
        ValueError: `read` returns other data at each call; all held-out examples are equal.
    """
    examples, arrays = examples_of(held_out), mapped(np.asarray, held_out)
    if len({*examples}) < 2:
        checks.fail("`held_out` must have two examples that differ.", held_out=held_out)
    before, again = (read_shards(read(held_out)) for _ in range(2))
    if before != again:
        checks.fail("`read` must return the same data at each call: seed what it draws.")
    for index in (0, -1):
        after = read_shards(read(taken(arrays, [index] * len(examples))))
        what = "With other held-out examples, training example {} in order"
        _same([*_in_order(before)], [*_in_order(after)], what, before=before, after=after)


def _same(expected: list[Any], read: list[Any], what: str, **runs: list[Shard]) -> None:
    """Compare two lists, and name the first entry that differs."""
    pairs = itertools.zip_longest(expected, read, fillvalue="nothing")
    for index, (before, after) in enumerate(pairs):
        if before != after:
            lists = "".join(f"\n{name}:{listed(shards)}" for name, shards in runs.items())
            texts = ["nothing" if entry == "nothing" else text(entry) for entry in (after, before)]
            raise AssertionError(f"{what.format(index)} is {texts[0]} and not {texts[1]}.{lists}")


def _in_order(shards: list[Shard]) -> Iterator[Example]:
    for step in itertools.zip_longest(*shards, fillvalue=[]):
        for batch in step:
            yield from batch


def _epochs(made: Any) -> Iterator[list[Shard]]:
    """Read one epoch after the other, without an end."""
    if hasattr(made, "__next__"):
        yield from map(read_shards, made)
        checks.fail("`make` returned too few epochs to compare: return an iterator without an end.")
    while True:
        yield read_shards(made)


def _in_words(noun: str, items: Sequence[Any]) -> str:
    """Return items in words, with "is" or "are"; the first five are named.

    >>> _in_words("example", [3]), _in_words("example", [0, 1])
    ('example 3 is', 'examples 0 and 1 are')
    """
    texts = [text(item) for item in items[:5]]
    texts += [counted(len(items) - 5, "other")] if items[5:] else []
    names = ", ".join(texts[:-1]) + " and " * bool(texts[1:]) + texts[-1]
    return f"{noun}s {names} are" if texts[1:] else f"{noun} {names} is"
