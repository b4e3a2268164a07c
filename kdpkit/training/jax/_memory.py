"""The memory that a step of Keras' `fit` needs on each device, from its compiled program."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import keras
from jax.extend.core import Literal
from jax.sharding import NamedSharding

from kdpkit import sharding
from kdpkit._internal import versions
from kdpkit.batches._array_batches import num_examples
from kdpkit.sharding import _shards as shards
from kdpkit.sharding._batches import by_examples, replicated, split_examples
from kdpkit.sharding._meshes import as_mesh
from kdpkit.training._remat import blocks_of, rematerialized
from kdpkit.training._without_logits import in_step

# On CPUs XLA computes arrays as early as it can, in parallel, and gathers weights before a loop.
# With the first two options it saves memory, as on GPUs and TPUs; the other two save time to
# compile.
_PASSES = "cpu-all-reduce-combiner,while-loop-invariant-code-motion"
_FOR_MEMORY = {
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
    "xla_disable_hlo_passes": _PASSES,
    "xla_backend_optimization_level": "0",
    "xla_llvm_disable_expensive_passes": True,
}
# On CPUs XLA finds repeated operations, and would keep the results of `remat` after all.
_FOR_REMAT = _FOR_MEMORY | {"xla_disable_hlo_passes": f"{_PASSES},cse"}
_BATCHES_AHEAD = 2  # that `fit` puts on the devices before they are needed


class State(NamedTuple):
    """What the step of a model takes and returns, in Keras' order."""

    trainable: list[Any]
    other: list[Any]
    optimizer: list[Any]
    metrics: list[Any]


class StepMemory:
    """The memory of a model's step for any devices and settings; no variables are allocated."""

    def __init__(self, make: Callable[[], tuple[Any, keras.Model]]) -> None:
        try:  # While they are traced, the initializers of variables compute nothing.
            jax.eval_shape(functools.partial(self._build, make))
        except jax.errors.JAXTypeError:  # The model needs a value to be built.
            self._build(make)

    def _build(self, make: Callable[[], tuple[Any, keras.Model]]) -> None:
        batch, self.model = make()
        self.batch = jax.tree.map(lambda part: _spec(part.shape, part.dtype), batch)
        self.model._symbolic_build(data_batch=self.batch)
        if not self.model.optimizer.built:
            self.model.optimizer.build(self.model.trainable_variables)

    @property
    def global_batch_size(self) -> int:
        return num_examples(self.batch)

    @property
    def can_remat(self) -> bool:
        return any(True for _ in blocks_of(self.model))

    @functools.cached_property
    def accumulation_is_exact(self) -> bool:
        """Whether a step changes only weights: no statistics, and no states of random layers."""
        distribution = sharding.DataParallel(1)
        state, batch = self._arguments(distribution)
        with distribution.scope():
            jaxpr = jax.make_jaxpr(self._step(distribution))(state, batch).jaxpr
        arguments, results = (
            State(*jax.tree.unflatten(jax.tree.structure(state), variables))
            for variables in (
                jaxpr.invars[: len(jax.tree.leaves(state))],
                jaxpr.outvars[-len(jax.tree.leaves(state)) :],
            )
        )
        return all(map(lambda new, old: new is old, results.other, arguments.other))

    def need(
        self, replicas: int, *, model: int = 1, shard: Any, accumulation: int = 1, remat: bool
    ) -> dict[str, Any]:
        """Compile the step; return its bytes and floating-point operations on one device.

        With `accumulation` it is a step on a part of the batch, and Keras' optimizer keeps the
        gradients of the other parts.
        """
        strategy: Any = sharding.DataParallel(replicas, shard=shard)
        if model > 1:
            strategy = sharding.ModelParallel(replicas, model=model, shard=shard)
        program, state, batch = self.compiled(strategy, accumulation=accumulation, remat=remat)
        analysis = program.memory_analysis()
        working = analysis.temp_size_in_bytes + max(
            0, analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        )
        gradients = min(_bytes(state.trainable), working)
        activations = self.activations(accumulation, remat=remat) // (replicas // model)
        activations = min(activations, working - gradients)
        accumulated = _bytes(self._accumulators(strategy)) if accumulation > 1 else 0
        return {
            "weights": _bytes(state.trainable) + _bytes(state.other) + _bytes(state.metrics),
            "gradients": gradients,
            "optimizer": _bytes(state.optimizer) + accumulated,
            "activations": activations + (_BATCHES_AHEAD + 1) * _bytes(jax.tree.leaves(batch)),
            "temporaries": working - gradients - activations,
            "operations": program.cost_analysis()["flops"],
        }

    def compiled(
        self, distribution: Any, *, accumulation: int = 1, remat: bool = False
    ) -> tuple[Any, State, Any]:
        """Compile the step for a distribution; return it, and the shapes of its arguments."""
        state, batch = self._arguments(distribution, accumulation)
        placements = jax.tree.map(lambda value: value.sharding, state)
        step = jax.jit(
            self._step(distribution), donate_argnums=0, out_shardings=(None, tuple(placements))
        )
        with distribution.scope(), rematerialized(self.model, remat):
            lowered = step.lower(state, batch)
        if as_mesh(distribution).devices.flat[0].platform != "cpu":
            return lowered.compile(), state, batch
        versions.require_newer(  # an older one cannot schedule for memory on CPUs
            "Planning memory on a CPU needs JAX 0.10 or later. Install it, or plan on the device."
        )
        options = _FOR_REMAT if remat else _FOR_MEMORY
        return lowered.compile(compiler_options=options), state, batch

    def _step(self, distribution: Any) -> Callable:
        """Return Keras' step, as `replica_exact` has it on these devices."""
        mesh = as_mesh(distribution)

        def step(state: State, batch: Any) -> Any:
            # Not the instance's, which may be that of `replica_exact` for other devices.
            with in_step(self.model):
                return type(self.model).train_step(self.model, state, split_examples(batch, mesh))

        return step

    def _arguments(self, distribution: Any, accumulation: int = 1) -> tuple[State, Any]:
        """Return shapes, dtypes and placements of a step's arguments."""
        model, mesh = self.model, as_mesh(distribution)
        if isinstance(distribution, sharding.ModelParallel):
            for variable, layout in distribution.layouts_of(model):
                variable._layout = layout
        placed = shards.of(distribution, mesh)
        groups = (
            (model.trainable_variables, placed.of_weight),
            (model.non_trainable_variables, placed.of_weight),
            (model.optimizer.variables, placed.of_optimizer),
            (model.metrics_variables, placed.of_weight),
        )
        state = State(
            *([_spec(v.shape, v.dtype, place(v)) for v in group] for group, place in groups)
        )
        size = math.ceil(self.global_batch_size / accumulation)
        placement = replicated(mesh) if size % shards.batch_shards(mesh) else by_examples(mesh)
        batch = jax.tree.map(
            lambda part: _spec((size, *part.shape[1:]), part.dtype, placement), self.batch
        )
        return state, batch

    def _accumulators(self, distribution: Any) -> list[jax.ShapeDtypeStruct]:
        """Return what Keras' optimizer makes for `gradient_accumulation_steps`."""
        placed = shards.of(distribution, as_mesh(distribution))
        variables = self.model.trainable_variables
        return [_spec(v.shape, v.dtype, placed.of_optimizer(v)) for v in variables]

    def activations(self, accumulation: int = 1, *, remat: bool) -> int:
        """Return the bytes that the forward pass of a step keeps for the backward pass."""
        distribution = sharding.DataParallel(1)
        state, batch = self._arguments(distribution, accumulation)

        def pull_back(state: State, batch: Any) -> Any:
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)

            def loss(trainable: list[jax.Array]) -> Any:
                return self.model.compute_loss_and_updates(
                    *(trainable, state.other, state.metrics, x, y, sample_weight),
                    training=True,
                    optimizer_variables=state.optimizer,
                )[0]

            return jax.vjp(loss, state.trainable)[1]

        with distribution.scope(), rematerialized(self.model, remat), in_step(self.model):
            jaxpr = jax.make_jaxpr(pull_back)(state, batch).jaxpr
        arguments = {id(variable) for variable in jaxpr.invars}
        outputs = {id(v): v.aval for v in jaxpr.outvars if not isinstance(v, Literal)}
        return _bytes(aval for key, aval in outputs.items() if key not in arguments)


def _spec(shape: Any, dtype: Any, placement: NamedSharding | None = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        tuple(shape), jax.dtypes.canonicalize_dtype(dtype), sharding=placement
    )


def _bytes(arrays: Iterable[Any]) -> int:
    """Return the bytes of arrays on one device."""
    shapes = [
        (array.sharding.shard_shape(array.shape) if array.sharding else array.shape, array.dtype)
        for array in arrays
    ]
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)
