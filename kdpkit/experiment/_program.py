"""A recipe as a program: its imports, progress, Ctrl-C, resuming and exit codes."""

import contextlib
import gc
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from kdpkit import errors
from kdpkit._internal import checks, garbage_collection, storage

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

Item = TypeVar("Item")


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Import Keras and its backend in a fifth less time, at the top of a program.

    Python's garbage collector rests meanwhile, and leaves out for good what was imported
    (`gc.freeze`); where Keras is loaded already, as in a notebook, it is left alone. TensorFlow's
    notes on how it was built are not shown, unless TF_CPP_MIN_LOG_LEVEL asks for them.

    >>> with quick_imports():
    ...     import keras
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if "keras" in sys.modules:
        yield
        return
    with garbage_collection.uncollected():
        yield
    gc.freeze()


def track(items: Iterable[Item], description: str, *, total: int | None = None) -> Iterator[Item]:
    """Yield the items one by one, and show how far along they are.

    On a terminal there is a progress bar meanwhile. When the last item is done, one line reports
    how many there were and how long they took; elsewhere (files, notebooks) that line is all.
    `total` is the number of items, where `items` does not know its length.

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


def collect(dataset: "tf.data.Dataset", description: str) -> np.ndarray:
    """Put the examples of a finite dataset, tensors of one shape, into one array; see `track`.

    Raises:
        ValueError: There is no example, as when a filter left none.

    >>> import tensorflow as tf
    >>> collect(tf.data.Dataset.range(3), "Counting")
    Counting: 3 in 0.0 s
    array([0, 1, 2])
    """
    examples = list(track(dataset.as_numpy_iterator(), description))
    if not examples:
        checks.fail(
            "No example is left.",
            while_doing=description,
            remedy="The data are empty, or every example was filtered out.",
        )
    return np.stack(examples)


def saving_on_interrupt(
    model: "keras.Model", log_dir: str | os.PathLike[str] | None
) -> "AbstractContextManager[keras.callbacks.Callback]":
    """Let Ctrl-C end training cleanly, with what was learned so far saved.

    Pass `fit` (or `TrainingLoop.fit`) the callback that the block begins with. On Ctrl-C the step
    or the validation batch in progress is finished on all replicas, the model is saved as
    `log_dir/interrupted.keras` (with None not at all), and `KeyboardInterrupt` is raised; `run`
    turns that into exit code 130. Where `kdpkit.callbacks.Resume` saves the state of training
    instead, the sentence names its directory. A second Ctrl-C stops at once and saves nothing.
    Outside the main thread, and where Ctrl-C was being ignored, nothing changes.

    >>> from kdpkit import testing
    >>> model = testing.tiny_classifier()
    >>> model.compile("sgd", "mse")
    >>> with saving_on_interrupt(model, log_dir=None) as stop:
    ...     history = model.fit(np.ones((2, 4)), np.ones((2, 3)), verbose=0, callbacks=[stop])
    """
    from kdpkit._internal import interrupt

    return interrupt.saving(model, None if log_dir is None else storage.path(log_dir))


def resuming(
    directory: str | os.PathLike[str] | None,
    train: Any,
    watching: "Iterable[keras.callbacks.Callback]",
) -> "tuple[Any, list[keras.callbacks.Callback]]":
    """Return the dataset and callbacks with which a run goes on from its last state.

    The states are in `directory`, such as `args.resume`; None changes nothing. What `train` may be
    is documented at `kdpkit.callbacks.Resume.track`; `watching` are the callbacks so far.

    >>> resuming(None, "data", ["callback"])
    ('data', ['callback'])
    """
    if directory is None:
        return train, [*watching]
    from kdpkit import callbacks

    resume = callbacks.Resume(directory)
    return resume.track(train), [*watching, resume]


def run(main: Callable[[], Any]) -> None:
    """Run a recipe's `main` as a program: errors of the caller end in one sentence.

    Exit code 2 with the sentence for bad input (`InputError`, which recipes may raise too), 130
    for Ctrl-C, 43 where another process of the training is gone, else Python's own: 0, or 1 with
    the traceback of what was not foreseen.

    `main` takes its flags from the command line when it is called without arguments.
    """
    from kdpkit._internal import processes

    try:
        main()
        return
    except errors.InputError as error:
        code, sentence = 2, str(error)
    except errors.ProcessLostError as error:
        code, sentence = processes.EXIT_CODE, str(error)
    except KeyboardInterrupt:
        code, sentence = 130, "interrupted."
    processes.leave_without_waiting(code)
    print(f"{Path(sys.argv[0]).name}: {sentence}", file=sys.stderr)
    raise SystemExit(code)
