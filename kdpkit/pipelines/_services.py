"""Preparing examples in other processes, with tf.data service.

Several workers under one dispatcher give examples in the order in which they are ready, which is
another one every time. Here every process has a dispatcher and one worker, blocks of examples are
dealt out to the processes in turn, and what comes back is taken in turn, with a look whether it is
what is due. The examples, and their order, are those of a plain `map`.

TensorFlow waits for ever for a service that is gone, without a word that a program could see. So
a pipeline looks for it while it waits, and fails with one sentence.
"""

import contextlib
import dataclasses
import functools
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, NoReturn

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops

from kdpkit import _checks, _waiting
from kdpkit.pipelines._counting import cardinality
from kdpkit.pipelines._transforms import Transform

_service = tf.data.experimental.service

_CONNECT_SECONDS = 5.0
_START_SECONDS = 60.0  # for a service to take a pipeline; it takes about one
_PAUSE_MICROSECONDS = 50_000  # the end of an epoch waits for one or two
_PAUSES = 10  # between two looks at a service
_BLOCK_EXAMPLES, _BLOCK_BYTES = 64, 1 << 20  # a block of examples travels at once, of either size
_UNKNOWN_BYTES = 4096  # what a tensor of unknown size is taken to have
_ROUNDS = 8  # or more, in which examples are dealt out; else blocks are smaller
_EXAMPLES, _STILL_THERE, _END = range(3)  # kinds of blocks
_START_ONE = "Start one with `kdpkit data-service --port {port}` there, and give its address."


@dataclasses.dataclass(frozen=True)
class DataService:
    """A service that runs: where it is, and where its worker is.

    Attributes:
        address: What `services` takes, `"host:port"`.
        worker_address: Where pipelines fetch examples, which they learn from the service.
    """

    address: str
    worker_address: str


@contextlib.contextmanager
def data_service(
    port: int = 0, *, host: str = "localhost", worker_port: int = 0
) -> Iterator[DataService]:
    """Serve pipelines from this process, until the `with` block ends.

    `kdpkit data-service` is a process that does nothing else. Inside a program that trains, a
    service is good for trying things out, and takes the same processor.

    Args:
        port: Where it listens; 0 takes a free one.
        host: The name or number under which trainers reach this machine, IPv6 in brackets. All
            its network interfaces listen, and whoever reaches them may have work done.
        worker_port: Where its worker listens; 0 takes a free one.

    Raises:
        ValueError: A port is taken.

    >>> with data_service() as service:
    ...     numbers = tf.data.Dataset.range(4)
    ...     squares = numbers.apply(prepare_with_services(tf.square, [service.address]))
    ...     [int(number) for number in squares]
    [0, 1, 4, 9]
    """
    _checks.address("host", f"{host}:1")
    port = _free_port("port", port)
    worker_port = _free_port("worker_port", worker_port)
    dispatcher = _service.DispatchServer(_service.DispatcherConfig(port=port))
    own_port = dispatcher.target.rpartition(":")[2]
    worker = _service.WorkerServer(
        _service.WorkerConfig(
            dispatcher_address=f"localhost:{own_port}",
            worker_address=f"{host}:%port%",
            port=worker_port,
            heartbeat_interval_ms=1000,
        )
    )
    try:
        own_worker_port = worker._address.rpartition(":")[2]  # no public way to ask
        yield DataService(f"{host}:{own_port}", f"{host}:{own_worker_port}")
    finally:
        worker._stop()  # as they do themselves when nobody holds them
        dispatcher._stop()


def prepare_with_services(prepare: Callable[..., Any], services: Sequence[str]) -> Transform:
    """Map `prepare` over the examples in other processes, the services.

    Examples and order are those of `dataset.map(prepare)`. Every service reads the whole dataset,
    as far as it stands before this stage, and prepares its share of the examples, at most 64 in
    turn. So files must be there under the same paths, and examples that are arrays in this program
    travel to each service when the pipeline is built. Each pipeline is prepared by itself: several
    trainers may share the services, and of several processes that train together each has its own
    pipeline prepared, unless they share a directory cache.

    `prepare` must be made of TensorFlow operations that depend on the example alone: Python code
    (`tf.py_function`, `tf.numpy_function`), variables and random numbers are refused, except those
    of `tf.random.stateless_*`. Operations that a package brings must be known to the service:
    `--import tensorflow_text`.

    A service that is lost while it is needed fails the pipeline in a few seconds, with a sentence
    that names it. Started again it knows nothing of earlier pipelines: then the program that trains
    starts again too.

    Args:
        prepare: A function of an example.
        services: Addresses, `"host:port"`, as `kdpkit data-service` prints them.

    Raises:
        ValueError: No service answers at an address, or it cannot run what it is asked to, or the
            dataset changes its order from one reading to the next.
    """
    addresses = _addresses(services)

    def apply(examples: tf.data.Dataset) -> tf.data.Dataset:
        count = cardinality(examples)
        _refuse_changing_order(examples)
        code = _Code(examples.map(prepare).element_spec)
        size = code.examples_in_block
        if count is not None:
            size = max(1, min(size, count // (_ROUNDS * len(addresses))))
        deal = _Deal(size, len(addresses))
        parts = _within_limits(
            addresses, lambda index: _part(examples, prepare, code, deal, addresses[index], index)
        )
        prepared = code.decoded(_side_by_side(parts, deterministic=True))
        if count is None:
            return prepared
        return prepared.apply(tf.data.experimental.assert_cardinality(count))

    return apply


def _addresses(services: Any) -> tuple[str, ...]:
    addresses = _checks.strings("services", services)
    if not addresses:
        _checks.refuse("`services` must name one service or more.", services=services)
    for address in addresses:
        _checks.address("services", address)
    return addresses


# What travels: blocks of examples.


@dataclasses.dataclass(frozen=True)
class _Deal:
    """Deals out blocks of examples in turn: so many in a block, to so many services."""

    size: int
    services: int

    def share(self, examples: tf.data.Dataset, index: int) -> tf.data.Dataset:
        """Give what one service gets, each example with its place in the whole."""
        if self.services == 1:
            return examples.enumerate()
        return examples.enumerate().filter(
            lambda place, *_: place // self.size % self.services == index
        )


class _Code:
    """Turns examples into blocks of tensors, whatever their shapes, and back."""

    def __init__(self, spec: Any) -> None:
        self._spec = spec
        self._parts = tf.nest.flatten(spec, expand_composites=True)
        if any(part.dtype in (tf.variant, tf.resource) for part in self._parts):
            _checks.refuse(
                "A service gives tensors, and no datasets or resources.",
                prepare=spec,
                remedy="Let `prepare` return tensors.",
            )

    @property
    def examples_in_block(self) -> int:
        """How many examples travel together."""
        sizes = [
            (part.shape.num_elements() * part.dtype.size) if _has_size(part) else _UNKNOWN_BYTES
            for part in self._parts
        ]
        return max(1, min(_BLOCK_EXAMPLES, _BLOCK_BYTES // max(1, sum(sizes))))

    def encode(self, example: Any) -> tuple[Any, ...]:
        """Give the tensors of an example, those of unknown shape as strings."""
        tensors = tf.nest.flatten(example, expand_composites=True)
        return tuple(
            tensor if part.shape.is_fully_defined() else tf.io.serialize_tensor(tensor)
            for tensor, part in zip(tensors, self._parts, strict=True)
        )

    def block(self, places: Any, tensors: Any) -> tuple[Any, Any, Any]:
        """Give a block of examples as it travels."""
        return tf.constant(_EXAMPLES, tf.int64), places, tensors

    def empty_block(self, kind: int) -> tuple[Any, Any, Any]:
        """Give a block without examples."""
        tensors = tuple(
            tf.zeros([0, *part.shape], part.dtype)
            if part.shape.is_fully_defined()
            else tf.zeros([0], tf.string)
            for part in self._parts
        )
        return tf.constant(kind, tf.int64), tf.zeros([0], tf.int64), tensors

    def decoded(self, blocks: tf.data.Dataset) -> tf.data.Dataset:
        """Give examples again, after a look whether each is the one that is due."""
        checked = blocks.scan(tf.constant(0, tf.int64), _in_turn)
        if all(part.shape.is_fully_defined() for part in self._parts):
            return checked.unbatch().map(self._decode)
        return checked.unbatch().map(self._decode, num_parallel_calls=tf.data.AUTOTUNE)

    def _decode(self, *tensors: Any) -> Any:
        values = [
            tensor
            if part.shape.is_fully_defined()
            else tf.ensure_shape(tf.io.parse_tensor(tensor, part.dtype), part.shape)
            for tensor, part in zip(tensors, self._parts, strict=True)
        ]
        return tf.nest.pack_sequence_as(self._spec, values, expand_composites=True)


def _has_size(part: tf.TensorSpec) -> bool:
    return part.shape.is_fully_defined() and part.dtype != tf.string


def _in_turn(due: Any, block: Any) -> Any:
    """Pass on the tensors of a block, which must begin with the example that is due."""
    _, places, tensors = block
    following = due + tf.size(places, tf.int64)
    right = tf.reduce_all(places == tf.range(due, following))
    said = tf.debugging.Assert(
        right, ["A service gave examples", places, "where this is due:", due]
    )
    with tf.control_dependencies([said] if said is not None else []):
        return tf.identity(following), tensors


# One service's part.


def _part(
    examples: tf.data.Dataset,
    prepare: Callable[..., Any],
    code: _Code,
    deal: _Deal,
    address: str,
    index: int,
) -> tf.data.Dataset:
    """Give the blocks that one service prepares."""
    _require_listener(address)

    def prepare_one(place: Any, example: Any) -> Any:
        made = prepare(*example) if isinstance(example, tuple) else prepare(example)
        return place, made

    def encode_one(place: Any, example: Any) -> Any:
        return place, code.encode(example)

    prepared = deal.share(examples, index).map(prepare_one, num_parallel_calls=tf.data.AUTOTUNE)
    encoded = prepared.map(encode_one)
    blocks = encoded.batch(deal.size).map(code.block).with_options(_remote_options())
    for _ in _served(blocks.take(0), code, address):  # the worker builds it all, and reads nothing
        pass
    return _watched(_served(blocks, code, address), code, address)


def _served(blocks: tf.data.Dataset, code: _Code, address: str) -> tf.data.Dataset:
    """Give the blocks as they come from a service.

    Their end is a block too: TensorFlow would notice it up to a second later.
    """
    mode = _service.ShardingPolicy.OFF
    ended = _ended(blocks, code)
    served = ended.apply(_service.distribute(processing_mode=mode, service=f"grpc://{address}"))
    return served.take_while(_is_before_end)


def _ended(blocks: tf.data.Dataset, code: _Code) -> tf.data.Dataset:
    return blocks.concatenate(tf.data.Dataset.from_tensors(code.empty_block(_END)))


def _is_before_end(kind: Any, *_: Any) -> Any:
    return kind != _END


def _remote_options() -> tf.data.Options:
    options = tf.data.Options()
    options.deterministic = True
    options.autotune.enabled = False
    options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.FAIL
    return options


def _watched(blocks: tf.data.Dataset, code: _Code, address: str) -> tf.data.Dataset:
    """Give the blocks, and fail when their service is gone while they are waited for.

    Two datasets run side by side: the blocks, and an endless one that looks for the service and
    says so. What is ready comes first.
    """

    def ask() -> Any:
        return tf.numpy_function(
            lambda: _waiting.listens(address, _CONNECT_SECONDS), [], tf.bool, stateful=True
        )

    def look(pause: Any) -> Any:
        is_there = tf.cond(pause % _PAUSES == 0, ask, lambda: True)
        lost = (
            f"The service at {address} is gone while it is needed. Start it again, and then this "
            "program anew."
        )
        found = tf.debugging.Assert(is_there, [lost])
        with tf.control_dependencies([found] if found is not None else []):
            return code.empty_block(_STILL_THERE)

    # A client that cannot connect when it begins waits for ever: look before each beginning.
    beginning = tf.data.Dataset.range(1).map(look)
    watch = _every(_PAUSE_MICROSECONDS).map(look)
    sides = [watch, _ended(blocks, code)]
    both = beginning.flat_map(lambda *_: _side_by_side(sides, deterministic=False))
    whole = both.take_while(_is_before_end)
    return whole.filter(lambda kind, *_: kind == _EXAMPLES)


def _every(microseconds: int) -> tf.data.Dataset:
    """Give a number after each pause, without end."""
    numbers = tf.data.Dataset.counter()
    slow = tf.raw_ops.SleepDataset(
        input_dataset=numbers._variant_tensor,
        sleep_microseconds=microseconds,
        output_types=[tf.int64],
        output_shapes=[[]],
    )
    return dataset_ops._VariantDataset(slow, numbers.element_spec)


def _side_by_side(datasets: Sequence[tf.data.Dataset], *, deterministic: bool) -> tf.data.Dataset:
    """Read all at the same time, and take from each in turn, or from the one that is ready."""
    alone = [tf.data.Dataset.from_tensors(dataset) for dataset in datasets]
    together = functools.reduce(lambda first, second: first.concatenate(second), alone)
    return together.interleave(
        lambda dataset: dataset,
        cycle_length=len(datasets),
        num_parallel_calls=len(datasets),
        deterministic=deterministic,
    )


# Whether a service is there, and can do it.


def _within_limits(
    addresses: Sequence[str], build: Callable[[int], tf.data.Dataset]
) -> list[tf.data.Dataset]:
    """Build each service's part, all at once; refuse those that fail or take too long.

    TensorFlow waits for an answer for ever, and cannot be told to stop: a thread waits in its
    place.
    """
    waiting: list[Future[tf.data.Dataset]] = []
    for index in range(len(addresses)):
        future: Future[tf.data.Dataset] = Future()
        threading.Thread(target=_fulfil, args=(future, build, index), daemon=True).start()
        waiting.append(future)
    parts = []
    for address, future in zip(addresses, waiting, strict=True):
        try:
            parts.append(future.result(_START_SECONDS))
        except FutureTimeoutError:
            _checks.refuse(
                f"Something listens at an address of `services`, but within {_START_SECONDS:.0f} "
                "seconds it did not answer as a service, or its worker cannot be reached.",
                services=address,
                remedy="Start it with `kdpkit data-service`, with `--host` the name under which "
                "this machine reaches it.",
            )
        except tf.errors.OpError as error:
            _refuse_pipeline(address, error)
    return parts


def _fulfil(
    future: Future[tf.data.Dataset], build: Callable[[int], tf.data.Dataset], index: int
) -> None:
    try:
        future.set_result(build(index))
    except BaseException as error:  # it is raised where the result is waited for
        future.set_exception(error)


def _refuse_pipeline(address: str, error: tf.errors.OpError) -> NoReturn:
    said = str(error).rpartition("Original error: ")[2]
    if "Op type not registered" in said:
        operation = said.partition("Op type not registered")[2].split("'")[1]
        raise _checks.InputError(
            f"The service at {address} does not know the operation {operation!r}, which a package "
            "brings. Start it with the package's name, such as `kdpkit data-service --port "
            f"{_checks.address('services', address)[1]} --import tensorflow_text`."
        ) from error
    if stateful := re.search(r"(\w+) is stateful", said):
        _checks.refuse(
            "What runs in a service (the source, `keep` and `prepare`) must be made of TensorFlow "
            "operations that depend on the example alone: no `tf.py_function`, no "
            "`tf.numpy_function`, no generator, no variable, no random numbers.",
            operation=stateful[1],
            remedy="Draw with `tf.random.stateless_*`, or leave out `services`.",
        )
    raise _checks.InputError(
        f"The service at {address} cannot run this pipeline: {_last_line(said)}"
    ) from error


def _last_line(said: str) -> str:
    line = said.rpartition("}} ")[2].partition(" [Op:")[0].strip().splitlines()[0]
    return f"TensorFlow says: {line.rstrip('.')}."


def _require_listener(address: str) -> None:
    if not _waiting.listens(address, _CONNECT_SECONDS):
        port = _checks.address("services", address)[1]
        _checks.refuse(
            "Nothing listens at an address of `services`.",
            services=address,
            remedy=_START_ONE.format(port=port),
        )


def _free_port(name: str, port: Any) -> int:
    """Accept a port that nobody has; gRPC would share one with another program."""
    port = _checks.integer(name, port, minimum=0)
    with contextlib.closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # its last user may be gone
        try:
            probe.bind(("", port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or "there are ports 0 to 65535"
            _checks.refuse(
                f"A service cannot listen there ({reason}).",
                **{name: port},
                remedy="Give another port, or end what is there.",
            )
    return port


def _interleaves_what_is_ready(dataset: Any) -> bool:
    if type(dataset).__name__ != "_ParallelInterleaveDataset":
        return False
    serialized = tf.raw_ops.DatasetToGraphV2(input_dataset=dataset._variant_tensor)
    graph = tf.compat.v1.GraphDef.FromString(serialized.numpy())
    return any(
        node.op.startswith("ParallelInterleave") and node.attr["deterministic"].s == b"false"
        for node in graph.node
    )


def _refuse_changing_order(dataset: Any) -> None:
    """Refuse what gives another order each time; services would each deal out their own.

    It looks as far as TensorFlow shows a dataset's inputs, through private names that may go away.
    """
    shuffles = getattr(dataset, "_reshuffle_each_iteration", False)
    takes_what_is_ready = getattr(dataset, "_deterministic", None) == "false"
    if shuffles or takes_what_is_ready or _interleaves_what_is_ready(dataset):
        _checks.refuse(
            "Services need a source that gives the same order every time.",
            source=type(dataset).__name__,
            remedy="Leave shuffling to the pipeline: no `.shuffle(...)`, `list_files(..., "
            "shuffle=False)`, and no `deterministic=False`.",
        )
    inputs: list[Any] = getattr(dataset, "_inputs", list)()
    for part in inputs:
        _refuse_changing_order(part)
