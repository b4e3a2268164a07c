"""What of a step is computed whole, on one device, and how much of its work that is."""

import collections
import math
import pathlib
import sys
import sysconfig
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import kdpkit
from kdpkit.training.tensorflow.partition import _rules
from kdpkit.training.tensorflow.partition._bodies import Bodies
from kdpkit.training.tensorflow.partition._labels import SAME, WHOLE, is_size

_LEAST = 0.05  # of a step's work, of which a reader hears
_MOST_PLACES = 3
_LIBRARIES = (
    sysconfig.get_path("purelib"),
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("scripts"),
    str(pathlib.Path(kdpkit.__file__).parent),
)
_reported: set[frozenset[str]] = set()  # what was said, of a step of any length


def report(step: Any, graph: Any) -> None:
    """Say once which operations of a step are computed whole, if they are some of its work."""
    shares = shares_of_whole(step, graph)
    sentence, places = sentence_of(shares), frozenset(shares)
    if sentence and places not in _reported:
        _reported.add(places)
        sys.stderr.write(f"kdpkit: {sentence}\n")


def sentence_of(shares: Any) -> str:
    """Return a sentence about what is computed whole; none if that is hardly any work."""
    if sum(shares.values()) < _LEAST:
        return ""
    places = ", ".join(
        f"{place} ({share:.0%})" for place, share in shares.most_common(_MOST_PLACES) if share
    )
    return (
        f"About {sum(shares.values()):.0%} of the step's work is computed by one device for all, "
        f"for want of a rule that divides it: {places}. Results are exact."
    )


def shares_of_whole(step: Any, graph: Any) -> Any:
    """Return the share of a step's work of what is computed whole, by operation and place."""
    # Of sums there is one, which has to be computed with once.
    whole = [
        op for op in graph.whole if any(graph.of(x) is WHOLE for x in (*op.inputs, *op.outputs))
    ]
    shares: Any = collections.Counter()
    if not whole:
        return shares
    divided = [op for op in graph.first.get_operations() if _has_examples(graph, op.outputs)]
    bodies = Bodies(step, graph.longer)
    work = {op: _work(op, bodies) for op in {*divided, *whole}}
    total = sum(work.values()) or 1.0
    traced = {op.name: op for op in step.graph.get_operations()}
    for op in whole:
        shares[f"`{op.type}`{_place(traced, op.name)}"] += work[op] / total
    return shares


def _has_examples(graph: Any, tensors: Sequence[tf.Tensor]) -> bool:
    labels = map(graph.of, tensors)
    return any(label is not SAME and not is_size(label) for label in labels)


def _work(op: tf.Operation, bodies: Bodies) -> float:
    """Estimate an operation's work: multiplications of a product, entries of other results.

    The root of the entries of all three matrices is the number of a product's multiplications. Of a
    loop it is the work of one round.
    """
    if op.type in _rules.WITH_BODIES:
        graphs = bodies.graphs_of(op)
        return sum(_work(inner, bodies) for graph in graphs for inner in graph.get_operations())
    entries = [_num_entries(x) for x in op.outputs]
    if op.type not in _rules.PRODUCTS:
        return float(sum(entries))
    inputs = [_num_entries(x) for x in op.inputs if x.dtype == op.outputs[0].dtype]
    return math.sqrt(math.prod(inputs + entries))


def _num_entries(x: tf.Tensor) -> float:
    is_number = x.dtype.is_floating or x.dtype.is_complex or x.dtype.is_integer
    return float(math.prod(size or 1 for size in x.shape)) if is_number and x.shape.rank else 0.0


def _place(traced: dict[str, tf.Operation], name: str) -> str:
    """Return the user's line that an operation comes from; of a gradient that of its operation."""
    name = name.removeprefix("gradient_tape/")
    while name and name not in traced:  # what calls the function that it is in
        name = name.rpartition("/")[0]
    for frame in reversed(traced[name].traceback if name else []):
        if not frame.filename.startswith((*_LIBRARIES, "<")):
            return f" at {pathlib.Path(frame.filename).name}:{frame.lineno}"
    return ""
