"""What `plan --memory` predicts, and what the device reports at its peak.

python -m tools.accelerator.memory GPT-2 [--rehearse]    # one model, in its own process
"""

import concurrent.futures
import json
import subprocess
import sys
from typing import Any

from tools.accelerator import bert, device, gpt2, resnet
from tools.accelerator.results import Results
from tools.accelerator.speed import size_of
from tools.benchmarks.paired import compared

STEPS = 3
AT_ONCE = 3
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "BERT-base": (bert, {}),
    "GPT-2": (gpt2, {}),
    "GPT-2, remat": (gpt2, {"remat": True}),
    "ResNet-50": (resnet, {}),
}


def measure(results: Results, *, rehearse: bool) -> None:
    """Measure all models, in processes of their own."""
    flags = ["--rehearse"] if rehearse else []
    at_once = 1 if device.current().platform == "tpu" else AT_ONCE
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        asked = [pool.submit(_asked, name, flags) for name in MODELS]
        for done in concurrent.futures.as_completed(asked):
            name, found = done.result()
            if found is None:
                results.miss(f"memory, {name}: it failed; see its output.")
            elif found["found"] is None:
                predicted = f"predicted {found['predicted']:.3g} GiB"
                results.miss(f"memory, {name}: {predicted}; the device does not report its memory.")
            else:
                pair = [found["predicted"]], [found["found"]]
                results.add(compared(f"memory, {name}, predicted against found", "GiB", *pair))


def _asked(name: str, flags: list[str]) -> tuple[str, dict[str, Any] | None]:
    finished = subprocess.run(
        [sys.executable, "-m", "tools.accelerator.memory", name, *flags],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    lines = [line for line in finished.stdout.splitlines() if line.startswith("{")]
    return name, json.loads(lines[-1]) if lines and not finished.returncode else None


# What follows runs in a process of its own.


def main(name: str, *flags: str) -> None:
    """Print the bytes of `kdpkit plan --memory` for a model, and what its steps took."""
    from kdpkit.training.jax._memory import StepMemory
    from tools.accelerator.jax_training import Repeated

    workload, settings = MODELS[name]
    size = size_of(workload, rehearse="--rehearse" in flags)

    def make() -> tuple[Any, Any]:
        return workload.batch_of(size), workload.exact_of(size, **settings)

    batch, model = make()
    model.fit(Repeated(batch, STEPS), shuffle=False, verbose=0)
    peak = device.peak_bytes()  # before more is compiled
    need = StepMemory(make).need(1, shard="none", remat=settings.get("remat", False))
    need.pop("operations")
    found = None if peak is None else peak / 2**30
    figures = {"predicted": sum(need.values()) / 2**30, "found": found}
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
