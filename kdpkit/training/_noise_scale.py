"""The gradient noise scale: whether a larger batch still pays, in numbers and in a sentence."""

import dataclasses
import math
import statistics

import numpy as np

from kdpkit._internal import checks

_FEWEST_STEPS = 3  # that an interval is drawn from
_CLEAR = 4  # high over low, up to which an interval around the batch is an answer


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoiseScale:
    """The gradient noise scale of some training steps: whether more replicas will help.

    It is `tr(S) / |G|^2`, in examples: `G` is the gradient, the mean over all examples there could
    be, and `S` the covariance of a single example's. A mean over as many examples has as much noise
    as gradient. McCandlish et al. 2018, "An Empirical Model of Large-Batch Training"
    (arXiv:1812.06162), call it the simple noise scale, and found it to be about the critical batch
    size: there training needs twice the steps that it would need with endless batches, and twice
    the examples that it would need with tiny ones. Below it twice the replicas need almost half the
    steps, above it almost as many. It grows while a model learns, often tenfold and more.

    >>> scale = NoiseScale(
    ...     estimate=1280.0, low=1100.0, high=1500.0, steps=400, global_batch_size=64.0
    ... )
    >>> print(scale)
    More replicas will still help: the global batch of 64 examples is 1/20 of the noise scale, 1,280
    examples (95 %: 1,100 to 1,500, from 400 steps).
    Twice the replicas need about 52 % of the steps, and 1.05 times the examples.
    >>> scale.relative_steps(64), scale.relative_examples(64)
    (21.0, 1.05)

    Args:
        estimate: The noise scale in examples. Infinite where the gradient does not stand out from
            the noise, NaN where there was nothing to estimate it from.
        low: The lower end of a 95 % confidence interval.
        high: Its upper end; infinite where the steps are too few or too noisy to know one.
        steps: The steps that it was estimated from.
        global_batch_size: Examples behind an update of the weights, on average.
    """

    estimate: float
    low: float
    high: float
    steps: int
    global_batch_size: float

    def relative_steps(self, global_batch_size: float) -> float:
        """Return the steps that batches of a size need, over those that endless batches need.

        By the paper's law, `(steps / fewest - 1) (examples / fewest - 1) = 1`, that is
        `1 + noise scale / batch size`.
        """
        return 1 + self.estimate / checks.number("global_batch_size", global_batch_size, above=0)

    def relative_examples(self, global_batch_size: float) -> float:
        """Return the examples that batches of a size need, over those that tiny batches need.

        By the same law that is `1 + batch size / noise scale`.
        """
        size = checks.number("global_batch_size", global_batch_size, above=0)
        return 1 + size / self.estimate if self.estimate else math.inf

    relative_rows = relative_examples  # its former name

    def __str__(self) -> str:
        """Report in two lines whether more replicas will help."""
        if not self.steps:
            return (
                "There is no noise scale: in no step were there finite gradients of two parts "
                "that had examples."
            )
        if math.isnan(self.estimate):
            return f"There is no noise scale {self._source()}: their gradients were zero."
        if self.low == 0 and self.high == math.inf:
            return f"The noise scale cannot be estimated {self._source()}. Train for more."
        batch = f"the global batch of {_number(self.global_batch_size)} examples"
        return f"{self._verdict()}{batch} {self._relation()}\n{self._forecast()}"

    def _source(self) -> str:
        return f"from {self.steps} step{'s' if self.steps > 1 else ''}"

    def _verdict(self) -> str:
        if self.low > self.global_batch_size:
            return "More replicas will still help: "
        if self.high < self.global_batch_size:
            return "More replicas will help little: "
        if self.high <= _CLEAR * self.low:
            return "More replicas will help somewhat: "
        return "It is not clear yet whether more replicas will help: "

    def _relation(self) -> str:
        source = self._source()
        if math.isinf(self.high):
            least = _number(self.low)
            return f"stands against a noise scale of {least} examples or more (95 %, {source})."
        size = _size_of(self.global_batch_size, self.estimate)
        estimate, low, high = map(_number, (self.estimate, self.low, self.high))
        return f"is {size} the noise scale, {estimate} examples (95 %: {low} to {high}, {source})."

    def _forecast(self) -> str:
        """Report what twice the batch needs, by an end of the interval if need be."""
        about, scale = ("about", self.estimate) if self.high < math.inf else ("at most", self.low)
        examples = (scale + 2 * self.global_batch_size) / (scale + self.global_batch_size)
        return (
            f"Twice the replicas need {about} {50 * examples:.0f} % of the steps, and "
            f"{examples:.2f} times the examples."
        )


def _size_of(batch: float, scale: float) -> str:
    """Compare a batch with the noise scale.

    >>> [_size_of(batch, 100.0) for batch in (2, 50, 90, 300)], _size_of(2, 0.0)
    (['1/50 of', '1/2 of', 'about', '3 times'], 'above')
    """
    if not scale:
        return "above"
    if batch < scale / 1.5:
        return f"1/{_number(scale / batch)} of"
    return "about" if batch < 1.5 * scale else f"{_number(batch / scale)} times"


def estimated(groups: np.ndarray | list[list[float]], *, batches_in_an_update: int) -> NoiseScale:
    """Estimate the noise scale from what some groups of steps add up to.

    The steps of a group lie as far apart as those of any other, so that all groups saw the same
    stretches of training, and differ by the noise alone. The quotient of two sums is no normal
    variable where the gradient hardly stands out from the noise; so the interval is Fieller's: all
    values `b` for which `noise - b * gradient` is within 95 % of zero.

    >>> groups = [[1, 8, 8.0 + i, 80.0 - i] for i in (-1, 0, 0, 1)]
    >>> scale = estimated(groups, batches_in_an_update=2)
    >>> scale.estimate, scale.steps, scale.global_batch_size
    (10.0, 4, 16.0)
    >>> round(scale.low, 2), round(scale.high, 2)
    (8.46, 12.13)

    Args:
        groups: Of each group its steps, their examples, the sum of `examples * |G|^2` and that of
            `examples * tr(S)`; the sums of unbiased estimates of each step.
        batches_in_an_update: Batches whose gradients the optimizer collects.
    """
    sums = np.asarray(groups, np.float64)
    sums = sums[sums[:, 0] > 0]
    steps, num_examples, gradient, noise = map(float, sums.sum(axis=0))
    low, high = _interval(sums[:, 1:]) if len(sums) >= _FEWEST_STEPS else (0.0, math.inf)
    return NoiseScale(
        estimate=noise / gradient if gradient > 0 else math.inf if noise > 0 else math.nan,
        low=low,
        high=high,
        steps=int(steps),
        global_batch_size=batches_in_an_update * num_examples / steps if steps else math.nan,
    )


def _interval(groups: np.ndarray) -> tuple[float, float]:
    """Return the ends of Fieller's interval for the quotient of the last column over the second."""
    num_examples, *_ = total = groups.sum(axis=0)
    _, gradient, noise = np.maximum(total, 0)  # a gradient's square is not below 0
    count = len(groups)
    apart = (groups - np.outer(groups[:, 0] / num_examples, total))[:, 1:]
    square = _student(count - 1) ** 2 * count / (count - 1)
    (of_gradient, of_both), (_, of_noise) = square * apart.T @ apart
    # The interval is where this polynomial of the noise scale is not positive.
    a, b, c = gradient**2 - of_gradient, 2 * (of_both - gradient * noise), noise**2 - of_noise
    roots = sorted(map(float, np.roots([a, b, c]).real)) or [0.0]
    low = 0.0 if c <= 0 else roots[0] if a > 0 else roots[-1]
    return max(low, 0.0), max(roots[-1], 0.0) if a > 0 else math.inf


def _student(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t, from 2 degrees of freedom on to 1 %.

    The Cornish-Fisher expansion of Abramowitz and Stegun, 26.7.5.

    >>> [round(_student(freedom), 2) for freedom in (3, 10, 63)]
    [3.18, 2.23, 2.0]
    """
    x = statistics.NormalDist().inv_cdf(0.975)
    terms = (
        x,
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))


def _number(value: float) -> str:
    """Format a number; a small one with two digits.

    >>> [_number(value) for value in (1279.7, 12.3, 2.345, 0.0123)]
    ['1,280', '12', '2.3', '0.012']
    """
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
