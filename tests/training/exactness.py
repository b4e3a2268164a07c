"""The settings in which R replicas are compared with one device, and the comparison.

The tests run kdpkit's columns at 2 replicas. The documented tables have stock Keras too,
which may abort the process, so every column and replica count is measured in processes of its own:

    python -m tests.training.exactness > tables.md
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, losses, optimizers

from kdpkit import testing
from kdpkit.training import replica_exact
from tests.training.loop_column import trained_by_loop

SINGLE = 1e-5  # the largest difference of any weight over the largest change of any, in float32
NEAR_ZERO = 1e-4  # the same where Adam divides gradients of zero, but for rounding, by their size
FLOAT16, BFLOAT16 = 10 * 2.0**-10, 10 * 2.0**-7  # the same where every product is rounded so

BATCH = 24  # 2, 3, 4 and 8 replicas divide it
EVEN = 2 * BATCH
REPLICAS = {"TensorFlow": [2, 3, 4, 8], "JAX": [1, 2, 4, 8]}
UNEVEN = EVEN - 3  # 21 rows last: 11 and 10 on two replicas, none for the last of eight


@dataclasses.dataclass(frozen=True)
class Setting:
    """One row of the table: a way to train a small model, and what replicas make of it.

    `promise` is "equal" to one device, "equal weights" where logs differ by definition of the
    setting, differently "by definition" altogether, or "raises"; by column where one differs, and
    "-" for what there is not. `since` is the first Keras that trains it on TensorFlow. A setting
    that `repeats` what others have in them, or differs by a formula alone, is measured by the
    command above, and by no test of `replica_exact`.
    """

    name: str
    build: Callable[[], keras.Model]
    data: Callable[[int], dict[str, Any]]
    train: Callable[[keras.Model, dict[str, Any]], list[dict[str, Any]]]
    promise: str = "equal"
    promises: dict[str, str] = dataclasses.field(default_factory=dict, hash=False)
    tolerance: float = SINGLE
    since: str = ""
    repeats: bool = False

    def promise_in(self, column: str) -> str:
        return self.promises.get(column, self.promise)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One cell: the largest difference of any weight over its largest change, and of any log."""

    verdict: str
    difference: float = float("nan")
    logs: float = float("nan")
    message: str = ""


def stock(model: keras.Model) -> keras.Model:
    return model


TRAINED_BY = {"stock Keras": stock, "replica_exact": replica_exact, "TrainingLoop": trained_by_loop}
COLUMNS = {
    f"{name}{where}": train for where in ("", " on JAX") for name, train in TRAINED_BY.items()
}
SHARED = "replica_exact, two devices share a model, on JAX"
COLUMNS[SHARED] = replica_exact
LOOPS = [column for column in COLUMNS if "TrainingLoop" in column]
ON_JAX = keras.backend.backend() == "jax"


def on_jax(promise: str) -> dict[str, str]:
    return dict.fromkeys(columns_on("JAX"), promise)


def columns_on(backend: str) -> list[str]:
    return [column for column in COLUMNS if backend_of(column) == backend]


def backend_of(column: str) -> str:
    return "JAX" if column.endswith("on JAX") else "TensorFlow"


def cells(names: Iterable[str], columns: Iterable[str], *marks: Any) -> list[Any]:
    """Give settings with columns as a test's parameters, left out where Keras is too old."""
    needs = functools.partial(pytest.mark.needs, reason="Keras cannot train it so")
    since = {of.name: [needs(keras=of.since)] for of in SETTINGS if of.since and not ON_JAX}
    pairs = itertools.product(names, columns)
    return [pytest.param(*pair, marks=[*marks, *since.get(pair[0], [])]) for pair in pairs]


def measure(setting: Setting, column: str, replicas: int, rows: int = EVEN) -> Outcome:
    """Train a setting on one device and on replicas, and compare."""
    promise = setting.promise_in(column)
    if promise == "-":
        return Outcome(promise)
    one = _on_one_device(setting, rows)
    try:
        many = _trained(setting, COLUMNS[column], replicas, rows, share=column == SHARED)
    except Exception as error:  # whatever it is, it is the cell's content
        message = str(error).strip()
        stopped = isinstance(error, ValueError) and "Received: " in message.rpartition("\n")[2]
        return Outcome("raises" if stopped else "crash", message=message)
    return _compare(one, many, promise, setting.tolerance)


@functools.cache
def _on_one_device(setting: Setting, rows: int) -> tuple[list, list, list]:
    return _trained(setting, stock, None, rows)


def _trained(
    setting: Setting, column: Callable, replicas: int | None, rows: int, *, share: bool = False
) -> tuple[list, list, list]:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    building, training = scopes(replicas, share=share)
    with training:
        with building:
            model = setting.build()
        model = column(model)
        before = model.get_weights()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # plain BatchNormalization; shuffling of generators
            logs = setting.train(model, setting.data(rows))
        return before, model.get_weights(), logs


def scopes(replicas: int | None, *, share: bool = False) -> tuple[Any, Any]:
    """Give what a model is built in, and what it is trained in; None is no strategy at all."""
    nothing = contextlib.nullcontext()
    if replicas is None:
        return nothing, nothing
    if share:
        from kdpkit import sharding

        return nothing, sharding.ModelParallel(replicas, model=min(2, replicas)).scope()
    if ON_JAX:
        devices = [f"cpu:{i}" for i in range(replicas)]
        return nothing, keras.distribution.DataParallel(devices=devices).scope()
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)]).scope(), nothing


def _compare(one: tuple, many: tuple, promise: str, tolerance: float) -> Outcome:
    before, after, logs = one
    _, after_many, logs_many = many
    change = max(np.abs(a - b).max() for a, b in zip(after, before, strict=True))
    difference = max(np.abs(a - b).max() for a, b in zip(after_many, after, strict=True))
    logs_difference = max(
        np.abs(np.asarray(entry[name]) - np.asarray(entry_many[name])).max()
        for entry, entry_many in zip(logs, logs_many, strict=True)
        for name in entry
    )
    ratio, logs_ratio = float(difference / change), float(logs_difference)
    if promise == "by definition" and np.isfinite(ratio):
        verdict = "by definition"
    else:
        wanted = "equal weights" if promise == "equal weights" else "equal"
        near = ratio <= tolerance and (wanted != "equal" or logs_ratio <= 10 * tolerance)
        verdict = wanted if near else "wrong"
    return Outcome(verdict, ratio, logs_ratio)


# Data and models.

X, Y = testing.toy_classification(EVEN)
ONE_HOT = np.eye(3, dtype="float32")[Y]
WEIGHTS = np.random.default_rng(1).uniform(0, 2, EVEN).astype("float32")
TOKENS = np.random.default_rng(2).integers(1, 9, (EVEN, 6))
TOKENS[np.arange(6) >= np.random.default_rng(3).integers(1, 7, (EVEN, 1))] = 0  # padding


def _data(rows: int | None = None, **more: Any) -> Callable[[int], dict[str, Any]]:
    """Give arrays to `fit`; `rows` sets their number whatever the caller wants."""
    arguments = {"x": X, "y": Y, "batch_size": BATCH, "epochs": 2} | more

    def data(wanted: int) -> dict[str, Any]:
        return {
            name: keras.tree.map_structure(lambda array: array[: rows or wanted], value)
            if name in ("x", "y", "sample_weight")
            else value
            for name, value in arguments.items()
        }

    return data


def _fit(model: keras.Model, data: dict[str, Any]) -> list[dict[str, Any]]:
    record = _Record()
    data = {"shuffle": False, "verbose": 0, "callbacks": [record]} | data
    history = model.fit(**data).history
    return [*record.batches, history]


class _Record(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.batches: list[dict[str, Any]] = []

    def on_train_batch_end(self, _: int, logs: dict[str, Any] | None = None) -> None:
        self.batches.append(dict(logs or {}))


def _net(*middle: keras.layers.Layer) -> keras.Model:
    dense = layers.Dense(8, activation="tanh")
    return keras.Sequential([keras.Input((4,)), dense, *middle, layers.Dense(3)])


def cross_entropy(**arguments: Any) -> keras.losses.Loss:
    return losses.SparseCategoricalCrossentropy(from_logits=True, **arguments)


def assert_same_weights(model: keras.Model, other: keras.Model, tolerance: float = 1e-6) -> None:
    for one, its in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(one, its, atol=tolerance)


def _compiled(model: keras.Model, optimizer: Any = None, loss: Any = None, **more: Any) -> Any:
    optimizer = optimizer or optimizers.SGD(0.5)
    model.compile(optimizer, loss or cross_entropy(), **{"metrics": ["accuracy"]} | more)
    return model


SETTINGS: list[Setting] = []


def _add(
    name: str,
    build: Callable[[], keras.Model] = lambda: _compiled(_net()),
    data: Callable[[int], dict[str, Any]] | None = None,
    train: Callable = _fit,
    **more: Any,
) -> None:
    SETTINGS.append(Setting(name, build, data or _data(), train, **more))


# How batches are split.

_add("even batches", repeats=True)
_add("uneven last batch", data=_data(rows=EVEN - 1), repeats=True)
_add("last batch of one example: replicas without examples", data=_data(rows=BATCH + 1))
_add("first batch no multiple of the replicas", data=_data(batch_size=23))
_add("a first batch smaller than the replicas", data=_data(rows=1))


# Layers whose rows meet, and layers that draw random numbers.


def _synchronized() -> keras.layers.Layer:
    return layers.BatchNormalization(synchronized=not ON_JAX)  # on JAX it always is


def _batch_norm(make: Callable = layers.BatchNormalization) -> Callable[[], keras.Model]:
    return lambda: _compiled(_net(make()))


_add("BatchNormalization(synchronized=True)", _batch_norm(_synchronized), repeats=True)
_add(
    "synchronized BatchNormalization, replicas without examples",
    _batch_norm(_synchronized),
    _data(rows=BATCH + 1),
)
_add("BatchNormalization", _batch_norm(), repeats=True)
_add("BatchNormalization, replicas without examples", _batch_norm(), _data(rows=BATCH + 1))
_add("Dropout", lambda: _compiled(_net(layers.Dropout(0.5))))


# Optimizers.


def _optimizer(make: Callable[[], keras.optimizers.Optimizer]) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        model = _compiled(_net(), make())
        # Built inside `fit`'s compiled step, ScheduleFreeAdamW starts anew at every step of it.
        model.optimizer.build(model.trainable_variables)
        return model

    return build


def _decay() -> keras.optimizers.schedules.LearningRateSchedule:
    return optimizers.schedules.PolynomialDecay(0.5, 6, 0.1)


# Not much smaller: a tiny step is lost in the rounding of the weights.
_add("clipnorm", _optimizer(lambda: optimizers.SGD(0.5, clipnorm=0.1)), repeats=True)
_add("global_clipnorm", _optimizer(lambda: optimizers.SGD(0.5, global_clipnorm=0.1)))
_add("clipvalue", _optimizer(lambda: optimizers.SGD(0.5, clipvalue=0.01)), repeats=True)
_add("learning-rate schedule", _optimizer(lambda: optimizers.SGD(_decay())), repeats=True)
_add(
    "gradient_accumulation_steps",
    _optimizer(lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2)),
    repeats=True,
)
_add(
    "gradient_accumulation_steps with a schedule and clipping",
    _optimizer(lambda: optimizers.SGD(_decay(), clipnorm=0.1, gradient_accumulation_steps=3)),
)
_add(
    "use_ema",
    _optimizer(lambda: optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5)),
    repeats=True,
)
_add(
    "ema_overwrite_frequency",
    _optimizer(lambda: optimizers.SGD(0.5, use_ema=True, ema_overwrite_frequency=2)),
)
for _kind in (
    "SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Adafactor", "Nadam",
    "Ftrl", "Lion", "Lamb", "Muon", "ScheduleFreeAdamW",
):  # fmt: skip  # a list to read as one
    _add(
        f"optimizer {_kind}",
        _optimizer(lambda kind=_kind: getattr(optimizers, kind)(0.02)),
        repeats=_kind not in ("Adafactor", "Muon"),
    )


# Precision.


def _in_half(policy: str, initial_scale: float = 2.0**10) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(policy)
        try:
            model = _net(layers.Dense(8, activation="relu"))
        finally:
            keras.config.set_dtype_policy(before)
        optimizer = optimizers.SGD(0.5)
        if policy == "mixed_float16":
            optimizer = optimizers.LossScaleOptimizer(
                optimizer, initial_scale=initial_scale, dynamic_growth_steps=2
            )
        return _compiled(model, optimizer, metrics=None)  # accuracy would turn on the last bit

    return build


def _overflowing() -> keras.Model:
    """Build a linear model in float16, whose gradients overflow until the loss scale is halved.

    One row alone makes them overflow, and the scale does not grow again: a sum that is too large
    for float16 on one device may be none on replicas, which add their parts up in float32.
    """
    model = _in_half("mixed_float16", 2.0**14)()
    model.layers[0].activation = keras.activations.linear
    model.optimizer.inner_optimizer.learning_rate = 1e-4
    model.optimizer.dynamic_growth_steps = 1000
    return model


def _with_overflow_on_the_last_replica(rows: int) -> dict[str, Any]:
    features = X.copy()
    features[BATCH - 1] = 1000.0
    return _data(x=features, epochs=8)(rows)


_add("mixed_bfloat16", _in_half("mixed_bfloat16"), tolerance=BFLOAT16, repeats=True)
_add("mixed_float16", _in_half("mixed_float16"), tolerance=FLOAT16, repeats=True)
_add(
    "mixed_float16, overflow on the last replica",
    _overflowing,
    _with_overflow_on_the_last_replica,
    tolerance=FLOAT16,
)


# Losses.

_add("sample_weight", data=_data(sample_weight=WEIGHTS), repeats=True)
_add("class_weight", data=_data(class_weight={0: 1.0, 1: 3.0, 2: 0.5}))
for _reduction, _rate in (
    ("sum_over_batch_size", 0.5),
    ("mean", 0.5),
    ("mean_with_sample_weight", 0.5),
    ("sum", 0.02),
    (None, 0.02),
):
    _add(
        f"reduction={_reduction!r}",
        lambda reduction=_reduction, rate=_rate: _compiled(
            _net(), optimizers.SGD(rate), cross_entropy(reduction=reduction)
        ),
        _data(sample_weight=WEIGHTS),
        # Keras then minimises the sum of the losses; a loop, whose losses nobody reduces, the mean.
        # On JAX Keras has no such training: it differentiates nothing but a number.
        promises={} if _reduction else {"TrainingLoop": "by definition"} | on_jax("-"),
        repeats=_reduction in ("sum_over_batch_size", "mean", None),
    )
_add(
    "a loss of the global batch (Dice)",
    lambda: _compiled(_net(), loss=losses.Dice()),
    _data(y=ONE_HOT),
)
_add(
    "regularizers of weights, biases and activities",
    lambda: _compiled(
        _net(
            layers.Dense(
                8, kernel_regularizer="l2", bias_regularizer="l1", activity_regularizer="l2"
            )
        )
    ),
    since="3.14",  # raises before: tests/_internal/test_versions.py
)


class AddLoss(keras.layers.Layer):
    def call(self, inputs: Any) -> Any:
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(inputs)))
        return inputs


_add("add_loss", lambda: _compiled(_net(AddLoss())))
_add(
    "constraints",
    lambda: _compiled(_net(layers.Dense(8, kernel_constraint=keras.constraints.MaxNorm(0.5)))),
)


def _two_outputs() -> keras.Model:
    inputs = keras.Input((4,))
    hidden = layers.Dense(8, activation="tanh")(inputs)
    model = keras.Model(
        inputs, [layers.Dense(3, name="kind")(hidden), layers.Dense(1, name="size")(hidden)]
    )
    return _compiled(
        model,
        loss=[cross_entropy(), "mse"],
        loss_weights=[1.0, 0.3],
        metrics=[["accuracy"], ["mae"]],
    )


_add(
    "several outputs with loss_weights",
    _two_outputs,
    _data(y=[Y, X[:, :1]]),
    # The loop logs each output's loss as a mean over rows; Keras on TensorFlow, over batches.
    promises={"TrainingLoop": "by definition"},
)


class Centered(layers.Layer):
    """Subtracts a moving mean that it keeps itself."""

    def build(self, shape: Any) -> None:
        self.center = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)

    def call(self, inputs: Any, training: bool = False) -> Any:
        outputs = inputs - self.center
        if training:
            self.center.assign(0.9 * self.center + 0.1 * keras.ops.mean(inputs, axis=0))
        return outputs


def _mean_size(_: Any, predictions: Any) -> Any:
    return keras.ops.mean(keras.ops.abs(predictions))


_add("a layer with a moving mean of its own", lambda: _compiled(_net(Centered())))
_add("a metric of one number for a batch", lambda: _compiled(_net(), metrics=[_mean_size]))


# Sequences.


def _sequence(
    *middle: Callable[[], keras.layers.Layer],
    clipnorm: float | None = None,
    epsilon: float = 1e-7,
    **arguments: Any,
) -> Callable:
    return lambda: _compiled(
        keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                layers.Embedding(9, 4, **arguments),
                *(layer() for layer in middle),
            ]
        ),
        optimizers.Adam(0.05, epsilon=epsilon, global_clipnorm=clipnorm),
    )


# Keras' `fit` on JAX loses the mask between the loss and the metrics; a loop does not.
_WITHOUT_MASK = {"TrainingLoop on JAX": "equal weights"}
_add(
    "Embedding with sparse gradients",
    _sequence(layers.GlobalAveragePooling1D, lambda: layers.Dense(3)),
    _data(x=TOKENS),
    repeats=True,
)


def _sparse_data(rows: int) -> dict[str, Any]:
    """Give features of which half are missing, as sparse tensors."""
    features = tf.where(tf.abs(X) > 0.7, X, 0.0)
    dataset = tf.data.Dataset.from_tensor_slices((features, Y)).take(rows).batch(BATCH)
    return {"x": dataset.map(lambda x, y: (tf.sparse.from_dense(x), y)), "epochs": 2}


def _of_sparse_features() -> keras.Model:
    inputs = keras.Input((4,), sparse=True)
    return _compiled(
        keras.Model(inputs, layers.Dense(3)(layers.Dense(8)(inputs))), optimizers.Adam(0.05)
    )


_add(
    "sparse features",
    _of_sparse_features,
    _sparse_data,
    promises={"TrainingLoop on JAX": "raises"},
)
_add(
    "Embedding with sparse gradients and global_clipnorm",
    _sequence(layers.GlobalAveragePooling1D, lambda: layers.Dense(3), clipnorm=0.01),
    _data(x=TOKENS),
)
_add(
    "Embedding(mask_zero=True) and LSTM, a loss for every token",
    _sequence(
        lambda: layers.LSTM(5, return_sequences=True), lambda: layers.Dense(9), mask_zero=True
    ),
    _data(x=TOKENS, y=TOKENS),
    promises=_WITHOUT_MASK,
    tolerance=NEAR_ZERO,  # some gradients cancel to all but nothing, and Adam scales what is left
)
_add(
    "synchronized BatchNormalization under a mask",
    _sequence(
        _synchronized,
        lambda: layers.GRU(5),
        lambda: layers.Dense(3),
        epsilon=1e-3,  # a shift before a BatchNormalization has a gradient of rounding alone
        mask_zero=True,
    ),
    _data(x=TOKENS),
    repeats=True,
)


def _published_bert() -> keras.Model:
    """Build and compile the model of KerasHub's guide to data-parallel training, narrow."""
    import keras_hub  # slow to load, and needed by this row alone

    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=31,
        num_layers=2,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        dropout=0.0,
        max_sequence_length=12,
    )
    backbone.get_layer("pooled_dense").trainable = False
    return _compiled(
        keras_hub.models.BertMaskedLM(backbone, preprocessor=None),
        optimizers.AdamW(2e-2),
        metrics=None,
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy()],
        jit_compile=False,
    )


def _published_data(rows: int) -> dict[str, Any]:
    """Mask lines of letters as the guide does; once, so that every column sees the same masks."""
    import keras_hub

    letters = "abcdefghijklmnopqrstuvwxyz"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    preprocessor = keras_hub.models.BertMaskedLMPreprocessor(
        keras_hub.models.BertTokenizer([*special, *letters], lowercase=True),
        sequence_length=12,
        mask_selection_length=3,
    )
    random = np.random.default_rng(6)
    lines = [" ".join(random.choice([*letters], random.integers(4, 14))) for _ in range(rows)]
    return {"x": tf.data.Dataset.from_tensor_slices(preprocessor(lines)).batch(BATCH), "epochs": 2}


_add(
    "masked language model of KerasHub's guide",
    _published_bert,
    _published_data,
    tolerance=NEAR_ZERO,
    repeats=True,
)


# Steps and inputs.

_add("steps_per_execution=2", lambda: _compiled(_net(), steps_per_execution=2))
_add("run_eagerly=True", lambda: _compiled(_net(), run_eagerly=True))
_add("jit_compile=True", lambda: _compiled(_net(), jit_compile=True))


def _typed_inputs() -> keras.Model:
    numbers = keras.Input((4,), name="numbers")
    flags = keras.Input((1,), dtype="bool", name="flags")
    words = keras.Input((), dtype="string", name="words")
    looked_up = layers.StringLookup(vocabulary=["0", "1", "2"])(words)
    hidden = layers.Dense(3)(numbers) * keras.ops.cast(flags, "float32")
    inputs = {"numbers": numbers, "flags": flags, "words": words}
    return _compiled(keras.Model(inputs, hidden + layers.Embedding(4, 3)(looked_up)))


def _typed_data(rows: int) -> dict[str, Any]:
    features = {"numbers": X, "flags": X[:, :1] > 0, "words": np.array([str(y) for y in Y])}
    dataset = tf.data.Dataset.from_tensor_slices((features, Y)).take(rows)
    return {"x": dataset.batch(BATCH), "epochs": 2}


def _generator_data(rows: int) -> dict[str, Any]:
    batches = ((X[:rows][start:][:BATCH], Y[:rows][start:][:BATCH]) for start in (0, BATCH))
    return {"x": batches, "steps_per_epoch": 2}


_add("bool and string features", _typed_inputs, _typed_data, promises=on_jax("-"))
_add("Python generator", data=_generator_data)
_add(
    "weighted metrics, by batch and epoch",
    lambda: _compiled(_net(), weighted_metrics=["accuracy", "sparse_categorical_crossentropy"]),
    _data(sample_weight=WEIGHTS),
)
_add(
    "AUC, F1 and top-k metrics",
    lambda: _compiled(
        _net(layers.Dense(3), layers.Softmax()),
        loss="categorical_crossentropy",
        metrics=[
            "auc",
            keras.metrics.F1Score(average="macro"),
            keras.metrics.TopKCategoricalAccuracy(2),
        ],
    ),
    _data(y=ONE_HOT),
)


def _on_batches(model: keras.Model, data: dict[str, Any]) -> list[dict[str, Any]]:
    x, y = data["x"], data["y"]
    logs = [model.train_on_batch(x[:n], y[:n], return_dict=True) for n in (24, 23, 5, 1)]
    logs.append(model.test_on_batch(x[:5], y[:5], return_dict=True))
    return [*logs, {"predictions": model.predict_on_batch(x[:5])}]


def _fit_and_evaluate(model: keras.Model, data: dict[str, Any]) -> list[dict[str, Any]]:
    logs = _fit(model, data | {"validation_data": (X[:9], Y[:9])})
    logs.append(model.evaluate(X, Y, batch_size=23, verbose=0, return_dict=True))
    return [*logs, {"predictions": model.predict(X[:9], batch_size=4, verbose=0)}]


_add(
    "train_on_batch, test_on_batch, predict_on_batch",
    train=_on_batches,
    promises=dict.fromkeys(LOOPS, "-"),
)
_add("validation, evaluate and predict, uneven", train=_fit_and_evaluate)


# The table.


def main(argv: list[str] | None = None) -> None:
    """Measure the columns in processes of their own and print a backend's as a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", help=f"instead of {REPLICAS}")
    parser.add_argument("--columns", nargs="+", default=[*COLUMNS], choices=[*COLUMNS])
    parser.add_argument("--settings", nargs="+", default=[s.name for s in SETTINGS])
    parser.add_argument("--here", action="store_true", help="measure in this process, print JSON")
    arguments = parser.parse_args(argv)
    if arguments.here:
        _measure_here(arguments.columns[0], arguments.replicas[0], arguments.settings)
        return
    for backend, replicas in REPLICAS.items():
        columns = [column for column in columns_on(backend) if column in arguments.columns]
        if columns:
            lines = _table(columns, arguments.replicas or replicas, arguments.settings)
            sys.stdout.writelines([*lines, "\n"])


def _table(columns: list[str], replica_counts: list[int], settings: list[str]) -> list[str]:
    cells: dict[tuple[str, str], dict[int, Outcome]] = collections.defaultdict(dict)
    for column in columns:
        for replicas in replica_counts:
            for name, outcome in measure_apart(column, replicas, settings).items():
                cells[name, column][replicas] = outcome
    rows = [["setting", *columns], ["---"] * (1 + len(columns))]
    rows += [[name, *(_cell(cells[name, column]) for column in columns)] for name in settings]
    return [f"| {' | '.join(row)} |\n" for row in rows]


def _measure_here(column: str, replicas: int, names: list[str]) -> None:
    testing.use_logical_cpus(8)
    settings = {setting.name: setting for setting in SETTINGS}
    for name in names:
        outcome = measure(settings[name], column, replicas)
        sys.stdout.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
        sys.stdout.flush()
        if outcome.verdict == "crash":
            sys.exit(1)  # a failed collective breaks those after it


def measure_apart(column: str, replicas: int, names: list[str]) -> dict[str, Outcome]:
    """Measure settings in other processes.

    A crash counts where it was the first thing in its process: one setting may break the next.
    """
    outcomes: list[Outcome] = []
    while len(outcomes) < len(names):
        found = _measure_in_process(column, replicas, names[len(outcomes) :])
        whole = [*itertools.takewhile(lambda outcome: outcome.verdict != "crash", found)]
        outcomes += whole or found or [Outcome("crash", message="the process aborted")]
    return dict(zip(names, outcomes, strict=True))


def _measure_in_process(column: str, replicas: int, names: list[str]) -> list[Outcome]:
    """Measure settings in one process, up to the first that crashes or takes it down."""
    command = [sys.executable, "-m", "tests.training.exactness", "--here", "--columns", column]
    command += ["--replicas", str(replicas), "--settings", *names]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"KERAS_BACKEND": "jax" if "JAX" in column else "tensorflow"},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return [Outcome(**json.loads(line)) for line in lines]


def _cell(outcomes: dict[int, Outcome]) -> str:
    """Put the outcomes for all replica counts into a few words."""
    by_verdict = collections.defaultdict(list)
    for replicas, outcome in outcomes.items():
        by_verdict[outcome.verdict].append((replicas, outcome))
    parts = []
    for verdict, found in by_verdict.items():
        worst = max(
            outcome.difference
            if verdict == "equal weights"
            else max(outcome.difference, outcome.logs)
            for _, outcome in found
        )
        number = f" {worst:.0e}" if verdict in ("equal", "equal weights", "wrong") else ""
        where = f" (R = {', '.join(str(replicas) for replicas, _ in found)})"
        parts.append(f"{verdict}{number}{where if len(by_verdict) > 1 else ''}")
    return "; ".join(parts)


if __name__ == "__main__":
    main()
