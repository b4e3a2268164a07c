"""The batches that `check_parity` takes, and the errors for others."""

from typing import Any

import tensorflow as tf

from kdpkit import errors
from kdpkit._internal import checks
from kdpkit._internal.error_text import first_line

_SPEC_OF_NONE = type(tf.type_spec_from_value(None))  # TensorFlow 2.19 has no name for it


def checked_dataset(data: Any) -> tf.data.Dataset:
    if isinstance(data, tuple) and 1 <= len(data) <= 3 and data[0] is not None:
        data = _dataset_of(data)
    if not isinstance(data, tf.data.Dataset):
        checks.fail(
            "`data` must be a tf.data.Dataset of batches, or one batch as a tuple (x, y) or "
            "(x, y, sample_weight) of arrays.",
            types=_types(data),
            remedy="`tf.data.Dataset.from_generator` makes a dataset of a generator.",
        )
    parts = data.element_spec
    if isinstance(parts, tuple) and isinstance(parts[-1], _SPEC_OF_NONE):
        kept = len(parts) - 1
        return checked_dataset(data.map(lambda *parts: parts[:kept]))
    return data


def _dataset_of(batch: tuple[Any, ...]) -> tf.data.Dataset:
    try:
        return tf.data.Dataset.from_tensors(batch)
    except (TypeError, ValueError) as error:
        raise errors.InputError(
            f"`data` must hold arrays that TensorFlow can take ({first_line(error)}). Received: "
            f"types={_types(batch)!r}."
        ) from error


def _types(data: object) -> Any:
    return tuple(map(_types, data)) if isinstance(data, tuple) else type(data).__name__


def check_batches(batches: list[Any], specs: Any) -> None:
    if not batches:
        checks.fail("`data` holds no batch.", batches=0)
    for spec in tf.nest.flatten(specs):
        if not isinstance(spec, tf.TensorSpec):
            checks.fail(
                "`data` must hold dense tensors alone.",
                spec=spec,
                remedy="Pad ragged ones and make sparse ones dense (`.to_tensor()`, "
                "`tf.sparse.to_dense`), or leave a None out.",
            )
    for number, batch in enumerate(batches):
        shapes = [tuple(leaf.shape) for leaf in tf.nest.flatten(batch)]
        if () in shapes or len({shape[0] for shape in shapes}) > 1:
            checks.fail(
                "`data` must hold batches, whose parts all have the examples along the first "
                "dimension.",
                shapes=shapes,
                remedy="Batch a dataset of single examples with `.batch(...)` first.",
            )
        if shapes[0][0] == 0:
            checks.fail("`data` holds a batch without examples.", batch=number, shapes=shapes)


def with_any_batch(spec: tf.TensorSpec) -> tf.TensorSpec:
    """Return the specification of a part of batches of any size."""
    if spec.shape.rank is None:
        return spec
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
