"""Keras, or one sentence where its backend keeps it from being imported."""

import os

from kdpkit import errors


def require() -> None:
    """Import Keras; its backend is chosen by now, by a target or by the environment."""
    try:
        import keras  # noqa: F401 it is there for those who come after
    except (ImportError, ValueError) as error:  # the latter for a backend that there is not
        first, *_ = str(error).splitlines() or [""]
        raise errors.InputError(
            f"Keras cannot be imported with its backend ({type(error).__name__}: {first}). "
            f"Received: KERAS_BACKEND={os.environ.get('KERAS_BACKEND')!r}. Set "
            "KERAS_BACKEND=tensorflow or KERAS_BACKEND=jax; `kdpkit env` lists what is installed."
        ) from error
