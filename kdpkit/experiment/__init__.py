"""What the recipes share: flags, the strategy, exit codes, and a file of results.

A recipe looks like this:

    parser = experiment.argument_parser(
        __doc__, epochs=5, per_replica_batch_size=32, base_learning_rate=1e-4
    )
    experiment.start(parser, __name__)  # flags are checked before Keras is imported

    import keras

    def main(argv=None):
        args = parser.parse_args(argv)
        strategy = experiment.strategy_from(args)
        plan = experiment.plan_from(args, strategy)
        ...
        record = experiment.Recorder(args, model, strategy, plan)
        model.fit(
            record.resumed(train), callbacks=record.callbacks, verbose=record.verbose, ...
        )
        return record.results(test=model.evaluate(..., return_dict=True))

    if __name__ == "__main__":
        experiment.run(main)
"""

from typing import TYPE_CHECKING

from kdpkit._internal import lazy_names
from kdpkit._internal.storage import replacing as writing
from kdpkit.experiment._flags import argument_parser, positive_integer, writable_directory
from kdpkit.experiment._program import run, start
from kdpkit.experiment._strategy import plan_from, strategy_from

if TYPE_CHECKING:
    from kdpkit.experiment import text
    from kdpkit.experiment._recorder import Recorder
else:  # they load Keras
    _NEED_KERAS = {"Recorder": "_recorder", "text": "text"}
    __getattr__, _ = lazy_names(__name__, _NEED_KERAS)

__all__ = [
    "Recorder",
    "argument_parser",
    "plan_from",
    "positive_integer",
    "run",
    "start",
    "strategy_from",
    "text",
    "writable_directory",
    "writing",
]
