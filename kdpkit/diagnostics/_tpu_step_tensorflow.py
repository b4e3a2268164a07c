"""The training step on TensorFlow: its graph, and what XLA makes of it."""

import re
import site
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from kdpkit import _checks
from kdpkit._findings import Finding
from kdpkit.diagnostics._tpu_step import build, is_loop, model_of, reason_of, where_of

# Operations whose result has as many entries as the values say. XLA on a CPU compiles some of them.
_DYNAMIC_OPS = {
    "Where": "tf.where(condition) or tf.boolean_mask",
    "Unique": "tf.unique",
    "UniqueV2": "tf.unique",
    "UniqueWithCounts": "tf.unique_with_counts",
    "UniqueWithCountsV2": "tf.unique_with_counts",
    "ListDiff": "tf.sets.difference",
    "DynamicPartition": "tf.dynamic_partition",
    "RaggedRange": "tf.ragged.range",
    "NonMaxSuppression": "tf.image.non_max_suppression",
    "NonMaxSuppressionV2": "tf.image.non_max_suppression",
    "NonMaxSuppressionV3": "tf.image.non_max_suppression",
}
_LIBRARIES = ("keras", "keras_hub", "tensorflow", "kdpkit")
_SMALL = 8  # entries
_PYTHON_OPS = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
_CALLED = {"StringFormat": " (of `tf.print`)", "PrintV2": " (`tf.print`)"}
_UNSUPPORTED = re.compile(r"(\w+) \(No registered .*?\{\{node ([^}]+)\}\}")


def findings(trainer: Any, dataset: Any, first: Any) -> Iterator[Finding]:
    """Check the graph of the step, then compile it for this CPU."""
    step = tf.function(_step_of(trainer, dataset, first), jit_compile=True, autograph=False)
    batch = keras.tree.map_structure(
        lambda part: part if part is None else tf.convert_to_tensor(part), first
    )
    model = model_of(trainer)
    yield from _in_graph(step.get_concrete_function(batch).graph, model)
    yield from _wide_variables(model)
    yield from _compiled(lambda: step.experimental_get_compiler_ir(batch)(stage="hlo"), model)


def _step_of(trainer: Any, dataset: Any, first: Any) -> Callable[[Any], Any]:
    strategy = getattr(trainer, "strategy", None) or trainer.distribute_strategy
    if strategy.num_replicas_in_sync > 1:
        _checks.refuse(
            "The step of one core is compiled, and the model lives on several replicas.",
            strategy=type(strategy).__name__,
            replicas=strategy.num_replicas_in_sync,
            remedy="Build it outside of the strategy, with the global batch that the TPU is to "
            "get: `--strategy one` and a larger `--per-replica-batch-size` in recipes.",
        )
    if is_loop(trainer):
        return _step_of_loop(trainer, dataset)
    build(trainer, first)

    def train(batch: Any) -> Any:
        return strategy.run(trainer.train_step, args=(batch,))

    return train


def _step_of_loop(loop: Any, dataset: Any) -> Callable[[Any], Any]:
    steps = loop._steps
    feed = steps.open(dataset, "dataset", steps=1)  # which may be endless
    steps.build(feed, training=True)

    def train(batch: Any) -> Any:
        steps._train_step(batch, jit=False)  # all of it is compiled here
        return loop.optimizer.iterations.value

    return train


def _in_graph(graph: Any, model: Any) -> Iterator[Finding]:
    for name, operation, dtypes in _operations(graph):
        if operation in _DYNAMIC_OPS:
            yield Finding(
                "dynamic-shape",
                "refused",
                where_of(model, name),
                f"{_DYNAMIC_OPS[operation]} gives as many entries as its input's values say. XLA "
                "on this CPU may compile that; a TPU refuses it, or compiles again and again.",
                "Keep the shape: `tf.where(condition, x, 0)`, a mask that is multiplied, or a "
                "weight for each entry.",
            )
        elif operation in _PYTHON_OPS:
            yield _python_op(model, name)
        elif dtypes:
            kind = "float64" if tf.float64 in dtypes else "int64"
            yield Finding(
                "64-bit",
                "slow",
                where_of(model, name),
                f"It computes in {kind}. A TPU has 32-bit units, and takes several of their "
                "operations for each.",
                f"Cast to {kind.replace('64', '32')} where it begins.",
            )


def _python_op(model: Any, name: str) -> Finding:
    return Finding(
        "python-op",
        "refused",
        where_of(model, name),
        "The step calls Python (`py_function` or `numpy_function`), which no TPU can run.",
        "Write it in `keras.ops` or TensorFlow operations, or do it in the input pipeline.",
    )


def _operations(graph: Any) -> Iterator[tuple[str, str, set[Any]]]:
    """Give name, type and wide results of all operations, also of those inside functions."""
    for operation in graph.get_operations():
        yield operation.name, operation.type, _wide_results(operation)
    for function in graph.as_graph_def().library.function:
        for node in function.node_def:
            yield node.name, node.op, set()


def _wide_results(operation: Any) -> set[Any]:
    """Give which types of 64 bits an operation computes, that its user can change."""
    if operation.type in ("Const", "Shape", "Placeholder"):
        return set()
    large = [output for output in operation.outputs if not _is_small(output.shape)]
    wide = {output.dtype for output in large} & {tf.int64, tf.float64}
    # Keras has int64 of its own: sparse labels, argmax, indices.
    return wide - {tf.int64} if tf.int64 in wide and _is_of_library(operation) else wide


def _is_of_library(operation: Any) -> bool:
    """Tell whether an installed package called TensorFlow for it, and not the user's code."""
    if operation.name.startswith("gradient_tape"):
        return True
    frames = (frame.filename for frame in reversed(operation.traceback))
    caller = next((file for file in frames if "/tensorflow/python/" not in file), "")
    return any(Path(caller).is_relative_to(directory) for directory in _library_directories())


def _library_directories() -> Iterator[Path]:
    """Give where packages are: Debian and Colab call it `dist-packages`."""
    yield from map(Path, (*site.getsitepackages(), site.getusersitepackages()))
    for name in _LIBRARIES:  # which may be installed anywhere, this one too
        module = sys.modules.get(name)
        if module is not None and module.__file__:
            yield Path(module.__file__).parent


def _is_small(shape: Any) -> bool:
    """Tell whether it is a number, a seed or a shape, or the result of a dynamic operation."""
    return (shape.num_elements() or 0) <= _SMALL


def _wide_variables(model: Any) -> Iterator[Finding]:
    for variable in model.variables:
        if variable.dtype in ("int64", "float64") and not _is_small(tf.TensorShape(variable.shape)):
            yield Finding(
                "64-bit",
                "slow",
                f"variable {variable.path}",
                f"It is {variable.dtype}. A TPU has 32-bit units, and takes several of their "
                "operations for each.",
                "Build the model with `keras.config.set_floatx('float32')`, or give the layer "
                "`dtype='float32'`.",
            )


def _compiled(compile_step: Callable[[], Any], model: Any) -> Iterator[Finding]:
    try:
        compile_step()
    except (ValueError, tf.errors.OpError) as error:
        found = [*dict.fromkeys(_UNSUPPORTED.findall(str(error).replace("\n", " ")))]
        for operation, name in found:
            if operation not in (*_PYTHON_OPS, *_DYNAMIC_OPS):  # said already
                called = _CALLED.get(operation, "")
                problem = f"XLA cannot compile `{operation}`{called}"
                yield _uncompiled(where_of(model, name), problem)
        if not found:
            reason = reason_of(error).replace("Failed getting HLO text: ", "")
            yield _uncompiled("train step", f"XLA cannot compile the step ({reason})")


def _uncompiled(where: str, problem: str) -> Finding:
    return Finding(
        "xla",
        "refused",
        where,
        f"{problem}, and a TPU runs what XLA compiles.",
        "Write it in operations that XLA has (most of `keras.ops`), or do it in the input pipeline "
        "or in a callback.",
    )
