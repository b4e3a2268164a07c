"""What `replica_exact` costs where stock `fit` is right: BERT, two replicas, even batches."""

from kdpkit import strategies, testing
from kdpkit.training import replica_exact
from tests.benchmarks import workload
from tests.benchmarks.paired import compared, in_turns, seconds_of

STEPS = 12


def rows(args):
    """Measure a step of both."""
    testing.use_logical_cpus(2)
    strategy = strategies.select_strategy("mirrored", devices=2)
    array = workload.rows(args)
    size = workload.tokenizer(args.text, args.vocabulary).vocabulary_size()
    data = workload.packed(args, array, steps=STEPS, replicas=2)

    def epoch(mend):
        with strategy.scope():
            model = workload.compiled(workload.masked_lm(size))
        mend(model)
        return lambda: 1e3 * seconds_of(lambda: model.fit(data, verbose=0, shuffle=False)) / STEPS

    figures = in_turns(
        {"ours": epoch(replica_exact), "stock": epoch(lambda _: None)}, args.rounds or 9
    )
    return [
        compared(
            "BERT, 2 replicas, replica_exact and fit against stock fit",
            "ms a step",
            figures["ours"],
            figures["stock"],
            goal=("<=", 1.03),
        )
    ]
