"""What the recipes share: flags, the strategy, exit codes, and a file of results.

A recipe looks like this:

    parser = experiment.argument_parser(
        __doc__, epochs=5, per_replica_batch_size=32, base_learning_rate=1e-4
    )

    with experiment.program(parser, __name__):
        import keras  # once the flags are valid

    def main(argv=None):
        args = parser.parse_args(argv)
        strategy = experiment.strategy_from(args)
        plan = experiment.plan_from(args, strategy)
        ...
        record = experiment.Recorder(args, model, strategy, plan)
        model.fit(record.resumed(...), callbacks=record.callbacks)
        return record.results(test=model.evaluate(..., return_dict=True))

    if __name__ == "__main__":
        experiment.run(main)
"""

from typing import TYPE_CHECKING

from kdpkit._internal import lazy_names
from kdpkit._internal.atomic_files import replacing as writing
from kdpkit._internal.storage import path
from kdpkit.experiment._flags import argument_parser, count, positive_integer, positive_number
from kdpkit.experiment._program import program, run
from kdpkit.experiment._strategy import describe, plan_from, strategy_from

if TYPE_CHECKING:
    from kdpkit.experiment import text
    from kdpkit.experiment._recorder import Recorder, save_model, versions
else:  # they load Keras
    _RECORDER = dict.fromkeys(("Recorder", "save_model", "versions"), "_recorder")
    __getattr__, _ = lazy_names(__name__, _RECORDER | {"text": "text"})

__all__ = [
    "Recorder",
    "argument_parser",
    "count",
    "describe",
    "path",
    "plan_from",
    "positive_integer",
    "positive_number",
    "program",
    "run",
    "save_model",
    "strategy_from",
    "text",
    "versions",
    "writing",
]
