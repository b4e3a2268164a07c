"""GPT-2 124M, 4,096 tokens, bfloat16: as gpt2.py, with sequences in which attention is half."""

import dataclasses

from tools.accelerator import gpt2
from tools.accelerator.gpt2 import (
    batch_of,
    compiled_parts,
    exact_of,
    plain_model_of,
    torch_of,
    work,
)

__all__ = ["batch_of", "compiled_parts", "exact_of", "plain_model_of", "torch_of", "work"]

SIZES = {
    False: dataclasses.replace(gpt2.SIZES[False], length=4096, batch=4),
    True: dataclasses.replace(gpt2.SIZES[True], length=16),
}
AGAINST = ("kdpkit", "stock fit", "PyTorch compiled")
MORE = {name: gpt2.MORE[name] for name in ("kdpkit, Keras' layers and no mask",)}
