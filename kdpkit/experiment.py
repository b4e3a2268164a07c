"""What recipes share: flags, strategy, prepared data, progress, Ctrl-C and the results file.

A recipe reads:

    def main(argv=None):
        parser = experiment.argument_parser(__doc__, epochs=5, per_replica_batch_size=32,
                                            base_learning_rate=1e-4, smoke={"epochs": 1})
        args = parser.parse_args(argv)
        strategy = experiment.strategy_from(args)
        data = experiment.prepared("tokens", build, key=..., cache_dir=args.cache_dir)
        ...
        with experiment.saving_on_interrupt(model, args.log_dir) as stop:
            history = model.fit(..., callbacks=[..., stop])
        results = experiment.results_of(model, history, strategy=strategy, ...)
        experiment.write_results(args.results, results)
        return results

    if __name__ == "__main__":
        experiment.run(main)
"""

import argparse
import contextlib
import gc
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

import kdpkit
from kdpkit import _checks, _cpu_threads, _files, _garbage, _storage, scaling
from kdpkit._checks import InputError
from kdpkit._figures import plot_results
from kdpkit._precision import PRECISIONS, set_precision
from kdpkit._prepared import prepared
from kdpkit._presets import from_preset

__all__ = [
    "PRECISIONS",
    "InputError",
    "argument_parser",
    "collect",
    "count",
    "describe",
    "from_preset",
    "path",
    "plan_from",
    "plot_results",
    "positive_integer",
    "positive_number",
    "prepared",
    "quick_imports",
    "reading",
    "results_of",
    "resuming",
    "run",
    "save_model",
    "saving_on_interrupt",
    "set_precision",
    "strategy_from",
    "track",
    "versions",
    "write_results",
    "writing",
]

T = TypeVar("T")


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Import Keras and its backend in a fifth less time, at the top of a program.

    Imports make half a million objects that stay, and no garbage, and Python's collector walks over
    them again and again. It rests meanwhile, and then leaves out for good what was imported, which
    makes the program's collections cheap too (`gc.freeze`). Where Keras is loaded already, as in a
    notebook, nothing is changed.

    >>> with quick_imports():
    ...     import keras
    """
    if "keras" in sys.modules:
        yield
        return
    with _garbage.uncollected():
        yield
    gc.freeze()


def argument_parser(
    description: str | None,
    *,
    epochs: int,
    per_replica_batch_size: int,
    base_learning_rate: float,
    rule: str = "linear",
    smoke: Mapping[str, Any] | None = None,
) -> argparse.ArgumentParser:
    """Make the parser of a recipe, with the flags that all recipes share.

    Add the recipe's own flags with `add_argument`. A bad flag raises a `ValueError` of one
    sentence, which a notebook shows as it is and `run` prints. `--results` and `--log-dir` are
    made and tried when they are parsed, so that a run of hours does not end where it cannot write.
    Wherever a flag takes a path, it may be in object storage: `gs://bucket/logs`.

    Args:
        description: What `--help` says above the flags, usually the recipe's `__doc__`.
        epochs: Default of `--epochs`; so with the three that follow.
        per_replica_batch_size: Examples in a batch, on each replica.
        base_learning_rate: Learning rate for one replica's batch.
        rule: How the rate grows with the replicas.
        smoke: What `--smoke` sets, by flag (`{"epochs": 1, "steps_per_epoch": 4}`), for a run of
            seconds. Flags that the caller gives win over these.

    >>> parser = argument_parser(
    ...     "Trains.",
    ...     epochs=5,
    ...     per_replica_batch_size=32,
    ...     base_learning_rate=1e-4,
    ...     smoke={"epochs": 1, "steps_per_epoch": 4},
    ... )
    >>> args = parser.parse_args(["--smoke", "--steps-per-epoch", "7"])
    >>> args.epochs, args.steps_per_epoch
    (1, 7)
    """
    parser = _Parser(description, smoke or {})
    add = parser.add_argument
    add(
        "--strategy",
        default="auto",
        metavar="KIND",
        help="one, mirrored, multi_worker, parameter_server, tpu, or auto: a TPU, else all GPUs, "
        "else one device (default: %(default)s)",
    )
    add(
        "--replicas",
        type=positive_integer,
        metavar="N",
        help="replicas that train in step; the CPU, or a single GPU, is split into N logical "
        "devices (default: what the strategy finds)",
    )
    add("--data", default="builtin", metavar="builtin|PATH|NAME", help="what to train on")
    add("--epochs", type=positive_integer, default=epochs, help="(default: %(default)s)")
    add(
        "--steps-per-epoch",
        type=positive_integer,
        metavar="STEPS",
        help="batches of all replicas together in an epoch (default: all the data)",
    )
    add(
        "--per-replica-batch-size",
        type=positive_integer,
        default=per_replica_batch_size,
        metavar="EXAMPLES",
        help="(default: %(default)s)",
    )
    add(
        "--base-learning-rate",
        type=positive_number,
        default=base_learning_rate,
        metavar="RATE",
        help="learning rate for one replica's batch (default: %(default)s)",
    )
    add(
        "--rule",
        choices=scaling.RULES,
        default=rule,
        help="how the rate grows with the replicas (default: %(default)s)",
    )
    add("--seed", type=_seed, default=0, help="of every random choice (default: %(default)s)")
    add(
        "--log-dir",
        type=_writable_directory,
        metavar="DIRECTORY",
        help="for TensorBoard files, and for the model if Ctrl-C ends training (default: none)",
    )
    add(
        "--resume",
        type=_writable_directory,
        metavar="DIRECTORY",
        help="keep the state of training there, and go on from it (default: none)",
    )
    add("--results", type=_writable_file, metavar="FILE", help="write what happened, as JSON")
    add(
        "--cache-dir",
        type=path,
        default=_user_cache(),
        metavar="DIRECTORY",
        help="keeps prepared data between runs (default: %(default)s)",
    )
    add("--smoke", action="store_true", help="a run of seconds, to see that everything works")
    return parser


class _Parser(argparse.ArgumentParser):
    """A parser that raises what is wrong, and takes other defaults under `--smoke`."""

    def __init__(self, description: str | None, smoke: Mapping[str, Any]) -> None:
        super().__init__(
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self._smoke = smoke

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; with `--smoke` once more, where its settings stand in for the defaults."""
        parsed, rest = super().parse_known_args(args, namespace)
        if not parsed.smoke:
            return parsed, rest
        unknown = self._smoke.keys() - vars(parsed).keys()
        assert not unknown, f"`smoke` sets flags that the recipe does not have: {sorted(unknown)}"
        return super().parse_known_args(args, argparse.Namespace(**self._smoke))

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong, in place of printing the usage and leaving Python."""
        raise _checks.InputError(f"{message.rstrip('.')}. The flags are listed by --help.")


def strategy_from(args: argparse.Namespace) -> Any:
    """Give the strategy that `--strategy` and `--replicas` name: on JAX a `DataParallel`, set.

    `--replicas N` above 1 mirrors over N devices. Where there are none of that many, the CPU, or
    the memory of a single GPU on TensorFlow, is first split into N logical devices; in a notebook
    whose runtime has started already that works if it has enough of them. Without `--replicas`
    the strategy takes what `kdpkit.strategies.select_strategy` finds (on a CPU that nobody split,
    one replica), and on JAX all devices: TPU cores, GPUs, or the CPU. `auto` prints what it takes,
    and why.

    Args:
        args: What the parser gave; `communication`, if the recipe has such a flag, goes on to
            `select_strategy`.

    Returns:
        A `tf.distribute` strategy, or on JAX a `kdpkit.sharding.DataParallel`; both have `scope()`
        and `num_replicas_in_sync`.

    Raises:
        ValueError: What cannot be had: several replicas of `one`, a count for a strategy that
            takes it from the cluster, more replicas than devices, TensorFlow's own strategies on
            JAX, another backend.
    """
    kind, replicas = args.strategy, args.replicas
    communication = getattr(args, "communication", "auto")
    if kind == "one" and replicas not in (None, 1):
        _checks.refuse(
            "The strategy 'one' trains a single replica.",
            replicas=replicas,
            remedy="Use `--strategy mirrored`.",
        )
    if _backend() == "jax":
        return _data_parallel(kind, replicas)
    return _tensorflow_strategy(kind, replicas, communication)


def plan_from(args: argparse.Namespace, strategy: Any) -> scaling.ScalePlan:
    """Give batch sizes and learning rate for the strategy's replicas, as the flags ask for them."""
    return scaling.ScalePlan(
        replicas=strategy.num_replicas_in_sync,
        per_replica_batch_size=args.per_replica_batch_size,
        base_learning_rate=args.base_learning_rate,
        rule=args.rule,
    )


def describe(strategy: Any) -> str:
    """Say in one line what a strategy of either backend is."""
    module = "strategies" if _backend() == "tensorflow" else "sharding"
    return str(getattr(kdpkit, module).describe(strategy))


def _backend() -> str:
    import keras

    backend = keras.backend.backend()
    if backend not in ("tensorflow", "jax"):
        _checks.refuse(
            "Recipes train on TensorFlow and on JAX.",
            backend=backend,
            remedy="Run with KERAS_BACKEND=tensorflow or KERAS_BACKEND=jax.",
        )
    return str(backend)


def _tensorflow_strategy(kind: str, replicas: int | None, communication: str) -> Any:
    from kdpkit import strategies

    if replicas is None:
        return strategies.select_strategy(kind, communication=communication)
    if kind == "auto":
        kind = "mirrored" if replicas > 1 else "one"
    if kind == "mirrored":
        _split_for(replicas)
    elif kind in ("multi_worker", "parameter_server", "tpu"):
        _checks.refuse(
            f"The strategy {kind!r} takes its replicas from the cluster.",
            replicas=replicas,
            remedy="Leave `--replicas` out.",
        )
    return strategies.select_strategy(kind, devices=replicas)


def _data_parallel(kind: str, replicas: int | None) -> Any:
    import jax
    import keras

    from kdpkit import sharding

    if kind not in ("auto", "one", "mirrored", "tpu"):
        _checks.refuse(
            f"The strategy {kind!r} is TensorFlow's; on JAX `auto` takes all GPUs or TPU cores.",
            backend="jax",
        )
    replicas = 1 if kind == "one" else replicas
    asked = re.search(r"device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    if replicas and not asked:
        with contextlib.suppress(RuntimeError):  # JAX runs already, with the devices that it has
            jax.config.update("jax_num_cpu_devices", replicas)
    _cpu_threads.reserve(int(asked[1]) if asked else jax.config.jax_num_cpu_devices)
    if kind == "tpu":
        sharding.tpu_devices()  # or a sentence that says why there are none
    if kind == "auto" and not replicas:
        print(f"Strategy: {sharding.describe_choice()}")
    distribution = sharding.DataParallel(replicas)
    keras.distribution.set_distribution(distribution)
    return distribution


def _split_for(replicas: int) -> None:
    """Split the CPU or a single GPU, unless there are devices enough."""
    import tensorflow as tf

    from kdpkit import strategies

    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        strategies.split_device("CPU", replicas)
    elif len(gpus) == 1 and replicas > len(
        tf.config.get_logical_device_configuration(gpus[0]) or [0]
    ):
        memory = int(0.9 * _free_gpu_memory_mb() / replicas)  # the rest is CUDA's own
        strategies.split_device("GPU", replicas, memory_limit_mb=memory)


def _free_gpu_memory_mb() -> int:
    """Ask the driver; TensorFlow knows once its runtime runs, too late for splitting."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    query = [
        "nvidia-smi",
        f"--id={gpu}",
        "--query-gpu=memory.free",
        "--format=csv,noheader,nounits",
    ]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60)  # noqa: S603 a fixed command
        return int(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise _checks.InputError(
            f"The GPU cannot be split, as nvidia-smi does not tell its free memory ({error}). Call "
            "`kdpkit.strategies.split_device` with `memory_limit_mb` before the recipe's `main`, "
            "or train one replica on the GPU."
        ) from error


def track(items: Iterable[T], description: str, *, total: int | None = None) -> Iterator[T]:
    """Give the items one by one, and show how far along they are.

    On a terminal there is a progress bar meanwhile. When the last item is done, one line says how
    many there were and how long they took; elsewhere (files, notebooks) that line is all.

    Args:
        items: What to go through.
        description: What is being done, in a few words.
        total: Number of items, where `items` does not know its length.

    >>> [word.upper() for word in track(["a", "b"], "Shouting")]
    Shouting: 2 in 0.0 s
    ['A', 'B']
    """
    from rich.console import Console
    from rich.progress import Progress

    console = Console()
    started, count = time.perf_counter(), 0
    with contextlib.ExitStack() as stack:
        if console.is_terminal:  # elsewhere rich 13 prints an empty line, also where it is disabled
            progress = stack.enter_context(Progress(console=console, transient=True))
            items = progress.track(items, total=total, description=description)
        for item in items:
            yield item
            count += 1
    print(f"{description}: {count:,} in {time.perf_counter() - started:.1f} s")


def collect(dataset: Any, description: str) -> np.ndarray:
    """Put the examples of a finite `tf.data.Dataset` into one array, and show how far along it is.

    Args:
        dataset: Examples that are single tensors of one shape.
        description: What is being done, in a few words.

    Raises:
        ValueError: There is no example, as when a filter left none.

    >>> import tensorflow as tf
    >>> collect(tf.data.Dataset.range(3), "Counting")
    Counting: 3 in 0.0 s
    array([0, 1, 2])
    """
    examples = list(track(dataset.as_numpy_iterator(), description))
    if not examples:
        _checks.refuse(
            "No example is left.",
            while_doing=description,
            remedy="The data are empty, or every example was filtered out.",
        )
    return np.stack(examples)


def saving_on_interrupt(
    model: Any, log_dir: str | os.PathLike[str] | None
) -> contextlib.AbstractContextManager[Any]:
    """Let Ctrl-C end training cleanly, with what was learned so far saved.

    Give `fit` (or `TrainingLoop.fit`) the callback that the block begins with. On Ctrl-C the step
    or the validation batch at hand is finished on all replicas, the model is saved whole as
    `log_dir/interrupted.keras`, and `KeyboardInterrupt` is raised, so that nothing takes the run
    for complete; `run` turns that into exit code 130. Where `kdpkit.callbacks.Resume` saves the
    state of training instead, the sentence names its directory. A second Ctrl-C stops at once and
    saves nothing. Outside the main thread, where Python allows no signal handler, and where Ctrl-C
    was being ignored, nothing changes. The former handler is back after the block.

    Args:
        model: The model that trains.
        log_dir: Where to save it, also as `gs://bucket/logs`; None saves nothing and says so.

    Returns:
        A context manager that gives the callback.

    >>> import keras
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> x = np.ones((2, 1))
    >>> with saving_on_interrupt(model, log_dir=None) as stop:
    ...     history = model.fit(x, x, verbose=0, callbacks=[stop])
    """
    from kdpkit import _interrupt

    return _interrupt.saving(model, None if log_dir is None else _storage.path(log_dir))


def resuming(
    directory: str | os.PathLike[str] | None, train: Any, watching: Iterable[Any]
) -> tuple[Any, list[Any]]:
    """Let a run save its state and go on from it, where a directory is given.

    Args:
        directory: Of the states, such as `args.resume`, also in object storage; None changes
            nothing.
        train: What to train on; see `kdpkit.callbacks.Resume.track`.
        watching: The callbacks so far.

    Returns:
        What to train on in its place, and the callbacks.

    >>> resuming(None, "data", ["callback"])
    ('data', ['callback'])
    """
    if directory is None:
        return train, [*watching]
    from kdpkit import callbacks

    resume = callbacks.Resume(directory)
    return resume.track(train), [*watching, resume]


def results_of(
    model: Any,
    history: Any,
    *,
    strategy: Any,
    global_batch_size: int,
    test: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Put together what a recipe returns and writes: one dictionary of plain values.

    Args:
        model: The trained model; its optimizer has counted the `steps`.
        history: What `fit` returned. The callbacks `LearningRateLogger` and `Throughput` leave
            `learning_rates` (the rate of each epoch's last step), `examples_per_second` and
            `tokens_per_second` there; the speeds are means over the epochs, `None` if unmeasured.
        strategy: The strategy that trained.
        global_batch_size: Examples in one step, over all replicas.
        test: Metrics of the test, as from `evaluate(..., return_dict=True)`.

    Returns:
        `history`, `test`, `learning_rates`, `examples_per_second`, `replicas`, `strategy`,
        `global_batch_size`, `steps`, `versions`, and `tokens_per_second` where it was measured.
    """
    import keras

    epochs = _plain(history.history)
    results = {
        "history": epochs,
        "test": _plain(test or {}),
        "learning_rates": epochs.get("learning_rate", []),
        "examples_per_second": _mean_speed(epochs.get("examples_per_second")),
        "replicas": strategy.num_replicas_in_sync,
        "strategy": describe(strategy),
        "global_batch_size": global_batch_size,
        "steps": int(keras.ops.convert_to_numpy(model.optimizer.iterations)),
        "schedule": _schedule_of(model.optimizer),
        "versions": versions(),
    }
    if "tokens_per_second" in epochs:
        results["tokens_per_second"] = _mean_speed(epochs["tokens_per_second"])
    return results


def _schedule_of(optimizer: Any) -> Any:
    """Give the learning-rate schedule as Keras writes it into files; None for a plain rate."""
    from kdpkit import _optimizers

    rate = _optimizers.wrapped(optimizer).get_config().get("learning_rate")
    return rate if isinstance(rate, Mapping) else None


def _mean_speed(speeds: list[float] | None) -> float | None:
    """Average over epochs of the same work, that is all work over all time."""
    return statistics.harmonic_mean(speeds) if speeds else None


def save_model(model: Any, path: str | os.PathLike[str]) -> None:
    """Save a model whole, in one piece; of several processes the first one's file stays.

    All processes call it, since a model may have parts of which each process holds its own.

    Args:
        model: The model.
        path: The file, ending in `.keras`, also as `gs://bucket/model.keras`.
    """
    from kdpkit import _processes

    if _processes.index() == 0:
        with _files.replacing(path) as temporary:
            model.save(temporary)
        return
    with tempfile.TemporaryDirectory() as directory:
        model.save(Path(directory) / Path(path).name)


def versions() -> dict[str, str]:
    """Give the versions that a result depends on: Python, kdpkit, Keras, its backend, the platform.

    >>> sorted(versions())
    ['backend', ...'kdpkit', 'keras', ...'numpy', 'platform', 'python'...]
    """
    import keras

    backend = keras.backend.backend()
    packages = ["keras", "numpy", backend]
    packages += [name for name in ("keras_hub", "tensorflow_text") if name in sys.modules]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "kdpkit": kdpkit.__version__,
        "backend": backend,
        **{name: sys.modules[name].__version__ for name in packages},
    }


def write_results(path: str | os.PathLike[str] | None, results: Mapping[str, Any]) -> None:
    """Write the results as JSON, in one piece, making directories as needed.

    Arrays and numbers of numpy, TensorFlow and JAX become plain ones. JSON has no NaN and no
    infinity: both are written as `null`. What has no JSON form is written as its `str`, since the
    run that it comes from is over.

    Args:
        path: The file, also as `gs://bucket/results.json`, or None to write nothing. Of several
            processes the first one writes.
        results: What `results_of` gave.

    Raises:
        OSError: The file cannot be written. A path from `--results` was tried before the run.
    """
    from kdpkit import _processes

    if path is None or _processes.index() > 0:
        return
    text = json.dumps(_json(results), indent=2, allow_nan=False)
    with _files.replacing(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def _json(value: Any) -> Any:
    """Turn NaN and infinities of plain values into None."""
    value = _plain(value)
    if isinstance(value, dict):
        return {name: _json(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: Any) -> Any:
    """Turn mappings, sequences, arrays and numbers into Python's own."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    return np.asarray(value).tolist() if hasattr(value, "__array__") else str(value)


def run(main: Callable[[], Any]) -> None:
    """Run a recipe's `main` as a program: errors of the caller end in one sentence.

    Exit code 2 with the sentence for bad input (`InputError`, which recipes may raise too), 130
    for Ctrl-C, 43 where another process of the training is gone, else Python's own: 0, or 1 with
    the traceback of what was not foreseen.

    Args:
        main: Takes its flags from the command line when it is called without arguments.
    """
    from kdpkit import _processes

    try:
        main()
    except (_checks.InputError, _processes.ProcessLostError, KeyboardInterrupt) as error:
        code, sentence = {
            KeyboardInterrupt: (130, "interrupted."),
            _processes.ProcessLostError: (_processes.EXIT_CODE, error),
        }.get(type(error), (2, error))
        _processes.leave_without_waiting(code)
        print(f"{Path(sys.argv[0]).name}: {sentence}", file=sys.stderr)
        raise SystemExit(code) from None


def positive_integer(text: str) -> int:
    """Parse a recipe's own flag, for `add_argument(type=...)`."""
    return _checked(text, "a positive integer", lambda: _checks.integer("value", int(text)))


def count(text: str) -> int:
    """Parse a flag that may be 0."""
    return _checked(
        text, "a non-negative integer", lambda: _checks.integer("value", int(text), minimum=0)
    )


def _seed(text: str) -> int:
    """Parse a seed that numpy takes too."""
    seed = count(text)
    if seed >= 1 << 32:
        raise argparse.ArgumentTypeError(f"must be below 2**32. Received: {text!r}")
    return seed


def positive_number(text: str) -> float:
    """Parse a flag that is a rate or a factor."""
    return _checked(
        text, "a positive number", lambda: _checks.number("value", float(text), above=0)
    )


def _checked(text: str, kind: str, parse: Callable[[], T]) -> T:
    """Parse a flag's value; argparse adds the flag's name to the sentence."""
    try:
        return parse()
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be {kind}. Received: {text!r}") from error


def path(text: str) -> _storage.AnyPath:
    """Parse a flag that is a path, of this machine or, as `gs://bucket/file`, of object storage.

    >>> path("logs") / "model.keras", path("gs://bucket/logs") / "model.keras"
    (PosixPath('logs/model.keras'), RemotePath('gs://bucket/logs/model.keras'))
    """
    return _storage.path(text)


@contextlib.contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a file of this machine: the one at `path`, or a copy of it from object storage.

    >>> with reading(__file__) as file:
    ...     file.name
    'experiment.py'
    """
    with _files.fetched(path) as file:
        yield file


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a file of this machine to write to, which is put at `path` when the block ends well.

    It has the suffix of `path`, which may be in object storage. Readers of `path` see the old file
    or the new one, never a part. Missing directories are made.

    >>> directory = tempfile.mkdtemp()
    >>> with writing(f"{directory}/new/notes.txt") as file:
    ...     _ = file.write_text("whole")
    >>> Path(directory, "new", "notes.txt").read_text()
    'whole'
    """
    with _files.replacing(path) as temporary:
        yield temporary


def _writable_directory(text: str) -> _storage.AnyPath:
    """Make the directory and try it, before anything depends on it."""
    directory = _storage.path(text)
    try:
        if isinstance(directory, _storage.RemotePath):
            directory.try_writing()
            return directory
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except _checks.InputError as error:
        raise argparse.ArgumentTypeError(str(error).rstrip(".")) from error
    except OSError as error:
        reason = "a file is in its place" if isinstance(error, FileExistsError) else error.strerror
        raise argparse.ArgumentTypeError(
            f"cannot be written ({reason}). Received: {text!r}"
        ) from error


def _writable_file(text: str) -> _storage.AnyPath:
    path = _storage.path(text)
    try:
        if path.exists() and not path.is_file():
            raise argparse.ArgumentTypeError(f"must be a regular file. Received: {text!r}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with _files.replacing(path.with_name(f"{path.name}.tried")) as trial:
            trial.touch()
        path.with_name(f"{path.name}.tried").unlink(missing_ok=True)  # others may try it too
    except _checks.InputError as error:
        said = str(error).replace(f"{path.name}.tried", path.name)
        raise argparse.ArgumentTypeError(said.rstrip(".")) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise argparse.ArgumentTypeError(
            f"cannot be written ({reason}). Received: {text!r}"
        ) from error
    return path


def _user_cache() -> Path:
    """Give kdpkit's place among the user's caches, by the XDG convention."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kdpkit"
