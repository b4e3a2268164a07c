"""What a TPU needs, checked on any machine."""

import dataclasses
from typing import Any

import keras

from kdpkit import _checks, _findings
from kdpkit.diagnostics import (
    _batch,
    _report,
    _tpu_callbacks,
    _tpu_data,
    _tpu_step,
    _tpu_widths,
)


@dataclasses.dataclass(frozen=True)
class TpuReport(_report.Report):
    """What `check_tpu` found.

    Attributes:
        findings: See `Finding`: rule, level, where, problem, remedy; the worst first.
        checked: What was looked at: some of `"data"`, `"step"`, `"widths"`, `"callbacks"`.
        replicas: Cores that share a batch.
        backend: Keras' backend.
    """

    replicas: int
    backend: str

    _reservation = "; not proven on a TPU"

    def to_dict(self) -> dict[str, Any]:
        """Give the report as plain values, for JSON."""
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
    remote: bool = False,
) -> TpuReport:
    """Find on this machine what would stop a TPU, or waste its time.

    Everything that can be known before a TPU is reached is looked at. One batch is taken from the
    data (of a `PyDataset` the last one too), and the training step (forward pass, loss, gradients,
    update, metrics) is traced and compiled, but never run: no weight changes, and training goes on
    as if nothing had been looked at, but for the order of some shuffles. A `tf.data`
    `Dataset.shuffle` that shuffles each iteration anew has counted one; and a `fit` that shuffles
    arrays draws an order less, as the model is built when it comes. The rules:

    - `dynamic-shape`, `dynamic-batch`, `uneven-batch`: sizes that vary, in the data or in the step;
      a batch that the cores do not divide.
    - `string`, `64-bit`: types that a TPU does not compute with, or at several times the cost.
      int64 that Keras itself uses on TensorFlow (labels, counts) is left alone.
    - `tile-batch`, `tile-width`: rows of a core, and widths of layers that hold a tenth of the
      model, which leave much of the 8 x 128 tiles empty. See
      https://cloud.google.com/tpu/docs/performance-guide.
    - `python-op`: Python called from the pipeline or from the step.
    - `xla`: operations of the step that cannot be compiled: on TensorFlow by XLA for this CPU, on
      JAX by its lowering for TPUs, which runs on any machine. `untraceable-step`: the step raises.
    - `host-transfer`: callbacks that make Keras wait for each step.
    - `local-file`: files that a TPU reached over the network cannot read.
    - `eager-step`, and `tensorflow`: a note, as Keras' TPUs are JAX's. `unchecked-step`,
      `unchecked-data`, `unread-pipeline` and `unseen-batches` are notes on what was not looked at.

    What only a TPU can tell remains open: its memory, its speed, and what its compiler refuses of
    that which XLA has for CPUs (TensorFlow).

    Args:
        dataset: What `fit` is to train on: a `tf.data.Dataset`, a `keras.utils.PyDataset`, a Grain
            dataset or a PyTorch `DataLoader` of global batches, or arrays `x`, `(x, y)` or `(x, y,
            sample_weight)`. A Python generator is left alone, as it gives each batch once.
        model: A compiled Keras model, or a `kdpkit.training.TrainingLoop`; on TensorFlow one that
            lives on a single replica. It is built if it is not.
        replicas: Cores that share a global batch; 8 on the usual TPU host.
        callbacks: Those of `fit`.
        validation_data: As `dataset`.
        batch_size: Rows in the batches that `fit` cuts arrays into; None takes 32, as Keras.
        validation_batch_size: Such rows of `validation_data`; None takes `batch_size`.
        remote: Whether the TPU is reached over the network, where TensorFlow reads data. A TPU VM,
            such as Colab's, reads its own disk.

    Returns:
        The report. It prints what was found, and has `findings`, `clean` and `to_dict()`.

    Raises:
        ValueError: There is nothing to check, data that give no batch or are no data, a model that
            is not compiled or lives on several replicas, `remote` on JAX, another backend.

    >>> from kdpkit import batches, testing
    >>> x, y = testing.toy_classification(64, features=8)
    >>> report = check_tpu(batches.ArrayBatches((x, y.astype("int64")), global_batch_size=60))
    >>> sorted(finding.rule for finding in report.findings if finding.level != "note")
    ['64-bit', 'uneven-batch']
    >>> good = batches.ArrayBatches((x, y), global_batch_size=64)
    >>> model = testing.tiny_classifier(features=8)
    >>> model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    >>> report = check_tpu(good, model=model)
    >>> print(str(report).splitlines()[0])
    Nothing found (looked at: data, step, widths); not proven on a TPU.
    """
    replicas = _checks.integer("replicas", replicas)
    backend = _backend(remote)
    has_callbacks = callbacks is not None and callbacks not in ((), [])
    if dataset is None and model is None and not has_callbacks and validation_data is None:
        _checks.refuse("There is nothing to check: give a dataset, a model or callbacks.")
    if model is not None:
        _tpu_step.check_model(model)
    checks = _Checks(model, replicas, remote)
    if dataset is not None:
        checks.data(dataset, batch_size)
    if validation_data is not None:
        checks.validation(
            validation_data, batch_size if validation_batch_size is None else validation_batch_size
        )
    if model is not None:
        checks.of_model()
    if has_callbacks:
        checks.callbacks(callbacks)
    if not checks.checked:
        _checks.refuse(
            "Nothing of it can be looked at: generators give each batch once, and a model shows "
            "its step and its widths when it is built or has data.",
            remedy="Give a dataset of another kind, such as a `tf.data.Dataset`.",
        )
    if backend == "tensorflow":
        checks.found.append(_tensorflow_note())
    return TpuReport(
        _findings.in_order(checks.found), tuple(checks.checked), replicas=replicas, backend=backend
    )


class _Checks:
    """The checks of one report, and what they have found so far."""

    def __init__(self, trainer: Any, replicas: int, remote: bool) -> None:
        self.found: list[_findings.Finding] = []
        self.checked: list[str] = []
        self._trainer = trainer
        self._replicas = replicas
        self._remote = remote
        self._dataset: Any = None
        self._batches: _batch.Batches | None = None

    def data(self, dataset: Any, batch_size: int | None) -> None:
        self._dataset = dataset
        self._batches = self._of_dataset(dataset, batch_size, "train")
        if self._batches is not None:
            self.checked.append("data")

    def validation(self, dataset: Any, batch_size: int | None) -> None:
        is_seen = self._of_dataset(dataset, batch_size, "validation") is not None
        if is_seen and "data" not in self.checked:
            self.checked.append("validation data")

    def of_model(self) -> None:
        model = _tpu_step.model_of(self._trainer)
        first = None
        if self._batches is not None and self._is_computable():
            first = self._batches.first
            self.found += _tpu_step.findings(self._trainer, self._dataset, first)
            self.checked.append("step")
        elif self._dataset is not None:
            self.found.append(_unchecked_step())
        widths = _output_widths(model, first)
        if widths is not None:
            self.found += _tpu_widths.findings(model, widths)
            self.checked.append("widths")

    def callbacks(self, callbacks: Any) -> None:
        names = ("steps_per_loop", "steps_per_execution")  # of a loop, of a model
        at_once = max(getattr(self._trainer, name, 1) for name in names)
        self.found += _tpu_callbacks.findings(callbacks, steps_at_once=at_once)
        self.checked.append("callbacks")

    def _of_dataset(self, dataset: Any, batch_size: int | None, what: str) -> _batch.Batches | None:
        if _batch.is_generator(dataset):
            self.found.append(_unchecked_data(what))
            return None
        name = "dataset" if what == "train" else "validation_data"
        batches = _batch.batches_of(dataset, batch_size, name=name)
        self.found += _tpu_data.findings(
            batches,
            replicas=self._replicas,
            takes_uneven=_takes_uneven(self._trainer),
            what=what,
        )
        if _batch.is_tf_dataset(dataset):
            from kdpkit.diagnostics import _tpu_pipeline  # TensorFlow is there

            self.found += _tpu_pipeline.findings(dataset, remote=self._remote, what=what)
        return batches

    def _is_computable(self) -> bool:
        parts = self._batches.parts if self._batches else ()
        return all(part.is_dense and part.dtype != "string" for part in parts)


def _backend(remote: bool) -> str:
    backend = str(keras.backend.backend())
    if backend not in ("tensorflow", "jax"):
        _checks.refuse(
            "TPUs are checked for TensorFlow and for JAX.",
            backend=backend,
            remedy="Run with KERAS_BACKEND=jax or KERAS_BACKEND=tensorflow.",
        )
    if remote and backend == "jax":
        _checks.refuse(
            "`remote` is about TensorFlow, whose TPU hosts read the data; JAX runs on the machine "
            "that has the TPU, and reads that machine's disk.",
            remote=remote,
            remedy="Leave it out.",
        )
    return backend


def _takes_uneven(trainer: Any) -> bool:
    """Tell whether training takes batches of any size: on JAX that of `kdpkit.training`."""
    if trainer is None or keras.backend.backend() != "jax":
        return False
    is_exact = "fit" in vars(trainer)  # as `replica_exact` leaves a model
    return is_exact or _tpu_step.is_loop(trainer)


def _output_widths(model: Any, first: Any) -> set[int] | None:
    """Give the last sizes of what the model gives; None where that is not known.

    Args:
        model: The model.
        first: A batch, for a model whose outputs show when it is called.
    """
    outputs = getattr(model, "outputs", None)
    if outputs is None and first is not None:
        outputs = _outputs_for(model, first)
    outputs = [output for output in keras.tree.flatten(outputs) if output is not None]
    if not outputs or not model.built:
        return None
    return {output.shape[-1] for output in outputs if output.shape}


def _outputs_for(model: Any, first: Any) -> Any:
    x, _, _ = keras.utils.unpack_x_y_sample_weight(first)

    def placeholder(part: Any) -> Any:
        return keras.KerasTensor(part.shape, keras.backend.standardize_dtype(part.dtype))

    try:
        return model.compute_output_spec(keras.tree.map_structure(placeholder, x))
    except Exception:  # the step has failed in the same place, and a finding says so
        return None


def _unchecked_step() -> _findings.Finding:
    return _findings.Finding(
        "unchecked-step",
        "note",
        "train step",
        "It was not compiled, as these data cannot reach it, or were not looked at.",
        "Mend the data first, and check again.",
    )


def _unchecked_data(what: str) -> _findings.Finding:
    return _findings.Finding(
        "unchecked-data",
        "note",
        what,
        "It is a Python generator, which gives each batch once: a look would take one away.",
        "Give a dataset that can be begun again, such as a `keras.utils.PyDataset` or a "
        "`tf.data.Dataset`; generators feed a TPU one batch after the other.",
    )


def _tensorflow_note() -> _findings.Finding:
    return _findings.Finding(
        "tensorflow",
        "note",
        "backend",
        "Keras 3 trains on TPUs through JAX; its `fit` under TensorFlow's `TPUStrategy` is not "
        "proven.",
        "This TPU works through JAX: set KERAS_BACKEND=jax. `tf.data` pipelines go on working.",
    )
