"""The steps of `TrainingLoop` on JAX: one device, or a mesh of them.

A step is one program over the whole batch, which XLA cuts along the rows; so it computes what one
device would, batch statistics, masks and an uneven last batch included. The model's variables
always hold the state's arrays: what a callback reads or assigns is what the next step goes on from.
"""

import collections
import contextlib
import functools
import itertools
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental.sparse import JAXSparse
from keras import ops
from keras.src.backend import compute_output_spec
from keras.src.trainers.data_adapters import get_data_adapter  # what `fit` reads its data with

from kdpkit import _checks, _processes, _versions, sharding
from kdpkit.batches import rows_of
from kdpkit.training._feed import Feed
from kdpkit.training._objective import PLACEHOLDER_ROWS, additional_loss, trace_metrics
from kdpkit.training._steps import Steps
from kdpkit.training.jax import _agreement

_CALLS_AHEAD = 4  # how far Python may run ahead of the devices, which keep a batch for each call


class State(NamedTuple):
    """The values of all variables that a step reads."""

    trainable: list[Any]
    non_trainable: list[Any]
    metrics: list[Any]
    optimizer: list[Any]


class JaxSteps(Steps):
    """Runs the steps of a loop on a mesh.

    Args:
        loop: The `TrainingLoop`.
        strategy: A mesh or a `DataParallel`; None for the one set in Keras, or one device.
        jit: Whether XLA compiles the steps; None asks the model, "measure" means True.
    """

    def __init__(self, loop: Any, strategy: Any, jit: Any) -> None:
        self.loop = loop
        self.model = loop.model
        if loop.batch_norm != "global":
            _checks.refuse(
                "On JAX one program computes the global batch, and so its statistics.",
                batch_norm=loop.batch_norm,
                remedy='Use `batch_norm="global"`.',
            )
        self.strategy = sharding.as_mesh(strategy)
        self._jit = jit
        self._means = {"": keras.metrics.Mean("loss")}  # and of the outputs, if several
        self._placed: dict[int, Any] = {}
        self._running: collections.deque[Any] = collections.deque()
        self._is_built = False
        self._functions: dict[Any, Callable] = {}  # compiled for these variables:
        self._variables = State([], [], [], [])

    @property
    def jit(self) -> bool:
        """Whether XLA compiles the steps."""
        return bool(self.model.jit_compile if self._jit is None else self._jit)

    @property
    def is_jit_chosen(self) -> bool:
        """Whether that is settled; here it always is."""
        return True

    @property
    def means(self) -> list[Any]:
        """The metrics of the losses."""
        return [*self._means.values()]

    def scope(self) -> Any:
        """Enter nothing: on JAX variables belong to no place."""
        return contextlib.nullcontext()

    def guard(self) -> Any:
        """Enter what explains that another process is gone."""
        return _processes.naming_losses()

    def check_parts(self) -> None:
        """Refuse to compare the parts of a batch that is in one part.

        Raises:
            ValueError: There is no accumulation.
        """
        if self.loop.accumulation == 1:
            _checks.refuse(
                "The noise scale is estimated from how the gradients of parts of a batch differ, "
                "and on JAX a step is one program over the whole batch, whose devices have none "
                "of their own.",
                accumulation=1,
                remedy="Use `accumulation=2` or more.",
            )

    # Before the first step: the data, and all variables.

    def open(self, dataset: Any, name: str, **steps: int | None) -> Feed:
        """Check a dataset, and build the model for its batches."""
        ((argument, wanted),) = steps.items()
        if wanted is not None:
            wanted = _checks.integer(argument, wanted)
        source = _Source(dataset, name, self.strategy)
        if source.is_endless and wanted is None:
            _checks.refuse(f"`{name}` never ends; say with `{argument}` how much of it to take.")
        return Feed(name, source, wanted=wanted, length=lambda: source.length)

    def build(self, feed: Feed, *, training: bool) -> None:
        """Make all variables now: a compiled step can make none."""
        if not self._is_built:
            placeholders = feed.batches.placeholders()
            if not self.model.built:
                x, _, _ = keras.utils.unpack_x_y_sample_weight(placeholders)
                compute_output_spec(functools.partial(self.model, training=False), x)
            if self.loop.accumulation > 1:
                _versions.refuse_sums_over_rows(self.model)
            self._build_metrics(placeholders)
            self._is_built = True
        if training and not self.model.optimizer.built:
            self.model.optimizer.build(self.model.trainable_variables)
        variables = self._all_variables()
        if _identities(variables) != _identities(self._variables):
            self._variables = variables
            self._functions.clear()

    def _build_metrics(self, placeholders: Any) -> None:
        names = trace_metrics(self.loop, placeholders)
        self._means |= {name: keras.metrics.Mean(f"{name}_loss") for name in names}

    # Many steps in a call.

    def reset_metrics(self) -> None:
        """Begin an epoch or an evaluation."""
        self.model.reset_metrics()
        for mean in self._means.values():
            mean.reset_state()

    def train(self, batches: "_Batches", steps: int) -> tuple[int, dict[str, Any]]:
        """Run up to so many training steps; give how many there were, and loss and metrics."""
        return self._run(self._train_step, batches, steps)

    def test(self, batches: "_Batches", steps: int) -> tuple[int, dict[str, Any]]:
        """Run up to so many evaluation steps; give how many there were, and loss and metrics."""
        return self._run(self._test_step, batches, steps)

    def predict(self, batches: "_Batches", steps: int) -> tuple[int, list[Any]]:
        """Predict up to so many batches; give how many there were, and their predictions."""
        predict = self._compiled(self._predict_step)
        outputs = [predict(self._values(), batch) for batch in itertools.islice(batches, steps)]
        return len(outputs), jax.device_get(outputs)

    def finish_training(self) -> None:
        """Give the model the averages of its weights, if the optimizer keeps such."""
        self.model.optimizer.finalize_variable_values(self.model.trainable_variables)

    def _run(self, step: Callable, batches: "_Batches", steps: int) -> tuple[int, Any]:
        done, logs = 0, None
        while done < steps and (group := batches.take(steps - done)):
            function = self._compiled(step if len(group) == 1 else self._repeated(step))
            state, logs = function(self._values(), batches.place(group))
            self._keep(state)
            self._wait_for_earlier(logs)
            done += len(group)
        return done, logs

    def _wait_for_earlier(self, logs: dict[str, Any]) -> None:
        self._running.append(logs["loss"])
        if len(self._running) > _CALLS_AHEAD:
            self._running.popleft().block_until_ready()

    def _compiled(self, step: Callable) -> Callable:
        """Compile a step once; it may use the buffers of its state, except where it gives none."""
        key = step, self.jit
        if key not in self._functions:
            donated = () if step == self._predict_step else 0
            self._functions[key] = jax.jit(step, donate_argnums=donated) if self.jit else step
        return self._functions[key]

    @functools.cache  # noqa: B019 a loop keeps its steps as long as it lives
    def _repeated(self, step: Callable) -> Callable:
        """Make a step over many batches, stacked along a new first axis."""

        def steps(state: State, batches: Any) -> tuple[State, dict[str, Any]]:
            state, _ = jax.lax.scan(lambda s, batch: (step(s, batch)[0], None), state, batches)
            return state, self._logs(state)

        return steps

    # The state, in the variables.

    def _all_variables(self) -> State:
        model = self.model
        sums = [*self._means.values(), *([self.loop.noise_sums] if self.loop.noise_sums else [])]
        means = [variable for of_steps in sums for variable in of_steps.variables]
        return State(
            model.trainable_variables,
            model.non_trainable_variables,
            model.metrics_variables + means,
            model.optimizer.variables if model.optimizer else [],
        )

    def _values(self) -> State:
        """Read the variables; what somebody else assigned is first copied to every device."""
        placement = sharding.replicated(self.strategy)

        def value_of(variable: Any) -> Any:
            value = variable._value
            if value is not self._placed.get(id(variable)):
                # A copy: the step uses its buffer, which somebody may hold.
                copied = np.array if jax.process_count() > 1 else jnp.copy
                value = jax.device_put(copied(variable.value), placement)
                self._put(variable, value)
            return value

        return State._make([*map(value_of, part)] for part in self._variables)

    def _keep(self, state: State) -> None:
        for variables, values in zip(self._variables, state, strict=True):
            for variable, value in zip(variables, values, strict=True):
                self._put(variable, value)

    def _put(self, variable: Any, value: Any) -> None:
        # Not `assign`, which checks and converts: this is done for every variable in every step.
        variable._value = value
        self._placed[id(variable)] = value

    # One step, over the whole batch.

    def _train_step(self, state: State, batch: Any) -> tuple[State, dict[str, Any]]:
        batch = sharding.split_rows(batch, self.strategy)
        optimizer = self.model.optimizer
        sums, state = self._over_micro_batches(state, batch)
        state, factors = self._update_losses(state, sums, rows_of(batch))
        gradients = [
            sum(part * factor for part, factor in zip(parts, [1.0, *factors], strict=True))
            for parts in zip(*sums.gradients, strict=True)
        ]
        if self.loop.noise_sums:
            state = self._note_noise(state, sums, [1.0, *factors], gradients, rows_of(batch))
        trainable, of_optimizer = optimizer.stateless_apply(
            state.optimizer, gradients, state.trainable
        )
        state = state._replace(trainable=trainable, optimizer=of_optimizer)
        return state, self._logs(state)

    def _note_noise(
        self, state: State, sums: "Sums", factors: list[Any], whole: list[Any], rows: int
    ) -> State:
        """Hold the squared norms of the parts of a batch against that of the whole."""
        factor = jnp.stack([jnp.float32(factor) for factor in factors])
        of_parts = jnp.sum(jnp.outer(factor, factor) * sums.products)
        with self._scope(state) as scope:
            scale = self.model.optimizer.scale_loss(jnp.float32(1.0)) ** 2
            self.loop.noise_sums.add(
                parts=min(self.loop.accumulation, rows),
                rows=rows,
                of_parts=of_parts / scale,
                of_whole=_inner_products([whole])[0, 0] / scale,
            )
        return self._updated(state, scope)

    def _test_step(self, state: State, batch: Any) -> tuple[State, dict[str, Any]]:
        batch = sharding.split_rows(batch, self.strategy)
        rows = rows_of(batch)
        _, (sums, state) = self._forward(state.trainable, state, batch, rows, training=False)
        state, _ = self._update_losses(state, sums, rows)
        return state, self._logs(state)

    def _predict_step(self, state: State, batch: Any) -> Any:
        batch = sharding.split_rows(batch, self.strategy)
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        with self._scope(state):
            outputs = self.model(x, training=False)
        # On every device: at a program's border no array may be cut unevenly.
        placement = sharding.replicated(self.strategy)
        return jax.lax.with_sharding_constraint(outputs, placement)

    def _scope(self, state: State) -> Any:
        pairs = [
            pair
            for variables, values in zip(self._variables, state, strict=True)
            for pair in zip(variables, values, strict=True)
        ]
        return keras.StatelessScope(state_mapping=pairs, collect_losses=True)

    def _updated(self, state: State, scope: Any) -> State:
        """Give the state with what was assigned in a scope."""

        def current(variable: Any, value: Any) -> Any:
            assigned = scope.get_current_value(variable)
            return value if assigned is None else assigned

        groups = zip(self._variables, state, strict=True)
        return State._make([*map(current, of, values)] for of, values in groups)

    def _forward(
        self, trainable: list[Any], state: State, batch: Any, all_rows: int, *, training: bool
    ) -> tuple[tuple[Any, ...], tuple["Sums", State]]:
        """Compute the losses of some rows: those whose divisor is known, then each that is not."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        share = rows_of(batch) / all_rows
        with self._scope(state._replace(trainable=trainable)) as scope:
            losses, predictions = self.loop.per_example_loss(x, y, training=training)
            terms = self.loop.loss.terms(losses, predictions, sample_weight)
            additional = ops.convert_to_tensor(additional_loss(self.model.losses, share))
            self.model.compute_metrics(x, y, predictions, sample_weight)
            plain = {term.name: term.plain_divisor(all_rows) for term in terms}
            counted = {t.name: t.counted for t in terms if t.counted is not None}
            sums = Sums(
                losses={term.name: term.total / plain[term.name] for term in terms},
                real={name: count / plain[name] for name, count in counted.items()},
                additional=additional,
            )
            weighted = {n: self.loop.loss.weight(n) * loss for n, loss in sums.losses.items()}
            of_real = [weighted.pop(name) for name in sums.real]
            parts = (sum(weighted.values(), additional), *of_real)
            if training:
                parts = tuple(self.model.optimizer.scale_loss(part) for part in parts)
        state = self._updated(state, scope)._replace(trainable=state.trainable)
        return parts, (sums, state)

    def _differentiated(self, state: State, batch: Any, all_rows: int) -> tuple["Sums", State]:
        """Add the gradients of each part of the loss."""
        forward = functools.partial(
            self._forward, state=state, batch=batch, all_rows=all_rows, training=True
        )
        parts, pull_back, (sums, state) = jax.vjp(forward, state.trainable, has_aux=True)
        zeros = [jnp.zeros_like(part) for part in parts]
        gradients = []
        for index, part in enumerate(parts):
            one_hot = (*zeros[:index], jnp.ones_like(part), *zeros[index + 1 :])
            gradients.append(pull_back(one_hot)[0])
        if self.loop.noise_sums:
            products = all_rows / rows_of(batch) * _inner_products(gradients)
            sums = sums._replace(products=products)
        return sums._replace(gradients=gradients), state

    def _over_micro_batches(self, state: State, batch: Any) -> tuple["Sums", State]:
        """Add up what the pieces of a batch give; every device has a part of each piece."""
        rows = rows_of(batch)
        count = min(self.loop.accumulation, rows)
        pieces = [
            jax.tree.map(lambda part, i=i: _piece(part, i, count), batch) for i in range(count)
        ]
        if rows % (count * self.strategy.size) == 0 and count > 1:
            stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *pieces)
            return self._scanned(state, stacked, rows)
        sums, state = self._differentiated(state, pieces[0], rows)
        for piece in pieces[1:]:
            more, state = self._differentiated(state, piece, rows)
            sums = jax.tree.map(jnp.add, sums, more)
        return sums, state

    def _scanned(self, state: State, pieces: Any, rows: int) -> tuple["Sums", State]:
        def body(carry: Any, piece: Any) -> tuple[Any, None]:
            sums, state = carry
            more, state = self._differentiated(state, piece, rows)
            return (jax.tree.map(jnp.add, sums, more), state), None

        first, rest = (jax.tree.map(lambda part, s=s: part[s], pieces) for s in (0, slice(1, None)))
        return jax.lax.scan(body, self._differentiated(state, first, rows), rest)[0]

    def _update_losses(self, state: State, sums: "Sums", rows: int) -> tuple[State, list[Any]]:
        """Log the losses; give the factors that put real divisors in the place of plain ones."""
        factors = {
            name: jnp.where(real > 0, 1 / jnp.where(real > 0, real, 1), 0)
            for name, real in sums.real.items()
        }
        total = sums.additional
        with self._scope(state) as scope:
            for name, loss in sums.losses.items():
                divided = loss * factors.get(name, 1.0)
                total += self.loop.loss.weight(name) * divided
                if name:
                    self._means[name].update_state(divided, sample_weight=rows)
            self._means[""].update_state(total, sample_weight=rows)
        return self._updated(state, scope), [*factors.values()]

    def _logs(self, state: State) -> dict[str, Any]:
        with self._scope(state):
            losses = {mean.name: mean.result() for mean in self._means.values()}
            return self.model.get_metrics_result() | losses


def _piece(part: Any, index: int, count: int) -> Any:
    """Take every `count`-th row, so that every device has some of each piece."""
    # Of a single row without a step: of rows cut over devices XLA then takes other ones.
    return part[index : index + 1] if count == len(part) else part[index::count]


def _inner_products(gradients: list[list[Any]]) -> Any:
    """Give the inner products of the gradients of several losses, as a matrix in float32."""

    def product(one: list[Any], other: list[Any]) -> Any:
        pairs = zip(one, other, strict=True)
        return sum(jnp.sum(a.astype("float32") * b.astype("float32")) for a, b in pairs)

    return jnp.stack([jnp.stack([product(a, b) for b in gradients]) for a in gradients])


def _identities(variables: State) -> list[list[int]]:
    return [[*map(id, part)] for part in variables]


class Sums(NamedTuple):
    """What some rows give; more rows are added to it.

    Args:
        losses: Of each output, over the divisor of the whole batch without weights and masks.
        real: Of each output whose divisor weights and masks decide: that divisor over the other.
        additional: Regularizers and what `add_loss` added.
        gradients: First of all that is complete, then of each loss in `real`.
        products: Where the noise scale is asked for, the inner products of the gradients, times
            the rows of the whole batch over these rows.
    """

    losses: dict[str, Any]
    real: dict[str, Any]
    additional: Any
    gradients: Any = None
    products: Any = None


class _Source:
    """A dataset of any kind that Keras' `fit` takes, epoch by epoch, as batches on the host."""

    def __init__(self, dataset: Any, name: str, mesh: Any) -> None:
        if isinstance(dataset, np.ndarray | jax.Array | tuple | dict):
            _checks.refuse(
                f"`{name}` must give batches, and is a {type(dataset).__name__}.",
                remedy="Give a `tf.data.Dataset`, a `keras.utils.PyDataset` or a Grain dataset "
                "of batches.",
            )
        _versions.refuse_grain(name, dataset)
        self._mesh = mesh
        self._adapter = get_data_adapter(dataset)
        cardinality = getattr(dataset, "cardinality", None)
        self.is_endless = cardinality is not None and int(cardinality()) == -1
        self._epoch: Generator[Any, None, None] | None = None
        is_tracked = hasattr(dataset, "is_tracked")  # by `kdpkit.callbacks.Resume`
        self._is_opened = not (is_tracked or isinstance(dataset, keras.utils.PyDataset))
        if self._is_opened:
            # The batch that is looked at is the first to be trained on: a generator gives it once.
            self._epoch = self._new_epoch()
            self.first = next(self._epoch, None)
        else:  # any batch can be looked at, and somebody may still move to another place
            self.first = (
                next(self._adapter.get_jax_iterator(), None) if is_tracked else _looked_at(dataset)
            )
        _check_batch(name, self.first)
        self._batches: Callable[..., _Batches] = _Batches
        if _processes.count() > 1:
            _agreement.check_batches(name, self.length, self.first)
            self._batches = functools.partial(
                _SharedBatches, name=name, first=self.first, is_counted=self.length is not None
            )

    @property
    def length(self) -> int | None:
        """Batches in an epoch, or in what is left of one; None if that shows only at its end."""
        return self._adapter.num_batches

    def __iter__(self) -> "_Batches":
        if self._is_opened:
            self._is_opened = False
            return self._batches(itertools.chain([self.first], self._epoch or ()), self._mesh)
        if self._epoch is not None:
            self._epoch.close()  # the last epoch may have stopped before its end
        self._epoch = self._new_epoch()
        return self._batches(self._epoch, self._mesh)

    def _new_epoch(self) -> Generator[Any, None, None]:
        self._adapter.on_epoch_begin()
        try:
            yield from self._adapter.get_jax_iterator()
        finally:
            self._adapter.on_epoch_end()

    def placeholders(self) -> Any:
        """Give Keras' placeholders for a batch."""
        return jax.tree.map(
            lambda part: keras.KerasTensor((PLACEHOLDER_ROWS, *part.shape[1:]), part.dtype.name),
            self.first,
        )


def _looked_at(dataset: Any) -> Any:
    """Give the first batch of a `PyDataset` as Keras hands it on; None if there is none."""
    if dataset.num_batches == 0:
        return None
    batch = dataset[0]
    nest = tuple(batch) if isinstance(batch, list | tuple) else batch
    return keras.tree.map_structure(lambda part: part if part is None else np.asarray(part), nest)


def _check_batch(name: str, batch: Any) -> None:
    if batch is None:
        _checks.refuse(f"`{name}` gave no batch, so there is nothing to compute.")
    sparse = [leaf.shape for leaf in keras.tree.flatten(batch) if isinstance(leaf, JAXSparse)]
    if sparse:
        _checks.refuse(
            f"`{name}` gives sparse arrays, and a loop on JAX cuts batches into rows, which these "
            "do not keep apart.",
            sparse=sparse,
            remedy="Give dense arrays, or train with `replica_exact`, which takes sparse ones.",
        )
    leaves = jax.tree.leaves(batch)
    shapes = [np.shape(leaf) for leaf in leaves]
    if any(not shape or shape[0] != shapes[0][0] for shape in shapes):
        _checks.refuse(
            f"`{name}` gives single examples, and must give batches.",
            shapes=shapes,
            remedy="Add `.batch(global_batch_size)`.",
        )
    kinds = {leaf.dtype.name for leaf in leaves if leaf.dtype.kind in "OSU"}
    if kinds:
        _checks.refuse(
            f"`{name}` gives text, and JAX has numbers alone; look text up in the pipeline.",
            dtypes=sorted(kinds),
        )


class _Batches:
    """An epoch's batches: taken in groups of one shape, and put on the devices."""

    def __init__(self, batches: Iterator[Any], mesh: Any) -> None:
        self._batches = batches
        self._mesh = mesh
        self._waiting: list[Any] = []

    def __iter__(self) -> "_Batches":
        return self

    def __next__(self) -> Any:
        """Put the next batch on the devices."""
        group = self.take(1)
        if not group:
            raise StopIteration
        return self.place(group)

    def take(self, most: int) -> list[Any]:
        """Take the next batches that have the same shapes, up to so many; none at the end."""
        group: list[Any] = []
        for batch in itertools.chain(self._waiting, self._batches):
            self._waiting = []
            if group and _agreement.shapes_of(batch) != _agreement.shapes_of(group[0]):
                self._waiting = [batch]
                break
            group.append(batch)
            if len(group) == most:
                break
        return group

    def place(self, group: list[Any]) -> Any:
        """Put one batch on the devices, or several, stacked along a new first axis."""
        if len(group) > 1:
            return sharding.place_batches(group, self._mesh)
        if self._mesh.size == 1:
            return group[0]  # the compiled step puts it where the variables are, and sooner
        return sharding.place_batch(group[0], self._mesh)


class _SharedBatches(_Batches):
    """The batches of one of several processes, which all take as many, of the same shapes."""

    def __init__(
        self, batches: Iterator[Any], mesh: Any, *, name: str, first: Any, is_counted: bool
    ) -> None:
        super().__init__(batches, mesh)
        self._name = name
        self._is_counted = is_counted
        self._wanted = _agreement.shapes_of(first)

    def take(self, most: int) -> list[Any]:
        """Take the next batches, as many as in every other process."""
        group = super().take(most)
        if group and _agreement.shapes_of(group[0]) != self._wanted:
            _checks.refuse(
                f"With several processes all batches of `{self._name}` must have one shape.",
                first=self._wanted,
                later=_agreement.shapes_of(group[0]),
                remedy='Drop or pad the last batch: `ArrayBatches(remainder="pad")`.',
            )
        if not self._is_counted:
            _processes.require_equal(
                f"The number of batches of `{self._name}`",
                [len(group)],
                remedy="Give every process equally many; here one has come to its end.",
            )
        return group
