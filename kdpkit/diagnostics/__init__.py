"""What stands in the way of training somewhere else, known before going there.

`check_tpu` checks a dataset, a model and callbacks for a TPU, on the machine at hand. `plan` works
out batches, steps and learning rates of a run on several replicas, and says where a rule leaves its
range. `compare_schedules` draws learning rates in a terminal, `read_schedule` reads one from text.
Each name loads the framework that it needs on first use.
"""

from typing import TYPE_CHECKING

from kdpkit import _lazy

if TYPE_CHECKING:
    from kdpkit.diagnostics._plan import TrainingPlan, plan
    from kdpkit.diagnostics._schedule_expressions import read_schedule
    from kdpkit.diagnostics._schedules import ScheduleComparison, compare_schedules
    from kdpkit.diagnostics._tpu import TpuReport, check_tpu

_HOMES = {
    "ScheduleComparison": "_schedules",
    "TpuReport": "_tpu",
    "TrainingPlan": "_plan",
    "check_tpu": "_tpu",
    "compare_schedules": "_schedules",
    "plan": "_plan",
    "read_schedule": "_schedule_expressions",
}

__all__ = [
    "ScheduleComparison",
    "TpuReport",
    "TrainingPlan",
    "check_tpu",
    "compare_schedules",
    "plan",
    "read_schedule",
]

__getattr__, __dir__ = _lazy.names(__name__, _HOMES)
