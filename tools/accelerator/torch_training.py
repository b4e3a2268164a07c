"""An epoch on one batch over and over, by PyTorch, eager or compiled."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def trained(
    model: Any,
    loss_of: Callable[..., Any],
    batch: list[np.ndarray],
    steps: int,
    optimizer: Callable[[Any], Any],
    *,
    compiled: bool,
) -> Callable[[], None]:
    """Return an epoch in bfloat16, as PyTorch's documentation has it: `autocast`, float32 weights.

    Args:
        model: A module.
        loss_of: A function of the module and the tensors of a batch; it is compiled with it.
        batch: Arrays, moved to the device in every step, as the other contestants do.
        steps: In an epoch.
        optimizer: Makes one for some parameters.
        compiled: Whether `torch.compile` compiles module and loss.
    """
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    model.to(_DEVICE).train()
    update = optimizer(model.parameters())
    forward = torch.compile(loss_of) if compiled else loss_of
    host = [torch.from_numpy(np.ascontiguousarray(part)) for part in batch]
    if _DEVICE == "cuda":
        host = [part.pin_memory() for part in host]

    def epoch() -> None:
        for _ in range(steps):
            parts = [part.to(_DEVICE, non_blocking=True) for part in host]
            with torch.autocast(_DEVICE, torch.bfloat16):
                loss = forward(model, *parts)
            loss.backward()
            update.step()
            update.zero_grad(set_to_none=True)
        if not np.isfinite(loss.item()):
            raise FloatingPointError("The loss is not finite.")

    return epoch


def adamw(parameters: Any) -> Any:
    """AdamW with the settings of the Keras contestants, in one kernel where that is possible."""
    return torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.004, fused=_DEVICE == "cuda")


def momentum(parameters: Any) -> Any:
    """SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def peak_bytes() -> int | None:
    """Return the peak of PyTorch's memory on the GPU."""
    return torch.cuda.max_memory_allocated() if _DEVICE == "cuda" else None
