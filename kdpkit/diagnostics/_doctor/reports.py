"""`check_input`, and the report of both checks."""

import dataclasses
from typing import Any

from kdpkit._internal import check_results, checks
from kdpkit.diagnostics._doctor import batches, training_step


@dataclasses.dataclass(frozen=True)
class Report:
    """What `check_input` or `check_tpu` found.

    Attributes:
        findings: Each has a rule, level, where, problem and remedy; the worst first.
        checked: What was checked: `"train"`, and `"validation"` if there is any.
    """

    findings: tuple[check_results.Finding, ...]
    checked: tuple[str, ...]

    @property
    def clean(self) -> bool:
        """Whether there are notes at most."""
        return check_results.are_notes(self.findings)

    def __str__(self) -> str:
        """Return lines of at most 80 columns."""
        count = sum(finding.level != "note" for finding in self.findings)
        result = f"{count} finding{'s' * (count > 1)}" if count else "Nothing found"
        head = f"{result} (looked at: {', '.join(self.checked)})."
        return "\n\n".join([head, *map(str, self.findings)])


def check_input(
    dataset: Any,
    *,
    validation_data: Any = None,
    model: Any = None,
    epochs: int | None = None,
    steps_per_epoch: int | None = None,
) -> Report:
    """Find mistakes in the `tf.data` pipelines of a training, without running them.

    Each is read by `kdpkit.pipelines.lint`, which has the rules; those about order and length are
    for the training data alone. Data of other kinds are not checked.

    Args:
        dataset: What `fit` trains on.
        validation_data: What it validates on.
        model: The model; its strategy has the number of replicas that share a batch.
        epochs: Those of `fit`; None where it is not known.
        steps_per_epoch: That of `fit`; None is the complete dataset.

    Raises:
        ValueError: None of it is a `tf.data.Dataset`; a count below one.
    """
    given = {"train": dataset, "validation": validation_data}
    read = {name: data for name, data in given.items() if batches.is_tf_dataset(data)}
    if not read:
        checks.fail(
            "There is no `tf.data` pipeline to check.",
            dataset=type(dataset).__name__,
            remedy="`kdpkit doctor --tpu` checks arrays and `PyDataset` too.",
        )
    from kdpkit import pipelines  # TensorFlow is there

    strategy = getattr(model, "distribute_strategy", None)
    settings: dict[str, Any] = {
        "replicas": getattr(strategy, "num_replicas_in_sync", 1),
        "epochs": epochs,
        "steps_per_epoch": steps_per_epoch,
    }
    found = [
        dataclasses.replace(finding, where=f"{name}: {finding.where}")
        for name, data in read.items()
        for finding in pipelines.lint(data, training=name == "train", **settings)
        # `replica_exact` copies arrays from Python.
        if not (finding.rule == "overwritten-arrays" and training_step.is_exact(model))
    ]
    return Report(check_results.in_order(found), tuple(read))
