"""`check_input` and `check_tpu`: what rules find in a program."""

import dataclasses
from typing import Any

import keras

from kdpkit._internal import check_results, checks
from kdpkit.diagnostics._doctor import batches, tpu_rules, training_step


@dataclasses.dataclass(frozen=True)
class Report:
    """What `check_input` or `check_tpu` found.

    Attributes:
        findings: Each has a rule, level, where, problem and remedy; the worst first.
        checked: What was checked: some of `"train"`, `"validation"`, `"step"`.
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

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        return {
            "clean": self.clean,
            "checked": list(self.checked),
            "findings": check_results.as_dicts(self.findings),
        }


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


def check_tpu(
    dataset: Any,
    *,
    model: Any = None,
    replicas: int = 8,
    validation_data: Any = None,
    batch_size: int | None = None,
    validation_batch_size: int | None = None,
) -> Report:
    """Find on this machine what would stop a TPU, or waste its time.

    The first batch of the data is looked at (of a `PyDataset` the last one too), and on JAX the
    training step is traced and lowered for a TPU. Nothing is run: no weight changes, and training
    goes on as if nothing had been checked, except that a `Dataset.shuffle` that shuffles each
    iteration again has counted one. Findings are sizes that vary or that the cores do not divide,
    types with which a TPU does not compute, Python in the step, and operations that JAX cannot
    lower for TPUs. Memory and speed remain open.

    Args:
        dataset: What `fit` is to train on: a `tf.data.Dataset`, a `keras.utils.PyDataset`, a Grain
            dataset or a PyTorch `DataLoader` of global batches, or arrays `x`, `(x, y)` or `(x, y,
            sample_weight)`.
        model: A compiled Keras model, or a `kdpkit.training.TrainingLoop`; it may be built here.
        replicas: Cores that share a global batch; 8 on the usual TPU host.
        validation_data: As `dataset`.
        batch_size: Examples in the batches that `fit` splits arrays into; None takes 32, as Keras.
        validation_batch_size: Those of `validation_data`; None takes `batch_size`.

    Raises:
        ValueError: Invalid or empty data, a model that is not compiled, another backend.

    >>> from kdpkit import batches, testing
    >>> x, y = testing.toy_classification(64, features=8)
    >>> report = check_tpu(batches.ArrayBatches((x, y.astype("int64")), global_batch_size=60))
    >>> sorted(finding.rule for finding in report.findings if finding.level != "note")
    ['64-bit', 'uneven-batch']
    """
    backend = keras.backend.backend()
    if backend not in ("tensorflow", "jax"):
        checks.fail(
            "TPUs are checked for TensorFlow and for JAX.",
            backend=backend,
            remedy="Run with KERAS_BACKEND=jax or KERAS_BACKEND=tensorflow.",
        )
    replicas = checks.integer("replicas", replicas)
    if model is not None:
        training_step.check_model(model)
    data = {"train": batches.batches_of(dataset, batch_size)}
    if validation_data is not None:
        size = batch_size if validation_batch_size is None else validation_batch_size
        data["validation"] = batches.batches_of(validation_data, size, name="validation_data")
    program = tpu_rules.TpuProgram(data, model, replicas)
    found = [*check_results.found(tpu_rules.RULES, program)]
    if program.has_step:
        from kdpkit.diagnostics._doctor import tpu_step_jax

        found += tpu_step_jax.findings(model, data["train"].first)
    return Report(check_results.in_order(found), (*data, *["step"] * program.has_step))
