"""Stages of a divided step, which XLA compiles: what a device computes between two exchanges.

XLA cannot compile a step on several devices as one (keras-team/keras#20763), and knows nothing of
what they exchange. So what a device computes of its part, until it needs others', is a function.
"""

import collections
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kdpkit.training.tensorflow._keras_internals import (
    add_function,
    function_of_operations,
    handle_data_util,
    import_graph_def,
    kernels_for_xla,
    uid,
)
from kdpkit.training.tensorflow.partition import _rules
from kdpkit.training.tensorflow.partition._nodes import Nodes

# XLA draws other numbers. It wants lengths that do not depend on values.
_NOT_COMPILED = (
    _rules.WITH_BODIES
    | _rules.DRAWING
    | _rules.kinds(
        "StatelessRandomUniformFullIntV2 StatelessRandomUniformIntV2 StatelessTruncatedNormalV2 "
        "StatelessRandomGetKeyCounter StatelessMultinomial StatelessParameterizedTruncatedNormal "
        "Where Unique UniqueV2 UniqueWithCounts UniqueWithCountsV2"
    )
)
_Stage = tuple[int, int]  # how often a device needed others' before, and its number


def compiled(
    graph_def: Any, devices: dict[str, int], values: dict[str, Any], outputs: Sequence[str | None]
) -> tuple[Any, Sequence[str | None]]:
    """Put the nodes of devices into functions that XLA compiles; return all, and their outputs.

    Args:
        graph_def: The nodes of a divided step, each after its inputs.
        devices: The numbers of devices, by the names of the nodes that compute parts.
        values: What the nodes get from outside, by its names.
        outputs: The names of what is needed of the nodes.
    """
    graph = _imported(graph_def, values)
    _keep_order_of_state(graph_def, graph, values)
    stages = _stages(graph_def, graph, devices)
    members, read = collections.defaultdict[_Stage, list[Any]](list), {*outputs}
    result = Nodes(graph_def.versions)
    result.graph_def.library.CopyFrom(graph_def.library)
    for node in graph_def.node:
        stage = stages.get(node.name)
        read.update(name for name in node.input if stages.get(_source(name)) != stage)
        (result.graph_def.node if stage is None else members[stage]).append(node)
    renamed: dict[str, str] = {}
    for stage, nodes in members.items():
        operations = [graph.get_operation_by_name(node.name) for node in nodes]
        name = "stage_{}_of_device_{}".format(*stage)
        _add_call(result, name, operations, nodes[0].device, read, renamed)
    for node in result.graph_def.node:
        names = [renamed.get(name, name) for name in node.input]
        del node.input[:]
        node.input.extend(names)
    return result.graph_def, [name and renamed.get(name, name) for name in outputs]


def _imported(graph_def: Any, values: dict[str, Any]) -> Any:
    graph, read = tf.Graph(), {name for node in graph_def.node for name in node.input}
    with graph.as_default():
        inputs = {
            name: tf.compat.v1.placeholder(x.dtype, x.shape, name=name.partition(":")[0])
            for name, x in values.items()
            if name in read
        }
        for name, x in inputs.items():  # which shape a variable has
            handle_data_util.copy_handle_data(values[name], x)
        import_graph_def(graph_def, input_map=inputs, name="")
    return graph


def _keep_order_of_state(graph_def: Any, graph: Any, values: dict[str, Any]) -> None:
    """Let what reads and changes a variable depend on what did so before.

    TensorFlow goes by the order of nodes, in which a stage has no place.
    """
    changed: dict[Any, str] = {}  # what changed each variable; several names may be of one
    since = collections.defaultdict[Any, list[str]](list)  # what has read it since then
    for node in graph_def.node:
        op = graph.get_operation_by_name(node.name)
        for name in [x.name for x in op.inputs if x.dtype == tf.resource]:
            variable = id(values[name]) if name in values else name
            before = [changed[variable]] if variable in changed else []
            if op.type in _rules.READS:
                since[variable].append(f"^{node.name}")
            else:
                before += since.pop(variable, [])
                changed[variable] = f"^{node.name}"
            node.input.extend(before)


def _stages(graph_def: Any, graph: Any, devices: dict[str, int]) -> dict[str, _Stage]:
    """Return the stages of nodes that XLA compiles, by their names."""
    stages: dict[str, _Stage] = {}
    numbers: dict[str, int] = collections.defaultdict(int)
    # TensorFlow would make a stage of which nothing is read but that it has run a NoOp, and look
    # for a function of that name.
    awaited = {name[1:] for node in graph_def.node for name in node.input if name[0] == "^"}
    for node in graph_def.node:
        device = None if node.name in awaited else devices.get(node.name)
        is_compiled = device is not None and _is_compiled(graph.get_operation_by_name(node.name))
        for source in map(_source, node.input):
            is_left = source in stages and not (is_compiled and stages[source][1] == device)
            numbers[node.name] = max(numbers[node.name], numbers[source] + is_left)
        if is_compiled and device is not None:
            stages[node.name] = numbers[node.name], device
    return stages


def _is_compiled(op: tf.Operation) -> bool:
    tensors = [*op.inputs, *op.outputs]
    is_known = not any(x.dtype in (tf.string, tf.resource, tf.variant) for x in tensors)
    may_be = is_known and op.type not in _NOT_COMPILED and not op.control_inputs
    may_be = may_be and not op.op_def.is_stateful
    return may_be and op.type in kernels_for_xla()


def _add_call(
    nodes: Nodes, name: str, operations: Sequence[Any], device: str, read: Any, renamed: Any
) -> None:
    """Add the call of a function of operations, of which others read some results."""
    inside = {op.name for op in operations}
    inputs = {x.name: x for op in operations for x in op.inputs if x.op.name not in inside}
    outputs = [x for op in operations for x in op.outputs if x.name in read]
    function = function_of_operations(operations[0].graph, operations, [*inputs.values()], outputs)
    function.signature.name = f"{name}_{uid()}"
    function.attr["_XlaMustCompile"].b = True
    add_function(function)
    renamed.update((x.name, f"{name}:{i}") for i, x in enumerate(outputs))
    nodes.add(
        name,
        "PartitionedCall",
        [*inputs],
        device,
        f=function.signature.name,
        Tin=[x.dtype for x in inputs.values()],
        Tout=[x.dtype for x in outputs],
        _XlaMustCompile=True,
    )


def _source(name: str) -> str:
    return name.lstrip("^").partition(":")[0]
