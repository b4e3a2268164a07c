"""XLA on replicas: what it compiles, and whether that is faster.

With `compile(jit_compile=True)` XLA cannot compile the step of all replicas as one
(keras-team/keras#20763), since replicas meet in it: in sums of gradients and metrics. What it
compiles here is the model's `call`, and with it the backward pass; losses, optimizer and metrics
stay TensorFlow's. `TrainingLoop(jit="measure")` finds out, while it trains, which way is faster.
"""

import statistics
import warnings
from typing import Any

import keras
import tensorflow as tf

from kdpkit._internal import checks
from kdpkit.training._keras_internals import get_keras_mask, set_keras_mask
from kdpkit.training.tensorflow._keras_internals import get_logits, set_logits
from kdpkit.training.tensorflow._step import current_step

_CALLS = 5  # timed for each choice, after the one that compiles
_SECONDS = 0.2  # that the timed calls of a choice take at least


def compile_call(model: keras.Model, global_batch_norms: list[Any]) -> None:
    """Have XLA compile a model's `call` in the steps of replicas; set on the instance, once."""
    if global_batch_norms:
        checks.fail(
            "XLA compiles each replica's forward pass apart, where a BatchNormalization cannot "
            "meet the other replicas.",
            layer=global_batch_norms[0].name,
            jit_compile=model.jit_compile,
            remedy="Compile the model with `jit_compile=False`, or use `replica_exact(model, "
            'batch_norm="replica")`.',
        )
    if "call" in vars(model):
        return
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.RNN) and not layer.unroll:
            # The gradient of its loop is another program of XLA, to which no list can be passed.
            problem = f"On replicas XLA does not compile the loop of `{layer.name}`, nor the model."
            warnings.warn(f"{problem} With `unroll=True` it does.", stacklevel=2)
            return
    stock_call = model.call

    def call(*args: Any, **kwargs: Any) -> Any:
        if current_step() is None or not model.jit_compile:
            return stock_call(*args, **kwargs)
        return _compiled(model, stock_call, args, kwargs)

    model.call = call


def _compiled(model: keras.Model, call: Any, args: Any, kwargs: Any) -> Any:
    """Call what XLA compiles; masks, logits and added losses are passed beside outputs."""

    def run(*tensors: Any) -> Any:
        following = iter(tensors)
        given = [next(following) if tf.is_tensor(leaf) else leaf for leaf in leaves]
        inner_args, inner_kwargs = tf.nest.pack_sequence_as((args, kwargs), given)
        outputs = call(*inner_args, **inner_kwargs)
        losses = [[*layer._losses] for layer in layers]
        for layer in layers:
            layer._losses.clear()
        masks, logits = (
            keras.tree.map_structure(of, outputs) for of in (get_keras_mask, get_logits)
        )
        return outputs, masks, logits, losses

    layers = list(model._flatten_layers())
    leaves = tf.nest.flatten((args, kwargs))
    compiled = tf.function(run, jit_compile=True, autograph=False)
    outputs, masks, logits, losses = compiled(*(leaf for leaf in leaves if tf.is_tensor(leaf)))
    for set_on, values in ((set_keras_mask, masks), (set_logits, logits)):
        keras.tree.map_structure(
            lambda output, value, set_on=set_on: value is None or set_on(output, value),
            outputs,
            values,
        )
    for layer, added in zip(layers, losses, strict=True):
        layer._losses.extend(added)
    return outputs


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
        timed = [calls[1:] for calls in self._calls.values()]
        if all(len(of) >= _CALLS and sum(s for _, s in of) >= _SECONDS for of in timed):
            plain, compiled = (statistics.median(s / steps for steps, s in of) for of in timed)
            self.jit = compiled < plain
            self.verdict = (
                f"XLA: {'on' if self.jit else 'off'}, a step takes {_milliseconds(compiled)} with "
                f"it and {_milliseconds(plain)} without."
            )


def _milliseconds(seconds: float) -> str:
    return f"{float(f'{seconds * 1000:.3g}'):g} ms"
