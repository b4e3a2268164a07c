"""Checks of a training before it runs somewhere else, and reports on a machine.

`plan` works out batches, steps and learning rates of a run on several replicas, `plan_memory` what
each device needs and the cheapest way to make it fit. `environment` reports what this machine and
this Python offer, and which strategies train on it. `check_input` finds mistakes in the data of a
training, `check_tpu` what of it would stop a TPU. `check_speed` finds how long a step takes and
waits for input. Each returns a report that prints itself, with `clean` for programs. Each loads the
framework that it needs on first use; `environment` loads none.
"""

from typing import TYPE_CHECKING

from kdpkit._internal import lazy_names

if TYPE_CHECKING:
    from kdpkit.diagnostics._doctor.reports import check_input
    from kdpkit.diagnostics._doctor.speed import check_speed
    from kdpkit.diagnostics._doctor.tpu import check_tpu
    from kdpkit.diagnostics._env.environment import environment
    from kdpkit.diagnostics._plan.memory_plan import plan_memory
    from kdpkit.diagnostics._plan.training_plan import plan

_HOMES = {
    "check_input": "_doctor.reports",
    "check_speed": "_doctor.speed",
    "check_tpu": "_doctor.tpu",
    "environment": "_env.environment",
    "plan": "_plan.training_plan",
    "plan_memory": "_plan.memory_plan",
}

__all__ = [
    "check_input",
    "check_speed",
    "check_tpu",
    "environment",
    "plan",
    "plan_memory",
]

if not TYPE_CHECKING:  # a checker then reports names that there are not
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)
