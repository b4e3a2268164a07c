"""Keras, or one sentence where its backend keeps it from being imported."""

import os

from kdpkit import errors
from kdpkit._internal import checks
from kdpkit.experiment import _framework_messages


def require() -> None:
    """Import Keras; its backend is chosen by now, by a target or by the environment."""
    try:
        with _framework_messages.hidden():
            import keras  # noqa: F401 it is there for those who come after
    except (ImportError, ValueError) as error:  # the latter for a backend that there is not
        raise errors.InputError(
            f"Keras cannot be imported with its backend ({type(error).__name__}: "
            f"{checks.first_line(error)}). "
            f"Received: KERAS_BACKEND={os.environ.get('KERAS_BACKEND')!r}. Set "
            "KERAS_BACKEND=tensorflow or KERAS_BACKEND=jax; `kdpkit env` lists what is installed."
        ) from error
