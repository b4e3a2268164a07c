"""Where the time of a BERT step goes: its parts, its products of matrices, and the machine's own.

python -m tests.accelerator.profile    # on a CPU: BERT tiny in float32
"""

# ruff: noqa: T201 a command-line program prints

import collections
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from tests.accelerator import bert
from tests.accelerator.results import Results
from tests.accelerator.speed import size_of
from tests.benchmarks.paired import Row, Spread, compared, in_turns, seconds_of, table

ON_CPU = bert.Size(2, 128, 2, 30_522, 128, 19, batch=32, steps=1)
_SIDE = 2048  # of the machine's own product; on an accelerator four times as long


def measure(results: Results, *, rehearse: bool) -> None:
    """Measure the BERT of the speed's part."""
    size = size_of(bert, rehearse=rehearse)
    results.add(*rows(size, "mixed_bfloat16", side=64 if rehearse else 4 * _SIDE, rounds=5))


def rows(size: bert.Size, policy: str, *, side: int, rounds: int) -> list[Row]:
    """Time the parts alternately; the last rows say how near they come to the machine's product."""
    parts, products = _parts(size, policy)
    dtype = jnp.bfloat16 if "bfloat16" in policy else jnp.float32
    square = jnp.ones((side, side), dtype)
    machine = jax.jit(jnp.matmul).lower(square, square).compile()
    parts["the machine's own product"] = lambda: machine(square, square)
    timed = {name: lambda of=of: 1e3 * seconds_of(lambda: _done(of)) for name, of in parts.items()}
    figures = in_turns(timed, rounds)
    peak = [2 * side**3 / ms for ms in figures.pop("the machine's own product")]
    found = [Row(f"BERT, {name}", "ms", Spread.of(ms)) for name, ms in figures.items()]
    for name, flops in (("step", bert.work(size).flops / size.steps), ("products alone", products)):
        rates = [flops / ms / 1e9 for ms in figures[name]]
        limits = [limit / 1e9 for limit in peak]
        found.append(compared(f"BERT, {name}, against one product", "TFLOP/s", rates, limits))
    return found


def _done(call: Callable[[], Any]) -> None:
    jax.block_until_ready(call())


def _parts(size: bert.Size, policy: str) -> tuple[dict[str, Callable[[], Any]], float]:
    """Return by name what computes a part of a step, and the operations of its products."""
    import keras

    from kdpkit.training import MaskedLMLoop

    loop = MaskedLMLoop(bert.model_of(size, policy=policy), optimizer=bert.optimizer())
    model, optimizer = loop.model, loop.model.optimizer
    optimizer.build(model.trainable_variables)
    trainable = [jnp.array(variable.value) for variable in model.trainable_variables]
    slots = [jnp.array(variable.value) for variable in optimizer.variables]
    x, y, _ = bert.batch_of(size)

    def loss_of(trainable: list[Any], x: Any, y: Any) -> Any:
        pairs = zip(model.trainable_variables, trainable, strict=True)
        with keras.StatelessScope(state_mapping=[*pairs]):
            losses, _ = loop.per_example_loss(x, y, training=True)
        return losses.mean()

    def step(trainable: list[Any], slots: list[Any], x: Any, y: Any) -> Any:
        gradients = jax.grad(loss_of)(trainable, x, y)
        return optimizer.stateless_apply(slots, gradients, trainable)

    gradient = jax.jit(jax.grad(loss_of))
    gradients = gradient(trainable, x, y)
    functions = {
        "step": (jax.jit(step), (trainable, slots, x, y)),
        "forward": (jax.jit(loss_of), (trainable, x, y)),
        "forward and backward": (gradient, (trainable, x, y)),
        "update": (jax.jit(optimizer.stateless_apply), (slots, gradients, trainable)),
    }
    products = [*_products(jax.make_jaxpr(step)(trainable, slots, x, y).jaxpr)]
    functions["products alone"] = (_one_after_the_other(products), ())
    called = {name: lambda f=f, given=given: f(*given) for name, (f, given) in functions.items()}
    return called, sum(_operations(product) for product in products)


def _products(jaxpr: Any, times: int = 1) -> Iterator[Any]:
    """Yield the products of matrices in a program, those in a loop as often as it runs."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield from [equation] * times
        again = times * (equation.params["length"] if equation.primitive.name == "scan" else 1)
        for inner in core.jaxprs_in_params(equation.params):
            yield from _products(inner, again)


def _operations(product: Any) -> float:
    (contracted, _), _ = product.params["dimension_numbers"]
    shape = product.invars[0].aval.shape
    return 2.0 * np.prod(product.outvars[0].aval.shape) * np.prod([shape[i] for i in contracted])


def _one_after_the_other(products: list[Any]) -> Callable[[], Any]:
    """Return a call that computes each product as often as it is there, with nothing between."""
    kinds: collections.Counter = collections.Counter()
    calls = {}
    for product in products:
        shapes = [of.aval for of in product.invars]
        key = str((shapes, product.params["dimension_numbers"]))
        kinds[key] += 1
        if key not in calls:
            given = [jnp.ones(of.shape, of.dtype) for of in shapes]
            one = jax.jit(lambda a, b, of=product: of.primitive.bind(a, b, **of.params))
            calls[key] = one, given
    return lambda: [one(*given) for key, (one, given) in calls.items() for _ in range(kinds[key])]


def main() -> None:
    """Print the table of this machine, whose CPU trains BERT tiny in float32."""
    print(table(rows(ON_CPU, "float32", side=_SIDE, rounds=9)))


if __name__ == "__main__":
    main()
