"""What stands in the way of training somewhere else, known before going there.

`check_tpu` checks a dataset, a model and callbacks for a TPU, on the machine at hand; `check_input`
the `tf.data` pipelines of a training; `check_speed` trains for a moment, and says where a step's
time goes. `plan` works out batches, steps and learning rates of a run
on several replicas, and says where a rule leaves its range. `compare_schedules` draws learning
rates in a terminal, `read_schedule` reads one from text. `environment` tells what this machine and
this Python give a training; `probe` trains two steps in every way there is; `bench` measures how
fast it trains, by replicas and batch sizes. Each name loads the framework that it needs on first
use; the last three load none.
"""

from typing import TYPE_CHECKING

from kdpkit import _lazy

if TYPE_CHECKING:
    from kdpkit.diagnostics._bench import BenchReport, BenchRow, bench
    from kdpkit.diagnostics._environment import Environment, environment
    from kdpkit.diagnostics._input import InputReport, check_input
    from kdpkit.diagnostics._plan import TrainingPlan, plan
    from kdpkit.diagnostics._probe import ProbeReport, ProbeResult, probe
    from kdpkit.diagnostics._schedule_expressions import read_schedule
    from kdpkit.diagnostics._schedules import ScheduleComparison, compare_schedules
    from kdpkit.diagnostics._speed import check_speed
    from kdpkit.diagnostics._speed_report import SpeedEdit, SpeedReport
    from kdpkit.diagnostics._tpu import TpuReport, check_tpu

_HOMES = {
    "BenchReport": "_bench",
    "BenchRow": "_bench",
    "Environment": "_environment",
    "InputReport": "_input",
    "ProbeReport": "_probe",
    "ProbeResult": "_probe",
    "ScheduleComparison": "_schedules",
    "SpeedEdit": "_speed_report",
    "SpeedReport": "_speed_report",
    "TpuReport": "_tpu",
    "TrainingPlan": "_plan",
    "bench": "_bench",
    "check_input": "_input",
    "check_speed": "_speed",
    "check_tpu": "_tpu",
    "compare_schedules": "_schedules",
    "environment": "_environment",
    "plan": "_plan",
    "probe": "_probe",
    "read_schedule": "_schedule_expressions",
}

__all__ = [
    "BenchReport",
    "BenchRow",
    "Environment",
    "InputReport",
    "ProbeReport",
    "ProbeResult",
    "ScheduleComparison",
    "SpeedEdit",
    "SpeedReport",
    "TpuReport",
    "TrainingPlan",
    "bench",
    "check_input",
    "check_speed",
    "check_tpu",
    "compare_schedules",
    "environment",
    "plan",
    "probe",
    "read_schedule",
]

__getattr__, __dir__ = _lazy.names(__name__, _HOMES)
