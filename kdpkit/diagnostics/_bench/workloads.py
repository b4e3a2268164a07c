"""What `kdpkit bench` trains: a small network, BERT tiny, or the caller's own model.

Each function returns a model or a loop that is built and compiled, and a few examples, of which
batches of any size are made. Training is measured, not reading, which `kdpkit.pipelines.measure`
times.
"""

import importlib.util
from typing import Any

import keras
import numpy as np

from kdpkit._internal import checks
from kdpkit.diagnostics import _batch, _packages, _target, _training_step
from kdpkit.training import MaskedLMLoop, TrainingLoop, replica_exact

_EXAMPLES = 64
_SIDE, _CLASSES = 28, 10  # of the images
_VOCABULARY, _TOKENS, _MASKED = 30_522, 128, 19  # of BERT; tokens of an example, 15 % of them


def cnn(strategy: Any, jit: bool | str | None) -> tuple[TrainingLoop, Any]:
    """Make two convolutions and a dense layer for images of 28 x 28, as in `recipes/cnn_fit.py`."""
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
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    loop = TrainingLoop(model, optimizer=optimizer, loss=loss, strategy=strategy, jit=jit)
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (_EXAMPLES, _SIDE, _SIDE, 1), "uint8")
    return loop, (images, random.integers(0, _CLASSES, _EXAMPLES, "int32"))


def bert(strategy: Any, jit: bool | str | None) -> tuple[TrainingLoop, Any]:
    """Make BERT tiny, a masked language model, and full examples, as in `recipes/bert_mlm.py`."""
    if importlib.util.find_spec("keras_hub") is None:
        checks.fail(
            "The workload 'bert' is a model of KerasHub, which is not installed.",
            remedy=_packages.install_hint("keras-hub"),
        )
    import keras_hub

    with strategy.scope():
        backbone = keras_hub.models.BertBackbone(
            vocabulary_size=_VOCABULARY,
            num_layers=2,
            num_heads=2,
            hidden_dim=128,
            intermediate_dim=512,
        )
        model = keras_hub.models.BertMaskedLM(backbone)
        model.backbone.get_layer("pooled_dense").trainable = False  # masked words do not use it
        optimizer = keras.optimizers.AdamW(1e-4)
    return MaskedLMLoop(model, optimizer=optimizer, strategy=strategy, jit=jit), _masked_tokens()


def _masked_tokens() -> Any:
    """Draw tokens, some of which are to be predicted."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, _VOCABULARY, (_EXAMPLES, _TOKENS), "int32")
    positions = random.permuted(np.tile(np.arange(_TOKENS), (_EXAMPLES, 1)), axis=1)
    features = {
        "token_ids": tokens,
        "padding_mask": np.ones_like(tokens),
        "segment_ids": np.zeros_like(tokens),
        "mask_positions": np.sort(positions[:, :_MASKED]).astype("int32"),
    }
    labels = tokens[:, :_MASKED].copy()
    return features, labels, np.ones(labels.shape, "float32")


def of_target(strategy: Any, target: str) -> tuple[keras.Model, Any]:
    """Return the caller's model and its first batch, of a function that returns both."""
    with strategy.scope(), _target.named(target, makes=callable) as given:
        if not _target.has_model(given):
            checks.fail(
                f"`{target}` must be a function that returns (dataset, model), called for "
                "each number of replicas.",
                given=type(given).__name__,
            )
        dataset, model = given
        _training_step.check_model(model)
        return replica_exact(model), _batch.as_arrays(_batch.batches_of(dataset).first)
