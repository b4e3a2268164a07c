"""`kdpkit plan`: what a training needs of each device's memory, and which lines make it fit."""

import argparse

from kdpkit._internal import checks, machine

HELP = "work out the memory of a run, and the cheapest way to make it fit"

EXAMPLE = """\
On JAX. TARGET is a function that returns a dataset, and a model or a
TrainingLoop:

    KERAS_BACKEND=jax kdpkit plan --memory 16GiB train.py:make --replicas 8

Exit code 0: something fits; 1: nothing fits; 2: no such plan is possible."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kdpkit plan --memory LIMIT TARGET [--replicas R]"
    memory = "how `file.py:name` or `module:name` fits devices of this memory, such as 16GiB"
    parser.add_argument(
        "--memory", nargs=2, required=True, metavar=("LIMIT", "TARGET"), help=memory
    )
    replicas = "devices that share a global batch (default: %(default)s)"
    parser.add_argument("--replicas", type=int, default=1, metavar="R", help=replicas)


def run(args: argparse.Namespace) -> int:
    """Print what each device needs; return 0 if it fits in some way, else 1."""
    memory, target = args.memory
    if ":" not in target:
        checks.fail(
            "Memory is planned for a function.",
            target=target,
            remedy="Write `kdpkit plan --memory 16GiB train.py:make --replicas 8`.",
        )
    replicas = checks.integer("replicas", args.replicas)
    machine.split_for_jax(replicas)  # before the target starts it
    from kdpkit.diagnostics._doctor import target as targets

    with targets.named(target) as make:
        from kdpkit import diagnostics  # loads Keras, whose backend the target has chosen

        plan = diagnostics.plan_memory(make, memory=memory, replicas=replicas)
    print(plan)
    return 0 if plan.chosen else 1
