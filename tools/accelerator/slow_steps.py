"""Whether what `kdpkit doctor` calls slow is found here, and is faster or smaller once mended."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from tools.accelerator import gpt2
from tools.accelerator.jax_training import Repeated
from tools.accelerator.results import Results
from tools.benchmarks.paired import compared

SIZES = {
    False: gpt2.Size(4, 768, 12, 50_257, 1024, batch=16, steps=10),
    True: gpt2.Size(1, 64, 16, 8192, 512, batch=2, steps=2),
}
WIDTHS = {False: 8192, True: 64}  # where float32 is the fault
BATCHES = {False: 2048, True: 64}  # which are not small, of 4096 numbers each
Make = Callable[[], tuple[Any, Any]]


def measure(results: Results, *, rehearse: bool) -> None:
    """Measure a program that has a fault, and its twin, for each rule."""
    from kdpkit.diagnostics import check_speed, plan_memory
    from kdpkit.diagnostics._doctor import speed

    if rehearse:
        speed._ROUNDS = 1
    for rule, pair in _pairs(rehearse=rehearse).items():
        rates, found = [], []
        for make in pair:
            data, trainer = make()
            report = check_speed(data, model=trainer, seconds=0.1 if rehearse else 1.0)
            rates.append(data.examples / report.step_seconds)
            found.append(rule in {finding.rule for finding in report.findings})
        if found != [True, False]:
            results.miss(f"doctor, {rule}: found in the fault and in its twin: {found}.")
        what = f"doctor, {rule}: the twin, against the fault"
        results.add(compared(what, "examples/s", rates[1:], rates[:1]))
        if rule in ("attention", "logits"):
            plans = [plan_memory(make, memory="1GiB") for make in pair]
            gib = [plan.uses[0].total / 2**30 for plan in plans]
            results.add(compared(what, "GiB", gib[1:], gib[:1], goal=("<=", 1.0)))


def _pairs(*, rehearse: bool) -> dict[str, tuple[Make, Make]]:
    """Return what makes the data and a model, with the fault and without."""
    language = functools.partial(_language_model, SIZES[rehearse])
    wide = functools.partial(_dense_model, WIDTHS[rehearse], 2048)
    dense = functools.partial(_dense_model, 4096)
    return {
        "attention": (lambda: language(model_of="dropping"), language),
        "logits": (lambda: language(all_logits=True), language),
        "float32": (lambda: wide("float32"), lambda: wide("mixed_bfloat16")),
        "small-batch": (lambda: dense(8), lambda: dense(BATCHES[rehearse])),
    }


class _Data(Repeated):
    """One batch over and over, which knows its size."""

    def __init__(self, batch: Any, examples: int) -> None:
        super().__init__(batch, steps=10)
        self.examples = examples


def _language_model(
    size: gpt2.Size, *, model_of: str = "hub", all_logits: bool = False
) -> tuple[Any, Any]:
    data = _Data(gpt2.batch_of(size), size.batch)
    if not all_logits:
        return data, gpt2.exact_of(size, model_of)
    model = gpt2.plain_model_of(size)
    model.compile(*gpt2.compiled_parts())
    return data, model


def _dense_model(width: int, examples: int, policy: str = "float32") -> tuple[Any, Any]:
    import keras

    keras.config.set_dtype_policy(policy)
    model = keras.Sequential([keras.Input((width,)), keras.layers.Dense(width)])
    model.compile("adam", "mse")
    numbers = np.zeros((examples, width), "float32")
    return _Data((numbers, numbers), examples), model
