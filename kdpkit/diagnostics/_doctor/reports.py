"""`check_input`, and the report of both checks."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from kdpkit._internal import check_results
from kdpkit.batches._array_batches import num_examples
from kdpkit.diagnostics._doctor import arrays, batches, slow_steps, training_step


@dataclasses.dataclass(frozen=True)
class Report:
    """What `check_input` or `check_tpu` found.

    Attributes:
        findings: Each has a rule, level, where, problem and remedy; the worst first.
        checked: What was checked: `"train"`, `"validation"` if there is any, and the training
            `"step"` where it is looked at.
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
    batch_size: int | None = None,
    shuffle: bool = True,
    validation_split: float = 0.0,
) -> Report:
    """Find mistakes in the data of a training, without training.

    The stages of a `tf.data` pipeline are read by `kdpkit.pipelines.lint`, which has the rules. Of
    arrays all values are looked at, of another dataset those of the first batch:

    - `not-finite`: NaN or infinite values.
    - `labels`: labels that the loss does not take, or of another shape than the model's output.
    - `split-classes`, `not-shuffled`: the order of the examples.
    - `uneven-batch`, `short-batch`, `runs-out`: batches that the replicas do not divide, a last
      batch of few examples, and fewer batches than steps.

    If that finds nothing, the step of the model is traced on the first batch, for which
    `Dataset.shuffle` draws an order; a model that is not built is, as by a `fit` of no epochs.
    A `train_step` or `fit` of one's own, `run_eagerly` and batches that are not dense are left out:

    - `step`: it raises.
    - `outputs`: those of the first examples are no probabilities, or no logits, which a
      cross-entropy of Keras takes.
    - `attention`: all its scores are computed, where a GPU or TPU has a kernel that keeps none.
    - `logits`: those of a large vocabulary are all held.
    - `float32`, `small-batch`: products in float32 on a device that has bfloat16, and batches
      whose products take less time than the update of the weights.

    Args:
        dataset: What `fit` trains on: arrays as `x`, `(x, y)` or `(x, y, sample_weight)`.
        validation_data: As that of `fit`, as are all arguments below `model`.
        model: The model; its strategy has the number of replicas that share a batch.
        epochs: None where it is not known.
        steps_per_epoch: None is the complete dataset.
        batch_size: Of the batches that arrays are cut into; None is 32.
        shuffle: Whether arrays are shuffled.
        validation_split: The part of arrays, at their end, that is for validation.

    Raises:
        ValueError: A generator, or a dataset that is empty or raises; a count below one.
    """
    strategy = getattr(model, "distribute_strategy", None)
    replicas = getattr(strategy, "num_replicas_in_sync", 1)
    data = {"train": dataset} | ({} if validation_data is None else {"validation": validation_data})
    findings: list[check_results.Finding] = []
    for name, part in data.items():
        if batches.is_tf_dataset(part):
            settings = {"epochs": epochs, "steps_per_epoch": steps_per_epoch}
            # `replica_exact` trains as one device, and copies arrays from Python.
            settings["replicas"] = 1 if training_step.is_exact(model) else replicas
            findings += _of_pipeline(name, part, settings)
            continue
        argument = "dataset" if name == "train" else "validation_data"
        is_arrays = batches.are_arrays(part)
        seen = part if is_arrays else batches.batches_of(part, name=argument).first
        findings += arrays.of_values(name, seen, model)
        if is_arrays and name == "train":
            count = math.floor(num_examples(part) * (1 - validation_split))
            findings += arrays.of_sizes(count, batch_size, steps_per_epoch, model, replicas)
            findings += arrays.of_order(part, count, model, shuffle=shuffle)
    checked = [*data]
    if training_step.can_be_traced(model) and check_results.are_notes(findings):
        data_of_step = batches.batches_of(dataset, batch_size)
        if data_of_step.are_dense:
            findings += slow_steps.findings(model, data_of_step.first)
            checked.append("step")
    return Report(check_results.in_order(findings), tuple(checked))


def _of_pipeline(
    name: str, dataset: Any, settings: dict[str, Any]
) -> Iterator[check_results.Finding]:
    from kdpkit import pipelines  # TensorFlow is there

    for finding in pipelines.lint(dataset, training=name == "train", **settings):
        yield dataclasses.replace(finding, where=f"{name}: {finding.where}")
