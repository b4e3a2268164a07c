"""Python's garbage collector, kept out of work that makes many objects and no garbage."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Have nothing collected in the block, whoever allocates; afterwards it is as it was.

    The collector walks over all objects there are, again and again while they grow in number.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
