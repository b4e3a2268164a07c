"""The memory that a training step needs on each device, from its compiled program."""

import copy
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.extend.core import Literal
from jax.sharding import Mesh, NamedSharding

from kdpkit import sharding
from kdpkit._internal import shards, versions
from kdpkit._internal.shards import batch_shards
from kdpkit.batches._array_batches import num_examples
from kdpkit.sharding._batches import by_examples, replicated
from kdpkit.sharding._meshes import as_mesh
from kdpkit.training._remat import blocks_of
from kdpkit.training.jax._loop import CALLS_AHEAD, JaxSteps
from kdpkit.training.jax._state import State, Variables

# On CPUs XLA computes arrays as early as it can, in parallel, and gathers weights before the loop
# over micro-batches. With the first two options it saves memory, as on GPUs and TPUs; the other two
# save time to compile.
_PASSES = "cpu-all-reduce-combiner,while-loop-invariant-code-motion"
_FOR_MEMORY = {
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
    "xla_disable_hlo_passes": _PASSES,
    "xla_backend_optimization_level": "0",
    "xla_llvm_disable_expensive_passes": True,
}
# On CPUs XLA finds repeated operations, and would keep the results of `remat` after all.
_FOR_REMAT = _FOR_MEMORY | {"xla_disable_hlo_passes": f"{_PASSES},cse"}


class StepMemory:
    """The memory of a loop's step for any devices and settings; no variables are allocated."""

    def __init__(self, make: Callable[[], tuple[Any, Any]]) -> None:
        try:  # While they are traced, the initializers of variables compute nothing.
            jax.eval_shape(functools.partial(self._build, make))
        except jax.errors.JAXTypeError:  # The model needs a value to be built.
            self._build(make)

    def _build(self, make: Callable[[], tuple[Any, Any]]) -> None:
        dataset, loop = make()
        self._steps: JaxSteps = loop._steps
        feed = self._steps.open(dataset, "dataset", steps=1)  # The dataset may be endless.
        self._steps.build(feed, training=True)
        (batch,) = iter(feed.batches).take(1)
        self.batch = jax.tree.map(lambda part: _spec(part.shape, part.dtype), batch)

    @property
    def loop(self) -> Any:
        return self._steps.loop

    @property
    def global_batch_size(self) -> int:
        return num_examples(self.batch)

    @property
    def can_remat(self) -> bool:
        return any(True for _ in blocks_of(self._steps.model))

    @functools.cached_property
    def micro_batches_are_exact(self) -> bool:
        """Whether a step changes only weights: no statistics, and no states of random layers."""
        steps, state, batch = self._with(sharding.DataParallel(1), 1, False)
        jaxpr = jax.make_jaxpr(steps._train_step)(state, batch).jaxpr
        model_variables = {id(variable) for variable in steps.model.variables}
        first = len(state.trainable) + len(state.optimizer)
        _, _, others = steps._variables.groups
        return all(
            jaxpr.outvars[index] is jaxpr.invars[index]
            for index, variable in enumerate(others, first)
            if id(variable) in model_variables
        )

    def need(
        self, replicas: int, *, model: int = 1, shard: Any, accumulation: int, remat: bool
    ) -> dict[str, Any]:
        """Compile the step; return its bytes and floating-point operations on one device."""
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
        return {
            "weights": _bytes(state.trainable) + _bytes(state.other),
            "gradients": gradients,
            "optimizer": _bytes(state.optimizer),
            "activations": activations + (CALLS_AHEAD + 1) * _bytes(jax.tree.leaves(batch)),
            "temporaries": working - gradients - activations,
            "operations": program.cost_analysis()["flops"],
        }

    def compiled(
        self, strategy: Any, *, accumulation: int = 1, remat: bool = False
    ) -> tuple[Any, State, Any]:
        """Compile the step for a strategy or a mesh; return it, and the shapes of its arguments."""
        steps, state, batch = self._with(strategy, accumulation, remat)
        lowered = jax.jit(steps._train_step, donate_argnums=0).lower(state, batch)
        if steps.strategy.devices.flat[0].platform != "cpu":
            return lowered.compile(), state, batch
        versions.check_memory_can_be_planned()
        options = _FOR_REMAT if remat else _FOR_MEMORY
        return lowered.compile(compiler_options=options), state, batch

    def _with(
        self,
        strategy: sharding.DataParallel | sharding.ModelParallel | Mesh,
        accumulation: int,
        remat: bool,
    ) -> tuple[JaxSteps, State, Any]:
        """Return the steps with other settings, and the shapes of their arguments."""
        if accumulation > 1:
            versions.reject_sums_over_examples(self._steps.model)
        loop = copy.copy(self._steps.loop)
        loop.accumulation, loop.remat = accumulation, remat
        loop.loss = copy.copy(loop.loss)
        loop.loss.in_parts = accumulation > 1
        steps = copy.copy(self._steps)
        steps.loop, steps.strategy = loop, as_mesh(strategy)
        if isinstance(strategy, sharding.ModelParallel):
            for variable, layout in strategy.layouts_of(steps.model):
                variable._layout = layout
        steps._variables = Variables(shards.of(strategy, steps.strategy))
        steps._variables.choose(*self._steps._variables.groups)
        mesh = steps.strategy
        is_uneven = self.global_batch_size % batch_shards(mesh)
        placement = replicated(mesh) if is_uneven else by_examples(mesh)
        batch = jax.tree.map(lambda part: _spec(part.shape, part.dtype, placement), self.batch)
        return steps, steps._variables.shapes(), batch

    def activations(self, accumulation: int, *, remat: bool) -> int:
        """Return the bytes that the forward pass of a micro-batch keeps for the backward pass."""
        steps, state, batch = self._with(sharding.DataParallel(1), accumulation, remat)
        size = math.ceil(self.global_batch_size / accumulation)
        micro_batch = jax.tree.map(lambda part: _spec((size, *part.shape[1:]), part.dtype), batch)

        def pull_back(state: State, batch: Any) -> Any:
            def forward(trainable: list[jax.Array]) -> Any:
                run = functools.partial(steps._forward, batch, size, training=True)
                ((parts, _), _) = steps._variables.run(state._replace(trainable=trainable), run)
                return parts

            return jax.vjp(forward, state.trainable)[1]

        jaxpr = jax.make_jaxpr(pull_back)(state, micro_batch).jaxpr
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
