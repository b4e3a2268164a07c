"""What `plan --memory` predicts, and what the device reports at its peak.

python -m tests.accelerator.memory GPT-2 [--rehearse]    # one model, in its own process
"""

import concurrent.futures
import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from tests.accelerator import bert, device, gpt2, resnet
from tests.accelerator.results import Results
from tests.accelerator.speed import size_of
from tests.benchmarks.paired import compared

STEPS = 3
LIMIT = "0.05"  # of the device, where the largest batch is looked for
AT_ONCE = 3
UNIT = 8


def measure(results: Results, *, rehearse: bool) -> None:
    """Measure six models, and the largest batch of one, in processes of their own."""
    flags = ["--rehearse"] if rehearse else []
    at_once = 1 if device.current().platform == "tpu" else AT_ONCE
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        asked = [pool.submit(_asked, name, flags) for name in [*MODELS, "largest batch"]]
        for done in concurrent.futures.as_completed(asked):
            name, found = done.result()
            if found is None:
                results.miss(f"memory, {name}: it failed; see its output.")
            elif found["found"] is None:
                results.miss(
                    f"memory, {name}: predicted {found['predicted']:.3g} "
                    f"{found['unit']}; the device does not report its memory."
                )
            else:
                unit = found["unit"]
                pair = [found["predicted"]], [found["found"]]
                results.add(compared(f"memory, {name}, predicted against found", unit, *pair))


def _asked(name: str, flags: list[str]) -> tuple[str, dict[str, Any] | None]:
    is_limited = name == "largest batch"
    limited = {"XLA_PYTHON_CLIENT_MEM_FRACTION": LIMIT, "XLA_PYTHON_CLIENT_PREALLOCATE": "true"}
    finished = subprocess.run(
        [sys.executable, "-m", "tests.accelerator.memory", name, *flags],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        env=os.environ | (limited if is_limited else {}),
    )
    lines = [line for line in finished.stdout.splitlines() if line.startswith("{")]
    return name, json.loads(lines[-1]) if lines and not finished.returncode else None


# What follows runs in a process of its own.


def _bert(rehearse: bool, **settings: Any) -> tuple[Any, Any]:
    from kdpkit.training import MaskedLMLoop

    size = size_of(bert, rehearse=rehearse)
    loop = MaskedLMLoop(bert.model_of(size), optimizer=bert.optimizer(), **settings)
    return _data(bert.batch_of(size)), loop


def _bert_with_all_logits(rehearse: bool) -> tuple[Any, Any]:
    from kdpkit.training import TrainingLoop

    size = size_of(bert, rehearse=rehearse)
    model = bert.plain_model_of(size)
    loop = TrainingLoop(model, optimizer=bert.optimizer(), loss=bert.loss())
    return _data(bert.batch_of(size)), loop


def _gpt2(rehearse: bool, **settings: Any) -> tuple[Any, Any]:
    size = size_of(gpt2, rehearse=rehearse)
    return _data(gpt2.batch_of(size)), gpt2.loop_of(size, **settings)


def _resnet(rehearse: bool) -> tuple[Any, Any]:
    from kdpkit.training import TrainingLoop

    size = size_of(resnet, rehearse=rehearse)
    optimizer, loss = resnet.compiled_parts()
    loop = TrainingLoop(resnet.model_of(size), optimizer=optimizer, loss=loss)
    return _data(resnet.images_of(size, size.batch)), loop


MODELS: dict[str, Callable[[bool], tuple[Any, Any]]] = {
    "BERT-base": _bert,
    "BERT-base, all logits": _bert_with_all_logits,
    "GPT-2": _gpt2,
    "GPT-2, remat": functools.partial(_gpt2, remat=True),
    "GPT-2, accumulation=4": functools.partial(_gpt2, accumulation=4),
    "ResNet-50": _resnet,
}


def _data(batch: Any) -> Any:
    from tests.accelerator.jax_training import Repeated

    return Repeated(batch, STEPS)


def _predicted(make: Callable[[], tuple[Any, Any]]) -> int:
    """Return the bytes of `kdpkit plan --memory`, for the settings that the loop has."""
    from kdpkit.training.jax._memory import StepMemory

    step = StepMemory(make)
    loop = step._steps.loop
    need = step.need(1, shard="none", accumulation=loop.accumulation, remat=loop.remat)
    need.pop("operations")
    return sum(need.values())


def _of_model(name: str, rehearse: bool) -> dict[str, Any]:
    make = functools.partial(MODELS[name], rehearse)
    data, loop = make()
    loop.fit(data, epochs=1, verbose=0)
    peak = device.peak_bytes()  # before more is compiled
    found = None if peak is None else peak / 2**30
    return {"unit": "GiB", "predicted": _predicted(make) / 2**30, "found": found}


def _largest_batch(rehearse: bool) -> dict[str, Any]:
    """Look for the largest batch of a small BERT that fits, by planning and by trying."""
    from kdpkit import diagnostics
    from kdpkit.diagnostics._doctor.largest_batch import search

    size = bert.SIZES[True] if rehearse else bert.Size(2, 512, 8, 1000, 128, 20, UNIT, STEPS)
    limit = device.bytes_limit()

    def made(examples: int) -> tuple[Any, Any]:
        from kdpkit.training import MaskedLMLoop

        of_size = dataclasses.replace(size, batch=examples)
        loop = MaskedLMLoop(bert.model_of(of_size), optimizer=bert.optimizer())
        return _data(bert.batch_of(of_size)), loop

    def is_planned(units: int) -> bool:
        make = functools.partial(made, UNIT * units)
        return _predicted(make) <= (limit or 2**24)

    data, loop = made(UNIT)
    # Without a limit all that is tried fits.
    most = None if limit else UNIT
    tried = diagnostics.largest_batch(data, model=loop, multiple_of=UNIT, most=most)
    found = tried if limit else None
    return {"unit": "examples", "predicted": UNIT * search(is_planned), "found": found}


def main(name: str, *flags: str) -> None:
    """Print what is predicted and found."""
    rehearse = "--rehearse" in flags
    found = _largest_batch(rehearse) if name == "largest batch" else _of_model(name, rehearse)
    print(json.dumps(found), flush=True)  # noqa: T201 what the other process reads


if __name__ == "__main__":
    main(*sys.argv[1:])
