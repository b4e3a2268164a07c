"""The settings in which R replicas are compared with one device, and the comparison.

The tests run kdpkit's columns at 2 replicas; `python -m tools.exactness` measures the documented
tables.
"""

import contextlib
import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, losses, optimizers

from kdpkit import testing
from kdpkit.testing._toys import off_by
from kdpkit.training import replica_exact
from tests.training.step_column import trained_by_own_step

SINGLE = 1e-5  # the largest difference of any weight over the largest change of any, in float32
NEAR_ZERO = 1e-4  # the same where Adam divides gradients of zero, but for rounding, by their size
FLOAT16, BFLOAT16 = 10 * 2.0**-10, 10 * 2.0**-7  # the same where every product is rounded so

BATCH = 24  # 2, 3, 4 and 8 replicas divide it
EVEN = 2 * BATCH
REPLICAS = {"TensorFlow": [2, 3, 4, 8], "JAX": [1, 2, 4, 8]}
UNEVEN = EVEN - 3  # 21 examples last: 11 and 10 on two replicas, none for the last of eight


@dataclasses.dataclass(frozen=True)
class Setting:
    """One row of the table: a way to train a small model, and what replicas make of it.

    `promise` is "equal" to one device, "equal weights" where logs differ by definition of the
    setting, differently "by definition" altogether, or "raises"; by column where one differs, and
    "-" for what there is not. `since` is the first Keras that trains it on TensorFlow. A setting
    that `repeats` what others have in them, or differs by a formula only, is measured by the
    command above, and by no test of `replica_exact`.
    """

    name: str
    build: Callable
    data: Callable
    train: Callable
    promise: str = "equal"
    promises: dict = dataclasses.field(default_factory=dict, hash=False)
    tolerance: float = SINGLE
    since: str = ""
    repeats: bool = False

    def promise_in(self, column):
        return self.promises.get(column, self.promise)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One cell: the largest difference of any weight over its largest change, and of any log."""

    verdict: str
    difference: float = float("nan")
    logs: float = float("nan")
    message: str = ""


def stock(model):
    return model


OWN_STEP = "replica_exact, own step"
TRAINED_BY = {"stock Keras": stock, "replica_exact": replica_exact, OWN_STEP: trained_by_own_step}
COLUMNS = {
    f"{name}{where}": train for where in ("", " on JAX") for name, train in TRAINED_BY.items()
}
OWN_STEP_ON_JAX = f"{OWN_STEP} on JAX"
SHARED = "replica_exact, two devices share a model, on JAX"
COLUMNS[SHARED] = replica_exact
ON_JAX = keras.backend.backend() == "jax"


def on_jax(promise):
    return dict.fromkeys(columns_on("JAX"), promise)


def columns_on(backend):
    return [column for column in COLUMNS if backend_of(column) == backend]


def backend_of(column):
    return "JAX" if column.endswith("on JAX") else "TensorFlow"


def cells(names, columns, *marks):
    """Return settings with columns as a test's parameters, left out where Keras is too old."""
    needs = functools.partial(pytest.mark.needs, reason="Keras cannot train it so")
    since = {s.name: [needs(keras=s.since)] for s in SETTINGS if s.since and not ON_JAX}
    pairs = itertools.product(names, columns)
    return [pytest.param(*pair, marks=[*marks, *since.get(pair[0], [])]) for pair in pairs]


def measure(setting, column, replicas, rows=EVEN):
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
def _on_one_device(setting, rows):
    return _trained(setting, stock, None, rows)


def _trained(setting, column, replicas, rows, *, share=False):
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


def scopes(replicas, *, share=False):
    """Return what a model is built in, and what it is trained in; None is no strategy at all."""
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


def _compare(one, many, promise, tolerance):
    before, after, logs = one
    _, after_many, logs_many = many
    logs_difference = max(
        np.abs(np.asarray(entry[name]) - np.asarray(entry_many[name])).max()
        for entry, entry_many in zip(logs, logs_many, strict=True)
        for name in entry
    )
    ratio, logs_ratio = off_by(after_many, after, before), float(logs_difference)
    if promise == "by definition" and np.isfinite(ratio):
        return Outcome("by definition", ratio, logs_ratio)
    verdict = "equal weights" if promise == "equal weights" else "equal"
    near = ratio <= tolerance and (verdict != "equal" or logs_ratio <= 10 * tolerance)
    return Outcome(verdict if near else "wrong", ratio, logs_ratio)


# Data and models.

X, Y = testing.toy_classification(EVEN)
ONE_HOT = np.eye(3, dtype="float32")[Y]
WEIGHTS = np.random.default_rng(1).uniform(0, 2, EVEN).astype("float32")
TOKENS = np.random.default_rng(2).integers(1, 9, (EVEN, 6))
TOKENS[np.arange(6) >= np.random.default_rng(3).integers(1, 7, (EVEN, 1))] = 0  # padding


def _data(rows=None, **more):
    """Return a function that gives arrays to `fit`; `rows` sets their number for all callers."""
    arguments = {"x": X, "y": Y, "batch_size": BATCH, "epochs": 2} | more

    def data(wanted):
        return {
            name: keras.tree.map_structure(lambda array: array[: rows or wanted], value)
            if name in ("x", "y", "sample_weight")
            else value
            for name, value in arguments.items()
        }

    return data


def _fit(model, data):
    batches = []
    record = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda _, logs: batches.append(dict(logs or {}))
    )
    data = {"shuffle": False, "verbose": 0, "callbacks": [record]} | data
    history = model.fit(**data).history
    return [*batches, history]


def cross_entropy(**arguments):
    return losses.SparseCategoricalCrossentropy(from_logits=True, **arguments)


def assert_close(many, one, rtol=1e-5, atol=1e-6):
    for a, b in zip(many, one, strict=True):
        np.testing.assert_allclose(a, b, rtol, atol)


def assert_same_weights(model, other, tolerance=1e-6):
    assert_close(model.get_weights(), other.get_weights(), 1e-7, tolerance)


def _compiled(model, optimizer=None, loss=None, **settings):
    optimizer = optimizer or optimizers.SGD(0.5)
    model.compile(optimizer, loss or cross_entropy(), **{"metrics": ["accuracy"]} | settings)
    return model


def _net(*middle):
    dense = layers.Dense(8, activation="tanh")
    return keras.Sequential([keras.Input((4,)), dense, *middle, layers.Dense(3)])


def _model(*middle, optimizer=None, **settings):
    """Return a function that builds and compiles a model, with layers that functions make."""

    def build():
        model = _compiled(_net(*(make() for make in middle)), optimizer and optimizer(), **settings)
        if optimizer:  # ScheduleFreeAdamW starts again at every step if `fit` builds it in one
            model.optimizer.build(model.trainable_variables)
        return model

    return build


SETTINGS = []


def _add(name, build=None, data=None, train=_fit, **more):
    SETTINGS.append(Setting(name, build or _model(), data or _data(), train, **more))


# How batches are split.

_add("even batches", repeats=True)
_add("uneven last batch", data=_data(rows=EVEN - 1), repeats=True)
_add("last batch of one example: replicas without examples", data=_data(rows=BATCH + 1))
_add("first batch no multiple of the replicas", data=_data(batch_size=23))
_add("a first batch smaller than the replicas", data=_data(rows=1))

# Layers whose examples meet, and layers that draw random numbers.


def _synchronized():
    return layers.BatchNormalization(synchronized=not ON_JAX)  # on JAX it always is


for _name, _norm in (
    ("BatchNormalization(synchronized=True)", _synchronized),
    ("synchronized BatchNormalization, replicas without examples", _synchronized),
    ("BatchNormalization", layers.BatchNormalization),
    ("BatchNormalization, replicas without examples", layers.BatchNormalization),
):
    _few = "without" in _name
    _add(_name, _model(_norm), _data(rows=BATCH + 1 if _few else None), repeats=not _few)
_add("Dropout", _model(lambda: layers.Dropout(0.5)))


# Optimizers.


def _sgd(learning_rate=0.5, **settings):
    return _model(optimizer=lambda: optimizers.SGD(learning_rate, **settings))


_decay = optimizers.schedules.PolynomialDecay(0.5, 6, 0.1)
# Not much smaller: a tiny step is lost in the rounding of the weights.
_add("clipnorm", _sgd(clipnorm=0.1), repeats=True)
_add("global_clipnorm", _sgd(global_clipnorm=0.1))
_add("clipvalue", _sgd(clipvalue=0.01), repeats=True)
_add("learning-rate schedule", _sgd(_decay), repeats=True)
_add(
    "gradient_accumulation_steps",
    _model(optimizer=lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2)),
    repeats=True,
)
_add(
    "gradient_accumulation_steps with a schedule and clipping",
    _sgd(_decay, clipnorm=0.1, gradient_accumulation_steps=3),
)
_add("use_ema", _sgd(use_ema=True, ema_momentum=0.5), repeats=True)
_add("ema_overwrite_frequency", _sgd(use_ema=True, ema_overwrite_frequency=2))
for _kind in (
    "SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Adafactor", "Nadam",
    "Ftrl", "Lion", "Lamb", "Muon", "ScheduleFreeAdamW",
):  # fmt: skip  # a list to read as one
    _add(
        f"optimizer {_kind}",
        _model(optimizer=lambda kind=_kind: getattr(optimizers, kind)(0.02)),
        repeats=_kind not in ("Adafactor", "Muon"),
    )


# Precision.


def _in_half(policy, initial_scale=2.0**10):
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


def _overflowing():
    """Build a linear model in float16, whose gradients overflow until the loss scale is halved.

    One example makes them overflow, and the scale does not grow again: a sum that is too large
    for float16 on one device may be none on replicas, which add their parts up in float32.
    """
    model = _in_half("mixed_float16", 2.0**14)
    model.layers[0].activation = keras.activations.linear
    model.optimizer.inner_optimizer.learning_rate = 1e-4
    model.optimizer.dynamic_growth_steps = 1000
    return model


_overflowing_features = X.copy()
_overflowing_features[BATCH - 1] = 1000.0  # the last replica's
for _policy, _tolerance in (("mixed_bfloat16", BFLOAT16), ("mixed_float16", FLOAT16)):
    _build = functools.partial(_in_half, _policy)
    _add(_policy, _build, tolerance=_tolerance, repeats=True)
_add(
    "mixed_float16, overflow on the last replica",
    _overflowing,
    _data(x=_overflowing_features, epochs=8),
    tolerance=FLOAT16,
)

# Losses.

_add("sample_weight", data=_data(sample_weight=WEIGHTS), repeats=True)
_add("class_weight", data=_data(class_weight={0: 1.0, 1: 3.0, 2: 0.5}))
for _reduction in ("sum_over_batch_size", "mean", "mean_with_sample_weight", "sum", None):
    _rate = 0.02 if _reduction in ("sum", None) else 0.5
    _add(
        f"reduction={_reduction!r}",
        lambda rate=_rate, reduction=_reduction: _compiled(
            _net(), optimizers.SGD(rate), cross_entropy(reduction=reduction)
        ),
        _data(sample_weight=WEIGHTS),
        # On JAX Keras has no such training: it differentiates nothing but a number.
        promises={} if _reduction else on_jax("-"),
        repeats=_reduction in ("sum_over_batch_size", "mean", None),
    )
_add("a loss of the global batch (Dice)", _model(loss=losses.Dice()), _data(y=ONE_HOT))
_add(
    "regularizers of weights, biases and activities",
    _model(
        lambda: layers.Dense(
            8, kernel_regularizer="l2", bias_regularizer="l1", activity_regularizer="l2"
        )
    ),
    since="3.14",  # raises before: tests/_internal/test_versions.py
)


class AddLoss(keras.layers.Layer):
    def call(self, inputs):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(inputs)))
        return inputs


_add("add_loss", _model(AddLoss))
_constraint = keras.constraints.MaxNorm(0.5)
_add("constraints", _model(lambda: layers.Dense(8, kernel_constraint=_constraint)))


def _two_outputs():
    inputs = keras.Input((4,))
    hidden = layers.Dense(8, activation="tanh")(inputs)
    outputs = [layers.Dense(3, name="kind")(hidden), layers.Dense(1, name="size")(hidden)]
    return _compiled(
        keras.Model(inputs, outputs),
        loss=[cross_entropy(), "mse"],
        loss_weights=[1.0, 0.3],
        metrics=[["accuracy"], ["mae"]],
    )


_add(
    "several outputs with loss_weights",
    _two_outputs,
    _data(y=[Y, X[:, :1]]),
    # `fit` logs the mean of an output's losses over batches, a step of known shapes over examples.
    promises={OWN_STEP: "equal weights"},
)


class Centered(layers.Layer):
    """Subtracts a moving mean that it keeps itself."""

    def build(self, shape):
        self.center = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)

    def call(self, inputs, training=False):
        outputs = inputs - self.center
        if training:
            self.center.assign(0.9 * self.center + 0.1 * keras.ops.mean(inputs, axis=0))
        return outputs


def _mean_size(_, predictions):
    return keras.ops.mean(keras.ops.abs(predictions))


_add("a layer with a moving mean of its own", _model(Centered))
_add("a metric of one number for a batch", _model(metrics=[_mean_size]))


# Sequences.


def _sequence(*middle, clipnorm=None, epsilon=1e-7, **arguments):
    """Return a function that builds a model of tokens; `arguments` are those of its Embedding."""
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


def _classes():
    return layers.Dense(3)


_pooling = layers.GlobalAveragePooling1D
_add(
    "Embedding with sparse gradients", _sequence(_pooling, _classes), _data(x=TOKENS), repeats=True
)


def _sparse_data(rows):
    """Return features of which half are missing, as sparse tensors."""
    features = tf.where(tf.abs(X) > 0.7, X, 0.0)
    dataset = tf.data.Dataset.from_tensor_slices((features, Y)).take(rows).batch(BATCH)
    return {"x": dataset.map(lambda x, y: (tf.sparse.from_dense(x), y)), "epochs": 2}


def _on_sparse_features():
    inputs = keras.Input((4,), sparse=True)
    outputs = layers.Dense(3)(layers.Dense(8)(inputs))
    return _compiled(keras.Model(inputs, outputs), optimizers.Adam(0.05))


_add(
    "sparse features",
    _on_sparse_features,
    _sparse_data,
)
_add(
    "Embedding with sparse gradients and global_clipnorm",
    _sequence(_pooling, _classes, clipnorm=0.01),
    _data(x=TOKENS),
)
_add(
    "Embedding(mask_zero=True) and LSTM, a loss for every token",
    _sequence(
        lambda: layers.LSTM(5, return_sequences=True), lambda: layers.Dense(9), mask_zero=True
    ),
    _data(x=TOKENS, y=TOKENS),
    tolerance=NEAR_ZERO,  # some gradients cancel to all but nothing, and Adam scales what is left
)
_add(
    "synchronized BatchNormalization under a mask",
    # With a large epsilon: a shift before a BatchNormalization has a gradient of rounding only.
    _sequence(_synchronized, lambda: layers.GRU(5), _classes, epsilon=1e-3, mask_zero=True),
    _data(x=TOKENS),
    repeats=True,
)


def _published_bert():
    """Build and compile the model of KerasHub's guide to data-parallel training, narrow."""
    import keras_hub  # slow to load, and needed by this row only

    backbone = keras_hub.models.BertBackbone(31, 2, 2, 8, 16, dropout=0.0, max_sequence_length=12)
    backbone.get_layer("pooled_dense").trainable = False
    return _compiled(
        keras_hub.models.BertMaskedLM(backbone, preprocessor=None),
        optimizers.AdamW(2e-2),
        metrics=None,
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy()],
        jit_compile=False,
    )


def _published_data(rows):
    """Mask lines of letters as the guide does; once, so that every column sees the same masks."""
    import keras_hub

    letters = [*"abcdefghijklmnopqrstuvwxyz"]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = keras_hub.models.BertTokenizer([*special, *letters], lowercase=True)
    preprocessor = keras_hub.models.BertMaskedLMPreprocessor(
        tokenizer, sequence_length=12, mask_selection_length=3
    )
    random = np.random.default_rng(6)
    lines = [" ".join(random.choice(letters, random.integers(4, 14))) for _ in range(rows)]
    return {"x": tf.data.Dataset.from_tensor_slices(preprocessor(lines)).batch(BATCH), "epochs": 2}


_add(
    "masked language model of KerasHub's guide",
    _published_bert,
    _published_data,
    tolerance=NEAR_ZERO,
    repeats=True,
)

# Steps and inputs.

_add(
    "steps_per_execution=2",
    _model(steps_per_execution=2),
    promises=dict.fromkeys((OWN_STEP, OWN_STEP_ON_JAX), "-"),  # a loop of `fit` only
)
_add("run_eagerly=True", _model(run_eagerly=True))
_add("jit_compile=True", _model(jit_compile=True))


def _typed_inputs():
    numbers = keras.Input((4,), name="numbers")
    flags = keras.Input((1,), dtype="bool", name="flags")
    words = keras.Input((), dtype="string", name="words")
    looked_up = layers.StringLookup(vocabulary=["0", "1", "2"])(words)
    hidden = layers.Dense(3)(numbers) * keras.ops.cast(flags, "float32")
    inputs = {"numbers": numbers, "flags": flags, "words": words}
    return _compiled(keras.Model(inputs, hidden + layers.Embedding(4, 3)(looked_up)))


def _typed_data(rows):
    features = {"numbers": X, "flags": X[:, :1] > 0, "words": np.array([str(y) for y in Y])}
    dataset = tf.data.Dataset.from_tensor_slices((features, Y)).take(rows)
    return {"x": dataset.batch(BATCH), "epochs": 2}


def _generator_data(rows):
    batches = ((X[:rows][start:][:BATCH], Y[:rows][start:][:BATCH]) for start in (0, BATCH))
    return {"x": batches, "steps_per_epoch": 2}


_add("bool and string features", _typed_inputs, _typed_data, promises=on_jax("-"))
_add("Python generator", data=_generator_data)
_add(
    "weighted metrics, by batch and epoch",
    _model(weighted_metrics=["accuracy", "sparse_categorical_crossentropy"]),
    _data(sample_weight=WEIGHTS),
)
_f1, _top_two = keras.metrics.F1Score, keras.metrics.TopKCategoricalAccuracy
_add(
    "AUC, F1 and top-k metrics",
    lambda: _model(
        _classes,
        layers.Softmax,
        loss="categorical_crossentropy",
        metrics=["auc", _f1(average="macro"), _top_two(2)],
    )(),
    _data(y=ONE_HOT),
)


def _on_batches(model, data):
    x, y = data["x"], data["y"]
    logs = [model.train_on_batch(x[:n], y[:n], return_dict=True) for n in (24, 23, 5, 1)]
    logs.append(model.test_on_batch(x[:5], y[:5], return_dict=True))
    return [*logs, {"predictions": model.predict_on_batch(x[:5])}]


def _fit_and_evaluate(model, data):
    logs = _fit(model, data | {"validation_data": (X[:9], Y[:9])})
    logs.append(model.evaluate(X, Y, batch_size=23, verbose=0, return_dict=True))
    return [*logs, {"predictions": model.predict(X[:9], batch_size=4, verbose=0)}]


_add("train_on_batch, test_on_batch, predict_on_batch", train=_on_batches)
_add("validation, evaluate and predict, uneven", train=_fit_and_evaluate)
