"""The batches of a dataset on JAX: epoch by epoch, on the devices, and in several processes."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import keras
import numpy as np
from jax.experimental.sparse import JAXSparse

from kdpkit._internal import checks, processes
from kdpkit.sharding._batches import place_batch, place_batches
from kdpkit.training._keras_internals import get_data_adapter
from kdpkit.training._objective import PLACEHOLDER_EXAMPLES
from kdpkit.training.jax._process_checks import check_batches, shapes_of


class Source:
    """The batches, on the host, of any kind of dataset that Keras' `fit` takes."""

    def __init__(self, dataset: Any, name: str, mesh: jax.sharding.Mesh) -> None:
        if isinstance(dataset, np.ndarray | jax.Array | tuple | dict):
            checks.fail(
                f"`{name}` must give batches, and is a {type(dataset).__name__}.",
                remedy="Pass a `tf.data.Dataset`, a `keras.utils.PyDataset` or a Grain dataset "
                "of batches.",
            )
        self._name = name
        self.mesh = mesh
        self._adapter = get_data_adapter(dataset)
        cardinality = getattr(dataset, "cardinality", None)
        self.is_endless = cardinality is not None and int(cardinality()) == -1
        self._epoch: Iterator[Any] = iter(())
        is_tracked = hasattr(dataset, "is_tracked")  # by `kdpkit.callbacks.Resume`
        self._is_opened = not (is_tracked or isinstance(dataset, keras.utils.PyDataset))
        if self._is_opened:
            # The first epoch begins with the batch that is read here, as a generator returns it
            # only once.
            self._epoch = self._new_epoch()
            self._first = next(self._epoch, None)
        elif is_tracked:  # `Resume` may still move to another batch, so none is taken.
            self._first = next(self._adapter.get_jax_iterator(), None)
        elif dataset.num_batches == 0:
            self._first = None
        else:
            batch = dataset[0]  # which Keras passes on as arrays in tuples
            nest = tuple(batch) if isinstance(batch, list | tuple) else batch
            self._first = keras.tree.map_structure(
                lambda x: x if x is None else np.asarray(x), nest
            )
        _check_batch(name, self._first)
        if processes.count() > 1:
            check_batches(f"`{name}`", self.length, self._first)

    @property
    def length(self) -> int | None:
        """The number of batches in an epoch, or in the rest of one; None if it is not known."""
        return self._adapter.num_batches

    def __iter__(self) -> "Batches":
        if self._is_opened:
            self._is_opened = False
            return Batches(itertools.chain([self._first], self._epoch), self)
        self._epoch = self._new_epoch()
        return Batches(self._epoch, self)

    def _new_epoch(self) -> Iterator[Any]:
        self._adapter.on_epoch_begin()
        yield from self._adapter.get_jax_iterator()
        self._adapter.on_epoch_end()

    def end_epoch(self) -> None:
        """Finish the epoch of the dataset, all of whose batches are taken."""
        next(self._epoch, None)

    def placeholders(self) -> Any:
        """Return Keras' placeholders for a batch, with the dtypes that it has on the devices."""

        def placeholder(x: Any) -> keras.KerasTensor:
            dtype = jax.dtypes.canonicalize_dtype(x.dtype)
            return keras.KerasTensor((PLACEHOLDER_EXAMPLES, *x.shape[1:]), dtype.name)

        return jax.tree.map(placeholder, self._first)

    def check_group(self, group: list[Any]) -> None:
        """Raise if several processes have batches of different shapes, or another number."""
        if processes.count() == 1:
            return
        shapes = [shapes_of(batch) for batch in (self._first, *group[:1])]
        if shapes[0] != shapes[-1]:
            checks.fail(
                f"With several processes all batches of `{self._name}` must have one shape.",
                first=shapes[0],
                later=shapes[-1],
                remedy='Drop or pad the last batch: `ArrayBatches(remainder="pad")`.',
            )
        if self.length is None:
            processes.require_equal(
                f"The number of batches of `{self._name}`",
                [len(group)],
                remedy="Give every process equally many; here one has come to its end.",
            )


def _check_batch(name: str, batch: Any) -> None:
    if batch is None:
        checks.fail(f"`{name}` gave no batch, so there is nothing to compute.")
    sparse = [leaf.shape for leaf in keras.tree.flatten(batch) if isinstance(leaf, JAXSparse)]
    if sparse:
        checks.fail(
            f"`{name}` gives sparse arrays, and a loop on JAX cannot divide their examples.",
            sparse=sparse,
            remedy="Use dense arrays, or train with `replica_exact`, which takes sparse ones.",
        )
    leaves = jax.tree.leaves(batch)
    shapes = shapes_of(batch)
    if any(not shape or shape[0] != shapes[0][0] for shape in shapes):
        checks.fail(
            f"`{name}` gives single examples, and must give batches.",
            shapes=shapes,
            remedy="Add `.batch(global_batch_size)`.",
        )
    kinds = {leaf.dtype.name for leaf in leaves if leaf.dtype.kind in "OSU"}
    if kinds:
        checks.fail(
            f"`{name}` gives text, and JAX has numbers only; look text up in the pipeline.",
            dtypes=sorted(kinds),
        )


class Batches:
    """The batches of an epoch, which are taken in groups of one shape and put on the devices."""

    def __init__(self, batches: Iterable[Any], source: Source) -> None:
        self._batches = iter(batches)
        self._next: list[Any] = []  # a batch of another shape, which begins the next group
        self._source = source

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if group := self.take(1):
            return self.place(group)
        raise StopIteration

    def take(self, most: int) -> list[Any]:
        """Take the next batches of equal shapes, up to `most`; none at the end."""
        group: list[Any] = []
        for batch in itertools.chain(self._next, self._batches):
            self._next = []
            if group and shapes_of(batch) != shapes_of(group[0]):
                self._next = [batch]
                break
            group.append(batch)
            if len(group) == most:
                break
        self._source.check_group(group)
        return group

    def place(self, group: list[Any]) -> Any:
        """Put one batch on the devices, or several, stacked along a new first axis."""
        mesh = self._source.mesh
        if len(group) > 1:
            return place_batches(group, mesh)
        if mesh.size == 1:
            return group[0]  # The compiled step puts it on the device, in less time.
        return place_batch(group[0], mesh)
