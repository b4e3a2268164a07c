"""What `kdpkit bench` trains: a small network, BERT tiny, or the caller's own model.

Rows are made once and trained on over and over, so that training is measured and not the reading of
data, which `kdpkit.pipelines.measure` times.
"""

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

from kdpkit import _checks
from kdpkit.diagnostics import _packages

Arrays = tuple[Any, ...]  # x, y and perhaps sample weights

_SIDE, _CLASSES = 28, 10  # of the images
_PIECES, _TOKENS, _SLOTS = 30_522, 128, 19  # BERT's vocabulary, tokens in a row, 15 % of them


@dataclasses.dataclass(frozen=True)
class Workload:
    """Something to train.

    Attributes:
        rows: Gives so many rows.
        row_bytes: Of one.
        fit: `fit` of a model or a loop that is built and compiled.
        is_decided: Tells whether the choice of XLA is made, for which the first steps may serve.
        batch_size: Rows of a batch where none are asked for: those of the caller's own.
    """

    rows: Callable[[int], Arrays]
    row_bytes: int
    fit: Callable[..., Any]
    is_decided: Callable[[], bool]
    batch_size: int = 32


def cnn(strategy: Any, jit: Any) -> Workload:
    """Two convolutions and a dense layer on images of 28 x 28, as in `recipes/cnn_fit.py`."""
    import keras
    import numpy as np

    from kdpkit.training import TrainingLoop

    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((_SIDE, _SIDE, 1), dtype="uint8"),
                keras.layers.Rescaling(1 / 255),
                keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
                keras.layers.MaxPooling2D(),
                keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
                keras.layers.MaxPooling2D(),
                keras.layers.Flatten(),
                keras.layers.Dropout(0.25),
                keras.layers.Dense(128, activation="relu"),
                keras.layers.Dense(_CLASSES),
            ]
        )
        optimizer = keras.optimizers.Adam(1e-3)
    loop = TrainingLoop(
        model,
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        strategy=strategy,
        jit=jit,
    )

    def rows(count: int) -> Arrays:
        random = np.random.default_rng(0)
        images = random.integers(0, 256, (count, _SIDE, _SIDE, 1), "uint8")
        return images, random.integers(0, _CLASSES, count, "int32")

    return Workload(rows, _SIDE * _SIDE + 4, loop.fit, lambda: loop.jit is not None)


def bert(strategy: Any, jit: Any) -> Workload:
    """BERT tiny as a masked language model on full rows, as in `recipes/bert_mlm.py`."""
    if importlib.util.find_spec("keras_hub") is None:
        _checks.refuse(
            "The workload 'bert' is a model of KerasHub, which is not installed.",
            remedy=_packages.way_to("keras-hub"),
        )
    import keras
    import keras_hub
    import numpy as np

    from kdpkit.training import MaskedLMLoop

    with strategy.scope():
        backbone = keras_hub.models.BertBackbone(
            vocabulary_size=_PIECES,
            num_layers=2,
            num_heads=2,
            hidden_dim=128,
            intermediate_dim=512,
        )
        model = keras_hub.models.BertMaskedLM(backbone)
        model.backbone.get_layer("pooled_dense").trainable = False  # masked words do not use it
        optimizer = keras.optimizers.AdamW(1e-4)
    loop = MaskedLMLoop(model, optimizer=optimizer, strategy=strategy, jit=jit)

    def rows(count: int) -> Arrays:
        random = np.random.default_rng(0)
        tokens = random.integers(0, _PIECES, (count, _TOKENS), "int32")
        positions = np.sort(random.permuted(np.tile(np.arange(_TOKENS), (count, 1)), axis=1))
        features = {
            "token_ids": tokens,
            "padding_mask": np.ones_like(tokens),
            "segment_ids": np.zeros_like(tokens),
            "mask_positions": positions[:, :_SLOTS].astype("int32"),
        }
        labels = tokens[:, :_SLOTS].copy()
        return features, labels, np.ones(labels.shape, "float32")

    row_bytes = 3 * 4 * _TOKENS + 3 * 4 * _SLOTS + 2 * 8 * _TOKENS  # the last for the positions
    return Workload(rows, row_bytes, loop.fit, lambda: loop.jit is not None)


def of_target(strategy: Any, target: str) -> Workload:
    """Give what a function of the caller's gives: `(dataset, model)`, trained by `fit`."""
    from kdpkit.diagnostics import _target

    with strategy.scope(), _target.named(target, makes=callable) as given:
        if not (isinstance(given, tuple) and len(given) == 2 and hasattr(given[1], "fit")):
            _checks.refuse(
                f"`{target}` must be a function that gives (dataset, model), called for each "
                "number of replicas.",
                given=type(given).__name__,
            )
        return _of_training(*given)


def _of_training(dataset: Any, model: Any) -> Workload:
    import keras
    import numpy as np

    from kdpkit.batches import rows_of
    from kdpkit.diagnostics import _batch
    from kdpkit.training import replica_exact

    if not getattr(model, "compiled", False):
        _checks.refuse(
            "The model is not compiled, so it has no training step.",
            model=getattr(model, "name", type(model).__name__),
            remedy="Call `model.compile(optimizer, loss)` in the function.",
        )
    batch = keras.tree.map_structure(np.asarray, _batch.batches_of(dataset).first)
    batch = (
        tuple(part for part in batch if part is not None) if isinstance(batch, tuple) else (batch,)
    )
    size = rows_of(batch)

    def rows(count: int) -> Arrays:
        return keras.tree.map_structure(lambda part: part[np.arange(count) % size], batch)

    def fit(*args: Any, **settings: Any) -> Any:
        return model.fit(*args, **settings, shuffle=False)

    row_bytes = sum(part.nbytes for part in keras.tree.flatten(batch)) // size
    replica_exact(model)
    return Workload(rows, row_bytes, fit, lambda: True, size)
