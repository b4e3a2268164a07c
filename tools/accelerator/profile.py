"""Where the time of a step goes on the device, by the names of its kernels and operations.

python -m tools.accelerator.profile gpt2 [--rehearse]    # one model, in its own process
"""

import collections
import importlib
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from tools.accelerator import device
from tools.accelerator.results import Results
from tools.accelerator.speed import size_of
from tools.benchmarks.paired import Row, Spread

MODELS = ("gpt2", "bert", "resnet")
# The first that is in a name counts; what is in none is arithmetic of single numbers, fused.
KINDS = {
    "attention": "fmha|sdpa|flash|attention",
    "products": "gemm|nvjet|cublas|cutlass|dot|conv(?!ert)|xmma|wgrad|dgrad|winograd|ynn",
    "random numbers": "rng|threefry|random|shift|xor",
    "copies and transposes": "memcpy|memset|copy|transpose|concatenate|slice",
    "casts": "convert",
    "sums and softmaxes": "reduce|softmax|norm",
}
OTHER = "other fused arithmetic, and the optimizer's"
IDLE = "no kernel: the host, or waiting"


def measure(results: Results, *, rehearse: bool) -> None:
    """Profile the models, in processes of their own."""
    flags = ["--rehearse"] if rehearse else []
    for model in MODELS:
        command = [sys.executable, "-m", "tools.accelerator.profile", model, *flags]
        finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        lines = [line for line in finished.stdout.splitlines() if line.startswith("{")]
        if finished.returncode or not lines:
            results.miss(f"profile, {model}: it failed; see its output.")
            continue
        found = json.loads(lines[-1])
        for kind, milliseconds in found["kinds"].items():
            spread = Spread.of([milliseconds])
            results.add(Row(f"profile of {model}: {kind}", "ms a step", spread))
        results.miss(f"profile, {model}, what took longest: {'; '.join(found['longest'])}.")


# What follows runs in a process of its own.


def main(model: str, *flags: str) -> None:
    """Print the milliseconds of a step by kind, and the names that took longest."""
    import jax

    from tools.accelerator import jax_training

    workload = importlib.import_module(f"tools.accelerator.{model}")
    size = size_of(workload, rehearse="--rehearse" in flags)
    batch = workload.batch_of(size)
    epoch = jax_training.by_fit(workload.exact_of(size), batch, size.steps)
    epoch()  # compiles
    epoch()
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            start = time.perf_counter()
            epoch()
            seconds = time.perf_counter() - start
        (file,) = pathlib.Path(directory).rglob("*.xplane.pb")
        names: collections.Counter[str] = collections.Counter()
        for name, nanoseconds in _operations(file):
            names[name] += nanoseconds
    kinds: collections.Counter[str] = collections.Counter()
    for name, nanoseconds in names.items():
        kinds[_kind(name)] += nanoseconds / 1e6 / size.steps
    busy = kinds.total()
    shown = {kind: kinds[kind] for kind in (*KINDS, OTHER)}
    shown[IDLE] = max(0.0, 1e3 * seconds / size.steps - busy)
    longest = [f"{name} {ns / 1e6 / size.steps:.2f} ms" for name, ns in names.most_common(12)]
    print(json.dumps({"kinds": shown, "longest": longest}), flush=True)


def _operations(file: pathlib.Path) -> Iterator[tuple[str, float]]:
    """Yield the operations of XLA that ran, each with its kernel, and their nanoseconds."""
    from jax.profiler import ProfileData

    is_cpu = device.current().platform == "cpu"
    for plane in ProfileData.from_file(str(file)).planes:
        if plane.name.startswith("/host:CPU" if is_cpu else "/device:"):
            for line in plane.lines:
                # On a CPU threads wait for each other in what is no operation.
                if line.name.startswith(("tf_XLA", "Stream", "XLA Ops")):
                    for event in line.events:
                        operation = dict(event.stats).get("hlo_op")
                        if operation:
                            yield f"{operation} {event.name}"[:80], event.duration_ns


def _kind(name: str) -> str:
    return next((kind for kind, words in KINDS.items() if re.search(words, name.lower())), OTHER)


if __name__ == "__main__":
    main(*sys.argv[1:])
