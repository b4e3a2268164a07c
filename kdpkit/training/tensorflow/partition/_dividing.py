"""A step of one device, divided among the devices of a mesh."""

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from kdpkit import errors
from kdpkit._internal import checks
from kdpkit.training.tensorflow._global_batches import OTHER_LENGTHS
from kdpkit.training.tensorflow._keras_internals import FuncGraph, import_graph_def, next_turn
from kdpkit.training.tensorflow.partition import _inference, _report, _rules, _stages, _traced_step
from kdpkit.training.tensorflow.partition._bodies import Bodies
from kdpkit.training.tensorflow.partition._exchanges import TURN
from kdpkit.training.tensorflow.partition._labelling import LabelledGraph
from kdpkit.training.tensorflow.partition._labels import SAME, WHOLE, Split
from kdpkit.training.tensorflow.partition._parts import parts_of
from kdpkit.training.tensorflow.partition._writing import Writer, numbers_of_examples


def run_divided(
    mesh: Any, function: Callable[[Any], Any], batch: Any, variables: dict[int, Any], *, jit: bool
) -> Any:
    """Trace a step on a batch, and compute it in the current graph, shared by a mesh's devices.

    Args:
        mesh: The devices.
        function: The step, which is called with the batch once.
        batch: The global batch.
        variables: Those of which each device has a copy, by the id of the first one's handle. The
            step adds what it reads.
        jit: Whether XLA compiles what devices compute.
    """
    if not _traced_step.has_examples(batch):
        return function(batch)
    try:
        step = _traced_step.traced(function, batch)
    except Exception as error:
        if isinstance(error, errors.InputError) or _traced_step.length_of(batch) is None:
            raise
        outputs = function(batch)
        warnings.warn(_why_whole(error), stacklevel=2)
        return outputs
    try:
        return _computed(mesh, step, variables, jit=jit)
    except _WholeError as whole:
        return _computed_whole(step, lambda: function(batch), whole.__cause__)


class _WholeError(Exception):
    """A step is not divided; the cause is why it cannot be."""


@contextlib.contextmanager
def _garbage_kept() -> Iterator[None]:
    """Do not look for garbage for a while, to which a third of the time of making graphs goes."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_garbage_kept()
def _computed(mesh: Any, step: Any, variables: dict[int, Any], *, jit: bool) -> Any:
    """Add a traced step to the current graph, divided, and return what it returns."""
    values, copies = _with_copies(step, variables)
    _require_all_copies(step, values, copies)
    graph_def, outputs = step.graph_def, step.outputs
    devices = dict.fromkeys((node.name for node in graph_def.node), 0)
    _keep(step)
    if step.makes_variables:
        raise _WholeError
    if mesh.num_parts > 1:
        try:
            writer, names = written(step, mesh, copies)
        except ValueError as error:  # TensorFlow's, of shapes
            raise _WholeError from error
        total = _length_of_all(values, names)
        values |= numbers_of_examples(parts_of(total, mesh.num_parts, mesh.local))
        if mesh.num_processes > 1:
            values[TURN] = next_turn(mesh, "step")
        _report.report(step, writer.graph)
        outputs = [name and writer.output(name) for name in outputs]
        graph_def, devices = writer.nodes.graph_def, writer.of_devices
    if jit:
        graph_def, outputs = _stages.compiled(graph_def, devices, values, outputs)
    return _imported(graph_def, values, outputs, step.structure)


def _computed_whole(step: Any, trace: Callable[[], Any], reason: BaseException | None) -> Any:
    """Compute a step on one device, or trace it again where it does not work for its batch."""
    values = {name: outer for name, (outer, _) in step.inputs.items()}
    try:
        outputs = _imported(step.graph_def, values, step.outputs, step.structure)
    except ValueError:
        return trace()  # This raises where the user's line is.
    if reason:
        warnings.warn(_why_whole(reason), stacklevel=2)
    return outputs


def _why_whole(error: BaseException) -> str:
    return (
        "One device computes the step for all examples, because it does not work for batches of "
        f"any length: {checks.reason_of(error)} Of any batch `tf.shape(x)[0]` is the length."
    )


def sentence_of_whole(function: Callable[[Any], Any], batch: Any, variables: dict[int, Any]) -> str:
    """Return what of a step one device would compute for all; none if that is hardly any work."""
    step = _traced_step.traced(function, batch)
    try:
        _, graph, _ = labelled(step, _with_copies(step, variables)[1])
    except ValueError as error:
        return _why_whole(error)
    return _report.sentence_of(_report.shares_of_whole(step, graph))


def labelled(step: Any, copies: Any) -> tuple[Any, LabelledGraph, Bodies | None]:
    """Return the lengths of a step's tensors, their labels, and what is known of its loops."""
    inferred = _inference.inferred(step)
    given: dict[str, Any] = {
        name: SAME if inner.shape.is_fully_defined() else WHOLE
        for name, (_, inner) in step.inputs.items()
    }
    given |= {name: Split(0) for name in inferred.batch}
    bodies = Bodies(step, inferred.longer)
    graph = LabelledGraph(inferred, given, bodies, copies)
    if bodies.failed:  # If one loop of a chain cannot be divided, none is.
        return inferred, LabelledGraph(inferred, given, None, copies), None
    return inferred, graph, bodies


def written(step: Any, mesh: Any, copies: Any) -> tuple[Writer, Sequence[str]]:
    """Return what has written a step for several devices, and the tensors that are divided."""
    inferred, graph, bodies = labelled(step, copies)
    writer = Writer(step, inferred, graph, bodies, mesh, copies)
    writer.write()
    return writer, inferred.batch


def _length_of_all(values: dict[str, Any], names: Sequence[str]) -> tf.Tensor:
    """Return the number of examples, after a check that all tensors of a batch have as many."""
    tensors = [values[name] for name in names]
    lengths = {x.shape[0] for x in tensors}
    first, *others = (tf.shape(x)[0] for x in tensors)
    if len(lengths) == 1 and None not in lengths:
        return first
    with tf.device("CPU:0"):
        assertions = [
            tf.debugging.Assert(first == other, [OTHER_LENGTHS, first, other]) for other in others
        ]
    with tf.control_dependencies(assertions):
        return tf.identity(first)


def _with_copies(step: Any, variables: dict[int, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the step's inputs by their names, with every device's copies of variables."""
    values, copies = {name: outer for name, (outer, _) in step.inputs.items()}, {}
    for name, outer in [*values.items()]:
        if (variable := variables.get(id(outer))) is not None:
            others = [
                f"{name.removesuffix(':0')}/copy_{i}:0" for i in range(1, len(variable.values))
            ]
            copies[name] = [name, *others]
            for other, copy in zip(others, variable.values[1:], strict=True):
                values[other] = copy.handle
    return values, copies


def _require_all_copies(step: Any, values: dict[str, Any], copies: dict[str, Any]) -> None:
    """Raise where an operation of the user's changes one device's copy of a variable alone."""
    changed = {
        id(values[name]): node
        for node in step.graph_def.node
        for name in _changed_by(node)
        if name in values
    }
    for first, *others in copies.values():
        node = changed.get(id(values[first]))
        if node is not None and any(id(values[other]) not in changed for other in others):
            checks.fail(
                "An operation changes a variable on one device, and others have copies of it.",
                operation=f"{node.op} ({node.name})",
                remedy="Use the variable's methods, `assign`, `assign_add` and `assign_sub`.",
            )


def _changed_by(node: Any) -> Sequence[str]:
    """Return which variables a node changes, by itself or in a loop or condition."""
    if node.op in _rules.WITH_BODIES:
        only_read = node.attr["_read_only_resource_inputs"].list.i
        return [name for i, name in enumerate(node.input) if i not in only_read]
    is_change = node.op.startswith(("Assign", "Resource")) and node.op not in _rules.READS
    return node.input[:1] if is_change else ()


def _keep(step: Any) -> None:
    """Keep what was traced, with the functions that it calls, as long as the graphs around."""
    graph = tf.compat.v1.get_default_graph()
    while isinstance(graph, FuncGraph):
        graph._kdpkit_steps = [*getattr(graph, "_kdpkit_steps", ()), step.graph]
        graph = graph.outer_graph


def _imported(
    graph_def: Any, values: dict[str, Any], outputs: Sequence[str | None], structure: Any
) -> Any:
    """Add nodes to the current graph, and return what the step returns."""
    read = {name for node in graph_def.node for name in node.input}
    graph = tf.compat.v1.get_default_graph()
    values = {name: graph.capture(x) for name, x in values.items() if name in read | {*outputs}}
    computed = [name for name in outputs if name and name not in values]
    needed = {name: x for name, x in values.items() if name in read}
    found = import_graph_def(graph_def, input_map=needed, return_elements=computed, name="divided")
    tensors = values | dict(zip(computed, found, strict=True))
    leaves = tf.nest.flatten(structure, expand_composites=True)
    results = []
    for leaf, name in zip(leaves, outputs, strict=True):
        results.append(leaf if name is None else tensors[name])
        if isinstance(leaf, tf.Tensor) and leaf.shape.rank is not None:
            results[-1].set_shape(leaf.shape)
    return tf.nest.pack_sequence_as(structure, results, expand_composites=True)
