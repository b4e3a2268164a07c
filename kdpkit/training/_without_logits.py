"""Training of language models by `fit` without all their logits."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import keras
from keras import ops

from kdpkit._internal import Tensor, checks
from kdpkit.training._keras_internals import get_keras_mask, set_keras_mask
from kdpkit.training._linear_cross_entropy import linear_cross_entropy

Model = TypeVar("Model", bound=keras.Model)
# The weights of a `MaskedLMHead`, in all versions of KerasHub from 0.26 to 0.32.
_HEAD_WEIGHTS = ["beta", "bias", "gamma", "kernel", "output_bias"]
_METRICS = keras.metrics.Accuracy, keras.metrics.SparseCategoricalAccuracy
# `model` is the one whose step this thread traces, and `updates` whether its metrics are updated.
_running = threading.local()


def without_logits(model: Model, *, chunk_size: int = 4096) -> Model:
    """Have `fit` and `evaluate` compute a language model's loss without all its logits.

    Logits are the largest tensor of a language model. After this a step of `fit` or `evaluate`
    computes the loss and the predicted tokens by `linear_cross_entropy`, in chunks of the
    vocabulary. They equal those of all logits, to rounding; under a mixed dtype policy logits are
    products of 16-bit numbers, summed and compared in float32. Compile, train and save the model as
    always: `predict`, and calls of the model, return its logits as before.

    On several devices it is exact with `replica_exact`, in either order.

    Args:
        model: A model whose last layer computes logits as products with a matrix: a `Dense` without
            activation, a `ReversibleEmbedding` with `reverse=True`, as in
            `keras_hub.models.CausalLM`, or KerasHub's `MaskedLMHead`, as in
            `keras_hub.models.MaskedLM`. Its loss is
            `keras.losses.SparseCategoricalCrossentropy(from_logits=True)`, its metrics are
            `keras.metrics.SparseCategoricalAccuracy`, or of a class of your own, which sees the
            predicted tokens in place of logits.
        chunk_size: Tokens of the vocabulary whose logits are held at a time.

    Returns:
        The same model.

    Raises:
        ValueError: The last layer is another one, or its logits are not only products, as those
            with a soft cap. Steps raise for another loss or metric, and for data without labels.

    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(50)])
    >>> without_logits(model, chunk_size=16) is model
    True
    >>> loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    >>> model.compile("sgd", loss, weighted_metrics=["accuracy"])
    >>> history = model.fit(ops.ones((8, 4)), ops.ones((8,), "int32"), verbose=0)
    >>> sorted(history.history)
    ['accuracy', 'loss']
    """
    backend = checks.backend("`without_logits`", "tensorflow", "jax")
    chunk_size = checks.integer("chunk_size", chunk_size)
    head = _head_of(model)
    token_losses = TokenLosses(head, chunk_size)
    # Methods of the class: those of `replica_exact`, and of an earlier call, are on the instance.
    compute_loss, compute_metrics = (
        getattr(type(model), name).__get__(model) for name in ("compute_loss", "compute_metrics")
    )
    call = type(head.layer).call.__get__(head.layer)

    def loss_of_tokens(
        x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, **settings: Any
    ) -> Any:
        loss = _loss_of(model, y)
        if not _is_running(model):
            return compute_loss(x, y, y_pred, sample_weight, **settings)
        losses, tokens = token_losses(y_pred, y)
        if (mask := get_keras_mask(y_pred)) is not None:
            set_keras_mask(losses, mask)
            set_keras_mask(tokens, mask)
        # Here also the metrics are updated, because on JAX only the loss leaves this function.
        metrics: Any = model._compile_metrics
        if _running.updates:
            if metrics is not None and not metrics.built:
                metrics.build(y, keras.KerasTensor((*tokens.shape, head.vocabulary_size)))
            with _comparing_tokens(model):
                compute_metrics(x, y, tokens, sample_weight)
        with _replaced(loss, "fn", _second):
            return compute_loss(x, y, losses, sample_weight, **settings)

    def metrics_of_tokens(x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if _is_running(model):
            return model.get_metrics_result()
        _loss_of(model, y)
        return compute_metrics(x, y, y_pred, sample_weight)

    @functools.wraps(call)
    def call_head(*args: Any, **kwargs: Any) -> Any:
        is_step = _is_running(model) and head.returns_logits(*args, **kwargs)
        return head.states(*args, **kwargs) if is_step else call(*args, **kwargs)

    model.compute_loss, model.compute_metrics = loss_of_tokens, metrics_of_tokens
    # Not `setattr`, with which Keras looks for layers and variables to track.
    vars(head.layer)["call"] = call_head
    for name in ("train_step", "test_step"):
        # On TensorFlow `replica_exact` replaces the step once more; on JAX it wrapped it.
        method = getattr(model, name)
        method = method if backend == "jax" else getattr(type(model), name).__get__(model)
        setattr(model, name, _running_step(model, method))
    return model


class _Head(NamedTuple):
    """A layer whose outputs are products of states with a matrix: its parts, as functions."""

    layer: Any
    vocabulary_size: int
    returns_logits: Callable[..., bool]  # of a call's arguments
    states: Callable[..., Tensor]  # of a call's arguments
    weights: Callable[[], tuple[Tensor, Tensor | None]]  # the matrix `[vocabulary, width]`, a bias


class TokenLosses(keras.layers.Layer):
    """The losses and predicted tokens at each position, as a layer that devices can divide."""

    def __init__(self, head: _Head, chunk_size: int) -> None:
        super().__init__(autocast=False)
        self.supports_masking = True
        self.head_layer, self.chunk_size, self.built = head.layer, chunk_size, True
        self.weights_of_head = head.weights

    def call(self, states: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        kernel, bias = self.weights_of_head()
        kernel = ops.cast(kernel, states.dtype)
        return linear_cross_entropy(states, kernel, y, bias=bias, chunk_size=self.chunk_size)


def _head_of(model: keras.Model) -> _Head:
    """Return the last layer of a model, if its outputs are products with a matrix."""
    outputs: Any = getattr(model, "outputs", None) or []
    layer: Any = outputs[0]._keras_history.operation if len(outputs) == 1 else None
    if isinstance(layer, keras.layers.Dense):
        _check_products(layer, activation=layer.activation, quantization=layer.quantization_mode)
        return _Head(layer, layer.units, _always, lambda x, **_: x, lambda: _of_dense(layer))
    embedding = getattr(layer, "token_embedding", layer)
    if hasattr(embedding, "tie_weights"):
        names = [] if layer is embedding else sorted(weight.name for weight in _weights_of(layer))
        cap, quantization = embedding.logit_soft_cap, embedding.quantization_mode
        _check_products(embedding, logit_soft_cap=cap, quantization=quantization)
        size = embedding.input_dim
        if layer is embedding:
            states = functools.partial(_cast_as, embedding)
            return _Head(layer, size, _is_reverse, states, lambda: (_matrix_of(layer), None))
        if names == _HEAD_WEIGHTS:
            _check_products(layer, activation=layer.activation)
            states = functools.partial(_states_of_masked, layer)
            return _Head(layer, size, _always, states, lambda: _of_masked(layer))
    return checks.fail(
        "`without_logits` needs a model whose last layer is a `Dense`, a `ReversibleEmbedding` or "
        "KerasHub's `MaskedLMHead` with one.",
        model=type(model).__name__,
        last_layer=type(layer).__name__,
    )


def _check_products(layer: keras.layers.Layer, **settings: Any) -> None:
    """Raise for a setting by which the logits are something else."""
    linear = None, keras.activations.linear
    if any(value not in linear for value in settings.values()):
        checks.fail(
            "The logits of this model are not only products with a matrix.",
            layer=type(layer).__name__,
            **settings,
            remedy="Train it without `without_logits`.",
        )


def _always(*_: Any, **__: Any) -> bool:
    return True


def _is_reverse(_: Tensor, reverse: bool = False, **__: Any) -> bool:
    return reverse


def _of_dense(layer: Any) -> tuple[Tensor, Tensor | None]:
    bias = None if layer.bias is None else ops.convert_to_tensor(layer.bias)
    return ops.transpose(ops.convert_to_tensor(layer.kernel)), bias


def _cast_as(embedding: Any, states: Tensor, *_: Any, **__: Any) -> Tensor:
    return ops.cast(states, embedding.reverse_dtype or states.dtype)


def _matrix_of(embedding: Any) -> Tensor:
    if embedding.tie_weights:
        return ops.convert_to_tensor(embedding.embeddings)
    return ops.transpose(ops.convert_to_tensor(embedding.reverse_embeddings))


def _of_masked(head: Any) -> tuple[Tensor, Tensor]:
    (bias,) = (weight for weight in _weights_of(head) if weight.name == "output_bias")
    return _matrix_of(head.token_embedding), ops.convert_to_tensor(bias)


def _states_of_masked(head: Any, inputs: Tensor, mask_positions: Tensor, **_: Any) -> Tensor:
    """Return what a `MaskedLMHead` computes before its product with the token embedding."""
    weights = {weight.name: ops.convert_to_tensor(weight) for weight in _weights_of(head)}
    dtype = head.compute_dtype
    kernel, bias, gamma, beta = (
        ops.cast(weights[name], dtype) for name in ("kernel", "bias", "gamma", "beta")
    )
    encoded = ops.cast(_at_positions(inputs, mask_positions), dtype)
    hidden = head.intermediate_activation(ops.matmul(encoded, kernel) + bias)
    hidden = ops.layer_normalization(hidden, gamma, beta, epsilon=head.layer_norm_epsilon)
    return _cast_as(head.token_embedding, ops.cast(hidden, dtype))


def _at_positions(sequence: Tensor, positions: Tensor) -> Tensor:
    """Return the entries of sequences at some positions."""
    if keras.backend.standardize_dtype(sequence.dtype) not in ("float16", "bfloat16"):
        return ops.take_along_axis(sequence, ops.expand_dims(positions, -1), axis=1)
    # The same numbers by a product. The gradient of a gather has axes in another order, in which
    # XLA then computes, and transposes, what is before it.
    is_there = ops.expand_dims(positions, -1) == ops.arange(ops.shape(sequence)[1], dtype="int32")
    return ops.matmul(ops.cast(is_there, sequence.dtype), sequence)


def _weights_of(head: Any) -> list[keras.Variable]:
    """Return the weights of a head, except for those of the token embedding."""
    embedding_weights = {id(weight) for weight in head.token_embedding.weights}
    return [weight for weight in head.weights if id(weight) not in embedding_weights]


def _running_step(model: keras.Model, method: Callable) -> Callable:
    """Return a step in which calls of the model return states."""

    @functools.wraps(method)
    def step(*args: Any, **kwargs: Any) -> Any:
        with in_step(model):
            return method(*args, **kwargs)

    # It counts as Keras' step, or the user's.
    step.__func__ = getattr(method, "__func__", None)  # type: ignore[attr-defined]
    return step


@contextlib.contextmanager
def in_step(model: keras.Model, *, updates: bool = True) -> Iterator[None]:
    """Have a model of `without_logits` compute its loss as in a step; others stay as they are."""
    before = vars(_running).copy()
    vars(_running).update(model=model, updates=updates)
    try:
        yield
    finally:
        vars(_running).clear()
        vars(_running).update(before)


def _is_running(model: keras.Model) -> bool:
    return getattr(_running, "model", None) is model


def _loss_of(model: Any, y: Any) -> keras.Loss:
    """Return the loss that a model was compiled with, if it is the one that is computed."""
    if y is None:
        checks.fail("The loss is computed from labels.", y=None, remedy="Pass `(x, y)`.")
    losses = keras.tree.flatten(model.loss)
    loss = losses[0] if len(losses) == 1 else model.loss
    is_known = isinstance(loss, keras.losses.SparseCategoricalCrossentropy) and loss.from_logits
    if not is_known or loss.ignore_class is not None:
        checks.fail(
            "After `without_logits` the loss is the cross-entropy of all classes.",
            loss=loss,
            remedy="Use `keras.losses.SparseCategoricalCrossentropy(from_logits=True)`, and ignore "
            "positions by sample weights of 0.",
        )
    return loss


@contextlib.contextmanager
def _comparing_tokens(model: keras.Model) -> Iterator[None]:
    """Have a model's metrics see predicted tokens, not logits, or raise for those that cannot."""
    metrics = [part for metric in model.metrics for part in getattr(metric, "metrics", ())]
    with contextlib.ExitStack() as stack:
        for metric in metrics:
            is_of_a_library = type(metric).__module__.startswith(("keras.", "keras_hub."))
            if is_of_a_library and not isinstance(metric, _METRICS):
                checks.fail(
                    "After `without_logits` there are no logits for this metric.",
                    metric=metric,
                    remedy="Use `keras.metrics.SparseCategoricalAccuracy`, or a class of your own, "
                    "which sees the predicted tokens.",
                )
            if isinstance(metric, keras.metrics.SparseCategoricalAccuracy):
                stack.enter_context(_replaced(metric, "_fn", _are_equal))
        yield


def _second(y_true: Any, y_pred: Any, **_: Any) -> Any:  # noqa: ARG001  # as of a loss
    return y_pred


def _are_equal(y_true: Tensor, y_pred: Tensor) -> Tensor:
    return ops.cast(ops.cast(y_true, "int32") == y_pred, keras.config.floatx())


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
