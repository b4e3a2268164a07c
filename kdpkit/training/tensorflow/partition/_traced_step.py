"""A step, traced once as on one device, as nodes of a graph without calls of functions."""

import collections
import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from kdpkit.training.tensorflow._keras_internals import FuncGraph, function_def_to_graph, graph_pb2

_CALLS = ("PartitionedCall", "StatefulPartitionedCall")


class TracedStep(NamedTuple):
    """A step's graph, and the names of its tensors.

    Args:
        graph: What was traced.
        graph_def: Its operations, and those of the functions that it calls, in an order in which
            each comes after its inputs.
        batch: The names of the tensors of the batch that have examples.
        inputs: All tensors that come from outside, by their names: each with its placeholder.
        outputs: The names of what the step returns; None for what is no tensor.
        structure: What the step returns, with a name in place of each tensor.
        makes_variables: Whether it did. `tf.function` then traces once more, and runs that.
    """

    graph: Any
    graph_def: Any
    batch: Sequence[str]
    inputs: dict[str, tuple[Any, Any]]
    outputs: Sequence[str | None]
    structure: Any
    makes_variables: bool


def traced(step: Callable[[Any], Any], batch: Any) -> TracedStep:
    """Trace a step for batches of any length.

    The length is the one that most tensors have.
    """
    graph = FuncGraph("step")
    # Functions of loops and conditions keep their order, as the graph around will keep this one's.
    graph._add_control_dependencies = True
    leaves = tf.nest.flatten(batch, expand_composites=True)
    tensors = [leaf for leaf in leaves if isinstance(leaf, tf.Tensor)]
    length = length_of(batch)
    dense = {id(x) for x in _with_axes(batch)}
    variables = []

    def create(following: Callable[..., Any], **settings: Any) -> Any:
        variables.append(following(**settings))
        return variables[-1]

    with graph.as_default(), tf.variable_creator_scope(create):
        given: dict[int, Any] = {}
        examples = []
        for x in tensors:
            is_batch = id(x) in dense and x.shape[0] == length
            shape = [None, *x.shape[1:]] if is_batch else x.shape
            if id(x) not in dense and x.shape.rank:  # a part of a ragged or sparse tensor
                shape = [None] * x.shape.rank
            given[id(x)] = tf.compat.v1.placeholder(x.dtype, shape, name="batch")
            if is_batch:
                examples.append(given[id(x)].name)
        arguments = [given.get(id(leaf), leaf) for leaf in leaves]
        structure = tf.nest.map_structure(_of_any_length, batch)
        result = step(tf.nest.pack_sequence_as(structure, arguments, expand_composites=True))
        returned = tf.nest.flatten(result, expand_composites=True)
        returned = [_tensor(leaf) for leaf in returned]
        structure = tf.nest.pack_sequence_as(result, returned, expand_composites=True)
    outer = [(x, given[id(x)]) for x in tensors] + [*graph.captures]
    # Names without scopes, which nothing else has when the nodes are imported.
    inputs = {f"input_{i}:0": pair for i, pair in enumerate(outer)}
    names_of_inputs = {inner.name: name for name, (_, inner) in inputs.items()}
    graph_def, renamed = _whole_graph(graph, names_of_inputs)
    examples = [names_of_inputs[name] for name in examples]
    names = [
        renamed.get(leaf.name, leaf.name) if isinstance(leaf, tf.Tensor) else None
        for leaf in returned
    ]
    return TracedStep(graph, graph_def, examples, inputs, names, structure, bool(variables))


def _of_any_length(leaf: Any) -> Any:
    """Return what a ragged or sparse tensor is made of, for any number of examples."""
    if not isinstance(leaf, tf.RaggedTensor | tf.SparseTensor):
        return leaf
    shape = [None, *leaf.shape[1:]]
    if isinstance(leaf, tf.SparseTensor):
        return tf.SparseTensorSpec(shape, leaf.dtype)
    return tf.RaggedTensorSpec(shape, leaf.dtype, leaf.ragged_rank, leaf.row_splits.dtype)


def has_examples(batch: Any) -> bool:
    return bool(_with_axes(batch))


def length_of(batch: Any) -> int | None:
    """Return the number of a batch's examples, if it has one that is known before the step runs."""
    lengths = collections.Counter(x.shape[0] for x in _with_axes(batch))
    return lengths.most_common(1)[0][0] if lengths and None not in lengths else None


def _with_axes(batch: Any) -> list[Any]:
    return [x for x in tf.nest.flatten(batch) if isinstance(x, tf.Tensor) and x.shape.rank]


def _tensor(leaf: Any) -> Any:
    """Return a tensor of what a step returns, which may be a variable."""
    if isinstance(leaf, tf.Variable):
        return tf.convert_to_tensor(leaf)
    return tf.identity(leaf) if isinstance(leaf, tf.Tensor) else leaf


def _whole_graph(graph: FuncGraph, names_of_inputs: dict[str, str]) -> tuple[Any, dict[str, str]]:
    """Return a graph's nodes, with those of called functions, and the new names of results."""
    graph_def = graph.as_graph_def()
    functions = {function.signature.name: function for function in graph_def.library.function}
    given = {name.partition(":")[0] for name in names_of_inputs}
    traced = [node for node in graph_def.node if node.name not in given]
    nodes, renamed = inlined(graph, traced, functions, names_of_inputs)
    result = graph_pb2.GraphDef(library=graph_def.library, versions=graph_def.versions)
    result.node.extend(nodes)
    return result, renamed


def inlined(
    graph: FuncGraph,
    nodes: Sequence[Any],
    functions: dict[str, Any],
    names_of_inputs: dict[str, str] | None = None,
) -> tuple[list[Any], dict[str, str]]:
    """Return nodes with those of the functions that they call, and the new names of results.

    The functions are known to the graph.
    """
    renamed = dict(names_of_inputs or {})
    with graph.as_default():
        expanded = [inner for node in nodes for inner in _expanded(node, functions, renamed)]
    for node in expanded:
        names = [_renamed(name, renamed) for name in node.input]
        del node.input[:]
        node.input.extend(names)
        node.attr.pop("_class", None)  # beside which operation it has to be
    return [*_sorted(expanded)], {name: _renamed(name, renamed) for name in renamed}


def _expanded(node: Any, functions: dict[str, Any], renamed: dict[str, str]) -> Iterator[Any]:
    """Yield a node, or those of the function that it calls, unless XLA compiles that."""
    function = functions.get(node.attr["f"].func.name) if node.op in _CALLS else None
    if function is None or function.attr["_XlaMustCompile"].b:
        yield node
        return
    body, flat_names = function_def_to_graph.function_def_to_graph_def(function)
    signature = function.signature
    within = lambda name: f"{'^' * name.startswith('^')}{node.name}/{name.lstrip('^')}"  # noqa: E731
    for argument, name in zip(signature.input_arg, node.input, strict=False):
        renamed[within(f"{argument.name}:0")] = name
    for index, argument in enumerate(signature.output_arg):
        renamed[f"{node.name}:{index}"] = within(flat_names[function.ret[argument.name]])
    controls = [name for name in node.input if name.startswith("^")]
    arguments = {argument.name for argument in signature.input_arg}
    for inner in body.node:
        if inner.name in arguments:
            continue
        names = [within(name) for name in inner.input if name.lstrip("^") not in arguments]
        inner.name = within(inner.name)
        del inner.input[:]
        inner.input.extend(names + controls)
        yield from _expanded(inner, functions, renamed)


def _renamed(name: str, renamed: dict[str, str]) -> str:
    if not name.startswith("^") and ":" not in name:
        name += ":0"
    while name in renamed:
        name = renamed[name]
        if not name.startswith("^") and ":" not in name:
            name += ":0"
    return name


def _sorted(nodes: Sequence[Any]) -> Iterator[Any]:
    """Yield nodes in their order, but each after its inputs.

    A loop is older than the lists that its gradient adds to it.
    """
    positions = {node.name: index for index, node in enumerate(nodes)}
    users: dict[int, list[int]] = {}
    missing = []
    for index, node in enumerate(nodes):
        sources = {name.lstrip("^").partition(":")[0] for name in node.input}
        known = [positions[name] for name in sources if name in positions]
        missing.append(len(known))
        for source in known:
            users.setdefault(source, []).append(index)
    ready = [index for index, number in enumerate(missing) if not number]
    while ready:
        index = heapq.heappop(ready)
        yield nodes[index]
        for user in users.get(index, ()):
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, user)
