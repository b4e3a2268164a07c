"""What XLA makes of a step for an H100 or a TPU that is not there: its memory, and what it moves.

    python -m venv ahead && ahead/bin/pip install -e ".[jax]" libtpu \
        jax-cuda12-plugin jax-cuda12-pjrt                # of the same version as JAX
    ahead/bin/python -m tools.accelerator.ahead h100 gpt2
    ahead/bin/python -m tools.accelerator.ahead v5e:2x2x1 resnet

It compiles, and runs nothing. Bytes are those that each kernel reads and writes, as if no cache
held any; so they compare two programs, and are no times. For products a GPU that is there chooses
other kernels, which it measures.
"""

import argparse
import collections
import importlib
import math
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

WORKLOADS = ("gpt2", "gpt2_long", "bert", "resnet")
_H100 = pathlib.Path(__file__).with_name("h100.txtpb")  # of openxla/xla, target_config/specs
_SIZES = {"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8}
_ARRAY = re.compile(r"\b(pred|bf16|f16|f32|f64|[su](?:8|16|32|64))\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*)$")
_FREE = ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while", "after-all")


class Instruction(NamedTuple):
    """One line of a computation: what it returns, computes, and from what."""

    bytes: int
    opcode: str
    operands: list[str]
    text: str


def main(argv: list[str] | None = None) -> None:
    """Print a table of the kinds of kernels of a step, and the memory that the step takes."""
    parser = argparse.ArgumentParser(prog="python -m tools.accelerator.ahead")
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument("device", help="h100, or a topology of TPUs such as v5e:2x2x1")
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--settings", default="", help="of the model: model_of=causal,remat=True")
    args = parser.parse_args(argv)
    os.environ |= {"JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax", "TPU_SKIP_MDS_QUERY": "1"}
    os.environ |= {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"}
    os.environ |= {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    pairs = [pair.split("=") for pair in args.settings.split(",") if pair]
    settings = {name: int(value) if value.isdigit() else value for name, value in pairs}
    program = compiled(args.device, args.workload, settings)
    memory = program.memory_analysis()
    kept, held = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    print(f"variables and batch {kept / 2**30:.2f} GiB, and while it computes {held / 2**30:.2f}")
    moved, count = kinds(program.as_text())
    for kind, size in moved.most_common():
        share = size / moved.total()
        print(f"{kind:30} {size / 1e9:8.1f} GB {share:6.1%} {count[kind]:6,} kernels")
    print(f"{'all':30} {moved.total() / 1e9:8.1f} GB {count.total():14,} kernels")


def compiled(device: str, name: str, settings: dict[str, Any]) -> Any:
    """Compile the step of the kit's model for one device of a topology."""
    import jax
    import numpy as np
    from jax.experimental import topologies

    if device == "h100":
        options = {"target_config": _H100.read_text(), "topology": "1x1x1"}
        described = topologies.get_topology_desc("h100", platform="cuda", **options)
        _trace_for_cudnn()
    else:
        described = topologies.get_topology_desc(device, platform="tpu")
    from kdpkit.training.jax._memory import StepMemory

    workload = importlib.import_module(f"tools.accelerator.{name}")
    size = workload.SIZES[False]
    step = StepMemory(lambda: (workload.batch_of(size), workload.exact_of(size, **settings)))
    mesh = jax.sharding.Mesh(np.array(described.devices[:1]), ("batch",))
    return step.compiled(mesh, remat=settings.get("remat", False))[0]


def _trace_for_cudnn() -> None:
    """Have JAX and Keras take the GPU that is not there for one with cuDNN."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn
    from keras.src.backend.jax import nn

    cudnn.check_cudnn_version = lambda: 91000
    cudnn.check_compute_capability = lambda _: True
    nn._can_use_flash_attention = lambda *_, **__: True


def kinds(text: str) -> tuple[collections.Counter[str], collections.Counter[str]]:
    """Return the bytes that kernels of each kind move, and how many are launched."""
    computations = dict(_computations(text))
    (entry,) = re.findall(r"^ENTRY %?([\w.-]+)", text, re.M)
    moved: collections.Counter[str] = collections.Counter()
    count: collections.Counter[str] = collections.Counter()

    def add(name: str, times: int) -> None:
        instructions = computations[name]
        for each in instructions.values():
            called = re.search(r"(?:calls|body)=%?([\w.-]+)", each.text)
            if each.opcode == "while" and called:
                trips = re.search(r'known_trip_count":\{"n":"(\d+)', each.text)
                add(called[1], times * int(trips[1]) if trips else times)
            elif each.opcode not in _FREE and not each.opcode.endswith("-done"):
                inside = computations.get(called[1], {}) if called else {}
                kind = _kind(each, inside)
                read = sum(instructions[name].bytes for name in each.operands)
                moved[kind] += times * (each.bytes + read)
                count[kind] += times

    add(entry, 1)
    return moved, count


def _computations(text: str) -> Iterator[tuple[str, dict[str, Instruction]]]:
    for block in re.split(r"\n\n+", text.strip()):
        head, *lines = block.splitlines()
        name = re.match(r"(?:ENTRY )?%?([\w.-]+) \(", head)
        if name:
            yield name[1], {found[0]: found[1] for found in filter(None, map(_parsed, lines))}


def _parsed(line: str) -> tuple[str, Instruction] | None:
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    called = re.search(r" ([a-z][\w-]*)\(", match[2])
    if called is None:
        return None
    size = sum(map(_size, _ARRAY.findall(match[2][: called.start()])))
    arguments = match[2][called.end() :].partition(")")[0]
    return match[1], Instruction(size, called[1], re.findall(r"%([\w.-]+)", arguments), match[2])


def _size(array: tuple[str, str]) -> int:
    kind, dims = array
    number = _SIZES.get(kind) or int(kind[1:]) // 8
    return number * math.prod(int(size) for size in dims.split(",") if size)


def _kind(each: Instruction, inside: dict[str, Instruction]) -> str:
    """Say what a kernel is for, by what it has in it."""
    opcodes = collections.Counter(part.opcode for part in inside.values()) or {each.opcode: 1}
    kernel = " ".join(re.findall(r'(?:custom_call_target=|"kind":)"([^"]*)"', each.text))
    if re.search("fmha|flash|attention", kernel):
        return "fused attention"
    if {"dot", "convolution"} & {*opcodes} or re.search("gemm|conv|cublas", kernel):
        return "products"
    if opcodes.get("xor", 0) >= 8 or "rng-bit-generator" in opcodes:
        return "random numbers"
    updated = _ARRAY.findall(each.text.partition("fusion(")[0])
    if each.text.startswith("(") and updated.count(updated[0]) >= 3 and updated[0][0] == "f32":
        return "updates of the optimizer"
    if "reduce" in opcodes or "reduce-window" in opcodes:
        return "sums"
    arithmetic = {*opcodes} - {"parameter", "bitcast", "constant", "broadcast", "tuple"}
    if arithmetic <= {"copy", "transpose", "slice", "concatenate", "pad", "copy-start", "reshape"}:
        return "copies and transposes"
    return "casts" if arithmetic == {"convert"} else "other arithmetic"


if __name__ == "__main__":
    main()
