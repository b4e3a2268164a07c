"""What the recipes share: flags, strategy, cached data, progress, Ctrl-C and results.

A recipe looks like this:

    def main(argv=None):
        parser = experiment.argument_parser(__doc__, epochs=5, per_replica_batch_size=32,
                                            base_learning_rate=1e-4, smoke={"epochs": 1})
        args = parser.parse_args(argv)
        strategy = experiment.strategy_from(args)
        data = experiment.prepared("tokens", build, key=..., cache_dir=args.cache_dir)
        ...
        with experiment.saving_on_interrupt(model, args.log_dir) as stop:
            history = model.fit(..., callbacks=[..., stop])
        results = experiment.results_of(model, history, strategy=strategy, ...)
        experiment.write_results(args.results, results)
        return results

    if __name__ == "__main__":
        experiment.run(main)
"""

from kdpkit._internal.atomic_files import fetched as reading
from kdpkit._internal.atomic_files import replacing as writing
from kdpkit._internal.prepared_data import prepared
from kdpkit._internal.presets import from_preset
from kdpkit._internal.result_figures import plot_results
from kdpkit._internal.storage import path
from kdpkit.errors import InputError
from kdpkit.experiment._flags import argument_parser, count, positive_integer, positive_number
from kdpkit.experiment._precision import PRECISIONS, set_precision
from kdpkit.experiment._program import (
    collect,
    quick_imports,
    resuming,
    run,
    saving_on_interrupt,
    track,
)
from kdpkit.experiment._results import results_of, save_model, versions, write_results
from kdpkit.experiment._strategy import describe, plan_from, strategy_from

__all__ = [
    "PRECISIONS",
    "InputError",
    "argument_parser",
    "collect",
    "count",
    "describe",
    "from_preset",
    "path",
    "plan_from",
    "plot_results",
    "positive_integer",
    "positive_number",
    "prepared",
    "quick_imports",
    "reading",
    "results_of",
    "resuming",
    "run",
    "save_model",
    "saving_on_interrupt",
    "set_precision",
    "strategy_from",
    "track",
    "versions",
    "write_results",
    "writing",
]
