"""BERT-base, bfloat16: masked language model, packed sequences of 128 tokens."""

import dataclasses
from typing import Any

import numpy as np

from tools.accelerator.speed import Work

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
    True: Size(1, 16, 2, 50, 8, 2, batch=4, steps=2),
}
MORE: dict[str, Any] = {}


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


def compiled_parts() -> tuple[Any, Any]:
    """Return AdamW, and the loss of all logits, in the way of the published guide."""
    import keras

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return keras.optimizers.AdamW(RATE), loss


def exact_of(size: Size, **settings: Any) -> Any:
    """Make the kit's model, whose loss goes over the vocabulary in chunks."""
    from kdpkit import training

    model = training.replica_exact(training.without_logits(plain_model_of(size, **settings)))
    model.compile(*compiled_parts())
    return model


def torch_of(size: Size) -> tuple[Any, ...]:
    """Return the same in PyTorch: the model, its loss, a batch and what makes the optimizer."""
    import torch
    import transformers

    from tools.accelerator import torch_training

    config = transformers.BertConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.width,
        max_position_embeddings=size.length,
        attn_implementation="sdpa",
    )

    def loss_of(model: Any, ids: Any, positions: Any, labels: Any) -> Any:
        hidden = model.bert(ids).last_hidden_state
        index = positions[..., None].expand(-1, -1, hidden.shape[-1])
        logits = model.cls(hidden.gather(1, index))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    x, labels, _ = batch_of(size)
    batch = [x["token_ids"], x["mask_positions"].astype("int64"), labels.astype("int64")]
    return transformers.BertForMaskedLM(config), loss_of, batch, torch_training.adamw
