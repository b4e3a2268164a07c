"""The steps of `TrainingLoop` on JAX, on one device or a mesh of them.

A step is one program over the global batch, which XLA divides along the examples. So it computes
what one device would, also for batch statistics, masks and batches of any size. Between the steps
the model's variables hold the current values, which callbacks may read and assign.
"""

import collections
import contextlib
import functools
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.sharding import Mesh

from kdpkit import sharding
from kdpkit._internal import checks, processes, shards, versions
from kdpkit.batches._array_batches import num_examples
from kdpkit.sharding._batches import replicated, split_examples
from kdpkit.sharding._meshes import as_mesh
from kdpkit.training._feed import Feed
from kdpkit.training._keras_internals import compute_output_spec
from kdpkit.training._objective import Sums, trace_metrics
from kdpkit.training._remat import rematerialised
from kdpkit.training._steps import Steps
from kdpkit.training.jax._batches import Batches, Source
from kdpkit.training.jax._fit import reject_local_statistics
from kdpkit.training.jax._lowering import divide_sums
from kdpkit.training.jax._moments import of_constant_means
from kdpkit.training.jax._random import MicroBatch, by_position
from kdpkit.training.jax._remat import checkpointed
from kdpkit.training.jax._state import State, Variables

Logs = dict[str, jax.Array]
CALLS_AHEAD = 4  # Python runs ahead of the devices by so many calls, each with its batches.


class JaxSteps(Steps):
    """Runs the steps of a loop on a mesh."""

    def __init__(
        self,
        loop: Any,
        strategy: Mesh | keras.distribution.DataParallel | None,
        jit: bool | str,
    ) -> None:
        reject_local_statistics(loop.batch_norm)
        self.loop = loop
        self.model: keras.Model = loop.model
        self.strategy = as_mesh(strategy)
        divide_sums(self.strategy)
        self._distribution = keras.distribution.distribution() if strategy is None else strategy
        self._jit = jit
        self._means = {"": keras.metrics.Mean("loss")}
        self._running: collections.deque[jax.Array] = collections.deque()
        self._is_built = False
        self._variables = Variables(shards.of(strategy, self.strategy))
        self._functions: dict[Any, Callable] = {}  # the compiled steps for these variables

    def scope(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def guard(self) -> AbstractContextManager[Any]:
        return processes.explain_lost_process()

    # Before the first step: the data, and all variables.

    def open(self, dataset: Any, name: str, **steps: int | None) -> Feed:
        ((argument, steps_per_epoch),) = steps.items()
        source = Source(dataset, name, self.strategy)
        if source.is_endless and steps_per_epoch is None:
            checks.fail(f"`{name}` never ends; limit it with `{argument}`.")
        return Feed(
            name,
            source,
            steps_per_epoch=steps_per_epoch,
            length=lambda: source.length,
            end=source.end_epoch,
        )

    def build(self, feed: Feed, *, training: bool) -> None:
        if not self._is_built:
            placeholders = feed.batches.placeholders()
            if not self.model.built:
                x, _, _ = keras.utils.unpack_x_y_sample_weight(placeholders)
                compute_output_spec(functools.partial(self.model, training=False), x)
            if isinstance(self._distribution, sharding.ModelParallel):
                self._distribution.lay_out(self.model)
            if self.loop.accumulation > 1:
                versions.reject_sums_over_examples(self.model)
            names = trace_metrics(self.loop, placeholders)
            self._means |= {name: keras.metrics.Mean(f"{name}_loss") for name in names}
            self._is_built = True
        if training and not self.model.optimizer.built:
            self.model.optimizer.build(self.model.trainable_variables)
        self._choose_variables()

    def _choose_variables(self) -> None:
        """Choose the variables whose values a step takes and returns."""
        model = self.model
        layers = model._flatten_layers()
        self._variables.seeds = {
            id(seed.state) for layer in layers for seed in layer._seed_generators
        }
        mean_variables = [variable for mean in self.means for variable in mean.variables]
        has_changed = self._variables.choose(
            model.trainable_variables,
            model.optimizer.variables if model.optimizer else [],
            model.non_trainable_variables + model.metrics_variables + mean_variables,
        )
        if has_changed:
            self._functions.clear()

    # Many steps in a call.

    def train(self, batches: Batches, steps: int) -> tuple[int, Logs]:
        return self._run(self._train_step, batches, steps)

    def test(self, batches: Batches, steps: int) -> tuple[int, Logs]:
        return self._run(self._test_step, batches, steps)

    def predict(self, batches: Batches, steps: int) -> tuple[int, list[Any]]:
        if not self._is_built:  # The dataset may have no labels to build metrics with.
            self._choose_variables()
        predict, outputs = self._compiled(self._predict_step), []
        for batch in itertools.islice(batches, steps):
            state, predicted = predict(self._variables.read(), batch)
            self._variables.write(state)
            outputs.append(predicted)
        return len(outputs), jax.device_get(outputs)

    def _run(self, step: Callable, batches: Batches, steps: int) -> tuple[int, Logs]:
        done, logs = 0, {}
        while done < steps and (group := batches.take(steps - done)):
            function = self._compiled(step, is_repeated=len(group) > 1)
            state, logs = function(self._variables.read(), batches.place(group))
            self._variables.write(state)
            self._running.append(logs["loss"])
            if len(self._running) > CALLS_AHEAD:
                self._running.popleft().block_until_ready()
            done += len(group)
        return done, logs

    def _compiled(self, step: Callable, *, is_repeated: bool = False) -> Callable:
        """Return a step, compiled once, which may reuse the memory of its state."""
        key = step, is_repeated, self.jit
        if key not in self._functions:
            function = self._repeated(step) if is_repeated else step
            self._functions[key] = jax.jit(function, donate_argnums=0) if self.jit else function
        return self._functions[key]

    def _repeated(self, step: Callable) -> Callable:
        """Return a function that runs a step on many batches, stacked along a new first axis."""

        def steps(state: State, batches: Any) -> tuple[State, Logs]:
            state, _ = jax.lax.scan(lambda s, batch: (step(s, batch)[0], None), state, batches)
            logs, _ = self._variables.run(state, self._logs)
            return state, logs

        return steps

    # One step, over the global batch.

    def _train_step(self, state: State, batch: Any) -> tuple[State, Logs]:
        batch = split_examples(batch, self.strategy)
        sums, state = self._over_micro_batches(state, batch)

        def finish() -> tuple[list[jax.Array], Logs]:
            factors = [1.0, *self._log_losses(sums, lambda loss: (loss, num_examples(batch)))]
            gradients = [
                sum(part * factor for part, factor in zip(parts, factors, strict=True))
                for parts in zip(*sums.gradients, strict=True)
            ]
            return gradients, self._logs()

        (gradients, logs), state = self._variables.run(state, finish)
        trainable, optimizer = self.model.optimizer.stateless_apply(
            state.optimizer, gradients, state.trainable
        )
        state = state._replace(trainable=trainable, optimizer=optimizer)
        return self._variables.constrained(state), logs

    def _test_step(self, state: State, batch: Any) -> tuple[State, Logs]:
        batch = split_examples(batch, self.strategy)

        def run() -> Logs:
            _, sums = self._forward(batch, num_examples(batch), training=False)
            self._log_losses(sums, lambda loss: (loss, num_examples(batch)))
            return self._logs()

        logs, state = self._variables.run(state, run)
        return state, logs

    def _predict_step(self, state: State, batch: Any) -> tuple[State, Any]:
        batch = split_examples(batch, self.strategy)
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        outputs, state = self._variables.run(state, lambda: self.model(x, training=False))
        # A program cannot return arrays that are sharded unevenly.
        placement = replicated(self.strategy)
        return state, jax.lax.with_sharding_constraint(outputs, placement)

    def _forward(
        self, batch: Any, num_global_examples: int, *, training: bool
    ) -> tuple[list[jax.Array], Sums]:
        """Return the losses to minimize for some examples, as `Objective.parts`, and all sums."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        with rematerialised(self.loop, checkpointed) if training else contextlib.nullcontext():
            losses, predictions = self.loop.per_example_loss(x, y, training=training)
        terms = self.loop.loss.terms(losses, predictions, sample_weight)
        counts = num_examples(batch), num_global_examples
        sums = self.loop.loss.sums(terms, self.model.losses, counts)
        self.model.compute_metrics(x, y, predictions, sample_weight)
        parts = self.loop.loss.parts(sums)
        return [*map(self.model.optimizer.scale_loss, parts)] if training else parts, sums

    def _differentiated(
        self, state: State, batch: Any, micro_batch: MicroBatch
    ) -> tuple[Sums, State]:
        """Compute the losses of a micro-batch, and the gradients of each part of them."""
        is_part = micro_batch.count > 1

        def forward(trainable: list[jax.Array]) -> Any:
            random = by_position(micro_batch) if is_part else contextlib.nullcontext()
            with random, of_constant_means():
                (parts, sums), updated = self._variables.run(
                    state._replace(trainable=trainable),
                    lambda: self._forward(batch, micro_batch.num_examples, training=True),
                )
            return parts, (sums, updated.other)

        if not self.loop.remat:  # Rematerialized blocks gather their weights again anyway.
            forward = self._variables.shards.gathering_again(forward)
        parts, pull_back, (sums, other) = jax.vjp(forward, state.trainable, has_aux=True)
        zeros = [jnp.zeros_like(part) for part in parts]
        gradients = []
        for index, part in enumerate(parts):
            one_hot = [*zeros[:index], jnp.ones_like(part), *zeros[index + 1 :]]
            gradients.append(pull_back(one_hot)[0])
        return sums._replace(gradients=gradients), state._replace(other=other)

    def _over_micro_batches(self, state: State, batch: Any) -> tuple[Sums, State]:
        """Add up the sums of all micro-batches, each of which is divided over the devices."""
        size = num_examples(batch)
        count = min(self.loop.accumulation, size)

        def differentiated(state: State, index: Any, part: Any) -> tuple[Sums, State]:
            # Every micro-batch draws from the seeds of the batch.
            state = self._variables.with_seeds_of(before, state)
            return self._differentiated(state, part, MicroBatch(index, count, size))

        def add(carry: tuple[Sums, State], micro_batch: Any) -> tuple[tuple[Sums, State], None]:
            sums, state = carry
            more, state = differentiated(state, *micro_batch)
            return (jax.tree.map(jnp.add, sums, more), state), None

        before = state
        parts = [MicroBatch(i, count, size) for i in range(count)]
        split = functools.partial(split_examples, mesh=self.strategy)
        first, *others = (split(jax.tree.map(part.take_from, batch)) for part in parts)
        carry = differentiated(state, 0, first)
        if others and size % (count * shards.batch_shards(self.strategy)) == 0:
            stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *others)
            return jax.lax.scan(add, carry, (jnp.arange(1, count), stacked))[0]
        for index, other in enumerate(others, 1):
            carry, _ = add(carry, (index, other))
        return carry
