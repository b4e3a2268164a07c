"""What a user may want to catch, and the exit codes of programs; importing it loads no framework.

>>> from kdpkit import errors, scaling
>>> try:
...     scaling.split_batch(10, 0)
... except errors.InputError as error:
...     print(error)
`replicas` must be a positive integer. Received: replicas=0.

An `InputError` about a file is an `OSError` too (`FileNotFoundError` in object storage), and one
about a package that is not installed an `ImportError`.

A program exits with `STOPPED` where SIGTERM ended it and `callbacks.Resume` has saved its state,
and with `LEFT_ALONE` where it lost another process; any other code is a failure of its own.
"""

__all__ = ["LEFT_ALONE", "STOPPED", "InputError", "ProcessLostError"]

STOPPED = 42  # as in TensorFlow's PreemptionCheckpointHandler
LEFT_ALONE = 43


class InputError(ValueError):
    """An argument, a model or a dataset is invalid; the message names it, its value and a fix."""

    ag_pass_through = True  # TensorFlow's AutoGraph would raise another type.


class ProcessLostError(RuntimeError):
    """Another process that this one trains with is gone."""


class FileInputError(InputError, OSError):
    """A file that the caller named is missing, unreadable or damaged."""

    def __str__(self) -> str:
        """Return the sentence, without the `[Errno ...]` of an `OSError`."""
        return str(self.args[0]) if self.args else ""


class RemoteFileError(FileInputError):
    """A file in object storage cannot be used; `strerror` holds only the reason."""


class NoRemoteFileError(RemoteFileError, FileNotFoundError):
    """There is no such file, directory or bucket."""


class PackageInputError(InputError, ImportError):
    """What the caller asked for needs a package that is not installed."""
