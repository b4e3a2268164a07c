"""GPT-2 124M, bfloat16: causal language model, sequences of 1,024 tokens, no dropout.

That is how it is pretrained today (nanoGPT, llm.c), and Keras and PyTorch compute its attention by
fused kernels. KerasHub's layers pass a mask to the kernel, which then computes all products; the
same model of Keras' own layers names no mask, and the kernel computes half of them.
"""

import dataclasses
from typing import Any

import numpy as np

from tools.accelerator.bert import compiled_parts
from tools.accelerator.speed import Work


@dataclasses.dataclass(frozen=True)
class Size:
    """The model, and an epoch."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    batch: int
    steps: int


SIZES = {
    False: Size(12, 768, 12, 50_257, 1024, batch=16, steps=10),
    True: Size(1, 16, 2, 50, 8, batch=4, steps=2),
}
INPUTS = ("token_ids", "padding_mask")
MORE: dict[str, Any] = {
    "kdpkit, Keras' layers and no mask": {"model_of": "causal"},
    "kdpkit with dropout 0.1": {"model_of": "dropping"},
    "kdpkit with remat": {"remat": True},
}


def work(size: Size) -> Work:
    """Count tokens, and the products: dense layers, attention to all positions, and logits.

    Half of the attention's products are with positions that a causal model does not see.
    """
    width, tokens = size.width, size.batch * size.length * size.steps
    of_layer = 2 * 12 * width**2 + 4 * size.length * width
    of_token = size.layers * of_layer + 2 * width * size.vocabulary
    return Work("tokens", tokens, 3.0 * of_token * tokens)


def batch_of(size: Size) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return random tokens, and after each the next one."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, size.vocabulary, (size.batch, size.length + 1), "int32")
    seen = np.ascontiguousarray(tokens[:, :-1])
    return {"token_ids": seen, "padding_mask": np.ones_like(seen)}, tokens[:, 1:].copy()


def model_of(size: Size, dropout: float = 0.0) -> Any:
    """Build the KerasHub model up to its hidden states, from scratch."""
    import keras
    import keras_hub

    keras.config.set_dtype_policy("mixed_bfloat16")
    keras.utils.set_random_seed(0)
    return keras_hub.models.GPT2Backbone(
        vocabulary_size=size.vocabulary,
        num_layers=size.layers,
        num_heads=size.heads,
        hidden_dim=size.width,
        intermediate_dim=4 * size.width,
        max_sequence_length=size.length,
        dropout=dropout,
    )


def causal_model_of(size: Size) -> Any:
    """Build the same of Keras' layers, whose attention is told that it is causal, by no mask."""
    import keras
    from keras import layers

    keras.config.set_dtype_policy("mixed_bfloat16")
    keras.utils.set_random_seed(0)
    inputs = {name: keras.Input((size.length,), dtype="int32", name=name) for name in INPUTS}
    positions = keras.ops.arange(size.length)
    table = layers.ReversibleEmbedding(size.vocabulary, size.width, name="token_embedding")
    x = table(inputs["token_ids"])
    x += layers.Embedding(size.length, size.width)(positions)
    for _ in range(size.layers):
        attended = layers.LayerNormalization(epsilon=1e-5)(x)
        attention = layers.MultiHeadAttention(size.heads, size.width // size.heads)
        x += attention(attended, attended, use_causal_mask=True)
        wide = layers.Dense(4 * size.width, "gelu")(layers.LayerNormalization(epsilon=1e-5)(x))
        x += layers.Dense(size.width)(wide)
    return keras.Model(inputs, layers.LayerNormalization(epsilon=1e-5)(x))


def dropping_model_of(size: Size) -> Any:
    """Build it with dropout, also in its attention, which no kernel of Keras computes."""
    return model_of(size, dropout=0.1)


MODELS = {"hub": model_of, "causal": causal_model_of, "dropping": dropping_model_of}


def plain_model_of(size: Size, model_of: str = "hub") -> Any:
    """Build the same model with the logits of every position."""
    import keras

    backbone = MODELS[model_of](size)
    table = backbone.get_layer("token_embedding")
    return keras.Model(backbone.input, table(backbone.output, reverse=True))


def exact_of(size: Size, model_of: str = "hub", *, remat: bool = False) -> Any:
    """Make the kit's model, whose loss goes over the vocabulary in chunks (as recipes/lm.py)."""
    from kdpkit import training

    model = training.without_logits(plain_model_of(size, model_of))
    model = training.replica_exact(training.remat(model) if remat else model)
    model.compile(*compiled_parts())
    return model


def torch_of(size: Size) -> tuple[Any, ...]:
    """Return the same in PyTorch: the model, its loss, a batch and what makes the optimizer."""
    import torch
    import transformers

    from tools.accelerator import torch_training

    config = transformers.GPT2Config(
        vocab_size=size.vocabulary,
        n_embd=size.width,
        n_layer=size.layers,
        n_head=size.heads,
        n_positions=size.length,
        attn_implementation="sdpa",
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    )

    def loss_of(model: Any, ids: Any, labels: Any) -> Any:
        logits = model(ids, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    x, labels = batch_of(size)
    batch = [x["token_ids"].astype("int64"), labels.astype("int64")]
    return transformers.GPT2LMHeadModel(config), loss_of, batch, torch_training.adamw
