"""A labelled step, written again for several devices.

What is divided is computed once for each device, and all else once, on the first one. Where all of
what is divided is needed, the parts are joined or added up; where parts of a whole are needed it is
cut. A device without examples borrows the last one, which joins cut off and sums leave out.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kdpkit.training.tensorflow._keras_internals import add_function
from kdpkit.training.tensorflow.partition import _rules
from kdpkit.training.tensorflow.partition._exchanges import Exchanges
from kdpkit.training.tensorflow.partition._inference import LENGTH
from kdpkit.training.tensorflow.partition._labels import (
    PARTIAL,
    SAME,
    ShapeOf,
    Split,
    is_divided,
    is_list,
    is_size,
)
from kdpkit.training.tensorflow.partition._nodes import CPU, Nodes

# They only move or cast entries: what they make of a variable each device makes of its own copy.
_MOVES = _rules.kinds(
    "Const ReadVariableOp Identity Cast Reshape Transpose ExpandDims Squeeze Pack Shape "
    "VariableShape Fill ZerosLike OnesLike Range"
)
_SIZES = ("Shape", "ShapeN", "Size", "Rank")
_FUNCTIONS = ("body", "cond", "then_branch", "else_branch", "f")
# Numbers of a step, as names of inputs: `TOTAL` is of all examples, `OF_PROCESS` the most that one
# process has, the others are of a device.
TOTAL, OF_PROCESS = "total:0", "of_process:0"
STARTS, COUNTS, UNBORROWED, SHARES, HAS_EXAMPLES = (
    f"{name}_{{}}:0" for name in ("start", "count", "unborrowed", "share", "has_examples")
)


class Writer:
    """Writes the nodes of the new graph, in the order of the traced ones.

    Args:
        step: The traced step.
        inferred: Its tensors' lengths.
        graph: Its labels.
        bodies: What is known of its loops and conditions; None if they are whole.
        mesh: The devices that share the examples.
        copies: The handles of every device's copy of a variable, by the first one's.
    """

    def __init__(
        self,
        step: Any,
        inferred: Any,
        graph: Any,
        bodies: Any,
        mesh: Any,
        copies: dict[str, Sequence[str]],
    ) -> None:
        self.step, self.graph, self.devices, self.copies = step, graph, mesh.devices, copies
        self.home, self._is_first_process = mesh.home, mesh.local[0] == 0
        self.nodes = Nodes(step.graph_def.versions)
        self._exchanges = Exchanges(mesh, self.nodes) if mesh.num_processes > 1 else None
        self._inferred, self._loops = inferred, bodies.inputs if bodies else {}
        self._traced = {node.name: node for node in step.graph_def.node}
        self._functions = {f.signature.name: f for f in step.graph_def.library.function}
        self.nodes.graph_def.library.function.extend(self._functions.values())
        self._wholes = {name: name for name in step.inputs}  # new names by the traced ones
        self._parts: dict[str, list[str]] = {}
        self._copied: dict[tuple[str, int], str] = {}
        self._written: dict[str, list[str]] = {}  # the new nodes of each traced one
        self.of_devices: dict[str, int] = {}  # the devices of nodes that compute parts

    def write(self) -> None:
        operations = self.graph.first.get_operations()
        tensors = {x.name: x for op in operations for x in op.outputs}
        for name in self._inferred.batch:
            self._parts[name] = self._cut(tensors[name], 0)
        reads = self._reads_of_devices(operations)
        for op in operations:
            if op.type != "Placeholder":
                self._write(op)
            if op.name in reads:  # now, before what follows assigns the variable
                for i in range(len(self.devices)):
                    self._copy_of(op.outputs[0], i)

    def output(self, name: str) -> str:
        """Return the new name of what the step returns."""
        return self._whole(self.graph.first.get_tensor_by_name(name))

    def _reads_of_devices(self, operations: Sequence[tf.Operation]) -> set[str]:
        """Return the reads of variables that devices repeat, each of its own copy."""
        reads: set[str] = set()

        def visit(x: tf.Tensor) -> None:
            if x.op.type == "ReadVariableOp":
                reads.add(x.op.name)
            for y in x.op.inputs:
                visit(y)

        for op in operations:
            if any(is_divided(self.graph.of(x)) for x in op.outputs):
                for x in filter(self._moves_a_copy, op.inputs):
                    visit(x)
        return reads

    def _write(self, op: tf.Operation) -> None:
        labels = [self.graph.of(x) for x in op.outputs]
        if op.type in _SIZES and any(isinstance(self.graph.of(x), Split) for x in op.inputs):
            self._write_sizes(op)
        elif any(map(is_divided, labels)) or op.name in self._loops or self._has_lists(op):
            self._write_divided(op, labels)
        else:
            place = self._place(op)
            name = self._clone(op, op.name, [self._whole(x) for x in op.inputs], place)
            if place == self.home:
                self.of_devices[name] = 0
            self._wholes.update((x.name, f"{name}:{x.value_index}") for x in op.outputs)

    def _has_lists(self, op: tf.Operation) -> bool:
        """Return whether an operation reads a list of a device's own."""
        return any(is_list(self.graph.of(x)) for x in op.inputs)

    def _place(self, op: tf.Operation) -> str:
        """Return where what is not divided is computed: where the user, or its variable, is."""
        has_resource = any(x.dtype == tf.resource for x in op.inputs)
        return str(self._traced[op.name].device) or ("" if has_resource else self.home)

    def _write_divided(self, op: tf.Operation, labels: Sequence[Any]) -> None:
        of_devices = []
        for i, device in enumerate(self.devices):
            inputs = [self._argument(op, index, labels, i) for index in range(len(op.inputs))]
            name = self._of_device(op.name, i)
            if op.type in _rules.DRAWING:
                name = self._draw(op, name, inputs, i)
            else:
                name = self._clone(op, name, inputs, device)
            self.of_devices[name] = i
            outputs = [f"{name}:{j}" for j in range(len(op.outputs))]
            if op.type == "Mean" and labels[0] is PARTIAL:
                outputs = [self._scaled(outputs[0], op.outputs[0], SHARES, i)]
            of_devices.append(outputs)
        for x, label, parts in zip(op.outputs, labels, zip(*of_devices, strict=True), strict=True):
            self._parts[x.name] = [*parts]
            if label is SAME:
                self._wholes[x.name] = parts[0]
                self._copied.update(((x.name, i), part) for i, part in enumerate(parts))

    def _argument(self, op: tf.Operation, index: int, labels: Sequence[Any], i: int) -> str:
        """Return what an operation gets on a device for one of its inputs."""
        x = op.inputs[index]
        label, is_linear = self.graph.of(x), PARTIAL in labels and op.type in _rules.LINEAR
        if op.name in self._loops:
            wanted = self._loops[op.name][index]
            if isinstance(wanted, ShapeOf):
                return self._shape_of_part(x, wanted.axis, i)
            if wanted is PARTIAL and label is not PARTIAL:  # zeros, to which terms are added
                return self._copy_of(x, i)
            is_linear = wanted is PARTIAL
        if is_list(label) or (is_linear and label is PARTIAL):
            return self._parts[x.name][i]
        if index in _rules.SHAPES.get(op.type, ()):
            axis = _rules.axis_of_shape(op.type, self.graph.of(op.inputs[0]), labels)
            if axis is None or x.shape.rank == 0:  # -1 is any shape
                return self._copy_of(x, i)
            return self._shape_of_part(x, axis, i)
        if isinstance(label, Split) or x.name in self.graph.axes:
            return self._part(x, i)
        return self._copy_of(x, i)

    # Parts of a whole, and wholes of parts.

    def _part(self, x: tf.Tensor, i: int) -> str:
        if x.name not in self._parts:
            self._parts[x.name] = self._cut(x, self.graph.axes[x.name])
        return self._parts[x.name][i]

    def _cut(self, x: tf.Tensor, axis: int) -> list[str]:
        whole, rank, parts = self._whole(x), x.shape.rank, []
        per_example = self._per_example(whole, x, axis, TOTAL)
        for i, device in enumerate(self.devices):
            start, count = (self.nodes.product(n.format(i), per_example) for n in (STARTS, COUNTS))
            begin = self.nodes.vector(rank, axis, start, 0)
            size = self.nodes.vector(rank, axis, count, -1)
            name = self._of_device(f"{x.op.name}/{x.value_index}", i)
            part = self._sliced(f"{name}/part", whole, x, begin, size, self.home)
            if device != self.home:
                part = self.nodes.add(f"{name}/sent", "Identity", [part], device, T=x.dtype)
            parts.append(part)
        return parts

    def _sliced(
        self, name: str, tensor: str, x: tf.Tensor, begin: str, size: str, device: str
    ) -> str:
        attributes = {"T": x.dtype, "Index": tf.int32}
        return self.nodes.add(name, "Slice", [tensor, begin, size], device, **attributes)

    def _whole(self, x: tf.Tensor) -> str:
        """Return all of a tensor on the first device."""
        if x.name not in self._wholes:
            label = self.graph.of(x)
            whole = self._sum(x) if label is PARTIAL else self._joined(x, label.axis)
            self._wholes[x.name] = whole
        return self._wholes[x.name]

    def _sum(self, x: tf.Tensor) -> str:
        terms = [
            self._scaled(part, x, HAS_EXAMPLES, i) if self._may_borrow(i) else part
            for i, part in enumerate(self._parts[x.name])
        ]
        name, attributes = f"{x.op.name}/{x.value_index}/sum", {"T": x.dtype, "N": len(terms)}
        whole = self.nodes.add(name, "AddN", terms, self.home, **attributes)
        return self._exchanges.summed(whole, x) if self._exchanges else whole

    def _joined(self, x: tf.Tensor, axis: int) -> str:
        whole, *others = parts = [
            self._unborrowed(part, x, axis, i) if self._may_borrow(i) else part
            for i, part in enumerate(self._parts[x.name])
        ]
        if others:
            name, inputs = f"{x.op.name}/{x.value_index}/all", [*parts, self.nodes.constant(axis)]
            attributes = {"T": x.dtype, "Tidx": tf.int32, "N": len(parts)}
            whole = self.nodes.add(name, "ConcatV2", inputs, self.home, **attributes)
        if not self._exchanges:
            return whole
        per_example = self._per_example(self._parts[x.name][0], x, axis, COUNTS.format(0))
        lengths = [self.nodes.product(n, per_example) for n in (OF_PROCESS, TOTAL)]
        return self._exchanges.gathered(whole, x, axis, lengths)

    def _may_borrow(self, i: int) -> bool:
        """Return whether a device may have no example of its own: only the first always has."""
        return bool(i) or not self._is_first_process

    def _unborrowed(self, part: str, x: tf.Tensor, axis: int, i: int) -> str:
        """Cut a borrowed example off."""
        per_example = self._per_example(part, x, axis, COUNTS.format(i))
        length = self.nodes.product(UNBORROWED.format(i), per_example)
        begin = self.nodes.vector(x.shape.rank, axis, self.nodes.constant(0), 0)
        size = self.nodes.vector(x.shape.rank, axis, length, -1)
        name = self._of_device(f"{x.op.name}/{x.value_index}", i)
        return self._sliced(f"{name}/unborrowed", part, x, begin, size, self.devices[i])

    def _scaled(self, part: str, x: tf.Tensor, number: str, i: int) -> str:
        """Return a device's term of a sum, times one of its numbers.

        `SHARES`, its part of all examples, makes a mean a term; `HAS_EXAMPLES`, one or zero, leaves
        out what was computed of a borrowed example.
        """
        device, dtype = self.devices[i], x.dtype
        factor = self.nodes.cast(number.format(i), tf.float64, dtype, device)
        # Of a borrowed example the term may be no number.
        kind = "MulNoNan" if dtype.is_floating or dtype.is_complex else "Mul"
        name = self._of_device(f"{x.op.name}/{x.value_index}", i)
        name = f"{name}/{number.partition('_{')[0]}"
        return self.nodes.add(name, kind, [part, factor], device, T=dtype)

    # What is the same on all devices.

    def _copy_of(self, x: tf.Tensor, i: int) -> str:
        if (x.name, i) not in self._copied:
            self._copied[x.name, i] = self._copied_to(x, i)
        return self._copied[x.name, i]

    def _copied_to(self, x: tf.Tensor, i: int) -> str:
        device = self.devices[i]
        if x.dtype == tf.resource:
            return self.copies[x.name][i] if x.name in self.copies else self._whole(x)
        if device == self.home:
            return self._whole(x)
        if self._moves_a_copy(x):
            inputs = [self._copy_of(y, i) for y in x.op.inputs]
            name = self._clone(x.op, self._of_device(x.op.name, i), inputs, device)
            return f"{name}:{x.value_index}"
        name = self._of_device(f"{x.op.name}/{x.value_index}", i)
        return self.nodes.add(f"{name}/copy", "Identity", [self._whole(x)], device, T=x.dtype)

    def _moves_a_copy(self, x: tf.Tensor) -> bool:
        """Return whether a device makes it of its own copies of variables, or of constants."""
        label, op = self.graph.of(x), x.op
        if op.type not in _MOVES or is_size(label) or label is not SAME:
            return False
        if op.type == "ReadVariableOp":
            return op.inputs[0].name in self.copies
        return all(map(self._moves_a_copy, op.inputs))

    # Lengths.

    def _write_sizes(self, op: tf.Operation) -> None:
        """Count all examples, without joining what has them."""
        for x, y in zip(op.inputs, op.outputs, strict=True):
            label = self.graph.of(x)
            if isinstance(label, Split):
                shape = self._shape_of_all(x, label.axis)
            else:
                shape = self.nodes.shape(self._whole(x), x.dtype)
            if op.type == "Rank":
                shape = self.nodes.constant(x.shape.rank)
            if op.type == "Size":
                count = self.nodes.num_entries(shape)
                shape = self.nodes.cast(count, tf.int64, tf.int32)
            self._wholes[y.name] = self.nodes.cast(shape, tf.int32, y.dtype)

    def _shape_of_all(self, x: tf.Tensor, axis: int) -> str:
        if x.shape.is_fully_defined() and not self._inferred.is_assumed:
            sizes = [self.nodes.constant(size) for size in x.shape]
            per_example = self._per_example("", x, axis, TOTAL)
            sizes[axis] = self.nodes.product(TOTAL, per_example)
            return self.nodes.packed(sizes)
        shape = self.nodes.shape(self._part(x, 0), x.dtype)
        return self.nodes.with_entry(shape, axis, TOTAL, COUNTS.format(0))

    def _shape_of_part(self, x: tf.Tensor, axis: int, i: int) -> str:
        """Return for a device's part what is a shape of all examples."""
        shape = self.nodes.cast(self._whole(x), x.dtype, tf.int32)
        shape = self.nodes.with_entry(shape, axis, COUNTS.format(i), TOTAL)
        return self.nodes.cast(shape, tf.int32, x.dtype)

    def _per_example(self, tensor: str, x: tf.Tensor, axis: int, num_examples: str) -> str:
        """Return how many entries each example has along an axis."""
        length = None if x.shape.rank is None else x.shape[axis]
        if length is not None and not self._inferred.is_assumed:
            return self.nodes.constant(length // LENGTH)
        entries = self.nodes.entry(self.nodes.shape(tensor, x.dtype), axis)
        return self.nodes.quotient(entries, num_examples)

    def _draw(self, op: tf.Operation, name: str, inputs: Sequence[str], i: int) -> str:
        """Draw a device's numbers bit by bit as one device draws them, by their position.

        Philox (Salmon et al. 2011) makes four numbers of each value of a counter, two of float64.
        """
        nodes, device, dtype = self.nodes, self.devices[i], op.outputs[0].dtype
        shape, key, counter, algorithm = inputs
        int64 = nodes.of_int64
        block = nodes.constant(2 if dtype == tf.float64 else 4, np.int64)
        count = nodes.num_entries(nodes.cast(shape, op.inputs[0].dtype, tf.int32))
        whole_shape = nodes.cast(self._whole(op.inputs[0]), op.inputs[0].dtype, tf.int32)
        total, start = (nodes.cast(n, tf.int32, tf.int64) for n in (TOTAL, STARTS.format(i)))
        total = int64("Maximum", total, nodes.constant(1, np.int64))
        first = int64("Mul", int64("FloorDiv", nodes.num_entries(whole_shape), total), start)
        blocks = nodes.packed(
            [int64("FloorDiv", first, block), nodes.constant(0, np.int64)], tf.int64
        )
        moved = nodes.once("AddV2", [counter, nodes.cast(blocks, tf.int64, tf.uint64)], T=tf.uint64)
        # Up to a block more, of which the first ones belong to the example before.
        more = int64("AddV2", count, int64("Sub", block, nodes.constant(1, np.int64)))
        drawn_shape, length = (nodes.packed([n], tf.int64) for n in (more, count))
        drawn = nodes.add(
            f"{name}/drawn",
            op.type,
            [drawn_shape, key, moved, algorithm],
            device,
            dtype=dtype,
            Tshape=tf.int64,
        )
        begin = nodes.packed([int64("FloorMod", first, block)], tf.int64)
        attributes = {"T": dtype, "Index": tf.int64}
        mine = nodes.add(f"{name}/mine", "Slice", [drawn, begin, length], device, **attributes)
        attributes = {"T": dtype, "Tshape": op.inputs[0].dtype}
        nodes.add(name, "Reshape", [mine, shape], device, **attributes)
        return name

    # Nodes.

    @staticmethod
    def _of_device(name: str, i: int) -> str:
        return f"{name}/device_{i}" if i else name

    def _clone(self, op: tf.Operation, name: str, inputs: Sequence[str], device: str) -> str:
        """Write a traced node once more, with other inputs, on a device."""
        traced = self._traced[op.name]
        node = self.nodes.graph_def.node.add()
        node.CopyFrom(traced)
        node.name, node.device = name, device
        node.attr.pop("_output_shapes", None)
        self._pin_functions(node, device)
        del node.input[:]
        node.input.extend(inputs)
        for control in (x for x in traced.input if x.startswith("^")):
            node.input.extend(f"^{new}" for new in self._written.get(control[1:], ()))
        self._written.setdefault(op.name, []).append(name)
        return name

    def _pin_functions(self, node: Any, device: str) -> None:
        """Let functions that a node calls compute on its device: copies of them, placed there."""
        for attribute in _FUNCTIONS:
            name = node.attr[attribute].func.name if attribute in node.attr else ""
            if not device or name not in self._functions:
                continue
            if self._functions[name].attr["_XlaMustCompile"].b:  # for the device of the call
                continue
            new_name = f"{name}_on_{device.strip('/').replace(':', '_').replace('/', '_')}"
            node.attr[attribute].func.name = new_name
            if new_name in self._functions:
                continue
            function = self.nodes.graph_def.library.function.add()
            function.CopyFrom(self._functions[name])
            function.signature.name = new_name
            self._functions[new_name] = function
            for inner in function.node_def:
                inner.device = inner.device or device
                self._pin_functions(inner, device)
            add_function(function)


def numbers_of_examples(examples: Any) -> dict[str, Any]:
    """Return the numbers that the nodes of a divided step use, by their names."""
    numbers = {TOTAL: tf.identity(examples.total)}
    with tf.device(CPU):
        numbers[OF_PROCESS] = len(examples.starts) * examples.size
        for i, unborrowed in enumerate(examples.unborrowed):
            share = tf.cast(unborrowed, tf.float64) / tf.cast(examples.total, tf.float64)
            numbers |= {
                STARTS.format(i): examples.starts[i],
                COUNTS.format(i): examples.counts[i],
                UNBORROWED.format(i): unborrowed,
                SHARES.format(i): share,
                HAS_EXAMPLES.format(i): tf.cast(unborrowed > 0, tf.float64),
            }
    return numbers
