"""What is wrong with the pipelines that a program trains from."""

import dataclasses
from typing import Any

from kdpkit import _checks, _findings
from kdpkit.diagnostics import _batch, _report


class InputReport(_report.Report):
    """What `check_input` found.

    Attributes:
        findings: See `kdpkit.pipelines.lint`; the worst first.
        checked: What was looked at: `"train"`, `"validation"`.
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
    them, the validation data without those about order and length. Data of other kinds are left
    alone.

    Args:
        dataset: What `fit` trains on.
        validation_data: What it validates on.
        model: The model; its strategy says how many replicas share a batch.
        workers: Processes that divide the data between them.
        epochs: Those of `fit`; None where it is not known.
        steps_per_epoch: That of `fit`; None is the whole dataset.

    Returns:
        The report, with `findings`, `clean` and `to_dict()`.

    Raises:
        ValueError: None of it is a `tf.data.Dataset`; a count below one.
    """
    given = {"train": dataset, "validation": validation_data}
    read = {name: data for name, data in given.items() if _batch.is_tf_dataset(data)}
    if not read:
        _checks.refuse(
            "There is no `tf.data` pipeline to look at.",
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
        if not (finding.rule == "overwritten-arrays" and _is_exact(model))
    ]
    return InputReport(_findings.in_order(found), tuple(read))


def _is_exact(model: Any) -> bool:
    """Tell a model of `replica_exact`, which copies what Python gives."""
    return "fit" in vars(model)
