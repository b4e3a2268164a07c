"""`replica_exact` on JAX: batches of any size, and weights that survive an error.

Keras raises under `DataParallel` for a batch that the devices cannot divide. While it evaluates or
predicts, the model has no weights: after an error or Ctrl-C they are lost.
"""

import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax.experimental.sparse import JAXSparse
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from keras.src.backend.jax import distribution_lib, trainer

from kdpkit import sharding
from kdpkit._internal import checks, processes, versions
from kdpkit.sharding import _shards as shards
from kdpkit.sharding._batches import replicated, split_examples
from kdpkit.sharding._meshes import as_mesh, require_none_forgotten
from kdpkit.training.jax._lowering import divide_sums
from kdpkit.training.jax._process_checks import (
    check_across_processes,
    comparing_lengths,
    require_same_mesh,
    shapes_of,
)


def attach(model: keras.Model) -> None:
    """Replace a model's `fit`, `evaluate`, `predict` and their steps, once, on the instance."""
    if "kdpkit_steps" in vars(model.train_step):
        return
    distribution = keras.distribution.distribution()
    mesh = as_mesh(distribution)
    require_same_mesh(mesh)
    if distribution is not None:
        divide_sums(mesh)
        shards.patch(_PATCHES)
        model.train_step = _splitting(model.train_step, mesh)
        model.test_step = _splitting(model.test_step, mesh)
        model.predict_step = _gathering(_splitting(model.predict_step, mesh), mesh)
        if versions.KERAS < (3, 16):
            model._make_function = _scanning(model, model._make_function, mesh)
        model.train_function = model.test_function = model.predict_function = None
    for name in ("fit", "evaluate", "predict"):
        method = getattr(model, name)
        # In this scope Keras places the data as the variables, also where none is set now.
        scoped = distribution.scope()(method) if distribution else method
        setattr(model, name, _keeping_weights(model, scoped, distribution))


def _place(model: keras.Model, distribution: Any) -> None:
    """Put variables on the devices that were created before the distribution was set."""
    if isinstance(distribution, sharding.ModelParallel):
        distribution.lay_out(model)
    mesh = as_mesh(distribution)
    placements = shards.of(distribution, mesh)
    optimizer = getattr(model, "optimizer", None)
    for variables, placement in (
        (model.variables + model.metrics_variables, placements.of_weight),
        (optimizer.variables if optimizer else [], placements.of_optimizer),
    ):
        for variable in variables:
            value = variable._value
            if value is not None and value.sharding.device_set != {*mesh.devices.flat}:
                variable._value = jax.device_put(np.asarray(value), placement(variable))


def _splitting(step: Callable, mesh: Mesh) -> Callable:
    """Have XLA divide a step along the examples, also of a batch that every device has."""

    @functools.wraps(step)
    def split(state: Any, data: Any) -> Any:
        check_distribution(mesh)
        return step(state, split_examples(data, mesh))

    split.kdpkit_steps = True  # type: ignore[attr-defined]  # marks a model that is patched
    return split


def check_distribution(mesh: Mesh) -> None:
    """Raise if another distribution is set now than when `replica_exact` was called."""
    distribution = keras.distribution.distribution()
    if distribution is not None and as_mesh(distribution) != mesh:
        checks.fail(
            "Another distribution is set than when `replica_exact` was called.",
            then=mesh,
            now=distribution,
            remedy="Set it first, then build the model.",
        )


def _gathering(step: Callable, mesh: Mesh) -> Callable:
    """Put predictions on every device, if they are sharded unevenly or over processes.

    A program cannot return unevenly sharded arrays, and a process cannot read those of another.
    """
    count = shards.batch_shards(mesh)

    @functools.wraps(step)
    def gathered(state: Any, data: Any) -> Any:
        outputs, rest = step(state, data)
        sizes = [size for leaf in jax.tree.leaves((data, outputs)) for size in leaf.shape[:1]]
        if any(size % count for size in sizes) or jax.process_count() > 1:
            outputs = jax.lax.with_sharding_constraint(outputs, replicated(mesh))
        return outputs, rest

    return gathered


_reading = threading.local()  # `is_on` while batches stay on the host, to be stacked there


def _scanning(model: keras.Model, make_function: Callable, mesh: Mesh) -> Callable:
    """Have Keras compute the steps of `steps_per_execution` in one program, as Keras 3.16 does.

    Before, it places the batches and calls the compiled step one by one. Batches are taken together
    while their shapes are equal.
    """
    axis = shards.batch_axis(mesh)
    of_stack = NamedSharding(mesh, PartitionSpec(None, axis))

    def make(step: Callable, concatenate_outputs: bool = False) -> Callable:
        count = model.steps_per_execution
        if concatenate_outputs or count == 1 or model.run_eagerly or not model.jit_compile:
            return make_function(step, concatenate_outputs)

        @functools.partial(jax.jit, donate_argnums=0)
        def scan(state: Any, batches: Any) -> Any:
            def body(state: Any, batch: Any) -> Any:
                logs, new = step(state, batch)
                return jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(new)), logs

            state, logs = jax.lax.scan(body, state, batches)
            return jax.tree.map(lambda log: log[-1], logs), state

        def place(*parts: Any) -> Any:
            return distribution_lib.distribute_data_input(np.stack(parts), of_stack, axis)

        def run(state: Any, iterator: Iterator[Any]) -> Any:
            _reading.is_on = True
            try:
                batches = [next(iterator), *itertools.islice(iterator, count - 1)]
            finally:
                _reading.is_on = False
            for _, equal in itertools.groupby(batches, shapes_of):
                group = [*equal]
                if len(group) > 1 and all(
                    isinstance(x, np.ndarray) for x in jax.tree.leaves(group)
                ):
                    logs, state = scan(state, jax.tree.map(place, *group))
                    continue
                for batch in group:
                    logs, state = step(state, trainer._distribute_data(batch))
            return logs, state

        return run

    return make


def _place_uneven(
    original: Callable, per_process_batch: Any, layout: Any, batch_dim_name: str, **settings: Any
) -> Any:
    """Put a batch that the devices cannot divide on each of them."""
    if getattr(_reading, "is_on", False):
        return per_process_batch
    if layout is None or jax.process_count() > 1:
        return original(per_process_batch, layout, batch_dim_name, **settings)
    placement = getattr(layout, "backend_layout", layout)
    mesh = placement.mesh
    # Where Keras 3.16 stacks the batches of several steps, examples are the second axis.
    sizes = zip(np.shape(per_process_batch), placement.spec, strict=False)
    count = mesh.shape[batch_dim_name]
    is_uneven = any(size % count for size, axis in sizes if axis == batch_dim_name)
    # A sparse array is a list of values, which cannot be divided along the examples.
    if is_uneven or isinstance(per_process_batch, JAXSparse):
        return jax.device_put(per_process_batch, replicated(mesh))
    return original(per_process_batch, layout, batch_dim_name, **settings)


def _place_without_weights(original: Callable, data: Any, layouts: Any = None) -> Any:
    """Place batches of `train_on_batch` that have no `sample_weight`."""
    while layouts is None and isinstance(data, tuple) and data[-1] is None:
        data = data[:-1]
    return original(data, layouts)


_NAMES = ("per_process_batch", "layout", "batch_dim_name")
_PATCHES: list[tuple] = [
    # It raises for uneven batches: keras-team/keras#21167
    (distribution_lib, "distribute_data_input", _place_uneven, *_NAMES),
    # Several processes whose data have other lengths hang.
    (trainer.JAXEpochIterator, "_get_iterator", comparing_lengths),
]
if versions.KERAS < (3, 15):  # which raises for None
    _PATCHES.append((trainer, "_distribute_data", _place_without_weights))


def _keeping_weights(model: keras.Model, method: Callable, distribution: Any) -> Callable:
    """Restore the values of variables if a method fails while Keras holds them elsewhere."""
    # docs/upstream/keras_jax_evaluate_loses_weights.py
    mesh = as_mesh(distribution)

    @functools.wraps(method)
    def keeping(*args: Any, **kwargs: Any) -> Any:
        check_distribution(mesh)
        _check_data(*args, **kwargs)
        if distribution is None:
            require_none_forgotten("model", model.name)
        else:
            _place(model, distribution)
        before = [(variable, variable._value) for variable in _variables(model)]
        try:
            with processes.explain_lost_process():
                result = method(*args, **kwargs)
            _separate_values(_variables(model))
            return result
        except BaseException:
            # This restores the values after the last step; before the first, there are none.
            model.jax_state_sync()
            for variable, value in before:
                if variable._value is None and not value.is_deleted():
                    variable._value = value
            raise

    return keeping


def _variables(model: keras.Model) -> list[keras.Variable]:
    optimizer = [model.optimizer] if getattr(model, "optimizer", None) else []
    owned = [variable for owner in (model, *optimizer) for variable in owner.variables]
    return owned + model.metrics_variables


def _separate_values(variables: Sequence[keras.Variable]) -> None:
    """Copy a value that two variables share, since XLA can reuse a buffer only once."""
    # docs/upstream/keras_jax_ema_shares_arrays.py
    seen: set[int] = set()
    for variable in variables:
        if variable._value is not None and id(variable._value) in seen:
            variable._value = jax.numpy.copy(variable._value)
        seen.add(id(variable._value))


def _check_data(x: Any = None, *_: Any, **settings: Any) -> None:
    """Raise for data with which several processes would wait for each other without end."""
    if settings.get("_use_cached_eval_dataset"):
        return
    validation = settings.get("validation_data")
    validation = validation[0] if isinstance(validation, tuple | list) else validation
    check_across_processes("x", x)
    check_across_processes("validation_data", validation)
