"""Every tensor of a step: as one device computes it, and as devices do that share the examples."""

import functools

import numpy as np
import tensorflow as tf

from kdpkit.training.tensorflow._step import Mesh
from kdpkit.training.tensorflow._tracing import in_place_of_replicas
from kdpkit.training.tensorflow.partition import _dividing, _traced_step, _writing
from kdpkit.training.tensorflow.partition._parts import parts_of

_TYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64, tf.bool)


class DividedStep:
    """A step of one device, written for replicas; `batch` is one of the kind it is called with."""

    is_of_model = False

    def __init__(self, function, batch, replicas):
        self.mesh = Mesh(tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)]))
        self._trace(function, batch)

    @classmethod
    def of_model(cls, model, batch):
        self = cls.__new__(cls)
        self.is_of_model = True
        steps = model._maybe_symbolic_build.__self__
        self.mesh = steps.mesh
        self._trace(steps.steps_of_model["train"], batch)
        return self

    def _trace(self, function, batch):
        with in_place_of_replicas(self.mesh):
            self.traced = _traced_step.traced(function, batch)
        self.values, self.copies = _dividing._with_copies(self.traced, self.mesh.replicated)
        self.writer, (self.first, *_) = _dividing.written(self.traced, self.mesh, self.copies)
        graph = self.writer.graph
        # What undoes a broadcast depends on whether there is one example: the sum is compared as it
        # is reshaped.
        left_out = {"Placeholder", "BroadcastGradientArgs"}
        self.names = [
            x.name
            for op in graph.first.get_operations()
            for x in op.outputs
            if x.dtype in _TYPES and "Assign" not in op.type and op.type not in left_out
            if x.name not in graph.unbroadcast or op.get_attr("keep_dims")
        ]

    @property
    def whole(self):
        """The kinds of operations that are computed whole, for want of a rule."""
        return {op.type for op in self.writer.graph.whole}

    def returned(self, found):
        return [found[name] for name in self.traced.outputs]

    @functools.cached_property
    def on_one_device(self):
        return self._run(self.traced.graph_def, self.names, lambda values: values)

    @functools.cached_property
    def divided(self):
        """Return a function of a batch that returns the same, as devices compute it."""

        def with_numbers(values):
            total = tf.shape(values[self.first])[0]
            examples = parts_of(total, self.mesh.num_parts, self.mesh.local)
            return values | _writing.numbers_of_examples(examples)

        outputs = [self.writer.output(name) for name in self.names]
        return self._run(self.writer.nodes.graph_def, outputs, with_numbers)

    def _run(self, graph_def, outputs, completed):
        @functools.partial(tf.function, autograph=False, reduce_retracing=True)
        def run(*tensors):
            names = [*self.traced.inputs][: len(tensors)]
            values = completed(self.values | dict(zip(names, tensors, strict=True)))
            return _dividing._imported(graph_def, values, outputs, [*outputs])

        def found(batch):
            tensors = [tf.convert_to_tensor(x) for x in tf.nest.flatten(batch) if x is not None]
            if self.is_of_model:  # Its graph is large, and made once, for batches of any length.
                any_length = [tf.TensorSpec([None, *x.shape[1:]], x.dtype) for x in tensors]
                values = run.get_concrete_function(*any_length)(*tensors)
            else:
                values = run(*tensors)
            return dict(zip(self.names, map(_array, values), strict=True))

        return found


def _array(tensor):
    array = np.asarray(tensor.numpy())  # A scalar of bfloat16 is no array by itself.
    return array.astype("float64") if array.dtype.kind not in "biu" else array


def differing(one, many):
    return [
        name
        for name, x in one.items()
        if x.shape != many[name].shape or not np.allclose(x, many[name], 1e-4, 1e-5, equal_nan=True)
    ]
