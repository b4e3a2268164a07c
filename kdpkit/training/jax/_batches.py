"""The batches of a dataset on JAX, epoch by epoch, and on the devices."""

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
from kdpkit.training.jax import _consistency_checks
from kdpkit.training.jax._consistency_checks import shapes_of


class Source:
    """A dataset of any kind that Keras' `fit` takes, epoch by epoch, as batches on the host."""

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
            # The batch that is looked at is the first to be trained on: a generator gives it once.
            self._epoch = self._new_epoch()
            self._first = next(self._epoch, None)
        elif is_tracked:  # any batch can be looked at, and somebody may still move to another one
            self._first = next(self._adapter.get_jax_iterator(), None)
        else:
            self._first = _first_of(dataset)
        _check_batch(name, self._first)
        self._spans_processes = processes.count() > 1
        if self._spans_processes:
            _consistency_checks.check_batches(name, self.length, self._first)

    @property
    def length(self) -> int | None:
        """Batches in an epoch, or in what is left of one; None if that shows only at its end."""
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
        """Tell the dataset that all of its batches are taken."""
        next(self._epoch, None)

    def placeholders(self) -> Any:
        """Return Keras' placeholders for a batch, of the types that it has on the devices."""

        def placeholder(x: Any) -> keras.KerasTensor:
            dtype = jax.dtypes.canonicalize_dtype(x.dtype)
            return keras.KerasTensor((PLACEHOLDER_EXAMPLES, *x.shape[1:]), dtype.name)

        return jax.tree.map(placeholder, self._first)

    def check_group(self, group: list[Any]) -> None:
        """Raise where the next batches are not of the shapes and number of other processes'."""
        if not self._spans_processes:
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


def _first_of(dataset: keras.utils.PyDataset) -> Any:
    """Return the first batch of a `PyDataset` as Keras hands it on; None if there is none."""
    if dataset.num_batches == 0:
        return None
    batch = dataset[0]
    nest = tuple(batch) if isinstance(batch, list | tuple) else batch
    return keras.tree.map_structure(lambda part: part if part is None else np.asarray(part), nest)


def _check_batch(name: str, batch: Any) -> None:
    if batch is None:
        checks.fail(f"`{name}` gave no batch, so there is nothing to compute.")
    sparse = [leaf.shape for leaf in keras.tree.flatten(batch) if isinstance(leaf, JAXSparse)]
    if sparse:
        checks.fail(
            f"`{name}` gives sparse arrays, and a loop on JAX splits batches into examples, which "
            "these do not keep apart.",
            sparse=sparse,
            remedy="Use dense arrays, or train with `replica_exact`, which takes sparse ones.",
        )
    leaves = jax.tree.leaves(batch)
    shapes = [np.shape(leaf) for leaf in leaves]
    if any(not shape or shape[0] != shapes[0][0] for shape in shapes):
        checks.fail(
            f"`{name}` gives single examples, and must give batches.",
            shapes=shapes,
            remedy="Add `.batch(global_batch_size)`.",
        )
    kinds = {leaf.dtype.name for leaf in leaves if leaf.dtype.kind in "OSU"}
    if kinds:
        checks.fail(
            f"`{name}` gives text, and JAX has numbers alone; look text up in the pipeline.",
            dtypes=sorted(kinds),
        )


class Batches:
    """An epoch's batches: taken in groups of one shape, and put on the devices."""

    def __init__(self, batches: Iterable[Any], source: Source) -> None:
        self._batches = iter(batches)
        self._waiting: list[Any] = []
        self._source = source

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if group := self.take(1):
            return self.place(group)
        raise StopIteration

    def take(self, most: int) -> list[Any]:
        """Take the next batches that have the same shapes, up to so many; none at the end."""
        group: list[Any] = []
        for batch in itertools.chain(self._waiting, self._batches):
            self._waiting = []
            if group and shapes_of(batch) != shapes_of(group[0]):
                self._waiting = [batch]
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
            return group[0]  # the compiled step puts it where the variables are, and sooner
        return place_batch(group[0], mesh)
