"""What a TPU needs, checked on any machine."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import keras

from kdpkit._internal import check_results, checks
from kdpkit.diagnostics import _batch, _report, _training_step
from kdpkit.diagnostics._tpu import callback_costs, data_rules

_UNCHECKED_STEP = check_results.Finding(
    "unchecked-step",
    "note",
    "train step",
    "It was not compiled, as these data cannot reach it, or were not checked.",
    "Fix the data first, and check again.",
)
_UNCHECKED_DATA = check_results.Finding(
    "unchecked-data",
    "note",
    "train",
    "It is a Python generator, which yields each batch once: a check would use one up.",
    "Use a dataset that can be iterated again, such as a `keras.utils.PyDataset` or a "
    "`tf.data.Dataset`; generators feed a TPU one batch after the other.",
)
_TENSORFLOW = check_results.Finding(
    "tensorflow",
    "note",
    "backend",
    "Keras 3 trains on TPUs through JAX; its `fit` under TensorFlow's `TPUStrategy` is not "
    "proven, and the training step is not checked for it.",
    "Set KERAS_BACKEND=jax, and check again. `tf.data` pipelines keep working.",
)


@dataclasses.dataclass(frozen=True)
class TpuReport(_report.Report):
    """What `check_tpu` found.

    Attributes:
        findings: See `Finding`: rule, level, where, problem, remedy; the worst first.
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
        batch_size: Examples in the batches that `fit` cuts arrays into; None takes 32, as Keras.
        validation_batch_size: Those of `validation_data`; None takes `batch_size`.

    Raises:
        ValueError: There is nothing to check, invalid or empty data, a model that is not compiled,
            another backend.

    >>> from kdpkit import batches, testing
    >>> x, y = testing.toy_classification(64, features=8)
    >>> report = check_tpu(batches.ArrayBatches((x, y.astype("int64")), global_batch_size=60))
    >>> sorted(finding.rule for finding in report.findings if finding.level != "note")
    ['64-bit', 'uneven-batch']
    >>> good = batches.ArrayBatches((x, y), global_batch_size=64)
    >>> model = testing.tiny_classifier(features=8)
    >>> model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    >>> report = check_tpu(good, model=model)
    >>> report.clean, report.checked[0]
    (True, 'data')
    """
    replicas = checks.integer("replicas", replicas)
    backend = _backend()
    has_callbacks = callbacks is not None and callbacks not in ((), [])
    if dataset is None and model is None and not has_callbacks and validation_data is None:
        checks.fail("There is nothing to check: pass a dataset, a model or callbacks.")
    if model is not None:
        _training_step.check_model(model)
    sizes = (batch_size, batch_size if validation_batch_size is None else validation_batch_size)
    train = _batches(dataset, sizes[0], "dataset")
    held_out = _batches(validation_data, sizes[1], "validation_data")
    takes_uneven = _takes_uneven(model)
    found = [
        *_of_data(dataset, train, replicas, takes_uneven, "train"),
        *_of_data(validation_data, held_out, replicas, takes_uneven, "validation"),
    ]
    checked = ["data"] if train else ["validation data"] if held_out else []
    if model is not None:
        if train is None or not _is_computable(train):
            found.append(_UNCHECKED_STEP)
        elif backend == "jax":
            from kdpkit.diagnostics._tpu import training_step_jax

            found += training_step_jax.findings(model, dataset, train.first)
            checked.append("step")
    if has_callbacks:
        found += callback_costs.findings(callbacks)
        checked.append("callbacks")
    if not checked:
        checks.fail(
            "Nothing can be checked: a generator yields each batch once, and a step needs data.",
            remedy="Use a dataset of another kind, such as a `tf.data.Dataset`.",
        )
    if backend == "tensorflow":
        found.append(_TENSORFLOW)
    return TpuReport(
        check_results.in_order(found), tuple(checked), replicas=replicas, backend=backend
    )


def _batches(dataset: Any, batch_size: int | None, name: str) -> _batch.Batches | None:
    """Return the batches of a dataset; None of a generator, which is left alone."""
    if dataset is None or _batch.is_generator(dataset):
        return None
    return _batch.batches_of(dataset, batch_size, name=name)


def _of_data(
    dataset: Any, batches: _batch.Batches | None, replicas: int, takes_uneven: bool, what: str
) -> Iterator[check_results.Finding]:
    if batches is not None:
        yield from data_rules.findings_on_batches(
            batches, replicas=replicas, takes_uneven=takes_uneven, what=what
        )
    elif dataset is not None:
        yield dataclasses.replace(_UNCHECKED_DATA, where=what)
    if _batch.is_tf_dataset(dataset):
        from kdpkit import pipelines  # TensorFlow is there

        for finding in pipelines.lint(dataset, training=False):
            if finding.rule == "python":
                yield dataclasses.replace(finding, where=f"{what}: {finding.where}")


def _is_computable(batches: _batch.Batches) -> bool:
    return all(part.is_dense and part.dtype != "string" for part in batches.parts)


def _backend() -> str:
    backend = str(keras.backend.backend())
    if backend not in ("tensorflow", "jax"):
        checks.fail(
            "TPUs are checked for TensorFlow and for JAX.",
            backend=backend,
            remedy="Run with KERAS_BACKEND=jax or KERAS_BACKEND=tensorflow.",
        )
    return backend


def _takes_uneven(trainer: Any) -> bool:
    """Return whether training takes batches of any size, as `kdpkit.training` on JAX does."""
    if trainer is None or keras.backend.backend() != "jax":
        return False
    return _training_step.is_exact(trainer) or _training_step.is_loop(trainer)
