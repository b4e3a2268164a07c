"""Recipes as programs: imports, progress, Ctrl-C, resuming and exit codes."""

import contextlib
import gc
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

from kdpkit import errors
from kdpkit._internal import checks, garbage_collection, storage
from kdpkit.experiment import _framework_messages

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

Item = TypeVar("Item")

_EXTRAS = {  # of kdpkit, by what they install
    "jax": "jax",
    "tensorflow": "recipes",
    "tensorflow_text": "recipes",
    "keras_hub": "recipes",
    "matplotlib": "recipes",
    "sklearn": "recipes",
}


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Import Keras and its backend a fifth faster, at the top of a program.

    Python's garbage collector is paused meanwhile, and permanently excludes the imported objects
    (`gc.freeze`), unless Keras is already loaded, as in a notebook. TensorFlow's messages about how
    it was built are hidden unless TF_CPP_MIN_LOG_LEVEL is 0.

    If a package of the recipes, such as TensorFlow, is not installed, a program ends with one
    sentence that names what to install, and exit code 2.

    Raises:
        kdpkit.errors.PackageInputError: The same, in a module that is imported or in a notebook.

    >>> with quick_imports():
    ...     import keras
    """
    caller = sys._getframe(2).f_globals  # 1 is the context manager's
    is_program = caller.get("__name__") == "__main__" and "__file__" in caller  # not in a notebook
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    is_quick = "keras" not in sys.modules
    try:
        quickly = garbage_collection.uncollected() if is_quick else contextlib.nullcontext()
        with _framework_messages.hidden(), quickly:
            yield
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        backend = {"KERAS_BACKEND": error.name} if error.name == "jax" else {}
        sentence = checks.sentence(
            f"`{error.name}` is not installed.",
            backend,
            f'Run `pip install "kdpkit[{_EXTRAS[error.name]}]"`.',
        )
        if is_program:
            _end(2, sentence)
        raise errors.PackageInputError(sentence) from error
    if is_quick:
        gc.freeze()


def track(items: Iterable[Item], description: str, *, total: int | None = None) -> Iterator[Item]:
    """Yield the items one by one, and show the progress.

    A terminal shows a progress bar. After the last item one line reports the number of items and
    the time; elsewhere (files, notebooks) there is only that line. `total` is the number of items,
    if `items` has no length.

    >>> [word.upper() for word in track(["a", "b"], "Shouting")]
    Shouting: 2 in 0.0 s
    ['A', 'B']
    """
    from rich.console import Console
    from rich.progress import Progress

    console = Console()
    started, count = time.perf_counter(), 0
    with contextlib.ExitStack() as stack:
        if console.is_terminal:  # elsewhere rich 13 prints an empty line, even if disabled
            progress = stack.enter_context(Progress(console=console, transient=True))
            items = progress.track(items, total=total, description=description)
        for item in items:
            yield item
            count += 1
    print(f"{description}: {count:,} in {time.perf_counter() - started:.1f} s")


def collect(dataset: "tf.data.Dataset", description: str) -> np.ndarray:
    """Collect the examples of a finite dataset, tensors of one shape, in an array; see `track`.

    Raises:
        ValueError: There is no example, for example because a filter removed all.

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
            remedy="Check that the data are not empty and that the filter keeps some examples.",
        )
    return np.stack(examples)


def saving_on_interrupt(
    model: "keras.Model", log_dir: str | os.PathLike[str] | None
) -> "AbstractContextManager[keras.callbacks.Callback]":
    """End training cleanly on Ctrl-C, and save the model.

    Pass the callback that the `with` statement returns to `fit` (or `TrainingLoop.fit`). On Ctrl-C
    the current step or validation batch is finished on all replicas, the model is saved as
    `log_dir/interrupted.keras` (not with None), and `KeyboardInterrupt` is raised; `run` turns that
    into exit code 130. If `kdpkit.callbacks.Resume` saves the training state instead, the message
    names its directory. A second Ctrl-C stops at once and saves nothing. This does nothing outside
    the main thread, or if Ctrl-C was already ignored.

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
    """Return the dataset and callbacks that resume a run from its last state.

    The states are in `directory`, such as `args.resume`; None changes nothing. For `train` see
    `kdpkit.callbacks.Resume.track`; `watching` are the other callbacks.

    >>> resuming(None, "data", ["callback"])
    ('data', ['callback'])
    """
    if directory is None:
        return train, [*watching]
    from kdpkit import callbacks

    resume = callbacks.Resume(directory)
    return resume.track(train), [*watching, resume]


def run(main: Callable[[], Any]) -> None:
    """Run a recipe's `main` as a program: invalid input ends with one sentence.

    The exit code is 2 for invalid input (`InputError`, which recipes can raise too), 130 after
    Ctrl-C, 43 if another process was lost, else Python's own: 0, or 1 with the traceback of any
    other error.

    Without arguments `main` takes its flags from the command line.
    """
    from kdpkit._internal import processes

    try:
        with processes.explain_lost_process():
            main()
        return
    except errors.InputError as error:
        code, sentence = 2, str(error)
    except errors.ProcessLostError as error:
        code, sentence = errors.LEFT_ALONE, str(error)
    except KeyboardInterrupt:
        code, sentence = 130, "interrupted."
    processes.leave_without_waiting(code)
    _end(code, sentence)


def _end(code: int, sentence: str) -> NoReturn:
    print(f"{Path(sys.argv[0]).name}: {sentence}", file=sys.stderr)
    raise SystemExit(code)
