"""Mistakes in the pipelines that a program trains from."""

import dataclasses
from typing import Any

from kdpkit._internal import check_results, checks
from kdpkit.diagnostics import _batch, _report, _training_step


class InputReport(_report.Report):
    """What `check_input` found.

    Attributes:
        findings: See `kdpkit.pipelines.lint`; the worst first.
        checked: What was checked: `"train"`, `"validation"`.
    """


def check_input(
    dataset: Any,
    *,
    validation_data: Any = None,
    model: Any = None,
    workers: int = 1,
    epochs: int | None = None,
    steps_per_epoch: int | None = None,
) -> InputReport:
    """Find mistakes in the `tf.data` pipelines of a training, without running them.

    Each is read by `kdpkit.pipelines.lint`, which has the rules: the training data with all of
    them, the validation data without those about order and length. Data of other kinds are not
    checked.

    Args:
        dataset: What `fit` trains on.
        validation_data: What it validates on.
        model: The model; its strategy has the number of replicas that share a batch.
        workers: Processes that divide the data between them.
        epochs: Those of `fit`; None where it is not known.
        steps_per_epoch: That of `fit`; None is the complete dataset.

    Raises:
        ValueError: None of it is a `tf.data.Dataset`; a count below one.
    """
    given = {"train": dataset, "validation": validation_data}
    read = {name: data for name, data in given.items() if _batch.is_tf_dataset(data)}
    if not read:
        checks.fail(
            "There is no `tf.data` pipeline to check.",
            dataset=type(dataset).__name__,
            remedy="`kdpkit doctor --tpu` checks arrays and `PyDataset` too.",
        )
    from kdpkit import pipelines  # TensorFlow is there

    strategy = getattr(model, "distribute_strategy", None)
    replicas = getattr(strategy, "num_replicas_in_sync", 1)
    found = [
        dataclasses.replace(finding, where=f"{name}: {finding.where}")
        for name, data in read.items()
        for finding in pipelines.lint(
            data,
            training=name == "train",
            replicas=replicas,
            workers=workers,
            epochs=epochs,
            steps_per_epoch=steps_per_epoch,
        )
        # `replica_exact` copies arrays from Python.
        if not (finding.rule == "overwritten-arrays" and _training_step.is_exact(model))
    ]
    return InputReport(check_results.in_order(found), tuple(read))
