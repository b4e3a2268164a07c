"""Verification before training: what a step gives must not depend on how its batch is cut.

A few examples go through the user's own step twice, before anything is trained: split unevenly over
the replicas, and all on the first one, as on one device. Gradients as the optimizers get them, logs
and the variables that the step assigns must agree to rounding. Whatever was assigned is put back.
"""

import contextlib
import dataclasses
import functools
import pathlib
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdpkit import errors
from kdpkit._internal import checks, error_text, processes
from kdpkit.training import _rounding
from kdpkit.training.tensorflow import (
    _keras_internals,
    _shards,
    _step_graph,
    _variables,
    _verification_report,
    _workers,
)
from kdpkit.training.tensorflow._keras_internals import UnliftableError
from kdpkit.training.tensorflow._step_patches import gradients_of_steps, noting_layers
from kdpkit.training.tensorflow._verification_report import Item, Kind

# A step of some examples: from what gives a replica its shard, and the trial, to the logs.
Step = Callable[[Callable[[], Any], "Trial"], Any]

_ROUNDING = 1e-5  # of a tensor's largest entry, in float32
_FLOOR = 2e-7  # of the largest gradient of all
# What draws other numbers every time that it runs, whatever the seeds of Keras are.
_RANDOM_OPS = frozenset(
    {"RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal", "RandomGamma"}
    | {"RandomShuffle", "Multinomial", "StatefulUniform", "StatefulStandardNormalV2"}
    | {"RandomPoissonV2", "StatefulRandomBinomial", "ParameterizedTruncatedNormal"}
    | {"UniformCandidateSampler", "LogUniformCandidateSampler", "FixedUnigramCandidateSampler"}
    | {"LearnedUnigramCandidateSampler", "AllCandidateSampler", "StatefulTruncatedNormal"}
)
_PYTHON_OPS = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc"})
_AMPLIFIED = 8.0  # times what rounding the weights changes is still called rounding
_LATER = (0, 1, 999_983)  # steps, after which what counts them does something else, perhaps


class Trial:
    """What a step does while it is tried: its optimizers note their gradients, and do not train.

    Args:
        detailed: Whether to note what explains a difference, too.
    """

    def __init__(self, *, detailed: bool = False) -> None:
        self.detailed = detailed
        self.noted: dict[str, tuple[Kind, str, Any]] = {}
        self.of_tape: list[Any] = []  # gradients as tapes gave them
        self.applied: list[Any] = []  # and as optimizers got them, in each replica
        self.shared: list[Any] = []  # what all replicas have alike
        self.examples: list[tuple[Any, int]] = []  # in each replica, and where their axis is
        self.roots: list[Any] = []  # losses, logs, and what metrics are given
        self.layers: list[tuple[list[Any], list[Any]]] = []  # inputs and outputs of libraries' own

    def note_examples(self, batch: Any) -> None:
        """Note what the step begins with."""
        for leaf in tf.nest.flatten(batch):
            self.examples += [] if leaf is None else _step_graph.labels_of(leaf)

    def note(self, kind: Kind, name: str, value: Any) -> None:
        """Note a value that all replicas together give."""
        numbered = f"{kind.value} {name} {sum(kind is of for of, _, _ in self.noted.values())}"
        self.noted[numbered] = (kind, name, _dense(value))

    def noting_sum(self, kind: Kind, name: str) -> Callable[[Any, Any], int]:
        """Return what notes, outside of the replicas, the sum of what each of them has."""

        def note(strategy: tf.distribute.Strategy, value: Any) -> int:
            self.note(kind, name, strategy.reduce(tf.distribute.ReduceOp.SUM, value, axis=None))
            return 0

        return note

    def note_gradients(
        self,
        optimizer: keras.optimizers.Optimizer,
        variables: Sequence[Any],
        gradients: Sequence[Any],
        kind: Any = None,
    ) -> None:
        """Note the gradients that an optimizer gets for the global batch."""
        for variable, gradient in zip(variables, gradients, strict=True):
            if gradient is not None:
                local = tf.distribute.get_strategy().experimental_local_results(gradient)[0]
                path = getattr(variable, "path", variable.name)
                self.note(kind or Kind.GRADIENT, f"{optimizer.name}: {path}", local)


@dataclasses.dataclass
class Verification:
    """Tries a step on some examples, cut in two ways.

    Args:
        strategy: The strategy of several replicas.
        step: The step, which calls what it is given, in a replica, for the replica's shard.
        owner: The model, whose weights are nudged to tell rounding from a difference.
        eager: Whether the step must run eagerly.
    """

    strategy: tf.distribute.Strategy
    step: Step
    owner: Any
    eager: bool = False
    # What one device gives: the first way to run the step on one replica, by how many steps later.
    on_one: dict[int, dict[str, Item]] = dataclasses.field(default_factory=dict)
    found_later: int = 0  # after how many steps the difference shows
    problem: str | None = None  # what the step does, by its graph, that examples may not show
    needs_examples: bool = False  # in every replica
    calls_python: bool = False

    @property
    def hidden(self) -> str | None:
        """What the step does that the examples may not show."""
        fails = "The step fails on replicas that have no examples of a batch"
        return self.problem or (fails if self.needs_examples else None)

    def check(self, batch: Any) -> None:
        """Raise an error if the step depends on how the batch is cut.

        Args:
            batch: A batch of several replicas, or of one.

        Raises:
            ValueError: It does; the sentence names what, by how much, and what to write instead.
        """
        _shards.check_same_lengths(self.strategy, batch)
        if differing := self.differences(batch):
            cuts = _Cuts(self, self._examples_of(batch), detailed=True)
            cuts.later = self.found_later
            split, alone = cuts.both()
            _verification_report.fail_by_differences(split, alone, differing)

    def differences(self, batch: Any) -> list[str]:
        """Name what depends on how the batch is cut, by more than rounding."""
        cuts = _Cuts(self, self._examples_of(batch), detailed=False)
        self.found_later, differing = 0, self._differences_of(cuts)
        self.problem = self.problem or cuts.problem
        self.needs_examples = self.needs_examples or cuts.needs_examples
        self.calls_python = self.calls_python or cuts.calls_python
        for later in _LATER[1:] if cuts.switches else ():
            if not differing:
                cuts.later = self.found_later = later
                with contextlib.suppress(
                    tf.errors.OpError
                ):  # a count may be a position in a tensor
                    differing = self._differences_of(cuts)
        return differing

    def _differences_of(self, cuts: "_Cuts") -> list[str]:
        split, alone = cuts.both()
        if not any(cuts.alone[1:]):
            self.on_one.setdefault(cuts.later, alone)
        if not self._found(_differing(split, alone) or self._unlike_the_first(cuts, alone)):
            if not (cuts.problem or self.eager):  # then cuts that agree are as one device
                self.on_one.setdefault(cuts.later, alone)
            return []
        if self._found(_differing(cuts.given(cuts.alone), alone)):
            _verification_report.reject_random(cuts.random_ops)
        nudged = cuts.nudged()
        noise = {label: nudged[label].difference(alone[label]) for label in alone.keys() & nudged}
        differing = _differing(split, alone, noise) + self._unlike_the_first(cuts, alone, noise)
        return [item.name for item in differing] or ["in another process"] * self._found(differing)

    def _unlike_the_first(
        self, cuts: "_Cuts", alone: dict[str, Item], noise: dict[str, float] | None = None
    ) -> list[Item]:
        """List what a way to run the step gives on one replica that the first way did not."""
        if self.on_one.get(cuts.later) is alone:
            return []
        first = _of_first_replica(self.on_one.get(cuts.later, {}))
        first = {label: item for label, item in first.items() if np.isfinite(item.value).all()}
        here = {label: item for label, item in _of_first_replica(alone).items() if label in first}
        return _differing(here, first, noise)

    def _examples_of(self, batch: Any) -> Any:
        return _shards.first_examples(self.strategy, batch, 2 * self.strategy.num_replicas_in_sync)

    def _found(self, differing: list[Item]) -> bool:
        """Return whether something differs in any process: all must go on alike."""
        found = int(bool(differing))
        if _workers.spans_processes(self.strategy):
            return bool(processes.gathered([found], self.strategy).any())
        return bool(found)


class _Cuts:
    """A step, compiled once, and what it gives for some examples cut in several ways."""

    def __init__(self, of: Verification, examples: Any, *, detailed: bool) -> None:
        self.strategy, self.step, self.owner = of.strategy, of.step, of.owner
        self.detailed = detailed
        self.leaves = [leaf for leaf in tf.nest.flatten(examples) if leaf is not None]
        self.structure = examples
        self.kinds: dict[str, tuple[Kind, str]] = {}
        self.variables: list[Any] = []
        self.random_ops: list[str] = []
        self.problem: str | None = None
        self.needs_examples = False
        self.calls_python = False
        self.switches: list[Any] = []
        self.later = 0  # by how many steps the switches are moved on
        self.run = self._run if of.eager else self._compiled()
        if of.eager:
            self.variables = _variables.all_variables(self.owner, [])
        replicas = self.strategy.num_replicas_in_sync
        self.split = [1] + [2] * (replicas - 1)  # one first: so positions in replicas are others
        self.alone = [2 * replicas - 1] + [0] * (replicas - 1)
        if of.needs_examples:
            self.leave_none_without_examples()

    def both(self) -> tuple[dict[str, Item], dict[str, Item]]:
        """Return what the step gives, split over the replicas and all on the first one."""
        try:
            alone = self.given(self.alone)
        except tf.errors.OpError:  # a step that needs an example in every replica
            self.leave_none_without_examples()
            alone = self._given_or_explained(self.alone)
        return self._given_or_explained(self.split), alone

    def leave_none_without_examples(self) -> None:
        """Cut the examples in two ways that give some to every replica."""
        replicas = len(self.split)
        self.needs_examples = True
        self.split, self.alone = [2] * replicas, [replicas + 1, *[1] * (replicas - 1)]

    def _given_or_explained(self, sizes: list[int]) -> dict[str, Item]:
        try:
            return self.given(sizes)
        except tf.errors.OpError as error:
            shapes = [tuple(leaf.shape) for leaf in self.leaves]
            _verification_report.fail(
                "The step fails on replicas that have some of a batch's examples each: "
                f"{error_text.first_line(error.message)}. Examples must lie along the first axis "
                "of everything in a batch, and there may be any number of them.",
                {"shapes": shapes, "examples_of_replicas": sizes},
                "Write the step for any number of examples (`ops.shape(x)[0]`), and put other axes "
                "behind them.",
            )

    def nudged(self) -> dict[str, Item]:
        """Return what the step gives on the first replica with weights changed by rounding."""
        saved = _variables.values([weight.value for weight in self.owner.trainable_weights])
        try:
            _rounding.nudge_weights(self.owner)
            return self.given(self.alone)
        finally:
            _variables.restore(saved)

    def given(self, sizes: list[int]) -> dict[str, Item]:
        """Run the step on shards of these sizes, and put back what it assigned."""
        saved = _variables.values(self.variables)
        try:
            if self.later:
                _variables.move(self.switches, self.later)
            noted = self.run(*self.leaves, tf.constant(sizes))
            items = {
                label: Item(label, *self.kinds[label], np.asarray(value).astype("float64"))
                for label, value in noted.items()
                if value.dtype != tf.string
            }
            return items | self._assigned(saved) | self._counted_without_examples(saved, sizes)
        finally:
            _variables.restore(saved)

    def _compiled(self) -> Callable:
        signature = [*map(_shards.of_any_length, self.leaves), tf.TensorSpec([None], tf.int32)]
        function = tf.function(self._run, autograph=False, input_signature=signature)
        compiled = self._traced(function)
        self.variables = _variables.all_variables(self.owner, compiled.graph.variables)
        self.switches = _variables.switches(self.owner, self.variables, compiled.graph.variables)
        definition = compiled.graph.as_graph_def()
        types = {*_types_of_ops(definition)}
        self.random_ops, self.calls_python = [*_RANDOM_OPS & types], bool(_PYTHON_OPS & types)
        handles = {id(inner): id(outer) for outer, inner in compiled.graph.captures}

        def inside(of: set[int]) -> set[str]:
            return {x.op.name for x in compiled.graph.inputs if handles.get(id(x)) in of}

        self.problem = _step_graph.problem(
            compiled.graph,
            self.trial,
            inside(_variables.handles_of_libraries(self.owner)),
            inside(_variables.handles_that_add_up(self.owner, self.variables)),
        )
        _keras_internals.forget_gradients(definition)
        return functools.partial(_without_optimizing, compiled)

    def _traced(self, function: Any) -> Any:
        """Trace the step, and say in a sentence what TensorFlow cannot do on replicas."""
        layers = self.owner._flatten_layers(include_self=False)
        unbuilt = [layer.name for layer in layers if not layer.built]
        try:
            return function.get_concrete_function()
        except UnliftableError:
            checks.fail(
                "The step makes the weights of layers, which it cannot on several replicas.",
                layers=unbuilt,
                remedy="Build them before, inside `with strategy.scope():`, by `layer.build(shape)`"
                " or a `keras.Input`.",
            )
        except (TypeError, ValueError) as error:
            is_of_size = re.search("None|reshape", str(error))
            if not is_of_size or isinstance(error, errors.InputError):
                raise
            checks.fail(
                "The step fails where it is not known how many examples a batch has, as on several "
                "replicas while it is traced.",
                error=_line_about_shapes(error),
                remedy="Write `ops.shape(x)[0]` for `x.shape[0]`, and -1 for the size of a batch "
                "in a reshape. If the step calls the model on something else than the batch's "
                "features, call it once on that, in the scope.",
            )
        except NotImplementedError as error:
            raised = traceback.extract_tb(error.__traceback__)[-1]
            if "tensorflow" not in pathlib.Path(raised.filename).parts:  # the user's own error
                raise
            checks.fail(
                "A variable of several replicas cannot do what the step asks of it.",
                method=raised.name,
                remedy="Assign a complete value, `variable.assign(...)`, such as that of "
                "`tf.tensor_scatter_nd_update(variable, indices, updates)`.",
            )

    def _run(self, *leaves_and_sizes: Any) -> dict[str, Any]:
        *leaves, sizes = leaves_and_sizes
        following = iter(leaves)
        examples = tf.nest.map_structure(
            lambda leaf: None if leaf is None else next(following), self.structure
        )
        self.trial = trial = Trial(detailed=self.detailed)
        with self.strategy.scope():
            with gradients_of_steps(), noting_layers():

                def shard() -> Any:
                    of_replica = _shards.shard_of_replica(examples, sizes)
                    trial.note_examples(of_replica)
                    return of_replica

                logs = self.step(shard, trial)
            for name, value in _named(logs):
                trial.note(Kind.LOG, name, self.strategy.experimental_local_results(value)[0])
        self.kinds = {label: (kind, name) for label, (kind, name, _) in trial.noted.items()}
        return {label: value for label, (_, _, value) in trial.noted.items()}

    def _assigned(self, saved: list[Any]) -> dict[str, Item]:
        """Return the variables that the step assigned, but for the states of metrics."""
        names = _variables.names(self.owner, self.variables)
        items = {}
        for number, (variable, before) in enumerate(saved):
            if id(variable) not in names:
                continue
            now = [part.numpy() for part in _variables.parts(variable)]
            if any(_variables.has_changed(*values) for values in zip(now, before, strict=True)):
                if variable.synchronization == tf.VariableSynchronization.ON_READ:
                    now = [variable.read_value().numpy()]
                label = f"variable {number}"
                stacked = np.stack(now).astype("float64")
                items[label] = Item(label, Kind.VARIABLE, names[id(variable)], stacked)
        return items

    def _counted_without_examples(self, saved: list[Any], sizes: list[int]) -> dict[str, Item]:
        """Return by how much metrics change on replicas that have no examples: not at all."""
        names = {id(v.value): v.path for v in self.owner.metrics_variables}
        items = {}
        for number, (variable, before) in enumerate(saved):
            if id(variable) not in names:
                continue
            changes = [
                _variables.largest_change(part.numpy(), old.numpy())
                for part, old, size in zip(_variables.parts(variable), before, sizes, strict=False)
                if size == 0
            ]
            label = f"metric {number}"
            change = np.array(max(changes, default=0.0), "float64")
            items[label] = Item(label, Kind.LOG, names[id(variable)], change)
        return items


def _without_optimizing(function: Callable, *args: Any) -> Any:
    """Call a graph as it is: it runs a few times, and to optimize it takes longer than that."""
    name = "disable_meta_optimizer"
    before = tf.config.optimizer.get_experimental_options().get(name, False)
    tf.config.optimizer.set_experimental_options({name: True})
    try:
        return function(*args)
    finally:
        tf.config.optimizer.set_experimental_options({name: before})


def _types_of_ops(definition: Any) -> Iterator[str]:
    yield from (node.op for node in definition.node)
    yield from (node.op for inner in definition.library.function for node in inner.node_def)


def _named(logs: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(logs, dict):
        for name, value in logs.items():
            yield from ((f"{name}", part) for part in tf.nest.flatten(value))
    else:
        yield from (("output", part) for part in tf.nest.flatten(logs))


def _dense(value: Any) -> Any:
    """Describe a sparse gradient by sums over its slices: it may be too large as a table.

    One is of squares, because that is what optimizers add up of slices one by one.
    """
    if not isinstance(value, tf.IndexedSlices):
        return tf.convert_to_tensor(value)
    weights = tf.sin(tf.cast(value.indices, tf.float64)) + 2.0
    weights = tf.cast(weights, value.values.dtype)
    flat = tf.reshape(value.values, [tf.shape(weights)[0], -1])
    weighted = tf.linalg.matvec(flat, weights, transpose_a=True)
    return tf.stack([tf.reduce_sum(flat, 0), weighted, tf.reduce_sum(tf.square(flat), 0)])


def _of_first_replica(items: dict[str, Item]) -> dict[str, Item]:
    """Return the gradients, and the first replica's variables: metrics may count the others too."""
    return {
        label: dataclasses.replace(item, value=item.value[:1])
        if item.kind is Kind.VARIABLE
        else item
        for label, item in items.items()
        if item.kind in (Kind.GRADIENT, Kind.VARIABLE)
    }


def _differing(
    split: dict[str, Item], alone: dict[str, Item], noise: dict[str, float] | None = None
) -> list[Item]:
    """List what differs by more than rounding, and than what rounding the weights changes."""
    largest = max((item.size for item in alone.values() if item.kind is Kind.GRADIENT), default=0.0)
    differing = []
    for label in split.keys() | alone.keys():
        if label not in split or label not in alone:
            differing.append(split.get(label) or alone[label])
            continue
        one, other = split[label], alone[label]
        allowed = _ROUNDING * other.size
        if one.kind is Kind.GRADIENT:
            allowed = max(allowed, _FLOOR * largest)
        if noise and label in noise:
            allowed = max(allowed, _AMPLIFIED * noise[label])
        if not one.difference(other) <= allowed:
            differing.append(other)
    return differing


def _line_about_shapes(error: Any) -> str:
    """Return the line of a message that tells of an unknown size, or else its first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    found = [line for line in lines if re.search("None|reshape", line)]
    return re.sub(r"\x1b\[\d*m", "", (found or lines)[0]).rstrip(".")
