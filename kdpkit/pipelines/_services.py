"""Prepare examples in other processes, with tf.data service.

Several workers under one dispatcher return examples as they become ready, in a different order
every time. Here every process has a dispatcher and one worker. Blocks of examples are assigned to
the processes round-robin, and read back and checked in the same order. The examples and their order
are those of a plain `map`.

If a service is lost, TensorFlow hangs without an error. So a pipeline checks the service while it
waits, and fails with an error.
"""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import TimeoutError as PoolTimeoutError
from multiprocessing.pool import ThreadPool
from typing import Any, NoReturn

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops

from kdpkit import errors
from kdpkit._internal import checks, error_text, listening, reachability
from kdpkit.pipelines import _structure
from kdpkit.pipelines._counting import cardinality
from kdpkit.pipelines._structure import Stage
from kdpkit.pipelines._transforms import Transform

_service = tf.data.experimental.service

_CONNECT_SECONDS = 5.0
_START_SECONDS = 60.0  # for a service to accept a pipeline; it takes about one
_PAUSE_MICROSECONDS = 50_000  # the end of an epoch waits one or two of these
_PAUSES = 10  # between checks of a service
_BLOCK_EXAMPLES, _BLOCK_BYTES = 64, 1 << 20  # maximum size of a block of examples
_UNKNOWN_BYTES = 4096  # assumed for a tensor of unknown size
_ROUNDS = 8  # at least; blocks are smaller for few examples
_EXAMPLES, _STILL_THERE, _END = range(3)  # the kinds of blocks


@dataclasses.dataclass(frozen=True)
class DataService:
    """The addresses of a running service, `"host:port"`.

    Attributes:
        address: Address of the service, for `services`.
        worker_address: Address of its worker, from which pipelines fetch examples.
    """

    address: str
    worker_address: str


@contextlib.contextmanager
def data_service(
    port: int = 0, *, host: str = "localhost", worker_port: int = 0
) -> Iterator[DataService]:
    """Serve pipelines from this process, until the `with` block ends.

    `kdpkit data-service` is a process that only does this. A service inside the training program
    shares its CPU and is meant for tests.

    Args:
        port: Port of the service; 0 uses a free one.
        host: The name or IP address under which trainers reach this machine, IPv6 in brackets. The
            service then listens on all network interfaces, and anyone who can reach them can run
            work on it. With `localhost` or a loopback address only this machine can connect.
        worker_port: Port of its worker; 0 uses a free one.

    Raises:
        ValueError: A port is in use.

    >>> with data_service() as service:
    ...     numbers = tf.data.Dataset.range(4)
    ...     squares = numbers.apply(prepare_with_services(tf.square, [service.address]))
    ...     [int(number) for number in squares]
    [0, 1, 4, 9]
    """
    checks.address("host", f"{host}:1")
    listening.require_told([f"{host}:1"], remedy=f'Pass host="{listening.ALL}" to listen on all.')
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
        own_worker_port = worker._address.rpartition(":")[2]  # there is no public attribute
        service = DataService(f"{host}:{own_port}", f"{host}:{own_worker_port}")
        for address in (service.address, service.worker_address):
            listening.keep_local(address, [address])
        yield service
    finally:
        worker._stop()  # as their destructors do
        dispatcher._stop()


def prepare_with_services(prepare: Callable[..., Any], services: Sequence[str]) -> Transform:
    """Map `prepare` over the examples in other processes.

    The examples and their order are those of `dataset.map(prepare)`. Every service reads the
    complete dataset up to this stage, and prepares its shard of the examples, at most 64 at a time.
    So files need the same paths there, and arrays in this program are sent to each service when the
    pipeline is built. Several trainers can use the same services; each has its own pipeline, unless
    they share a directory cache.

    `prepare` must consist of TensorFlow operations that depend only on the example: Python code
    (`tf.py_function`, `tf.numpy_function`), variables and random numbers other than
    `tf.random.stateless_*` are not supported. The service must import packages with custom
    operations: `--import tensorflow_text`.

    If a service is lost while it is needed, the pipeline fails within a few seconds with an error
    that names it. A restarted service does not know earlier pipelines, so restart the training
    program too.

    Args:
        prepare: A function of an example.
        services: Addresses, `"host:port"`, as `kdpkit data-service` prints them.

    Raises:
        ValueError: No service answers at an address, a service cannot run the pipeline, or the
            order of the dataset changes between iterations.
    """
    addresses = checks.strings("services", services)
    if not addresses:
        checks.fail("`services` must name at least one service.", services=services)
    for address in addresses:
        checks.address("services", address)

    def apply(examples: tf.data.Dataset) -> tf.data.Dataset:
        count = cardinality(examples)
        _require_fixed_order(examples)
        code = _Code(examples.map(prepare).element_spec)
        size = code.examples_in_block
        if count is not None:
            size = max(1, min(size, count // (_ROUNDS * len(addresses))))

        def build(index: int, address: str) -> tf.data.Dataset:
            shard = _shard(examples, size, index, len(addresses))
            return _blocks(shard, prepare, code, size, address)

        # In this thread: Python functions belong to the thread in which they were traced.
        blocks = zip(_built(addresses, build), addresses, strict=True)
        watched = [_watched(one, code, address) for one, address in blocks]
        prepared = code.decoded(_side_by_side(watched, deterministic=True))
        if count is None:
            return prepared
        return prepared.apply(tf.data.experimental.assert_cardinality(count))

    return apply


# Blocks of examples: each has a kind, the examples' positions, and their tensors.

_Block = tuple[tf.Tensor, tf.Tensor, tuple[tf.Tensor, ...]]


class _Code:
    """Encodes examples of any shape as tensors that can be batched, and decodes them.

    Args:
        spec: The type of a prepared example.
    """

    def __init__(self, spec: Any) -> None:
        self._spec = spec
        self._parts = tf.nest.flatten(spec, expand_composites=True)
        if any(part.dtype in (tf.variant, tf.resource) for part in self._parts):
            checks.fail(
                "A service returns tensors, not datasets or resources.",
                prepare=spec,
                remedy="Let `prepare` return tensors.",
            )

    @property
    def examples_in_block(self) -> int:
        """The number of examples in a block."""
        sizes = [
            part.shape.num_elements() * part.dtype.size
            if part.shape.is_fully_defined() and part.dtype != tf.string
            else _UNKNOWN_BYTES
            for part in self._parts
        ]
        return max(1, min(_BLOCK_EXAMPLES, _BLOCK_BYTES // max(1, sum(sizes))))

    def encode(self, example: Any) -> tuple[tf.Tensor, ...]:
        """Return the tensors of an example; those of unknown shape as strings."""
        tensors = tf.nest.flatten(example, expand_composites=True)
        return tuple(
            tensor if part.shape.is_fully_defined() else tf.io.serialize_tensor(tensor)
            for tensor, part in zip(tensors, self._parts, strict=True)
        )

    def empty_block(self, kind: int) -> _Block:
        """Return a block without examples."""
        tensors = tuple(
            tf.zeros([0, *part.shape], part.dtype)
            if part.shape.is_fully_defined()
            else tf.zeros([0], tf.string)
            for part in self._parts
        )
        return tf.constant(kind, tf.int64), tf.zeros([0], tf.int64), tensors

    def decoded(self, blocks: tf.data.Dataset) -> tf.data.Dataset:
        """Return the decoded examples, after checking that their order is right."""
        tensors = blocks.scan(tf.constant(0, tf.int64), _in_order).unbatch()
        is_parsed = not all(part.shape.is_fully_defined() for part in self._parts)
        return tensors.map(self._decode, tf.data.AUTOTUNE if is_parsed else None)

    def _decode(self, *tensors: tf.Tensor) -> Any:
        values = [
            tensor
            if part.shape.is_fully_defined()
            else tf.ensure_shape(tf.io.parse_tensor(tensor, part.dtype), part.shape)
            for tensor, part in zip(tensors, self._parts, strict=True)
        ]
        return tf.nest.pack_sequence_as(self._spec, values, expand_composites=True)


def _in_order(due: tf.Tensor, block: _Block) -> tuple[tf.Tensor, tuple[tf.Tensor, ...]]:
    """Return the tensors of a block, which must start with the expected example."""
    _, positions, tensors = block
    following = due + tf.size(positions, tf.int64)
    right = tf.reduce_all(positions == tf.range(due, following))
    with _asserted(right, "A service returned examples", positions, "but this was expected:", due):
        return tf.identity(following), tensors


def _asserted(condition: tf.Tensor, *data: Any) -> contextlib.AbstractContextManager:
    """Assert a condition for the operations inside the `with` block."""
    check = tf.debugging.Assert(condition, data)
    return tf.control_dependencies([] if check is None else [check])


# The blocks of one service.


def _shard(
    examples: tf.data.Dataset, block_size: int, index: int, services: int
) -> tf.data.Dataset:
    """Return every `services`-th block of examples, with their positions in the dataset."""
    if services == 1:
        return examples.enumerate()
    return examples.enumerate().filter(
        lambda position, *_: position // block_size % services == index
    )


def _blocks(
    shard: tf.data.Dataset, prepare: Callable[..., Any], code: _Code, size: int, address: str
) -> tf.data.Dataset:
    """Return the blocks that one service prepares."""
    if not reachability.listens(address, _CONNECT_SECONDS):
        port = checks.address("services", address)[1]
        checks.fail(
            "Nothing listens at an address of `services`.",
            services=address,
            remedy=f"Start one with `kdpkit data-service --port {port}` there, and pass its "
            "address.",
        )

    def prepare_one(position: tf.Tensor, example: Any) -> Any:
        return position, prepare(*example) if isinstance(example, tuple) else prepare(example)

    prepared = shard.map(prepare_one, num_parallel_calls=tf.data.AUTOTUNE)
    encoded = prepared.map(lambda position, example: (position, code.encode(example)))
    blocks = encoded.batch(size).map(
        lambda positions, tensors: (tf.constant(_EXAMPLES, tf.int64), positions, tensors)
    )
    options = tf.data.Options()
    options.deterministic = True
    options.autotune.enabled = False
    options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.FAIL
    blocks = blocks.with_options(options)
    for _ in _served(blocks.take(0), code, address):  # built by the worker, nothing read
        pass
    return _served(blocks, code, address)


def _served(blocks: tf.data.Dataset, code: _Code, address: str) -> tf.data.Dataset:
    """Return the blocks from a service.

    The end is a block too, because TensorFlow detects the end up to a second later.
    """
    mode = _service.ShardingPolicy.OFF
    distribute = _service.distribute(processing_mode=mode, service=f"grpc://{address}")
    return _ended(blocks, code).apply(distribute).take_while(_is_before_end)


def _ended(blocks: tf.data.Dataset, code: _Code) -> tf.data.Dataset:
    return blocks.concatenate(tf.data.Dataset.from_tensors(code.empty_block(_END)))


def _is_before_end(kind: tf.Tensor, *_: Any) -> tf.Tensor:
    return kind != _END


def _watched(blocks: tf.data.Dataset, code: _Code, address: str) -> tf.data.Dataset:
    """Return the blocks, and fail if their service is lost while waiting.

    Two datasets run in parallel: the blocks, and an endless one that checks the service and raises.
    The one that is ready comes first.
    """

    def ask() -> tf.Tensor:
        return tf.numpy_function(
            lambda: reachability.listens(address, _CONNECT_SECONDS), [], tf.bool, stateful=True
        )

    def look(pause: tf.Tensor) -> _Block:
        is_there = tf.cond(pause % _PAUSES == 0, ask, lambda: True)
        lost = f"The service at {address} is gone. Start it again, and then this program again."
        with _asserted(is_there, lost):
            return code.empty_block(_STILL_THERE)

    # Check before each start: docs/upstream/tf_data_service_waits.md
    beginning = tf.data.Dataset.range(1).map(look)
    sides = [_every(_PAUSE_MICROSECONDS).map(look), _ended(blocks, code)]
    both = beginning.flat_map(lambda *_: _side_by_side(sides, deterministic=False))
    return both.take_while(_is_before_end).filter(lambda kind, *_: kind == _EXAMPLES)


def _every(microseconds: int) -> tf.data.Dataset:
    """Return an endless dataset that yields a number after each pause."""
    numbers = tf.data.Dataset.counter()
    slow = tf.raw_ops.SleepDataset(
        input_dataset=numbers._variant_tensor,
        sleep_microseconds=microseconds,
        output_types=[tf.int64],
        output_shapes=[[]],
    )
    return dataset_ops._VariantDataset(slow, numbers.element_spec)


def _side_by_side(datasets: Sequence[tf.data.Dataset], *, deterministic: bool) -> tf.data.Dataset:
    """Read all datasets in parallel, round-robin or as they become ready."""
    alone = [tf.data.Dataset.from_tensors(dataset) for dataset in datasets]
    together = functools.reduce(lambda first, second: first.concatenate(second), alone)
    return together.interleave(
        lambda dataset: dataset,
        cycle_length=len(datasets),
        num_parallel_calls=len(datasets),
        deterministic=deterministic,
    )


# Whether a service runs, and supports the pipeline.


def _built(
    addresses: Sequence[str], build: Callable[[int, str], tf.data.Dataset]
) -> list[tf.data.Dataset]:
    """Build the blocks of all services in parallel; raise for those that fail or time out.

    TensorFlow waits for an answer without limit and cannot be interrupted, so daemon threads wait
    for it.
    """
    threads = ThreadPool(len(addresses))
    waiting = [threads.apply_async(build, one) for one in enumerate(addresses)]
    threads.close()
    built = []
    for address, result in zip(addresses, waiting, strict=True):
        try:
            built.append(result.get(_START_SECONDS))
        except PoolTimeoutError:
            checks.fail(
                f"Something listens at an address of `services`, but within {_START_SECONDS:.0f} "
                "seconds it did not answer as a service, or its worker cannot be reached.",
                services=address,
                remedy="Start it with `kdpkit data-service`, with `--host` the name under which "
                "this machine reaches it.",
            )
        except tf.errors.OpError as error:
            _raise_explained(address, error)
    return built


def _raise_explained(address: str, error: tf.errors.OpError) -> NoReturn:
    message = str(error).rpartition("Original error: ")[2]
    if unknown := re.search(r"Op type not registered '(\w+)'", message):
        raise errors.InputError(
            f"The service at {address} does not know the operation {unknown[1]!r}, which a package "
            "brings. Start it with the package's name, such as `kdpkit data-service --port "
            f"{checks.address('services', address)[1]} --import tensorflow_text`."
        ) from error
    if stateful := re.search(r"(\w+) is stateful", message):
        checks.fail(
            "What runs in a service (the source, `keep` and `prepare`) must be made of TensorFlow "
            "operations that depend on the example alone: no `tf.py_function`, no "
            "`tf.numpy_function`, no generator, no variable, no random numbers.",
            operation=stateful[1],
            remedy="Draw with `tf.random.stateless_*`, or leave out `services`.",
        )
    raise errors.InputError(
        f"The service at {address} cannot run this pipeline: TensorFlow reports: "
        f"{error_text.first_line(message)}."
    ) from error


def _free_port(name: str, port: Any) -> int:
    """Return a port if it is free; gRPC would also accept one that another program uses."""
    port = checks.integer(name, port, minimum=0)
    reason = listening.problem(port) if port < 1 << 16 else "there are ports 0 to 65535"
    if reason:
        checks.fail(
            f"A service cannot listen there ({reason}).",
            **{name: port},
            remedy="Pass another port, or stop the program that uses this one.",
        )
    return port


def _require_fixed_order(dataset: tf.data.Dataset) -> None:
    """Raise for a source whose order changes; services would see different orders."""
    for stage, _ in _structure.paths(_structure.end_of(dataset)):
        reshuffles = stage.kind == "shuffle" and stage.shuffles
        if reshuffles or stage.argument("deterministic") == "false" or _takes_what_is_ready(stage):
            checks.fail(
                "Services need a source with the same order every time.",
                source=stage.label,
                remedy="Leave shuffling to the pipeline: no `.shuffle(...)`, `list_files(..., "
                "shuffle=False)`, and no `deterministic=False`.",
            )


def _takes_what_is_ready(stage: Stage) -> bool:
    """Return whether it is a non-deterministic parallel `interleave`, as its graph shows."""
    if stage.kind != "interleave" or not stage.is_parallel:
        return False
    serialized = tf.raw_ops.DatasetToGraphV2(input_dataset=stage.made_by._variant_tensor)
    graph = tf.compat.v1.GraphDef.FromString(serialized.numpy())
    return any(
        node.op.startswith("ParallelInterleave") and node.attr["deterministic"].s == b"false"
        for node in graph.node
    )
