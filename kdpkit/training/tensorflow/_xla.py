"""XLA on several devices compiles the call of a divided layer on each device.

With `compile(jit_compile=True)` XLA cannot compile a step on several devices as one
(keras-team/keras#20763). Here it compiles the calls of divided layers, and with them their backward
passes; of a model of libraries' layers that is the call of the model. Losses, optimizer and metrics
stay TensorFlow's. `TrainingLoop(jit="measure")` finds out, while it trains, which way is faster.
"""

import statistics
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kdpkit.training.tensorflow._keras_internals import ATTACHED_TENSORS
from kdpkit.training.tensorflow._variable_copies import PartScope

_CALLS = 5  # timed for each choice, after the one that compiles
_SECONDS = 0.2  # that the timed calls of a choice take at least


def may_compile(layer: Any) -> bool:
    """Return whether XLA can compile a layer, and its gradient: not the loop of a recurrent one."""
    return all(
        part.unroll for part in layer._flatten_layers() if isinstance(part, keras.layers.RNN)
    )


def compiled(original: Callable, scope: PartScope) -> Callable:
    """Return a call of a layer that XLA compiles; what it assigns and adds is the scope's.

    Masks and logits, which are attributes of tensors, are passed in and out beside the tensors.
    """

    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        for variable in layer.variables:  # Here tapes see that they are read.
            scope.get_current_value(variable)
        leaves = tf.nest.flatten((args, kwargs))
        structure: Any = None  # of the outputs
        assigned: list[keras.Variable] = []

        def run(tensors: list[Any], masks: list[Any]) -> Any:
            nonlocal structure
            _attach(tensors, [masks])
            copies = iter(tensors)
            arguments = [next(copies) if tf.is_tensor(leaf) else leaf for leaf in leaves]
            inner_args, inner_kwargs = tf.nest.pack_sequence_as((args, kwargs), arguments)
            structure = original(layer, *inner_args, **inner_kwargs)
            outputs = tf.nest.flatten(structure)
            assigned[:] = scope.assigned.values()
            values = [scope.get_current_value(variable) for variable in assigned]
            return outputs, _attached(outputs), values, scope.losses

        function = tf.function(run, jit_compile=True, autograph=False)
        tensors = [leaf for leaf in leaves if tf.is_tensor(leaf)]
        masks, _ = _attached(tensors)
        outputs, attached, values, scope.losses = function(tensors, masks)
        for variable, value in zip(assigned, values, strict=True):
            scope.add_update((variable, value))
        _attach(outputs, attached)
        return tf.nest.pack_sequence_as(structure, outputs)

    return call


def _attached(tensors: list[Any]) -> list[list[Any]]:
    return [[get(tensor) for tensor in tensors] for get, _ in ATTACHED_TENSORS]


def _attach(tensors: list[Any], attached: list[list[Any]]) -> None:
    for (_, attach), values in zip(ATTACHED_TENSORS, attached, strict=False):
        for tensor, value in zip(tensors, values, strict=True):
            if value is not None:
                attach(tensor, value)


class XlaTrial:
    """Decides for each call of the training function whether XLA compiles it, until one way wins.

    Calls without and with XLA take turns, so that a busy machine slows both alike; the first call
    of each compiles and is not counted. Every call trains, and none is made for the measurement.

    >>> trial = XlaTrial()
    >>> while not trial.verdict:
    ...     trial.record(steps=4, seconds=0.2 if trial.jit else 0.4)
    >>> trial.jit, trial.verdict
    (True, 'XLA: on, a step takes 50 ms with it and 100 ms without.')
    """

    def __init__(self) -> None:
        self.jit, self.verdict = False, ""
        # Steps and seconds of each call; the first one compiles.
        self._calls: dict[bool, list[tuple[int, float]]] = {False: [], True: []}

    @property
    def is_new(self) -> bool:
        return not self._calls[False]

    def record(self, *, steps: int, seconds: float) -> None:
        """Note how long a call took that ran as `jit` says, and choose how the next one runs."""
        if not steps:
            return
        self._calls[self.jit].append((steps, seconds))
        self.jit = not self.jit
        timed = [choice[1:] for choice in self._calls.values()]
        if all(len(calls) >= _CALLS and sum(s for _, s in calls) >= _SECONDS for calls in timed):
            plain, compiled = (
                statistics.median(s / count for count, s in calls) for calls in timed
            )
            self.jit = compiled < plain
            self.verdict = (
                f"XLA: {'on' if self.jit else 'off'}, a step takes {_milliseconds(compiled)} with "
                f"it and {_milliseconds(plain)} without."
            )


def _milliseconds(seconds: float) -> str:
    return f"{float(f'{seconds * 1000:.3g}'):g} ms"
