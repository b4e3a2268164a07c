"""What must hold for pipelines, splits, schedules, layers and steps of your own.

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
has one of them for each shard, that is for each process or replica. A batch is a tensor or a nest
of tensors with the examples along axis 0; a number, or an example without that axis, is a batch of
one. Examples are compared by their values, and named by their position, counted from 0.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from kdpkit import scaling
from kdpkit._internal import checks
from kdpkit.testing._reading import (
    Example,
    Shard,
    counted,
    examples_of,
    leaves,
    listed,
    read_shards,
    taken,
    text,
)

if TYPE_CHECKING:
    import keras

Read: TypeAlias = Any  # a dataset or another iterable of batches, or a list of them
Nest: TypeAlias = Any  # arrays in tuples, lists and dictionaries

_TOLERANCE = 1e-5  # of the largest number: float32 rounds about here


def every_example_once(
    read: Read,
    *,
    examples: Nest | int,
    may_drop: int = 0,
    key: Callable[[Any], Any] | None = None,
) -> None:
    """Fail unless every example comes exactly once an epoch, over all shards.

    Padding may repeat examples in batches `(x, y, sample_weight)`, with weight 0, if `examples` is
    `x` or `(x, y)`.

    >>> every_example_once([[0, 1, 2], [3, 4]], examples=5)
    >>> every_example_once([[0, 1], [1, 2]], examples=4)
    Traceback (most recent call last):
    AssertionError: Of 4 examples, number 3 is lost and number 1 is read again, on 2 shards with
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
    names = {example: index for index, example in reversed([*enumerate(expected)])}
    shards = read_shards(read, key=key, like=examples, most=len(expected))
    found = Counter(example for shard in shards for batch in shard for example in batch)
    lost = sorted(names[of] for of in (Counter(expected) - found).elements())
    surplus = found - Counter(expected)
    again = sorted(names[of] for of in surplus if of in names)
    problems = {
        "number {} lost": lost if len(lost) > may_drop else [],
        "number {} read again": again,
        "{} not among them": [of for of in surplus if of not in names],
    }
    if any(problems.values()):
        texts = [problem.format(_in_words(of)) for problem, of in problems.items() if of]
        largest = max((len(batch) for shard in shards for batch in shard), default=0)
        batches = f" with batches of {largest}" if largest else ""
        raise AssertionError(
            f"Of {counted(len(expected), 'example')}, {' and '.join(texts)}, on "
            f"{counted(len(shards), 'shard')}{batches}:{listed(shards, names)}"
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
    one, many = (read_shards(read(count)) for count in (1, replicas))
    what = f"On {replicas} replicas, example {{}} in order"
    _same([*_in_order(one)], [*_in_order(many)], what, one=one, replicas=many)


def split_as_tf_distribute(parts: Sequence[Any], *, of: Nest | int) -> None:
    """Fail unless a batch is split over replicas as `tf.distribute` splits it.

    The replicas take `ceil(size / replicas)` examples each, in order, until none are left: see
    `kdpkit.scaling.split_batch`.

    >>> split_as_tf_distribute([2, 2, 1], of=5)
    >>> split_as_tf_distribute(np.array_split(np.arange(4), 3), of=4)
    Traceback (most recent call last):
    AssertionError: Of 4 examples on 3 replicas, that of replica 1 is [2] and not [2, 3].

    Args:
        parts: For each replica its examples, or how many it gets.
        of: The global batch, or its size if its examples are the numbers from 0 on.
    """
    if isinstance(of, int | np.integer):
        of = np.arange(checks.integer("of", of, minimum=0))
    batch = examples_of(of)
    sizes = scaling.split_batch(len(batch), len(parts))
    shards = [batch[end - size : end] for size, end in zip(sizes, np.cumsum(sizes), strict=True)]
    is_size = [isinstance(part, int | np.integer) for part in parts]
    expected = [len(of) if size else of for of, size in zip(shards, is_size, strict=True)]
    found = [of if size else examples_of(of) for of, size in zip(parts, is_size, strict=True)]
    what = f"Of {counted(len(batch), 'example')} on {len(parts)} replicas, that of replica {{}}"
    _same(expected, found, what)


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
    for epoch, one in enumerate(_forever(make(seed))):
        first.append(one)
        order = (*_in_order(one),)
        orders.add(order)
        possible = math.lgamma(len({*order}) + 1)  # orders, and their logarithm
        if epoch and (possible == 0 or (len(orders) > 1 and epoch * possible > math.log(1e4))):
            break
        if epoch * possible > math.log(1e9) and len(orders) == 1:
            raise AssertionError(
                f"All of {epoch + 1} epochs have the same order with seed {seed}:{listed(one)}"
            )
    # After the first run, since both may draw from NumPy's or TensorFlow's global numbers.
    for epoch, (one, again) in enumerate(zip(first, _forever(make(seed)), strict=False)):
        what = f"With seed {seed}, batch {{}} of epoch {epoch}"
        mine, its = ([*itertools.chain.from_iterable(run)] for run in (one, again))
        _same(mine, its, what, first=one, again=again)


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


def padding_keeps_the_loss(
    loss: Callable[..., Any], batch: Sequence[Any], padded: Sequence[Any]
) -> None:
    """Fail unless a padded batch has the loss of its examples.

    >>> def mean(x, y, weight=1.0):
    ...     return np.mean(weight * (x - y) ** 2)
    >>> x, y = np.ones(3), np.zeros(3)
    >>> padding_keeps_the_loss(mean, (x, y), (np.ones(4), np.zeros(4), np.array([1, 1, 1, 0])))
    Traceback (most recent call last):
    AssertionError: The loss of 3 examples, padded to 4, is 0.75 and not 1: 0.75 times that.

    Args:
        loss: Called as `loss(*batch)` and `loss(*padded)`; it returns a number.
        batch: The parts of a batch: `(x, y)` or `(x, y, sample_weight)`.
        padded: The parts after padding, sample weights among them.
    """
    mine, its = (float(_array(loss(*parts), ndim=0)) for parts in (batch, padded))
    if not math.isclose(mine, its, rel_tol=_TOLERANCE, abs_tol=1e-7):
        real, size = (len(parts[0]) for parts in (batch, padded))
        factor = f": {its / mine:.4g} times that" if mine else ""
        raise AssertionError(
            f"The loss of {counted(real, 'example')}, padded to {size}, is {its:.6g} and not "
            f"{mine:.6g}{factor}."
        )


def same_numbers_for_any_replicas(compute: Callable[[int], Nest], *, replicas: int) -> None:
    """Fail unless replicas compute what one device computes, to rounding: a loss, weights.

    For a Keras model, `same_training_for_any_replicas` also says what differs first, and why.

    >>> same_numbers_for_any_replicas(lambda replicas: 0.5 * replicas, replicas=2)
    Traceback (most recent call last):
    AssertionError: On 2 replicas, number 0 is 1 and not 0.5; all are 2 times one device's.

    Args:
        compute: A function of the number of replicas that returns numbers, or a nest of arrays of
            fixed shapes.
        replicas: The number that is compared with one.
    """
    _compare(compute(replicas), compute(1), f"On {replicas} replicas", "one device's")


def accumulation_equals_the_batch(
    train: Callable[[list[Any]], Nest], batch: Nest, *, steps: int
) -> None:
    """Fail unless accumulating the gradients of several micro-batches equals one global batch.

    The micro-batches differ by at most one example, and none is empty. Keras'
    `gradient_accumulation_steps` averages them all alike: draw a multiple of `steps` for it.

    Args:
        train: A function of a list of micro-batches that makes one update, and returns the weights,
            or the update itself: a nest of arrays.
        batch: A nest of arrays with the examples along axis 0, in tuples and dictionaries.
        steps: The number of micro-batches, at most as many as there are examples.
    """
    size = len(examples_of(batch))
    steps = checks.integer("steps", steps)
    if steps > size:
        checks.fail("There are fewer examples than micro-batches.", steps=steps, examples=size)
    bounds = np.linspace(0, size, steps + 1).astype(int)
    parts = [taken(batch, slice(*bound)) for bound in itertools.pairwise(bounds)]
    when = f"With {size} examples in {counted(steps, 'micro-batch')}"
    _compare(train(parts), train([batch]), when, "the global batch's")


def same_training_for_any_replicas(
    build: "Callable[[], keras.Model]", data: Any, *, replicas: int
) -> None:
    """Fail unless R replicas train what one device trains.

    Args:
        build: Returns a new, compiled model; see `kdpkit.training.check_parity`.
        data: A dataset of global batches, or one batch as a tuple of arrays.
        replicas: Number of replicas, each on its own device.

    Raises:
        AssertionError: They do not; the message is the report, with the variable that differs most.
            If training on replicas raised an error, it is the `__cause__`.
        ValueError: Nothing can be compared; see `kdpkit.training.check_parity`.

    >>> import keras
    >>> from kdpkit import testing
    >>> from kdpkit.training import replica_exact
    >>> def build():
    ...     model = replica_exact(testing.tiny_classifier())
    ...     model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    ...     return model
    >>> same_training_for_any_replicas(build, testing.toy_classification(7), replicas=2)
    """
    from kdpkit.training import check_parity

    report = check_parity(build, data, replicas=replicas)
    if not report.equal:
        raise AssertionError(str(report)) from report.error


def per_example(
    part: "keras.Layer | keras.Loss | keras.Metric | Callable[..., Any]",
    *inputs: Any,
    training: bool = True,
) -> None:
    """Fail unless a layer, a loss or a metric computes each example by itself.

    Statistics of `BatchNormalization`, which are the global batch's on replicas, are no breach.

    A layer of your own that does is divided over replicas by `kdpkit.training.replica_exact`, which
    tries it in the same way: on made-up examples of the shapes of `inputs`, with gradients. One of
    them is replaced by NaN, by huge numbers, by another one, or examples are left out or come in
    another order, and the others' outputs and gradients must stay what they were. What does more
    than compute fails too: it assigns, adds a loss, counts its calls, or draws from NumPy, say. Of
    a loss, its values before they are averaged are tried. A metric is given `inputs` together and
    one by one, and must count the same. What is tried is left as it was.

    Args:
        part: A layer, or a model that is used as one, which is built if it is not yet; a loss; a
            metric; or a function of tensors, as a loss may be.
        inputs: What it is called on: arrays with the examples along axis 0, or nests of them.
        training: Whether a layer is called as in training.

    Raises:
        AssertionError: It does not; the message names what breaks the law.
        ValueError: Keras' backend is not TensorFlow.

    >>> import keras
    >>> per_example(keras.layers.LayerNormalization(), np.ones((2, 3)))
    >>> per_example(keras.layers.Softmax(axis=0), np.ones((2, 3)))
    Traceback (most recent call last):
    AssertionError: The layer `softmax` changes the outputs of examples when one is NaN...
    """
    import keras

    if keras.backend.backend() != "tensorflow":
        checks.fail(
            "`per_example` tries layers of TensorFlow; on JAX `replica_exact` divides none.",
            backend=keras.backend.backend(),
        )
    if not inputs:
        checks.fail("Pass the inputs that it is called on, with shapes of two examples or more.")
    if isinstance(part, keras.Metric):
        _counts_alike(part, inputs)
        return
    from kdpkit.training.tensorflow._layer_trial import Calling, Verdict, try_layer
    from kdpkit.training.tensorflow._patches import installed

    kinds = {keras.Layer: "layer", keras.Loss: "loss", object: "function"}
    kind = next(word for of, word in kinds.items() if isinstance(part, of))
    function: Any = getattr(part, "call", part) if kind == "loss" else part

    layer: Any = part if kind == "layer" else Calling(function)
    tensors = keras.tree.map_structure(keras.ops.convert_to_tensor, inputs)
    if not layer.built:
        layer(*tensors)
    with installed():
        verdict, reason = try_layer(layer, tensors, {"training": training})
    if verdict is not Verdict.KEPT:
        name = getattr(part, "name", getattr(part, "__name__", ""))
        raise AssertionError(
            f"The {kind} `{name}` {reason}, so replicas that divide it over their examples "
            "would not compute what one device does."
        )


def continuous_schedule(
    schedule: Callable[[Any], Any], *, through: Mapping[int, float], jumps: Sequence[int] = ()
) -> None:
    """Fail unless a learning rate has no jumps, and passes through given rates.

    Before each step, from the first to the last of `through`, the rates at fractions of a step must
    come ever closer to the rate at the step. A jump of one per cent of what a step changes is
    found. Draw schedules of at most some thousand steps: float32 has no fractions of large numbers.

    >>> from keras.optimizers.schedules import PolynomialDecay
    >>> continuous_schedule(PolynomialDecay(1.0, 8, 0.0), through={0: 1.0, 8: 0.0})
    >>> def warmup(step):
    ...     return step / 4 if step < 4 else 0.5
    >>> continuous_schedule(warmup, through={0: 0.0, 8: 0.5})
    Traceback (most recent call last):
    AssertionError: The rate jumps at step 4, from 0.9998 to 0.5.

    Args:
        schedule: A `keras.optimizers.schedules.LearningRateSchedule`, or another function of a
            step, which may be a fraction, and an array.
        through: Rates by step: its ends, and peaks.
        jumps: Steps at which a jump is meant: boundaries of joined schedules.
    """

    def rates(steps: Any) -> np.ndarray:
        steps = np.asarray(steps, "float32")
        try:
            found = np.asarray(schedule(steps), float)
        except Exception:  # it may take one step alone; a fault of its own is raised again below
            found = np.zeros(0)
        if found.shape != steps.shape:
            found = np.array([_array(schedule(float(step)), ndim=0) for step in steps])
        return found

    if not through:
        checks.fail("`through` must have at least one step and its rate.", through=through)
    largest = max(map(abs, through.values())) or 1.0
    for step, expected, rate in zip(through, through.values(), rates([*through]), strict=True):
        if not math.isclose(rate, expected, rel_tol=_TOLERANCE, abs_tol=1e-6 * largest):
            raise AssertionError(f"The rate at step {step} is {rate:.6g} and not {expected:.6g}.")
    steps = np.array(sorted({*range(min(through) + 1, max(through) + 1)} - {*jumps}))
    at, before, earlier = (rates(steps - part) for part in (0.0, 2**-10, 2**-5))
    # Of a line the one is 1/32 of the other, of a root 1/6, and of a jump nearly as much.
    is_smooth = np.abs(at - before) <= np.abs(at - earlier) / 4 + 1e-5 * largest
    is_jump = ~(is_smooth & np.isfinite(at))
    if is_jump.any():
        first = int(np.argmax(is_jump))
        raise AssertionError(
            f"The rate jumps at step {steps[first]}, from {before[first]:.4g} to {at[first]:.4g}."
        )


def _same(mine: list[Any], its: list[Any], what: str, **runs: list[Shard]) -> None:
    """Compare two lists, and name the first entry that differs."""
    for index, (one, other) in enumerate(itertools.zip_longest(mine, its, fillvalue="nothing")):
        if one != other:
            lists = "".join(f"\n{name}:{listed(shards)}" for name, shards in runs.items())
            shown = [of if of == "nothing" else text(of) for of in (other, one)]
            raise AssertionError(f"{what.format(index)} is {shown[0]} and not {shown[1]}.{lists}")


def _in_order(shards: list[Shard]) -> Iterator[Example]:
    for step in itertools.zip_longest(*shards, fillvalue=[]):
        for batch in step:
            yield from batch


def _forever(made: Any) -> Iterator[list[Shard]]:
    """Read one epoch after the other."""
    if hasattr(made, "__next__"):
        yield from map(read_shards, made)
        checks.fail("`make` returned too few epochs to compare: return an iterator without an end.")
    while True:
        yield read_shards(made)


def _in_words(examples: Sequence[Any]) -> str:
    """Return a list in words, with "is" or "are"; the first five are named."""
    texts = [text(of) for of in examples[:5]]
    texts += [counted(len(examples) - 5, "other")] if examples[5:] else []
    words = ", ".join(texts[:-1]) + " and " * bool(texts[1:]) + texts[-1]
    return f"{words} {'are' if texts[1:] else 'is'}"


def _compare(found: Nest, expected: Nest, when: str, whose: str) -> None:
    """Compare nests of numbers, array by array."""
    mine, its = ([_array(leaf) for leaf in leaves(nest) or [None]] for nest in (expected, found))
    if [of.shape for of in mine] != [of.shape for of in its]:
        shapes = [of.shape for of in its], [of.shape for of in mine]
        raise AssertionError(f"{when}, arrays have the shapes {shapes[0]} and not {shapes[1]}.")
    one, other = (np.concatenate([of.ravel() for of in arrays]) for arrays in (mine, its))
    # Of some weights the gradient is zero, and its rounding that of the others.
    least = max(_largest(one) / 1000, 1e-7)
    allowed = [np.full(of.size, _TOLERANCE * max(_largest(of), least)) for of in mine]
    is_wrong = ~(np.abs(other - one) <= np.concatenate(allowed))
    if is_wrong.any():
        at = int(np.argmax(is_wrong))
        factor = other @ one / max(one @ one, 1e-300)
        is_far = abs(factor - 1) > 1e-2 and factor
        is_multiple = is_far and np.all(np.abs(other - factor * one) <= 1e-3 * _largest(other))
        multiple = f"; all are {factor:.4g} times {whose}" if is_multiple else ""
        raise AssertionError(
            f"{when}, number {at} is {other[at]:.6g} and not {one[at]:.6g}{multiple}."
        )


def _array(value: Any, ndim: int | None = None) -> np.ndarray:
    """Return what a function of the user's gave as numbers, of a complex one both parts."""
    try:
        array = np.asarray(value)
        array = np.stack([array.real, array.imag], -1) if array.dtype.kind == "c" else array
        numbers = array.astype(float)
    except (TypeError, ValueError):
        numbers = None
    if numbers is None or value is None or ndim not in (None, numbers.ndim):
        kind = "a number" if ndim == 0 else "numbers, or a nest of arrays"
        checks.fail(f"The function must return {kind}.", returned=value)
    return numbers


def _largest(numbers: np.ndarray) -> float:
    return float(np.max(np.abs(numbers), initial=0.0))


def _counts_alike(metric: "keras.Metric", inputs: Sequence[Any]) -> None:
    """Compare what a metric counts of all examples with what it counts of one after the other."""
    before = [variable.numpy() for variable in metric.variables]
    size = len(examples_of(inputs[0]))
    orders = [[slice(0, size)], [slice(index, index + 1) for index in reversed(range(size))]]
    counts = []
    for parts in orders:
        metric.reset_state()
        for part in parts:
            metric.update_state(*taken(tuple(inputs), part))
        counts.append([variable.numpy() for variable in metric.variables])
    metric.reset_state()
    for variable, value in zip(metric.variables, before, strict=False):  # some are built by updates
        variable.assign(value)
    name = f"the metric `{metric.name}`"
    when = f"Given {counted(size, 'example')} one by one, {name} counts something else"
    _compare(counts[1], counts[0], when, "that of all together")
