"""Which axis of each tensor has the examples, found by TensorFlow's inference of shapes.

A traced step is imported for batches of several lengths. The axis whose length is proportional to
the batch's in all of them has the examples. Nothing is computed.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from kdpkit.training.tensorflow._keras_internals import handle_data_util, import_graph_def

# Many programs split a batch into groups: every number up to 10 divides it.
LENGTH = 2520
# An axis that is as long as batches of these, too, is not padded or cut to a length. Of one that
# needs groups of k there are k, or k times a prime number: the largest of which a step's numbers,
# with all that belongs to an example, can be counted.
_FEW, _PRIMES = range(1, 11), (1048583, 65537, 7919)
_SEVERAL = 11
_OTHER_LENGTH = 6007  # of no other axis: it is prime
# A shape may depend on how these end, and all three lengths may be on one side: it is unknown.
_COMPARISONS = ("Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual")
# An unknown length of other axes, as of texts, is taken for this: halved five times it is even.
# Then for the first that a step takes of those that are even ever more often: if it makes blocks of
# entries, or cuts a rest, these do not belong to examples there.
_ASSUMED, _OTHERS_ASSUMED = 96, (97, 98, 100, 104, 112, 160)


class Inferred(NamedTuple):
    """A graph for a batch of each length, the axes with examples, and their entries for each.

    Args:
        graphs: The same operations with their shapes, for `LENGTH` examples and for more.
        batch: The names of the step's inputs that have as many examples as the first of them.
        axes: The axis of examples of each tensor that has one, by its name.
        is_assumed: Whether lengths of other axes were assumed.
        longer: How many examples the second graph is for.
    """

    graphs: tuple[Any, Any]
    batch: Sequence[str]
    axes: dict[str, int]
    is_assumed: bool
    longer: int


def inferred(step: Any) -> Inferred:
    """Return the axes of a traced step's tensors.

    Raises:
        ValueError: TensorFlow finds that the step cannot compute such batches.
    """
    placeholders = {name: inner for name, (_, inner) in step.inputs.items()}
    has_unknown = any(
        None in (x.shape[1:] if name in step.batch else x.shape)
        for name, x in placeholders.items()
        if x.shape.rank
    )
    try:
        return _inferred(step, placeholders, _ASSUMED if has_unknown else None)
    except ValueError:
        if not has_unknown:
            raise
        return _inferred(step, placeholders, None)


def _inferred(step: Any, placeholders: dict[str, Any], assumed: int | None) -> Inferred:
    batch = _of_one_length(step, placeholders, assumed)

    def graph_for(length: int, assumed: int | None = assumed) -> Any:
        return _for_length(step, placeholders, assumed, dict.fromkeys(batch, length))

    first = graph_for(LENGTH)
    few = next(((n, graph) for n in _FEW if (graph := _if_possible(graph_for, n))), None)
    longer, second = _of_more(graph_for)
    axes = axes_of(first, second, longer)
    if few:
        axes, unknown = _compared(axes, first, *few)
        # One example and an unknown length may be a broadcast, and several are none.
        if unknown and (several := _if_possible(graph_for, _SEVERAL * few[0])):
            axes |= _compared(unknown, first, _SEVERAL * few[0], several)[0]
    if assumed:
        others = _of_other_texts(graph_for, [LENGTH, *(few or ())[:1]])
        axes = {name: i for name, i in axes.items() if _is_so_for_all(name, i, others)}
    return Inferred((first, second), batch, axes, bool(assumed), longer)


def _of_other_texts(
    graph_for: Callable[..., Any], lengths: Sequence[int]
) -> Sequence[tuple[int, Any]]:
    """Return the lengths of batches, and graphs for them, with texts of another length."""
    for assumed in _OTHERS_ASSUMED:
        graphs = [(length, _if_possible(graph_for, length, assumed)) for length in lengths]
        if possible := [(length, graph) for length, graph in graphs if graph]:
            return possible
    raise ValueError(f"the step works for texts of {_ASSUMED}, and not of {_OTHERS_ASSUMED}")


def _of_more(graph_for: Callable[..., Any]) -> tuple[int, Any]:
    """Return the length of a batch above `LENGTH`, and the graph for it."""
    for k in range(1, 11):
        for prime in _PRIMES:
            try:
                return k * prime, graph_for(k * prime)
            except ValueError as error:
                if "int32" not in str(error):  # It has not too many numbers, but needs groups.
                    break
    return 2 * LENGTH, graph_for(2 * LENGTH)


def _compared(
    axes: dict[str, int], first: Any, length: int, graph: Any
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the axes that count the examples of a batch of another length, and those that may."""
    are_so: dict[str, int] = {}
    may_be_so: dict[str, int] = {}
    for name, axis in axes.items():
        x, y = (g.get_tensor_by_name(name).shape for g in (first, graph))
        if y.rank is None:
            are_so[name] = axis
        elif y.rank == x.rank and y[axis] is None:
            may_be_so[name] = axis
        elif y.rank == x.rank and y[axis] * LENGTH == x[axis] * length:
            others = (i == axis or a == b for i, (a, b) in enumerate(zip(x, y, strict=True)))
            are_so |= {name: axis} if all(others) else {}
    return are_so, may_be_so


def _is_so_for_all(name: str, axis: int, graphs: Sequence[tuple[int, Any]]) -> bool:
    """Return whether each example has as many entries along an axis, whatever their number is."""
    shapes = [(length, graph.get_tensor_by_name(name).shape) for length, graph in graphs]
    entries = {
        divmod(shape[axis], length)
        for length, shape in shapes
        if shape.rank is not None and shape[axis] is not None
    }
    return len(entries) < 2 and all(rest == 0 for _, rest in entries)


def _of_one_length(step: Any, placeholders: dict[str, Any], assumed: int | None) -> list[str]:
    """Return the tensors of a batch that have to be as long as each other, as most are.

    Where lengths are not known before the step runs, others, as unlabeled examples beside labeled
    ones, may have lengths of their own, and are not divided: TensorFlow infers the shapes of all
    results for another length of theirs. Where it cannot, as behind a loop, all are as long.
    """
    if all(step.inputs[name][0].shape[0] is not None for name in step.batch):
        return [*step.batch]
    groups, rest = [], [*step.batch]
    while rest:
        tied = [rest.pop(0)]
        while found := [name for name in rest if not _may_differ(step, placeholders, tied, name)]:
            tied += found
            rest = [name for name in rest if name not in found]
        groups.append(tied)
    largest = max(groups, key=len)
    lengths = dict.fromkeys(step.batch, _OTHER_LENGTH) | dict.fromkeys(largest, LENGTH)
    graph = len(groups) > 1 and _if_possible(_for_length, step, placeholders, assumed, lengths)
    is_clear = graph and all(map(_is_known, graph.get_operations()))
    return largest if is_clear else [*step.batch]


def _may_differ(step: Any, placeholders: dict[str, Any], tied: Sequence[str], name: str) -> bool:
    """Return whether a tensor may be longer than some that are as long as each other."""
    lengths = dict.fromkeys(tied, LENGTH) | {name: _OTHER_LENGTH}
    return _if_possible(_for_length, step, placeholders, None, lengths) is not None


def _if_possible(graph_for: Callable[..., Any], *args: Any) -> Any:
    """Return the graph for batches of some lengths; None if there can be no such batches."""
    try:
        return graph_for(*args)
    except ValueError:
        return None


def _is_known(op: tf.Operation) -> bool:
    """Return whether the lengths of the numbers that an operation computes are known."""
    return all(x.shape.is_fully_defined() for x in op.outputs if x.dtype.is_floating)


def axes_of(first: Any, second: Any, longer: int) -> dict[str, int]:
    """Return the axis of examples of each tensor that has one, by its name."""
    axes = {}
    others = {operation.name: operation for operation in second.get_operations()}
    for operation in first.get_operations():
        for x, y in zip(operation.outputs, others[operation.name].outputs, strict=True):
            if x.shape.rank and y.shape.rank == x.shape.rank:
                pairs = zip(x.shape, y.shape, strict=True)
                differ = [(i, a, b) for i, (a, b) in enumerate(pairs) if a != b]
                if len(differ) == 1 and _counts_examples(*differ[0][1:], longer):
                    axes[x.name] = differ[0][0]
    return axes


def _counts_examples(first: int | None, second: int | None, longer: int) -> bool:
    if not first or not second or first % LENGTH:
        return False
    return first * longer == second * LENGTH


def import_nodes(graph_def: Any, inputs: dict[str, Any]) -> None:
    """Import nodes into the current graph, with tensors in place of some of their inputs."""
    used = {name for node in graph_def.node for name in node.input}
    used |= {f"{name}:0" for name in used if ":" not in name and not name.startswith("^")}
    inputs = {name: tensor for name, tensor in inputs.items() if name in used}
    compared = [node for node in graph_def.node if node.op in _COMPARISONS]
    for node in compared:
        node.attr["_kernel"].s = b"none"  # TensorFlow finds no value of what it cannot compute.
    import_graph_def(graph_def, input_map=inputs, name="")
    for node in compared:
        del node.attr["_kernel"]


def _for_length(
    step: Any, placeholders: dict[str, Any], assumed: int | None, lengths: dict[str, int]
) -> Any:
    graph = tf.Graph()
    with graph.as_default():
        inputs = {}
        for name, x in placeholders.items():
            shape = x.shape
            if shape.rank:
                others = [assumed if size is None else size for size in shape[1:]]
                first = assumed if shape[0] is None and name not in step.batch else shape[0]
                shape = [lengths.get(name, first), *others]
            inputs[name] = tf.compat.v1.placeholder(x.dtype, shape, name=name.partition(":")[0])
            handle_data_util.copy_handle_data(x, inputs[name])
        import_nodes(step.graph_def, inputs)
    return graph
