"""Steps of a loop of one's own on JAX: functions of state and batch, which XLA divides."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax.interpreters.partial_eval import DynamicJaxprTracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from kdpkit._internal import checks, processes, versions
from kdpkit.sharding import _shards as shards
from kdpkit.sharding._batches import place_batch, replicated, split_examples
from kdpkit.sharding._meshes import as_mesh, require_none_forgotten
from kdpkit.training.jax._fit import check_distribution
from kdpkit.training.jax._lowering import divide_sums
from kdpkit.training.jax._process_checks import check_batches, require_same_mesh, shapes_of

# What a `jax.jit` of the user was called with, except for shardings, which it keeps.
_SETTINGS = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")


def exact_step(function: Callable, *, strategy: Any) -> Callable:
    """Return a function that is called as the given one, and that all devices compute."""
    step = _Step(function, strategy)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        step.choose_devices()
        with step.scope(), processes.explain_lost_process():
            return step.run(args, kwargs)

    return call


class _Step:
    """A function with its devices, on which it puts what it is called with."""

    def __init__(self, function: Any, strategy: Any) -> None:
        is_jitted = isinstance(function, jax.stages.Wrapped)
        self._given, self._function = function, function if is_jitted else jax.jit(function)
        self._strategy = strategy
        self._mesh: Any = None
        self._first_shapes: Any = None
        self._states: list[list[Any]] = []  # the leaves of this call's arguments except batches
        self._compiled: dict[frozenset[int | str], Callable] = {}
        if strategy is not None or keras.distribution.distribution() is not None:
            self.choose_devices()

    def choose_devices(self) -> None:
        """Choose the devices of the distribution that is set, once."""
        distribution = keras.distribution.distribution()
        if self._mesh is not None:
            if distribution not in (None, self._strategy):
                check_distribution(self._mesh)
            return
        self._strategy = distribution if self._strategy is None else self._strategy
        if self._strategy is None:
            require_none_forgotten("step", getattr(self._given, "__qualname__", "step"))
        mesh = as_mesh(self._strategy)
        if AxisType.Explicit in mesh.axis_types:
            checks.fail(
                "XLA divides a step only along axes of the type `Auto`.",
                axis_types=mesh.axis_types,
                remedy="Pass `axis_types=(jax.sharding.AxisType.Auto,) * axes` to `make_mesh`.",
            )
        require_same_mesh(mesh)
        divide_sums(mesh)
        self._mesh, self._devices = mesh, {*mesh.devices.flat}

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        is_of_keras = isinstance(self._strategy, shards.Distribution)
        return self._strategy.scope() if is_of_keras else contextlib.nullcontext()

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if len(self._devices) == 1:
            return self._traced(args, kwargs)(*args, **kwargs)
        arguments: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        flat = {name: jax.tree.flatten(argument) for name, argument in arguments.items()}
        batches = frozenset(
            name
            for name, (leaves, _) in flat.items()
            if (name != 0 or len(flat) == 1) and self._is_batch(leaves)
        )
        self._states = [leaves for name, (leaves, _) in flat.items() if name not in batches]
        if any(isinstance(leaf, jax.core.Tracer) for leaves, _ in flat.values() for leaf in leaves):
            if processes.count() > 1:
                checks.fail("With several processes `replica_exact` must stand above `jax.jit`.")
            return self._divided(self._traced(args, kwargs), batches)(*args, **kwargs)
        if batches and processes.count() > 1:
            self._check_shapes([flat[name][0] for name in arguments if name in batches])
        for name, (leaves, tree) in flat.items():
            if any(map(self._is_elsewhere, leaves)):
                leaves[:] = [self._placed(leaf, is_batch=name in batches) for leaf in leaves]
                arguments[name] = tree.unflatten(leaves)
        if batches not in self._compiled:
            self._compiled[batches] = self._jitted(batches)
        positional = [arguments.pop(index) for index in range(len(args))]
        return self._compiled[batches](*positional, **arguments)

    def _traced(self, *arguments: Any) -> Callable:
        """Return the function without our `jax.jit`, if one above it has static arguments."""
        leaves = jax.tree.leaves(arguments)
        is_array = [isinstance(leaf, jax.Array | np.ndarray | np.generic) for leaf in leaves]
        in_jit = not all(is_array) and any(isinstance(leaf, DynamicJaxprTracer) for leaf in leaves)
        return self._given if in_jit else self._function

    def _is_batch(self, leaves: list[Any]) -> bool:
        """Return whether all arrays of an argument are new, and have equally many examples."""
        arrays = [leaf for leaf in leaves if getattr(leaf, "shape", ())]
        return len({array.shape[0] for array in arrays}) == 1 and all(map(self._is_new, arrays))

    def _is_new(self, array: Any) -> bool:
        if processes.count() > 1:  # An array of JAX is the same in all, as a state is.
            return isinstance(array, np.ndarray)
        return isinstance(array, jax.core.Tracer) or self._is_elsewhere(array)

    def _is_elsewhere(self, leaf: Any) -> bool:
        if isinstance(leaf, np.ndarray):
            return True
        devices = getattr(getattr(leaf, "sharding", None), "device_set", self._devices)
        if devices != self._devices and len(devices) > 1:
            checks.fail(
                "An array is on other devices than those of the distribution.",
                devices_of_array=sorted(map(str, devices)),
                devices=sorted(map(str, self._devices)),
                remedy="Set the distribution before the model is built.",
            )
        return devices != self._devices

    def _placed(self, leaf: Any, *, is_batch: bool) -> Any:
        if not self._is_elsewhere(leaf):
            return leaf
        if is_batch and leaf.shape:
            return place_batch(leaf, self._mesh)
        everywhere = replicated(self._mesh)
        if processes.count() == 1:
            return jax.device_put(leaf, everywhere)
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            numbers = self._placed(jax.random.key_data(leaf), is_batch=False)
            return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(leaf))
        return jax.device_put(np.asarray(leaf), everywhere)  # which compares them in all processes

    def _check_shapes(self, batch: Any) -> None:
        """Raise if several processes have batches of different shapes, with which they hang."""
        shapes = shapes_of(batch)
        if self._first_shapes is None:
            check_batches("a step", None, batch)
        elif shapes != self._first_shapes:
            checks.fail(
                "With several processes all batches of a step must have one shape.",
                first=self._first_shapes,
                later=shapes,
                remedy='Drop or pad the last batch: `ArrayBatches(remainder="pad")`.',
            )
        self._first_shapes = shapes

    def _jitted(self, batches: frozenset[int | str]) -> Callable:
        """Compile the function with the settings of the user's own `jax.jit`."""
        info = getattr(self._function, "_jit_info", None)
        if info is None:
            versions.reject_unknown("jax.jit", jax=jax.__version__)
        options = dict(info.compiler_options_kvs)  # which JAX accepts only outermost
        function = self._function.__wrapped__ if options else self._function
        settings = {name: getattr(info, name) for name in _SETTINGS}
        return jax.jit(
            self._divided(function, batches), **settings, compiler_options=options or None
        )

    def _divided(self, function: Callable, batches: frozenset[int | str]) -> Callable:
        """Have XLA divide a function that is traced along the examples of its batches."""

        def split(name: int | str, argument: Any) -> Any:
            return split_examples(argument, self._mesh) if name in batches else argument

        @functools.wraps(self._function)
        def divided(*args: Any, **kwargs: Any) -> Any:
            args = tuple(split(index, argument) for index, argument in enumerate(args))
            kwargs = {name: split(name, argument) for name, argument in kwargs.items()}
            return self._laid_out(function(*args, **kwargs))

        return divided

    def _laid_out(self, outputs: Any) -> Any:
        """Let a state that comes back keep its layout, and no output be sharded unevenly."""
        leaves, tree = jax.tree.flatten(outputs)
        shapes = [leaf.shape for leaf in leaves]
        layouts = [self._readable(shape) for shape in shapes]
        for state in self._states:
            wanted = [getattr(leaf, "shape", ()) for leaf in state]
            starts = range(len(shapes) - len(wanted) + 1)
            found = (i for i in starts if wanted and shapes[i : i + len(wanted)] == wanted)
            for start in [*found][:1]:
                kept = [getattr(leaf, "sharding", None) for leaf in state]
                layouts[start : start + len(wanted)] = kept
        constrain = jax.lax.with_sharding_constraint
        pairs = zip(leaves, layouts, strict=True)
        return tree.unflatten([constrain(*pair) if pair[1] else pair[0] for pair in pairs])

    def _readable(self, shape: Sequence[int]) -> NamedSharding:
        """Return a layout that a process can read, and a program can return."""
        if processes.count() > 1:
            return replicated(self._mesh)
        free = PartitionSpec.UNCONSTRAINED
        axes = [None if size % self._mesh.size else free for size in shape]
        return NamedSharding(self._mesh, PartitionSpec(*axes))
