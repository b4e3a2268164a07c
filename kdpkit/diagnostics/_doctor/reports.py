"""`check_input` and `check_tpu`: what rules find in a program."""

import dataclasses
from typing import Any, ClassVar

import keras

from kdpkit._internal import check_results, checks
from kdpkit.diagnostics._doctor import batches, tpu_rules, training_step


@dataclasses.dataclass(frozen=True)
class InputReport:
    """What `check_input` found.

    Attributes:
        findings: Each has a rule, level, where, problem and remedy; the worst first.
        checked: What was checked: `"train"`, `"validation"`.
    """

    findings: tuple[check_results.Finding, ...]
    checked: tuple[str, ...]

    _reservation: ClassVar[str] = ""  # of a report that found nothing

    @property
    def clean(self) -> bool:
        """Whether there are notes at most."""
        return check_results.are_notes(self.findings)

    def __str__(self) -> str:
        """Return lines of at most 80 columns."""
        count = sum(finding.level != "note" for finding in self.findings)
        result = f"{count} finding{'s' * (count > 1)}" if count else "Nothing found"
        reservation = "" if count else self._reservation
        head = f"{result} (looked at: {', '.join(self.checked)}){reservation}."
        return "\n\n".join([head, *map(str, self.findings)])

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        return {
            "clean": self.clean,
            "checked": list(self.checked),
            "findings": check_results.as_dicts(self.findings),
        }


@dataclasses.dataclass(frozen=True)
class TpuReport(InputReport):
    """What `check_tpu` found.

    Attributes:
        findings: Each has a rule, level, where, problem and remedy; the worst first.
        checked: What was checked: some of `"data"`, `"step"`, `"callbacks"`.
        replicas: Cores that share a batch.
        backend: Keras' backend.
    """

    replicas: int
    backend: str

    _reservation = "; not proven on a TPU"

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        of_tpu = {"proven_on_tpu": False, "backend": self.backend, "replicas": self.replicas}
        return of_tpu | super().to_dict()


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
        "workers": workers,
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
    return InputReport(check_results.in_order(found), tuple(read))


def check_tpu(
    dataset: Any = None,
    *,
    model: Any = None,
    replicas: int = 8,
    callbacks: Any = (),
    validation_data: Any = None,
    batch_size: int | None = None,
    validation_batch_size: int | None = None,
) -> TpuReport:
    """Find on this machine what would stop a TPU, or waste its time.

    One batch is taken from the data (of a `PyDataset` the last one too), and the training step is
    traced and compiled, but never run: no weight changes, and training goes on as if nothing had
    been checked, except that a `Dataset.shuffle` that shuffles each iteration again has counted
    one, and that a `fit` that shuffles arrays draws one order less. Findings are sizes that vary or
    that the cores do not divide, types with which a TPU does not compute, Python in the pipeline or
    in the step, operations that JAX cannot lower for TPUs, and callbacks that make Keras wait.

    Keras trains on TPUs through JAX, so step and callbacks are checked on that backend alone. What
    only a TPU can show remains open: its memory and its speed. What was not checked is a note.

    Args:
        dataset: What `fit` is to train on: a `tf.data.Dataset`, a `keras.utils.PyDataset`, a Grain
            dataset or a PyTorch `DataLoader` of global batches, or arrays `x`, `(x, y)` or `(x, y,
            sample_weight)`. A Python generator is not checked, as it yields each batch once.
        model: A compiled Keras model, or a `kdpkit.training.TrainingLoop`; on JAX it
            is built if it is not.
        replicas: Cores that share a global batch; 8 on the usual TPU host.
        callbacks: Those of `fit`.
        validation_data: As `dataset`.
        batch_size: Examples in the batches that `fit` splits arrays into; None takes 32, as Keras.
        validation_batch_size: Those of `validation_data`; None takes `batch_size`.

    Raises:
        ValueError: There is nothing to check, invalid or empty data, a model that is not compiled,
            another backend.

    >>> from kdpkit import batches, testing
    >>> x, y = testing.toy_classification(64, features=8)
    >>> report = check_tpu(batches.ArrayBatches((x, y.astype("int64")), global_batch_size=60))
    >>> sorted(finding.rule for finding in report.findings if finding.level != "note")
    ['64-bit', 'uneven-batch']
    """
    backend = str(keras.backend.backend())
    if backend not in ("tensorflow", "jax"):
        checks.fail(
            "TPUs are checked for TensorFlow and for JAX.",
            backend=backend,
            remedy="Run with KERAS_BACKEND=jax or KERAS_BACKEND=tensorflow.",
        )
    program = tpu_rules.TpuProgram(
        dataset=dataset,
        model=model,
        replicas=checks.integer("replicas", replicas),
        callbacks=callbacks,
        validation_data=validation_data,
        batch_size=batch_size,
        validation_batch_size=validation_batch_size,
    )
    given = (dataset, model, validation_data)
    if all(one is None for one in given) and not program.has_callbacks:
        checks.fail("There is nothing to check: pass a dataset, a model or callbacks.")
    if model is not None:
        training_step.check_model(model)
    if not program.checked:
        checks.fail(
            "Nothing can be checked: a generator yields each batch once, and a step needs data.",
            remedy="Use a dataset of another kind, such as a `tf.data.Dataset`.",
        )
    found = check_results.in_order(one for rule in tpu_rules.RULES for one in rule(program))
    return TpuReport(found, program.checked, replicas=program.replicas, backend=backend)
