"""Makes the processes of the tests, and those that they start, start sooner.

Half of the time that tests take is that of processes which import the frameworks, and a fifth of an
import is Python's collector, which looks for garbage where there is none. On JAX more than half is
XLA, which compiles each program as if it were to run for days. Python runs this file when it starts
with this directory on its path.
"""

import gc
import os

gc.set_threshold(100_000, 50, 1000)

if os.environ.get("KERAS_BACKEND") == "jax":
    flags = os.environ.get("XLA_FLAGS", "")
    if (quick := os.environ.get("KDPKIT_TESTS_XLA_FLAGS", "")) not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {quick}".strip()
