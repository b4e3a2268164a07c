"""`kdpkit plan`: the numbers of a run on several replicas, or its memory."""

import argparse
import dataclasses

from kdpkit._internal import checks, machine

HELP = "work out batches, steps, learning rates or memory of a run on several replicas"
_REQUIRED = ("examples", "per_replica_batch_size", "base_learning_rate")

EXAMPLE = """\
One line for each number of replicas, then what is wrong with the plan and how
to fix it:

    kdpkit plan --examples 60000 --per-replica-batch-size 32 \\
        --base-learning-rate 0.1 --replicas 1 2 4 8 --epochs 5 --optimizer sgd \\
        --warmup-epochs 1

With --memory, on JAX: what each device needs, and which lines make it fit.
TARGET is a function that returns a dataset and a compiled model:

    KERAS_BACKEND=jax kdpkit plan --memory 16GiB train.py:make --replicas 8

Exit code 0: nothing found, or only notes, or something fits; 1: findings, or
nothing fits; 2: no such plan is possible."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "kdpkit plan --examples N --per-replica-batch-size N\n"
        "                   --base-learning-rate RATE [--replicas R ...] [flags]\n"
        "       kdpkit plan --memory LIMIT TARGET [--replicas R]"
    )
    add = parser.add_argument
    add(
        "--memory",
        nargs=2,
        metavar=("LIMIT", "TARGET"),
        help="how `file.py:name` or `module:name` fits devices of this memory, such as 16GiB",
    )
    add("--examples", type=int, metavar="N", help="training examples")
    size = "examples that one replica takes from each batch"
    add("--per-replica-batch-size", type=int, metavar="N", help=size)
    add("--base-learning-rate", type=float, metavar="RATE", help="the rate for one replica")
    add("--replicas", type=int, nargs="+", default=[1], metavar="R", help="one number or several")
    add("--rule", default="linear", help="linear, sqrt or none (default: %(default)s)")
    add("--epochs", type=int, default=1, metavar="N", help="(default: %(default)s)")
    add("--optimizer", help="sgd, or adam for Adam and its variants")
    warmup = "epochs of linear warmup, also parts of one (default: %(default)s)"
    add("--warmup-epochs", type=float, default=0.0, metavar="N", help=warmup)


def run(args: argparse.Namespace) -> int:
    if args.memory:
        return _run_memory(args)
    if missing := [name for name in _REQUIRED if getattr(args, name) is None]:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        checks.fail(f"`kdpkit plan` needs {flags}, or --memory. See `kdpkit plan --help`.")
    from kdpkit.diagnostics._plan import training_plan

    names = {field.name for field in dataclasses.fields(training_plan.TrainingPlan)}
    settings = {name: value for name, value in vars(args).items() if name in names}
    counts = sorted({*args.replicas})
    plans = [training_plan.plan(**settings | {"replicas": count}) for count in counts]
    print(training_plan.printed(plans))
    return 0 if all(plan.clean for plan in plans) else 1


def _run_memory(args: argparse.Namespace) -> int:
    memory, target = args.memory
    if len(args.replicas) > 1 or ":" not in target:
        checks.fail(
            "Memory is planned for one function, and one number of replicas.",
            target=target,
            replicas=args.replicas,
            remedy="Write `kdpkit plan --memory 16GiB train.py:make --replicas 8`.",
        )
    (replicas,), memory = args.replicas, checks.size_in_bytes("memory", memory)
    machine.split_cpu(checks.integer("replicas", replicas), "jax")  # before the target starts
    from kdpkit.diagnostics._doctor import target as targets

    with targets.named(target) as make:
        from kdpkit import diagnostics  # loads Keras, whose backend the target has chosen

        plan = diagnostics.plan_memory(make, memory=memory, replicas=replicas)
    print(plan)
    return 0 if plan.chosen else 1
