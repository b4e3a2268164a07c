"""Small programs in the manner of public Keras guides and examples, as their authors would write.

A module holds one program, or a few of a kind. Each is a `Program`: a function that builds and
compiles the model, as on one device, and one that gives the arguments of `fit`. Nothing in them
knows of replicas.
"""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Program:
    """A training program as somebody would publish it.

    Attributes:
        name: What it is, in a few words.
        build: Builds and compiles the model; runs in the strategy's scope.
        data: Gives the arguments of `fit`: an uneven first batch, and an uneven last one.
        backends: Where it runs; a step of its own with `tf.GradientTape` runs on TensorFlow alone.
        tolerance: The largest difference of any weight over the largest change of any weight.
    """

    name: str
    build: Callable[[], Any]
    data: Callable[[], dict[str, Any]]
    backends: tuple[str, ...] = ("tensorflow", "jax")
    tolerance: float = 1e-5
