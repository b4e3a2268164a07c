"""BERT-base, bfloat16: masked language model, packed sequences of 128 tokens."""

import dataclasses
from typing import Any

import numpy as np

from tests.accelerator.speed import OURS, Work

RATE = 1e-4


@dataclasses.dataclass(frozen=True)
class Size:
    """The model, and an epoch."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    masked: int
    batch: int
    steps: int


SIZES = {
    False: Size(12, 768, 12, 30_522, 128, 20, batch=256, steps=20),
    True: Size(2, 32, 2, 500, 16, 3, batch=4, steps=2),
}


def work(size: Size) -> Work:
    """Count tokens, and the products: dense layers, attention, and the head where it is masked."""
    width, tokens = size.width, size.batch * size.length * size.steps
    of_token = size.layers * (2 * 12 * width**2 + 4 * size.length * width)
    of_masked = 2 * width * (width + size.vocabulary)
    masked = size.batch * size.masked * size.steps
    return Work("tokens", tokens, 3.0 * (of_token * tokens + of_masked * masked))


def batch_of(size: Size) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Return sequences that are full, as packing makes them, with random tokens."""
    random = np.random.default_rng(0)
    shape = (size.batch, size.length)
    order = random.permuted(np.tile(np.arange(size.length), (size.batch, 1)), axis=1)
    x = {
        "token_ids": random.integers(0, size.vocabulary, shape, "int32"),
        "segment_ids": np.zeros(shape, "int32"),
        "padding_mask": np.ones(shape, "int32"),
        "mask_positions": np.sort(order[:, : size.masked]).astype("int32"),
    }
    labels = random.integers(0, size.vocabulary, (size.batch, size.masked), "int32")
    return x, labels, np.ones(labels.shape, "float32")


def model_of(size: Size, policy: str = "mixed_bfloat16", dropout: float = 0.1) -> Any:
    """Build the KerasHub model, from scratch."""
    import keras
    import keras_hub

    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=size.vocabulary,
        num_layers=size.layers,
        num_heads=size.heads,
        hidden_dim=size.width,
        intermediate_dim=4 * size.width,
        max_sequence_length=size.length,
        dropout=dropout,
    )
    backbone.get_layer("pooled_dense").trainable = False
    return keras_hub.models.BertMaskedLM(backbone)


def plain_model_of(size: Size, **settings: Any) -> Any:
    """Build the same without KerasHub's own `fit`, which wants Grain or TensorFlow."""
    import keras

    model = model_of(size, **settings)
    return keras.Model(model.input, model.output)


def loss() -> Any:
    """All logits, in the way of the published guide."""
    import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def optimizer() -> Any:
    """AdamW, for all."""
    import keras

    return keras.optimizers.AdamW(RATE)


def _kdpkit(size: Size, **settings: Any) -> Any:
    from kdpkit.training import MaskedLMLoop
    from tests.accelerator import jax_training

    loop = MaskedLMLoop(model_of(size), optimizer=optimizer(), **settings)
    return jax_training.by_loop(loop, batch_of(size), size.steps)


def _stock_fit(size: Size) -> Any:
    from tests.accelerator import jax_training

    model = plain_model_of(size)
    model.compile(optimizer(), loss())
    return jax_training.by_fit(model, batch_of(size), size.steps)


def _by_hand(size: Size) -> Any:
    from tests.accelerator import jax_training

    model = plain_model_of(size)
    return jax_training.by_hand(model, optimizer(), loss(), batch_of(size), size.steps)


def _torch(size: Size, *, compiled: bool) -> Any:
    import torch
    import transformers

    from tests.accelerator import torch_training

    config = transformers.BertConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.width,
        max_position_embeddings=size.length,
        attn_implementation="sdpa",
    )
    model = transformers.BertForMaskedLM(config)

    def loss_of(model: Any, ids: Any, positions: Any, labels: Any) -> Any:
        hidden = model.bert(ids).last_hidden_state
        index = positions[..., None].expand(-1, -1, hidden.shape[-1])
        logits = model.cls(hidden.gather(1, index))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    x, labels, _ = batch_of(size)
    batch = [x["token_ids"], x["mask_positions"].astype("int64"), labels.astype("int64")]
    update = torch_training.adamw
    return torch_training.trained(model, loss_of, batch, size.steps, update, compiled=compiled)


WAYS = {
    OURS: _kdpkit,
    "stock fit": _stock_fit,
    "a bare JAX loop": _by_hand,
    "PyTorch compiled": lambda size: _torch(size, compiled=True),
    "PyTorch eager": lambda size: _torch(size, compiled=False),
}
